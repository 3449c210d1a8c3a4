package host

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
)

// TestDiskWorkHolds checks that a program that keeps writing to its disk counts as
// in use, even with little CPU usage and a short idle timeout.
func TestDiskWorkHolds(t *testing.T) {
	for _, after := range []time.Duration{200 * time.Millisecond, time.Second, 10 * time.Second, time.Minute, time.Hour} {
		inBubble(t, func(r *rig) {
			id := r.run("a", func(s *instance.Spec) { s.PauseAfter = new(idle.Duration(after)) })
			r.k.Proc(id).SetWriting(true)
			time.Sleep(3*after + time.Minute)
			synctest.Wait()
			if o := r.is("a", power.Running); o.PauseCount != 0 {
				t.Errorf("paused %d times after %s while it wrote", o.PauseCount, after)
			}
			r.k.Proc(id).SetWriting(false)
			time.Sleep(after + time.Minute)
			r.is("a", power.Paused)
		})
	}
}

// TestNothingSleepsThatCannotWake checks that an instance that nothing could wake
// is not paused by default, but is with an explicit pause-after, or if it has a
// timer.
func TestNothingSleepsThatCannotWake(t *testing.T) {
	deaf := func(r *rig) { r.k.Deaf = true }
	for name, row := range map[string]struct {
		prepare func(*rig)
		tune    func(*instance.Spec)
		after   func(r *rig, id string)
		want    power.Instance
	}{
		"no port":          {deaf, func(s *instance.Spec) { s.Expose = nil }, nil, power.Running},
		"a socket":         {nil, func(s *instance.Spec) { s.Expose = nil }, nil, power.Paused},
		"a port":           {nil, nil, nil, power.Paused},
		"its own setting":  {deaf, func(s *instance.Spec) { s.Expose, s.PauseAfter = nil, new(idle.Duration(time.Minute)) }, nil, power.Paused},
		"something is due": {deaf, func(s *instance.Spec) { s.Expose = nil }, func(r *rig, id string) { r.byID[id].setNextDue(context.Background(), r.Now().Add(time.Hour)) }, power.Paused},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(r *rig) {
				if row.prepare != nil {
					row.prepare(r)
				}
				id := r.run("a", row.tune)
				if row.after != nil {
					row.after(r, id)
				}
				time.Sleep(3 * time.Minute)
				o := r.is("a", row.want)
				var blocked bool
				for _, b := range o.Blocks {
					blocked = blocked || b.Code == NothingWakes
				}
				if blocked != (row.want == power.Running) {
					t.Errorf("blocks %v", o.Blocks)
				}
				if row.want == power.Running && o.PauseAt != nil {
					t.Errorf("it is to be paused at %s", o.PauseAt)
				}
			})
		})
	}
}
