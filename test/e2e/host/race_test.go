package host

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// spread bounds the random distance of connections from the expected freeze.
const spread = 1500 * time.Microsecond

// raceLanes is the number of instances that race at the same time. learning is
// how many cycles each needs to estimate when the freeze happens.
const (
	raceLanes = 6
	learning  = 20
)

// TestRaceDirect makes connections around the instant of the freeze: at the idle
// deadline, at a manual pause, and requests on open connections that were quiet
// for long enough. Each must be answered, and what happens must be a behavior of
// the model.
func TestRaceDirect(t *testing.T) { race(t, 0, false, 400) }

func TestRaceRelay(t *testing.T) { race(t, 0, true, 400) }

// TestRaceDirectAsNobody does the same as an ordinary user, for whom freezing
// uses signals.
func TestRaceDirectAsNobody(t *testing.T) { race(t, asNobody(t), false, 120) }

func TestRaceRelayAsNobody(t *testing.T) { race(t, asNobody(t), true, 120) }

func asNobody(t *testing.T) int {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("running as another user needs root")
	}
	return nobody
}

func race(t *testing.T, uid int, relay bool, def int) {
	raceWith(t, raceConfig{uid: uid, relay: relay, count: def, model: uid == 0, bring: func(d *daemontest.Host, s instance.Spec, _ string) { d.Launch(s) }})
}

// raceConfig configures a race. bring creates an instance from a spec whose
// server listens on addr.
type raceConfig struct {
	uid   int
	relay bool
	count int  // number of connections
	model bool // check what happens against the model
	bring func(d *daemontest.Host, s instance.Spec, addr string)
}

func raceWith(t *testing.T, cfg raceConfig) {
	uid, relay := cfg.uid, cfg.relay
	total := scaletest.Count(t, "LULL_HOST_RACES", cfg.count)
	rng := random(t)
	host := daemontest.Config{Under: quickDisk(), UID: uid, GID: uid, Args: []string{"--probe", "50ms"}}
	var sent *spans
	if cfg.model {
		sent = collect(t)
		host.Env = sent.env()
	}
	d := daemontest.Start(t, host)
	log := follow(d)
	lanes := make([]*lane, raceLanes)
	if uid != 0 { // freezing by signals reads all of /proc, so parallel lanes would disturb each other
		lanes = lanes[:2]
	}
	var fired, woke atomic.Int64
	var wg sync.WaitGroup
	for n := range lanes {
		lanes[n] = newLane(d, n, rng, relay, cfg.bring)
	}
	begin := time.Now()
	for _, l := range lanes {
		wg.Go(func() {
			for n := int(fired.Load()); n < total || woke.Load() == 0 && time.Since(begin) < waittest.Timeout; n = int(fired.Load()) {
				n, met, err := l.cycle(t.Context())
				if err != nil {
					o, gerr := d.Get(context.Background(), l.name)
					t.Errorf("%s: %v; now %s (%s) %v", l.name, err, o.State, o.StatusReason, gerr)
					return
				}
				if l.cycles > learning {
					fired.Add(int64(n))
					if met {
						woke.Add(1)
					}
				}
			}
		})
	}
	wg.Wait()
	end := time.Now()
	took := end.Sub(begin)
	if t.Failed() {
		return
	}
	if cfg.model {
		sent.flush(d, lanes[0].name)
	}
	st, err := d.Status(t.Context())
	errtest.None(t, err)
	for _, l := range lanes { // after its last cycle, each must still be running
		mustAnswer(t, l.addr)
	}
	report(t, lanes, log.waitStable(t, d), st.Freezer, took)
	if cfg.model {
		t.Run("model", func(t *testing.T) { followed(t, lanes, sent, end, raceChanges) })
	}
}

// newLane starts the instance of a lane.
func newLane(d *daemontest.Host, n int, rng *rand.Rand, relay bool, bring func(d *daemontest.Host, s instance.Spec, addr string)) *lane {
	d.T.Helper()
	s, addr := web(d.T, fmt.Sprintf("lane%d", n), relay)
	s.PauseAfter = daemontest.Seconds(100 * time.Millisecond)
	s.QuietConnectionAfter = *daemontest.Seconds(60 * time.Millisecond)
	l := &lane{d: d, name: s.Name, addr: addr, relay: relay, rng: rand.New(rand.NewPCG(rng.Uint64(), 2))}
	bring(d, s, addr)
	o := d.Show(s.Name)
	want := instance.PathDirect
	if relay {
		want = instance.PathRelay
	}
	if o.Endpoints[0].Path != want {
		d.T.Fatalf("the path is %+v, want %s", o.Endpoints[0], want)
	}
	for m := range l.aim {
		l.aim[m], l.step[m] = 4*time.Millisecond, 6*time.Millisecond
	}
	return l
}

// ways are the causes of the freeze.
var ways = []string{"deadline", "person", "standing"}

