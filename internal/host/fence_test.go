package host

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
	"lull/internal/lib/scaletest"
)

// world is one instance on one simulated machine, whose goroutines the test resumes
// one at a time.
type world struct {
	sc     scene
	steps  *fence // nil means the standard fence
	h      *Host  // the current daemon, with its instance and relay
	i      *inst
	gate   *hosttest.Gate
	daemon *hosttest.Daemon
	writes *hosttest.Session
	k      *hosttest.Kernel
	disk   *hosttest.Disk

	mu       sync.Mutex
	on       bool
	began    time.Time
	parked   []*parking
	routines map[uint64]*routine
	seq      int
	live     int
	trace    []string
	faults   []string
	here     place // the place at which the last choice was made
	buf      []byte

	log      *recording // nil while nothing is recorded
	clients  []*hosttest.Client
	leased   bool // a lease was acknowledged while the instance ran
	busied   bool // the program has reported work in progress
	explicit bool // a user stops the instance
	doomed   bool // a client was waiting when an automatic stop began
}

type parking struct {
	point string
	seq   int
	ch    chan struct{}
	r     *routine
	stand []byte
}

// park blocks the calling goroutine at a named point until the test resumes it.
func (w *world) park(point string) { w.parkWith(point, nil) }

func (w *world) parkWith(point string, own func([]byte, time.Time) []byte) {
	w.mu.Lock()
	if !w.on {
		w.mu.Unlock()
		return
	}
	id, calls := who()
	if point == "end" {
		delete(w.routines, id)
		w.mu.Unlock()
		return
	}
	w.seq++
	r := &routine{point: point, calls: calls, own: own}
	if was := w.routines[id]; was != nil {
		r.carries, r.attempt = was.carries, was.attempt
	}
	if point == "connect" { // from this point on the goroutine has its own client
		r.carries = own(nil, w.began)
	}
	w.routines[id] = r
	p := &parking{point: point, seq: w.seq, ch: make(chan struct{}), r: r}
	w.parked = append(w.parked, p)
	w.mu.Unlock()
	<-p.ch
}

func (w *world) fault(format string, args ...any) {
	w.mu.Lock()
	w.faults = append(w.faults, fmt.Sprintf(format, args...))
	w.mu.Unlock()
}

func newWorld(sc scene, steps *fence) *world {
	w := &world{sc: sc, steps: steps, k: &hosttest.Kernel{Deep: sc.deep}, disk: hosttest.NewDisk()}
	w.k.At = w.parkWith
	w.disk.On = w.recorded
	if recorder != nil {
		w.log = &recording{}
		w.k.Seen = w.log.event
	}
	w.newDaemon()
	ctx := context.Background()
	id, err := w.h.Create(ctx, hosttest.Spec("a", sc.spec))
	if err == nil {
		err = w.h.Start(ctx, id, ByManual)
	}
	if err != nil {
		w.fault("setup: %v", err)
		return w
	}
	w.i, _ = w.h.find(id)
	w.gate.ID = id
	w.i.check() // gives the base for later samples
	time.Sleep(61 * time.Second)
	w.i.check()
	time.Sleep(time.Millisecond)
	if w.log != nil {
		w.log.begin()
	}
	return w
}

// tamper, if not nil, is called for each new daemon, to break something about it.
// It must be set before the walks begin.
var tamper func(*world)

// newDaemon starts another daemon and makes it the current one.
func (w *world) newDaemon() {
	d := &hosttest.Daemon{Kernel: w.k}
	w.daemon, w.writes = d, &hosttest.Session{Disk: w.disk}
	cfg := Config{PauseAfter: time.Minute, StopAfter: 5 * time.Minute, Memory: 2 * instance.MinMemory, Places: 1, Runtimes: map[string]Runtime{"process": d},
		Records: w.writes, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), KeepEvents: 64,
		NewGate: func(t RelayTarget) (Gate, error) {
			w.gate = &hosttest.Gate{K: w.k, ID: t.ID, Waker: t.Waker}
			return w.gate, nil
		}}
	if w.sc.kept {
		cfg.HeldListeners = &hosttest.Keeper{Daemon: d}
	}
	h := New(cfg)
	if w.steps != nil {
		h.steps = *w.steps
	}
	h.steps = w.noting(h.steps)
	h.at = func(point string, i *inst) {
		if d.Dead() {
			return
		}
		if i != nil && w.sc.crashes() {
			w.mu.Lock()
			w.i = i
			w.mu.Unlock()
		}
		w.park(point)
		if !d.Dead() {
			w.watch(point)
		}
	}
	w.h = h
	w.k.SetOnExit(h.OnExit)
	if tamper != nil {
		tamper(w)
	}
}

