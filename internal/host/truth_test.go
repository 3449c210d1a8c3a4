package host

import (
	"context"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
	"lull/internal/protocol/hostctl"
	"lull/internal/sim/truth"
)

// load is a kind of use of a program.
type load struct {
	name  string
	blind time.Duration // longest use that the documented resolution of its signal may miss
	on    func(r *rig, p *hosttest.Proc, id string, end time.Time) (off func())

	silent bool // keeps the instance awake without traffic, but not with quiet-connection-after
	alone  bool // keeps the instance awake while it lasts, but its end does not start the idle time
	relay  bool // only the relay sees its clients, which do not outlive the daemon
}

var loads = []load{
	{name: "cpu", blind: blindFor, on: func(_ *rig, p *hosttest.Proc, _ string, _ time.Time) func() {
		p.SetBusy(true)
		return func() { p.SetBusy(false) }
	}},
	{name: "disk", blind: blindFor, on: func(_ *rig, p *hosttest.Proc, _ string, _ time.Time) func() {
		p.SetWriting(true)
		return func() { p.SetWriting(false) }
	}},
	{name: "request", blind: blindFor, on: func(r *rig, p *hosttest.Proc, id string, _ time.Time) func() {
		p.SetSlow(true)
		r.k.Connect(id)
		return func() { p.SetSlow(false) }
	}},
	{name: "call", blind: probeFor, on: func(_ *rig, p *hosttest.Proc, _ string, _ time.Time) func() {
		p.SetAsking(1)
		return func() { p.SetAsking(0) }
	}},
	{name: "connection", blind: blindFor, silent: true, on: func(r *rig, _ *hosttest.Proc, id string, _ time.Time) func() {
		return r.k.Connect(id).Close
	}},
	{name: "unix connection", blind: probeFor, on: func(r *rig, _ *hosttest.Proc, id string, _ time.Time) func() {
		return r.k.ConnectUnix(id).Close
	}},
	{name: "relayed connection", blind: blindFor, silent: true, relay: true, on: relayed},
	{name: "relayed request", blind: blindFor, relay: true, on: func(r *rig, p *hosttest.Proc, id string, end time.Time) func() {
		p.SetSlow(true)
		gone := relayed(r, p, id, end)
		return func() { p.SetSlow(false); gone() }
	}},
	{name: "relayed request that is given up", blind: blindFor, relay: true, on: func(r *rig, p *hosttest.Proc, id string, end time.Time) func() {
		p.SetSlow(true)
		gone := relayed(r, p, id, end)
		return func() { gone(); p.SetSlow(false) }
	}},
	{name: "lease that expires", alone: true, on: func(r *rig, _ *hosttest.Proc, id string, end time.Time) func() {
		r.lease(id, "expires", time.Until(end))
		return func() {}
	}},
	{name: "lease that is renewed and released", alone: true, on: func(r *rig, _ *hosttest.Proc, id string, end time.Time) func() {
		r.lease(id, "another", time.Second)
		r.lease(id, "renewed", time.Second)
		r.lease(id, "renewed", time.Until(end)+time.Hour)
		return func() {
			if err := r.ReleaseLease(context.Background(), id, "renewed"); err != nil {
				r.t.Errorf("release: %v", err)
			}
		}
	}},
}

// relayed connects a client through the relay's port.
func relayed(r *rig, _ *hosttest.Proc, _ string, _ time.Time) func() {
	c, err := r.gates["a"].Arrive(context.Background())
	if err != nil {
		r.t.Errorf("relay: %v", err)
		return func() {}
	}
	return c.Close
}

// probeFor is the longest time between two probes. Use that ends between them was
// last seen at the first, and an outbound request that begins and ends between them
// is missed.
const probeFor = 5*time.Second + 5*time.Second/10

// blindFor is the longest use that signals with a threshold may miss.
const blindFor = time.Second

// TestNothingInUseIsPaused checks that no automatic pause hits an instance that was
// in use within its timeout. It covers every kind of use, changing settings, and
// daemons that are killed and restarted. The use is drawn before the host runs and
// does not depend on any reading. LULL_TRUTH_ROUNDS is the number of hosts.
func TestNothingInUseIsPaused(t *testing.T) {
	rounds := 5 * len(loads)
	if n, err := strconv.Atoi(os.Getenv("LULL_TRUTH_ROUNDS")); err == nil {
		rounds = n
	}
	seed := uint64(time.Now().UnixNano())
	if n, err := strconv.ParseUint(os.Getenv("LULL_SEED"), 10, 64); err == nil {
		seed = n
	}
	pauses := 0
	for n := range rounds {
		rnd := rand.New(rand.NewPCG(seed, uint64(n)))
		kind := loads[n%len(loads)]
		inBubble(t, func(r *rig) {
			type pause struct {
				at      time.Time
				timeout time.Duration
			}
			r.k.Remote, r.k.Remembers = kind.relay, true
			var seen []pause
			timeout := time.Second + time.Duration(rnd.Int64N(int64(10*time.Minute)))
			r.disk.On = func(rec *instance.Record) {
				if k := len(seen); rec.State == power.Paused && rec.PausedBy == byIdle && (k == 0 || !seen[k-1].at.Equal(rec.LastPausedAt)) {
					seen = append(seen, pause{rec.LastPausedAt, time.Duration(*rec.Spec.PauseAfter)})
				}
			}
			id := r.run("a", func(s *instance.Spec) {
				s.PauseAfter, s.StopAfter = new(idle.Duration(timeout)), new(idle.Duration(0))
				if !kind.silent {
					s.QuietConnectionAfter = idle.Duration(time.Second + time.Duration(rnd.Int64N(int64(time.Minute))))
				}
			})
			use := truth.Of(slices.DeleteFunc(truth.Draw(rnd, time.Now(), 2*time.Hour, 20*time.Minute).Spans(),
				func(s truth.Span) bool { return s.To.Sub(s.From) <= kind.blind })...)
			// until lets time pass until end, and with kills kills the daemon now
			// and then.
			until := func(end time.Time, kills bool) {
				for left := time.Until(end); left > 0; left = time.Until(end) {
					time.Sleep(min(left, time.Second+time.Duration(rnd.Int64N(int64(10*time.Minute)))))
					synctest.Wait()
					if kills && rnd.IntN(4) == 0 {
						r.crash()
						r.boot()
						r.gates["a"].ID = id
					}
					if rnd.IntN(4) == 0 {
						after := idle.Duration(time.Second + time.Duration(rnd.Int64N(int64(10*time.Minute))))
						if err := r.Change(context.Background(), id, hostctl.Change{PauseAfter: &after}, ByManual); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			for _, s := range use.Spans() {
				until(s.From, true)
				if r.Resume(context.Background(), id, ByManual) != nil { // every use starts with the instance awake
					t.Fatal("it cannot be resumed")
				}
				off := kind.on(r, r.k.Proc(id), id, s.To)
				until(s.To, !kind.relay)
				off()
			}
			until(time.Now().Add(time.Hour), true)
			r.is("a", power.Paused) // without use the instance is paused
			pauses += len(seen)
			for _, p := range seen {
				timeout := p.timeout - probeFor
				at := p.at
				if kind.alone { // at its end this use no longer counts
					timeout, at = 1, at.Add(time.Nanosecond)
				}
				if err := use.Check(at, timeout, kind.blind); err != nil {
					t.Errorf("LULL_SEED=%d, host %d, %s: %v", seed, n, kind.name, err)
				}
			}
		})
	}
	t.Logf("LULL_SEED=%d: %d pauses", seed, pauses)
}
