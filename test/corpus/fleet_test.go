package corpus

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/credentials"

	"lull/internal/controller"
	"lull/internal/controller/cmlconsole"
	"lull/internal/controller/ec2cloud"
	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/memnet"
	"lull/internal/platform/cml"
	"lull/internal/platform/ec2"
	"lull/internal/sim"
	"lull/internal/sim/truth"
	"lull/internal/sim/world"
	"lull/internal/store/mem"
)

// fleetRegion and fleetAccount are where the simulated workers are.
const (
	fleetRegion  = "us-east-1"
	fleetAccount = "111122223333"
	fleetTimeout = time.Hour // worker_idle_timeout_minutes
	fleetSnooze  = time.Hour // worker_auto_pause_snooze_minutes
	// early is how long before work a user starts a worker, because EC2 and CML
	// take a while to boot.
	early = 8 * time.Minute
)

var ada = audit.Actor{Name: "ada", Kind: audit.KindUser}

// estate is a fleet of one worker per day: a controller with its own clients
// over the simulated EC2, CloudWatch and CML, which answer HTTP.
type estate struct {
	t       *testing.T
	days    []*trace
	sim     *sim.Server
	fleet   *fleet.Fleet
	ids     []string // of the workers, in the order of the days
	ec2     []string // of the workers' EC2 instances
	mu      sync.Mutex
	journal map[string][]evidence.Decision
}

// slug returns the name of the worker that the day is replayed on.
func (t *trace) slug() string {
	return strings.NewReplacer(" ", "-", "'", "").Replace(t.name)
}

func scenarioOf(days []*trace) world.Config {
	c := world.Config{Seed: 1, Regions: []world.RegionConfig{{Name: fleetRegion}}, Timing: world.Timing{Background: world.Duration(15 * time.Minute)},
		Profiles: map[string]world.Profile{}}
	for n, d := range days {
		rng := rand.New(rand.NewPCG(uint64(n), 5))
		offset := time.Duration(rng.Int64N(int64(4*time.Minute))) - 2*time.Minute
		c.Profiles[d.slug()] = world.Profile{Labs: 3, History: 30, HistoryAge: world.Duration(26 * time.Hour), ClockOffset: world.Duration(offset),
			Spoil: world.Spoil{Late: 0.1, LateBy: world.Duration(30 * time.Second), Duplicate: 0.02, Reorder: 0.02}}
		c.Workers = append(c.Workers, world.WorkerConfig{Name: d.slug(), Type: "t3.small", Profile: d.slug(), Up: world.Duration(time.Minute)})
	}
	return c
}

// onFleet replays days of workers, all at the same time, with the default
// settings of lull server.
func onFleet(t *testing.T, days []*trace) []replayed {
	t.Setenv("AWS_ENDPOINT_URL", "http://cloud")
	e := &estate{t: t, days: days, journal: map[string][]evidence.Decision{}}
	var out []replayed
	synctest.Test(t, func(t *testing.T) {
		end, err := e.start()
		if err != nil {
			t.Fatal(err)
		}
		e.live()
		out = e.results()
		end()
	})
	return out
}

// start serves the simulator, starts a controller, and adopts every worker.
func (e *estate) start() (end func(), err error) {
	if e.sim, err = sim.New(sim.Options{Scenario: scenarioOf(e.days)}); err != nil {
		return nil, err
	}
	var network memnet.Network
	l, err := network.Listen(":80")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	srv := &http.Server{BaseContext: func(net.Listener) context.Context { return ctx }, Handler: e.sim.Handler()}
	go srv.Serve(l)
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return network.DialContext(ctx, "tcp", "cloud:80")
	}}}
	db := mem.New(mem.Options{}).Client()
	if e.fleet, err = fleet.New(fleet.Options{Store: db, ID: "fleet-1", File: settings.Layer{Values: map[string]any{"discovery_import": "off"}}}); err != nil {
		cancel()
		return nil, err
	}
	aws := ec2cloud.New(&ec2.Set{Accounts: map[string]ec2.Access{"": {HTTP: client, Credentials: credentials.NewStaticCredentialsProvider("AKIASIM", "secret", "")}}}, nil)
	c, err := controller.New(controller.Config{Fleet: e.fleet, Server: "one", Clouds: aws.Cloud, Log: slog.New(slog.DiscardHandler),
		Consoles: e.consoles(client), Journal: e.take})
	if err != nil {
		cancel()
		return nil, err
	}
	if err := e.adopt(); err != nil {
		cancel()
		return nil, err
	}
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			e.t.Error(err)
		}
		db.Close()
		client.CloseIdleConnections()
		srv.Close()
	}, nil
}

