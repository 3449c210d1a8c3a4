package host

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/hostctl"
)

// TestClone checks that a sleeping instance can be cloned and stays asleep,
// that a client wakes only the clone, that both survive a restart, and that a
// refused clone leaves nothing behind.
func TestClone(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.k.Deep = true
		id := r.run("a", deep)
		ask := hostctl.Clone{Name: "b", Expose: []instance.Endpoint{{Listen: "127.0.0.1:90", Target: "127.0.0.1:80"}}}
		refused := func(what, want string) {
			t.Helper()
			if _, err := r.Clone(r.ctx, "a", ask); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("a clone of %s: %v, want %q", what, err, want)
			}
			if _, err := r.Get(ask.Name); err == nil && ask.Name == "b" {
				t.Errorf("a refused clone of %s is there", what)
			}
		}
		refused("a running instance", "lull pause a")
		c := r.k.Connect(id)
		errtest.None(t, r.Pause(r.ctx, "a", ByManual, true))
		refused("an instance with a client", "1 clients are connected to it")
		c.Close()
		synctest.Wait()
		time.Sleep(62 * time.Second)
		r.is("a", power.Paused)
		ask.Name = "-b"
		refused("a bad name", "as a name")
		ask.Name = "a"
		refused("a name that is taken", "already")
		ask.Name = "b"
		other, err := r.Clone(r.ctx, "a", ask)
		errtest.None(t, err)
		r.gates["b"].ID = other
		r.is("a", power.Hibernated)
		o := r.is("b", power.Hibernated)
		if o.SavedBytes == 0 || o.LastPausedBy != byClone || o.StatusReason != "cloned from a" || len(o.Endpoints) != 1 || o.NextStep != "stopped" {
			t.Errorf("the clone: %+v", o)
		}
		r.shut()
		r.boot()
		r.is("a", power.Hibernated)
		cl, err := r.gates["b"].Arrive(r.ctx)
		if err != nil || cl.Outcome() != "answered" {
			t.Errorf("the client of a clone: %v", err)
		}
		r.is("b", power.Running)
		r.is("a", power.Hibernated)
		cl.Close()
		if n := r.k.Starts(); n != 1 {
			t.Errorf("%d starts", n)
		}
		r.k.Connect(id).Close()
		r.is("a", power.Running)
	})
	inBubble(t, func(r *rig) { // with a runtime that cannot hibernate
		r.run("a", nil)
		if _, err := r.Clone(r.ctx, "a", hostctl.Clone{Name: "b"}); err == nil {
			t.Error("it was cloned")
		}
	})
}
