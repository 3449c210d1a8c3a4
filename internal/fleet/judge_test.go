package fleet_test

import (
	"testing"
	"time"

	"lull/internal/fleet"
	"lull/internal/idle"
	"lull/internal/policy"
	"lull/internal/power"
)

// TestReadingsOfTheRuleThatDecides: a signal whose last event the policy still
// counts is quiet where the grace of a closed schedule decides, in the recorded
// decision and right before the call, too; with force it stays what it is.
func TestReadingsOfTheRuleThatDecides(t *testing.T) {
	now := time.Date(2026, 3, 2, 20, 0, 0, 0, time.UTC)
	closed, used := now.Add(-time.Hour), now.Add(-54*time.Hour)
	w := &fleet.Worker{Status: power.WorkerRunning, DesiredStatus: power.WorkerRunning, CreatedAt: now.Add(-100 * time.Hour), LastActivityAt: &used, Armed: true, IsIdleDetectionEnabled: true}
	for _, c := range []struct {
		last     time.Time
		schedule bool
		force    bool
		want     idle.State
		eligible bool
	}{
		{used, false, false, idle.Active, false}, // the policy decides: idle for 54h of 96h
		{used, true, false, idle.Quiet, true},
		{now.Add(-20 * time.Second), true, false, idle.Active, false},
		{used, true, true, idle.Active, true},
	} {
		rules := policy.Resolved{Name: "slow", Enabled: true, AutoPause: true, Timeout: idle.Duration(96 * time.Hour), CheckInterval: idle.Duration(time.Minute), ActivitySources: []string{fleet.SourceCML}}
		reason := fleet.ReasonIdleTimeout
		if c.schedule {
			reason = fleet.ReasonSchedule
			rules.Standing = &policy.Standing{Schedule: "office", Zone: "UTC", Grace: 1, Force: c.force, Last: &policy.Boundary{At: closed}}
		}
		readings := []idle.Reading{{Signal: fleet.SourceCML, State: idle.Active, At: now, LastEvent: c.last}}
		k := fleet.Case{Now: now, Worker: w, Rules: &rules, Readings: readings}
		d, look := k.Judge(), k.Look(reason)
		if got := d.Evidence.Readings[0].State; got != c.want || d.Verdict.Eligible != c.eligible {
			t.Errorf("%+v: judged %s, eligible %t", c, got, d.Verdict.Eligible)
		}
		if got := look.Evidence.Readings[0].State; got != c.want || look.Replay() != nil {
			t.Errorf("%+v: looked at %s", c, got)
		}
		if readings[0].State != idle.Active {
			t.Error("the reading at hand was changed")
		}
	}
}
