package host

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
	"lull/internal/host/modeltest"
	"lull/internal/lib/scaletest"
)

// The walks of the fence are recorded and checked against the model
// modeltest/fence.pml. A trace is accepted only if it is a behavior of the model,
// in which everything that is not recorded may happen at any time. Spin's verifier
// follows the traces itself, so the model exists in one form only.

// recorder is called with each recorded walk, and whether the walk reached its end.
// Nil records nothing. It must be set before the walks begin.
var recorder func(sc scene, events []modeltest.Event, whole bool)

// recording is the trace of one walk. It is safe for concurrent use.
type recording struct {
	mu     sync.Mutex
	on     bool
	events []modeltest.Event
	state  power.Instance // the state on disk
	leases int
}

// stepEvents maps the steps that only the daemon sees to their events. The other
// events come from the simulated kernel and its relay.
var stepEvents = map[string]string{"intent": "intent", "look": "look", "look-again": "final", "commit": "commit",
	"stop-intent": "stopintent", "stop-look": "stoplook", "deeper-look": "final", "deeper-commit": "commit"}

func (r *recording) event(name string, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.on {
		at := int64(len(r.events))
		r.events = append(r.events, modeltest.Event{Name: name, N: max(n, 0), From: at, To: at})
	}
}

// record adds the events for a record that was written to disk.
func (r *recording) record(rec *instance.Record) {
	r.mu.Lock()
	stopped, leased := rec.State == power.Stopped && r.state != power.Stopped, len(rec.Leases) > r.leases
	r.state, r.leases = rec.State, len(rec.Leases)
	r.mu.Unlock()
	if leased {
		r.event("lease", -1)
	}
	if stopped {
		r.event("stopped", -1)
	}
}

// began adds the event for the start of an actor of a living daemon.
func (r *recording) began(name string) {
	switch v := slices.Index(verbs, name); {
	case v >= 0:
		r.event("called", v)
	case name == "idle", name == "push":
		r.event("tick", -1)
	}
}

func (r *recording) begin() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.on = true
}

func (r *recording) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.on = false
}

// verbs are the calls of users, in the order of their numbers in the model.
var verbs = []string{"stop", "start", "resume", "pause", "lease", "busy"}

// traceOf converts a walk to the model's form. ok is false if the walk has more
// clients or calls than the model.
func traceOf(sc scene, events []modeltest.Event) (t walked, ok bool) {
	m := modeltest.Scenario{Quiet: sc.quiet, Deep: sc.deep, Requests: 1, Checks: yes(sc.paused), Kept: sc.kept, Timed: true}
	for _, name := range sc.names {
		switch name {
		case "exit":
			m.Ends++
		case "crash":
			m.Crashes++
		case "talk":
			m.Requests = 2
			fallthrough
		case "connect", "relay":
			m.Clients++
		}
		if v := slices.Index(verbs, name); v >= 0 {
			m.Users, m.Verbs = m.Users+1, m.Verbs|1<<v
		}
	}
	if m.Clients > modeltest.MaxClients || m.Users > 2 {
		return t, false
	}
	for _, e := range events {
		if e.Name == "gated" || e.Name == "passed" {
			m.Relayed[e.N] = true
		}
	}
	return walked{sc, modeltest.Trace{Scenario: m, Events: events}}, true
}

// walked is a recorded walk, with its scene.
type walked struct {
	sc scene
	modeltest.Trace
}

func traces(all []walked) (out []modeltest.Trace) {
	for _, w := range all {
		out = append(out, w.Trace)
	}
	return out
}

// walks records random orders of scenes until the traces together have the given
// number of transitions.
func walks(t *testing.T, steps *fence, transitions int, r *rand.Rand, draw func() scene) (all []walked) {
	t.Helper()
	defer func() { recorder = nil }()
	seen := 0
	recorder = func(sc scene, events []modeltest.Event, whole bool) {
		if whole {
			events = ended(events)
		}
		if tr, ok := traceOf(sc, events); ok {
			all, seen = append(all, tr), seen+len(events)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		for seen < transitions {
			run(steps, draw(), func(w *world) int { return r.IntN(w.inOrder()) })
		}
	})
	return all
}

