package controller

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/platform/cml"
)

// secondsHost is a simulated CML host. Its clock is known only from its Date header,
// in whole seconds, and each call has a different network delay.
type secondsHost struct {
	w    *world
	id   string
	skew time.Duration
	rng  *rand.Rand
}

func (h *secondsHost) RoundTrip(r *http.Request) (*http.Response, error) {
	way := func() { time.Sleep(time.Duration(h.rng.IntN(400)) * time.Millisecond) }
	way()
	var body any
	switch strings.TrimPrefix(r.URL.Path, "/api/v0") {
	case "/authenticate":
		body = "token"
	case "/telemetry":
		body = map[string]bool{"opt_in": true}
	case "/telemetry/events":
		h.w.mu.Lock()
		events := []map[string]string{}
		for _, e := range h.w.insts[h.id].events {
			events = append(events, map[string]string{"category": "start_lab", "timestamp": e.at.Add(h.skew).UTC().Format("2006-01-02T15:04:05.000000+00:00")})
		}
		h.w.mu.Unlock()
		body = events
	default:
		return nil, fmt.Errorf("the test has no answer for %s here", r.URL)
	}
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	date := time.Now().Add(h.skew).UTC().Format(http.TimeFormat)
	way()
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Date": {date}}, Body: io.NopCloser(bytes.NewReader(text)), Request: r}, nil
}

// secondsConsole reads a secondsHost with the real CML client.
type secondsConsole struct {
	console
	client func() *cml.Client
	filter *cml.Filter
}

func (c secondsConsole) Telemetry(ctx context.Context, _ json.RawMessage) worker.Telemetry {
	a := c.client().Activity(ctx, c.filter, nil)
	t := worker.Telemetry{CheckedAt: a.CheckedAt, Unknown: string(a.Unknown), Newest: a.Newest}
	for _, e := range a.Recent {
		t.Recent = append(t.Recent, worker.Event{Category: e.Category, Timestamp: e.At})
	}
	return t
}

// TestOneWarning checks that an unused worker is warned once and then stopped, with
// the default settings. Each reading finds the same events at slightly different
// times, because the host's clock is known only to the second, and less precisely if
// the network is slow.
func TestOneWarning(t *testing.T) {
	for name, keep := range map[string]bool{"one client": true, "a new client each time": false} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { oneWarning(t, keep) }) })
	}
}

func oneWarning(t *testing.T, keep bool) {
	w := newWorld(1)
	filter, err := cml.NewFilter(cml.FilterConfig{MaxStored: 10})
	if err != nil {
		t.Fatal(err)
	}
	clients := map[string]*cml.Client{}
	open := func(wk worker.Worker) (Console, error) {
		id := wk.EC2InstanceID
		plain, err := w.console(wk)
		if err != nil {
			return nil, err
		}
		host := &secondsHost{w: w, id: id, skew: 7*time.Minute + time.Duration(len(clients))*270*time.Millisecond, rng: rand.New(rand.NewPCG(uint64(len(clients)), 5))}
		fresh := func() *cml.Client {
			c, err := cml.New(cml.Config{URL: "https://cml.invalid", Username: "lull", Password: "x", HTTP: &http.Client{Transport: host}})
			if err != nil {
				panic(err)
			}
			return c
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if clients[id] == nil {
			clients[id] = fresh()
		}
		if keep {
			fresh = func() *cml.Client { return clients[id] }
		}
		return secondsConsole{plain.(console), fresh, filter}, nil
	}
	r := newRig(t, options{world: w, consoles: open})
	defer func() { r.stop() }()
	var ids []string
	for range 8 {
		ids = append(ids, r.create().ID)
	}
	const uses = 12 // more than the client keeps
	for i, id := range ids {
		r.await(id, power.WorkerRunning, 10*time.Minute)
		m := r.machine(id)
		w.mu.Lock()
		for n := range uses {
			at := time.Now().Add(-10*time.Minute + time.Duration(n*20000+i*1310)*time.Millisecond)
			m.events = append(m.events, cmlEvent{at: at})
		}
		w.mu.Unlock()
	}
	for _, id := range ids {
		r.await(id, power.WorkerStopped, 2*time.Hour)
		audit := func(action string) int {
			page, err := r.fleet.Audit(t.Context(), audit.Query{WorkerID: id, Action: action})
			if err != nil {
				t.Fatal(err)
			}
			return len(page.Entries)
		}
		if n := audit("pause_warning"); n != 1 {
			t.Errorf("%s was warned of %d times", id, n)
		}
		if n := audit("activity_updated"); n != 1 {
			t.Errorf("%s: activity became known %d times; all of it was there at the first look", id, n)
		}
	}
}
