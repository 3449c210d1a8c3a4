package host

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/guest"
)

// TestWakeAt checks that an instance is woken before the time that a user has set,
// is not paused until then, and is paused after its idle timeout.
func TestWakeAt(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", nil)
		errtest.None(t, r.Pause(context.Background(), id, ByManual, false))
		for _, at := range []time.Time{time.Now().Add(-time.Second), time.Now().Add(instance.MaxDeadline + time.Hour)} {
			if err := r.WakeAt(context.Background(), id, at); !invalid(err) {
				t.Errorf("a timer for %v: %v", at, err)
			}
		}
		at := time.Now().Add(4 * time.Minute)
		errtest.None(t, r.WakeAt(context.Background(), id, at))
		time.Sleep(time.Until(at) - Lead - time.Millisecond)
		if o := r.is("a", power.Paused); o.WakeAt == nil || !o.WakeAt.Equal(at) {
			t.Errorf("it runs at %v, want %v", o.WakeAt, at)
		}
		time.Sleep(2 * time.Millisecond)
		if o := r.is("a", power.Running); o.LastResumedBy != byTimer {
			t.Errorf("resumed by %q", o.LastResumedBy)
		}
		time.Sleep(time.Until(at) + 50*time.Second)
		if o := r.is("a", power.Running); o.WakeAt != nil {
			t.Errorf("it runs at %v again", o.WakeAt)
		}
		time.Sleep(20 * time.Second)
		r.is("a", power.Paused)
		time.Sleep(time.Minute)
		r.is("a", power.Paused)
	})
}

// TestTimerHolds checks that an instance whose idle timeout is shorter than Lead
// stays awake from the wake until the timer.
func TestTimerHolds(t *testing.T) {
	inBubble(t, func(r *rig) {
		short := idle.Duration(100 * time.Millisecond)
		id := r.run("a", func(s *instance.Spec) { s.PauseAfter = &short })
		time.Sleep(time.Minute)
		r.is("a", power.Paused)
		at := time.Now().Add(time.Minute)
		errtest.None(t, r.WakeAt(context.Background(), id, at))
		time.Sleep(time.Until(at) - Lead)
		for time.Now().Before(at) {
			time.Sleep(50 * time.Millisecond)
			r.is("a", power.Running)
		}
		time.Sleep(time.Minute)
		r.is("a", power.Paused)
		// A user can pause the instance before the timer.
		at = time.Now().Add(time.Minute)
		errtest.None(t, r.WakeAt(context.Background(), id, at))
		time.Sleep(time.Until(at) - time.Second)
		errtest.None(t, r.Pause(context.Background(), id, ByManual, true))
		time.Sleep(10 * time.Second)
		r.is("a", power.Paused)
	})
}

// TestTimerStarts checks which stopped instances a timer starts.
func TestTimerStarts(t *testing.T) {
	for name, c := range map[string]struct {
		stop func(r *rig, id string) error
		want power.Instance
	}{
		"lull stopped it": {func(r *rig, id string) error {
			time.Sleep(time.Hour)
			return nil
		}, power.Running},
		"a user stopped it": {func(r *rig, id string) error { return r.Stop(context.Background(), id, ByManual, false) }, power.Stopped},
		"it ended": {func(r *rig, id string) error {
			r.k.Proc(id).Exit(0)
			synctest.Wait()
			return nil
		}, power.Stopped},
	} {
		for _, crash := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				inBubble(t, func(r *rig) {
					id := r.run("a", nil)
					errtest.None(t, c.stop(r, id))
					r.is("a", power.Stopped)
					at := time.Now().Add(10 * time.Minute)
					errtest.None(t, r.WakeAt(context.Background(), id, at))
					if crash {
						time.Sleep(time.Minute)
						r.crash()
						r.boot()
					}
					time.Sleep(time.Until(at))
					r.is("a", c.want)
				})
			})
		}
	}
}

