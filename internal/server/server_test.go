package server_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"lull/internal/core/savings"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// bench is a server over an in-memory store, on loopback.
type bench struct {
	t      *testing.T
	db     store.Store
	fleet  *fleet.Fleet
	tokens *access.Tokens
	api    *server.Server
	url    string
	admin  string
	by     audit.Actor
}

// fakeAdmin is an Admin that does nothing.
type fakeAdmin struct{}

func (fakeAdmin) Stats() map[string]any { return map[string]any{"auto_pause_count": 0} }
func (fakeAdmin) Trigger()              {}
func (fakeAdmin) Shards(context.Context) (control.Shards, error) {
	return control.Shards{Members: []control.Member{}, Held: []int{}}, nil
}
func (fakeAdmin) Resign(context.Context) error { return nil }

func newBench(t *testing.T, db store.Store) *bench {
	t.Helper()
	return newBenchWith(t, db, func(*server.Options) {})
}

// newBenchWith is newBench over db, with options changed by more.
func newBenchWith(t *testing.T, db store.Store, more func(*server.Options)) *bench {
	t.Helper()
	f, err := fleet.New(fleet.Options{Store: db, ID: "test"})
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, db: db, fleet: f, tokens: access.New(db), by: audit.Actor{Name: "test", Kind: audit.KindUser}}
	if b.admin, err = b.tokens.First(t.Context()); err != nil {
		t.Fatal(err)
	}
	o := server.Options{Fleet: f, Tokens: b.tokens, Version: "test", Admin: fakeAdmin{},
		PriceSource: func(_ context.Context, keys []savings.Key, now time.Time) (savings.Prices, error) {
			return savings.Prices{keys[0]: {USD: 0.1, AsOf: now}}, nil
		}}
	more(&o)
	if b.api, err = server.New(o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- b.api.Run(ctx) }()
	web := httptest.NewUnstartedServer(b.api.Handler())
	web.Start()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the server ended with %v", err)
		}
		web.CloseClientConnections()
		web.Close()
	})
	select {
	case <-b.api.Ready():
	case <-time.After(2 * time.Minute):
		t.Fatal("the server does not get ready")
	}
	b.url = web.URL
	b.worker()
	return b
}

func (b *bench) token(role access.Role, machine string) string {
	b.t.Helper()
	_, secret, err := b.tokens.Create(b.t.Context(), access.Wanted{Name: "t-" + string(role), Role: role, Machine: machine})
	if err != nil {
		b.t.Fatal(err)
	}
	return secret
}

// revision returns the store's revision, which every write changes.
func (b *bench) revision() int64 {
	b.t.Helper()
	p, err := b.db.Range(b.t.Context(), store.Query{Keys: store.Key("x"), KeysOnly: true})
	if err != nil {
		b.t.Fatal(err)
	}
	return p.Revision
}

// ask makes one request. An empty token and a nil body are not sent.
func (b *bench) ask(method, path, token string, body []byte, header ...string) (*http.Response, []byte) {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), method, b.url+path, bytes.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer res.Body.Close()
	if res.Header.Get("Content-Type") == "text/event-stream" {
		return res, nil
	}
	data, err := io.ReadAll(res.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return res, data
}

// problem checks that an answer is a problem document with a status, and
// returns it.
func (b *bench) problem(what string, res *http.Response, data []byte, want ...int) httpx.Problem {
	b.t.Helper()
	var p httpx.Problem
	if err := json.Unmarshal(data, &p); err != nil {
		b.t.Errorf("%s: %d %.200q is no problem document: %v", what, res.StatusCode, data, err)
		return p
	}
	found := false
	for _, w := range want {
		found = found || res.StatusCode == w
	}
	if !found || p.Status != res.StatusCode || res.Header.Get("Content-Type") != "application/problem+json" || p.Detail == "" {
		b.t.Errorf("%s: got %d %s %s, want %v as a problem document", what, res.StatusCode, res.Header.Get("Content-Type"), data, want)
	}
	return p
}

// worker creates a worker and returns its ID.
func (b *bench) worker() string {
	b.t.Helper()
	if _, err := b.fleet.Template(b.t.Context(), "small"); err != nil {
		if _, err := b.fleet.PutTemplate(b.t.Context(), b.by, launch.Template{Name: "small", InstanceType: "m5.large", AMINameFilter: "cml*", Enabled: true}, 0); err != nil {
			b.t.Fatal(err)
		}
	}
	w, err := b.fleet.CreateWorker(b.t.Context(), b.by, fleet.NewWorker{Name: "w", AWSRegion: "us-east-1", TemplateName: "small"})
	if err != nil {
		b.t.Fatal(err)
	}
	return w.ID
}

func memory(t *testing.T) store.Store {
	c := mem.New(mem.Options{}).Client()
	t.Cleanup(c.Close)
	return c
}
