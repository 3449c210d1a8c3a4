package policy_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
)

var base = policy.Base{Timeout: time.Hour, WarnBefore: 5 * time.Minute, CheckInterval: 5 * time.Minute, Snooze: time.Hour, AutoPause: true}

func minutes(n int) policy.Values { return policy.Values{IdleTimeoutMinutes: &n} }

// TestPrecedence checks the order of the layers: each row removes the strongest
// layer that is left, and the next one must take effect.
func TestPrecedence(t *testing.T) {
	now := at(t, "2026-06-05 12:00 UTC")
	named := func(name string, n int) policy.Named { return policy.Named{Name: name, Values: minutes(n)} }
	groups := []policy.Group{
		{ID: "a", Policy: "p-default"},
		{ID: "b", Policy: "p-one", Selector: policy.Scope{Tags: map[string]string{"team": "ml"}}},
		{ID: "c", Policy: "p-two", Selector: policy.Scope{Tags: map[string]string{"team": "ml", "env": ""}}},
		{ID: "d", Policy: "p-first", Selector: policy.Scope{Region: "r"}, Priority: 3},
		{ID: "e", Policy: "p-other", Selector: policy.Scope{Tags: map[string]string{"team": "web"}}, Priority: 9},
	}
	over := policy.Override{ID: "o", Kind: policy.Use, Policy: "p-over", Until: now.Add(time.Hour), By: "ada"}
	policies := []policy.Named{named("p-default", 11), named("p-one", 12), named("p-two", 13), named("p-first", 14), named("p-other", 15), named("p-over", 16), named("p-own", 17)}
	w := policy.Subject{ID: "w", Region: "r", Tags: map[string]string{"team": "ml", "env": "dev"}, Template: "t", FromTmpl: minutes(20), Policy: "p-own", Own: minutes(18)}
	for _, c := range []struct {
		drop    func()
		timeout int
		from    string
	}{
		{func() {}, 16, "override o (p-over)"},
		{func() { over.Until = now }, 18, "worker w"},
		{func() { w.Own = policy.Values{} }, 17, "policy p-own"},
		{func() { w.Policy = "" }, 14, "group all in r (p-first)"},
		{func() { groups = slices.Delete(groups, 3, 4) }, 13, "group env,team=ml (p-two)"},
		{func() { groups = slices.Delete(groups, 2, 3) }, 12, "group team=ml (p-one)"},
		{func() { w.Tags = nil }, 20, "template t"},
		{func() { w.Template = "" }, 11, "default all workers (p-default)"},
		{func() { groups = nil }, 60, "settings"},
	} {
		c.drop()
		r := policy.New(policies, nil, groups, []policy.Override{over}, nil).Resolve(now, base, &w)
		p := r.Idle(true)
		if time.Duration(p.Timeout) != time.Duration(c.timeout)*time.Minute || r.From["idle_timeout"].String() != c.from || len(r.Faults) > 0 {
			t.Errorf("%s from %s, want %d from %s; %v", time.Duration(p.Timeout), r.From["idle_timeout"], c.timeout, c.from, r.Faults)
		}
		if err := p.Validate(); err != nil {
			t.Error(err)
		}
	}
	w.Policy, w.Own.Schedule = "gone", new("gone")
	if r := policy.New(nil, nil, nil, nil, nil).Resolve(now, base, &w); len(r.Faults) != 2 || time.Duration(r.Timeout) != time.Hour {
		t.Errorf("faults %v, timeout %s", r.Faults, time.Duration(r.Timeout))
	}
}

// TestStrongestSays checks that a value is that of the strongest layer that sets
// it, whatever the others set, and that its origin names that layer.
func TestStrongestSays(t *testing.T) {
	now := at(t, "2026-06-05 12:00 UTC")
	rapid.Check(t, func(t *rapid.T) {
		var says [4]*int // default, group, policy, worker
		for i := range says {
			if rapid.Bool().Draw(t, "says") {
				says[i] = new(i + 1)
			}
		}
		policies := []policy.Named{{Name: "a", Values: policy.Values{SnoozeMinutes: says[0]}}, {Name: "b", Values: policy.Values{SnoozeMinutes: says[1]}}, {Name: "c", Values: policy.Values{SnoozeMinutes: says[2]}}}
		groups := []policy.Group{{ID: "1", Policy: "a"}, {ID: "2", Policy: "b", Selector: policy.Scope{Tags: map[string]string{"k": ""}}}}
		w := policy.Subject{ID: "w", Tags: map[string]string{"k": "v"}, Policy: "c", Own: policy.Values{SnoozeMinutes: says[3]}}
		r := policy.New(policies, nil, groups, nil, nil).Resolve(now, base, &w)
		want, layer := time.Hour, policy.LayerSettings
		for i, l := range []string{policy.LayerDefault, policy.LayerGroup, policy.LayerPolicy, policy.LayerWorker} {
			if says[i] != nil {
				want, layer = time.Duration(i+1)*time.Minute, l
			}
		}
		if time.Duration(r.Snooze) != want || r.From["snooze"].Layer != layer {
			t.Fatalf("%s from %s, want %s from %s", time.Duration(r.Snooze), r.From["snooze"], want, layer)
		}
	})
}

