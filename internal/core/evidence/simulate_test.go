package evidence_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
)

// week returns every use of one worker in a week of scripted users. It is the
// ground truth of the tests.
func week(rng *rand.Rand, begin time.Time) (uses []time.Time) {
	for day := range 7 {
		for range 1 + rng.IntN(3) {
			at := begin.Add(time.Duration(day)*24*time.Hour + time.Duration(7*60+rng.IntN(12*60))*time.Minute)
			if len(uses) > 0 && !at.After(uses[len(uses)-1]) {
				continue
			}
			for range 1 + rng.IntN(60) {
				uses = append(uses, at)
				at = at.Add(time.Duration(20+rng.IntN(460)) * time.Second)
			}
		}
	}
	return uses
}

// record returns the records of that week by a controller in dry-run mode: every
// five minutes the newest use and the ten before it.
func record(uses []time.Time, begin time.Time) (out []evidence.Record) {
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	p := idle.Policy{Name: "deployed", Timeout: idle.Duration(time.Hour), Snooze: idle.Duration(45 * time.Minute), WarnBefore: idle.Duration(10 * time.Minute),
		CheckInterval: idle.Duration(5 * time.Minute), Detection: true, AutoPause: true, Signals: []string{"cml"}}
	told := time.Time{}
	for at := begin; at.Before(begin.Add(7 * 24 * time.Hour)); at = at.Add(5 * time.Minute) {
		r := idle.Reading{Signal: "cml", State: idle.Quiet, At: at, MaxAge: idle.Duration(10 * time.Minute)}
		var fresh []time.Time
		for _, u := range uses {
			if u.After(at) {
				break
			}
			r.LastEvent = u
			if u.After(told) {
				fresh, told = append(fresh, u), u
			}
		}
		if !r.LastEvent.IsZero() && at.Sub(r.LastEvent) < time.Hour {
			r.State = idle.Active
		}
		d := evidence.Decide(at, p, idle.Evidence{Status: "RUNNING", Running: true, LastActivityAt: r.LastEvent, CreatedAt: begin, Readings: []idle.Reading{r},
			Guards: []idle.Block{{Code: idle.Shadow, Sentence: "In dry-run mode."}}})
		out = append(out, rec.Take(evidence.Record{At: d.Verdict.At, Object: "w", Next: at.Add(5 * time.Minute), Activity: fresh, Decision: d})...)
	}
	return append(out, rec.Flush()...)
}

// byHand computes, from the script alone, what a timeout and a snooze would have
// done.
func byHand(uses []time.Time, begin time.Time, timeout, snooze, window time.Duration) (pauses, wrong int, stopped time.Duration) {
	end := begin.Add(7 * 24 * time.Hour)
	last, resumed := begin, time.Time{}
	for _, next := range append(uses, end) {
		at := last.Add(timeout)
		if s := resumed.Add(snooze); !resumed.IsZero() && s.After(at) {
			at = s
		}
		if at.Before(next) {
			pauses++
			stopped += next.Sub(at)
			resumed = next
			if next != end && next.Sub(at) <= window {
				wrong++
			}
		}
		last = next
	}
	return pauses, wrong, stopped
}

// TestWeekUnderThreePolicies simulates three policies on the journal of a
// scripted week. The pauses, hours and false stops must be exactly those computed
// from the script.
func TestWeekUnderThreePolicies(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	begin := t0.UTC()
	total := map[string][2]int{}
	for range 3 {
		uses := week(rng, begin)
		records := record(uses, begin)
		for i := range records {
			errtest.None(t, records[i].Replay())
		}
		for _, p := range []idle.Policy{
			{Name: "aggressive", Timeout: idle.Duration(15 * time.Minute)},
			{Name: "balanced", Timeout: idle.Duration(time.Hour), Snooze: idle.Duration(30 * time.Minute)},
			{Name: "conservative", Timeout: idle.Duration(4 * time.Hour), WarnBefore: idle.Duration(5 * time.Minute)},
		} {
			trial := evidence.Trial{Object: "w", Policy: &p, Snooze: &p.Snooze, WarnBefore: &p.WarnBefore, Window: 15 * time.Minute, From: begin, To: begin.Add(7 * 24 * time.Hour)}
			var follow evidence.Follow
			for i := range records {
				r := records[i]
				b, err := r.Pack() // as if read from a journal
				errtest.None(t, err)
				if r, err = evidence.Unpack(b); err != nil {
					t.Fatal(err)
				}
				follow.Add(&r, trial.Add)
			}
			follow.End(trial.To, trial.Add)
			trial.End()
			wrong := 0
			for _, s := range trial.Stops {
				if s.False {
					wrong++
				}
			}
			pauses, want, stopped := byHand(uses, begin, time.Duration(p.Timeout), time.Duration(p.Snooze), trial.Window)
			if len(trial.Stops) != pauses || wrong != want || (trial.Paused-stopped).Abs() > time.Second || trial.Unknown != 0 {
				t.Fatalf("%s: %d pauses, %d false, %s stopped, %s unknown; by the script %d, %d, %s", p.Name, len(trial.Stops), wrong, trial.Paused, trial.Unknown, pauses, want, stopped)
			}
			if trial.Paused+trial.Running != 7*24*time.Hour {
				t.Errorf("%s: %s stopped and %s running are no week", p.Name, trial.Paused, trial.Running)
			}
			c := total[p.Name]
			total[p.Name] = [2]int{c[0] + pauses, c[1] + want}
		}
	}
	t.Logf("pauses and false stops: %v", total)
	if total["aggressive"][0] <= total["conservative"][0] {
		t.Error(fmt.Sprint("the script tells no policies apart: ", total))
	}
}