// ended returns events followed by the end event, which says that nothing is left
// to do.
func ended(events []modeltest.Event) []modeltest.Event {
	at := int64(len(events))
	return append(events, modeltest.Event{Name: "end", From: at, To: at})
}

// TestFenceTraces checks that random walks of the fence are behaviors of the model,
// and that the model rejects traces that were changed, and those of broken fences.
func TestFenceTraces(t *testing.T) {
	if underRace || testing.Short() {
		t.Skip("starts programs, and runs nothing that the others do not")
	}
	f := modeltest.NewFollower(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	n := scaletest.Count(t, "LULL_TRACE_TRANSITIONS", 100_000)
	all := walks(t, nil, n, r, func() scene { return drawWalk(r) })
	transitions := 0
	for _, tr := range all {
		transitions += len(tr.Events)
	}
	rejected := f.Follow(t, traces(all))
	for n, at := range rejected {
		t.Errorf("not a behavior of the model: %v: %s", all[n].sc, all[n].Until(at))
	}
	t.Logf("%d traces with %d transitions, %d rejected; %d states", len(all), transitions, len(rejected), f.States)
	t.Run("changed", func(t *testing.T) { rejectsChanged(t, f, all) })
	t.Run("broken", func(t *testing.T) { rejectsBroken(t, f, r) })
	t.Run("broken worlds", func(t *testing.T) { rejectsBrokenWorlds(t, f, r) })
}

// followed has the model follow walks of another test. Its methods do nothing if it
// is nil.
type followed struct {
	t                          *testing.T
	f                          *modeltest.Follower
	waiting                    []walked
	known                      map[string]bool // traces of the present scene
	walks, traces, transitions int
}

// batchOfWalks is the number of traces that the model follows at once.
const batchOfWalks = 2000

// followWalks records that percentage of all walks, until finish is called.
func followWalks(t *testing.T, percent int, r *rand.Rand) *followed {
	t.Helper()
	f := &followed{t: t, f: modeltest.NewFollower(t), known: map[string]bool{}}
	t.Cleanup(func() { recorder = nil })
	recorder = func(sc scene, events []modeltest.Event, whole bool) {
		if f.walks++; r.IntN(100) >= percent {
			return
		}
		if whole {
			events = ended(events)
		}
		tr, ok := traceOf(sc, events)
		if key := fmt.Sprint(sc, tr.Scenario, events); ok && !f.known[key] {
			f.known[key] = true
			f.waiting = append(f.waiting, tr)
		}
	}
	return f
}

// check has the model follow the traces that wait, if there are at least so many. It
// is called after each scene.
func (f *followed) check(least int) {
	if f == nil {
		return
	}
	clear(f.known)
	if len(f.waiting) < least {
		return
	}
	for n, at := range f.f.Follow(f.t, traces(f.waiting)) {
		f.t.Errorf("not a behavior of the model: %v: %s", f.waiting[n].sc, f.waiting[n].Until(at))
	}
	for _, tr := range f.waiting {
		f.traces, f.transitions = f.traces+1, f.transitions+len(tr.Events)
	}
	f.waiting = nil
}

// finish has the model follow the rest, and reports the result.
func (f *followed) finish() {
	if f == nil {
		return
	}
	recorder = nil
	f.check(0)
	if f.t.Logf("of %d walks the model follows %d different ones with %d transitions; %d states", f.walks, f.traces, f.transitions, f.f.States); f.traces == 0 {
		f.t.Error("no walk was recorded")
	}
}

// drawWalk returns a random scene: one of scenes, or a larger one.
func drawWalk(r *rand.Rand) scene {
	if all := scenes(); r.IntN(2) == 0 {
		return all[r.IntN(len(all))]
	}
	return drawScene(r)
}

// sight returns an event of a walk.
func sight(name string, n int) modeltest.Event { return modeltest.Event{Name: name, N: n} }

// find returns the index of the first event at or after from with this name, and
// this number unless n is negative. It returns -1 if there is none.
func (t *walked) find(from int, name string, n int) int {
	for k := max(from, 0); k < len(t.Events); k++ {
		if e := t.Events[k]; e.Name == name && (n < 0 || e.N == n) {
			return k
		}
	}
	return -1
}

// frozenIdle reports whether, in the pause that begins at event n, the frozen
// program was found idle.
func (t *walked) frozenIdle(n int) bool {
	look := t.find(n, "look", -1)
	exit := t.find(n, "exit", -1)
	return look >= 0 && t.Events[look].N == 0 && (exit < 0 || exit > look)
}

// with returns a copy of t with the given events, in this order.
func (t walked) with(events ...[]modeltest.Event) walked {
	t.Events = slices.Concat(events...)
	for n := range t.Events {
		t.Events[n].From, t.Events[n].To = int64(n), int64(n)
	}
	return t
}

// swapped returns a copy of t with two events swapped.
func (t walked) swapped(n, m int) walked {
	events := slices.Clone(t.Events)
	events[n], events[m] = events[m], events[n]
	return t.with(events)
}

// changes change a trace so that the model must reject it. ok is false if the trace
// is not suitable for the change.
var changes = map[string]func(t walked) (changed walked, ok bool){
	"a thaw is left out": func(t walked) (walked, bool) {
		n := t.find(0, "thaw", -1)
		ok := n >= 0 && t.find(n, "exit", -1) < 0 && (t.find(n, "accepted", 0) > 0 || t.find(n, "answered", 0) > 0)
		return t.with(t.Events[:max(n, 0)], t.Events[n+1:]), ok
	},
	"commit and freeze change places": func(t walked) (walked, bool) {
		n, m := t.find(0, "freeze", -1), t.find(0, "commit", 0)
		if n < 0 || m < n {
			return t, false
		}
		return t.swapped(n, m), true
	},
	"it is thawed before the sockets are given back": func(t walked) (walked, bool) {
		n := t.find(0, "disarm", -1)
		if n < 0 || n+1 >= len(t.Events) || t.Events[n+1].Name != "thaw" {
			return t, false
		}
		return t.swapped(n, n+1), true
	},
	"it is paused under an accepted connection": func(t walked) (walked, bool) {
		n, c := t.find(0, "intent", -1), t.Clients
		if n < 0 || c == modeltest.MaxClients || t.Quiet || t.Verbs&8 != 0 || t.Crashes > 0 || !t.frozenIdle(n) {
			return t, false
		}
		t.Clients++
		return t.with(t.Events[:n], []modeltest.Event{sight("queued", c), sight("accepted", c), sight("answered", c)}, t.Events[n:]), true
	},
	"it is started twice": func(t walked) (walked, bool) {
		n := t.find(0, "start", -1)
		return t.with(t.Events[:n+1], t.Events[max(n, 0):]), n >= 0
	},
	"a lease is ignored": func(t walked) (walked, bool) {
		n := t.find(0, "intent", -1)
		if n < 0 || t.Users > 1 || t.Verbs&(8|16) != 0 || t.Crashes > 0 || !t.frozenIdle(n) {
			return t, false
		}
		t.Users, t.Verbs = t.Users+1, t.Verbs|16
		return t.with(t.Events[:n], []modeltest.Event{sight("called", 4), sight("lease", 0)}, t.Events[n:]), true
	},
	"a wake is forgotten": func(t walked) (walked, bool) {
		n := t.find(0, "disarm", -1)
		ok := n > 0 && t.Events[n-1].Name == "queued" && t.find(0, "commit", 0) >= 0
		return t.with(t.Events[:max(n, 0)], []modeltest.Event{sight("end", 0)}), ok
	},
	"the next daemon does not watch what it takes over": func(t walked) (walked, bool) {
		n := t.find(t.find(0, "crash", -1), "arm", -1)
		ok := n >= 0 && t.find(0, "crash", -1) >= 0 && t.find(n, "commit", 0) > 0
		return t.with(t.Events[:max(n, 0)], t.Events[n+1:]), ok
	},
	"what a dead daemon froze answers": func(t walked) (walked, bool) {
		n := t.find(0, "crash", -1)
		m := t.find(n, "thaw", -1)
		a := t.find(m, "accepted", -1)
		if n < 0 || m < 0 || a < 0 || t.find(n, "exit", -1) >= 0 {
			return t, false
		}
		return t.with(t.Events[:m], t.Events[a:a+1], t.Events[m:a], t.Events[a+1:]), true
	},
	"the next daemon forgets a lease": func(t walked) (walked, bool) {
		n := t.find(0, "intent", -1)
		if n < 0 || t.Users > 1 || t.Verbs&(8|16) != 0 || t.Crashes > 0 || t.Ends > 0 || !t.frozenIdle(n) {
			return t, false
		}
		t.Users, t.Verbs, t.Crashes = t.Users+1, t.Verbs|16, 1
		return t.with([]modeltest.Event{sight("called", 4), sight("lease", 0), sight("crash", 0), sight("hold", 0), sight("sleep", 0), sight("release", 0)}, t.Events), true
	},
	"the next daemon starts what runs": func(t walked) (walked, bool) {
		n := t.find(t.find(0, "crash", -1), "release", -1)
		return t.with(t.Events[:n+1], []modeltest.Event{sight("start", 0)}, t.Events[n+1:]),
			n >= 0 && t.find(0, "crash", -1) >= 0 && t.find(0, "exit", -1) < 0
	},
	"a kept socket refuses a client": func(t walked) (walked, bool) {
		n := t.find(0, "stopped", -1)
		m := t.find(n, "queued", -1)
		start := t.find(n, "start", -1)
		if n < 0 || m < 0 || start < m || !t.Kept || t.Ends > 0 || t.Verbs&1 != 0 {
			return t, false
		}
		events := slices.Clone(t.Events[:m+1])
		events[m].Name = "refused"
		return t.with(events), true
	},
	"a client of a kept socket starts nothing": func(t walked) (walked, bool) {
		n := t.find(0, "stopped", -1)
		m := t.find(n, "queued", -1)
		start := t.find(n, "start", -1)
		return t.with(t.Events[:m+1], []modeltest.Event{sight("end", 0)}), n >= 0 && m >= 0 && start > m && t.Kept && t.Ends == 0 && t.Verbs&1 == 0
	},
	"it is frozen after it has ended by itself": func(t walked) (walked, bool) {
		n := t.find(0, "exit", -1)
		return t.with(t.Events[:n+1], []modeltest.Event{sight("freeze", 0)}, t.Events[n+1:]), n >= 0 && t.Ends > 0
	},
	"its end is not noticed": func(t walked) (walked, bool) {
		n := t.find(t.find(0, "exit", -1), "stopped", -1)
		return t.with(t.Events[:max(n, 0)], []modeltest.Event{sight("end", 0)}), n >= 0 && t.Ends > 0 && t.find(0, "exit", -1) >= 0
	},
}

func rejectsChanged(t *testing.T, f *modeltest.Follower, all []walked) {
	for name, change := range changes {
		var changed []walked
		for _, tr := range all {
			if c, ok := change(tr); ok && len(changed) < 10 {
				changed = append(changed, c)
			}
		}
		rejected := f.Follow(t, traces(changed))
		for n, c := range changed {
			if _, ok := rejected[n]; !ok {
				t.Errorf("%s, and the model accepts it: %v: %s", name, c.sc, c.Until(len(c.Events)))
				break
			}
		}
		for n := range changed { // the model must accept it without the lease
			changed[n] = changed[n].with(slices.DeleteFunc(slices.Clone(changed[n].Events), func(e modeltest.Event) bool {
				return e.Name == "lease" || e.Name == "called" && e.N == 4
			}))
		}
		if strings.Contains(name, "lease") {
			for n := range f.Follow(t, traces(changed)) {
				t.Errorf("%s: also without the lease the model rejects %s", name, changed[n].Until(len(changed[n].Events)))
			}
		}
		if len(changed) == 0 {
			t.Errorf("%s: no trace is suited", name)
		}
		t.Logf("%s: %d of %d rejected", name, len(rejected), len(changed))
	}
}

// rejectsBroken checks that the model rejects traces of each broken fence. Some are
// wrong only in few orders.
func rejectsBroken(t *testing.T, f *modeltest.Follower, r *rand.Rand) {
	for _, b := range brokenFences() {
		steps, deep := b.whole(), b.f.deeper != nil
		rejectsSome(t, f, r, b.name, &steps, func() scene {
			if !deep && b.f.pause != nil && r.IntN(2) == 0 {
				return scene{names: []string{"idle", "connect"}}
			}
			for {
				if sc := drawWalk(r); sc.deep == deep && (sc.paused || b.f.pause != nil) {
					return sc
				}
			}
		})
	}
}

// deafKeeper does not watch the sockets that it keeps, and openKeeper does not shut
// them.
type (
	deafKeeper struct{ *hosttest.Keeper }
	openKeeper struct{ *hosttest.Keeper }
)

func (k deafKeeper) Watch(id string, _ func(string)) (Guard, error) {
	return k.Keeper.Watch(id, func(string) {})
}

func (openKeeper) Shut(string) {}

// rejectsBrokenWorlds checks that the model rejects traces if something around the
// fence is broken: the takeover by a daemon, the bind handoff, or how the end of a
// program is noticed.
func rejectsBrokenWorlds(t *testing.T, f *modeltest.Follower, r *rand.Rand) {
	defer func() { tamper = nil }()
	std := standardFence()
	for _, b := range []struct {
		name   string
		tamper func(*world)
		sc     scene
	}{
		{"take over a pause without watching", func(w *world) {
			w.h.steps.resumePause = w.noting(fence{resumePause: without(std.resumePause, "arm")}).resumePause
		},
			scene{names: []string{"crash", "connect"}, paused: true}},
		{"take over a pause with an open relay", func(w *world) {
			w.h.steps.resumePause = w.noting(fence{resumePause: without(std.resumePause, "gate")}).resumePause
		},
			scene{names: []string{"crash", "relay"}, paused: true}},
		{"take over a stop without a thaw", func(w *world) { w.h.steps.resumeStop = without(std.resumeStop, "stop-thaw") },
			scene{names: []string{"idle", "crash"}, quiet: true, paused: true}},
		{"forget to watch the kept sockets", func(w *world) { w.h.cfg.HeldListeners = deafKeeper{&hosttest.Keeper{Daemon: w.daemon}} },
			scene{names: []string{"idle", "connect"}, quiet: true, paused: true, kept: true}},
		{"let clients in while it stops", func(w *world) { w.h.cfg.HeldListeners = openKeeper{&hosttest.Keeper{Daemon: w.daemon}} },
			scene{names: []string{"idle", "connect"}, quiet: true, paused: true, kept: true}},
		{"do not notice that it has ended", func(w *world) { w.k.SetOnExit(nil) },
			scene{names: []string{"idle", "exit"}}},
	} {
		tamper = b.tamper
		rejectsSome(t, f, r, b.name, nil, func() scene { return b.sc })
	}
}

// rejectsSome walks scenes until the model rejects a trace, and fails if it rejects
// none.
func rejectsSome(t *testing.T, f *modeltest.Follower, r *rand.Rand, name string, steps *fence, draw func() scene) {
	t.Helper()
	walked, rejected := 0, 0
	for round := 0; rejected == 0 && round < 50; round++ {
		all := walks(t, steps, 600, r, draw)
		walked += len(all)
		rejected += len(f.Follow(t, traces(all)))
	}
	if rejected == 0 {
		t.Errorf("%q: each of %d traces was accepted", name, walked)
	}
	t.Logf("%q: %d of %d traces rejected", name, rejected, walked)
}
