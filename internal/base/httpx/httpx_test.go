package httpx

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/base/memnet"
	"lull/internal/base/task"
)

var _ task.Task = (*Server)(nil)

// logBuffer keeps log lines of several goroutines.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// bubble runs a server and a client on a network in memory.
func bubble(t *testing.T, s *Server, use func(ctx context.Context, c *Client, stop func() error)) {
	synctest.Test(t, func(t *testing.T) {
		n := &memnet.Network{}
		l, err := n.Listen("api:80")
		if err != nil {
			t.Fatal(err)
		}
		s.Name, s.Listener = "api", l
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		<-s.Ready()
		c, err := NewClient("http://api")
		if err != nil {
			t.Fatal(err)
		}
		transport := &http.Transport{DialContext: n.DialContext}
		c.HTTP.Transport = transport
		stop := sync.OnceValue(func() error {
			cancel()
			transport.CloseIdleConnections()
			return <-done
		})
		use(t.Context(), c, stop)
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

type thing struct {
	Name string `json:"name"`
	Size int    `json:"size"`
}

func TestRequests(t *testing.T) {
	var logged logBuffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	mux := http.NewServeMux()
	mux.Handle("POST /echo", Handle(log, func(w http.ResponseWriter, r *http.Request) error {
		var in thing
		if err := ReadJSON(r, &in); err != nil {
			return err
		}
		return WriteJSON(w, http.StatusCreated, in)
	}))
	mux.Handle("GET /refused", Handle(log, func(w http.ResponseWriter, r *http.Request) error {
		return fmt.Errorf("wrapped: %w", &Problem{Status: http.StatusConflict, Code: "lease_held", Detail: "cannot pause web: ci holds it"})
	}))
	mux.Handle("GET /broken", Handle(log, func(http.ResponseWriter, *http.Request) error { return errors.New("secret detail") }))
	mux.Handle("GET /panic", http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("secret panic") }))
	mux.Handle("GET /half", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Write([]byte(`{"name":"half`))
		panic("in the middle")
	}))
	bubble(t, &Server{Handler: mux, MaxBody: 100, Log: log}, func(ctx context.Context, c *Client, _ func() error) {
		var out thing
		if err := c.Do(ctx, "POST", "/echo", thing{"web", 3}, &out); err != nil || out != (thing{"web", 3}) {
			t.Errorf("echo: %+v, %v", out, err)
		}
		c.Header.Set(RequestIDHeader, "mine-1")
		for _, tc := range []struct {
			method, path string
			in           any
			status       int
			want         string
		}{
			{"POST", "/echo", thing{Name: strings.Repeat("x", 100)}, 413, "the body has more than 100 bytes"},
			{"POST", "/echo", map[string]any{"size": "big"}, 400, "cannot read the body; body.size: a string stands where a int belongs"},
			{"POST", "/echo", map[string]any{"sise": 1}, 400, "cannot read the body; body.sise: there is no such field"},
			{"POST", "/echo", nil, 400, "cannot read the body; body: it is empty"},
			{"GET", "/refused", nil, 409, "cannot pause web: ci holds it"},
			{"GET", "/broken", nil, 500, "the request failed inside lull; the log has it under its request id"},
			{"GET", "/panic", nil, 500, "the request failed inside lull; the log has it under its request id"},
			{"GET", "/nowhere", nil, 404, "http://api answered 404 Not Found"},
		} {
			err := c.Do(ctx, tc.method, tc.path, tc.in, nil)
			p, ok := errors.AsType[*Problem](err)
			if !ok || p.Status != tc.status || err.Error() != tc.want || p.RequestID != "mine-1" {
				t.Errorf("%s %s: %+v, want %d %s", tc.method, tc.path, err, tc.status, tc.want)
			}
		}
		if err := c.Do(ctx, "GET", "/half", nil, &out); err == nil {
			t.Error("half an answer was taken for a whole one")
		}
	})
	for _, want := range []string{"secret detail", "secret panic", "in the middle", "request=mine-1"} {
		if !strings.Contains(logged.String(), want) {
			t.Errorf("the log has no %q", want)
		}
	}
}

