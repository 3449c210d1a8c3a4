package idle

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"lull/internal/lib/errtest"
)

// drawAgo draws times on a coarse grid around t0, so that coinciding times are
// frequent.
func drawAgo(t *rapid.T, name string) time.Time {
	if rapid.IntRange(0, 4).Draw(t, name+" set") == 0 {
		return time.Time{}
	}
	return t0.Add(-time.Duration(rapid.IntRange(-3, 40).Draw(t, name)) * 10 * time.Minute)
}

func drawPolicy(t *rapid.T) Policy {
	min := func(name string, lo, hi int) Duration {
		return Duration(time.Duration(rapid.IntRange(lo, hi).Draw(t, name)) * 5 * time.Minute)
	}
	on := func(name string) bool { return rapid.IntRange(0, 9).Draw(t, name) > 0 }
	p := Policy{Timeout: min("timeout", 1, 30), Snooze: min("snooze", 0, 30), WarnBefore: min("warn", 0, 3),
		CheckInterval: min("interval", 1, 6), Detection: on("detection"), AutoPause: on("auto pause")}
	if rapid.Bool().Draw(t, "name signals") {
		p.Signals = rapid.SliceOfNDistinct(rapid.SampledFrom(names), 0, 3, rapid.ID[string]).Draw(t, "signals")
	}
	return p
}

var names = []string{"cpu", "network", "cml"}

func drawReading(t *rapid.T, signal string) Reading {
	r := Reading{Signal: signal, State: State(rapid.IntRange(0, 3).Draw(t, signal+" state")),
		At: t0.Add(-time.Duration(rapid.IntRange(0, 20).Draw(t, signal+" at")) * 5 * time.Minute)}
	if rapid.Bool().Draw(t, signal+" has event") {
		r.LastEvent = drawAgo(t, signal+" event")
	}
	if r.State == Quiet && rapid.IntRange(0, 3).Draw(t, signal+" has windows") == 0 {
		r.Window = Duration(time.Duration(rapid.IntRange(1, 12).Draw(t, signal+" window")) * 5 * time.Minute)
		r.QuietSince = r.At.Add(-time.Duration(r.Window) * time.Duration(rapid.IntRange(1, 4).Draw(t, signal+" windows")))
	}
	return r
}

func drawEvidence(t *rapid.T) Evidence {
	e := Evidence{Status: "RUNNING", Running: rapid.IntRange(0, 9).Draw(t, "running") > 0,
		LastActivityAt: drawAgo(t, "activity"), LastResumedAt: drawAgo(t, "resumed"), RunningSince: drawAgo(t, "running"), CreatedAt: drawAgo(t, "created"),
		SnoozedUntil: drawAgo(t, "snoozed").Add(time.Hour), WarningSentAt: drawAgo(t, "warned")}
	if e.SnoozedUntil.Year() < 2000 {
		e.SnoozedUntil = time.Time{}
	}
	for _, n := range rapid.SliceOfNDistinct(rapid.SampledFrom(names), 0, 3, rapid.ID[string]).Draw(t, "readings") {
		e.Readings = append(e.Readings, drawReading(t, n))
	}
	if rapid.IntRange(0, 5).Draw(t, "connected") == 0 {
		e.Connections = 1
	}
	for i := range rapid.IntRange(0, 2).Draw(t, "leases") {
		e.Leases = append(e.Leases, Lease{Holder: fmt.Sprint(i),
			ExpiresAt: t0.Add(time.Duration(rapid.IntRange(-3, 12).Draw(t, "expiry")) * 10 * time.Minute)})
	}
	if rapid.IntRange(0, 5).Draw(t, "guarded") == 0 {
		g := Block{Code: Cooldown, Sentence: "cooldown"}
		if rapid.Bool().Draw(t, "guard ends") {
			end := t0.Add(time.Duration(rapid.IntRange(-3, 12).Draw(t, "guard end")) * 10 * time.Minute)
			g.Until = &end
		}
		e.Guards = append(e.Guards, g)
	}
	return e
}

