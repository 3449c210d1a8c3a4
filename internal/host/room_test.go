package host

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/host/admission"
	"lull/internal/lib/errtest"
	"lull/internal/relay"
)

const mib = 1 << 20

// inRoom runs f on a host for guests, with the given memory in bytes and number of
// boot slots.
func inRoom(t *testing.T, memory int64, places int, f func(r *rig)) {
	t.Helper()
	inTuned(t, func(c *Config) { c.Memory, c.Places = memory*mib, places }, func(r *rig) {
		r.k.Deep = true
		f(r)
		synctest.Wait()
		if s := r.room.Snapshot(); len(s.Waiting)+s.Taken+len(s.Given) != 0 {
			t.Errorf("%d still wait at the end, %d places and the memory of %d were never given back", len(s.Waiting), s.Taken, len(s.Given))
		}
	})
}

// small gives a spec a guest of 100 MiB that goes deeper only if others need its
// memory.
func small(s *instance.Spec) { guestOf(s, 100) }

func guestOf(s *instance.Spec, memory int64) {
	never := idle.Duration(0)
	s.Memory, s.StopAfter = memory*mib, &never
	s.Expose = s.Expose[:1]
}

// TestRoomPushesDown checks that memory is taken from sleeping instances, from the
// least recently used first and no more than needed, and that an instance that runs
// or is held keeps its memory.
func TestRoomPushesDown(t *testing.T) {
	inRoom(t, 450, 2, func(r *rig) {
		r.k.Frees = 60 * mib
		a := r.run("a", small)
		time.Sleep(time.Second)
		b := r.run("b", small)
		time.Sleep(30 * time.Second)
		r.run("held", small)
		time.Sleep(time.Minute)
		c := r.run("c", small)
		r.is("a", power.Paused)
		time.Sleep(31 * time.Second)
		for _, name := range []string{"a", "b", "held"} {
			r.is(name, power.Paused)
		}
		r.lease("held", "x", time.Hour)
		r.k.Connect(c) // keeps it running
		r.run("d", small)
		r.is("d", power.Running)
		r.is("a", power.Reclaimed) // 60 freed plus the 50 available were enough
		r.is("b", power.Paused)
		r.run("e", small)
		r.is("a", power.Hibernated)
		r.is("b", power.Reclaimed)
		o := r.is("held", power.Paused)
		if o.Waiting != nil {
			t.Errorf("held waits: %+v", o.Waiting)
		}
		if n := r.k.Held(); n > 450*mib {
			t.Errorf("%d MiB are held", n/mib)
		}
		// Clients of instances that gave up their memory are served.
		time.Sleep(2 * time.Minute) // d and e sleep too
		for _, id := range []string{a, b} {
			cl := r.k.Connect(id)
			synctest.Wait()
			time.Sleep(time.Second)
			if cl.Outcome() != "answered" {
				t.Errorf("a client of %s is %s", id, cl.Outcome())
			}
			cl.Close()
		}
		if s := r.Capacity(); s.Pushed < 4 || s.Refused != 0 || s.Waiting != 0 {
			t.Errorf("room: %+v", s)
		}
	})
}

