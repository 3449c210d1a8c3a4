package host

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
)

// stopsLater configures a daemon that does not soon stop the programs that it takes
// over.
func stopsLater(c *Config) { c.StopAfter = time.Hour }

// locked calls f while it holds the lock of an instance.
func (r *rig) locked(id string, f func()) {
	i, _ := r.find(id)
	i.acquire()
	f()
	i.release()
}

// diesAtThaw makes the daemon stop "a" automatically and die after it has sent
// SIGTERM to the frozen program, before it thaws it.
func (r *rig) diesAtThaw(deep bool) (id string) {
	r.t.Helper()
	r.k.Deep = deep
	id = r.run("a", nil)
	r.locked(id, func() {
		r.at = func(point string, _ *inst) {
			if point == "stop-disarm" {
				r.daemon.Dead.Store(true)
				r.k.Fail(hosttest.Thawing, errWorld)
			}
		}
	})
	time.Sleep(7 * time.Minute)
	synctest.Wait()
	if rec := r.disk.All()[0]; rec.State != power.Stopping || rec.StoppedBy != stopAfter {
		r.t.Fatalf("its record says %s, stopped by %q", rec.State, rec.StoppedBy)
	}
	r.crash()
	r.tune = stopsLater
	r.k.Fail(hosttest.Thawing, nil)
	if p := r.k.Proc(id); p == nil || !p.Frozen() {
		r.t.Fatal("it is not frozen")
	}
	return id
}

// TestSignalPending checks that a daemon that takes over a program with a pending
// SIGTERM completes the automatic stop. If it paused the program instead, the next
// client would wake it and the signal end it.
func TestSignalPending(t *testing.T) {
	for _, deep := range []bool{false, true} {
		for _, late := range []bool{false, true} {
			inBubble(t, func(r *rig) {
				r.diesAtThaw(deep)
				r.k.Lingers = 10 * time.Millisecond
				r.boot()
				if late {
					time.Sleep(time.Minute)
					r.is("a", power.Stopped)
				}
				c, err := r.gates["a"].Arrive(r.ctx)
				if err != nil || c.Outcome() != "answered" {
					t.Fatalf("guest %v, late %v: the client is %v, %v", deep, late, c, err)
				}
				r.is("a", power.Running)
				if n := r.k.Starts(); n != 2 {
					t.Errorf("%d starts", n)
				}
			})
		}
	}
}

// TestSignalPendingUnknown checks that a client waits for the next run also if it
// is unknown whether a SIGTERM is pending.
func TestSignalPendingUnknown(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.diesAtThaw(false)
		r.k.Lingers = time.Second
		r.k.Fail(hosttest.Stillness, errWorld)
		r.boot()
		c, err := r.gates["a"].Arrive(r.ctx)
		if err != nil || c.Outcome() != "answered" {
			t.Errorf("the client is %v, %v", c, err)
		}
	})
}

// TestSignalDelivered checks that a client waits for the next run if the supervisor
// has thawed the program and it takes its time to exit. It also checks that a
// program that does not exit continues to run.
func TestSignalDelivered(t *testing.T) {
	for _, ends := range []bool{true, false} {
		inBubble(t, func(r *rig) {
			id := r.diesAtThaw(false)
			r.k.Lingers = 5 * time.Second
			if !ends {
				r.k.Stubborn = true
			}
			if err := r.k.Proc(id).Thaw(); err != nil { // as the supervisor does
				t.Fatal(err)
			}
			r.boot()
			c, err := r.gates["a"].Arrive(r.ctx)
			if err != nil || c.Outcome() != "answered" {
				t.Fatalf("ends %v: the client is %v, %v", ends, c, err)
			}
			r.is("a", power.Running)
			if n := r.k.Starts(); n != 1+yes(ends) {
				t.Errorf("ends %v: %d starts", ends, n)
			}
		})
	}
}

// TestStopUndecided checks that an automatic stop is decided again if its daemon
// died before the SIGTERM: the program is not asked to exit.
func TestStopUndecided(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", func(s *instance.Spec) { s.QuietConnectionAfter = 1 })
		r.locked(id, func() {
			r.at = func(point string, _ *inst) {
				if point == "stop-look" {
					r.daemon.Dead.Store(true)
					r.k.Fail(hosttest.Signals, errWorld)
					r.k.Fail(hosttest.Thawing, errWorld)
				}
			}
		})
		time.Sleep(7 * time.Minute)
		r.crash()
		r.k.Fail(hosttest.Signals, nil)
		r.k.Fail(hosttest.Thawing, nil)
		r.k.Proc(id).Thaw()
		r.k.Proc(id).Freeze(context.Background())
		r.tune = stopsLater
		r.boot()
		c := r.k.Connect(id)
		synctest.Wait()
		if c.Outcome() != "answered" || r.k.Starts() != 1 {
			t.Errorf("the client is %s after %d starts", c.Outcome(), r.k.Starts())
		}
		r.k.Proc(id).Exit(1)
		r.is("a", power.Stopped)
		if _, err := r.gates["a"].Arrive(r.ctx); err == nil {
			t.Error("a client starts a program that ended by itself, as if lull had stopped it")
		}
	})
}