// TestNextDueOutlivesTheDaemon checks that a program that asked to be woken is
// woken even if the daemon was killed and restarted late.
func TestNextDueOutlivesTheDaemon(t *testing.T) {
	for _, away := range []time.Duration{time.Minute, 20 * time.Minute} {
		inBubble(t, func(r *rig) {
			id := r.run("a", func(s *instance.Spec) { s.StopAfter = new(idle.Duration) })
			at := time.Now().Add(10 * time.Minute)
			errtest.None(t, r.fromGuest(context.Background(), r.byID[id], guest.Message{Method: guest.NextDue, Params: guest.Params{At: at}}))
			time.Sleep(5 * time.Minute)
			r.is("a", power.Paused)
			r.crash()
			time.Sleep(away)
			r.boot()
			time.Sleep(max(time.Until(at), time.Second))
			r.is("a", power.Running)
		})
	}
}

// TestNextDueIsDurable checks that a program whose request was accepted is woken
// even if the daemon is killed right afterwards.
func TestNextDueIsDurable(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", func(s *instance.Spec) { s.StopAfter = new(idle.Duration) })
		at := time.Now().Add(10 * time.Minute)
		if err := r.fromGuest(context.Background(), r.byID[id], guest.Message{Method: guest.NextDue, Params: guest.Params{At: at}}); err != nil {
			t.Fatal(err)
		}
		r.crash()
		r.boot()
		time.Sleep(5 * time.Minute)
		r.is("a", power.Paused)
		time.Sleep(time.Until(at))
		r.is("a", power.Running)
	})
}

// TestScheduleIsOnTime has a job every ten minutes on an instance that sleeps in
// between, while the daemon is killed and the clock is set at random moments. It
// checks that the instance runs at each time that the wall clock reaches.
func TestScheduleIsOnTime(t *testing.T) {
	rounds := scaletest.N(t, 100)
	for _, stopped := range []bool{false, true} {
		random := scaletest.Random(t)
		offset := time.Duration(0)
		wall := func() time.Time { return time.Now().Add(offset).Round(0) }
		inTuned(t, func(c *Config) { c.Wall = wall }, func(r *rig) {
			stop := idle.Duration(0)
			if stopped {
				stop = idle.Duration(2 * time.Minute)
			}
			r.run("a", func(s *instance.Spec) { s.StopAfter, s.WakeSchedule = &stop, []string{"*/10 * * * *"} })
			slept := 0
			for done := 0; done < rounds; {
				due := wall().Truncate(10 * time.Minute).Add(10 * time.Minute)
				// The random event happens well before the timer.
				left := due.Sub(wall())
				time.Sleep(time.Duration(random.Int64N(int64(left))))
				if s := r.byName["a"].state(); s != power.Running {
					slept++
				}
				event := random.IntN(4)
				t.Logf("at %v, before %v: event %d, the clock is off by %v", wall().Format("15:04:05.000"), due.Format(time.TimeOnly), event, offset)
				switch event {
				case 0:
					r.crash()
					time.Sleep(time.Duration(random.Int64N(int64(5 * time.Second))))
					r.boot()
				case 1: // forward, possibly beyond the timer, which is then served at once
					offset += time.Duration(random.Int64N(int64(15 * time.Minute)))
					r.ClockStepped()
				case 2:
					offset -= time.Duration(random.Int64N(int64(5 * time.Minute)))
					r.ClockStepped()
				}
				if late := wall().Sub(due); late >= 0 {
					time.Sleep(time.Second)
				} else {
					time.Sleep(-late)
				}
				r.is("a", power.Running)
				done++
			}
			if slept == 0 {
				t.Error("it never slept")
			}
			t.Logf("%d of %d on time; it slept at %d of the moments between", rounds, rounds, slept)
		})
	}
}

// TestTimerLeavesWhatOthersPaused checks that a timer does not resume an instance
// that was paused outside lull.
func TestTimerLeavesWhatOthersPaused(t *testing.T) {
	inBubble(t, func(r *rig) {
		id := r.run("a", func(s *instance.Spec) { s.PauseAfter = new(idle.Duration) })
		errtest.None(t, r.k.Proc(id).Freeze(r.ctx))
		errtest.None(t, r.Observe("a", "it was paused outside"))
		r.is("a", power.Paused)
		errtest.None(t, r.WakeAt(context.Background(), id, time.Now().Add(time.Minute)))
		time.Sleep(2 * time.Minute)
		r.is("a", power.Paused)
		errtest.None(t, r.Resume(r.ctx, "a", ByManual))
		r.is("a", power.Running)
	})
}
