package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/core/instance"
	"lull/internal/host"
	"lull/internal/host/hosttest"
	"lull/internal/lib/humax/humaxtest"
	"lull/internal/protocol/hostctl"
)

func testAPI() http.Handler {
	k := &hosttest.Kernel{}
	h := host.New(host.Config{Runtimes: map[string]host.Runtime{"process": k}, Records: hosttest.NewDisk(), KeepEvents: 16,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), NewGate: func(t host.RelayTarget) (host.Gate, error) {
			return &hosttest.Gate{K: k, Waker: t.Waker}, nil
		}})
	k.OnExit = h.OnExit
	handler, _ := (&API{Host: h, Version: "test", Status: func() hostctl.Status { return hostctl.Status{} }}).Handler()
	return handler
}

func ask(h http.Handler, method, path, body string) (int, string) {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

// TestAPIAnswers checks the responses to a table of requests: a problem document
// names the field, and a bad request changes nothing.
func TestAPIAnswers(t *testing.T) {
	h := testAPI()
	for _, c := range []struct {
		method, path, body string
		code               int
		says               string
	}{
		{"GET", "/api/v1/instances", "", 200, "[]"},
		{"GET", "/api/v1/instances/a", "", 404, `cannot find an instance \"a\"`},
		{"POST", "/api/v1/instances", `{"name":"A B","runtime":"process","command":["x"],"start":true}`, 422, "as a name"},
		{"POST", "/api/v1/instances", `{"name":"a","runtime":"vm","command":["x"],"start":true}`, 422, "there is no runtime"},
		{"POST", "/api/v1/instances", `{"name":"a","runtime":"process","command":["x"],"start":true,"colour":1}`, 422, "colour"},
		{"POST", "/api/v1/instances", `{"name":"a","runtime":"process","command":["x"],"start":true,"pause_after":-1}`, 422, "pause_after"},
		{"POST", "/api/v1/instances", `{"name":"a","runtime":"process","command":["x"],"start":true,"expose":[{"listen":"192.0.2.1:80","target":"192.0.2.1:80","path":"auto"}]}`, 422, "this machine has no address 192.0.2.1"},
		{"POST", "/api/v1/instances", `{`, 422, "not JSON at line 1, byte 1"},
		{"POST", "/api/v1/instances", `{"name":"a","command":["` + strings.Repeat("x", maxBody) + `"]}`, 413, ""},
		{"POST", "/api/v1/instances", `{"name":"a","runtime":"process","command":["x"],"start":true,"pause_after":1.5}`, 201, `"state":"running"`},
		{"POST", "/api/v1/instances", `{"name":"a","runtime":"process","command":["x"],"start":true}`, 409, "already"},
		{"POST", "/api/v1/instances/a/leases", `{"ttl_seconds":0}`, 422, "ttl"},
		{"POST", "/api/v1/instances/a/leases", `{"ttl_seconds":60,"holder":"h"}`, 200, `"holder":"h"`},
		{"POST", "/api/v1/instances/a/pause", "", 409, "holds it"},
		{"DELETE", "/api/v1/instances/a/leases/x", "", 404, "cannot find a lease of x on a"},
		{"DELETE", "/api/v1/instances/a/leases/h", "", 200, "[]"},
		{"POST", "/api/v1/instances/a/pause", "", 200, `"state":"paused"`},
		{"GET", "/api/v1/instances/a/why", "", 200, `"change":["a connection to it, or: lull resume a"]`},
		{"POST", "/api/v1/instances/a/snooze", `{"until":"2001-01-01T00:00:00Z"}`, 422, "cannot snooze"},
		{"POST", "/api/v1/instances/a/resume", "", 200, `"state":"running"`},
		{"POST", "/api/v1/instances/a/stop?disable=true", "", 200, `"enabled":false`},
		{"GET", "/api/v1/instances/a/why", "", 200, "It is disabled"},
		{"POST", "/api/v1/instances/a/resume", "", 409, "stopped"},
		{"POST", "/api/v1/instances/a/leases", `{"ttl_seconds":60}`, 409, "stopped"},
		{"DELETE", "/api/v1/instances/a", "", 204, ""},
		{"GET", "/api/v1/instances", "", 200, "[]"},
		{"GET", "/openapi.json", "", 200, `"3.1.0"`},
		{"GET", "/api/v1/events?since=banana", "", 422, "query.since"},
		{"GET", "/api/v1/events?since=-1", "", 422, "query.since"},
		{"GET", "/api/v1/events?kept=banana", "", 422, "query.kept"},
		{"GET", "/api/v1/events?kept=true&since=now", "", 200, ""},
		{"GET", "/api/v1/instances?memory=banana", "", 422, "query.memory"},
		{"GET", "/api/v1/instances?banana=1", "", 422, "banana"},
		{"GET", "/api/v1/instances?memory=%zz", "", 422, "cannot read the query"},
		{"POST", "/api/v1/instances", `{"name":"b","runtime":"process","command":["x"],"start":true}`, 201, ""},
		{"GET", "/api/v1/instances/b/logs?follow=banana", "", 422, "follow"},
		{"GET", "/api/v1/instances/b/logs?banana=1", "", 422, "banana"},
		{"GET", "/api/v1/instances/b/logs?tail=-2", "", 422, "tail"},
		{"GET", "/api/v1/instances/b/why?at=banana", "", 422, "banana"},
		{"POST", "/api/v1/instances/b/stop", "{}", 422, "this route takes no body"},
		{"POST", "/api/v1/instances/b/stop", "{bad", 422, "this route takes no body"},
		{"POST", "/api/v1/instances/b/pause?force=banana", "", 422, "query.force"},
		{"DELETE", "/api/v1/instances/b", "[1]", 422, "this route takes no body"},
		{"GET", "/api/v1/instances/b", "", 200, `"state":"running"`},
	} {
		code, body := ask(h, c.method, c.path, c.body)
		if code != c.code || !strings.Contains(body, c.says) {
			t.Errorf("%s %s %.80s: %d %s; want %d and %q", c.method, c.path, c.body, code, body, c.code, c.says)
		}
		if code >= 400 && code != 413 && !strings.Contains(body, `"status"`) {
			t.Errorf("%s %s: no problem document: %s", c.method, c.path, body)
		}
	}
}

// TestProblems checks the status for each kind of error, however the error is
// wrapped.
func TestProblems(t *testing.T) {
	for want, err := range map[int]error{
		http.StatusServiceUnavailable:  &host.BusyError{Name: "a", What: "start"},
		http.StatusConflict:            &host.RefusedError{Name: "a", What: "pause"},
		http.StatusNotFound:            &host.NotFoundError{Name: "a"},
		http.StatusUnprocessableEntity: &host.InvalidError{Err: errors.New("no")},
		http.StatusGatewayTimeout:      context.DeadlineExceeded,
		http.StatusInternalServerError: errors.New("the disk is broken"),
	} {
		var p huma.StatusError
		if !errors.As(problem(fmt.Errorf("while starting: %w", err)), &p) || p.GetStatus() != want {
			t.Errorf("%T becomes %v, want status %d", err, p, want)
		}
	}
	var p huma.StatusError
	if full := (&instance.NoRoomError{What: "its memory"}); !errors.As(problem(full), &p) || p.GetStatus() != http.StatusConflict {
		t.Errorf("no room on the disk becomes %v", p)
	}
}

// TestNoListIsNull checks for every response type that neither the JSON of its
// empty value nor the OpenAPI document allows null for a list.
func TestNoListIsNull(t *testing.T) {
	h := host.New(host.Config{Records: hosttest.NewDisk(), KeepEvents: 16})
	_, api := (&API{Host: h, Version: "test", Status: func() hostctl.Status { return hostctl.Status{} }}).Handler()
	found, types, err := humaxtest.Nulls(api)
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range append(found, humaxtest.Nullable(api.OpenAPI())...) {
		t.Errorf("%s may be null", at)
	}
	if types < 15 {
		t.Errorf("only %d types were checked", types)
	}
}

// TestTheStreamBeginsWithoutAnEvent checks that a client gets the response header
// before the first event.
func TestTheStreamBeginsWithoutAnEvent(t *testing.T) {
	if code, body := ask(testAPI(), "GET", "/api/v1/events?kept=true", ""); code != 200 || body != ": events\n\n" {
		t.Errorf("nothing is kept: %d %q", code, body)
	}
	synctest.Test(t, func(t *testing.T) {
		h := testAPI() // created inside the bubble, because its channels must belong to the bubble
		ctx, leave := context.WithCancel(t.Context())
		w := httptest.NewRecorder()
		var served sync.WaitGroup
		served.Go(func() { h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, "GET", "/api/v1/events", nil)) })
		synctest.Wait()
		if !w.Flushed || w.Code != 200 || w.Header().Get("Content-Type") != "text/event-stream" {
			t.Errorf("no head before the first event: %d %v", w.Code, w.Header())
		}
		leave()
		served.Wait()
	})
}

// FuzzAPICreate checks that a random request body is answered with a success or a
// problem document, never with a crash, and that a refused body creates no
// instance.
func FuzzAPICreate(f *testing.F) {
	f.Add(`{"name":"a","runtime":"process","command":["x"],"start":false}`)
	f.Add(`{"name":"a","runtime":"process","command":["x"],"start":false,"expose":[{"listen":"127.0.0.1:1","target":"127.0.0.1:2","path":"auto"}]}`)
	f.Add(`{"pause_after":1e99}`)
	f.Fuzz(func(t *testing.T, body string) {
		h := testAPI()
		code, answer := ask(h, "POST", "/api/v1/instances", body)
		if code >= 500 {
			t.Fatalf("%q: %d %s", body, code, answer)
		}
		_, list := ask(h, "GET", "/api/v1/instances", "")
		if (code == 201) != (strings.TrimSpace(list) != "[]") {
			t.Fatalf("%q: %d, and then %s", body, code, list)
		}
	})
}