// TestRoomWaits checks that a start for which there is no memory and no instance to
// take it from waits, reports its place in the queue, and continues once there is
// memory or fails at its deadline.
func TestRoomWaits(t *testing.T) {
	inRoom(t, 250, 0, func(r *rig) {
		a := r.run("a", small)
		r.k.Connect(a)
		ids := []string{}
		for _, name := range []string{"b", "c", "d"} {
			s := instance.Spec{Name: name, Command: []string{"x"}, Restart: instance.RestartNo, Expose: []instance.Endpoint{{Listen: "127.0.0.1:80", Target: "127.0.0.1:80"}}}
			guestOf(&s, 100)
			id, err := r.Create(r.ctx, s)
			errtest.None(t, err)
			ids = append(ids, id)
		}
		errtest.None(t, r.Start(r.ctx, "b", ByManual))
		busy := r.k.Connect(ids[0])
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for n, name := range []string{"c", "d"} {
			wg.Go(func() { errs[n] = r.Start(context.Background(), name, ByManual) })
			synctest.Wait()
		}
		o := r.is("d", power.Stopped)
		if w := o.Waiting; w == nil || w.Place != 2 || w.Reason != "others are first in the queue for memory" && !(strings.Contains(w.Reason, instance.Bytes(50*mib)) && strings.Contains(w.Reason, instance.Bytes(250*mib))) {
			t.Errorf("d waits as %+v", w)
		}
		y, err := r.Why(r.ctx, "c", time.Time{})
		if err != nil || y.Fact(why.Waiting.Code) == nil || y.Instance.Waiting.Place != 1 || !strings.Contains(y.Answer, instance.Bytes(100*mib)) {
			t.Errorf("why: %s, %v", y.Answer, err)
		}
		if err := r.Hold(r.ctx, "b", idle.Lease{Holder: "x"}, time.Second); err != nil { // other requests are not blocked meanwhile
			t.Error(err)
		}
		time.Sleep(5 * time.Second)
		busy.Close()
		if err := r.Stop(r.ctx, "b", ByManual, false); err != nil {
			t.Error(err)
		}
		r.is("c", power.Running)
		r.k.Connect(ids[1])
		if o := r.is("d", power.Stopped); o.Waiting == nil || o.Waiting.Place != 1 {
			t.Errorf("d waits as %+v", o.Waiting)
		}
		wg.Wait()
		var late *BusyError
		if errs[0] != nil || !errors.As(errs[1], &late) || late.Waited != 45*time.Second {
			t.Errorf("the starts: %v", errs)
		}
		big := instance.Spec{Name: "big", Command: []string{"x"}, Memory: 251 * mib}
		errtest.Get(r.Create(r.ctx, big))(t)
		large := &admission.TooLargeError{Needs: 251 * mib, Memory: 250 * mib}
		var no *RefusedError
		if err := r.Start(r.ctx, "big", ByManual); !errors.As(err, &no) || no.Reason != large.Error() {
			t.Errorf("what can never fit: %v", err)
		}
	})
}

// TestRoomPlaces checks that the number of concurrent restores from disk never
// exceeds the boot slots, and that an instance that only needs a thaw does not
// wait.
func TestRoomPlaces(t *testing.T) {
	inRoom(t, 0, 3, func(r *rig) {
		r.k.Restore = time.Second
		const n = 20
		for i := range n {
			r.run(fmt.Sprintf("g%d", i), deep)
		}
		time.Sleep(8 * time.Minute)
		thin := r.run("thin", nil)
		time.Sleep(62 * time.Second)
		r.is("thin", power.Paused)
		answered := atomic.Int32{}
		var wg sync.WaitGroup
		for i := range n {
			r.is(fmt.Sprintf("g%d", i), power.Hibernated)
			wg.Go(func() {
				if c, err := r.gates[fmt.Sprintf("g%d", i)].Arrive(context.Background()); err == nil && c.Outcome() == "answered" {
					answered.Add(1)
				}
			})
		}
		synctest.Wait()
		if s := r.Capacity(); s.Taken != 3 || s.Waiting != n-3 {
			t.Errorf("room in the storm: %+v", s)
		}
		if c := r.k.Connect(thin); c.Outcome() != "answered" {
			synctest.Wait()
			if c.Outcome() != "answered" {
				t.Errorf("the client of a paused one is %s in the storm", c.Outcome())
			}
		}
		began := time.Now()
		wg.Wait()
		if answered.Load() != n || r.k.Restored() != 3 {
			t.Errorf("%d of %d were answered, %d were restored at once", answered.Load(), n, r.k.Restored())
		}
		if d := time.Since(began); d != 7*time.Second {
			t.Errorf("%d at 3 a second took %s", n, d)
		}
	})
}

// TestRoomClientsFirst checks that starts for which a client waits come before the
// others, each in the order of arrival.
func TestRoomClientsFirst(t *testing.T) {
	inRoom(t, 0, 1, func(r *rig) {
		r.k.Restore = time.Second
		for i := range 5 {
			r.run(fmt.Sprintf("g%d", i), deep)
		}
		time.Sleep(8 * time.Minute)
		var order []string
		var mu sync.Mutex
		var wg sync.WaitGroup
		ask := func(name string, by string) {
			wg.Go(func() {
				i, err := r.find(name)
				if err == nil {
					err = r.startFor(context.Background(), i, by, "")
				}
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
				mu.Lock()
				order = append(order, name)
				mu.Unlock()
			})
			synctest.Wait()
		}
		ask("g0", ByManual) // gets the slot
		ask("g1", "restart")
		ask("g2", "restart")
		ask("g3", ByManual)
		ask("g4", byConnection)
		wg.Wait()
		if want := []string{"g0", "g3", "g4", "g1", "g2"}; !slices.Equal(order, want) {
			t.Errorf("served in the order %v, want %v", order, want)
		}
	})
}

