package controller

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
)

// TestScaleDownCooldown checks that scale-down drains and stops one worker per
// cooldown, even across a restart of the server, and that the other idle workers are
// shown as waiting. Without scale_down_cooldown_defers_pause, the others are paused
// without a drain.
func TestScaleDownCooldown(t *testing.T) {
	const n, cooldown = 3, 10 * time.Minute
	for _, defers := range []bool{true, false} {
		t.Run(map[bool]string{true: "defers", false: "pauses"}[defers], func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := options{settings: map[string]any{"scale_down_enabled": true, "scale_down_cooldown_seconds": int(cooldown.Seconds()), "scale_down_cooldown_defers_pause": defers}}
				r := newRig(t, o)
				defer func() { r.stop() }()
				ids := r.many(n)
				drains := func() []time.Time {
					return r.times(func(e audit.Entry) bool { return e.Action == audit.DrainStarted })
				}
				for len(drains()) == 0 {
					time.Sleep(time.Second)
				}
				waiting := 0
				for time.Since(drains()[0]) < cooldown/2 {
					time.Sleep(time.Minute)
					for _, id := range ids {
						l, ok := r.c.Live(id)
						if !ok {
							t.Fatal("the worker is not known")
						}
						st := l.Idle
						i := slices.IndexFunc(st.Blocks, func(b idle.Block) bool { return b.Code == idle.Cooldown })
						if i < 0 {
							continue
						}
						waiting++
						if until := st.Blocks[i].Until; until == nil || !until.Equal(drains()[0].Add(cooldown)) || st.Eligible {
							t.Errorf("it waits until %v, eligible %t", until, st.Eligible)
						}
					}
				}
				if (waiting > 0) != defers {
					t.Errorf("%d workers were shown as waiting", waiting)
				}
				r.stop()
				o.server = "server-2"
				r.run(r.db.Client(), o)
				for _, id := range ids {
					r.await(id, power.WorkerStopped, time.Hour)
				}
				all := drains()
				if defers && len(all) != n {
					t.Errorf("%d of %d workers were drained", len(all), n)
				}
				for i := 1; i < len(all); i++ {
					if d := all[i].Sub(all[i-1]); d < cooldown {
						t.Errorf("two drains began %s apart", d)
					}
				}
				if paused := r.times(func(e audit.Entry) bool { return e.Action == "pause_intended" }); (len(paused) > 0) == defers {
					t.Errorf("%d workers were stopped without a drain", len(paused))
				}
			})
		})
	}
}

// TestFloorIsShown checks that a worker that min_workers keeps running is not shown
// as about to be paused.
func TestFloorIsShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{settings: map[string]any{"min_workers": 1}})
		defer func() { r.stop() }()
		id := r.many(1)[0]
		time.Sleep(3 * time.Hour)
		l, ok := r.c.Live(id)
		if !ok {
			t.Fatal("the worker is not known")
		}
		st := l.Idle
		if !st.Verdict.Has(idle.MinWorkers) || st.Eligible {
			t.Errorf("blocks %+v, eligible %t", st.Blocks, st.Eligible)
		}
		if v := r.c.entries[id].known().verdict; v == nil || !v.Has(idle.MinWorkers) {
			t.Errorf("its last check recorded %+v", v)
		}
	})
}