// TestOverrides checks how each kind of override changes the effect of a
// schedule.
func TestOverrides(t *testing.T) {
	s := schedule(t, "UTC", "mon-fri 08:00-18:00", "sat 22:00-23:00")
	s.Windows[1].Hold = true
	s.Start = true
	w := policy.Subject{ID: "w", Own: policy.Values{Schedule: new("s")}}
	skip := policy.Override{ID: "1", Kind: policy.Skip, From: at(t, "2026-06-03 10:00 UTC"), Until: at(t, "2026-06-04 00:00 UTC"), By: "ada"}
	freeze := policy.Override{ID: "2", Kind: policy.Freeze, From: at(t, "2026-06-04 19:00 UTC"), Until: at(t, "2026-06-05 09:00 UTC"), By: "ada"}
	keep := policy.Override{ID: "3", Kind: policy.Keep, From: at(t, "2026-06-02 17:00 UTC"), Until: at(t, "2026-06-02 22:00 UTC"), By: "ada"}
	set := policy.New(nil, []policy.Schedule{s}, nil, []policy.Override{skip, freeze, keep}, nil)
	for _, c := range []struct {
		at      string
		started string // starting point: the last start
		pauses  bool
		stopped string // starting point: the last stop
		starts  bool
		blocks  int
		kept    bool
	}{
		{at: "2026-06-01 12:00 UTC", started: "2026-06-01 08:01 UTC", stopped: "2026-05-31 12:00 UTC", starts: true},
		{at: "2026-06-01 12:00 UTC", started: "2026-06-01 08:01 UTC", stopped: "2026-06-01 09:00 UTC"}, // stopped since it opened
		{at: "2026-06-01 19:00 UTC", started: "2026-06-01 08:01 UTC", pauses: true, stopped: "2026-05-31 12:00 UTC"},
		{at: "2026-06-01 19:00 UTC", started: "2026-06-01 18:30 UTC", stopped: "2026-05-31 12:00 UTC"}, // started since it closed
		{at: "2026-06-02 19:00 UTC", started: "2026-06-02 08:01 UTC", pauses: true, stopped: "2026-06-01 18:00 UTC", kept: true},
		{at: "2026-06-03 19:00 UTC", started: "2026-06-03 08:01 UTC", stopped: "2026-06-02 18:00 UTC"}, // the skip suppresses the schedule's closing
		{at: "2026-06-04 02:00 UTC", started: "2026-06-03 08:01 UTC", stopped: "2026-06-02 18:00 UTC"}, // and the closing does not take effect afterwards
		{at: "2026-06-04 18:01 UTC", started: "2026-06-03 08:01 UTC", pauses: true, stopped: "2026-06-02 18:00 UTC"},
		{at: "2026-06-05 08:30 UTC", started: "2026-06-05 08:01 UTC", stopped: "2026-06-04 18:00 UTC", starts: true, blocks: 1},
		{at: "2026-06-05 09:00 UTC", started: "2026-06-05 08:01 UTC", stopped: "2026-06-04 18:00 UTC", starts: true},
		{at: "2026-06-06 22:30 UTC", started: "2026-06-06 22:01 UTC", stopped: "2026-06-05 18:00 UTC", starts: true, blocks: 1},
	} {
		r := set.Resolve(at(t, c.at), base, &w)
		st := r.ScheduleState
		if st == nil || st.Pauses(at(t, c.started)) != c.pauses || st.Starts(at(t, c.stopped)) != c.starts || len(r.Guards()) != c.blocks || (r.KeptUntil != nil) != c.kept {
			t.Errorf("at %s: %+v, guards %v, kept %v", c.at, st, r.Guards(), r.KeptUntil)
		}
		for _, b := range r.Guards() {
			if b.Code != idle.Schedule || b.Until == nil || b.Sentence == "" {
				t.Errorf("guard %+v", b)
			}
		}
	}
	// A new schedule takes effect at its next boundary.
	w.Since = at(t, "2026-06-01 12:00 UTC")
	if r := set.Resolve(at(t, "2026-06-01 13:00 UTC"), base, &w); r.ScheduleState.Last != nil || r.ScheduleState.NextClose == nil {
		t.Errorf("it spoke already: %+v", r.ScheduleState)
	}
}

