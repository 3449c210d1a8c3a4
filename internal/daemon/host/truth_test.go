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

	"lull/internal/daemon/host/hosttest"
	"lull/internal/idle"
	"lull/internal/instance"
	"lull/internal/link/hostctl"
	"lull/internal/power"
	"lull/internal/sim/truth"
)

// load is one kind of use that a program can be put to.
type load struct {
	name  string
	blind time.Duration // what the documented resolution of its signal may hide
	on    func(r *rig, p *hosttest.Proc, id string) (off func())
}

var loads = []load{
	{"cpu", blindFor, func(_ *rig, p *hosttest.Proc, _ string) func() { p.SetBusy(true); return func() { p.SetBusy(false) } }},
	{"disk", blindFor, func(_ *rig, p *hosttest.Proc, _ string) func() {
		p.SetWriting(true)
		return func() { p.SetWriting(false) }
	}},
	{"request", blindFor, func(r *rig, p *hosttest.Proc, id string) func() {
		p.SetSlow(true)
		r.k.Connect(id)
		return func() { p.SetSlow(false) }
	}},
	{"call", probeFor, func(_ *rig, p *hosttest.Proc, _ string) func() { p.SetAsking(1); return func() { p.SetAsking(0) } }},
}

// probeFor is the time between two probes: a use that ends between them was last
// seen at the first, and an outbound request that comes and goes between them is
// not seen.
const probeFor = 5*time.Second + 5*time.Second/10

// blindFor is what the thresholds of the signals that count may hide.
const blindFor = time.Second

// No automatic pause ever hits what was in use within its timeout, whatever it is
// used for, with settings that change and daemons that are killed and started
// again. The use is drawn before the host runs and is not taken from any reading.
// LULL_TRUTH_ROUNDS is how many hosts are tried.
func TestNothingInUseIsPaused(t *testing.T) {
	rounds := 40
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
			var seen []pause
			timeout := time.Second + time.Duration(rnd.Int64N(int64(10*time.Minute)))
			r.disk.On = func(rec *instance.Record) {
				if k := len(seen); rec.State == power.Paused && rec.PausedBy == byIdle && (k == 0 || !seen[k-1].at.Equal(rec.LastPausedAt)) {
					seen = append(seen, pause{rec.LastPausedAt, time.Duration(*rec.Spec.PauseAfter)})
				}
			}
			id := r.run("a", func(s *instance.Spec) {
				s.PauseAfter, s.StopAfter = new(idle.Duration(timeout)), new(idle.Duration(0))
				s.QuietConnectionAfter = idle.Duration(time.Second + time.Duration(rnd.Int64N(int64(time.Minute))))
			})
			use := truth.Of(slices.DeleteFunc(truth.Draw(rnd, time.Now(), 2*time.Hour, 20*time.Minute).Spans(),
				func(s truth.Span) bool { return s.To.Sub(s.From) <= kind.blind })...)
			// The daemon is killed now and then until t.
			until := func(end time.Time) {
				for left := time.Until(end); left > 0; left = time.Until(end) {
					time.Sleep(min(left, time.Second+time.Duration(rnd.Int64N(int64(10*time.Minute)))))
					synctest.Wait()
					if rnd.IntN(4) == 0 {
						r.crash()
						r.boot()
					}
					if rnd.IntN(4) == 0 {
						after := idle.Duration(time.Second + time.Duration(rnd.Int64N(int64(10*time.Minute))))
						if err := r.Change(context.Background(), id, hostctl.Change{PauseAfter: &after}, byManual); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			for _, s := range use.Spans() {
				until(s.From)
				if r.Resume(context.Background(), id, byManual) != nil { // whoever uses it begins with it awake
					t.Fatal("it cannot be resumed")
				}
				off := kind.on(r, r.k.Proc(id), id)
				until(s.To)
				off()
			}
			until(time.Now().Add(time.Hour))
			r.is("a", power.Paused) // and what is not used is paused
			pauses += len(seen)
			for _, p := range seen {
				if err := use.Check(p.at, p.timeout-probeFor, kind.blind); err != nil {
					t.Errorf("LULL_SEED=%d, host %d, %s: %v", seed, n, kind.name, err)
				}
			}
		})
	}
	t.Logf("LULL_SEED=%d: %d pauses", seed, pauses)
}
