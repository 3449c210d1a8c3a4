package host

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/protocol/hostctl"
)

func span(d time.Duration) *idle.Duration { return (*idle.Duration)(&d) }

// TestChange checks that changed timers take effect at once in every state, and
// survive a restart of the daemon. It also checks that an invalid change changes
// nothing.
func TestChange(t *testing.T) {
	inBubble(t, func(r *rig) {
		change := func(c hostctl.Change) {
			t.Helper()
			if err := r.Change(r.ctx, "a", c, ByManual); err != nil {
				t.Fatal(err)
			}
		}
		r.k.Deep = true
		id := r.run("a", nil)
		time.Sleep(30 * time.Second)
		change(hostctl.Change{PauseAfter: span(10 * time.Minute)})
		time.Sleep(5 * time.Minute)
		if o := r.is("a", power.Running); o.PauseAfter != 600 {
			t.Errorf("it is paused after %v s", o.PauseAfter)
		}
		change(hostctl.Change{PauseAfter: span(time.Minute)}) // already overdue
		time.Sleep(10 * time.Second)
		o := r.is("a", power.Paused)
		paused := *o.LastPausedAt

		for what, c := range map[string]hostctl.Change{
			"no change":       {},
			"hibernate_after": {HibernateAfter: span(6 * time.Minute)}, // the host stops after 5 minutes
			"stop_after":      {HibernateAfter: span(3 * time.Minute), StopAfter: span(2 * time.Minute)},
			"pause_after":     {PauseAfter: span(-1)},
			"idle_policy":     {IdlePolicy: new("never")},
			"restart":         {Restart: new(instance.Restart("maybe"))},
		} {
			var bad *InvalidError
			if err := r.Change(r.ctx, "a", c, ByManual); !errors.As(err, &bad) || !strings.Contains(err.Error(), what) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if p := r.is("a", power.Paused); !reflect.DeepEqual(o.StopAt, p.StopAt) || p.HibernateAfter != 0 || p.StopAfter != 300 {
			t.Errorf("what was refused changed it: %+v", p)
		}

		change(hostctl.Change{HibernateAfter: span(2 * time.Minute), StopAfter: span(time.Hour)})
		if o := r.is("a", power.Paused); !o.NextStepAt.Equal(paused.Add(2*time.Minute)) || o.NextStep != string(power.Hibernated) {
			t.Errorf("next it is %s at %s", o.NextStep, o.NextStepAt)
		}
		time.Sleep(2 * time.Minute)
		r.is("a", power.Hibernated)
		r.shut()
		r.boot()
		if o := r.is("a", power.Hibernated); o.StopAfter != 3600 || !o.StopAt.Equal(paused.Add(time.Hour)) {
			t.Errorf("the next daemon stops it after %v s, at %s", o.StopAfter, o.StopAt)
		}
		change(hostctl.Change{StopAfter: span(10 * time.Minute), WakeFromStopped: new(false)})
		time.Sleep(10 * time.Minute)
		r.is("a", power.Stopped)

		// In a stopped instance, the change decides whether a client starts it.
		if _, err := r.gates["a"].Arrive(r.ctx); err == nil {
			t.Error("a client started it")
		}
		change(hostctl.Change{WakeFromStopped: new(true)})
		c, err := r.gates["a"].Arrive(r.ctx)
		if err != nil || c.Outcome() != "answered" {
			t.Errorf("no client starts it: %v", err)
		}
		r.is("a", power.Running)
		c.Close()
		change(hostctl.Change{IdlePolicy: new(instance.PolicyLeasesOnly)})
		r.k.Proc(id).SetBusy(true)
		time.Sleep(62 * time.Second)
		r.is("a", power.Paused)
		synctest.Wait()
		if events := r.happenings("a", "changed"); !slices.Contains(events, ByManual+": idle_policy") {
			t.Errorf("no event tells of a change: %q", events)
		}
	})
}

// TestChangeKeepsEverythingElse checks field by field that a change affects only
// the fields that it names.
func TestChangeKeepsEverythingElse(t *testing.T) {
	old := instance.Spec{Name: "a", PauseAfter: span(time.Minute), StopAfter: span(2 * time.Minute), ReclaimAfter: 3, HibernateAfter: 4, QuietConnectionAfter: 5, StopGrace: 6,
		IdlePolicy: instance.PolicyDefault, WakeFromStopped: new(true), Restart: instance.RestartAlways}
	if got := (hostctl.Change{}).Apply(old); !reflect.DeepEqual(got, old) {
		t.Errorf("no change made %+v of %+v", got, old)
	}
	all := hostctl.Change{PauseAfter: span(0), StopAfter: span(0), ReclaimAfter: span(0), HibernateAfter: span(0), QuietConnectionAfter: span(0), StopGrace: span(0),
		IdlePolicy: new(""), WakeFromStopped: new(false), Restart: new(instance.Restart("")), Labels: map[string]string{"a": "b"}}
	if v := reflect.ValueOf(all); func() bool {
		for n := range v.NumField() {
			if v.Field(n).IsNil() {
				return true
			}
		}
		return false
	}() {
		t.Error("a field of a change is not tried here")
	}
	if got, want := all.Apply(old), (instance.Spec{Name: "a", PauseAfter: span(0), StopAfter: span(0), WakeFromStopped: new(false), Labels: map[string]string{"a": "b"}}); !reflect.DeepEqual(got, want) {
		t.Errorf("changed to %+v, want %+v", got, want)
	}
}