// crash kills the daemon. The supervisor then thaws the program, and the next
// daemon takes it over.
func (w *world) crash() {
	w.writes.Dead.Store(true)
	w.daemon.Crash(w.gate)
	w.mu.Lock()
	died := map[bool][]*parking{}
	for _, p := range w.parked {
		died[outlives(p.point)] = append(died[outlives(p.point)], p)
	}
	w.parked = died[true]
	w.live, w.busied, w.doomed = w.live+1, false, false
	dead := w.daemon
	w.mu.Unlock()
	w.h.cancel()
	for _, p := range died[false] {
		close(p.ch)
	}
	go func() {
		w.park("watchdog")
		if p := w.k.Proc(w.i.id); p != nil && w.daemon == dead && p.Frozen() && !p.Hibernated() {
			_ = p.Thaw() // the simulated machine injects no faults here
		}
		w.park("end")
		w.mu.Lock()
		w.live--
		w.mu.Unlock()
	}()
	w.park("boot")
	w.newDaemon()
	if err := w.h.Load(context.Background(), w.disk.All()); err != nil {
		w.fault("load: %v", err)
	}
	i, _ := w.h.find(w.i.id)
	w.mu.Lock()
	w.i = i
	w.mu.Unlock()
}

// outlives reports whether a goroutine parked at point does not belong to the
// daemon, and so survives its crash.
func outlives(point string) bool {
	switch point {
	case "connect", "send", "close", "program-exit", "poller", "relay-arrive", "relay-dial":
		return true
	}
	return strings.HasPrefix(point, "begin ")
}

// noting returns f with steps that record which actor makes which attempt.
func (w *world) noting(f fence) fence {
	for _, steps := range []*[]step{&f.pause, &f.undo, &f.wake, &f.stop, &f.stopRunning, &f.deeper, &f.resumePause} {
		*steps = slices.Clone(*steps)
		for n := range *steps {
			do, seen, d := (*steps)[n].do, stepEvents[(*steps)[n].name], w.daemon
			(*steps)[n].do = func(a *attempt) error {
				w.mind(func(r *routine) { r.attempt = a })
				err := do(a)
				if w.log != nil && seen != "" && !d.Dead() {
					w.log.event(seen, yes(err != nil))
				}
				return err
			}
		}
	}
	return f
}

// watch records the facts that an automatic stop must respect.
func (w *world) watch(point string) {
	w.mu.Lock()
	on := w.on
	w.mu.Unlock()
	if !on || w.i == nil {
		return
	}
	switch p := w.k.Proc(w.i.id); {
	case p == nil:
	case point == "stop-intent":
		w.doomed = p.Frozen() && p.Waiting() > 0
	case point == "stop-signal" && w.doomed && !w.explicit:
		w.fault("an automatic stop continued although a client was waiting")
	}
}

// recorded checks the rules that must hold at the instant at which a pause becomes
// durable.
func (w *world) recorded(r *instance.Record) {
	if w.log != nil {
		w.log.record(r)
	}
	w.mu.Lock()
	on := w.on
	w.mu.Unlock()
	if !on || w.i == nil || r.State != power.Paused && r.State != power.Hibernated {
		return
	}
	p := w.k.Proc(w.i.id)
	switch {
	case r.State == power.Hibernated && (p == nil || !p.Hibernated()):
		w.fault("a hibernation was recorded of a program that is not saved")
	case r.State == power.Hibernated && !p.Guarded():
		w.fault("a hibernation was recorded while nothing watched the sockets")
	case r.State == power.Hibernated:
	case p == nil || !p.Frozen():
		w.fault("a pause was recorded of a program that runs")
	case !p.Guarded():
		w.fault("a pause was recorded while nothing watched the sockets")
	case !w.gate.Activity().Held:
		w.fault("a pause was recorded with an open relay")
	case r.PausedBy == byIdle && r.Spec.QuietConnectionAfter == 0 && p.Open() > 0:
		w.fault("a pause was recorded with %d open clients", p.Open())
	}
}

// check does a check of an instance that is not idle yet, so nothing is decided.
func (i *inst) check() {
	i.acquire()
	i.sample(i.workload())
	i.release()
}

