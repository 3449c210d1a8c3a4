package worker_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet/worker"
)

// TestBlocksAgreeWithTheStatus checks that a running worker with a pending stop is
// not described as stopped, and that the fact about an unknown signal has a remedy.
func TestBlocksAgreeWithTheStatus(t *testing.T) {
	now := time.Date(2026, 3, 2, 20, 0, 0, 0, time.UTC)
	w := &worker.Worker{Name: "one", Status: power.WorkerRunning, DesiredStatus: power.WorkerStopped, CreatedAt: now.Add(-100 * time.Hour), Armed: true, IsIdleDetectionEnabled: true,
		Intent: &worker.Intent{Reason: power.ReasonManual, By: "ada", At: now}}
	rules := policy.Resolved{Enabled: true, AutoPause: true, Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(time.Minute), ActivitySources: []string{worker.SourceCML}}
	for detail, advice := range map[string]string{
		"not_opted_in":             "switch telemetry on in CML",
		"opt_in_unreadable: x":     "lull's CML user",
		"unauthorized: status 401": "cml_username",
		"unreachable: refused":     "certificate",
		"it was not read yet":      "lull worker detect-idle one",
		"malformed: x":             "cml must be readable",
	} {
		r := worker.Case{Now: now, Worker: w, Rules: &rules, Readings: []idle.Reading{idle.NotKnown(worker.SourceCML, now, detail)}}.Judge()
		if r.Verdict.Eligible || r.Verdict.Has(idle.StatusNotRunning) || !r.Verdict.Has(idle.StopIntended) {
			t.Errorf("blocks %+v of a running worker whose stop is pending", r.Verdict.Blocks)
		}
		a := why.Explain(why.Account{Name: "one", Kind: why.KindWorker, State: "RUNNING"}, r.Decision)
		if f := a.Fact(idle.StopIntended); f == nil || !slices.ContainsFunc(a.Change, func(way string) bool { return strings.Contains(way, advice) }) {
			t.Errorf("%s: the way out is\n%q", detail, a.Change)
		}
	}
	w.DesiredStatus, w.Intent = power.WorkerRunning, nil
	if r := (worker.Case{Now: now, Worker: w, Rules: &rules}).Judge(); r.Verdict.Has(idle.StopIntended) {
		t.Errorf("a stop is pending that was not asked for: %+v", r.Verdict.Blocks)
	}
}
