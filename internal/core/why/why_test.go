package why_test

import (
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/why"
)

var t0 = time.Date(2026, 2, 1, 12, 0, 0, 0, time.UTC)

// TestPastIsOfItsMoment checks that an account of a past time does not announce
// events that had already happened then, and that it marks sentences that an
// earlier check recorded.
func TestPastIsOfItsMoment(t *testing.T) {
	p := idle.Policy{Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true}
	until := t0.Add(20 * time.Second)
	check := evidence.Record{At: t0, Object: "w", Next: t0.Add(10 * time.Second), Decision: evidence.Decide(t0, p, idle.Evidence{Running: true, CreatedAt: t0.Add(-2 * time.Hour),
		Guards: []idle.Block{{Code: idle.Schedule, Sentence: "Schedule office is closed.", Until: &until}}})}
	same := evidence.Record{At: t0.Add(time.Minute), Object: "w", Since: t0, Decision: check.Decision}
	for _, c := range []struct {
		after        time.Duration
		next, target bool
		first        idle.Code
	}{
		{time.Second, true, true, idle.Schedule},
		{15 * time.Second, false, true, why.EarlierCheck.Code},
		{30 * time.Second, false, false, why.EarlierCheck.Code},
	} {
		at := t0.Add(c.after)
		a := why.Past(why.Account{At: at, State: "RUNNING"}, evidence.Recall{Before: &check, After: &same})
		if v := a.Verdict; v == nil || v.NextIdleCheckAt.IsZero() == c.next || c.next && !v.NextIdleCheckAt.Equal(check.Next) || (v.TargetPauseAt != nil) != c.target || a.Facts[0].Code != c.first {
			t.Errorf("after %s: %+v %+v", c.after, a.Facts, v)
		}
	}
	if check.Verdict.TargetPauseAt == nil || check.Verdict.NextIdleCheckAt.Equal(check.Next) {
		t.Error("the record itself was changed")
	}
}

// TestNeverPausedNamesNoTime checks that the account of a worker that is never
// paused when idle names the change that would allow a pause, and no time.
func TestNeverPausedNamesNoTime(t *testing.T) {
	p := idle.Policy{Timeout: idle.Duration(366 * 24 * time.Hour), CheckInterval: idle.Duration(time.Minute), AutoPause: true}
	a := why.Explain(why.Account{Kind: why.KindInstance}, evidence.Decide(t0, p, idle.Evidence{Running: true, CreatedAt: t0.Add(-2 * time.Hour)}))
	if len(a.Remedies) != 1 || a.Remedies[0].Code != idle.DetectionDisabled {
		t.Errorf("to change that: %+v", a.Remedies)
	}
	for _, f := range a.Facts {
		if f.At != nil || f.Code == why.Pauses.Code {
			t.Errorf("it names a time: %+v", f)
		}
	}
}

// TestFactsAreTheAnswer checks that the answer consists of the sentences of the
// facts, that each fact has its code, time and actor, and that placeholders in
// users' texts are not expanded.
func TestFactsAreTheAnswer(t *testing.T) {
	a := why.Account{At: t0, State: "STOPPED"}
	a.Down(&evidence.Turn{At: t0.Add(-time.Hour), By: "ada 100%s {at}", Reason: "manual"})
	a.Advise(why.Start, "Start it", "a6")
	if a.Question == "" || len(a.Facts) != 2 || a.Answer != a.Facts[0].Sentence+" "+a.Facts[1].Sentence || len(a.Change) != 1 || a.Change[0] != a.Remedies[0].Sentence {
		t.Fatalf("%+v", a)
	}
	if f := a.Fact("stopped"); f == nil || f.By != "ada 100%s {at}" || !f.At.Equal(t0.Add(-time.Hour)) || f.Sentence != "ada 100%s {at} stopped it at 2026-02-01T11:00:00Z (manual)." {
		t.Errorf("%+v", f)
	}
	a.Ask("why").Add(why.Paused, time.Time{}, "", "no reason")
	if f := a.Facts[0]; len(a.Facts) != 1 || f.At != nil || f.By != "" || f.Sentence != "It was paused by an unknown user: no reason." {
		t.Errorf("%+v", f)
	}
}
