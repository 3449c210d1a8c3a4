package server

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"lull/internal/core/idle"
	"lull/internal/protocol/control"
	"lull/internal/store/mem"
)

// counts checks the number of silent agents in the metrics of s.
func (s *Server) counts(t *testing.T, when string, want float64) {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(s.Collector())
	families, err := reg.Gather()
	if err != nil || len(families) != 2 {
		t.Fatalf("%s: %d metrics, %v", when, len(families), err)
	}
	for _, f := range families {
		if got := f.GetMetric()[0].GetGauge().GetValue(); f.GetName() == "lull_silent_agents" && got != want || f.GetName() == "lull_silent_hosts" && got != 0 {
			t.Errorf("%s: %s of %s is %v", when, f.GetName(), s.name, got)
		}
	}
}

// TestSilentAgents checks that an agent that misses reports is counted by the server
// that received the last one, but not if it now reports to another server or has
// stopped its own machine.
func TestSilentAgents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := mem.New(mem.Options{}).Client()
		defer db.Close()
		one, stopOne := started(t, db, "one")
		defer stopOne()
		two, stopTwo := started(t, db, "two")
		defer stopTwo()
		one.counts(t, "when no agent reports", 0)
		one.hears(t, "m1")
		one.counts(t, "after a report", 0)
		time.Sleep(10 * time.Minute)
		one.counts(t, "when it is silent", 1)
		two.counts(t, "when it is silent", 0)
		two.hears(t, "m1")
		one.counts(t, "after it moved", 0)
		two.counts(t, "after it moved", 0)

		body := []byte(`{"version":"v1","action":{"action":"stop","phase":"calling"}}`)
		r := control.AgentReport{Version: "v1", Interval: idle.Duration(30 * time.Second)}
		if _, err := two.agentReport(t.Context(), "m1", r, body); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Minute)
		two.counts(t, "when it has stopped its machine", 0)
	})
}
