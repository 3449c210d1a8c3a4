package host

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/scaletest"
)

// What the shipped fence does in the walks is recorded and checked against the
// model: a trace is accepted only if it is a behavior of testdata/fence.pml, in
// which all that is not recorded is free. Spin's verifier follows the traces
// itself, so that no second form of the model exists.

// recorder gets each recorded walk, and whether it was walked to its end; nil while
// nothing is recorded. It is set before the walks begin.
var recorder func(sc scene, events []event, whole bool)

// event is something that is seen: its name in the model (E_name), and its
// client, or whether a step failed.
type event struct {
	name string
	n    int // added to the number of the event
}

// recording is the trace of one walk. It may be written at the same time by all
// that happens in it.
type recording struct {
	mu     sync.Mutex
	on     bool
	events []event
	state  power.Instance // on disk
	leases int
}

// stepEvents maps the steps that only the daemon sees to their events. The others
// are events of the simulated kernel and of its relay.
var stepEvents = map[string]string{"intent": "intent", "look": "look", "look-again": "final", "commit": "commit",
	"stop-intent": "stopintent", "stop-look": "stoplook", "deeper-look": "final", "deeper-commit": "commit"}

func (r *recording) event(name string, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.on {
		r.events = append(r.events, event{name, max(n, 0)})
	}
}

// record turns what is written to disk into events.
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

// walked is a recorded walk as the model reads it.
type walked struct {
	sc       scene
	scenario [9]int // quiet, deep, path of each client, clients, requests, users, verbs, checks
	events   []event
}

// verbs are the calls of a user, as the model numbers them.
var verbs = map[string]int{"stop": 1, "start": 2, "resume": 4, "pause": 8, "lease": 16, "busy": 32}

// traceOf returns a walk as the model reads it; ok is false if the model has not as
// many clients, or no program that ends by itself.
func traceOf(sc scene, events []event) (t walked, ok bool) {
	t = walked{sc: sc, events: events}
	clients, requests, users, mask, checks := 0, 1, 0, 0, yes(sc.paused)
	for _, name := range sc.names {
		switch name {
		case "exit":
			return t, false
		case "talk":
			requests = 2
			fallthrough
		case "connect", "relay":
			clients++
		case "idle", "push":
			checks++
		}
		if v := verbs[name]; v > 0 {
			users, mask = users+1, mask|v
		}
	}
	t.scenario = [9]int{yes(sc.quiet), yes(sc.deep), 0, 0, clients, requests, users, mask, checks}
	for _, e := range events {
		if e.n < 2 && (e.name == "gated" || e.name == "passed") {
			t.scenario[2+e.n] = 1
		}
	}
	return t, clients <= 2 && users <= 2
}

// written appends the trace as a line of numbers.
func (t *walked) written(b []byte, numbers map[string]int) []byte {
	for _, n := range t.scenario {
		b = fmt.Append(b, n, " ")
	}
	b = fmt.Append(b, len(t.events))
	for _, e := range t.events {
		if numbers[e.name] == 0 {
			panic("the model has no event " + e.name)
		}
		b = fmt.Append(b, " ", numbers[e.name]+e.n)
	}
	return append(b, '\n')
}

// eventNumbers returns the numbers of the events in the model.
func eventNumbers(model string) map[string]int {
	numbers := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^#define E_(\w+) (\d+)$`).FindAllStringSubmatch(model, -1) {
		numbers[m[1]], _ = strconv.Atoi(m[2])
	}
	return numbers
}

