package evidence_test

import (
	"strings"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
)

// TestPastIsOfItsMoment: of a recorded check nothing is said to come that had
// come by the moment asked about, and an older check's words are told as such.
func TestPastIsOfItsMoment(t *testing.T) {
	p := idle.Policy{Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true}
	until := t0.Add(20 * time.Second)
	check := evidence.Record{At: t0, Object: "w", Next: t0.Add(10 * time.Second), Decision: evidence.Decide(t0, p, idle.Evidence{Running: true, CreatedAt: t0.Add(-2 * time.Hour),
		Guards: []idle.Block{{Code: idle.Schedule, Sentence: "Schedule office is closed.", Until: &until}}})}
	same := evidence.Record{At: t0.Add(time.Minute), Object: "w", Since: t0, Decision: check.Decision}
	for _, c := range []struct {
		after        time.Duration
		next, target bool
		begins       string
	}{
		{time.Second, true, true, "Schedule office is closed."},
		{15 * time.Second, false, true, "As of the check at 2026-02-01T12:00:00Z: Schedule office is closed."},
		{30 * time.Second, false, false, "As of the check at 2026-02-01T12:00:00Z: Schedule office is closed."},
	} {
		at := t0.Add(c.after)
		a := evidence.Past(evidence.Account{At: at, State: "RUNNING"}, evidence.Recall{Before: &check, After: &same})
		if v := a.Verdict; v == nil || v.NextIdleCheckAt.IsZero() == c.next || c.next && !v.NextIdleCheckAt.Equal(check.Next) || (v.TargetPauseAt != nil) != c.target || !strings.HasPrefix(a.Answer, c.begins) {
			t.Errorf("after %s: %s %+v", c.after, a.Answer, v)
		}
	}
	if check.Verdict.TargetPauseAt == nil || check.Verdict.NextIdleCheckAt.Equal(check.Next) {
		t.Error("the record itself was changed")
	}
}

// TestNeverPausedNamesNoTime: what is never paused for idleness is told what would
// change that, and no time at which nothing happens.
func TestNeverPausedNamesNoTime(t *testing.T) {
	p := idle.Policy{Timeout: idle.Duration(366 * 24 * time.Hour), CheckInterval: idle.Duration(time.Minute), AutoPause: true}
	a := evidence.Explain(evidence.Account{Kind: evidence.KindInstance}, evidence.Decide(t0, p, idle.Evidence{Running: true, CreatedAt: t0.Add(-2 * time.Hour)}))
	if got := strings.Join(a.Change, "; "); got != "--pause-after would have to be above 0" {
		t.Errorf("to change that: %s", got)
	}
	if strings.Contains(a.Answer, "366d") || !strings.Contains(a.Answer, "Idle for 2h.") {
		t.Errorf("answer: %s", a.Answer)
	}
}
