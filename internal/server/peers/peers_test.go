package peers_test

import (
	"context"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/control"
	"lull/internal/server/peers"
	"lull/internal/store/mem"
)

// owned is a Live whose workers are the keys.
type owned map[string]string

func (o owned) Observation(_ context.Context, id string) (control.Observation, bool) {
	s, ok := o[id]
	return control.Observation{EC2: &worker.EC2State{State: s}}, ok
}

// Report accepts reports for workers in o and keeps the version in the last one.
func (o owned) Report(_ context.Context, id string, r control.AgentReport) bool {
	if _, ok := o[id]; !ok {
		return false
	}
	o[id] = r.Version
	return true
}

func run(t *testing.T, cfg peers.Config) *peers.Peers {
	p := peers.New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return p
}

func TestOwnerIsAsked(t *testing.T) {
	db := mem.New(mem.Options{})
	var owner *peers.Peers
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { owner.Handler().ServeHTTP(w, r) }))
	t.Cleanup(web.Close)
	one, two := db.Client(), db.Client()
	t.Cleanup(one.Close)
	t.Cleanup(two.Close)
	owner = run(t, peers.Config{Store: one, Server: "one", Address: web.URL, Local: owned{"w-1": "running"}})
	asker := run(t, peers.Config{Store: two, Server: "two", Local: owned{"w-2": "stopped"}})
	waittest.Until(t, "the owner is found", func() bool {
		o, ok := asker.Observation(t.Context(), "w-1")
		if ok && o.EC2.State != "running" {
			t.Fatalf("got %+v", o.EC2)
		}
		return ok
	})
	if o, ok := asker.Observation(t.Context(), "w-2"); !ok || o.EC2.State != "stopped" {
		t.Errorf("its own worker: %+v, %t", o.EC2, ok)
	}
	if _, ok := asker.Observation(t.Context(), "w-3"); ok {
		t.Error("a server answers for a worker that no server owns")
	}
	report := control.AgentReport{At: time.Now(), Interval: idle.Duration(time.Minute), Version: "reported"}
	if !asker.Report(t.Context(), "w-1", report) {
		t.Error("the owner does not take a report")
	} else if o, _ := asker.Observation(t.Context(), "w-1"); o.EC2.State != "reported" {
		t.Errorf("the owner has %+v", o.EC2)
	}
	if asker.Report(t.Context(), "w-3", report) {
		t.Error("a server takes a report for a worker that no server owns")
	}
	report.Interval = 0
	if asker.Report(t.Context(), "w-1", report) {
		t.Error("the owner takes a report that is none")
	}
	for name, given := range map[string]string{"none": "", "empty": "Bearer ", "wrong": "Bearer x"} {
		req, err := http.NewRequestWithContext(t.Context(), "GET", web.URL+"/internal/observations/w-1", nil)
		errtest.None(t, err)
		req.Header.Set("Authorization", given)
		res, err := http.DefaultClient.Do(req)
		errtest.None(t, err)
		res.Body.Close()
		if res.StatusCode != http.StatusUnauthorized {
			t.Errorf("secret %s: %d", name, res.StatusCode)
		}
	}
}

func (o owned) Verdicts(context.Context) map[string]worker.IdleStatus {
	out := map[string]worker.IdleStatus{}
	for id := range o {
		out[id] = worker.IdleStatus{WorkerID: id}
	}
	return out
}

// TestVerdictsOfAll checks that the verdicts of every reachable server are collected.
func TestVerdictsOfAll(t *testing.T) {
	db := mem.New(mem.Options{})
	var other *peers.Peers
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { other.Handler().ServeHTTP(w, r) }))
	defer web.Close()
	other = run(t, peers.Config{Store: db.Client(), Server: "b", Address: web.URL, Local: owned{"w-2": "running"}})
	one := run(t, peers.Config{Store: db.Client(), Server: "a", Local: owned{"w-1": "running"}})
	waittest.NoError(t, "the verdicts of both servers", func() error {
		got := one.Verdicts(t.Context())
		if len(got) == 2 && got["w-1"].WorkerID == "w-1" && got["w-2"].WorkerID == "w-2" {
			return nil
		}
		return fmt.Errorf("got %v", got)
	})
}

// heard collects log lines.
type heard struct {
	mu    sync.Mutex
	lines []string
}

func (h *heard) Write(b []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lines = append(h.lines, string(b))
	return len(b), nil
}

func (h *heard) count(text string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range h.lines {
		if strings.Contains(l, text) {
			n++
		}
	}
	return n
}

// TestPrivateAuthority checks that servers with certificates of a private CA can ask
// each other once they trust it, and that before that the log says once that they
// cannot.
func TestPrivateAuthority(t *testing.T) {
	db := mem.New(mem.Options{})
	var owner *peers.Peers
	web := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { owner.Handler().ServeHTTP(w, r) }))
	web.Config.ErrorLog = log.New(io.Discard, "", 0)
	web.StartTLS()
	t.Cleanup(web.Close)
	one, two := db.Client(), db.Client()
	t.Cleanup(one.Close)
	t.Cleanup(two.Close)
	owner = run(t, peers.Config{Store: one, Server: "one", Address: web.URL, Local: owned{"w-1": "running"}})
	told := &heard{}
	lines := slog.New(slog.NewTextHandler(told, nil))
	stranger := run(t, peers.Config{Store: two, Server: "two", Log: lines})
	waittest.Until(t, "a log line about the owner", func() bool {
		if _, ok := stranger.Observation(t.Context(), "w-1"); ok {
			t.Fatal("a certificate of an unknown CA was believed")
		}
		return told.count("does not answer") > 0
	})
	for range 3 {
		stranger.Observation(t.Context(), "w-1")
	}
	if n := told.count("does not answer"); n != 1 {
		t.Errorf("it was logged %d times", n)
	}
	roots := x509.NewCertPool()
	roots.AddCert(web.Certificate())
	asker := run(t, peers.Config{Store: two, Server: "three", HTTP: peers.Client(roots), Log: lines})
	waittest.Until(t, "the owner is believed", func() bool {
		o, ok := asker.Observation(t.Context(), "w-1")
		if ok && o.EC2.State != "running" {
			t.Errorf("got %+v", o.EC2)
		}
		return ok
	})
}