// consoles returns a function that opens the CML of a worker, each only once.
func (e *estate) consoles(client *http.Client) func(worker.Worker) (controller.Console, error) {
	var mu sync.Mutex
	open := map[string]controller.Console{}
	return func(w worker.Worker) (controller.Console, error) {
		c := cml.Config{URL: "http://" + w.PrivateIP, Username: "admin", Password: "cml", TLS: cml.TLS{Insecure: true}, HTTP: client}
		mu.Lock()
		defer mu.Unlock()
		if old := open[c.URL]; old != nil {
			return old, nil
		}
		made, err := cmlconsole.Open(e.fleet, c)
		if err == nil {
			open[c.URL] = made
		}
		return made, err
	}
}

func (e *estate) take(r evidence.Record) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.journal[r.Object] = append(e.journal[r.Object], r.Decision)
}

func (e *estate) adopt() error {
	for _, d := range e.days {
		var id string
		e.sim.World.Locate(d.slug(), func(i *world.Instance, _ world.Moment) { id = i.ID })
		w, err := e.fleet.ImportWorker(e.t.Context(), ada, fleet.ImportedWorker{Name: d.slug(), AWSRegion: fleetRegion, EC2InstanceID: id})
		if err == nil {
			w, err = e.fleet.UpdateWorker(e.t.Context(), ada, w.ID, 0, worker.Profile{AcceptedRisks: []string{worker.RiskNoElasticIP}, ActivitySources: d.sources})
		}
		if err == nil {
			w, err = e.fleet.ArmWorker(e.t.Context(), ada, w.ID, true)
		}
		if err != nil {
			return err
		}
		e.ids, e.ec2 = append(e.ids, w.ID), append(e.ec2, id)
	}
	return nil
}

// deed is an action of a script and its time.
type deed struct {
	at time.Duration
	do func()
}

