package host

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
)

// in returns an option that makes a spec a member of the group shop that depends on
// others.
func in(names ...string) func(*instance.Spec) {
	return func(s *instance.Spec) { s.Group, s.DependsOn, s.StopAfter = "shop", names, new(idle.Duration) }
}

// TestGroupSleepsTogether has clients of one member of a group. It checks that no
// member sleeps before the last client leaves, that all then do in the order of
// their dependencies, and that a client of any member wakes all.
func TestGroupSleepsTogether(t *testing.T) {
	inBubble(t, func(r *rig) {
		names := []string{"db", "worker", "web"}
		ids := map[string]string{"db": r.run("db", in()), "worker": r.run("worker", in()), "web": r.run("web", in("db"))}
		r.run("other", nil)
		all := func(want power.Instance) {
			t.Helper()
			for _, name := range names {
				r.is(name, want)
			}
		}
		for _, used := range names {
			c := r.k.Connect(ids[used])
			if !answered(c) {
				t.Fatalf("a client of %s gets no answer", used)
			}
			all(power.Running)
			for range 30 {
				time.Sleep(time.Minute)
				all(power.Running)
			}
			if used != "worker" {
				if o := r.is("worker", power.Running); !slices.ContainsFunc(o.Blocks, func(b idle.Block) bool { return b.Code == GroupInUse && b.Holder == used }) {
					t.Errorf("worker is held by %v", o.Blocks)
				}
			}
			if r.byName["other"].state() == power.Running {
				t.Error("what is of no group stays awake")
			}
			c.Close()
			time.Sleep(4 * time.Minute)
			all(power.Paused)
			if w, d := r.is("web", power.Paused).LastPausedAt, r.is("db", power.Paused).LastPausedAt; d.Before(*w) {
				t.Errorf("db slept at %v, before web at %v", d, w)
			}
		}
	})
}

// TestGroupLeavesAlone checks that a client of one member does not wake a member
// that a user stopped, or that was paused outside lull, and that neither keeps the
// others awake.
func TestGroupLeavesAlone(t *testing.T) {
	inBubble(t, func(r *rig) {
		web, db, cache := r.run("web", in()), r.run("db", in()), r.run("cache", in())
		r.run("always", func(s *instance.Spec) { in()(s); s.PauseAfter = new(idle.Duration) })
		if err := r.Stop(context.Background(), db, ByManual, false); err != nil {
			t.Fatal(err)
		}
		if err := r.k.Proc(cache).Freeze(r.ctx); err != nil {
			t.Fatal(err)
		}
		if err := r.Observe("cache", "it was paused outside"); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			time.Sleep(4 * time.Minute)
			r.is("web", power.Paused)
			c := r.k.Connect(web)
			if !answered(c) {
				t.Fatal("no answer")
			}
			c.Close()
			synctest.Wait()
			r.is("db", power.Stopped)
			r.is("cache", power.Paused)
			r.is("always", power.Running)
		}
	})
}

