package evidence_test

import (
	"slices"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
)

// days returns checks, every five minutes for two days, of an object that was
// last used at the given times and whose load was high until busy on the first
// day.
func days(uses []time.Duration, busy time.Duration) (out []evidence.Record, begin time.Time) {
	begin = t0.UTC().Truncate(24 * time.Hour)
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	loaded := time.Time{}
	for m := time.Duration(0); m < 48*time.Hour; m += 5 * time.Minute {
		at := begin.Add(m)
		active := begin
		for _, u := range uses {
			if u <= m {
				active = begin.Add(u)
			}
		}
		r := check(at, active, idle.Evidence{CreatedAt: begin.Add(-24 * time.Hour)})
		load := idle.Judge("cloudwatch", 1, 5, "%", 5*time.Minute, at)
		if m < busy {
			load = idle.Judge("cloudwatch", 90, 5, "%", 5*time.Minute, at)
			loaded = at
		}
		if loaded.After(active) {
			r.Evidence.LastActivityAt = loaded
		}
		r.Policy.Signals = []string{"cml", "cloudwatch"}
		r.Decision = evidence.Decide(at, r.Policy, withReading(r.Evidence, load))
		out = append(out, rec.Take(r)...)
	}
	return append(out, rec.Flush()...), begin
}

func withReading(e idle.Evidence, r idle.Reading) idle.Evidence {
	e.Readings = append(slices.Clone(e.Readings), r)
	return e
}