// An actor does one thing. Other actors may run at each of its points.
type actor struct {
	name string
	do   func(*world)
}

var actors = map[string]actor{
	"idle":    {"idle", func(w *world) { w.h.check(w.i, func() {}) }},
	"connect": {"connect", func(w *world) { w.add(w.k.Connect(w.i.id)) }},
	"relay": {"relay", func(w *world) {
		d := w.daemon
		if c, err := w.gate.Arrive(w.h.ctx); err == nil {
			w.add(c)
		} else if !d.Dead() && w.i.state().Asleep() && !calledOff(err) {
			w.fault("a relay client was turned away from a paused instance: %v", err)
		}
	}},
	"talk": {"talk", func(w *world) {
		c := w.k.Connect(w.i.id)
		w.add(c)
		c.Send()
		c.Close()
	}},
	"lease": {"lease", func(w *world) {
		before, i := w.i.state(), w.i
		w.mind(func(r *routine) { r.carries = []byte(before) })
		err := w.h.Hold(context.Background(), "a", idle.Lease{Holder: "x"}, time.Hour)
		if err == nil && before == power.Running && i.state() == power.Running {
			w.mu.Lock()
			w.leased = true
			w.mu.Unlock()
		}
	}},
	"busy": {"busy", func(w *world) {
		d, i := w.daemon, w.i
		w.park("busy")
		i.setBusy(+1)
		w.mu.Lock()
		w.busied = !d.Dead()
		w.mu.Unlock()
	}},
	"pause":  {"pause", func(w *world) { _ = w.h.Pause(context.Background(), "a", ByManual, true) }},
	"resume": {"resume", func(w *world) { _ = w.h.Resume(context.Background(), "a", ByManual) }},
	"stop": {"stop", func(w *world) {
		d := w.daemon
		if err := w.h.Stop(context.Background(), "a", ByManual, false); err != nil && !d.Dead() {
			w.fault("stop: %v", err)
		}
	}},
	"start": {"start", func(w *world) {
		d := w.daemon
		if err := w.h.Start(context.Background(), "a", ByManual); err != nil && !d.Dead() && !calledOff(err) && !strings.Contains(err.Error(), errEnded.Error()) {
			w.fault("start: %v", err)
		}
	}},
	"push": {"push", func(w *world) { w.i.PushDown(power.Hibernated) }}, // another instance needs its memory; only a guest yields
	"exit": {"exit", func(w *world) {
		if p := w.k.Proc(w.i.id); p != nil {
			p.Exit(1)
		}
	}},
	"crash": {"crash", (*world).crash},
}

// calledOff reports whether err means that a user stopped the instance while the
// request waited.
func calledOff(err error) bool {
	refused, is := errors.AsType[*RefusedError](err)
	return is && refused.Overtaken
}

func (w *world) add(c *hosttest.Client) {
	w.mu.Lock()
	w.clients = append(w.clients, c)
	w.mu.Unlock()
}

// play runs the actors. choose returns the parked goroutine to resume next, or a
// negative number to stop. whole reports whether all actors came to their end.
func (w *world) play(names []string, choose func(w *world) int) (whole bool) {
	w.mu.Lock()
	w.on, w.began, w.routines = true, time.Now(), map[uint64]*routine{}
	w.live = len(names)
	w.mu.Unlock()
	for n, name := range names {
		a := actors[name]
		w.h.spawn(func() {
			seats[n](func() {
				w.park("begin " + a.name)
				if w.log != nil && !w.daemon.Dead() {
					w.log.began(a.name)
				}
				a.do(w)
				w.park("end")
			})
			w.mu.Lock()
			w.live--
			w.mu.Unlock()
		})
	}
	whole = true
	for idleFor := 0; ; {
		synctest.Wait()
		w.mu.Lock()
		if len(w.parked) == 0 {
			// A daemon that crashed with the lock held is still followed by
			// another.
			done := w.live == 0 && !(w.sc.crashes() && len(w.i.lock) > 0)
			w.mu.Unlock()
			if done {
				break
			}
			if idleFor++; idleFor > 100 {
				w.fault("stuck: an actor waits for something that no actor will do")
				break
			}
			time.Sleep(time.Second) // let the timer fire for which something waits
			continue
		}
		idleFor = 0
		n := choose(w)
		if n < 0 {
			w.mu.Unlock()
			whole = false
			break
		}
		p := w.parked[n]
		w.parked = slices.Delete(w.parked, n, n+1)
		w.trace = append(w.trace, p.point)
		w.letGo(p)
		w.mu.Unlock()
		close(p.ch)
	}
	if w.log != nil {
		w.log.stop() // later events are in no defined order
	}
	w.mu.Lock()
	w.on = false
	for _, p := range w.parked {
		close(p.ch)
	}
	w.mu.Unlock()
	synctest.Wait()
	return whole
}

