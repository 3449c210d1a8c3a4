package servertest

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"

	"lull/internal/agent"
	"lull/internal/controller"
	"lull/internal/controller/ec2cloud"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/lib/memnet"
	"lull/internal/lib/wall"
	"lull/internal/platform/ec2"
	"lull/internal/platform/proc"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/sim"
	"lull/internal/sim/world"
	"lull/internal/store/mem"
)

const region = "us-east-1"

var operator = audit.Actor{Name: "anna", Kind: audit.KindUser}

// rig is one machine with its agent, and a server.
type rig struct {
	t     *testing.T
	sim   *sim.Server
	fleet *fleet.Fleet
	ctl   *controller.Controller
	id    string // EC2 instance ID
	w     string // worker ID
	agent *agent.Agent
	own   *kept           // the agent's evidence
	told  *kept           // the server's evidence
	asks  *control.Client // a user's client

	mu     sync.Mutex
	busy   map[string]bool // signals in use
	broken map[string]bool
	cml    worker.Telemetry // CML's telemetry; its times are set when it is read
	used   bool             // CML reports use
	cut    bool             // the agent cannot reach the server
	waits  func()           // ends the agent's call that waits for a halt
	skew   time.Duration    // error of the agent's clock
	warned []agent.Warning
	hooks  []string
	hook   func() agentctl.Hook
	calls  []string // calls of the agent to the cloud
	stops  []string // stops that the controller sent
	files  map[string][]byte
	config string
	end    func()
	reboot func() // ends the agent and starts a new one with the same state
}

func (r *rig) with(f func()) { r.mu.Lock(); defer r.mu.Unlock(); f() }

// The parts of the agent that belong to the machine.

func (r *rig) Read(now time.Time, _ proc.Limits, into []idle.Reading) []idle.Reading {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range []string{proc.SignalCPU, proc.SignalNetwork} {
		switch {
		case r.broken[s]:
			into = append(into, idle.NotKnown(s, now, "broken for the test"))
		case r.busy[s]:
			into = append(into, idle.Judge(s, 50, 5, "%", time.Minute, now))
		default:
			into = append(into, idle.Judge(s, 0, 5, "%", time.Minute, now))
		}
	}
	return into
}

func (r *rig) Reset() {}

func (r *rig) Load(name string) ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if b, ok := r.files[name]; ok {
		return b, nil
	}
	return nil, fs.ErrNotExist
}

func (r *rig) Save(name string, b []byte) error {
	r.with(func() { r.files[name] = slices.Clone(b) })
	return nil
}

func (r *rig) Config() ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return []byte(r.config), nil
}

func (r *rig) Completed(string) (time.Time, error) { return time.Time{}, nil }

func (r *rig) Withdraw(context.Context, agent.Withdrawal) error { return nil }

func (r *rig) Warn(_ context.Context, w agent.Warning) error {
	r.with(func() { r.warned = append(r.warned, w) })
	return nil
}

func (r *rig) Run(_ context.Context, h agent.HookSpec) agentctl.Hook {
	r.mu.Lock()
	r.hooks = append(r.hooks, strings.Join(h.Env, " "))
	f := r.hook
	r.mu.Unlock()
	if f == nil {
		return agentctl.Hook{Command: h.Command}
	}
	return f()
}

// instance is the agent's Cloud: the SDK against the simulator.
type instance struct {
	agent.EC2
	r *rig
}

func (i instance) Stop(ctx context.Context, hibernate bool) (string, error) {
	i.r.with(func() { i.r.calls = append(i.r.calls, "stop") })
	return i.EC2.Stop(ctx, hibernate)
}

// reporter is the agent's connection to the server, which the test can cut.
type reporter struct {
	r  *rig
	cl *control.Client
}

func (p reporter) Report(ctx context.Context, x control.AgentReport) (control.AgentAnswer, error) {
	p.r.mu.Lock()
	cut := p.r.cut
	p.r.mu.Unlock()
	if cut {
		return control.AgentAnswer{}, errors.New("cannot report to the server: cut for the test")
	}
	return p.cl.Report(ctx, p.r.id, x)
}

// AwaitHalt implements agent.HaltFollower. Cutting the connection also ends a call in
// progress.
func (p reporter) AwaitHalt(ctx context.Context, t control.HaltTurn) (control.HaltAnswer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p.r.mu.Lock()
	cut := p.r.cut
	p.r.waits = cancel
	p.r.mu.Unlock()
	if cut {
		return control.HaltAnswer{}, errors.New("cannot ask the server: cut for the test")
	}
	return p.cl.AwaitAgentHalt(ctx, p.r.id, t)
}

// counted records the stops that the controller sends.
type counted struct {
	controller.Mover
	r *rig
}

func (c counted) Stop(ctx context.Context, id string, hibernate bool) (controller.Stopped, error) {
	c.r.with(func() { c.r.stops = append(c.r.stops, "stop") })
	return c.Mover.Stop(ctx, id, hibernate)
}

// console is a CML that reports no use unless the test changes that.
type console struct{ r *rig }