// TestTrialWithoutSnoozeOrWarning checks that a snooze or warning of zero
// disables it, while nil keeps the recorded one.
func TestTrialWithoutSnoozeOrWarning(t *testing.T) {
	begin, none := t0.UTC(), idle.Duration(0)
	at := func(h float64) time.Time { return begin.Add(time.Duration(h * float64(time.Hour))) }
	p := idle.Policy{Name: "deployed", Timeout: idle.Duration(time.Hour), Snooze: idle.Duration(8 * time.Hour), WarnBefore: idle.Duration(30 * time.Minute),
		CheckInterval: idle.Duration(5 * time.Minute), Detection: true, AutoPause: true}
	var records []evidence.Record
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	for now := begin; now.Before(at(12)); now = now.Add(5 * time.Minute) {
		e := idle.Evidence{Status: "RUNNING", Running: true, LastActivityAt: begin, LastResumedAt: begin, CreatedAt: begin.Add(-time.Hour),
			Readings: []idle.Reading{{Signal: "cml", State: idle.Quiet, At: now, MaxAge: idle.Duration(10 * time.Minute)}}}
		if now.Before(at(5)) {
			e.Connections = 1 // prevents the predicted pause, so the warning comes after it
		}
		d := evidence.Decide(now, p, e)
		records = append(records, rec.Take(evidence.Record{At: d.Verdict.At, Object: "w", Next: now.Add(5 * time.Minute), Decision: d})...)
	}
	records = append(records, rec.Flush()...)
	for _, c := range []struct {
		snooze, warn *idle.Duration
		want         time.Time
	}{
		{nil, nil, at(8)}, {&none, nil, at(5.5)}, {&none, &none, at(5)}, {nil, &none, at(8)},
	} {
		x := evidence.Trial{Object: "w", Policy: &idle.Policy{Timeout: idle.Duration(time.Hour)}, Snooze: c.snooze, WarnBefore: c.warn, From: begin, To: at(12)}
		var follow evidence.Follow
		for i := range records {
			follow.Add(&records[i], x.Add)
		}
		follow.End(x.To, x.Add)
		x.End()
		if len(x.Stops) != 1 || !x.Stops[0].From.Equal(c.want) {
			t.Errorf("protection %v and warning %v: %+v, want one stop at %s", c.snooze, c.warn, x.Stops, c.want)
		}
	}
}

// TestTrialKnowsWhatHappened checks that time for which a user stopped the worker
// is no saving, that time after a real pause is still evaluated, and that time
// without checks is unknown.
func TestTrialKnowsWhatHappened(t *testing.T) {
	begin := t0.UTC()
	at := func(h float64) time.Time { return begin.Add(time.Duration(h * float64(time.Hour))) }
	var records []evidence.Record
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	for m := 0; m < 24*60; m += 5 {
		now := begin.Add(time.Duration(m) * time.Minute)
		h := now.Sub(begin).Hours()
		if h > 1 && h < 5 || h >= 8 && h < 12 || h >= 16 && h < 18 {
			continue // paused by lull; off by a user; the server was down
		}
		active := begin
		if h >= 5 {
			active = at(5)
		}
		if h >= 12 {
			active = at(12)
		}
		records = append(records, rec.Take(check(now, active, idle.Evidence{}))...)
	}
	records = append(records, rec.Flush()...)
	trial := func(timeout time.Duration) evidence.Trial {
		x := evidence.Trial{Object: "w-1", Policy: &idle.Policy{Name: "x", Timeout: idle.Duration(timeout)}, From: begin, To: at(24),
			Off: []evidence.Off{{From: at(1), To: at(5), Automatic: true}, {From: at(8), To: at(12)}}}
		var follow evidence.Follow
		for i := range records {
			follow.Add(&records[i], x.Add)
		}
		follow.End(x.To, x.Add)
		x.End()
		return x
	}
	near := func(what string, got, want time.Duration) {
		t.Helper()
		if (got - want).Abs() > 15*time.Minute {
			t.Errorf("%s: %s, want about %s", what, got, want)
		}
	}
	two := trial(2 * time.Hour)
	near("paused under two hours", two.Paused, 3*time.Hour+time.Hour+8*time.Hour) // 2 to 5, 7 to 8, and from 14 but for the gap
	near("off by a user", two.Other, 4*time.Hour)
	near("unknown", two.Unknown, 2*time.Hour)
	never := trial(20 * time.Hour)
	near("paused under twenty hours", never.Paused, 0)
	near("running under twenty hours", never.Running, 18*time.Hour)
}