// letGo records what p's goroutine knows when it is resumed. Whatever blocks it
// before its next point follows from that. w.mu must be held.
func (w *world) letGo(p *parking) {
	p.r.resumed = len(w.trace)
	if !strings.HasPrefix(p.point, "begin ") && p.point != "relay-arrive" { // at those points it has only requested the lock
		p.r.from = slices.Clone(w.here[:])
	}
}

// mind changes the recorded state of the calling goroutine.
func (w *world) mind(what func(r *routine)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.on {
		return
	}
	id, _ := who()
	if r := w.routines[id]; r != nil {
		what(r)
	}
}

// inOrder sorts the parked goroutines by point, and by arrival at the same point.
// It returns how many may be chosen.
func (w *world) inOrder() int {
	slices.SortFunc(w.parked, func(a, b *parking) int {
		if c := strings.Compare(a.point, b.point); c != 0 {
			return c
		}
		return a.seq - b.seq
	})
	return len(w.parked)
}

// verify returns the violations of the rules that must hold in every order.
func (w *world) verify(s scene) []string {
	faults := append(w.faults, w.k.Broken()...)
	bad := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	p := w.k.Proc(w.i.id)
	w.i.mu.Lock()
	rec, guard := w.i.rec, w.i.proc.guard
	w.i.mu.Unlock()
	state, by := rec.State, rec.PausedBy
	switch state {
	case power.Running:
		if p == nil || p.Frozen() || guard != nil {
			bad("recorded as running, but process %v, guard %v", p != nil, guard != nil)
		}
		if a := w.gate.Activity(); a.Held {
			bad("running with a closed relay")
		}
		if rec.StoppedBy != "" || !rec.RestartAt.IsZero() {
			bad("running, but recorded as stopped by %q, with a restart at %s", rec.StoppedBy, rec.RestartAt)
		}
	case power.Paused, power.Hibernated:
		if p == nil || !p.Frozen() || guard == nil {
			bad("recorded as %s, but not frozen and watched", state)
		}
		if p != nil && p.Hibernated() != (state == power.Hibernated) {
			bad("recorded as %s, but saved: %v", state, p.Hibernated())
		}
	case power.Stopped:
		if p != nil {
			bad("recorded as stopped, but its process is there")
		}
	default:
		bad("left in %s", state)
	}
	ends := s.paused && !s.kept || w.explicit || slices.Contains(s.names, "exit")
	for n, c := range w.clients {
		if o := c.Outcome(); o != "answered" && !ends && !(s.crashes() && c.Relayed()) {
			bad("client %d is %s", n, o)
		} else if o == "waiting" {
			bad("client %d waits forever", n)
		}
	}
	if state.Asleep() && w.leased && by == byIdle {
		bad("paused by the idle timer although a lease was acknowledged before")
	}
	if state.Asleep() && w.busied && by == byIdle {
		bad("paused by the idle timer although the program said that it is busy")
	}
	if n := w.h.illegal.Load(); n > 0 {
		bad("%d transitions that the table does not know", n)
	}
	if !w.i.tryAcquire() {
		bad("its lock was never let go")
	}
	return faults
}

// scene is a set of actors, with the state in which they start.
type scene struct {
	names  []string
	quiet  bool // open connections do not keep the instance awake
	paused bool // the instance is already paused, and its next step is due
	deep   bool // the next step is hibernation, not a stop
	kept   bool // the sockets of the program are kept; not with deep
}

func (s scene) String() string {
	return fmt.Sprintf("%s quiet=%v paused=%v deep=%v kept=%v", strings.Join(s.names, "+"), s.quiet, s.paused, s.deep, s.kept)
}

func (s *scene) crashes() bool { return slices.Contains(s.names, "crash") }

// spec changes an instance's spec as the scene requires.
func (s *scene) spec(spec *instance.Spec) {
	if s.quiet {
		spec.QuietConnectionAfter = idle.Duration(time.Nanosecond)
	}
	if s.deep {
		never := idle.Duration(0)
		spec.HibernateAfter, spec.StopAfter = idle.Duration(5*time.Minute), &never
		spec.Memory = instance.MinMemory
	}
}