// lane is one instance that is paused repeatedly.
type lane struct {
	d          *daemontest.Host
	name, addr string
	rng        *rand.Rand
	aim, step  [3]time.Duration // time from the deadline to the freeze for each way, and the next change of it
	shots      []shot
	cycles     int

	relay   bool
	calls   sync.WaitGroup // calls in the background
	crashes []crash        // of the daemon
	mu      sync.Mutex     // guards seen and conns
	seen    []sighting
	conns   int
}

// shot is one connection, or one request on an open connection.
type shot struct {
	way      int
	deadline time.Time // when the pause was due
	from, to time.Time // beginning of the connect or write, and the answer
	end      time.Time // end of the cycle; later events belong to another one
}

// cycle causes one freeze and sends requests around it. It returns their number,
// and whether they woke the instance.
func (l *lane) cycle(ctx context.Context) (fired int, woke bool, _ error) {
	l.cycles++
	v, err := l.load(ctx, 3)
	defer v.close()
	if err != nil {
		return 0, false, err
	}
	shots, err := l.fire(v, func() time.Duration { return l.within(spread) })
	if err != nil {
		return 0, false, err
	}
	after, err := l.stable(ctx)
	if err != nil {
		return 0, false, err
	}
	woke = after.WakeCount > v.woken
	l.learn(v.way, woke)
	for n := range shots {
		shots[n].end = time.Now()
	}
	if l.cycles > learning {
		l.shots = append(l.shots, shots...)
	}
	return len(shots), woke, nil
}

// within returns a random duration between -d and d.
func (l *lane) within(d time.Duration) time.Duration {
	return time.Duration((l.rng.Float64()*2 - 1) * float64(d))
}

// volley is the set of requests around one freeze.
type volley struct {
	way      int
	deadline time.Time  // when the pause is due
	woken    uint64     // how often the instance was woken before
	clients  []*watched // nil for each client that connects only then
}

func (v *volley) close() {
	for _, c := range v.clients {
		if c != nil {
			c.Close()
		}
	}
}

// load causes a freeze in the near future, for a random number of clients up to most.
// The volley is never nil.
func (l *lane) load(ctx context.Context, most int) (v *volley, err error) {
	v = &volley{way: [...]int{0, 0, 1, 1, 1, 2, 2}[l.rng.IntN(7)], clients: make([]*watched, 1+l.rng.IntN(most))}
	if v.way == 2 {
		for n := range v.clients {
			if v.clients[n], err = l.dial(); err == nil {
				err = v.clients[n].echo("before")
			}
			if err != nil {
				return v, err
			}
		}
	}
	v.deadline, v.woken, err = l.provoke(ctx, v.way)
	return v, err
}

