package machines

import (
	"strconv"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/protocol/hostctl"
)

// TestClockOnEveryRung checks that guests that slept for much longer than slack
// have the right time after a client wakes them. One guest sleeps at each step of
// the ladder, all at the same time.
func TestClockOnEveryRung(t *testing.T) {
	const nap = 3 * slack
	d := host(t)
	files := small(t)
	guests := map[string]*box{}
	rungs := []string{"hibernated", "reclaimed", "paused"}
	for _, rung := range rungs {
		guests[rung] = run(d, rung, files, []int{80}, func(s *instance.Spec) {
			if rung != "paused" {
				s.ReclaimAfter = idle.Duration(time.Second)
			}
			if rung == "hibernated" {
				s.HibernateAfter = idle.Duration(2 * time.Second)
			}
		}, "guest", "serve", ":80")
		guests[rung].sinks(rung)
	}
	for _, rung := range rungs {
		b := guests[rung]
		b.Until(b.name, "it stays "+rung+" for "+nap.String(), func(o hostctl.Instance) bool {
			return o.State == rung && o.StateSince != nil && time.Since(*o.StateSince) > nap
		})
		c := b.dial(0)
		defer c.Close()
		var off, way time.Duration
		daemontest.Wait(t, rung+" answers soon enough to tell its time", func() (bool, string) {
			off, way = timed(func() int64 {
				at, err := strconv.ParseInt(b.ask(c, "time"), 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				return at
			})
			return way < slack, way.String()
		})
		if off.Abs() > way/2+slack {
			t.Errorf("%s: the clock is %s off after more than %s asleep, seen over a way of %s", rung, off, nap, way)
		}
		if o := b.get(); o.WakeCount == 0 || o.BootedAnew != "" {
			t.Errorf("%s: %d wakes, booted anew %q", rung, o.WakeCount, o.BootedAnew)
		}
		t.Logf("%s: off by %s, seen over a way of %s", rung, off, way)
	}
}
