package server

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/fleet"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// started runs a server over db. Calling stop ends it.
func started(t *testing.T, db store.Store, name string, more ...func(*Options)) (s *Server, stop func()) {
	t.Helper()
	f, err := fleet.New(fleet.Options{Store: db, ID: "test"})
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Fleet: f, Name: name, Version: "v2"}
	for _, change := range more {
		change(&o)
	}
	if s, err = New(o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	<-s.Ready()
	return s, func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("server %s ended with %v", name, err)
		}
	}
}

func (s *Server) hears(t *testing.T, machine string) {
	t.Helper()
	errtest.Get(s.agentReport(t.Context(), machine, control.AgentReport{Version: "v1", Interval: idle.Duration(30 * time.Second)}, []byte(`{"version":"v1"}`)))(t)
}

// lists checks how s lists the agent m1: as reporting to server, and whether as
// stale.
func (s *Server) lists(t *testing.T, when, server string, stale bool) {
	t.Helper()
	l, err := s.everywhere(t.Context(), "agent")
	errtest.None(t, err)
	if len(l) != 1 || l[0].Name != "m1" || l[0].Server != server || l[0].Stale != stale || l[0].Version != "v1" || l[0].ReportedAt == nil || (l[0].Report != nil) != (server == s.name) {
		t.Errorf("%s: %s lists %+v, want m1 at %s, stale %t", when, s.name, l, server, stale)
	}
}

// TestEveryServerListsEveryAgent checks that an agent that reports to either of two
// servers is listed by both, without a store write per report.
func TestEveryServerListsEveryAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := mem.New(mem.Options{}).Client()
		defer db.Close()
		one, stopOne := started(t, db, "one")
		two, stopTwo := started(t, db, "two")
		revision := func() int64 {
			p, err := db.Range(t.Context(), store.Query{Keys: store.Key("x"), KeysOnly: true})
			if err != nil {
				t.Fatal(err)
			}
			return p.Revision
		}

		one.hears(t, "m1")
		one.lists(t, "after a report", "one", false)
		two.lists(t, "after a report", "one", false)
		before := revision()
		for range 20 {
			time.Sleep(30 * time.Second)
			one.hears(t, "m1")
		}
		if after := revision(); after != before {
			t.Errorf("twenty reports that say nothing new took %d writes", after-before)
		}
		two.lists(t, "after ten minutes", "one", false)

		two.hears(t, "m1")
		one.lists(t, "after it moved", "two", false)
		two.lists(t, "after it moved", "two", false)
		time.Sleep(time.Second)
		one.hears(t, "m1")
		one.lists(t, "after it came back", "one", false)
		for range 3 {
			time.Sleep(30 * time.Second)
			one.hears(t, "m1")
		}
		two.lists(t, "a minute after it came back", "one", false)

		time.Sleep(2*time.Minute + time.Second)
		one.lists(t, "when it is silent", "one", true)
		two.lists(t, "when it is silent", "one", true)
		one.hears(t, "m1")
		two.lists(t, "when it speaks again", "one", false)
		if m, err := two.machine(t.Context(), "agent", "m1"); err != nil || m.Server != "one" {
			t.Errorf("asked for it alone: %+v, %v", m, err)
		}
		if _, err := two.machine(t.Context(), "agent", "m2"); err == nil {
			t.Error("a machine that is unknown was found")
		}

		stopOne()
		two.lists(t, "after its server ended, only its own reports remain", "two", true)
		two.hears(t, "m1")
		two.lists(t, "after it found another", "two", false)
		stopTwo()
	})
}
