package worker_test

import (
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/worker"
)

// TestReadingsOfTheRuleThatDecides checks that readings are judged by the rule that
// decides: an event that still counts for the policy's timeout can be too old for the
// grace of a closed schedule. The recorded decision and the final check must agree on
// that. With force, readings do not count.
func TestReadingsOfTheRuleThatDecides(t *testing.T) {
	now := time.Date(2026, 3, 2, 20, 0, 0, 0, time.UTC)
	closed, used := now.Add(-time.Hour), now.Add(-54*time.Hour)
	w := &worker.Worker{Status: power.WorkerRunning, DesiredStatus: power.WorkerRunning, CreatedAt: now.Add(-100 * time.Hour), LastActivityAt: &used, Armed: true, IsIdleDetectionEnabled: true}
	for _, c := range []struct {
		last     time.Time
		schedule bool
		force    bool
		eligible bool
	}{
		{used, false, false, false}, // the policy decides: idle for 54h of 96h
		{used, true, false, true},
		{now.Add(-20 * time.Second), true, false, false},
		{used, true, true, true},
	} {
		rules := policy.Resolved{Name: "slow", Enabled: true, AutoPause: true, Timeout: idle.Duration(96 * time.Hour), CheckInterval: idle.Duration(time.Minute), ActivitySources: []string{worker.SourceCML}}
		reason := power.ReasonIdleTimeout
		if c.schedule {
			reason = power.ReasonSchedule
			rules.ScheduleState = &policy.ScheduleState{Schedule: "office", Zone: "UTC", Grace: 1, Force: c.force, Last: &policy.Boundary{At: closed}}
		}
		readings := []idle.Reading{{Signal: worker.SourceCML, State: idle.Quiet, At: now, LastEvent: c.last}}
		k := worker.Case{Now: now, Worker: w, Rules: &rules, Readings: readings}
		d, look := k.Judge(), k.FinalCheck(reason)
		if d.Verdict.Eligible != c.eligible {
			t.Errorf("%+v: eligible %t, %+v", c, d.Verdict.Eligible, d.Verdict.Blocks)
		}
		if look.Verdict.Eligible != c.eligible || look.Replay() != nil {
			t.Errorf("%+v: final check eligible %t, %+v", c, look.Verdict.Eligible, look.Verdict.Blocks)
		}
	}
}
