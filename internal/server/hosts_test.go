package server

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/why"
	"lull/internal/lib/errtest"
	"lull/internal/lib/memnet"
	"lull/internal/platform/journal"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/server/peers"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// together runs a server of the fleet that the others reach over net. It only serves
// the API and observes no workers.
func together(t *testing.T, db store.Store, net *memnet.Network, name string) (s *Server, stop func()) {
	t.Helper()
	hc := &http.Client{Transport: &http.Transport{DialContext: net.Host(name).DialContext, DisableKeepAlives: true}}
	kept, _, err := journal.Open(t.TempDir(), journal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p := peers.New(peers.Config{Store: db, Server: name, Address: "http://" + name + ":80", HTTP: hc, Journal: kept})
	s, end := started(t, db, name, func(o *Options) {
		o.Peers, o.Others, o.Evidence, o.Record = p.Handler(), p, p, kept.Take
	})
	p.Serve(s)
	l, err := net.Listen(name + ":80")
	errtest.None(t, err)
	web := &http.Server{Handler: s.Handler()}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- web.Serve(l) }()
	go func() { ended <- p.Run(ctx) }()
	return s, func() {
		cancel()
		web.Close()
		for range 2 {
			if err := <-ended; err != nil && err != http.ErrServerClosed {
				t.Errorf("%s ended with %v", name, err)
			}
		}
		end()
		if err := kept.Close(); err != nil {
			t.Error(err)
		}
	}
}

// hearsHost sends s a report of a host with one instance, web.
func (s *Server) hearsHost(t *testing.T, name string, seq uint64) {
	t.Helper()
	r := control.HostReport{Host: name, At: time.Now(), Sequence: seq, StartedAt: time.Now(), Version: "v1", Interval: idle.Duration(15 * time.Second),
		Counts: map[string]int{"running": 1}, Instances: []control.HostInstance{{ID: "i1", Name: "web", State: "running", Runtime: "process"}}}
	r.Fit()
	if a, err := s.hostReport(t.Context(), r); err != nil || a.Resend {
		t.Fatal(a, err)
	}
}

// knows checks what s returns for a host in the listing, for the host alone, and for
// why of its instance.
func (s *Server) knows(t *testing.T, when, name, server, state, readings string) {
	t.Helper()
	l, err := s.allHosts(t.Context())
	var in control.HostSummary
	for _, h := range l {
		if h.Name == name {
			in = h
		}
	}
	v, verr := s.host(t.Context(), name)
	a, werr := s.hostWhy(t.Context(), name, "web", time.Time{})
	if err != nil || verr != nil || werr != nil || a.Why == nil {
		t.Errorf("%s: %s says of %s: %v, %v, %v, %+v", when, s.name, name, err, verr, werr, a)
		return
	}
	got := ""
	if len(v.Instances) > 0 {
		got = v.Instances[0].State
	}
	heard := state == "running"
	if in.Server != server || v.Server != server || in.Heard != heard || v.Heard != heard || got != state || a.Why.Readings != readings || heard == (a.Why.Unheard != "") && readings == "live" {
		t.Errorf("%s: %s says of %s: listed %+v, alone %+v, why %+v; want it at %s, %s, readings %s", when, s.name, name, in, v, a.Why, server, state, readings)
	}
	if !heard && in.Unheard == "" {
		t.Errorf("%s: %s does not say why it does not know %s", when, s.name, name)
	}
}

// answers makes a simulated host answer the questions of s until stop is called.
func (s *Server) answers(t *testing.T, name string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		var out []control.HostReply
		for ctx.Err() == nil {
			q := s.hosts.Turn(ctx, name, out, 20*time.Second).Questions
			out = nil
			for _, x := range q {
				out = append(out, control.HostReply{ID: x.ID, Why: &control.HostWhy{Account: why.Account{Verdict: &idle.Verdict{}}, Instance: &control.HostInstance{}}})
			}
		}
	}()
	synctest.Wait()
	return func() { cancel(); <-done }
}

