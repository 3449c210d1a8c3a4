package controller

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// dayParams configures one simulated day.
type dayParams struct {
	seed    uint64
	workers int
	servers int
	hours   int
	faults  bool // inject faults of the cloud and the store
	crashes bool // kill servers
	// commands enables random commands by users and schedules at any time,
	// scale-down, and a floor of minWorkers.
	commands   bool
	minWorkers int
}

func (p dayParams) settings() map[string]any {
	if !p.commands {
		return nil
	}
	return map[string]any{"scale_down_enabled": p.seed%2 == 0, "min_workers": p.minWorkers, "scale_down_cooldown_seconds": 120, "drain_timeout_seconds": 300}
}

// day is a simulated fleet with users, and an oracle that knows when workers are in
// use.
type day struct {
	*rig
	p      dayParams
	rng    *rand.Rand
	client *mem.Client
	ids    []string
	users  map[string]*user
	begun  time.Time
	calm   atomic.Bool // no more faults are injected

	mu      sync.Mutex
	faults  []string
	servers []*server
	checked int // stops that the oracle checked
	failed  int // workers that ended FAILED
}

type server struct {
	client *mem.Client
	c      *Controller
	cancel context.CancelFunc
	done   chan error
	downTo time.Time
}

// user is the user of one worker, and what the oracle knows about it.
type user struct {
	session time.Time // the user works until then
	nextAct time.Time
	since   time.Time // since when, by the oracle, the worker may be paused
	outage  time.Time // telemetry is unavailable until then
	gone    bool
}

func (d *day) fault(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.faults) < 20 {
		d.faults = append(d.faults, fmt.Sprintf("%s: ", time.Since(d.begun))+fmt.Sprintf(format, args...))
	}
}

// serve starts or restarts server i.
func (d *day) serve(i int) {
	s := d.servers[i]
	s.client = d.db.Client()
	if d.p.commands && !d.p.faults {
		s.client.Inject(func(c mem.Call) mem.Fault { d.floor(c.Txn); return mem.Fault{} })
	}
	if d.p.faults {
		rng, mu := rand.New(rand.NewPCG(d.p.seed, uint64(i)+100)), sync.Mutex{}
		s.client.Inject(func(c mem.Call) mem.Fault {
			d.floor(c.Txn)
			if d.calm.Load() {
				return mem.Fault{}
			}
			mu.Lock()
			defer mu.Unlock()
			switch n := rng.IntN(1000); {
			case n < 10 && c.Kind == mem.Commit:
				return mem.Fault{LoseAnswer: true, Late: time.Duration(rng.IntN(3)) * time.Second}
			case n < 15 && c.Kind != mem.Watch:
				return mem.Fault{Err: fmt.Errorf("cannot reach the store: %w", store.ErrUnavailable)}
			case n < 40:
				return mem.Fault{Latency: time.Duration(rng.IntN(2000)) * time.Millisecond}
			}
			return mem.Fault{}
		})
	}
	f, err := fleet.New(fleet.Options{Store: s.client, ID: "fleet-1", File: settings.Layer{Values: d.settingsOf(options{settings: d.p.settings()})}})
	if err != nil {
		panic(err)
	}
	s.c, err = New(Config{
		Fleet: f, Server: "server-" + strconv.Itoa(i),
		Clouds:   func(string, string) (Cloud, error) { return d.world.cloud(), nil },
		Consoles: d.world.console,
	})
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel, s.done = cancel, make(chan error, 1)
	go func() { s.done <- s.c.Run(ctx) }()
}

// kill ends a server without a shutdown. Its store is cut off first, so no lease is
// revoked.
func (d *day) kill(i int, down time.Duration) {
	s := d.servers[i]
	s.client.Close()
	s.cancel()
	<-s.done
	s.downTo = time.Now().Add(down)
	s.c = nil
}

// step simulates half a minute of the whole fleet.
func (d *day) step() {
	ctx := context.Background()
	for i, id := range d.ids {
		w, err := d.fleet.Worker(ctx, id)
		if err != nil {
			d.fault("cannot read %s: %v", id, err)
			continue
		}
		d.live(ctx, d.users[id], &w, i)
		if d.p.commands {
			d.command(ctx, id)
		} else {
			d.judge(d.users[id], &w)
		}
	}
	if d.p.crashes && !d.calm.Load() {
		for i, s := range d.servers {
			switch {
			case s.c == nil && time.Now().After(s.downTo):
				d.serve(i)
			case s.c != nil && d.rng.IntN(600) == 0:
				d.kill(i, time.Duration(d.rng.IntN(120))*time.Second)
			}
		}
	}
}

