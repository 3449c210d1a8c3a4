package idle

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/lib/errtest"
)

var t0 = time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)

func policy() Policy {
	return Policy{Name: "test", Timeout: Duration(60 * time.Minute), Snooze: Duration(60 * time.Minute),
		CheckInterval: Duration(5 * time.Minute), Detection: true, AutoPause: true}
}

func idleEvidence() Evidence {
	return Evidence{Status: "RUNNING", Running: true, LastActivityAt: t0.Add(-2 * time.Hour), CreatedAt: t0.Add(-48 * time.Hour)}
}

// TestEligibleTruthTable checks the formula of Eligible with every combination
// of its nine terms.
func TestEligibleTruthTable(t *testing.T) {
	terms := []struct {
		name  string
		spoil func(*Policy, *Evidence)
		code  Code
	}{
		{"not idle", func(_ *Policy, e *Evidence) { e.LastActivityAt = t0.Add(-59 * time.Minute) }, NotIdleYet},
		{"globally off", func(p *Policy, _ *Evidence) { p.AutoPause = false }, AutoPauseDisabled},
		{"off for it", func(p *Policy, _ *Evidence) { p.Detection = false }, DetectionDisabled},
		{"in snooze", func(p *Policy, e *Evidence) {
			p.Snooze, e.LastResumedAt = Duration(90*time.Minute), t0.Add(-89*time.Minute)
		}, InSnoozePeriod},
		{"not running", func(_ *Policy, e *Evidence) { e.Running, e.Status = false, "STOPPED" }, StatusNotRunning},
		{"unknown signal", func(_ *Policy, e *Evidence) { e.Readings = []Reading{NotKnown("cml", t0, "unreachable")} }, SignalUnknown},
		{"connection", func(_ *Policy, e *Evidence) { e.Connections = 1 }, ConnectionOpen},
		{"lease", func(_ *Policy, e *Evidence) {
			e.Leases = []Lease{{Holder: "ci", ExpiresAt: t0.Add(time.Minute)}}
		}, LeaseHeld},
		{"floor", func(_ *Policy, e *Evidence) { e.Guards = []Block{{Code: MinWorkers, Sentence: "floor"}} }, MinWorkers},
	}
	for mask := range 1 << len(terms) {
		p, e := policy(), idleEvidence()
		want := map[Code]bool{}
		for i, term := range terms {
			if mask&(1<<i) != 0 {
				term.spoil(&p, &e)
				want[term.code] = true
			}
		}
		v := Decide(t0, p, e)
		if v.Eligible != (mask == 0) {
			t.Errorf("combination %b: eligible %v", mask, v.Eligible)
		}
		got := map[Code]bool{}
		for _, b := range v.Blocks {
			got[b.Code] = true
			if b.Sentence == "" {
				t.Errorf("block %s has no sentence", b.Code)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("combination %b: blocks differ (-want +got):\n%s", mask, diff)
		}
		if mask == 0 && v.Reason != IdleTimeoutExceeded {
			t.Errorf("reason %s", v.Reason)
		}
	}
}

// TestOffNamesNoTimeout checks that no sentence mentions the timeout if idleness
// does not lead to a pause.
func TestOffNamesNoTimeout(t *testing.T) {
	p, e := policy(), idleEvidence()
	e.LastActivityAt = t0.Add(-25 * time.Minute)
	for _, c := range []struct {
		on   bool
		want string
	}{{true, "Idle for 25m of 1h."}, {false, "Idle for 25m."}} {
		p.Detection = c.on
		if got := Decide(t0, p, e).Blocks[0]; got.Code != NotIdleYet || got.Sentence != c.want {
			t.Errorf("detection %v: %+v, want %q", c.on, got, c.want)
		}
	}
}

// TestBaseline checks that idle time counts from the newest of the four times.
func TestBaseline(t *testing.T) {
	at := func(min int) time.Time { return t0.Add(-time.Duration(min) * time.Minute) }
	for _, c := range []struct {
		activity, resumed, running, created time.Time
		want                                float64
		name                                string
	}{
		{at(5), at(10), at(10), at(20), 5, "last_activity_at"},
		{at(30), at(10), at(11), at(20), 10, "last_resumed_at"},
		{at(30), at(10), at(9), at(20), 9, "running_since"},
		{at(30), time.Time{}, at(3), at(2), 2, "created_at"}, // telemetry older than the machine
		{time.Time{}, at(10), time.Time{}, at(20), 10, "last_resumed_at"},
		{time.Time{}, time.Time{}, time.Time{}, at(20), 20, "created_at"},
		{t0.Add(30 * time.Second), at(10), at(10), at(20), 0, "last_activity_at"}, // skew within bounds
	} {
		v := Decide(t0, policy(), Evidence{Running: true, LastActivityAt: c.activity, LastResumedAt: c.resumed, RunningSince: c.running, CreatedAt: c.created})
		if v.Baseline != c.name || v.IdleMinutes != c.want {
			t.Errorf("%v: got %s %v, want %s %v", c, v.Baseline, v.IdleMinutes, c.name, c.want)
		}
	}
	v := Decide(t0, policy(), Evidence{Running: true})
	if v.Eligible || v.TargetPauseAt != nil || !v.Has(SignalUnknown) {
		t.Errorf("without any time it must be unknown: %+v", v)
	}
}

// TestEdges checks the instants at which a term of the verdict changes, to the
// nanosecond.
func TestEdges(t *testing.T) {
	ns := time.Nanosecond
	for _, c := range []struct {
		name string
		e    func(*Evidence, time.Duration) // changes the evidence, with an offset
		code Code
	}{
		{"idle at exactly the timeout", func(e *Evidence, d time.Duration) { e.LastActivityAt = t0.Add(-time.Hour + d) }, NotIdleYet},
		{"snooze ends at exactly its end", func(e *Evidence, d time.Duration) { e.LastResumedAt = t0.Add(-time.Hour + d) }, InSnoozePeriod},
		{"snooze set by a user", func(e *Evidence, d time.Duration) { e.SnoozedUntil = t0.Add(d) }, InSnoozePeriod},
		{"lease ends at its expiry", func(e *Evidence, d time.Duration) { e.Leases = []Lease{{Holder: "a", ExpiresAt: t0.Add(d)}} }, LeaseHeld},
		{"clock in future", func(e *Evidence, d time.Duration) { e.WarningSentAt = t0.Add(FutureTolerance + d) }, ClockInFuture},
		{"stale reading", func(e *Evidence, d time.Duration) {
			e.Readings = []Reading{{Signal: "agent", State: Quiet, At: t0.Add(-time.Minute - d), MaxAge: Duration(time.Minute)}}
		}, SignalUnknown},
	} {
		for _, d := range []time.Duration{0, ns} {
			e := idleEvidence()
			c.e(&e, d)
			v := Decide(t0, policy(), e)
			if v.Has(c.code) != (d > 0) || v.Eligible != (d == 0) {
				t.Errorf("%s, offset %v: blocks %v eligible %v", c.name, d, v.Blocks, v.Eligible)
			}
		}
	}
}

func TestWarning(t *testing.T) {
	p := policy()
	p.WarnBefore = Duration(5 * time.Minute)
	for _, c := range []struct {
		name               string
		idle               time.Duration
		sent               time.Duration // how long before t0; 0 means never
		lease              time.Duration
		eligible, due      bool
		target, warnBefore time.Duration // target relative to t0
	}{
		{"far away", 10 * time.Minute, 0, 0, false, false, 50 * time.Minute, 45 * time.Minute},
		{"at the moment to warn", 55 * time.Minute, 0, 0, false, true, 5 * time.Minute, 0},
		{"late: the pause comes later", 70 * time.Minute, 0, 0, false, true, 5 * time.Minute, 0},
		{"warned in time", 60 * time.Minute, 5 * time.Minute, 0, true, false, 0, -5 * time.Minute},
		{"warned a little ago", 60 * time.Minute, 2 * time.Minute, 0, false, false, 3 * time.Minute, -2 * time.Minute},
		{"warning before the last activity is void", 58 * time.Minute, 59 * time.Minute, 0, false, true, 5 * time.Minute, 0},
		{"an old warning is void", 3 * time.Hour, time.Hour, 0, false, true, 5 * time.Minute, 0},
		{"a lease moves it", 3 * time.Hour, time.Minute, 2 * time.Hour, false, false, 2 * time.Hour, 115 * time.Minute},
	} {
		e := idleEvidence()
		e.LastActivityAt = t0.Add(-c.idle)
		if c.sent > 0 {
			e.WarningSentAt = t0.Add(-c.sent)
		}
		if c.lease > 0 {
			e.Leases = []Lease{{Holder: "x", ExpiresAt: t0.Add(c.lease)}}
		}
		v := Decide(t0, p, e)
		if v.Eligible != c.eligible || v.WarnDue != c.due || v.TargetPauseAt == nil ||
			v.TargetPauseAt.Sub(t0) != c.target || v.WarnAt.Sub(t0) != c.warnBefore {
			t.Errorf("%s: eligible %v due %v target %v warn %v", c.name, v.Eligible, v.WarnDue, v.TargetPauseAt, v.WarnAt)
		}
	}
}

// TestWarningAfterAHalt checks that during a halt that has an end no warning is
// sent, that the warning is due at that end, and that the pause is announced for
// WarnBefore later.
func TestWarningAfterAHalt(t *testing.T) {
	start := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	end := start.Add(5 * time.Hour)
	h := HaltedBy{By: "ada", Since: start, Until: &end}
	p := Policy{Timeout: Duration(time.Hour), WarnBefore: Duration(5 * time.Minute), CheckInterval: Duration(10 * time.Minute), Detection: true, AutoPause: true, Signals: []string{}}
	e := Evidence{Status: "RUNNING", Running: true, CreatedAt: start, Guards: []Block{h.Block("It is")}}
	for _, c := range []struct {
		at     time.Duration
		target time.Duration
		due    bool
	}{
		{30 * time.Minute, 5*time.Hour + 5*time.Minute, false},
		{56 * time.Minute, 5*time.Hour + 5*time.Minute, false},
		{4*time.Hour + 59*time.Minute, 5*time.Hour + 5*time.Minute, false},
		{5 * time.Hour, 5*time.Hour + 5*time.Minute, true},
	} {
		v := Decide(start.Add(c.at), p, e)
		if v.TargetPauseAt == nil || !v.TargetPauseAt.Equal(start.Add(c.target)) || v.WarnDue != c.due || v.NextIdleCheckAt.After(end.Add(5*time.Minute)) {
			t.Errorf("after %v: %+v", c.at, v)
		}
		if v.WarnAt == nil || !v.WarnAt.Equal(end) {
			t.Errorf("after %v: warned at %v", c.at, v.WarnAt)
		}
	}
	e.LastActivityAt = end // used until the end of the halt
	if v := Decide(end, p, e); v.WarnDue || !v.TargetPauseAt.Equal(end.Add(time.Hour)) {
		t.Errorf("used during the halt: %+v", v)
	}
	if v := Decide(end.Add(-time.Minute), p, e); !v.TargetPauseAt.Equal(end.Add(time.Hour)) {
		t.Errorf("used during the halt: %+v", v)
	}
}

func TestShortTimeoutWarnsOnce(t *testing.T) {
	p := policy()
	p.Timeout, p.WarnBefore = Duration(2*time.Minute), Duration(5*time.Minute)
	e := idleEvidence()
	for idle, due := range map[time.Duration]bool{0: false, 59 * time.Second: false, time.Minute: true} {
		e.LastActivityAt = t0.Add(-idle)
		if v := Decide(t0, p, e); v.WarnDue != due || v.TargetPauseAt.Sub(t0) != 2*time.Minute-idle {
			t.Errorf("idle for %s: due %v, target in %s", idle, v.WarnDue, v.TargetPauseAt.Sub(t0))
		}
	}
}

func TestSignalsThatCount(t *testing.T) {
	e := idleEvidence()
	e.Readings = []Reading{
		Judge("cpu", 90, 5, "%", time.Minute, t0),
		{Signal: "gpu", State: Absent, At: t0},
	}
	for _, c := range []struct {
		signals []string
		want    []Code
	}{
		{nil, []Code{RecentActivity, SignalActive}},
		{[]string{}, nil},
		{[]string{"gpu"}, nil},
		{[]string{"cpu", "gpu"}, []Code{RecentActivity, SignalActive}},
		{[]string{"gpu", "disk"}, []Code{SignalUnknown}},
	} {
		p := policy()
		p.Signals = c.signals
		var got []Code
		for _, b := range Decide(t0, p, e).Blocks {
			got = append(got, b.Code)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("signals %v: got %v want %v", c.signals, got, c.want)
		}
	}
}

func TestSentencesNameWhatBlocks(t *testing.T) {
	e := idleEvidence()
	e.Readings = []Reading{Judge("cpu", 43.5, 5, "%", time.Minute, t0.Add(-2*time.Second)), NotKnown("cml", t0, "connection refused")}
	e.Leases = []Lease{{Holder: "nightly", Reason: "build", ExpiresAt: t0.Add(90 * time.Minute)}}
	var all []string
	for _, b := range Decide(t0, policy(), e).Blocks {
		all = append(all, b.Sentence)
	}
	text := strings.Join(all, "\n")
	for _, want := range []string{"cpu 43.5 % (counts from 5 %)", "2s ago", "connection refused", "nightly holds it for another 1h30m", "(build)"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
}

func TestPolicyValidateNamesEveryFault(t *testing.T) {
	err := Policy{Name: "x", Snooze: -1, WarnBefore: -1}.Validate()
	for _, f := range []string{"timeout", "check_interval", "snooze", "warn_before"} {
		if err == nil || !strings.Contains(err.Error(), f) {
			t.Errorf("%q not named in %v", f, err)
		}
	}
	if err := policy().Validate(); err != nil {
		t.Error(err)
	}
	if v := Decide(t0, Policy{Detection: true, AutoPause: true}, idleEvidence()); v.Eligible {
		t.Error("an invalid policy must never allow a pause")
	}
}

func TestDurationJSON(t *testing.T) {
	for _, d := range []time.Duration{0, time.Nanosecond, -1500 * time.Millisecond, time.Hour, 72*time.Hour + 3} {
		b, err := json.Marshal(Duration(d))
		errtest.None(t, err)
		var got Duration
		if err := json.Unmarshal(b, &got); err != nil || time.Duration(got) != d {
			t.Errorf("%v: %s: %v %v", d, b, time.Duration(got), err)
		}
	}
	for _, bad := range []string{`"1h"`, `1e300`, `-1e300`, `{}`} {
		var d Duration
		if json.Unmarshal([]byte(bad), &d) == nil {
			t.Errorf("%s was read as %v", bad, time.Duration(d))
		}
	}
}

func FuzzEvidence(f *testing.F) {
	b, _ := json.Marshal(idleEvidence())
	f.Add(b)
	f.Add([]byte(`{"readings":[{"signal":"cpu","state":"active","at":"2026-01-01T00:00:00Z"}],"leases":[{"holder":"a","expires_at":"9999-01-01T00:00:00Z"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var e Evidence
		if json.Unmarshal(b, &e) != nil {
			return
		}
		v := Decide(t0, policy(), e)
		if v.Eligible && (e.Connections > 0 || !e.Running) {
			t.Fatalf("eligible with %s", b)
		}
		errtest.Get(json.Marshal(v))(t)
	})
}

func BenchmarkDecide(b *testing.B) {
	p, e := policy(), idleEvidence()
	e.LastActivityAt = t0.Add(-time.Minute)
	for range 7 {
		e.Readings = append(e.Readings, Judge(fmt.Sprint("s", len(e.Readings)), 1, 5, "%", time.Minute, t0))
	}
	b.ReportAllocs()
	for b.Loop() {
		Decide(t0, p, e)
	}
}

// TestTheLastUseHasItsSignal checks that a signal whose event is older than the
// last use is not named as the one that showed it.
func TestTheLastUseHasItsSignal(t *testing.T) {
	ago := func(m int) time.Time { return t0.Add(-time.Duration(m) * time.Minute) }
	login := Reading{Signal: "recent", State: Quiet, At: t0, LastEvent: ago(50)}
	for _, c := range []struct {
		name    string
		last    time.Time
		by      string
		reading Reading
		want    string
		says    string
	}{
		{"known by the caller", ago(2), "cpu", login, "cpu", "(cpu)"},
		{"not known", ago(2), "", login, "", "Idle for"},
		{"the reading is the newest", ago(55), "cpu", login, "recent", "(recent)"},
		{"the same event", ago(50), "", login, "recent", "(recent)"},
	} {
		p, e := policy(), idleEvidence()
		p.Timeout = Duration(4 * time.Hour)
		e.LastActivityAt, e.LastActivityBy, e.Readings = c.last, c.by, []Reading{c.reading}
		b := Decide(t0, p, e).Blocks[0]
		if c.want != "" && t0.Sub(c.last) <= Lately && b.Signal != c.want || !strings.Contains(b.Sentence, c.says) {
			t.Errorf("%s: %+v", c.name, b)
		}
	}
}