// TestRoomStops checks that a user's stop works whatever waits, and that an
// instance that waits for memory can be stopped and removed.
func TestRoomStops(t *testing.T) {
	inRoom(t, 150, 1, func(r *rig) {
		a := r.run("a", small)
		r.k.Connect(a).Close()
		time.Sleep(2 * time.Minute)
		r.is("a", power.Paused)
		b := r.run("b", small)
		r.k.Connect(b)
		r.is("a", power.Hibernated)
		failed := make(chan error, 1)
		go func() { _, err := r.gates["a"].Arrive(context.Background()); failed <- err }()
		time.Sleep(time.Second)
		if o := r.is("a", power.Hibernated); o.Waiting == nil {
			t.Error("a does not wait")
		}
		if err := r.Delete(r.ctx, "a", ByManual); err != nil {
			t.Errorf("remove: %v", err)
		}
		if err := <-failed; err == nil {
			t.Error("a client of an instance that was removed was served")
		}
		time.Sleep(time.Minute)
	})
}

// TestRoomCalledOff checks that a user's stop or removal immediately cancels all
// pending starts and wakes of the instance, and that none of them happens later.
func TestRoomCalledOff(t *testing.T) {
	asks := map[string]func(r *rig) chan error{
		"start by a user": func(r *rig) chan error {
			failed := make(chan error, 1)
			go func() { failed <- r.Start(context.Background(), "g", ByManual) }()
			return failed
		},
		"start by a client": func(r *rig) chan error {
			failed := make(chan error, 1)
			go func() { _, err := r.gates["g"].Arrive(context.Background()); failed <- err }()
			return failed
		},
		"restart": func(r *rig) chan error {
			i, _ := r.find("g")
			if err := i.save(func(rec *instance.Record) { rec.RestartAt = r.Now() }); err != nil {
				r.t.Fatal(err)
			}
			i.armRestart()
			time.Sleep(time.Second)
			return nil
		},
	}
	ends := map[string]func(r *rig) error{
		"stop":           func(r *rig) error { return r.Stop(r.ctx, "g", ByManual, false) },
		"stop --disable": func(r *rig) error { return r.Stop(r.ctx, "g", ByManual, true) },
		"rm":             func(r *rig) error { return r.Delete(r.ctx, "g", ByManual) },
	}
	for asked, ask := range asks {
		for ended, end := range ends {
			t.Run(asked+", "+ended, func(t *testing.T) {
				inRoom(t, 150, 1, func(r *rig) {
					busy := r.k.Connect(r.run("a", small))
					g := instance.Spec{Name: "g", Command: []string{"x"}, WakeFromStopped: new(true), Expose: []instance.Endpoint{{Listen: "127.0.0.1:80", Target: "127.0.0.1:80"}}}
					guestOf(&g, 100)
					errtest.Get(r.Create(r.ctx, g))(t)
					failed := ask(r)
					synctest.Wait()
					if o := r.is("g", power.Stopped); o.Waiting == nil {
						t.Fatal("g does not wait")
					}
					began := time.Now()
					errtest.None(t, end(r))
					var no *RefusedError
					if failed != nil {
						if err := <-failed; !errors.As(err, &no) || !no.Overtaken {
							t.Errorf("who waited is told: %v", err)
						}
					}
					if s := r.Capacity(); s.Waiting != 0 || s.Refused != 0 || time.Since(began) != 0 {
						t.Errorf("%s later: %+v", time.Since(began), s)
					}
					busy.Close()
					time.Sleep(5 * time.Minute) // by now there is memory
					if ended == "rm" {
						return
					}
					if o := r.is("g", power.Stopped); o.Waiting != nil || o.RestartAt != nil || o.Enabled != (ended == "stop") {
						t.Errorf("afterwards: %+v", o)
					}
					if err := r.Start(r.ctx, "g", ByManual); err != nil { // a new request, made after the stop
						t.Error(err)
					}
					if o := r.is("g", power.Running); !o.Enabled {
						t.Error("it runs and is disabled")
					}
				})
			})
		}
	}
}