// run executes one order of the actors in a new world.
func run(steps *fence, s scene, choose func(w *world) int) (faults []string, trace string) {
	w := newWorld(s, steps)
	if len(w.faults) > 0 {
		return w.faults, ""
	}
	if s.paused {
		w.h.check(w.i, func() {})
		time.Sleep(6 * time.Minute)
	}
	w.explicit = slices.Contains(s.names, "stop")
	whole := w.play(s.names, choose)
	if whole {
		faults = w.verify(s)
	}
	if w.log != nil {
		recorder(s, w.log.events, whole)
	}
	w.h.cancel()
	synctest.Wait()
	return faults, strings.Join(w.trace, " ")
}

// enumerate walks the orders of the actors at the named points one by one, at most
// limit of them, and stops at the first fault.
func enumerate(steps *fence, sc scene, limit int, seen map[string]bool) (fault, trace string) {
	var prefix []int
	for n := 0; n < limit; n++ {
		var widths, taken []int
		faults, tr := run(steps, sc, func(w *world) int {
			n, c := w.inOrder(), 0
			if d := len(widths); d < len(prefix) {
				c = min(prefix[d], n-1)
			}
			widths, taken = append(widths, n), append(taken, c)
			return c
		})
		seen[tr] = true
		if len(faults) > 0 {
			return strings.Join(faults, "; "), tr
		}
		d := len(taken) - 1
		for d >= 0 && taken[d]+1 >= widths[d] {
			d--
		}
		if d < 0 {
			return "", ""
		}
		prefix = append(slices.Clone(taken[:d]), taken[d]+1)
	}
	return "", "limit"
}

// scenes returns all sets of two or three actors around a pause, and around the
// automatic stop of a paused instance.
func scenes() (out []scene) {
	others := []string{"connect", "relay", "talk", "lease", "busy", "pause", "resume", "stop", "start", "exit"}
	for _, sc := range []scene{{quiet: true}, {}, {quiet: true, paused: true}, {quiet: true, paused: true, deep: true}} {
		for n, a := range others {
			sc.names = []string{"idle", a}
			out = append(out, sc)
			for _, b := range others[n:] {
				sc.names = []string{"idle", a, b}
				out = append(out, sc)
			}
		}
	}
	for _, a := range []string{"connect", "relay", "talk", "lease", "stop"} {
		out = append(out, scene{names: []string{"push", a, "relay"}, quiet: true, paused: true, deep: true})
	}
	return out
}

// count returns the number of tries that the environment variable env sets, or def.
// With the race detector def is reduced, because each try is many times slower.
func count(t *testing.T, env string, def int) int {
	if underRace {
		def = max(def/20, 20)
	}
	return scaletest.Count(t, env, def)
}

// TestFenceEveryInterleaving checks every order in which up to three actors can
// pass the named points of the fence. It visits each reachable place once. The
// model follows some of the walks, and in make soak all of them.
func TestFenceEveryInterleaving(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	var f *followed
	if !underRace && !testing.Short() {
		f = followWalks(t, scaletest.Count(t, "LULL_TRACED_PERCENT", 1), r)
	}
	wanders := scaletest.Count(t, "LULL_INTERLEAVINGS", 5)
	scs, places, runs, left, orders := scenes(), 0, 0, 0, new(big.Int)
	if underRace {
		scs = slices.DeleteFunc(scs, func(sc scene) bool { return len(sc.names) > 2 })
	}
	for _, sc := range scs {
		var fault, trace string
		synctest.Test(t, func(t *testing.T) {
			var s *space
			s, fault, trace = explore(nil, sc, (*world).place)
			for n := 0; n < wanders && fault == ""; n++ {
				fault, trace = s.wander(sc, r.IntN)
			}
			if fault == "" {
				places, runs, left = places+len(s.known), runs+s.runs, left+s.left
				orders.Add(orders, s.orders)
			}
		})
		if fault != "" {
			t.Fatalf("seed %d, %v: %s\norder: %s", seed, sc, fault, trace)
		}
		f.check(batchOfWalks)
	}
	f.finish()
	t.Logf("%v of %v interleavings of %d scenes, which meet in %d places (%d runs), and %d that were found once: none lost, none frozen, none started twice; %d walks at random came to no other place",
		orders, orders, len(scs), places, runs, left, wanders*len(scs))
}