func (c console) Telemetry(context.Context, json.RawMessage) worker.Telemetry {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	t := c.r.cml
	t.CheckedAt = time.Now()
	if c.r.used {
		t.Newest = t.CheckedAt
	}
	return t
}

func (c console) System(context.Context) (controller.System, error) {
	return controller.System{Version: "2.9.0", Ready: true}, nil
}
func (c console) RunningLabs(context.Context) (int, error) { return 0, nil }

// options configure a run.
type options struct {
	holder   string
	sources  []string
	config   string // additional settings of the agent
	settings map[string]any
	skew     time.Duration
	unarmed  bool
	unknown  bool // the fleet has no worker for the machine
}

// run runs body in a bubble with a rig whose machine is running and idle.
func run(t *testing.T, o options, body func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := start(t, o)
		body(r)
		r.end()
	})
}

func start(t *testing.T, o options) *rig {
	r := &rig{t: t, own: newKept(t), told: newKept(t), busy: map[string]bool{}, broken: map[string]bool{}, files: map[string][]byte{}, skew: o.skew,
		config: "idle-timeout: 20m\nwarn-before: 2m\nsnooze: 0s\nboot-grace: 0s\n" + o.config}
	r.sim = errtest.Get(sim.New(sim.Options{Scenario: world.Config{Regions: []world.RegionConfig{{Name: region}},
		Workers: []world.WorkerConfig{{Name: "m", Region: region, Image: "ami-0000000000000d012"}}}}))(t)
	r.sim.World.Locate("m", func(i *world.Instance, now world.Moment) { r.id, i.Launched = i.ID, now.Wire })
	network := &memnet.Network{}
	serve := func(h http.Handler, addr string) (*http.Client, func()) {
		l := errtest.Get(network.Listen(addr))(t)
		srv := &http.Server{Handler: h}
		ended := make(chan struct{})
		go func() { defer close(ended); srv.Serve(l) }()
		tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return network.DialContext(ctx, "tcp", "127.0.0.1"+addr)
		}}
		return &http.Client{Transport: tr}, func() { tr.CloseIdleConnections(); srv.Close(); <-ended }
	}
	aws1, endCloud := serve(r.sim.Handler(), ":80")
	client := func() *ec2.Client {
		return ec2.New(aws.Config{Region: region, HTTPClient: aws1, Credentials: credentials.NewStaticCredentialsProvider("AKIASIM", "secret", "")}, "http://cloud", ec2.Limits{})
	}

	db := mem.New(mem.Options{}).Client()
	set := map[string]any{"worker_idle_timeout_minutes": 30, "worker_auto_pause_snooze_minutes": 0, "discovery_import": "off"}
	for k, v := range o.settings {
		set[k] = v
	}
	r.fleet = errtest.Get(fleet.New(fleet.Options{Store: db, ID: "fleet-1", File: settings.Layer{Values: set}}))(t)
	if !o.unknown {
		n := fleet.ImportedWorker{Name: "m", AWSRegion: region, EC2InstanceID: r.id}
		n.PauseHolder, n.ActivitySources, n.AcceptedRisks = &o.holder, o.sources, []string{worker.RiskNoElasticIP}
		r.w = errtest.Get(r.fleet.ImportWorker(t.Context(), operator, n))(t).ID
		if !o.unarmed {
			errtest.Get(r.fleet.ArmWorker(t.Context(), operator, r.w, true))(t)
		}
	}
	cc := ec2cloud.Region(client(), nil, nil)
	cc.Move = counted{cc.Move, r}
	r.ctl = errtest.Get(controller.New(controller.Config{Fleet: r.fleet, Server: "one",
		Clouds:   func(string, string) (controller.Cloud, error) { return cc, nil },
		Consoles: func(worker.Worker) (controller.Console, error) { return console{r}, nil }}))(t)
	tokens := access.New(db)
	_, token, err := tokens.Create(t.Context(), access.Wanted{Name: "a", Role: access.Agent, Machine: r.id})
	if err != nil {
		t.Fatal(err)
	}
	admin := errtest.Get(tokens.First(t.Context()))(t)
	api := errtest.Get(server.New(server.Options{Fleet: r.fleet, Tokens: tokens, Version: "v1.2.0", Live: owner{r.ctl}, Record: r.told.Take, Evidence: r.told}))(t)
	web, endAPI := serve(api.Handler(), ":7070")
	r.asks = errtest.Get(control.NewClient("http://server:7070", admin, web))(t)

	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, f := range []func(context.Context) error{r.ctl.Run, api.Run} {
		wg.Go(func() {
			if err := f(ctx); err != nil {
				t.Errorf("it ended with %v", err)
			}
		})
	}
	<-api.Ready()
	<-r.ctl.Ready()
	time.Sleep(2 * time.Minute) // until the worker has been observed
	stopAgent := func() {}
	r.reboot = func() {
		stopAgent()
		stopAgent = r.boot(agent.Options{Cloud: instance{agent.EC2{Client: client(), ID: r.id}, r}, Reporter: reporter{r, errtest.Get(control.NewClient("http://server:7070", token, web))(t)}})
	}
	r.reboot()
	r.end = func() {
		stopAgent()
		cancel()
		wg.Wait()
		endAPI()
		endCloud()
		db.Close()
	}
	return r
}

