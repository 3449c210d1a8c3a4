package host

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
	"lull/internal/lib/errtest"
)

// TestRenamedOutside checks that an instance takes its container's new name
// everywhere, also after a restart of the daemon, and that the old name becomes
// free. A name that is taken must not change anything.
func TestRenamedOutside(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := context.Background()
		bare := func(s *instance.Spec) { s.Expose = nil }
		id := r.run("a", bare)
		r.run("b", bare)
		if err := r.RenamedOutside(ctx, id, "b"); err == nil {
			t.Error("it took a name that another has")
		}
		if err := r.RenamedOutside(ctx, id, "no name"); err == nil {
			t.Error("it took what is no name")
		}
		r.is("a", power.Running)
		errtest.None(t, r.Pause(ctx, "a", ByManual, false))
		errtest.None(t, r.RenamedOutside(ctx, id, "x"))
		if o := r.is("x", power.Paused); o.ID != id || o.Name != "x" {
			t.Errorf("x is %s, called %s", o.ID, o.Name)
		}
		if _, err := r.Get("a"); err == nil {
			t.Error("it has its old name, too")
		}
		if y, err := r.Why(ctx, "x", time.Time{}); err != nil || y.Name != "x" {
			t.Errorf("why: %+v, %v", y.Name, err)
		}
		seen, _, _ := r.events.Since(0)
		if e := seen[len(seen)-1]; e.Type != "renamed" || e.Instance != "x" || e.By != byOutside || !strings.Contains(e.Reason, "named a") {
			t.Errorf("told: %+v", e)
		}
		r.shut()
		r.boot()
		if o := r.is("x", power.Running); o.ID != id {
			t.Errorf("x is %s after a restart", o.ID)
		}
		r.run("a", bare)
		errtest.None(t, r.Delete(ctx, "x", ByManual))
		r.is("a", power.Running)
	})
}

// TestOwnPauseComesLate checks that a pause is undone that another daemon carries
// out long after lull has stopped waiting for it, because no connection would end
// that pause. The next pause from outside is a user's.
func TestOwnPauseComesLate(t *testing.T) {
	inBubble(t, func(r *rig) {
		never := idle.Duration(0)
		id := r.run("a", func(s *instance.Spec) { s.PauseAfter = &never })
		r.k.Fail(hosttest.Freezing, fmt.Errorf("timed out: %w", instance.ErrUnanswered))
		if err := r.Pause(r.ctx, "a", ByManual, true); err == nil {
			t.Error("paused, it says")
		}
		r.is("a", power.Running)
		r.k.Fail(hosttest.Freezing, nil)
		for _, want := range []power.Instance{power.Running, power.Paused} {
			time.Sleep(30 * time.Second)
			errtest.None(t, r.k.Proc(id).Freeze(r.ctx))
			errtest.None(t, r.Observe("a", "it was paused outside"))
			c := r.k.Connect(id)
			synctest.Wait()
			if got := r.is("a", want); (c.Outcome() == "answered") != (want == power.Running) {
				t.Errorf("it is %s, and the client is %s", got.State, c.Outcome())
			}
			c.Close()
		}
		if err := r.Resume(r.ctx, "a", ByManual); err != nil {
			t.Error(err)
		}
	})
}
