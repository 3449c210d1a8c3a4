package servertest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/why"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
)

// kept is evidence in memory, written with a journal's recorder and codec.
type kept struct {
	t   *testing.T
	mu  sync.Mutex
	rec evidence.Recorder
	out []evidence.Record
}

func newKept(t *testing.T) *kept { return &kept{t: t, rec: evidence.Recorder{Beat: 30 * time.Minute}} }

func (k *kept) Take(r evidence.Record) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, x := range k.rec.Take(r) {
		b, err := x.Pack()
		if err == nil {
			x, err = evidence.Unpack(b)
		}
		if err != nil || x.Differs {
			k.t.Errorf("a record of %s does not replay: %v", x.Object, err)
		}
		k.out = append(k.out, x)
	}
}

func (k *kept) Read(_ context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
	k.mu.Lock()
	all := append(append([]evidence.Record{}, k.out...), k.rec.Pending("")...)
	k.mu.Unlock()
	for _, r := range all {
		if q.Object == "" || q.Object == r.Object {
			if err := yield(r); err != nil {
				return nil, err
			}
		}
	}
	return nil, nil
}

func (k *kept) of(object string) (n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range k.out {
		if r.Object == object {
			n++
		}
	}
	return n
}

// then returns the agent's own explanation for a time of its own clock.
func (k *kept) then(at time.Time) why.Account {
	var c evidence.Recall
	q := evidence.Query{Object: why.KindAgent, From: at, To: at}
	if _, err := k.Read(k.t.Context(), q, func(r evidence.Record) error { c.Add(at, &r); return nil }); err != nil {
		k.t.Error(err)
	}
	return why.Past(why.Account{At: at, Kind: why.KindAgent}, c)
}

// gist returns the part in which the agent's and the server's explanations of one
// time must agree.
func gist(a why.Account) string {
	out := ""
	if a.Verdict == nil {
		return "not known"
	}
	for _, b := range a.Verdict.Blocks {
		out += fmt.Sprintf("%s%s%s ", b.Code, b.Signal, b.Holder)
	}
	for _, s := range a.Signals {
		value := -1.0
		if s.Value != nil {
			value = *s.Value
		}
		out += fmt.Sprintf("%s %s %g of %g; ", s.Signal, s.Verdict, value, s.Threshold)
	}
	for _, l := range a.Leases {
		out += "lease of " + l.Holder + " for " + strings.ReplaceAll(l.Reason, "\n", " ") + " "
	}
	return out + fmt.Sprintf("timeout %s, idle %t, eligible %t", time.Duration(a.Policy.Timeout), a.Verdict.IsIdle, a.Verdict.Eligible)
}

// TestServerKnowsTheAgentsPast asks agent and server about every past minute of two
// eventful hours. Both must give the same explanation, with the agent's clock right
// or hours wrong, whether or not the machine is a worker. What the server did not
// receive it must report as unknown.
func TestServerKnowsTheAgentsPast(t *testing.T) {
	for _, skew := range []time.Duration{0, 3 * time.Hour, -3 * time.Hour} {
		for _, unknown := range []bool{false, true} {
			t.Run(fmt.Sprintf("skew %s, worker %t", skew, !unknown), func(t *testing.T) {
				run(t, options{holder: worker.HolderController, sources: []string{"agent"}, config: "pause-holder: controller\n", skew: skew, unarmed: true, unknown: unknown}, func(r *rig) {
					r.lives(skew)
				})
			})
		}
	}
}