// TestLawUnknownNeverAllows: an unknown signal that counts never allows a pause.
func TestLawUnknownNeverAllows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, e := drawPolicy(t), drawEvidence(t)
		v := Decide(t0, p, e)
		for _, r := range e.Readings {
			if r.State == Unknown && p.Counts(r.Signal) && (v.Eligible || v.TargetPauseAt != nil || !v.Has(SignalUnknown)) {
				t.Fatalf("%s is unknown, yet %+v", r.Signal, v)
			}
		}
		for i := range e.Readings { // turning any reading to unknown never makes the verdict eligible
			e2 := e
			e2.Readings = append([]Reading(nil), e.Readings...)
			e2.Readings[i].State = Unknown
			if p.Counts(e2.Readings[i].Signal) && Decide(t0, p, e2).Eligible {
				t.Fatalf("eligible with unknown %s", e2.Readings[i].Signal)
			}
		}
	})
}

// TestLawActiveNeverAllows: an active reading that counts never allows a pause,
// whatever its age and the time of its event, and no pause is predicted without a
// newer reading.
func TestLawActiveNeverAllows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, e := drawPolicy(t), drawEvidence(t)
		if len(e.Readings) == 0 {
			return
		}
		e.Readings[0].State = Active
		if rapid.Bool().Draw(t, "bounded") {
			e.Readings[0].MaxAge = Duration(time.Minute)
		}
		v := Decide(t0, p, e)
		if p.Counts(e.Readings[0].Signal) && (v.Eligible || v.TargetPauseAt != nil || v.WarnDue || !v.Has(SignalActive)) {
			t.Fatalf("%s is active, yet %+v", e.Readings[0].Signal, v)
		}
	})
}

// TestLawQuietProvesItsWindowsOnly: a quiet reading with windows proves no more
// than its windows. There is no pause until they cover the timeout without a gap,
// and one of them lies completely after the baseline.
func TestLawQuietProvesItsWindowsOnly(t *testing.T) {
	eligible := 0
	rapid.Check(t, func(t *rapid.T) {
		all := drawEvidence(t)
		p := Policy{Timeout: drawPolicy(t).Timeout, CheckInterval: 1, Detection: true, AutoPause: true}
		e := Evidence{Running: true, LastActivityAt: all.LastActivityAt, RunningSince: all.RunningSince}
		for _, r := range all.Readings {
			r.State, r.LastEvent, r.Window = Quiet, time.Time{}, max(r.Window, Duration(5*time.Minute))
			r.QuietSince = r.At.Add(-time.Duration(r.Window) * time.Duration(rapid.IntRange(1, 20).Draw(t, r.Signal+" quiet windows")))
			e.Readings = append(e.Readings, r)
		}
		v := Decide(t0, p, e)
		if !v.Eligible {
			return
		}
		for _, r := range e.Readings {
			if r.QuietSince.IsZero() || !p.Counts(r.Signal) || r.State != Quiet {
				continue
			}
			eligible++
			if r.At.Add(-time.Duration(r.Window)).Before(v.base()) || r.QuietSince.After(v.base()) && t0.Sub(r.QuietSince) < time.Duration(p.Timeout) {
				t.Fatalf("%+v does not cover the idle time since %v, yet %+v", r, v.base(), v)
			}
		}
	})
	if eligible == 0 {
		t.Error("no drawn case was eligible with windows")
	}
}

// TestLawMoreActivityNeverMoreIdle: more activity never makes a verdict more
// idle.
func TestLawMoreActivityNeverMoreIdle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, e := drawPolicy(t), drawEvidence(t)
		before := Decide(t0, p, e)
		more := e
		more.Readings = append([]Reading(nil), e.Readings...)
		more.Leases = append([]Lease(nil), e.Leases...)
		switch rapid.IntRange(0, 4).Draw(t, "kind") {
		case 0:
			when := t0.Add(-time.Duration(rapid.IntRange(0, 40).Draw(t, "when")) * 10 * time.Minute)
			if when.After(e.LastActivityAt) && !before.base().After(when) {
				more.LastActivityAt = when
			}
		case 1:
			for i := range more.Readings {
				if more.Readings[i].State != Unknown {
					more.Readings[i].State, more.Readings[i].LastEvent = Active, later(more.Readings[i].LastEvent, t0)
				}
			}
		case 2:
			more.Connections++
		case 3:
			more.Leases = append(more.Leases, Lease{Holder: "new", ExpiresAt: t0.Add(15 * time.Minute)})
		case 4:
			more.SnoozedUntil = later(more.SnoozedUntil, t0.Add(20*time.Minute))
		}
		after := Decide(t0, p, more)
		if after.Eligible && !before.Eligible {
			t.Fatalf("became eligible: %+v -> %+v", before, after)
		}
		if after.IdleMinutes > before.IdleMinutes && before.Baseline != "none" {
			t.Fatalf("idle rose from %v to %v", before.IdleMinutes, after.IdleMinutes)
		}
		// With more activity, the engine waits for a new window instead of the
		// overdue one.
		if before.TargetPauseAt == nil && after.TargetPauseAt != nil && before.Baseline != "none" && !before.Has(SignalIncomplete) {
			t.Fatalf("a target appeared: %+v -> %+v", before, after)
		}
		if before.TargetPauseAt != nil && after.TargetPauseAt != nil && after.TargetPauseAt.Before(*before.TargetPauseAt) {
			t.Fatalf("the target came nearer: %v -> %v", before.TargetPauseAt, after.TargetPauseAt)
		}
	})
}

