package httpx

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/memnet"
	"lull/internal/lib/task"
	"lull/internal/lib/unixsock"
)

var _ task.Task = (*Server)(nil)

// bubble runs use with a server and a client on an in-memory network, in a
// synctest bubble.
func bubble(t *testing.T, h http.Handler, use func(ctx context.Context, c *Client, stop func() error)) {
	synctest.Test(t, func(t *testing.T) {
		n := &memnet.Network{}
		l, err := n.Listen("api:80")
		errtest.None(t, err)
		s := &Server{Name: "api", Listener: l, Handler: h}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		<-s.Ready()
		transport := &http.Transport{DialContext: n.DialContext}
		c := &Client{Peer: "lull thing", Start: "lull thing run", Where: "api", Base: "http://api", HTTP: &http.Client{Transport: transport}}
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

// TestAnswers checks the result of every kind of answer, and the request that
// was sent.
func TestAnswers(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /echo", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Content-Type") != "application/json" || r.Header.Get("Authorization") != "Bearer secret" {
			t.Errorf("headers %v", r.Header)
		}
		w.WriteHeader(http.StatusCreated)
		io.Copy(w, r.Body)
	})
	problems := map[string]*Problem{
		"/refused": NewProblem(409, "lease_held", "cannot pause web: ci holds it"),
		"/invalid": {Status: 422, Title: "Unprocessable Entity", Detail: "validation failed", Errors: []Fault{{"want a number", "body.size"}, {"failed", "x"}}},
		"/blocked": {Status: 409, Title: "Conflict", Detail: "no", Errors: []Fault{{"ci holds it", "lease_held"}}},
		"/bare":    {Status: 404, Title: "Not Found"},
	}
	for path, p := range problems {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { WriteProblem(w, p) })
	}
	mux.HandleFunc("/proxy", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, strings.Repeat("x", 500), http.StatusBadGateway)
	})
	mux.HandleFunc("/elsewhere", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/echo", http.StatusFound) })
	mux.HandleFunc("/later", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusAccepted) })
	mux.HandleFunc("/nothing", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("/half", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"name":"half`) })
	bubble(t, mux, func(ctx context.Context, c *Client, _ func() error) {
		c.Token = "secret"
		c.HTTP.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		for _, tc := range []struct {
			path   string
			status int
			want   thing
			err    string
			code   string
		}{
			{"/echo", 201, thing{"web", 3}, "", ""},
			{"/later", 202, thing{}, "", ""},
			{"/nothing", 204, thing{}, "", ""},
			{"/refused", 409, thing{}, "cannot pause web: ci holds it", "lease_held"},
			{"/invalid", 422, thing{}, "validation failed\n  want a number (body.size)", ""},
			{"/blocked", 409, thing{}, "no\n  ci holds it", ""},
			{"/bare", 404, thing{}, "Not Found", ""},
			{"/nowhere", 404, thing{}, "404 Not Found 404 page not found", ""},
			{"/proxy", 502, thing{}, "502 Bad Gateway " + strings.Repeat("x", 200), ""},
			{"/elsewhere", 302, thing{}, "302 Found", ""},
		} {
			var out thing
			status, err := c.Do(ctx, Request{Method: "POST", Path: tc.path, In: thing{"web", 3}}, &out)
			if tc.err == "" {
				if err != nil || status != tc.status || out != tc.want {
					t.Errorf("%s: %d %+v, %v", tc.path, status, out, err)
				}
				continue
			}
			p, ok := errors.AsType[*Problem](err)
			if !ok || p.Status != tc.status || err.Error() != tc.err || p.Code() != tc.code {
				t.Errorf("%s: %v, want %d %s", tc.path, err, tc.status, tc.err)
			}
		}
		var out thing
		if _, err := c.Do(ctx, Request{Method: "GET", Path: "/half"}, &out); err == nil {
			t.Error("half an answer was taken for a whole one")
		}
	})
}

// TestTries checks that a request whose connection breaks is sent again with the
// same key, that a request with Once or a Body is not, and that an unreachable
// server is reported as such.
func TestTries(t *testing.T) {
	var keys []string
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keys = append(keys, r.Header.Get("Idempotency-Key"))
		if len(keys) < 3 {
			panic(http.ErrAbortHandler)
		}
		io.WriteString(w, "{}")
	})
	for _, tc := range []struct {
		tries int
		r     Request
		sent  int
		keyed bool
	}{
		{3, Request{Method: "POST", Path: "/"}, 3, true},
		{3, Request{Method: "GET", Path: "/"}, 3, false},
		{2, Request{Method: "POST", Path: "/"}, 2, true},
		{0, Request{Method: "POST", Path: "/"}, 1, false},
		{3, Request{Method: "POST", Path: "/", Once: true}, 1, false},
	} {
		keys = nil
		bubble(t, h, func(ctx context.Context, c *Client, stop func() error) {
			c.Tries = tc.tries
			c.HTTP.Transport.(*http.Transport).DisableKeepAlives = true // otherwise net/http itself repeats a GET
			_, err := c.Do(ctx, tc.r, nil)
			if len(keys) != tc.sent || (err == nil) != (tc.sent == 3) || (keys[0] != "") != tc.keyed {
				t.Errorf("%+v: keys %q, %v", tc.r, keys, err)
			}
			for _, k := range keys {
				if k != keys[0] {
					t.Errorf("%+v: keys %q", tc.r, keys)
				}
			}
			stop()
			_, err = c.Do(ctx, tc.r, nil)
			if _, ok := errors.AsType[*UnreachableError](err); !ok || !strings.HasPrefix(err.Error(), "cannot reach a lull thing at api: ") || !strings.HasSuffix(err.Error(), "; start one with: lull thing run") {
				t.Errorf("without a server: %v", err)
			}
		})
	}
}