// TestRelatedOutside checks that the group and the dependencies of a running
// instance can be changed and survive a crash, and that a circle of dependencies is
// refused.
func TestRelatedOutside(t *testing.T) {
	inBubble(t, func(r *rig) {
		ctx := context.Background()
		web, db := r.run("web", nil), r.run("db", nil)
		if err := r.RelatedOutside(ctx, web, "shop", []string{db, web, "gone"}); err != nil {
			t.Fatal(err)
		}
		if err := r.RelatedOutside(ctx, db, "shop", []string{web}); !invalid(err) {
			t.Errorf("a circle: %v", err)
		}
		r.crash()
		r.boot()
		if o := r.is("web", power.Running); o.Group != "shop" || !slices.Equal(o.DependsOn, []string{"db"}) {
			t.Errorf("group %q, on %v", o.Group, o.DependsOn)
		}
		c := r.k.Connect(web)
		for range 10 {
			time.Sleep(time.Minute)
			r.is("db", power.Running)
		}
		if err := r.RelatedOutside(ctx, web, "", nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(4 * time.Minute)
		r.is("db", power.Paused)
		r.is("web", power.Running)
		c.Close()
	})
}

// TestGroupIsNotWokenByEnds checks that a connection that ends, as those of a
// stopped member do, wakes the instance to which it led and the dependencies of
// that, but no other member. A client that comes at the same moment wakes all
// members.
func TestGroupIsNotWokenByEnds(t *testing.T) {
	inBubble(t, func(r *rig) {
		quiet := func(names ...string) func(*instance.Spec) {
			return func(s *instance.Spec) { in(names...)(s); s.QuietConnectionAfter = 1 }
		}
		r.run("db", quiet())
		ids := map[string]string{"api": r.run("api", quiet("db")), "web": r.run("web", quiet())}
		all := func(want power.Instance) {
			t.Helper()
			for _, name := range []string{"db", "api", "web"} {
				r.is(name, want)
			}
		}
		for range 3 {
			c := r.k.Connect(ids["api"])
			if !answered(c) {
				t.Fatal("no answer")
			}
			all(power.Running)
			time.Sleep(4 * time.Minute)
			all(power.Paused)
			web := r.is("web", power.Paused).WakeCount
			c.Close()
			r.is("db", power.Running)
			r.is("api", power.Running)
			time.Sleep(4 * time.Minute)
			all(power.Paused)
			if o := r.is("web", power.Paused); o.WakeCount != web {
				t.Errorf("web was woken by %s: %v", o.LastResumedBy, r.happenings("web", "resumed"))
			}
		}
		// The second request comes before the first is served.
		for range 2 {
			all(power.Paused)
			api := r.byName["api"]
			api.acquire()
			api.wantWake("closed by the client: tcp")
			api.wantWake("connection waiting on tcp")
			api.wantWake(instance.WithinGroup + "data on tcp")
			api.release()
			all(power.Running)
			time.Sleep(4 * time.Minute)
		}
		// A client comes while the instance is awake for a reason that does not
		// wake its group.
		for _, less := range []string{"error on tcp", instance.WithinGroup + "data on tcp"} {
			r.byName["api"].wantWake(less)
			r.is("api", power.Running)
			r.is("web", power.Paused)
			r.byName["api"].wantWake("connection waiting on tcp")
			all(power.Running)
			time.Sleep(4 * time.Minute)
			all(power.Paused)
		}
	})
}

// publisher is a machine on which another program publishes the ports of instances.
type publisher struct{ *hosttest.Kernel }

func (publisher) HoldPorts(context.Context, string, string, func(string)) error { return nil }
func (publisher) ReleasePorts(string)                                           {}

// TestGroupInUseIsNotStopped checks that, if another program publishes the ports, a
// paused member is not stopped while another member is in use or a dependent of it
// is awake.
func TestGroupInUseIsNotStopped(t *testing.T) {
	inBubble(t, func(r *rig) {
		r.Host.cfg.Runtimes["process"] = publisher{r.k}
		stops := func(names ...string) func(*instance.Spec) {
			return func(s *instance.Spec) { in(names...)(s); s.StopAfter = span(2 * time.Minute) }
		}
		r.run("db", stops())
		web := r.run("web", stops())
		c := r.k.Connect(web)
		if !answered(c) {
			t.Fatal("no answer")
		}
		if err := r.Pause(context.Background(), "db", ByManual, true); err != nil {
			t.Fatal(err)
		}
		for range 20 {
			time.Sleep(time.Minute)
			r.is("db", power.Paused)
			r.is("web", power.Running)
		}
		if got := r.happenings("db", "stop_cancelled"); len(got) != 1 {
			t.Errorf("its stop was called off %q", got)
		}
		c.Close()
		time.Sleep(10 * time.Minute)
		r.is("db", power.Stopped)
		r.is("web", power.Stopped)
	})
}