// TestRoomCallsOffWakes checks that a stop also cancels pending wakes of a sleeping
// instance, and that a client that comes during the stop gets an answer.
func TestRoomCallsOffWakes(t *testing.T) {
	inRoom(t, 150, 1, func(r *rig) {
		g := r.run("g", small)
		held := r.k.Connect(g)
		errtest.None(t, r.Pause(r.ctx, "g", ByManual, true))
		r.k.Connect(r.run("a", small))
		r.is("g", power.Hibernated)
		resumed := make(chan error, 1)
		go func() { resumed <- r.Resume(context.Background(), "g", ByManual) }()
		held.Send() // requests a wake that waits (wakeLater)
		if o := r.is("g", power.Hibernated); o.Waiting == nil || r.Capacity().Waiting != 2 {
			t.Fatalf("%d wait: %+v", r.Capacity().Waiting, o)
		}
		stopped := make(chan error, 1)
		go func() { stopped <- r.Stop(context.Background(), "g", ByManual, false) }() // waits too, to restore the guest
		synctest.Wait()
		var no *RefusedError
		if err := <-resumed; !errors.As(err, &no) || !no.Overtaken {
			t.Errorf("resumed: %v", err)
		}
		arrived := make(chan error, 1)
		go func() { _, err := r.gates["g"].Arrive(context.Background()); arrived <- err }()
		synctest.Wait()
		if err := r.Stop(r.ctx, "g", ByManual, false); err != nil {
			t.Errorf("stopped: %v", err)
		}
		if err := <-stopped; err != nil {
			t.Errorf("the stop before it: %v", err)
		}
		if err := <-arrived; err == nil {
			t.Error("a client started what a user had stopped")
		}
		if s := r.Capacity(); s.Waiting != 0 {
			t.Errorf("after the stop: %+v", s)
		}
		r.is("g", power.Stopped)
	})
}

// TestRoomStartsAgainstStops checks that, in any order of starts and stops, a stop
// takes effect unless a start was requested after it was answered.
func TestRoomStartsAgainstStops(t *testing.T) {
	inRoom(t, 250, 1, func(r *rig) {
		r.k.Connect(r.run("a", small))
		for _, name := range []string{"g", "h"} {
			r.run(name, small)
			errtest.None(t, r.Stop(r.ctx, name, ByManual, true))
		}
		var wg sync.WaitGroup
		for range count(t, "LULL_ROOM_STOPS", 100) {
			for _, name := range []string{"g", "h"} {
				wg.Go(func() { _ = r.Start(context.Background(), name, ByManual) }) // succeeds or is refused, depending on the order
				wg.Go(func() {
					if err := r.Stop(context.Background(), name, ByManual, rand.IntN(2) == 0); err != nil {
						t.Errorf("stop: %v", err)
					}
				})
			}
			time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond)
		}
		wg.Wait()
		for _, name := range []string{"g", "h"} {
			if o, err := r.Get(name); err != nil || o.State == string(power.Running) && !o.Enabled {
				t.Errorf("%s is %s although it is disabled, %v", name, o.State, err)
			}
			if err := r.Stop(r.ctx, name, ByManual, true); err != nil {
				t.Error(err)
			}
		}
		time.Sleep(2 * time.Minute)
		for _, name := range []string{"g", "h"} {
			if o := r.is(name, power.Stopped); o.Enabled || o.Waiting != nil {
				t.Errorf("%+v", o)
			}
		}
	})
}