// boot starts an agent on the machine.
func (r *rig) boot(o agent.Options) (stop func()) {
	o.Version, o.InstanceID, o.Region, o.BootID = "v1.1.0", r.id, region, "boot-1"
	o.Cheap, o.Warner, o.Hooks, o.Disk, o.Journal, o.Evidence = r, r, r, r, &agent.MemoryJournal{}, r.own
	epoch := time.Now().Add(-time.Hour)
	o.Clocks = func() wall.Reading {
		r.mu.Lock()
		defer r.mu.Unlock()
		up := time.Since(epoch)
		return wall.Reading{Boot: up, Mono: up, Wall: time.Now().Add(r.skew).Round(0)}
	}
	a, err := agent.New(o)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	<-a.Ready()
	r.agent = a
	return sync.OnceFunc(func() { cancel(); <-ended })
}

// owner adapts the controller to server.Live.
type owner struct{ c *controller.Controller }

func (o owner) Observation(_ context.Context, id string) (control.Observation, bool) {
	l, ok := o.c.Live(id)
	return control.Observation{Status: l.Idle, Agent: l.Agent}, ok
}

func (o owner) Report(_ context.Context, id string, x control.AgentReport) bool {
	return o.c.Report(id, x)
}

// pass advances the time by d.
func pass(d time.Duration) { time.Sleep(d) }

func (o owner) Verdicts(context.Context) map[string]worker.IdleStatus { return nil }

// wait lets d pass and then synchronizes with the rig.
func (r *rig) wait(d time.Duration) {
	r.with(func() {}) // orders everything that the test reads afterwards after this
	time.Sleep(d)
	synctest.Wait()
}

// until polls ok once a minute until it returns true, and returns how long that took.
// It fails the test after most.
func (r *rig) until(what string, most time.Duration, ok func() bool) time.Duration {
	r.t.Helper()
	begun := time.Now()
	for !ok() {
		if time.Since(begun) > most {
			r.t.Fatalf("%s did not happen within %s: %s", what, most, r.say())
		}
		r.wait(time.Minute)
	}
	return time.Since(begun)
}

func (r *rig) worker() worker.Worker {
	r.t.Helper()
	return errtest.Get(r.fleet.Worker(r.t.Context(), r.w))(r.t)
}

func (r *rig) stopped() bool { return r.worker().Status == power.WorkerStopped }

func (r *rig) status() agentctl.Status {
	r.t.Helper()
	return errtest.Get(r.agent.Status(r.t.Context()))(r.t)
}

// stays checks that the machine keeps running for d.
func (r *rig) stays(d time.Duration) {
	r.t.Helper()
	r.wait(d)
	if w := r.worker(); w.Status != power.WorkerRunning || len(r.calls)+len(r.stops) != 0 {
		r.t.Fatalf("it was paused: %s", r.say())
	}
}

// acted checks who stopped the machine, and that the record says so.
func (r *rig) acted(by string) {
	r.t.Helper()
	w := r.worker()
	agentCalls, serverCalls := 1, 0
	if by != worker.HolderAgent {
		agentCalls, serverCalls = 0, 1
	}
	if w.Status != power.WorkerStopped || w.PauseReason != power.ReasonIdleTimeout || w.LastPausedBy != by || w.AutoPauseCount != 1 || w.ExternalPauseCount != 0 ||
		len(r.calls) != agentCalls || len(r.stops) != serverCalls {
		r.t.Errorf("want a stop by %s, counted once: %s", by, r.say())
	}
}

func (r *rig) say() string {
	w := r.worker()
	s := r.status()
	b, err := json.Marshal(map[string]any{"status": w.Status, "reason": w.StatusReason, "intent": w.Intent, "pause_reason": w.PauseReason, "by": w.LastPausedBy, "auto": w.AutoPauseCount,
		"external": w.ExternalPauseCount, "agent calls": r.calls, "stops": r.stops, "agent blocks": s.Verdict.Blocks, "last": s.Last, "link": s.Server, "alarms": s.Alarms, "idle": r.idle().Blocks})
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// idle returns the server's idle status of the worker.
func (r *rig) idle() worker.IdleStatus {
	l, _ := r.ctl.Live(r.w)
	if l.Idle == nil {
		return worker.IdleStatus{}
	}
	return *l.Idle
}

func (r *rig) tag(name string) (v string) {
	r.sim.World.Locate(r.id, func(i *world.Instance, _ world.Moment) { v, _ = i.Tags.Get("lull:" + name) })
	return v
}

func (r *rig) audited(action string) bool {
	p := errtest.Get(r.fleet.Audit(r.t.Context(), audit.Query{WorkerID: r.w, Limit: 1000}))(r.t)
	return slices.ContainsFunc(p.Entries, func(e audit.Entry) bool { return e.Action == action })
}