func TestReadJSON(t *testing.T) {
	for body, want := range map[string]string{
		`{"name":"a"} {}`:     "something follows",
		`{"name":"a"}x`:       "something follows",
		`{"name":`:            "it is cut off",
		`{name}`:              "no JSON at byte 2",
		`[]`:                  "a array stands where a httpx.thing belongs",
		`{"name":"a"}` + "\n": "",
	} {
		err := ReadJSON(httptest.NewRequest("POST", "/", strings.NewReader(body)), &thing{})
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", body, err, want)
		}
	}
}

func TestRequestID(t *testing.T) {
	if id := requestID("ok-1_2.3"); id != "ok-1_2.3" {
		t.Error(id)
	}
	for _, bad := range []string{"", "a b", "a\n", strings.Repeat("x", 65), "é"} {
		if id := requestID(bad); id == bad || len(id) < 20 {
			t.Errorf("%q gave %q", bad, id)
		}
	}
}

// TestStreams: lines and events arrive one by one, outlive the limit of a
// request, and end at once when the server stops.
func TestStreams(t *testing.T) {
	mux := http.NewServeMux()
	discard := slog.New(slog.DiscardHandler)
	mux.Handle("GET /lines", Handle(discard, func(w http.ResponseWriter, r *http.Request) error {
		lines, err := NewLines(w)
		for i := 0; err == nil && i < 5; i++ {
			time.Sleep(time.Minute)
			err = lines.Send(thing{"line", i})
		}
		return err
	}))
	mux.Handle("GET /events", Handle(discard, func(w http.ResponseWriter, r *http.Request) error {
		events, err := NewEvents(w, 3*time.Second)
		for i := 0; err == nil; i++ {
			select {
			case <-Stopping(r.Context()):
				return nil
			case <-r.Context().Done():
				return nil
			case <-time.After(time.Minute):
				err = errors.Join(events.KeepAlive(), events.Send(Event{ID: fmt.Sprint(i), Name: "changed", Data: []byte("a\r\nb")}))
			}
		}
		return err
	}))
	bubble(t, &Server{Handler: mux}, func(ctx context.Context, c *Client, stop func() error) {
		body, err := c.Open(ctx, "GET", "/lines", nil)
		if err != nil {
			t.Error(err)
			return
		}
		begun, n := time.Now(), 0
		for v, err := range ReadLines[thing](body, 1000) {
			n++
			if err != nil || v != (thing{"line", n - 1}) || time.Since(begun) != time.Duration(n)*time.Minute {
				t.Errorf("%+v, %v after %v", v, err, time.Since(begun))
			}
		}
		body.Close()
		if n != 5 {
			t.Errorf("%d lines", n)
		}
		body, err = c.Open(ctx, "GET", "/events", nil)
		if err != nil {
			t.Error(err)
			return
		}
		n = 0
		for ev, err := range ReadEvents(body, 1000) {
			if err != nil || ev.ID != fmt.Sprint(n) || ev.Name != "changed" || string(ev.Data) != "a\nb" {
				t.Errorf("%+v, %v", ev, err)
			}
			if n++; n == 3 {
				begun = time.Now()
				if err := stop(); err != nil {
					t.Error(err)
				}
			}
		}
		body.Close()
		if d := time.Since(begun); n != 3 || d > time.Second {
			t.Errorf("%d events, ended after %v", n, d)
		}
	})
}

// TestGrace: a request that is in time ends well, one that is not is cut off.
func TestGrace(t *testing.T) {
	for _, tc := range []struct {
		takes time.Duration
		well  bool
	}{{4 * time.Second, true}, {20 * time.Second, false}} {
		slow := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			select {
			case <-time.After(tc.takes):
				w.Write([]byte("{}"))
			case <-r.Context().Done():
			}
		})
		bubble(t, &Server{Handler: slow}, func(ctx context.Context, c *Client, stop func() error) {
			got := make(chan error, 1)
			go func() { got <- c.Do(ctx, "GET", "/", nil, nil) }()
			synctest.Wait()
			begun := time.Now()
			if err := stop(); err != nil {
				t.Error(err)
			}
			err := <-got
			// Shutdown polls, with a pause that doubles up to half a second.
			if (err == nil) != tc.well || time.Since(begun) > DefaultGrace+time.Second {
				t.Errorf("%v: %v after %v", tc.takes, err, time.Since(begun))
			}
			if _, ok := errors.AsType[*UnreachableError](err); !tc.well && !ok {
				t.Errorf("%v is no *UnreachableError", err)
			}
		})
	}
}