// live simulates half a minute of a worker's user and environment.
func (d *day) live(ctx context.Context, u *user, w *worker.Worker, i int) {
	now := time.Now()
	if w.EC2InstanceID == "" {
		return
	}
	if now.After(u.session) && !u.gone && d.rng.IntN(500) == 0 {
		u.session = now.Add(time.Duration(20+d.rng.IntN(200)) * time.Minute)
	}
	working := now.Before(u.session)
	if working && (w.Status == power.WorkerStopped || w.Status == power.WorkerStopping) && w.DesiredStatus == power.WorkerStopped {
		if _, err := d.fleet.ResumeWorker(ctx, operator, w.ID); err != nil {
			if _, refused := errors.AsType[*failure.Refused](err); !refused {
				d.fault("cannot resume %s: %v", w.ID, err)
			}
		}
	}
	d.world.mu.Lock()
	defer d.world.mu.Unlock()
	m := d.world.insts[w.EC2InstanceID]
	d.world.advance(m)
	if working && m.State == "running" && !now.Before(u.nextAct) {
		e := cmlEvent{at: now, arrives: now}
		switch n := d.rng.IntN(100); {
		case n < 3:
			e.arrives = now.Add(time.Duration(d.rng.IntN(20)) * time.Minute) // reported late
		case n < 5 && len(m.events) > 0:
			e.at = m.events[len(m.events)-1].at // a duplicate, out of order
		}
		m.events = append(m.events, e)
		u.nextAct = now.Add(time.Duration(30+d.rng.IntN(1500)) * time.Second)
	}
	if d.calm.Load() {
		m.down = false
		return
	}
	if d.rng.IntN(2000) == 0 {
		u.outage = now.Add(time.Duration(d.rng.IntN(90)) * time.Minute)
	}
	m.down = now.Before(u.outage)
	switch d.rng.IntN(4000) {
	case 0:
		d.world.stop(m.ID, CauseUser) // stopped in the AWS console
	case 1:
		d.world.stop(m.ID, CauseServer)
	case 2:
		if m.State == "stopped" {
			d.world.start(m.ID)
		}
	}
}

// command gives a random command; it may be refused.
func (d *day) command(ctx context.Context, id string) {
	n := d.rng.IntN(900)
	if d.calm.Load() {
		return
	}
	var err error
	switch n {
	case 0:
		_, err = d.fleet.StopWorker(ctx, operator, id)
	case 1:
		_, err = d.fleet.DrainWorker(ctx, operator, id)
	case 2:
		_, err = d.fleet.CancelDrain(ctx, operator, id)
	case 3, 4, 5:
		_, err = d.fleet.ResumeWorker(ctx, operator, id)
	case 6:
		_, err = d.fleet.ResumeWorker(ctx, audit.Actor{Name: "calendar", Kind: audit.KindSchedule}, id)
	case 7:
		if d.rng.IntN(10) == 0 {
			_, err = d.fleet.TerminateWorker(ctx, operator, id)
		}
	case 8:
		_, err = d.fleet.RetryWorker(ctx, operator, id)
	case 9:
		_, err = d.fleet.SnoozeWorker(ctx, operator, id, time.Now().Add(time.Hour))
	case 10:
		_, err = d.fleet.ArmWorker(ctx, operator, id, d.rng.IntN(4) > 0)
	case 11:
		if d.rng.IntN(20) == 0 {
			_, err = d.fleet.SetHalt(ctx, operator, halt.Request{On: true})
		}
	case 12:
		_, err = d.fleet.SetHalt(ctx, operator, halt.Request{})
	case 13:
		_, err = d.fleet.PauseWorker(ctx, audit.Actor{Name: "calendar", Kind: audit.KindSchedule}, id, worker.Pause{Reason: power.ReasonSchedule})
	case 14:
		_, err = d.fleet.RegisterLicense(ctx, operator, id, "env:TOKEN", false)
	case 15:
		at := time.Now().Add(time.Duration(d.rng.IntN(120)) * time.Minute)
		_, err = d.fleet.UpdateWorker(ctx, operator, id, 0, worker.Profile{TTLDeadline: &at})
	case 16:
		_, err = d.fleet.UpdateWorker(ctx, operator, id, 0, worker.Profile{TTLDeadline: &time.Time{}})
	}
	if _, refused := errors.AsType[*failure.Refused](err); err != nil && !refused {
		if _, busy := errors.AsType[*failure.Conflict](err); !busy {
			d.fault("command %d on %s: %v", n, id, err)
		}
	}
}