// TestRoomTellsWhatItRefuses checks that a refused start or wake is an event, is
// counted, and is the instance's status reason until its state changes, also after
// a restart of the daemon. Repeated refusals are not published each time.
func TestRoomTellsWhatItRefuses(t *testing.T) {
	inRoom(t, 250, 1, func(r *rig) {
		r.measures(map[string]float64{"instance_events_total{start_failed}": 0})
		big := instance.Spec{Name: "big", Command: []string{"x"}, Memory: 900 * mib}
		errtest.Get(r.Create(r.ctx, big))(t)
		const never = "it may need 900.0 MiB of memory, more than the budget of all instances together (250.0 MiB)"
		for range 100 {
			var no *RefusedError
			if err := r.Start(r.ctx, "big", ByManual); !errors.As(err, &no) || err.Error() != "cannot start big: "+never {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if got := r.happenings("big", "start_failed"); !slices.Equal(got, []string{"manual: " + never}) {
			t.Errorf("of big is told: %q", got)
		}
		r.measures(map[string]float64{"instance_events_total{start_failed}": 1})
		time.Sleep(time.Minute)
		_ = r.Start(r.ctx, "big", ByManual)
		if got := r.happenings("big", "start_failed"); len(got) != 2 {
			t.Errorf("a minute later: %q", got)
		}
		r.shut()
		r.boot()
		if y, err := r.Why(r.ctx, "big", time.Time{}); err != nil || !strings.Contains(y.Answer, "created") || !strings.Contains(y.Answer, r.Now().Format("2006-01-02T15:")) ||
			!strings.Contains(y.Answer, never) {
			t.Errorf("why, of the next daemon: %s, %v", y.Answer, err)
		}

		// Clients of a stopped instance and of a sleeping one are refused.
		busy := r.k.Connect(r.run("a", func(s *instance.Spec) { guestOf(s, 200) }))
		g := instance.Spec{Name: "g", Command: []string{"x"}, WakeFromStopped: new(true), Expose: []instance.Endpoint{{Listen: "127.0.0.1:80", Target: "127.0.0.1:80"}}}
		guestOf(&g, 100)
		errtest.Get(r.Create(r.ctx, g))(t)
		i, err := r.find("g")
		errtest.None(t, err)
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() {
				if err := i.Wake(context.Background(), relay.Arrival{}); err == nil {
					t.Error("a client of g was served without room")
				}
			})
		}
		wg.Wait()
		const full = "there was no room on this host for 45s: it may take 100.0 MiB more, and 50.0 MiB of 250.0 MiB are free"
		if got := r.happenings("g", "start_failed"); !slices.Equal(got, []string{"connection: " + full}) {
			t.Errorf("of g is told: %q", got)
		}
		if o := r.is("g", power.Stopped); !strings.HasPrefix(o.StatusReason, "created; a start by connection failed at ") || !strings.HasSuffix(o.StatusReason, full) {
			t.Errorf("g: %s", o.StatusReason)
		}
		busy.Close()
		errtest.None(t, r.Stop(r.ctx, "a", ByManual, false))
		if _, err := r.gates["g"].Arrive(r.ctx); err != nil {
			t.Error(err)
		}
		if o := r.is("g", power.Running); strings.Contains(o.StatusReason, "failed") {
			t.Errorf("g runs: %s", o.StatusReason)
		}
		time.Sleep(2 * time.Minute)
		r.is("g", power.Paused)
		r.k.Connect(r.run("b", func(s *instance.Spec) { guestOf(s, 200) }))
		r.is("g", power.Hibernated)
		if err := r.Resume(r.ctx, "g", ByManual); err == nil {
			t.Error("g was resumed without room")
		}
		if got := r.happenings("g", "wake_failed"); !slices.Equal(got, []string{"manual: " + full}) {
			t.Errorf("of g is told: %q", got)
		}
		if y, err := r.Why(r.ctx, "g", time.Time{}); err != nil || !strings.Contains(y.Answer, full) {
			t.Errorf("why: %s, %v", y.Answer, err)
		}
	})
}

// TestRoomForRestarts checks that a restart that is refused for lack of memory is
// retried until there is some.
func TestRoomForRestarts(t *testing.T) {
	inRoom(t, 150, 1, func(r *rig) {
		g := r.run("g", func(s *instance.Spec) { small(s); s.Restart = instance.RestartOnFailure })
		time.Sleep(30 * time.Second)
		r.k.Proc(g).Exit(1)
		r.k.Connect(r.run("a", small))
		time.Sleep(time.Minute)
		if o := r.is("g", power.Stopped); o.RestartAt == nil || len(r.happenings("g", "start_failed")) != 1 {
			t.Errorf("%+v", o)
		}
		errtest.None(t, r.Stop(r.ctx, "a", ByManual, false))
		time.Sleep(instance.RestartMax)
		r.is("g", power.Running)
		time.Sleep(30 * time.Second)

		// If the whole budget is less than the guest's memory, it does not retry.
		r.crash()
		r.tune = func(c *Config) { c.Memory, c.Places = 90*mib, 1 }
		r.boot()
		r.k.Proc(g).Exit(1)
		time.Sleep(10 * time.Minute)
		if o := r.is("g", power.Stopped); o.RestartAt != nil || !strings.Contains(o.StatusReason, instance.Bytes(90*mib)) {
			t.Errorf("%+v", o)
		}
		if got := r.happenings("g", "start_failed"); len(got) != 1 {
			t.Errorf("told: %q", got)
		}
	})
}