// lives simulates two hours and compares the explanations of each minute.
func (r *rig) lives(skew time.Duration) {
	t := r.t
	begun := time.Now()
	var changes []time.Time
	then := func(after time.Duration, f func()) {
		r.wait(after)
		changes = append(changes, time.Now())
		f()
	}
	then(10*time.Minute, func() { r.with(func() { r.busy["cpu"] = true }) })
	then(15*time.Minute, func() { r.with(func() { r.busy["cpu"] = false }) })
	then(5*time.Minute, func() {
		errtest.Get(r.agent.HoldLease(t.Context(), agentctl.LeaseRequest{Holder: "ci", Reason: "a\nbuild", TTL: idle.Duration(10 * time.Minute)}))(t)
	})
	then(10*time.Minute, func() {}) // until the lease ends
	then(5*time.Minute, func() {
		errtest.Get(r.agent.Snooze(t.Context(), agentctl.SnoozeRequest{For: idle.Duration(8 * time.Minute)}))(t)
	})
	then(8*time.Minute, func() {})
	then(7*time.Minute, func() { r.with(func() { r.broken["network"] = true }) })
	then(6*time.Minute, func() { r.with(func() { r.broken["network"] = false }) })
	cutAt := time.Now().Add(4 * time.Minute)
	then(4*time.Minute, func() { r.with(func() { r.cut = true }) })
	then(12*time.Minute, func() { r.with(func() { r.cut = false }) })
	r.wait(40 * time.Minute)

	ask := func(at time.Time) control.AgentWhy { return errtest.Get(r.asks.AgentWhy(t.Context(), r.id, at))(t) }
	compared, seen := 0, map[string]bool{}
	for at := begun.Add(90 * time.Second); at.Before(time.Now().Add(-2 * time.Minute)); at = at.Add(time.Minute) {
		theirs := ask(at)
		if at.After(cutAt.Add(3*time.Minute)) && at.Before(cutAt.Add(12*time.Minute)) {
			if theirs.Verdict != nil || theirs.Readings != "unknown" || theirs.Unheard == "" {
				t.Errorf("at %s nothing was heard, and it is said: %s", at, gist(theirs.Account))
			}
			continue
		}
		near := at.After(cutAt) && at.Before(cutAt.Add(18*time.Minute)) // the agent retries with backoff, so the server may hear of this later
		for _, c := range changes {
			near = near || at.Sub(c) > -90*time.Second && at.Sub(c) < 150*time.Second
		}
		if near {
			continue
		}
		if a, b := gist(r.own.then(at.Add(skew))), gist(theirs.Account); a != b {
			t.Errorf("%s after the beginning the agent says\n%s\nand the server\n%s", at.Sub(begun), a, b)
		}
		if theirs.Verdict == nil {
			continue
		}
		for _, b := range theirs.Verdict.Blocks {
			seen[string(b.Code)] = true
		}
		if theirs.Kind != why.KindAgent || theirs.Name != r.id || theirs.Readings != "recorded" || theirs.Checked == nil || (theirs.WorkerID != "") != (r.w != "") {
			t.Errorf("at %s: %+v", at, theirs)
		}
		compared++
	}
	for _, code := range []idle.Code{idle.RecentActivity, idle.NotIdleYet, idle.LeaseHeld, idle.InSnoozePeriod, idle.SignalUnknown, "pause_holder"} {
		if !seen[string(code)] {
			t.Errorf("nothing was compared that is held by %s", code)
		}
	}
	if y := ask(begun.Add(-30 * time.Minute)); y.Verdict != nil || y.Readings != "unknown" || y.Checked != nil {
		t.Errorf("before anything was recorded: %+v", y)
	}
	if y := ask(time.Time{}); y.Readings != "live" || y.Verdict == nil || y.Answer == "" {
		t.Errorf("now: %+v", y)
	}
	if y := ask(time.Time{}); !slices.Contains(y.Change, "the agent would have to be in charge of the machine: pause-holder agent") {
		t.Errorf("what would have to change: %q", y.Change)
	}
	if n := r.told.of("agent/" + r.id); n > 40 {
		t.Errorf("two hours of that took %d records", n)
	}
	l := errtest.Get(control.Read[control.Timeline](t.Context(), r.asks, "/agents/"+r.id+"/timeline"))(t)
	gap := time.Duration(0)
	for _, m := range l.Missing {
		if m.To.After(begun) && m.From.After(begun.Add(-time.Minute)) {
			gap += m.To.Sub(m.From)
		}
	}
	if len(l.Signals) != 2 || gap < 9*time.Minute || gap > 18*time.Minute {
		t.Errorf("the timeline has %d signals and misses %s", len(l.Signals), gap)
	}
	if compared < 50 {
		t.Errorf("only %d moments were compared", compared)
	}
}

// TestServerSaysWhoStopped checks what the server says about a machine that its agent
// stopped.
func TestServerSaysWhoStopped(t *testing.T) {
	run(t, options{holder: worker.HolderAgent, sources: []string{"agent"}}, func(r *rig) {
		t := r.t // the bubble's t
		r.until("the stop", 90*time.Minute, r.stopped)
		r.wait(10 * time.Minute)
		y := errtest.Get(r.asks.AgentWhy(t.Context(), r.id, time.Time{}))(t)
		if y.State != "STOPPED" || y.Paused == nil || y.Paused.By != "agent" || y.Paused.Reason != "idle_timeout" || len(y.Last) == 0 {
			t.Errorf("now: %+v", y)
		}
		at := y.Paused.At.Add(-3 * time.Minute)
		if y = errtest.Get(r.asks.AgentWhy(t.Context(), r.id, at))(t); y.State != "RUNNING" || y.Verdict == nil || y.Paused != nil || y.Readings != "recorded" {
			t.Errorf("three minutes before it was stopped: %+v", y)
		}
	})
}