// walks records random orders of scenes until the traces have so many transitions.
func walks(t *testing.T, steps *fence, transitions int, r *rand.Rand, draw func() scene) (all []walked) {
	t.Helper()
	defer func() { recorder = nil }()
	seen := 0
	recorder = func(sc scene, events []event, whole bool) {
		if whole {
			events = append(events, event{name: "end"})
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

// follower is the verifier of the model that follows traces.
type follower struct {
	program string
	numbers map[string]int
	states  int // explored so far
}

func buildFollower(t *testing.T) *follower {
	t.Helper()
	dir := modelDir(t)
	buildIn(t, dir, "spin", "-DTRACES", "-a", "fence.pml")
	buildIn(t, dir, "gcc", "-O1", "-w", "-DSAFETY", "-DNOREDUCE", "-DVECTORSZ=2048", "-DMEMLIM=3000", "-o", "follow", "pan.c")
	return &follower{filepath.Join(dir, "follow"), eventNumbers(string(readModel(t, "fence.pml"))), 0}
}

// batch is how many traces are followed by one process.
const batch = 500

// follow returns the traces that the model cannot do: by index, how many of its
// events it can.
func (f *follower) follow(t *testing.T, all []walked) (rejected map[int]int) {
	t.Helper()
	rejected = map[int]int{}
	for first := 0; first < len(all); first += batch {
		part := all[first:min(first+batch, len(all))]
		b := fmt.Appendln(nil, len(part))
		for _, tr := range part {
			b = tr.written(b, f.numbers)
		}
		file := filepath.Join(t.TempDir(), "traces")
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), f.program, "-m2000000", "-n")
		cmd.Dir = filepath.Dir(file)
		cmd.Env = append(os.Environ(), "TRACES="+file, "BARE=1", "TIMED=1")
		out, err := cmd.CombinedOutput()
		if m := panStates.FindSubmatch(out); m != nil {
			n, _ := strconv.Atoi(string(m[1]))
			f.states += n
		}
		if err != nil || !strings.Contains(string(out), "errors: 0") || !strings.Contains(string(out), fmt.Sprintf("traces: %d\n", len(part))) || bytes.Contains(out, []byte("max search depth too small")) {
			t.Fatalf("the search did not complete: %v\n%s", err, out)
		}
		for _, m := range panRejected.FindAllStringSubmatch(string(out), -1) {
			n, _ := strconv.Atoi(m[1])
			rejected[first+n], _ = strconv.Atoi(m[2])
		}
	}
	return rejected
}

var panRejected = regexp.MustCompile(`(?m)^rejected: (\d+) (\d+)$`)

// TestFenceTraces checks that what the fence does in random walks is a behavior of
// the model, and that the model rejects what it must: recorded traces that were
// changed, and what broken fences do.
func TestFenceTraces(t *testing.T) {
	if underRace || testing.Short() {
		t.Skip("starts programs, and runs nothing that the others do not")
	}
	f := buildFollower(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	n := scaletest.Count(t, "LULL_TRACE_TRANSITIONS", 100_000)
	all := walks(t, nil, n, r, func() scene { return drawWalk(r) })
	transitions := 0
	for _, tr := range all {
		transitions += len(tr.events)
	}
	rejected := f.follow(t, all)
	for n, at := range rejected {
		t.Errorf("not a behavior of the model: %v", all[n].until(at))
	}
	t.Logf("%d traces with %d transitions, %d rejected; %d states", len(all), transitions, len(rejected), f.states)
	t.Run("changed", func(t *testing.T) { rejectsChanged(t, f, all) })
	t.Run("broken", func(t *testing.T) { rejectsBroken(t, f, r) })
}

// drawWalk draws one of the scenes that are walked in every order, or a larger one.
func drawWalk(r *rand.Rand) scene {
	if all := scenes(); r.IntN(2) == 0 {
		return all[r.IntN(len(all))]
	}
	return drawScene(r)
}

// until describes a trace up to the event that the model cannot do.
func (t *walked) until(at int) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%v:", t.sc)
	for _, e := range t.events[:min(at+1, len(t.events))] {
		fmt.Fprintf(&s, " %s+%d", e.name, e.n)
	}
	return s.String()
}

// find returns the index of the first event at or after from; -1 if there is none.
func (t *walked) find(from int, e event) int {
	for n := max(from, 0); n < len(t.events); n++ {
		if t.events[n] == e {
			return n
		}
	}
	return -1
}

// with returns a copy with other events.
func (t walked) with(events ...[]event) walked {
	t.events = slices.Concat(events...)
	return t
}

// changes make traces that the model must reject; ok is false if a trace is not
// suited.
var changes = map[string]func(t walked) (changed walked, ok bool){
	"a thaw is left out": func(t walked) (walked, bool) {
		n := t.find(0, event{"thaw", 0})
		ok := n >= 0 && t.find(n, event{"exit", 0}) < 0 && (t.find(n, event{"accepted", 0}) > 0 || t.find(n, event{"answered", 0}) > 0)
		return t.with(t.events[:max(n, 0)], t.events[n+1:]), ok
	},
	"commit and freeze change places": func(t walked) (walked, bool) {
		n, m := t.find(0, event{"freeze", 0}), t.find(0, event{"commit", 0})
		if n < 0 || m < n {
			return t, false
		}
		t = t.with(t.events)
		t.events[n], t.events[m] = t.events[m], t.events[n]
		return t, true
	},
	"it is thawed before the sockets are given back": func(t walked) (walked, bool) {
		n := t.find(0, event{"disarm", 0})
		if n < 0 || n+1 >= len(t.events) || t.events[n+1].name != "thaw" {
			return t, false
		}
		t = t.with(t.events)
		t.events[n], t.events[n+1] = t.events[n+1], t.events[n]
		return t, true
	},
	"it is paused under an accepted connection": func(t walked) (walked, bool) {
		n := t.find(0, event{"intent", 0})
		c := t.scenario[4]
		if n < 0 || c > 1 || t.scenario[0] == 1 || t.scenario[7]&8 != 0 || t.find(n, event{"look", 0}) < 0 {
			return t, false
		}
		t.scenario[4]++
		return t.with(t.events[:n], []event{{"queued", c}, {"accepted", c}, {"answered", c}}, t.events[n:]), true
	},
	"it is started twice": func(t walked) (walked, bool) {
		n := t.find(0, event{"start", 0})
		return t.with(t.events[:n+1], t.events[max(n, 0):]), n >= 0
	},
	"a lease is ignored": func(t walked) (walked, bool) {
		n := t.find(0, event{"intent", 0})
		if n < 0 || t.scenario[6] > 1 || t.scenario[7]&(8|16) != 0 || t.find(n, event{"look", 0}) < 0 {
			return t, false
		}
		t.scenario[6]++
		t.scenario[7] |= 16
		return t.with(t.events[:n], []event{{"lease", 0}}, t.events[n:]), true
	},
	"a wake is forgotten": func(t walked) (walked, bool) {
		n := t.find(0, event{"disarm", 0})
		ok := n > 0 && t.events[n-1].name == "queued" && t.find(0, event{"commit", 0}) >= 0
		return t.with(t.events[:max(n, 0)], []event{{name: "end"}}), ok
	},
}

func rejectsChanged(t *testing.T, f *follower, all []walked) {
	for name, change := range changes {
		var changed []walked
		for _, tr := range all {
			if c, ok := change(tr); ok && len(changed) < 30 {
				changed = append(changed, c)
			}
		}
		rejected := f.follow(t, changed)
		for n, c := range changed {
			if _, ok := rejected[n]; !ok {
				t.Errorf("%s, and the model accepts it: %v", name, c.until(len(c.events)))
				break
			}
		}
		if len(changed) == 0 {
			t.Errorf("%s: no trace is suited", name)
		}
		t.Logf("%s: %d of %d rejected", name, len(rejected), len(changed))
	}
}

// rejectsBroken checks that the model rejects what each broken fence does. Some
// show only in few orders.
func rejectsBroken(t *testing.T, f *follower, r *rand.Rand) {
	for _, b := range brokenFences() {
		steps, deep := b.whole(), b.f.deeper != nil
		traces, rejected := 0, 0
		for round := 0; rejected == 0 && round < 50; round++ {
			all := walks(t, &steps, 600, r, func() scene {
				if !deep && b.f.pause != nil && r.IntN(2) == 0 {
					return scene{names: []string{"idle", "connect"}}
				}
				for {
					if sc := drawWalk(r); sc.deep == deep && (sc.paused || b.f.pause != nil) {
						return sc
					}
				}
			})
			traces += len(all)
			rejected += len(f.follow(t, all))
		}
		if rejected == 0 {
			t.Errorf("%q: each of %d traces was accepted", b.name, traces)
		}
		t.Logf("%q: %d of %d traces rejected", b.name, rejected, traces)
	}
}