// TestFenceReduction checks the reduction to places. Where orders can be walked one
// by one, their number must equal the one computed from the places, and must differ
// if a place leaves something out.
func TestFenceReduction(t *testing.T) {
	if underRace {
		t.Skip("runs nothing that the others do not")
	}
	blind := func(w *world) place { return sha256.Sum256(w.state(nil)) } // ignores the positions of the actors
	same, noticed := 0, 0
	for _, sc := range scenes() {
		if len(sc.names) > 2 {
			continue
		}
		synctest.Test(t, func(t *testing.T) {
			var s *space
			one := big.NewInt(-1)
			for again := 0; again < 5 && (s == nil || s.orders.Cmp(one) != 0); again++ {
				var fault string
				if s, fault, _ = explore(nil, sc, (*world).place); fault != "" {
					t.Errorf("%v: %s", sc, fault)
					return
				}
				if s.orders.Cmp(big.NewInt(fewOrders)) > 0 {
					return
				}
				seen := map[string]bool{}
				if fault, cut := enumerate(nil, sc, fewOrders+1, seen); fault != "" || cut != "" {
					t.Errorf("%v: %s %s", sc, fault, cut)
				}
				one = big.NewInt(int64(len(seen)))
			}
			if s.orders.Cmp(one) != 0 {
				t.Errorf("%v: %v orders by its places, %v one by one", sc, s.orders, one)
			}
			same++
			if b, fault, _ := explore(nil, sc, blind); fault != "" || b.orders.Cmp(s.orders) != 0 {
				noticed++
			}
		})
	}
	if t.Logf("%d scenes have as many orders by their places as one by one; in %d of them a place that forgets is noticed", same, noticed); same == 0 || noticed == 0 {
		t.Error("nothing was compared")
	}
}

// TestFenceUnusualSchedule checks that a place that one run reaches and no later
// run does not change which orders are walked.
func TestFenceUnusualSchedule(t *testing.T) {
	sc := scene{names: []string{"idle", "connect"}}
	synctest.Test(t, func(t *testing.T) {
		usual, fault, _ := explore(nil, sc, (*world).place)
		left := 0
		for n := 1; n <= 40 && fault == ""; n++ {
			calls := 0
			var s *space
			s, fault, _ = explore(nil, sc, func(w *world) place {
				at := w.place()
				if calls++; calls == n {
					at[0]++
				}
				return at
			})
			if left += s.left; s.orders == nil || s.orders.Cmp(usual.orders) != 0 {
				t.Errorf("call %d: %v orders, usually %v", n, s.orders, usual.orders)
			}
		}
		if fault != "" || left == 0 {
			t.Errorf("%d places left, fault %q", left, fault)
		}
	})
}

// fewOrders is the number of orders up to which those of a scene are walked one by
// one.
const fewOrders = 400

// drawScene returns a random scene with three to five actors.
func drawScene(r *rand.Rand) scene {
	var all []string
	for n := range actors {
		all = append(all, n)
	}
	slices.Sort(all)
	sc := scene{names: []string{"idle"}, quiet: r.IntN(2) == 0, paused: r.IntN(3) == 0, deep: r.IntN(2) == 0}
	for range 2 + r.IntN(3) {
		if name := all[r.IntN(len(all))]; name != "crash" || !sc.crashes() {
			sc.names = append(sc.names, name)
		}
	}
	sc.kept = !sc.deep && r.IntN(2) == 0
	return sc
}

// TestFenceRandomInterleavings checks random orders of three to five actors.
func TestFenceRandomInterleavings(t *testing.T) {
	runs := count(t, "LULL_RANDOM_INTERLEAVINGS", 15_000)
	seed := rand.Uint64()
	t.Logf("seed %d, %d runs", seed, runs)
	r := rand.New(rand.NewPCG(seed, 0))
	var fault, trace string
	var sc scene
	synctest.Test(t, func(t *testing.T) {
		for n := 0; n < runs && fault == ""; n++ {
			sc = drawScene(r)
			faults, tr := run(nil, sc, func(w *world) int { return r.IntN(w.inOrder()) })
			fault, trace = strings.Join(faults, "; "), tr
		}
	})
	if fault != "" {
		t.Fatalf("seed %d, %v: %s\norder: %s", seed, sc, fault, trace)
	}
}
