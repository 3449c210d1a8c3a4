package relay

import (
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"

	"github.com/google/go-cmp/cmp"
)

func TestNoiseIsChecked(t *testing.T) {
	good := Noise{
		Sources:   []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("::1/128")},
		SilentFor: 5 * time.Second, Paths: []string{"/healthz", "/live/*"}, UserAgents: []string{"kube-probe"}, HealthStatus: 204,
	}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for _, bad := range []Noise{
		{Sources: []netip.Prefix{{}}}, {SilentFor: -time.Second}, {SilentFor: 2 * time.Hour}, {Paths: []string{"healthz"}}, {Paths: []string{"/a*b"}},
		{UserAgents: []string{""}}, {HealthStatus: 99}, {Paths: make([]string, maxNoiseRules+1)},
	} {
		if err := bad.Validate(); err == nil || !strings.HasPrefix(err.Error(), "cannot use") {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

func TestNoiseFromASource(t *testing.T) {
	w := &switchWaker{b: serveTCP(t, echoAll)}
	n := Noise{Sources: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("127.0.0.0/8")}}
	in, addr := expose(t, startRouter(t), w, Options{Noise: n})
	if b, err := io.ReadAll(dialTo(t, addr)); err != nil || len(b) != 0 {
		t.Fatalf("asleep: %q, %v, want a clean close", b, err)
	}
	if w.calls.Load() != 0 {
		t.Error("noise woke the instance")
	}
	w.up.Store(true)
	c := dialTo(t, addr)
	_, _ = c.Write([]byte("x"))
	errtest.Get(io.ReadFull(c, make([]byte, 1)))(t)
	if a := in.Activity(); a.Open != 0 || a.Ignored != 1 || !a.LastByte.IsZero() || !a.LastArrival.IsZero() {
		t.Errorf("noise holds the instance: %+v", a)
	}
	// Bytes of the ignored connection do not wake a paused instance. They are
	// delivered after something else has woken it.
	in.Hold()
	w.up.Store(false)
	in.Sleep()
	_, _ = c.Write([]byte("y"))
	waittest.Until(t, "its bytes wait", func() bool {
		in.mu.Lock()
		defer in.mu.Unlock()
		return in.q.first != nil && in.q.first.noise
	})
	w.up.Store(true)
	in.Release()
	errtest.Get(io.ReadFull(c, make([]byte, 1)))(t)
	if w.calls.Load() != 0 {
		t.Error("bytes of noise woke the instance")
	}
	s := in.Stats()
	if len(s.Ignored) != 2 || s.Ignored[0].Count != 0 || s.Ignored[1].Count != 2 || s.Ignored[1].Rule != "source=127.0.0.0/8" ||
		!s.Ignored[1].LastRemote.Addr().IsLoopback() || s.Relayed != 0 {
		t.Errorf("stats %+v", s)
	}
	c.Close()
	waittest.Until(t, "nothing is open", func() bool { return in.Activity().Ignored == 0 })
}

func TestSilentConnections(t *testing.T) {
	w := &switchWaker{b: serveTCP(t, echoAll)}
	in, addr := expose(t, startRouter(t), w, Options{Noise: Noise{SilentFor: 50 * time.Millisecond}})
	if b, err := io.ReadAll(dialTo(t, addr)); err != nil || len(b) != 0 {
		t.Fatalf("%q, %v", b, err)
	}
	dialTo(t, addr).Close()
	waittest.Until(t, "both are counted", func() bool { return in.Stats().Ignored[0].Count == 2 })
	if w.calls.Load() != 0 {
		t.Error("silence woke the instance")
	}
	c := dialTo(t, addr)
	_, _ = c.Write([]byte("hello"))
	_ = c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
		t.Fatalf("a client that speaks: %q, %v", b, err)
	}
	if w.calls.Load() != 1 {
		t.Error("a client that speaks did not wake the instance")
	}
}

func TestHealthChecks(t *testing.T) {
	r := startRouter(t)
	f, addr := startFront(t, FrontConfig{})
	w := &switchWaker{b: serveHTTP(t, "a")}
	in := routed(t, r, f, "a", w, Options{Noise: Noise{Paths: []string{"/healthz", "/live/*"}, UserAgents: []string{"Kube-Probe"}}})
	check := func(path, agent string) (*http.Response, string) {
		return ask(t, addr, func(r *http.Request) {
			r.Host, r.URL.Path = "a.localhost", path
			r.Header.Set("User-Agent", agent)
		})
	}
	for _, row := range [][2]string{{"/healthz", ""}, {"/live/x", ""}, {"/", "kube-probe/1.30"}} {
		resp, body := check(row[0], row[1])
		if resp.StatusCode != 200 || resp.Header.Get("X-Lull-State") != "asleep" {
			t.Errorf("%q: %d %q", row, resp.StatusCode, body)
		}
	}
	if w.calls.Load() != 0 {
		t.Error("a health check woke the instance")
	}
	if resp, _ := check("/healthz/deep", "curl"); resp.StatusCode != 200 || w.calls.Load() != 1 {
		t.Errorf("a request that is no health check: %d, %d wakes", resp.StatusCode, w.calls.Load())
	}
	last := in.Activity().LastByte
	if _, body := check("/healthz", ""); !strings.HasPrefix(body, "a GET") {
		t.Errorf("a running instance answers for itself: %q", body)
	}
	if now := in.Activity().LastByte; !now.Equal(last) {
		t.Error("a health check counts as activity")
	}
	var counts []string
	for _, by := range in.Stats().Ignored {
		counts = append(counts, fmt.Sprint(by.Rule, " ", by.Count))
	}
	if d := cmp.Diff([]string{"path=/healthz 2", "path=/live/* 1", "agent=Kube-Probe 1"}, counts); d != "" {
		t.Error(d)
	}
}

func FuzzHostName(f *testing.F) {
	for _, s := range []string{"a.localhost:80", "[::1]:80", "[::1", "A.B.", "1.2.3.4", "a..b", "x:y", "", ":80", "é"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, ok := hostName(s)
		if !ok {
			return
		}
		if name == "" || strings.ToLower(name) != name || len(name) > 253 {
			t.Fatalf("%q gives %q", s, name)
		}
		if strings.Contains(name, ":") {
			name = "[" + name + "]"
		}
		if again, ok := hostName(name); !ok || again != strings.Trim(name, "[]") {
			t.Fatalf("%q gives %q, which gives %q, %v", s, name, again, ok)
		}
	})
}