// TestRoomKeepsToTheBudget runs many guests of random sizes with random clients for
// hours. It checks that their memory never exceeds the budget, and that every
// client is served or refused for lack of memory.
func TestRoomKeepsToTheBudget(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	inRoom(t, 1000, 2, func(r *rig) {
		rng := rand.New(rand.NewPCG(seed, 0))
		r.k.Frees, r.k.Restore = 30*mib, 300*time.Millisecond
		var over atomic.Bool
		r.disk.On = func(*instance.Record) {
			if r.k.Held() > 1000*mib {
				over.Store(true)
			}
		}
		const guests = 24
		for n := range guests {
			size := 40 + rng.Int64N(160)
			r.run(fmt.Sprintf("g%d", n), func(s *instance.Spec) {
				guestOf(s, size)
				if rng.IntN(2) == 0 {
					s.HibernateAfter = idle.Duration(time.Duration(1+rng.IntN(5)) * time.Minute)
				}
			})
			time.Sleep(time.Duration(rng.IntN(60)) * time.Second)
		}
		var wg sync.WaitGroup
		var served, busy atomic.Int32
		for range count(t, "LULL_ROOM_CLIENTS", 400) {
			g := r.gates[fmt.Sprintf("g%d", rng.IntN(guests))]
			stay := time.Duration(rng.IntN(90)) * time.Second
			wg.Go(func() {
				c, err := g.Arrive(context.Background())
				var late *BusyError
				switch {
				case errors.As(err, &late):
					busy.Add(1)
				case err != nil:
					t.Errorf("a client: %v", err)
				default:
					time.Sleep(stay)
					if c.Outcome() != "answered" {
						t.Errorf("a client is %s", c.Outcome())
					}
					c.Send()
					c.Close()
					served.Add(1)
				}
			})
			time.Sleep(time.Duration(rng.IntN(20_000)) * time.Millisecond)
		}
		wg.Wait()
		s := r.Capacity()
		if over.Load() {
			t.Error("the guests held more than the budget")
		}
		if served.Load() < 10 {
			t.Errorf("only %d clients were served", served.Load())
		}
		t.Logf("%d clients served, %d told that there was no room; %+v", served.Load(), busy.Load(), s)
		time.Sleep(time.Hour)
	})
}

// TestRoomAvailable checks that the machine's available memory limits starts as the
// budget does.
func TestRoomAvailable(t *testing.T) {
	var left atomic.Int64
	left.Store(50 * mib)
	inTuned(t, func(c *Config) {
		c.Memory, c.Available = 1000*mib, func() (int64, error) {
			if n := left.Load(); n > 0 {
				return n, nil
			}
			return 0, errors.New("cannot read it")
		}
	}, func(r *rig) {
		r.k.Deep = true
		done := make(chan struct{})
		go func() { defer close(done); r.run("a", small) }()
		time.Sleep(10 * time.Second)
		if o, err := r.Get("a"); err != nil || o.Waiting == nil || !strings.Contains(o.Waiting.Reason, "50.0 MiB") {
			t.Errorf("%+v, %v", o.Waiting, err)
		}
		left.Store(200 * mib)
		<-done
		r.is("a", power.Running)
		left.Store(0)
		r.run("b", small)
	})
}

// TestRoomAfterRestart checks that instances that an earlier daemon started count
// towards the budget, and are adopted even if they exceed it.
func TestRoomAfterRestart(t *testing.T) {
	inRoom(t, 300, 1, func(r *rig) {
		for _, n := range []string{"a", "b", "c"} {
			id := r.run(n, small)
			r.k.Connect(id)
		}
		r.crash()
		r.tune = func(c *Config) { c.Memory, c.Places = 200*mib, 1 }
		r.boot()
		for _, n := range []string{"a", "b", "c"} {
			r.is(n, power.Running)
		}
		if s := r.Capacity(); s.Free != 0 {
			t.Errorf("room: %+v", s)
		}
		var late *BusyError
		s := instance.Spec{Name: "d", Command: []string{"x"}, Memory: 10 * mib}
		id, err := r.Create(r.ctx, s)
		if err == nil {
			err = r.Start(r.ctx, id, ByManual)
		}
		if !errors.As(err, &late) {
			t.Errorf("beyond the budget: %v", err)
		}
	})
}