// TestEveryServerKnowsEveryHost checks that a host that reports to either of two
// servers is listed by both, can be asked through both, and costs no store write per
// report. If neither server can ask the host, its state is unknown.
func TestEveryServerKnowsEveryHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, net := mem.New(mem.Options{}).Client(), &memnet.Network{}
		defer db.Close()
		one, stopOne := together(t, db, net, "one")
		two, stopTwo := together(t, db, net, "two")
		time.Sleep(time.Second)

		one.hearsHost(t, "desk", 1)
		one.knows(t, "after a report", "desk", "one", "running", "unknown")
		stop := one.answers(t, "desk")
		one.knows(t, "when it answers", "desk", "one", "running", "live")
		two.knows(t, "when it answers", "desk", "one", "running", "live")
		if a, err := two.hostWhy(t.Context(), "desk", "web", time.Now().Add(-time.Hour)); err != nil || a.Why == nil || a.Why.Readings != "recorded" {
			t.Errorf("a past time: %v %+v", err, a)
		}
		if _, err := two.hostWhy(t.Context(), "desk", "web", time.Now().Add(time.Hour)); err == nil {
			t.Error("a time to come is answered for")
		}
		if _, err := two.hostWhy(t.Context(), "none", "web", time.Time{}); err == nil {
			t.Error("a host that is unknown was found")
		}
		revision := func() int64 {
			p, err := db.Range(t.Context(), store.Query{Keys: store.Key("x"), KeysOnly: true})
			if err != nil {
				t.Fatal(err)
			}
			return p.Revision
		}
		before := revision()
		for n := range uint64(20) {
			time.Sleep(15 * time.Second)
			one.hearsHost(t, "desk", n+2)
		}
		if after := revision(); after != before {
			t.Errorf("twenty reports took %d writes", after-before)
		}
		stop()

		two.hearsHost(t, "desk", 1)
		stop = two.answers(t, "desk")
		time.Sleep(50 * time.Second)
		two.hearsHost(t, "desk", 2)
		one.knows(t, "after it moved", "desk", "two", "running", "live")
		two.knows(t, "after it moved", "desk", "two", "running", "live")
		stop()
		time.Sleep(46 * time.Second)
		one.knows(t, "when it is silent", "desk", "two", "unknown", "unknown")
		two.knows(t, "when it is silent", "desk", "two", "unknown", "unknown")

		two.hearsHost(t, "attic", 1)
		time.Sleep(time.Second)
		one.knows(t, "elsewhere", "attic", "two", "running", "unknown")
		net.Cut("two")
		time.Sleep(time.Second)
		one.knows(t, "when its server cannot be reached", "attic", "two", "", "unknown")
		net.Heal("two")
		time.Sleep(20 * time.Second)
		stopTwo()
		if _, err := one.host(t.Context(), "attic"); err == nil {
			t.Error("a host that no server that runs knows was found")
		}
		if _, _, err := one.tokens.Create(t.Context(), access.Wanted{Name: "attic", Role: access.Host, Machine: "attic"}); err != nil {
			t.Fatal(err)
		}
		one.knows(t, "by its token alone", "attic", "", "", "unknown")
		stopOne()
	})
}

// TestHostReportsAreRefused checks that a report for another host, an oversized
// one and an invalid one are refused and change nothing.
func TestHostReportsAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := mem.New(mem.Options{}).Client()
		defer db.Close()
		s, stop := started(t, db, "one")
		defer stop()
		secret := func(role access.Role, machine string) string {
			_, token, err := s.tokens.Create(t.Context(), access.Wanted{Name: "t", Role: role, Machine: machine})
			if err != nil {
				t.Fatal(err)
			}
			return token
		}
		net := &memnet.Network{}
		l, err := net.Listen("one:80")
		errtest.None(t, err)
		web := &http.Server{Handler: s.Handler()}
		go web.Serve(l)
		defer web.Close()
		hc := &http.Client{Transport: &http.Transport{DialContext: net.DialContext, DisableKeepAlives: true}}
		send := func(token, path, body string) int {
			t.Helper()
			req, err := http.NewRequestWithContext(t.Context(), "POST", "http://one"+path, strings.NewReader(body))
			errtest.None(t, err)
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("Authorization", "Bearer "+token)
			res, err := hc.Do(req)
			errtest.None(t, err)
			res.Body.Close()
			return res.StatusCode
		}
		desk, agent := secret(access.Host, "desk"), secret(access.Agent, "desk")
		const path = "/api/v1/hosts/desk/report"
		good := `{"host":"desk","at":"2026-01-01T00:00:00Z","sequence":1,"started_at":"2026-01-01T00:00:00Z","interval_seconds":60,"counts":{},"instances":[{"id":"i1","name":"web","state":"running","runtime":"process"}]}`
		for what, c := range map[string]struct {
			token, path, body string
			want              int
		}{
			"no token":              {"", path, good, 401},
			"an agent's token":      {agent, path, good, 403},
			"another host's token":  {secret(access.Host, "attic"), path, good, 403},
			"a viewer's token":      {secret(access.Viewer, ""), path, good, 403},
			"another host's path":   {desk, "/api/v1/hosts/attic/report", good, 403},
			"another host's name":   {desk, path, strings.Replace(good, "desk", "attic", 1), 422},
			"another's questions":   {desk, "/api/v1/hosts/attic/questions", `{}`, 403},
			"no report":             {desk, path, `{}`, 422},
			"a list":                {desk, path, `[]`, 422},
			"larger than a report":  {desk, path, strings.Replace(good, `"web"`, `"`+strings.Repeat("x", control.MaxHostReport)+`"`, 1), 422},
			"larger than a request": {desk, path, strings.Replace(good, `"web"`, `"`+strings.Repeat("x", maxBody)+`"`, 1), 413},
			"answers that are none": {desk, "/api/v1/hosts/desk/questions", `{"answers":[{"id":"q1"}]}`, 422},
		} {
			if got := send(c.token, c.path, c.body); got != c.want {
				t.Errorf("%s: %d, want %d", what, got, c.want)
			}
		}
		if l := s.HostsHere(); len(l) != 0 {
			t.Errorf("after refusals it knows %+v", l)
		}
		if l, err := s.present(t.Context(), "host"); err != nil || len(l) != 0 {
			t.Errorf("after refusals the store says %v, %v", l, err)
		}
		if got := send(desk, path, good); got != 200 {
			t.Errorf("its own report: %d", got)
		}
		if v, ok := s.HostHere("desk"); !ok || len(v.Instances) != 1 || v.Instances[0].Blocks == nil {
			t.Errorf("after its report: %+v", v)
		}
	})
}
