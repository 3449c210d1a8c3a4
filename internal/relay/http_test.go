package relay

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"

	"github.com/google/go-cmp/cmp"
)

// serveHTTP runs a backend that reports its name and the request.
func serveHTTP(t *testing.T, name string) Backend {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "websocket" {
			upgrade(t, w)
			return
		}
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %s %s %q", name, r.Method, r.Host, r.URL.Path, body)
	}))
	t.Cleanup(s.Close)
	ap := s.Listener.Addr().(*net.TCPAddr).AddrPort()
	return Backend{Addr: ap, Generation: 1}
}

// upgrade answers a request like a WebSocket server and echoes everything that
// follows.
func upgrade(t *testing.T, w http.ResponseWriter) {
	c, rw, err := w.(http.Hijacker).Hijack()
	if err != nil {
		t.Error(err)
		return
	}
	defer c.Close()
	fmt.Fprint(rw, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
	_ = rw.Flush()
	_, _ = io.Copy(c, rw)
}

func startFront(t *testing.T, cfg FrontConfig) (*Front, string) {
	t.Helper()
	f, err := NewFront(cfg)
	errtest.None(t, err)
	s := httptest.NewServer(f)
	t.Cleanup(s.Close)
	return f, s.Listener.Addr().String()
}

func routed(t *testing.T, r *Router, f *Front, name string, w Waker, opt Options, hosts ...string) *Instance {
	t.Helper()
	in, err := r.Add(name, w, opt)
	errtest.None(t, err)
	errtest.None(t, f.Route(in, 80, hosts...))
	t.Cleanup(func() { f.Unroute(in) })
	return in
}

func ask(t *testing.T, addr string, edit func(*http.Request)) (*http.Response, string) {
	t.Helper()
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "GET", "http://"+addr+"/path", nil)
	errtest.None(t, err)
	edit(r)
	resp, err := tr.RoundTrip(r)
	errtest.None(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	errtest.None(t, err)
	return resp, string(b)
}

func TestFrontRoutesByHostAndHeader(t *testing.T) {
	r := startRouter(t)
	f, addr := startFront(t, FrontConfig{Domains: []string{"localhost", "lull.test"}})
	wa, wb := &switchWaker{b: serveHTTP(t, "a")}, &switchWaker{b: serveHTTP(t, "b")}
	a := routed(t, r, f, "a", wa, Options{}, "shop.example")
	routed(t, r, f, "b", wb, Options{})
	for _, row := range []struct {
		host, header, want string
		status             int
	}{
		{"a.localhost", "", "a GET a.localhost /path \"\"", 200},
		{"B.Lull.Test.:8080", "", "b GET B.Lull.Test.:8080 /path \"\"", 200},
		{"shop.example", "", "a GET shop.example /path \"\"", 200},
		{"a.localhost", "b", "b GET a.localhost /path \"\"", 200},
		{"anything", "A", "a GET anything /path \"\"", 200},
		{"c.localhost", "", "no instance with a port has this name", 404},
		{"localhost", "", "no instance with a port has this name", 404},
		{"a.localhost", "c", "no instance with a port has this name", 404},
		{"a.elsewhere", "", "no instance with a port has this name", 404},
	} {
		resp, body := ask(t, addr, func(r *http.Request) {
			r.Host = row.host
			if row.header != "" {
				r.Header.Set(InstanceHeader, row.header)
			}
		})
		if resp.StatusCode != row.status || !strings.Contains(body, row.want) {
			t.Errorf("host %q, header %q: %d %q, want %d %q", row.host, row.header, resp.StatusCode, body, row.status, row.want)
		}
	}
	if wa.calls.Load() != 1 || wb.calls.Load() != 1 {
		t.Errorf("%d and %d wakes, want one each", wa.calls.Load(), wb.calls.Load())
	}
	waittest.Until(t, "no request is open", func() bool { return a.Activity().Open == 0 })
}

func TestFrontRefusesASecondRouteOfTheSameName(t *testing.T) {
	r := startRouter(t)
	f, _ := startFront(t, FrontConfig{})
	in := routed(t, r, f, "a", &switchWaker{}, Options{}, "x.example")
	other, err := r.Add("other", &switchWaker{}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Route(in, 80); err == nil {
		t.Error("the same name was routed twice")
	}
	if err := f.Route(other, 80, "X.example."); err == nil || !strings.HasSuffix(err.Error(), " a") {
		t.Errorf("the same host was routed twice: %v", err)
	}
	if err := f.Route(other, 80, "not a host"); err == nil {
		t.Error("a bad host was taken")
	}
}

func TestFrontCarriesABodyThroughAWake(t *testing.T) {
	r := startRouter(t)
	f, addr := startFront(t, FrontConfig{})
	w, wake, _ := slowWaker(serveHTTP(t, "a"))
	in := routed(t, r, f, "a", w, Options{}, "a.test")
	go func() {
		for in.Activity().Waiting == 0 {
			runtime.Gosched()
		}
		wake <- nil
	}()
	_, body := ask(t, addr, func(r *http.Request) {
		r.Host, r.Method = "a.test", "POST"
		r.Body = io.NopCloser(strings.NewReader("payload"))
	})
	if body != `a POST a.test /path "payload"` {
		t.Errorf("got %s", body)
	}
	if c := w.first().Cause; c != CauseRequest {
		t.Errorf("cause %q", c)
	}
}

func TestFrontWebSocket(t *testing.T) {
	r := startRouter(t)
	f, addr := startFront(t, FrontConfig{})
	w := &switchWaker{b: serveHTTP(t, "a")}
	in := routed(t, r, f, "a", w, Options{})
	c := dialTo(t, addr)
	fmt.Fprint(c, "GET /ws HTTP/1.1\r\nHost: a.localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != 101 {
		t.Fatalf("%v, %v", resp, err)
	}
	exchange := func() {
		t.Helper()
		fmt.Fprint(c, "ping")
		b := make([]byte, 4)
		if _, err := io.ReadFull(br, b); err != nil || string(b) != "ping" {
			t.Fatalf("%q, %v", b, err)
		}
	}
	exchange()
	if a := in.Activity(); a.Open != 1 {
		t.Errorf("an upgraded connection does not count: %+v", a)
	}
	// A frame for a paused instance waits for the wake and is then delivered.
	w.onWake = func(context.Context, Arrival) error {
		w.up.Store(true)
		in.Release()
		return nil
	}
	in.Hold()
	w.up.Store(false)
	in.Sleep()
	exchange()
	if n := w.calls.Load(); n != 2 {
		t.Errorf("%d wakes, want 2", n)
	}
	c.Close()
	waittest.Until(t, "nothing is open", func() bool { return in.Activity().Open == 0 })
}

func TestFrontSaysWhyAWakeFailed(t *testing.T) {
	r := startRouter(t)
	f, addr := startFront(t, FrontConfig{RetryAfter: 7 * time.Second})
	w := &switchWaker{onWake: func(context.Context, Arrival) error { return errors.New("no memory for <it>") }}
	routed(t, r, f, "a", w, Options{})
	resp, body := ask(t, addr, func(r *http.Request) { r.Host = "a.localhost" })
	var got map[string]any
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatalf("%q: %v", body, err)
	}
	want := map[string]any{"type": "about:blank", "title": "Service Unavailable", "status": 503.0,
		"detail": "cannot wake a: wake failed: no memory for <it>", "instance_name": "a"}
	if d := cmp.Diff(want, got); d != "" || resp.StatusCode != 503 || resp.Header.Get("Retry-After") != "7" ||
		resp.Header.Get("Content-Type") != "application/problem+json" {
		t.Errorf("%d %v\n%s", resp.StatusCode, resp.Header, d)
	}
	resp, body = ask(t, addr, func(r *http.Request) {
		r.Host = "a.localhost"
		r.Header.Set("Accept", "text/html,*/*")
	})
	if resp.StatusCode != 503 || !strings.Contains(body, "&lt;it&gt;") || resp.Header.Get("Retry-After") != "7" {
		t.Errorf("%d %q", resp.StatusCode, body)
	}
}

func TestBackendThatFailsIsABadGateway(t *testing.T) {
	r := startRouter(t)
	f, addr := startFront(t, FrontConfig{})
	w := &switchWaker{b: serveTCP(t, func(*net.TCPConn) {})}
	w.up.Store(true)
	in := routed(t, r, f, "a", w, Options{})
	resp, _ := ask(t, addr, func(r *http.Request) { r.Host = "a.localhost" })
	if resp.StatusCode != 502 || in.Stats().Unreachable != 1 {
		t.Errorf("%d, %+v", resp.StatusCode, in.Stats())
	}
}

func TestWaitingPageForBrowsersOnly(t *testing.T) {
	r := startRouter(t)
	f, addr := startFront(t, FrontConfig{WaitPage: 20 * time.Millisecond})
	w, wake, _ := slowWaker(serveHTTP(t, "a"))
	in := routed(t, r, f, "a", w, Options{})
	browser := func(r *http.Request) {
		r.Host = "a.localhost"
		r.Header.Set("Accept", "text/html")
	}
	for range 2 {
		resp, body := ask(t, addr, browser)
		if resp.StatusCode != 503 || !strings.Contains(body, `http-equiv="refresh"`) || !strings.Contains(body, "color-scheme") ||
			resp.Header.Get("Cache-Control") != "no-store" {
			t.Fatalf("%d %v %q", resp.StatusCode, resp.Header, body)
		}
	}
	if n := w.calls.Load(); n != 1 {
		t.Errorf("%d wakes: the wake did not continue behind the page", n)
	}
	wake <- nil
	waittest.Until(t, "no client waits", func() bool { return in.Activity().Waiting == 0 })
	if _, body := ask(t, addr, browser); !strings.HasPrefix(body, "a GET") {
		t.Errorf("after the wake: %q", body)
	}
	if s := in.Stats(); s.Gone != 0 || s.Relayed != 1 {
		t.Errorf("stats %+v", s)
	}
}

func TestClientOfTheFrontGoesAway(t *testing.T) {
	r := startRouter(t)
	f, addr := startFront(t, FrontConfig{})
	w, _, ended := slowWaker(Backend{})
	in := routed(t, r, f, "a", w, Options{})
	c := dialTo(t, addr)
	fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: a.localhost\r\n\r\n")
	waittest.Until(t, "it waits", func() bool { return w.calls.Load() == 1 })
	c.Close()
	if err := <-ended; !errors.Is(err, errAbandoned) {
		t.Errorf("the wake ended with %v", err)
	}
	waittest.Until(t, "no client waits", func() bool { return in.Activity().Waiting == 0 })
}

func TestNewGenerationGetsNewConnections(t *testing.T) {
	r := startRouter(t)
	f, addr := startFront(t, FrontConfig{})
	old, fresh := serveHTTP(t, "old"), serveHTTP(t, "fresh")
	fresh.Generation = 2
	w := &switchWaker{b: old}
	w.up.Store(true)
	routed(t, r, f, "a", w, Options{})
	byHost := func(r *http.Request) { r.Host = "a.localhost" }
	if _, body := ask(t, addr, byHost); !strings.HasPrefix(body, "old") {
		t.Fatal(body)
	}
	w.b = fresh
	if _, body := ask(t, addr, byHost); !strings.HasPrefix(body, "fresh") {
		t.Fatalf("an idle connection of the life before was used: %s", body)
	}
}
