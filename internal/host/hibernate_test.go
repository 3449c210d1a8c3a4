package host

import (
	"context"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
)

// deep configures all steps of the ladder.
func deep(s *instance.Spec) {
	stop := idle.Duration(30 * time.Minute)
	s.ReclaimAfter, s.HibernateAfter, s.StopAfter = idle.Duration(time.Minute), idle.Duration(5*time.Minute), &stop
}

// TestLadderToDisk checks that each step comes at its time, counted from the pause,
// that a client wakes the instance from each, and that the steps do not change the
// recorded time of the pause.
func TestLadderToDisk(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.k.Deep = true
		id := r.run("a", deep)
		steps := []struct {
			after time.Duration // since the last step
			state power.Instance
		}{{62 * time.Second, power.Paused}, {time.Minute, power.Reclaimed}, {4 * time.Minute, power.Hibernated}, {25 * time.Minute, power.Stopped}}
		for _, wakeAt := range []power.Instance{power.Paused, power.Reclaimed, power.Hibernated} {
			for _, s := range steps {
				time.Sleep(s.after)
				o := r.is("a", s.state)
				if o.StopAt == nil || o.LastPausedAt == nil || o.StopAt.Sub(*o.LastPausedAt) != 30*time.Minute {
					t.Errorf("%s: paused at %v, stops at %v", s.state, o.LastPausedAt, o.StopAt)
				}
				if (s.state == power.Hibernated) != (o.SavedBytes > 0) {
					t.Errorf("%s: %d bytes saved", s.state, o.SavedBytes)
				}
				if s.state == wakeAt {
					break
				}
			}
			c := r.k.Connect(id)
			if o := r.is("a", power.Running); o.SavedBytes != 0 || o.BootedAnew != "" {
				t.Errorf("after a wake from %s: %d bytes saved, booted anew %q", wakeAt, o.SavedBytes, o.BootedAnew)
			}
			if c.Outcome() != "answered" {
				t.Errorf("the client that woke it from %s is %s", wakeAt, c.Outcome())
			}
			c.Close()
			time.Sleep(5 * time.Second)
		}
		if n := r.k.Starts(); n != 1 {
			t.Errorf("%d starts", n)
		}
		for _, s := range steps {
			time.Sleep(s.after + 3*time.Second)
			r.is("a", s.state)
		}
	})
}

// damaged is the error of a saved state that cannot be used.
var damaged = &instance.SnapshotError{Reason: "damaged"}

// TestHibernateFails checks that an instance that cannot be saved stays asleep with
// the reason in its status, is saved again later, and is stopped on time.
func TestHibernateFails(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.k.Deep = true
		r.k.Fail(hosttest.Saving, syscall.ENOSPC)
		id := r.run("a", deep)
		time.Sleep(7 * time.Minute)
		if o := r.is("a", power.Reclaimed); !strings.Contains(o.StatusReason, syscall.ENOSPC.Error()) {
			t.Errorf("its reason is %q", o.StatusReason)
		}
		r.k.Fail(hosttest.Saving, nil)
		time.Sleep(time.Minute)
		r.is("a", power.Hibernated)
		r.k.Connect(id).Close()
		r.is("a", power.Running)
		r.k.Fail(hosttest.Saving, syscall.ENOSPC)
		time.Sleep(33 * time.Minute)
		r.is("a", power.Stopped)
	})
}

// TestSnapshotRefused checks that an instance whose snapshot cannot be used is
// booted once, by the next client, and that why explains it.
func TestSnapshotRefused(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.k.Deep = true
		r.run("a", deep)
		time.Sleep(8 * time.Minute)
		r.is("a", power.Hibernated)
		r.k.Spoil(damaged)
		c, err := r.gates["a"].Arrive(r.ctx)
		if err != nil || c.Outcome() != "answered" {
			t.Fatalf("the client that came: %v", err)
		}
		y, err := r.Why(r.ctx, "a", time.Time{})
		if err != nil || !strings.Contains(y.Answer, damaged.Reason) || y.Instance.State != string(power.Running) {
			t.Errorf("why: %s, %v", y.Answer, err)
		}
		if n := r.k.Starts(); n != 2 {
			t.Errorf("%d starts", n)
		}
		r.k.Spoil(nil)
		c.Close()
		time.Sleep(8 * time.Minute)
		r.is("a", power.Hibernated)
		r.k.Spoil(damaged)
		if err := r.Stop(context.Background(), "a", ByManual, false); err != nil {
			t.Errorf("stop: %v", err)
		}
		if o := r.is("a", power.Stopped); !strings.Contains(o.StatusReason, damaged.Reason) {
			t.Errorf("its reason is %q", o.StatusReason)
		}
	})
}

// TestHibernatedOverRestarts checks that a shutdown leaves hibernated instances
// alone, and that the next daemon finds them. If a daemon dies between saving an
// instance and recording that, the snapshot on disk decides.
func TestHibernatedOverRestarts(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.k.Deep = true
		id := r.run("a", deep)
		time.Sleep(8 * time.Minute)
		r.is("a", power.Hibernated)
		r.shut()
		if p := r.k.Proc(id); !p.Hibernated() {
			t.Error("the end of the daemon restored it")
		}
		r.boot()
		o := r.is("a", power.Hibernated)
		if o.LastPausedBy != byIdle {
			t.Errorf("paused by %s after a restart", o.LastPausedBy)
		}
		r.k.Connect(id).Close()
		r.is("a", power.Running)
		time.Sleep(70 * time.Second)
		r.is("a", power.Paused)
		r.k.Proc(id).Hibernate(context.Background())
		r.crash()
		r.boot()
		r.is("a", power.Hibernated)
		r.k.Connect(id).Close()
		r.is("a", power.Running)
	})
}

// TestLeaseBlocksDeeperSteps checks that a lease keeps a paused instance in its
// state.
func TestLeaseBlocksDeeperSteps(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.k.Deep = true
		r.run("a", deep)
		time.Sleep(62 * time.Second)
		if err := r.Hold(context.Background(), "a", idle.Lease{Holder: "x"}, time.Hour); err != nil {
			t.Fatal(err)
		}
		time.Sleep(59 * time.Minute)
		r.is("a", power.Paused)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if o, err := r.Get("a"); err != nil || !slices.Contains([]string{"reclaimed", "hibernated", "stopped"}, o.State) {
			t.Errorf("after the lease it is %s, %v", o.State, err)
		}
	})
}