func office(t *testing.T, start, force bool) func(time.Time) *policy.ScheduleState {
	t.Helper()
	w, err := policy.ParseWindow("daily 08:00-18:00")
	if err != nil {
		t.Fatal(err)
	}
	s := policy.Schedule{Name: "office", Zone: "UTC", Windows: []policy.Window{w}, Start: start}
	return func(at time.Time) *policy.ScheduleState {
		st, err := s.State(at, time.Time{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		st.Force = force
		return &st
	}
}

// TestTrialOfAPolicy checks the parts of a policy besides its timeout: a schedule
// that closes, opens or forces a pause, the warning, the signals that count, and
// a policy that never pauses.
func TestTrialOfAPolicy(t *testing.T) {
	h := func(hours float64) time.Duration { return time.Duration(hours * float64(time.Hour)) }
	morning := []time.Duration{h(9), h(12)}
	for name, c := range map[string]struct {
		uses    []time.Duration
		busy    time.Duration
		policy  idle.Policy
		never   bool
		hours   func(time.Time) *policy.ScheduleState
		stops   []time.Duration // from, to, from, to ...
		unknown time.Duration
	}{
		"a timeout": {uses: morning, policy: idle.Policy{Timeout: idle.Duration(h(20))}, stops: []time.Duration{h(32), h(48)}},
		"a schedule pauses after its grace and starts": {uses: morning, policy: idle.Policy{Timeout: idle.Duration(h(40))}, hours: office(t, true, false),
			stops: []time.Duration{h(0.25), h(8), h(18), h(32), h(42), h(48)}},
		"one that does not start": {uses: morning, policy: idle.Policy{Timeout: idle.Duration(h(40))}, hours: office(t, false, false),
			stops: []time.Duration{h(0.25), h(9), h(18), h(48)}},
		"who comes back after hours stays until it closes again": {uses: []time.Duration{h(20), h(21)}, policy: idle.Policy{Timeout: idle.Duration(h(40))}, hours: office(t, true, false),
			stops: []time.Duration{h(0.25), h(8), h(18), h(20), h(42), h(48)}},
		"idleness in open hours too": {uses: morning, policy: idle.Policy{Timeout: idle.Duration(h(2)), Snooze: idle.Duration(h(2))}, hours: office(t, true, false),
			stops: []time.Duration{h(0.25), h(8), h(11), h(12), h(14), h(32), h(34), h(48)}},
		"no idleness": {uses: morning, policy: idle.Policy{Timeout: idle.Duration(h(1))}, never: true, hours: office(t, true, false),
			stops: []time.Duration{h(0.25), h(8), h(18), h(32), h(42), h(48)}},
		"nothing at all": {uses: morning, policy: idle.Policy{Timeout: idle.Duration(h(1))}, never: true},
		"force, with its warning": {uses: []time.Duration{h(8.5), h(17.95), h(18.5)}, policy: idle.Policy{Timeout: idle.Duration(h(40)), WarnBefore: idle.Duration(5 * time.Minute)}, hours: office(t, true, true),
			stops: []time.Duration{h(0) + 5*time.Minute, h(8), h(18) + 5*time.Minute, h(18.5), h(42) + 5*time.Minute, h(48)}},
		"load counts where it counted": {uses: morning, busy: h(30), policy: idle.Policy{Timeout: idle.Duration(h(6))}, stops: []time.Duration{h(36) - 5*time.Minute, h(48)}},
		"load does not count":          {uses: morning, busy: h(30), policy: idle.Policy{Timeout: idle.Duration(h(6)), Signals: []string{"cml"}}, stops: []time.Duration{h(6), h(9), h(18), h(48)}},
		"only load counts":             {uses: morning, busy: h(30), policy: idle.Policy{Timeout: idle.Duration(h(6)), Signals: []string{"cloudwatch"}}, stops: []time.Duration{h(36) - 5*time.Minute, h(48)}},
		"a signal that was not read":   {uses: morning, policy: idle.Policy{Timeout: idle.Duration(h(1)), Signals: []string{"cml", "agent"}}, unknown: h(48)},
	} {
		t.Run(name, func(t *testing.T) {
			records, begin := days(c.uses, c.busy)
			x := evidence.Trial{Object: "w-1", Policy: &c.policy, Snooze: &c.policy.Snooze, WarnBefore: &c.policy.WarnBefore, Never: c.never, Schedule: c.hours, From: begin, To: begin.Add(h(48))}
			var follow evidence.Follow
			for i := range records {
				follow.Add(&records[i], x.Add)
			}
			follow.End(x.To, x.Add)
			x.End()
			var got []time.Duration
			for _, s := range x.Stops {
				got = append(got, s.From.Sub(begin), s.To.Sub(begin))
			}
			if !slices.EqualFunc(got, c.stops, func(a, b time.Duration) bool { return (a - b).Abs() <= 5*time.Minute }) || (x.Unknown-c.unknown).Abs() > 10*time.Minute {
				t.Errorf("stopped %v, unknown %s; want %v, %s", got, x.Unknown, c.stops, c.unknown)
			}
			if sum := x.Paused + x.Running + x.Unknown; (sum - h(48)).Abs() > 10*time.Minute {
				t.Errorf("%s stopped, %s running and %s unknown are not two days", x.Paused, x.Running, x.Unknown)
			}
		})
	}
}

// TestTrialOfAnUnsteadyClock checks that a single use does not look like new use
// if its time moves between checks, within the bounds of its host's clock offset.
func TestTrialOfAnUnsteadyClock(t *testing.T) {
	begin := t0.UTC().Truncate(24 * time.Hour)
	uses := []time.Duration{9 * time.Hour, 9*time.Hour + 10*time.Minute, 20 * time.Hour}
	trial := func(unsteady bool) evidence.Trial {
		x := evidence.Trial{Object: "w-1", Policy: &idle.Policy{Timeout: idle.Duration(time.Hour)}, Window: 15 * time.Minute, From: begin, To: begin.Add(24 * time.Hour)}
		var follow evidence.Follow
		rec := evidence.Recorder{Beat: 30 * time.Minute}
		for n, m := 0, time.Duration(0); m < 24*time.Hour; n, m = n+1, m+5*time.Minute {
			active := begin
			for _, u := range uses {
				if u <= m {
					active = begin.Add(u)
				}
			}
			if unsteady {
				active = active.Add(time.Duration(n*617%1500) * time.Millisecond)
			}
			r := check(begin.Add(m), active, idle.Evidence{CreatedAt: begin.Add(-24 * time.Hour)})
			r.Activity = []time.Time{active}
			for _, r := range rec.Take(r) {
				follow.Add(&r, x.Add)
			}
		}
		for _, r := range rec.Flush() {
			follow.Add(&r, x.Add)
		}
		follow.End(x.To, x.Add)
		x.End()
		return x
	}
	want, got := trial(false), trial(true)
	if len(want.Stops) != 3 || !slices.EqualFunc(got.Stops, want.Stops, func(a, b evidence.Stop) bool {
		return a.From.Sub(b.From).Abs() <= evidence.Jitter && a.To.Sub(b.To).Abs() <= evidence.Jitter && a.Back == b.Back && a.False == b.False
	}) {
		t.Errorf("stops %+v; with a steady clock %+v", got.Stops, want.Stops)
	}
}
