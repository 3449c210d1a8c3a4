package host

import (
	"fmt"
	"math/big"
	"slices"
	"testing"
	"testing/synctest"
)

// without returns steps without the named one.
func without(steps []step, name string) []step {
	return slices.DeleteFunc(slices.Clone(steps), func(s step) bool { return s.name == name })
}

// before returns steps with the named one moved before another.
func before(steps []step, name, other string) []step {
	at := func(ss []step, n string) int { return slices.IndexFunc(ss, func(s step) bool { return s.name == n }) }
	s := steps[at(steps, name)]
	rest := without(steps, name)
	return slices.Insert(rest, at(rest, other), s)
}

// instead returns steps in which the named one does something else.
func instead(steps []step, name string, do func(*attempt) error) []step {
	out := slices.Clone(steps)
	for n := range out {
		if out[n].name == name {
			out[n].do = do
		}
	}
	return out
}

// brokenFence is a fence with one rule broken. Its nil sequences stand for those of
// the standard fence.
type brokenFence struct {
	name string
	f    fence
}

// whole returns the fence with the standard sequences filled in.
func (b *brokenFence) whole() fence {
	f := standardFence()
	for _, part := range []struct{ to, from *[]step }{{&f.pause, &b.f.pause}, {&f.undo, &b.f.undo}, {&f.wake, &b.f.wake}, {&f.stop, &b.f.stop}, {&f.deeper, &b.f.deeper}} {
		if *part.from != nil {
			*part.to = *part.from
		}
	}
	return f
}

// brokenFences returns deliberately broken fences, each with one rule broken.
func brokenFences() []brokenFence {
	std := standardFence()
	return []brokenFence{
		{"skip the look at the still world", fence{pause: without(std.pause, "look")}},
		{"commit before the freeze", fence{pause: before(std.pause, "commit", "freeze")}},
		{"commit before the sockets are watched", fence{pause: before(std.pause, "commit", "arm")}},
		{"do not freeze", fence{pause: without(std.pause, "freeze")}},
		{"do not watch the sockets", fence{pause: without(std.pause, "arm")}},
		{"leave the relay open", fence{pause: without(std.pause, "gate")}},
		{"look before the freeze", fence{pause: before(std.pause, "look", "freeze")}},
		{"forget a wake that came while the lock was held", fence{pause: instead(std.pause, "arm", func(a *attempt) error {
			g, err := a.work.Guard(nil, false, func(why string) {
				if a.i.tryAcquire() {
					a.i.serveWake(why)
					<-a.i.lock
				}
			})
			a.guard, a.i.proc.guard = g, g
			return err
		})}},
		{"do not let the relay ask for wakes", fence{pause: instead(std.pause, "commit", func(a *attempt) error {
			g := a.i.gate
			a.i.gate = nil
			err := commitPause(a)
			a.i.gate = g
			return err
		})}},
		{"drop a duplicate after the thaw", fence{wake: before(std.wake, "thaw", "disarm")}},
		{"say running before the thaw and forget it", fence{wake: without(std.wake, "thaw")}},
		{"do not thaw what was cancelled", fence{undo: without(std.undo, "undo-thaw")}},
		{"keep duplicates of what was cancelled", fence{undo: before(std.undo, "undo-thaw", "undo-disarm")}},
		{"stop a paused instance without a look", fence{stop: without(std.stop, "stop-look")}},
		{"say hibernated before it is saved", fence{deeper: before(std.deeper, "deeper-commit", "deeper-save")}},
		{"let the watch go while it is saved", fence{deeper: instead(std.deeper, "deeper-look", disarm)}},
	}
}

// TestFenceMutants checks that each deliberately broken fence is caught. Otherwise
// the tests of the fence would prove nothing.
func TestFenceMutants(t *testing.T) {
	if underRace {
		t.Skip("broken on purpose: a race of theirs says nothing")
	}
	compared := 0
	few := scenes() // two actors first, because they need fewer orders
	slices.SortStableFunc(few, func(a, b scene) int { return len(a.names) - len(b.names) })
	for _, m := range brokenFences() {
		f := m.whole()
		caught := ""
		var by scene
		for _, sc := range few {
			if sc.deep != (m.f.deeper != nil) {
				continue // a mutant of hibernation shows only in scenes with hibernation, and any other only in the rest
			}
			small := len(sc.names) == 2
			if caught != "" && (!small || sc.quiet != by.quiet || sc.paused != by.paused) {
				continue // the mutant is caught; only small scenes of the same kind are compared further
			}
			synctest.Test(t, func(t *testing.T) {
				s, fault, _ := explore(&f, sc, (*world).place)
				if fault != "" && caught == "" {
					caught, by = fmt.Sprintf("%v: %s", sc, fault), sc
				}
				if !small || fault == "" && s.orders.Cmp(big.NewInt(fewOrders/4)) >= 0 {
					return // too many orders to enumerate a scene in which the mutant is not caught
				}
				one, cut := enumerate(&f, sc, fewOrders, map[string]bool{})
				if one != "" || cut == "" {
					compared++
					if (one != "") != (fault != "") {
						t.Errorf("mutant %q, %v: by its places %q, one by one %q", m.name, sc, fault, one)
					}
				}
			})
		}
		if caught == "" {
			t.Errorf("mutant %q was not caught", m.name)
		} else {
			t.Logf("mutant %q caught by %s", m.name, caught)
		}
	}
	t.Logf("%d times a mutant met two actors whose orders were also walked one by one, with the same result", compared)
}