// live carries out the scripts of all days.
func (e *estate) live() {
	var all []deed
	for n, d := range e.days {
		for _, x := range d.events {
			all = append(all, deed{x.at, func() { e.act(n, x) }})
		}
		for _, a := range d.acts {
			if a.label == use && !a.timer {
				for _, at := range []time.Duration{a.from - early, a.from, a.from + early} { // users also start it when they find it stopped
					all = append(all, deed{max(0, at), func() { e.startWorker(n) }})
				}
			}
		}
		for _, k := range d.snoozes {
			all = append(all, deed{k.from, func() { e.snooze(n, k.to) }})
		}
		if slices.Contains(d.sources, worker.SourceCloudWatch) {
			for at := 5 * time.Minute; at < day; at += 5 * time.Minute {
				all = append(all, deed{at + 40*time.Second, func() { e.measure(n, at) }})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b deed) int { return int(a.at - b.at) })
	for _, x := range all {
		if x.at >= day {
			break
		}
		time.Sleep(time.Until(at0.Add(x.at)))
		x.do()
	}
	time.Sleep(time.Until(at0.Add(day)))
}

// act performs a user's action in CML if CML is running.
func (e *estate) act(n int, x event) {
	e.sim.World.HostAt(e.ec2[n], func(h *world.Host, m world.Moment, r world.Reach) {
		if r == world.Ready {
			h.Act(m, x.category, h.UserID(x.user))
		}
	})
}

// startWorker starts the worker before work if it is down.
func (e *estate) startWorker(n int) {
	w, err := e.fleet.Worker(e.t.Context(), e.ids[n])
	if err == nil && (w.Status == power.WorkerStopped || w.Status == power.WorkerStopping) {
		_, err = e.fleet.ResumeWorker(e.t.Context(), ada, w.ID)
	}
	if err != nil {
		e.t.Errorf("%s: %v", e.days[n].name, err)
	}
}

func (e *estate) snooze(n int, until time.Duration) {
	if _, err := e.fleet.SnoozeWorker(e.t.Context(), ada, e.ids[n], at0.Add(until)); err != nil {
		e.t.Errorf("%s: %v", e.days[n].name, err)
	}
}

// measure publishes to CloudWatch the metrics of the five minutes that end at
// end.
func (e *estate) measure(n int, end time.Duration) {
	up := false
	e.sim.World.Locate(e.ec2[n], func(i *world.Instance, _ world.Moment) { up = i.State == world.Running })
	if !up {
		return
	}
	err := e.sim.World.Put(world.Metric{Account: fleetAccount, Region: fleetRegion, Namespace: "AWS/EC2", Name: "CPUUtilization",
		Dimensions: world.MakeTags(map[string]string{"InstanceId": e.ec2[n]})}, world.Datum{At: at0.Add(end - 5*time.Minute), Value: e.days[n].labLoad(end-5*time.Minute, end)})
	if err != nil {
		e.t.Error(err)
	}
}

// labLoad returns the load of a CML host, in percent of its processors.
func (t *trace) labLoad(from, to time.Duration) float64 {
	load := 1.2 // the load of CML's own programs
	for _, l := range t.lab {
		if d := min(to, l.to) - max(from, l.from); d > 0 {
			load += 100 * l.scale * float64(d) / float64(to-from)
		}
	}
	return min(load, 100)
}

// results returns when each worker was down, according to EC2's history.
func (e *estate) results() (out []replayed) {
	for n, d := range e.days {
		r := replayed{kind: why.KindWorker, timeout: fleetTimeout, window: 35 * time.Minute}
		var spans []truth.Span
		e.sim.World.Locate(e.ec2[n], func(i *world.Instance, now world.Moment) {
			down := time.Time{}
			for _, h := range i.History {
				switch {
				case h.To == world.Stopping && down.IsZero():
					down = h.At
				case h.To == world.Running && !down.IsZero():
					spans, down = append(spans, truth.Span{From: down, To: h.At}), time.Time{}
				}
			}
			if !down.IsZero() {
				spans = append(spans, truth.Span{From: down, To: at0.Add(day)})
			}
		})
		r.slept = truth.Of(spans...)
		e.mu.Lock()
		r.verdicts = e.journal[e.ids[n]]
		e.mu.Unlock()
		r.guarded = d.workerGuards(r.slept)
		out = append(out, r)
	}
	return out
}

// workerGuards returns a function that reports whether a block of a worker that
// does not concern use was justified.
func (t *trace) workerGuards(slept truth.Use) func(b idle.Block, at time.Duration) bool {
	return func(b idle.Block, at time.Duration) bool {
		switch b.Code {
		case idle.InSnoozePeriod:
			for _, k := range t.snoozes {
				if k.from <= at && at < k.to {
					return true
				}
			}
			return slices.ContainsFunc(slept.Spans(), func(s truth.Span) bool {
				up := s.To.Sub(at0)
				return up <= at && at <= up+fleetSnooze+early
			})
		case idle.WarningPending: // the block also applies shortly before a snooze ends
			return slices.ContainsFunc(t.snoozes, func(k load) bool { return at < k.to && k.to-at <= 5*time.Minute }) || len(t.uses(at-fleetTimeout+25*time.Minute, at)) == 0
		case idle.StatusNotRunning:
			return slept.Share(at0.Add(at-early), at0.Add(at+early)) > 0
		}
		return false
	}
}
