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

// load is one kind of use that a program can be put to, until end at the latest.
type load struct {
	name  string
	blind time.Duration // amount that the documented resolution of its signal may hide
	on    func(r *rig, p *hosttest.Proc, id string, end time.Time) (off func())

	silent bool // it holds without a byte: not with a quiet-connection-after
	alone  bool // it holds the instance while it lasts, but idle time does not begin at its end
	relay  bool // its clients are seen by the relay only, and do not outlive the daemon
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

// relayed is a client of the relay's port.
func relayed(r *rig, _ *hosttest.Proc, _ string, _ time.Time) func() {
	c, err := r.gates["a"].Arrive(context.Background())
	if err != nil {
		r.t.Errorf("relay: %v", err)
		return func() {}
	}
	return c.Close
}

// probeFor is the time between two probes. A use that ends between them was
// last seen at the first, and an outbound request that begins and ends between
// them is missed.
const probeFor = 5*time.Second + 5*time.Second/10

// blindFor is the longest use that the thresholds of the counting signals may
// miss.
const blindFor = time.Second

// No automatic pause ever hits an instance that was in use within its timeout,
// for every kind of use, with changing settings and with daemons that are
// killed and restarted. The use is drawn before the host runs and is not
// derived from any reading. LULL_TRUTH_ROUNDS is the number of hosts.
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
			// The daemon is killed now and then until end.
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
				if r.Resume(context.Background(), id, ByManual) != nil { // every use begins with the instance awake
					t.Fatal("it cannot be resumed")
				}
				off := kind.on(r, r.k.Proc(id), id, s.To)
				until(s.To, !kind.relay)
				off()
			}
			until(time.Now().Add(time.Hour), true)
			r.is("a", power.Paused) // and what is not used is paused
			pauses += len(seen)
			for _, p := range seen {
				timeout := p.timeout - probeFor
				at := p.at
				if kind.alone { // at its very end it is over
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
