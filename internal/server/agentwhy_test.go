package server

import (
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/memnet"
	"lull/internal/protocol/control"
	"lull/internal/store/mem"
)

// hearsReport sends s an agent's report with a CPU value.
func (s *Server) hearsReport(t *testing.T, machine string, sequence uint64, cpu float64) {
	t.Helper()
	now := time.Now()
	r := control.AgentReport{At: now, Sequence: sequence, StartedAt: now.Add(-time.Hour).Truncate(time.Hour), BootID: "b", Version: "v1", Interval: idle.Duration(time.Minute), LastUse: now.Add(-time.Minute),
		Readings: []idle.Reading{idle.Judge("cpu", cpu, 5, "%", time.Minute, now)},
		Judged:   &control.AgentJudged{Policy: idle.Policy{Name: "agent", Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true, Action: "stop"}}}
	body, err := json.Marshal(r)
	if err == nil {
		_, err = s.agentReport(t.Context(), machine, r, body)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestEveryServerKnowsAnAgentsPast has an agent report first to one server and then
// to another. It checks that both explain the agent's state at both times, that
// neither does for a time without reports, and that what only a stopped server
// recorded is unknown.
func TestEveryServerKnowsAnAgentsPast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, net := mem.New(mem.Options{}).Client(), &memnet.Network{}
		defer db.Close()
		one, stopOne := together(t, db, net, "one")
		two, stopTwo := together(t, db, net, "two")
		time.Sleep(time.Second)
		begun := time.Now()
		n := uint64(0)
		report := func(s *Server, minutes int, cpu float64) {
			for range minutes {
				n++
				s.hearsReport(t, "m1", n, cpu)
				time.Sleep(time.Minute)
			}
		}
		report(one, 10, 2)
		time.Sleep(10 * time.Minute) // without any report
		report(two, 10, 80)

		says := func(when string, s *Server, after time.Duration, readings, verdict string) {
			t.Helper()
			at := time.Time{}
			if after > 0 {
				at = begun.Add(after)
			}
			y, err := s.agentWhy(t.Context(), "m1", at)
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			if y.Verdict != nil {
				got = y.Signals[0].Verdict.String()
			}
			if now := at.IsZero() && y.Verdict != nil; now != (y.Question == "why is it running") {
				t.Errorf("%s, %s answers %q", when, s.name, y.Question)
			}
			if y.Readings != readings || got != verdict {
				t.Errorf("%s, %s says %s, %q: %s; want %s, %q", when, s.name, y.Readings, got, y.Answer, readings, verdict)
			}
		}
		for _, s := range []*Server{one, two} {
			says("what the first heard", s, 5*time.Minute, "recorded", "quiet")
			says("when it was silent", s, 15*time.Minute, "unknown", "")
			says("what the second heard", s, 25*time.Minute, "recorded", "active")
		}
		says("now", two, 0, "live", "active")
		says("now", one, 0, "recorded", "active")
		if _, err := one.agentWhy(t.Context(), "m2", time.Time{}); err == nil {
			t.Error("an agent that is unknown was found")
		}
		if y, err := one.agentWhy(t.Context(), "m2", begun); err != nil || y.Readings != "unknown" || y.Verdict != nil {
			t.Errorf("of one that is unknown, at a past time: %+v, %v", y, err)
		}
		time.Sleep(10 * time.Minute)
		says("when it is silent again", one, 0, "unknown", "")
		says("when it is silent again", two, 0, "unknown", "")
		stopOne()
		says("what only the first heard", two, 5*time.Minute, "unknown", "")
		stopTwo()
	})
}