func (v Verdict) base() time.Time {
	return v.At.Add(-time.Duration(v.IdleMinutes * float64(time.Minute)))
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// TestLawTargetIsTheFlip: the verdict becomes eligible exactly at TargetPauseAt,
// if nothing new arrives except the warning that the verdict itself requested.
func TestLawTargetIsTheFlip(t *testing.T) {
	flips := 0
	rapid.Check(t, func(t *rapid.T) {
		p, e := drawPolicy(t), drawEvidence(t)
		v := Decide(t0, p, e)
		if v.Eligible {
			if v.TargetPauseAt == nil || v.TargetPauseAt.After(t0) {
				t.Fatalf("eligible now, but the target is %v", v.TargetPauseAt)
			}
			return
		}
		if v.TargetPauseAt == nil {
			for _, b := range v.Blocks {
				if b.Until == nil {
					return
				}
			}
			t.Fatalf("no target, yet every block has a known end: %+v", v.Blocks)
		}
		flips++
		target := *v.TargetPauseAt
		if !target.After(t0) {
			t.Fatalf("blocked at %v with a target in the past: %v, %+v", t0, target, v.Blocks)
		}
		if p.WarnBefore > 0 && (v.WarnDue || v.WarnAt.After(t0)) {
			e.WarningSentAt = later(*v.WarnAt, t0)
		}
		windowsUntil(&e, target.Add(-1))
		if w := Decide(target.Add(-1), p, e); w.Eligible {
			t.Fatalf("eligible before its target %v", target)
		}
		windowsUntil(&e, target)
		if w := Decide(target, p, e); !w.Eligible {
			t.Fatalf("not eligible at its target %v: %+v (at %v: %+v)", target, w.Blocks, t0, v.Blocks)
		}
	})
	if flips == 0 && !testing.Short() { // with -short, few draws are made, and none may have a target
		t.Error("no drawn case had a flip ahead")
	}
}

// windowsUntil adds quiet windows up to a time, like a source that keeps
// publishing them.
func windowsUntil(e *Evidence, at time.Time) {
	for i := range e.Readings {
		if r := &e.Readings[i]; !r.QuietSince.IsZero() {
			r.At = at
		}
	}
}

// TestLawReplay: a verdict replayed from its recorded inputs is identical.
func TestLawReplay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type record struct {
			P Policy
			E Evidence
		}
		in := record{drawPolicy(t), drawEvidence(t)}
		b, err := json.Marshal(in)
		errtest.None(t, err)
		var out record
		errtest.None(t, json.Unmarshal(b, &out))
		if diff := cmp.Diff(Decide(t0, in.P, in.E), Decide(t0, out.P, out.E)); diff != "" {
			t.Fatalf("replay differs:\n%s\n%s", diff, b)
		}
	})
}

// TestLawNextCheck: the next check is never later than the target, the warning or
// the check interval, and never in the past.
func TestLawNextCheck(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, e := drawPolicy(t), drawEvidence(t)
		v := Decide(t0, p, e)
		n := v.NextIdleCheckAt
		if n.Before(t0) || n.After(t0.Add(time.Duration(p.CheckInterval))) {
			t.Fatalf("next check %v", n)
		}
		if v.TargetPauseAt != nil && n.After(later(*v.TargetPauseAt, t0)) {
			t.Fatalf("next check %v after target %v", n, v.TargetPauseAt)
		}
	})
}