// runDay simulates a day and returns the faults that the oracle found.
func runDay(t *testing.T, p dayParams) (faults []string, report string) {
	d := &day{
		rig: &rig{t: t, db: mem.New(mem.Options{KeepRevisions: 2000}), world: newWorld(p.seed)}, p: p,
		rng: rand.New(rand.NewPCG(p.seed, 7)), users: map[string]*user{}, begun: time.Now(),
	}
	d.client = d.db.Client()
	defer d.client.Close()
	f, err := fleet.New(fleet.Options{Store: d.client, ID: "fleet-1", File: settings.Layer{Values: d.settingsOf(options{})}})
	if err != nil {
		return []string{err.Error()}, ""
	}
	d.fleet = f
	ctx := context.Background()
	if _, err := f.PutTemplate(ctx, operator, launch.Template{Name: "small", InstanceType: "t3.small", AMINameFilter: "cml*", Enabled: true}, 0); err != nil {
		return []string{err.Error()}, ""
	}
	d.world.onStop = d.onStop
	d.world.latency = 80 * time.Millisecond
	if p.faults {
		rng, mu := rand.New(rand.NewPCG(p.seed, 9)), sync.Mutex{}
		d.world.fault = func(call string) (time.Duration, error, bool) {
			if d.calm.Load() {
				return 0, nil, false
			}
			mu.Lock()
			defer mu.Unlock()
			switch n := rng.IntN(200); {
			case n < 4:
				return 0, callErr(Throttled), false
			case n < 6:
				return time.Second, callErr(Unreachable), true // the call has its effect, but the answer is lost
			case n < 8:
				return 5 * time.Second, callErr(Unreachable), false
			case n == 8 && (call == "run" || call == "start"):
				return 0, callErr(Capacity), false
			}
			return 0, nil, false
		}
	}
	for range p.servers {
		d.servers = append(d.servers, &server{})
	}
	for i := range d.servers {
		d.serve(i)
	}
	for i := range p.workers {
		w, err := f.CreateWorker(ctx, operator, fleet.NewWorker{Name: fmt.Sprintf("n%d", i), AWSRegion: region0, TemplateName: "small"})
		if err != nil {
			return []string{err.Error()}, ""
		}
		d.ids = append(d.ids, w.ID)
		d.users[w.ID] = &user{gone: d.rng.IntN(5) == 0, session: time.Now().Add(time.Duration(d.rng.IntN(120)) * time.Minute)}
	}
	time.Sleep(5 * time.Minute)
	for i, id := range d.ids {
		if w, err := f.Worker(ctx, id); err == nil && w.EC2InstanceID != "" {
			d.world.mu.Lock()
			m := d.world.insts[w.EC2InstanceID]
			m.optOut = i%23 == 0
			if i%3 == 0 {
				m.skew = time.Duration(d.rng.IntN(7200)-3600) * time.Second
			}
			d.world.mu.Unlock()
		}
	}
	for time.Since(d.begun) < time.Duration(p.hours)*time.Hour {
		time.Sleep(30 * time.Second)
		d.step()
	}
	d.calm.Store(true)
	for i, s := range d.servers {
		if s.c == nil {
			d.serve(i)
		}
	}
	for range 60 {
		time.Sleep(30 * time.Second)
		d.step()
	}
	d.finish(ctx)
	d.audit(ctx)
	for _, s := range d.servers {
		s.cancel()
		if err := <-s.done; err != nil {
			d.fault("Run: %v", err)
		}
		s.client.Close()
	}
	return d.faults, d.report()
}

// baseSeed returns LULL_SEED if set, and otherwise a random seed.
func baseSeed(t *testing.T) uint64 {
	seed := rand.Uint64()
	if s := os.Getenv("LULL_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		seed = n
	}
	t.Logf("LULL_SEED=%d repeats this", seed)
	return seed
}

func TestDays(t *testing.T) {
	days := []dayParams{
		{workers: 50, servers: 1, hours: 24},
		{workers: 30, servers: 1, hours: 24, faults: true},
		{workers: 30, servers: 3, hours: 24, faults: true, crashes: true},
		{workers: 30, servers: 3, hours: 24, faults: true, crashes: true, commands: true, minWorkers: 10},
	}
	if testing.Short() {
		days = days[:1]
	}
	seed := baseSeed(t)
	// LULL_DAYS sets the number of days of each kind, and enlarges the fleet.
	if n, err := strconv.Atoi(os.Getenv("LULL_DAYS")); err == nil && n > 0 {
		days[0].workers = 300
		days = slices.Repeat(days, n)
	}
	for i, p := range days {
		p.seed = seed + uint64(i)
		t.Run(fmt.Sprintf("servers=%d,faults=%t,crashes=%t,commands=%t", p.servers, p.faults, p.crashes, p.commands), func(t *testing.T) {
			var faults []string
			var report string
			synctest.Test(t, func(t *testing.T) { faults, report = runDay(t, p) })
			t.Log(report)
			for _, f := range faults {
				t.Error(f)
			}
		})
	}
}