// fire sends the requests of a volley and waits for the answers. after returns how
// long after the expected freeze a request is sent.
func (l *lane) fire(v *volley, after func() time.Duration) ([]shot, error) {
	shots, errs := make([]shot, len(v.clients)), make([]error, len(v.clients))
	var wg sync.WaitGroup
	for n := range shots {
		at := v.deadline.Add(l.aim[v.way] + after())
		wg.Go(func() {
			until(at)
			s := shot{way: v.way, deadline: v.deadline, from: time.Now()}
			c := v.clients[n]
			if c == nil {
				if c, errs[n] = l.dial(); errs[n] != nil {
					return
				}
				defer c.Close()
			}
			errs[n] = c.echo(fmt.Sprintf("shot %d", n))
			s.to = time.Now()
			shots[n] = s
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, fmt.Errorf("lost, way %s: %w", ways[v.way], err)
		}
	}
	return shots, nil
}

// learn adjusts the aim of a way so that about half of the requests meet a frozen
// program. The steps shrink with each change of direction.
func (l *lane) learn(way int, woke bool) {
	dir := time.Duration(1)
	if woke {
		dir = -1
	}
	// Aim for two thirds of the cycles with a wake, because several requests
	// share one wake.
	if !woke {
		l.aim[way] += 200 * time.Microsecond
	}
	if step := l.step[way]; dir*step < 0 {
		l.step[way] = -step / 2
	}
	if s := l.step[way]; s < 100*time.Microsecond && s > -100*time.Microsecond {
		l.step[way] = dir * 100 * time.Microsecond
	}
	l.aim[way] = min(max(l.aim[way]+l.step[way], -spread), 100*time.Millisecond)
}

// quickDisk returns a directory in memory if possible. On a fast disk the freezes
// happen closer to the expected time, so more requests arrive in the middle of
// one.
func quickDisk() string {
	if st, err := os.Stat("/dev/shm"); err == nil && st.IsDir() {
		return "/dev/shm"
	}
	return ""
}

// provoke causes a pause. It returns when the pause is due, and how often the
// instance has been woken so far.
func (l *lane) provoke(ctx context.Context, way int) (at time.Time, woken uint64, err error) {
	if way != 1 {
		for end := time.Now().Add(daemontest.WaitLimit); time.Now().Before(end); {
			o, err := l.d.Get(ctx, l.name)
			if err != nil {
				return at, 0, err
			}
			if o.State == "paused" { // paused too early: wake it and wait for the next pause
				if err := l.do(ctx, "resume", verbResume); err != nil && refused(err) == "" {
					return at, 0, err
				}
			} else if p := o.PauseAt; p != nil && time.Until(*p) > 2*time.Millisecond {
				return *p, o.WakeCount, nil
			}
			time.Sleep(5 * time.Millisecond)
		}
		return at, 0, fmt.Errorf("no pause is announced within %s", daemontest.WaitLimit)
	}
	if err := l.do(ctx, "resume", verbResume); err != nil {
		return at, 0, err
	}
	o, err := l.d.Get(ctx, l.name)
	if err != nil {
		return at, 0, err
	}
	at = time.Now().Add(3 * time.Millisecond)
	l.calls.Go(func() { // the result does not matter, because a client may have been faster
		until(at)
		_ = l.do(ctx, "pause", verbPause)
	})
	return at, o.WakeCount, nil
}

// stable waits until the instance is at rest, and returns it.
func (l *lane) stable(ctx context.Context) (o hostctl.Instance, err error) {
	if !waittest.Within(waittest.Timeout, func() bool {
		o, err = l.d.Get(ctx, l.name)
		return err != nil || o.State == "running" || o.State == "paused"
	}) {
		err = fmt.Errorf("it stays %s", o.State)
	}
	return o, err
}

// until waits until at. It sleeps for most of the time and spins for the rest,
// for microsecond accuracy.
func until(at time.Time) {
	time.Sleep(time.Until(at) - 200*time.Microsecond) // outside a bubble: at is a real time
	for time.Now().Before(at) {
	}
}

// eventLog collects the events of each instance.
type eventLog struct {
	mu     sync.Mutex
	by     map[string][]hostctl.Event
	halted bool
}

func follow(d *daemontest.Host) *eventLog {
	g := &eventLog{by: map[string][]hostctl.Event{}}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = d.Follow(ctx, "", func(string) {}, func(e hostctl.Event) error {
			g.mu.Lock()
			g.by[e.Instance] = append(g.by[e.Instance], e)
			g.halted = g.halted || e.Type == "halt"
			g.mu.Unlock()
			return nil
		})
	})
	d.T.Cleanup(func() { cancel(); wg.Wait() })
	return g
}

// waitStable waits until every event so far has arrived, and returns the events.
// A transition in progress may add more.
func (g *eventLog) waitStable(t *testing.T, d *daemontest.Host) map[string][]hostctl.Event {
	t.Helper()
	errtest.Get(d.Halt(t.Context(), hostctl.Halting{On: true}))(t)
	daemontest.Wait(t, "the event of the halt arrives", func() (bool, string) {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.halted, fmt.Sprintf("events of %d instances", len(g.by))
	})
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.by)
}

// met returns whether a shot met a running program, one that was being frozen, or
// a frozen one. It also returns the sequence number of the event that shows it, 0
// for a running program.
func met(s shot, events []hostctl.Event) (string, uint64) {
	for _, e := range events {
		if e.Time.Before(s.from) || e.Time.After(s.end) {
			continue
		}
		switch e.Type {
		case "resumed":
			return "frozen", e.Seq
		case "pause_cancelled":
			if s.from.Before(s.deadline) {
				return "running", 0
			}
			return "freezing", e.Seq
		}
	}
	return "running", 0
}

func report(t *testing.T, lanes []*lane, events map[string][]hostctl.Event, freezer string, took time.Duration) {
	t.Helper()
	counts, wakes, cycles, shots := map[string]int{}, map[uint64]bool{}, 0, 0
	var worst time.Duration
	aim := [3]time.Duration{}
	for _, l := range lanes {
		cycles += l.cycles
		shots += len(l.shots)
		for _, s := range l.shots {
			m, seq := met(s, events[l.name])
			counts[m]++
			if m == "frozen" {
				wakes[seq] = true // several shots may share a wake
			}
			worst = max(worst, s.to.Sub(s.from))
		}
		for w := range aim {
			aim[w] += l.aim[w] / time.Duration(len(lanes))
		}
	}
	t.Logf("REPORT race: %d connections at %d pauses, freezer %q: met running %d, freezing %d, frozen %d; %d woke it; lost 0, left frozen 0; "+
		"slowest answer %s; aimed at %s after the deadline, %s after a request, %s after the deadline with standing connections; took %s",
		shots, cycles, freezer, counts["running"], counts["freezing"], counts["frozen"], len(wakes), worst, aim[0], aim[1], aim[2], took)
	if counts["running"] == 0 || counts["frozen"] == 0 {
		t.Errorf("met %v: want all of running and frozen", counts)
	}
}
