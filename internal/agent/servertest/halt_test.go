package servertest

import (
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
)

// haltWithin is the time within which a halt must take effect everywhere.
const haltWithin = 5 * time.Second

// TestFleetHaltReachesTheAgent checks that a halt and its end reach the agent within
// 5 s, whether or not the machine is a worker, and that the agent keeps the halt
// across restarts while the server cannot be reached. The halt must hold deadlines
// too.
func TestFleetHaltReachesTheAgent(t *testing.T) {
	for name, o := range map[string]options{
		"worker":    {holder: worker.HolderAgent, sources: []string{"agent"}},
		"no worker": {unknown: true},
		"skewed":    {unknown: true, skew: -3 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, o, func(r *rig) {
				setHalt := func(q halt.Request) {
					t.Helper()
					errtest.Get(r.fleet.SetHalt(r.t.Context(), operator, q))(r.t)
				}
				halted := func(on bool) {
					t.Helper()
					if s := r.status(); s.Server == nil || s.Server.Halted != on || s.Verdict.Has(idle.Halted) != on {
						r.t.Errorf("want halted %t: %+v, blocks %+v", on, s.Server, s.Verdict.Blocks)
					}
				}
				held := func(d time.Duration) {
					t.Helper()
					r.wait(d)
					if r.with(func() {}); len(r.calls) > 0 {
						r.t.Fatalf("the machine was stopped in a halt, calls %v", r.calls)
					}
				}
				away := func(on bool) {
					r.with(func() {
						r.cut = on
						if r.waits != nil {
							r.waits()
						}
					})
				}
				r.wait(12 * time.Minute)
				halted(false)
				setHalt(halt.Request{On: true, Reason: "network"})
				r.wait(haltWithin)
				halted(true)
				held(time.Hour)

				away(true)
				r.reboot()
				halted(true)
				held(3 * time.Hour)
				halted(true)
				setHalt(halt.Request{})
				held(time.Hour)
				away(false)
				r.wait(haltWithin)
				halted(false)

				// A halt with an end is over at that time, although the server cannot
				// be reached and however wrong the machine's clock is.
				until := time.Now().Add(10 * time.Minute)
				setHalt(halt.Request{On: true, Until: &until})
				r.wait(haltWithin)
				halted(true)
				if o.unknown { // for a worker's agent, acting without its server is not tested here
					away(true)
				}
				held(9 * time.Minute)
				halted(true)
				r.wait(time.Minute)
				halted(false)
				began := time.Now()
				for len(r.calls) == 0 {
					if r.wait(time.Minute); time.Since(began) > time.Hour {
						r.t.Fatalf("after the halt nothing is done: %+v", r.status().Verdict.Blocks)
					}
				}
			})
		})
	}
}