// TestUnixSocket checks that a handler can identify its caller over a unix
// socket.
func TestUnixSocket(t *testing.T) {
	dir, err := os.MkdirTemp("", "httpx-")
	errtest.None(t, err)
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	l, err := unixsock.Listen(path, 0o600)
	errtest.None(t, err)
	s := &Server{Name: "host", Listener: l, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, ok := PeerOf(r.Context())
		if !ok {
			t.Error("no peer")
		}
		json.NewEncoder(w).Encode(p)
	})}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	var p unixsock.Peer
	c := &Client{Peer: "lull host", Where: path, Base: "http://lull", HTTP: Unix(path)}
	if _, err := c.Do(t.Context(), Request{Method: "GET", Path: "/"}, &p); err != nil || p != (unixsock.Peer{UID: os.Getuid(), GID: os.Getgid(), PID: os.Getpid()}) {
		t.Errorf("peer %+v, %v", p, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	_, err = c.Do(t.Context(), Request{Method: "GET", Path: "/"}, &p)
	if _, ok := errors.AsType[*UnreachableError](err); !ok || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a server: %v", err)
	}
}

// TestGrace checks that a request that ends within the grace period succeeds, and
// that a slower one is cut off.
func TestGrace(t *testing.T) {
	for _, tc := range []struct {
		takes time.Duration
		well  bool
	}{{grace - time.Second, true}, {4 * grace, false}} {
		slow := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			select {
			case <-time.After(tc.takes):
				w.Write([]byte("{}"))
			case <-r.Context().Done():
			}
		})
		bubble(t, slow, func(ctx context.Context, c *Client, stop func() error) {
			got := make(chan error, 1)
			go func() {
				_, err := c.Do(ctx, Request{Method: "GET", Path: "/"}, nil)
				got <- err
			}()
			synctest.Wait()
			begun := time.Now()
			if err := stop(); err != nil {
				t.Error(err)
			}
			// Shutdown polls at intervals that double up to half a second.
			if err := <-got; (err == nil) != tc.well || time.Since(begun) > grace+time.Second {
				t.Errorf("%v: %v after %v", tc.takes, err, time.Since(begun))
			}
		})
	}
}

// TestStalledClients checks that a client that never finishes its request is
// disconnected.
func TestStalledClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &memnet.Network{}
		l, _ := n.Listen("api:80")
		s := &Server{Name: "api", Listener: l, Handler: http.NotFoundHandler()}
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
		half.Close()
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

// TestAnswerLimit checks that an endless answer is not read forever.
func TestAnswerLimit(t *testing.T) {
	endless := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for _, err := io.WriteString(w, "["); err == nil; {
			_, err = io.WriteString(w, "1,")
		}
	})
	bubble(t, endless, func(ctx context.Context, c *Client, _ func() error) {
		c.limit = 2000
		var out []int
		if _, err := c.Do(ctx, Request{Method: "GET", Path: "/"}, &out); err == nil || !strings.Contains(err.Error(), "too large") {
			t.Error(err)
		}
	})
}

func TestReadEvents(t *testing.T) {
	var got []string
	for ev, err := range ReadEvents(strings.NewReader("id: 1\nevent: changed\ndata: a\r\ndata:b\n\n: comment\nretry: 5\n\nid: 2\n\ndata: {}\n\nid: 3\ndata: cut off"), 100) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%s|%s|%q", ev.ID, ev.Name, ev.Data))
	}
	want := []string{`1|changed|"a\nb"`, `2||""`, `||"{}"`}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, long := range []string{"data: " + strings.Repeat("x", 100), strings.Repeat("data: x\n", 20)} {
		var last error
		for _, last = range ReadEvents(strings.NewReader(long), 50) {
		}
		if last == nil {
			t.Errorf("%.20q... was read", long)
		}
	}
}

func FuzzReadEvents(f *testing.F) {
	f.Add("id: 1\nevent: changed\ndata: a\ndata: b\n\n")
	f.Add(": comment\r\n\r\ndata\n\nretry: 5\n\n")
	f.Add("data: cut off")
	f.Fuzz(func(t *testing.T, text string) {
		for ev, err := range ReadEvents(strings.NewReader(text), 64) {
			if size := len(ev.ID) + len(ev.Name) + len(ev.Data); err == nil && size > 64 {
				t.Fatalf("an event of %d bytes", size)
			}
			if strings.ContainsAny(ev.ID+ev.Name, "\n") {
				t.Fatalf("%q, %q", ev.ID, ev.Name)
			}
		}
	})
}