// TestBudgetNeverExceeded checks that no period contains more actions than the
// limit of a budget, and that an action is allowed at the time that a block
// announces.
func TestBudgetNeverExceeded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := policy.Budget{Name: "b", For: rapid.SampledFrom([]string{policy.Stops, policy.Starts}).Draw(t, "for"),
			MaxActions: new(rapid.IntRange(1, 30).Draw(t, "max")), PerMinutes: rapid.IntRange(1, 120).Draw(t, "per")}
		set := policy.New(nil, nil, nil, nil, []policy.Budget{b, {Name: "starts", For: policy.Starts, MaxPercent: new(100.0), PerMinutes: 1}})
		w := policy.Subject{ID: "w"}
		size := func(policy.Scope) int { return 1 << 20 }
		now := time.Date(2026, 6, 5, 12, 0, 0, 0, time.UTC)
		ledger := policy.Ledger{}
		var done []time.Time
		for range rapid.IntRange(1, 150).Draw(t, "asks") {
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(b.Per()/5)).Draw(t, "wait")))
			blocks := policy.Blocks(set.BudgetsFor(now, &w, b.For, policy.ForSchedule, ledger, size))
			if len(blocks) > 0 {
				if blocks[0].Until == nil || !blocks[0].Until.After(now) {
					t.Fatalf("blocked forever: %+v", blocks[0])
				}
				if rapid.Bool().Draw(t, "patient") {
					now = *blocks[0].Until
					if again := policy.Blocks(set.BudgetsFor(now, &w, b.For, policy.ForSchedule, ledger, size)); len(again) > 0 {
						t.Fatalf("told to come at %s and blocked again: %+v", now, again)
					}
				}
				continue
			}
			ledger = set.Spend(now, &w, b.For, policy.ForSchedule, ledger)
			done = append(done, now)
		}
		for i, from := range done {
			n := 0
			for _, at := range done[i:] {
				if at.Sub(from) < b.Per() {
					n++
				}
			}
			if n > *b.MaxActions {
				t.Fatalf("%d in %s, the limit is %d", n, b.Per(), *b.MaxActions)
			}
		}
	})
}

func TestBudgetRules(t *testing.T) {
	now := at(t, "2026-06-05 12:00 UTC")
	sched := schedule(t, "UTC", "fri 08:00-18:00")
	set := policy.New(nil, []policy.Schedule{sched}, nil, nil, []policy.Budget{
		{Name: "a", For: policy.Stops, MaxActions: new(0), PerMinutes: 60, During: "s"},
		{Name: "b", For: policy.Stops, MaxPercent: new(10.0), PerMinutes: 60, Selector: policy.Scope{Tags: map[string]string{"team": "ml"}}},
		{Name: "c", For: policy.Stops, MaxActions: new(1), PerMinutes: 60, Reasons: []string{policy.ForIdle}},
	})
	ml, web := policy.Subject{ID: "1", Tags: map[string]string{"team": "ml"}}, policy.Subject{ID: "2"}
	names := func(now time.Time, w *policy.Subject, reason string) string {
		var out []string
		for _, u := range set.BudgetsFor(now, w, policy.Stops, reason, nil, func(policy.Scope) int { return 35 }) {
			out = append(out, fmt.Sprintf("%s:%d", u.Budget, u.Limit))
		}
		return strings.Join(out, " ")
	}
	night := at(t, "2026-06-05 20:00 UTC")
	for want, got := range map[string]string{
		"a:0 b:3 c:1": names(now, &ml, policy.ForIdle), "b:3": names(night, &ml, policy.ForSchedule), "c:1": names(night, &web, policy.ForIdle),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	u := set.BudgetsFor(now, &web, policy.Stops, policy.ForSchedule, nil, nil)
	if len(u) != 1 || u[0].Free || u[0].FreeAt == nil || !u[0].FreeAt.Equal(at(t, "2026-06-05 18:00 UTC")) {
		t.Errorf("nothing may stop until the schedule closes, and it says %+v", u)
	}
	for _, bad := range []policy.Budget{{Name: "x", For: "pause", MaxActions: new(1), PerMinutes: 1}, {Name: "x", For: policy.Stops, PerMinutes: 1},
		{Name: "x", For: policy.Stops, MaxPercent: new(101.0), PerMinutes: 1}, {Name: "x", For: policy.Starts, MaxActions: new(1), PerMinutes: 1, Reasons: []string{"idle_timeout"}}} {
		if bad.Validate() == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}

func TestShipped(t *testing.T) {
	want := map[string]string{"aggressive": "15 hibernate", "balanced": "60 hibernate", "conservative": "240 stop", "research": "120 hibernate", "development": "30 stop"}
	for _, p := range policy.Shipped() {
		if got := fmt.Sprintf("%d %s", *p.IdleTimeoutMinutes, *p.PauseAction); got != want[p.Name] || p.Validate() != nil || !policy.IsShipped(p.Name) {
			t.Errorf("%s: %s, %v", p.Name, got, p.Validate())
		}
		delete(want, p.Name)
	}
	if len(want) > 0 {
		t.Errorf("missing: %v", want)
	}
	if err := policy.DefaultStarts.Validate(); err != nil {
		t.Error(err)
	}
}
