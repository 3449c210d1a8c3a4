package evidence_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
)

var hour = idle.Policy{Name: "p", Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(5 * time.Minute), Detection: true, AutoPause: true}

// check returns the record of a check, at time at, of a worker that is checked
// every five minutes.
func check(at, active time.Time, e idle.Evidence) evidence.Record {
	e.Status, e.Running, e.LastActivityAt = "RUNNING", true, active
	e.Readings = []idle.Reading{{Signal: "cml", State: idle.Quiet, At: at, LastEvent: active, MaxAge: idle.Duration(10 * time.Minute)}}
	if at.Sub(active) < time.Hour {
		e.Readings[0].State = idle.Active
	}
	d := evidence.Decide(at, hour, e)
	return evidence.Record{At: d.Verdict.At, Object: "w-1", Next: at.Add(5 * time.Minute), Decision: d}
}

// TestRunLength checks that a run of equal checks is written only at its end and
// at every beat, and that reading the records back neither loses nor invents
// time.
func TestRunLength(t *testing.T) {
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	var out []evidence.Record
	began := t0.UTC()
	active := began
	n := 0
	for at := began; at.Before(began.Add(24 * time.Hour)); at = at.Add(5 * time.Minute) {
		if since := at.Sub(began); since >= 10*time.Hour && since < 12*time.Hour {
			continue // the server was down
		}
		e := idle.Evidence{}
		if since := at.Sub(began); since > 4*time.Hour && since < 6*time.Hour {
			e.Leases = []idle.Lease{{Holder: "ci", ExpiresAt: began.Add(6 * time.Hour)}}
		}
		if at.Sub(began) == 8*time.Hour {
			active = at.Add(-time.Minute)
		}
		out = append(out, rec.Take(check(at, active, e))...)
		n++
	}
	out = append(out, rec.Flush()...)
	checks := 0
	var follow evidence.Follow
	var known, unknown time.Duration
	add := func(s evidence.Stretch) {
		if s.Known {
			known += s.To.Sub(s.From)
		} else {
			unknown += s.To.Sub(s.From)
		}
	}
	for i := range out {
		checks += out[i].Checks
		if err := out[i].Replay(); err != nil {
			t.Error(err)
		}
		follow.Add(&out[i], add)
	}
	follow.End(began.Add(24*time.Hour), add)
	if checks != n {
		t.Errorf("%d checks are in the records, %d were made", checks, n)
	}
	if len(out) > n/4 {
		t.Errorf("%d records of %d checks", len(out), n)
	}
	if known+unknown != 24*time.Hour || unknown < 110*time.Minute || unknown > 2*time.Hour+10*time.Minute {
		t.Errorf("known %s, unknown %s", known, unknown)
	}
}

// TestSteadyUseIsOneRun checks that continuous activity does not begin a new run
// at every check.
func TestSteadyUseIsOneRun(t *testing.T) {
	rec := evidence.Recorder{Beat: time.Hour}
	n := 0
	for i := range 100 {
		at := t0.Add(time.Duration(i) * 5 * time.Minute)
		n += len(rec.Take(check(at, at.Add(-time.Minute), idle.Evidence{})))
	}
	if n > 12 {
		t.Errorf("%d records of eight hours of use", n)
	}
}

func TestOverdueRunsAreWrittenAndForgotten(t *testing.T) {
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	rec.Take(check(t0, t0, idle.Evidence{}))
	rec.Take(check(t0.Add(5*time.Minute), t0, idle.Evidence{}))
	if got := rec.Overdue(t0.Add(10 * time.Minute)); len(got) != 0 {
		t.Errorf("too early: %d", len(got))
	}
	got := rec.Overdue(t0.Add(31 * time.Minute))
	if len(got) != 1 || got[0].Checks != 1 || !got[0].At.Equal(t0.Add(5*time.Minute)) {
		t.Errorf("got %+v", got)
	}
	rec.Overdue(t0.Add(2 * time.Hour))
	if got := rec.Take(check(t0.Add(2*time.Hour), t0, idle.Evidence{})); len(got) != 1 || !got[0].Since.IsZero() {
		t.Errorf("a run continues that had ended: %+v", got)
	}
}

// TestRecallNamesWhatHeld checks that the result at a moment inside a run is
// known, and at a moment in a gap is not.
func TestRecallNamesWhatHeld(t *testing.T) {
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	var out []evidence.Record
	for m := 0; m <= 120; m += 5 {
		out = append(out, rec.Take(check(t0.Add(time.Duration(m)*time.Minute), t0.Add(-3*time.Hour), idle.Evidence{}))...)
	}
	out = append(out, rec.Flush()...)
	for m, want := range map[int]bool{-1: false, 0: true, 17: true, 118: true, 124: true, 131: false} {
		at := t0.Add(time.Duration(m) * time.Minute)
		var c evidence.Recall
		for i := range out {
			c.Add(at, &out[i])
		}
		if c.Held(at) != want {
			t.Errorf("minute %d: held %t", m, !want)
		}
	}
}

// BenchmarkRecord measures the cost of recording a check, and the size of a
// worker's day.
func BenchmarkRecord(b *testing.B) {
	bytes, days := 0, 0
	for b.Loop() {
		rec := evidence.Recorder{Beat: 15 * time.Minute}
		rng := rand.New(rand.NewPCG(1, uint64(days)))
		active := t0
		for m := 0; m < 24*60; m += 5 {
			at := t0.Add(time.Duration(m) * time.Minute)
			if h := m / 60; h > 8 && h < 17 && rng.IntN(3) > 0 {
				active = at.Add(-time.Duration(rng.IntN(240)) * time.Second)
			}
			for _, r := range rec.Take(check(at, active, idle.Evidence{CreatedAt: t0.Add(-90 * 24 * time.Hour), LastResumedAt: t0.Add(-24 * time.Hour)})) {
				p, err := r.Pack()
				if err != nil {
					b.Fatal(err)
				}
				bytes += len(p) + 24
			}
		}
		days++
	}
	b.ReportMetric(float64(bytes)/float64(days), "B/worker-day")
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(days*288), "us/check")
}