// TestStalledClients: one that never finishes its request, and one that never
// reads its answer, are let go.
func TestStalledClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &memnet.Network{}
		l, _ := n.Listen("api:80")
		ended := make(chan error, 1)
		s := &Server{Name: "api", Listener: l, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			lines, err := NewLines(w)
			for err == nil {
				err = lines.Send(strings.Repeat("x", 10_000))
			}
			ended <- err
		})}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		<-s.Ready()
		half, _ := n.Dial("tcp", "api:80")
		io.WriteString(half, "GET / HTTP/1.1\r\nHost: api\r\n")
		begun := time.Now()
		io.ReadAll(half)
		if d := time.Since(begun); d < time.Second || d > time.Minute {
			t.Errorf("half a request was let go after %v", d)
		}
		deaf, _ := n.Dial("tcp", "api:80")
		io.WriteString(deaf, "GET / HTTP/1.1\r\nHost: api\r\n\r\n")
		begun = time.Now()
		if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(begun) != StallLimit {
			t.Errorf("a deaf client: %v after %v", err, time.Since(begun))
		}
		half.Close()
		deaf.Close()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestServerFails(t *testing.T) {
	n := &memnet.Network{}
	l, _ := n.Listen("api:80")
	l.Close()
	s := &Server{Name: "the API", Listener: l, Handler: http.NotFoundHandler()}
	if err := s.Run(t.Context()); !errors.Is(err, net.ErrClosed) || !strings.HasPrefix(err.Error(), "cannot serve the API") || s.String() != "the API" {
		t.Error(err)
	}
}

// TestAnswerLimit: an answer that does not end is not read for ever.
func TestAnswerLimit(t *testing.T) {
	bubble(t, &Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.Write(make([]byte, 2000)) })},
		func(ctx context.Context, c *Client, _ func() error) {
			c.MaxAnswer = 1999
			if err := c.Do(ctx, "GET", "/", nil, nil); err == nil || !strings.Contains(err.Error(), "more than 1999 bytes") {
				t.Error(err)
			}
		})
}

func TestEventFaults(t *testing.T) {
	w := httptest.NewRecorder()
	e, err := NewEvents(w, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, ev := range []Event{{ID: "a\nb"}, {Name: "a\r"}, {ID: "\x00"}} {
		if err := e.Send(ev); err == nil {
			t.Errorf("%+v was sent", ev)
		}
	}
	r := httptest.NewRequest("GET", "/?last_event_id=7", nil)
	if LastEventID(r) != "7" {
		t.Error(LastEventID(r))
	}
	r.Header.Set("Last-Event-ID", "8")
	if LastEventID(r) != "8" {
		t.Error(LastEventID(r))
	}
	if l, err := NewLines(w); err != nil || l.Send(func() {}) == nil {
		t.Error("a function was encoded")
	}
	for _, bad := range []string{"{}\nx\n", strings.Repeat("x", 50)} {
		var last error
		for _, last = range ReadLines[thing](strings.NewReader(bad), 20) {
		}
		if last == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

func FuzzReadEvents(f *testing.F) {
	f.Add("id: 1\nevent: changed\ndata: a\ndata: b\n\n")
	f.Add(": comment\r\n\r\ndata\n\nretry: 5\n\n")
	f.Add("data: cut off")
	f.Fuzz(func(t *testing.T, text string) {
		for ev, err := range ReadEvents(strings.NewReader(text), 64) {
			if err != nil {
				continue
			}
			w := httptest.NewRecorder()
			e, _ := NewEvents(w, 0)
			if strings.ContainsAny(ev.ID+ev.Name, "\r\n") {
				continue // a lone CR, which this reader keeps
			}
			if err := e.Send(ev); err != nil {
				t.Fatalf("%+v: %v", ev, err)
			}
			n := 0
			for again, err := range ReadEvents(w.Body, 1000) {
				want := strings.ReplaceAll(strings.ReplaceAll(string(ev.Data), "\r\n", "\n"), "\r", "\n")
				if err != nil || again.ID != ev.ID && ev.ID != "" || again.Name != ev.Name || string(again.Data) != want {
					t.Fatalf("%+v came back as %+v, %v", ev, again, err)
				}
				n++
			}
			if n != 1 {
				t.Fatalf("%+v came back %d times", ev, n)
			}
		}
	})
}
