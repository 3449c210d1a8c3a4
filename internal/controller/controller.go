// Package controller drives every worker of a fleet through its lifecycle. It
// observes the cloud, judges idleness, and is the only part of lull that acts on EC2.
//
// The live servers on one store share the workers. Each server holds some of the
// Shards shards under a lease. Every write has the shard's ownership as a condition,
// and every acting call ends Margin before the lease does. Without a store there is
// no ownership, so nothing is done.
//
// Guarantees: An intent is durable before a call is sent. A pause based on readings
// is canceled unless readings at most FinalCheckAge old are quiet. The parameters and
// the token of a launch are durable before the launch is sent. "Not found" is
// believed only after two answers at least MissingConfirm apart. A slow region or
// worker delays no other: each region is observed in its own goroutine, and work on
// workers runs in lanes by region and by health.
//
// In a steady cycle, a region costs one listing of instance states. A worker whose
// observation and record are unchanged and for which nothing is due costs a map
// lookup and no write.
//
// The cloud and CML are behind the interfaces in cloud.go. Packages cmlconsole and
// ec2cloud implement them. The records are in package fleet.
package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sync/errgroup"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// Fixed times of the controller.
const (
	LeaseTTL       = 12 * time.Second // so that a dead server's workers are claimed within 15 s
	Margin         = 3 * time.Second  // every acting call ends at least this long before its lease
	FinalCheckAge  = 5 * time.Second  // maximum age of readings on which a pause is sent
	MissingConfirm = 60 * time.Second
	WriteChecks    = 30 * time.Minute // the check times of a worker are written at least this often
	FullPass       = 10 * time.Minute // every instance is described at least this often
	lateWindow     = 15 * time.Minute // for this long, an action that lull gave up may still take effect
	takeoverShows  = 10 * time.Second // by then, the effect of an earlier owner's call is visible or will never be
	debounce       = 200 * time.Millisecond

	defaultLanes = 1024
)

// Config configures a Controller. Fleet, Server, Clouds and Consoles are
// required.
type Config struct {
	Fleet  *fleet.Fleet
	Server string // unique among the servers of a store
	// Address is where other servers reach this one.
	Address string
	Clouds  func(account, region string) (Cloud, error)
	// Accounts are the names of the accounts, besides the credentials' own,
	// that discovery scans.
	Accounts []string
	// ImageOwners are the owners of the images that discovery searches; scans
	// report them.
	ImageOwners []string
	// Consoles returns the CML of a worker that has an address.
	Consoles func(w worker.Worker) (Console, error)
	// CML reports whether a CML answers at the endpoint of w, and its version or
	// why none was found. Nil leaves workers on the sources that they have.
	CML func(ctx context.Context, w worker.Worker) (found bool, detail string)
	// Secret opens a worker's secret.
	Secret func(s sealed.Secret) (sealed.Plain, error)
	// Guards returns blocks decided elsewhere: schedule, budget, hooks.
	Guards func(w *worker.Worker, now time.Time) []idle.Block
	// Journal stores evidence; nil stores none.
	Journal func(evidence.Record)
	// Archive receives audit entries that leave the store; nil keeps them
	// there.
	Archive func([]audit.Entry) error
	// Shadow enables dry run: everything is decided and recorded, and nothing is
	// done.
	Shadow bool
	// Lanes is the number of workers of one region handled concurrently; 0 means
	// defaultLanes. Workers whose last attempt failed have another Lanes of their
	// own. Most of that time is spent waiting for CML. If an answer takes 3 s, 3,000
	// workers that are checked every minute keep 400 lanes busy, and three times as
	// many when all of them are to be paused at the same moment.
	Lanes int
	Log   *slog.Logger
	// Tracer gets spans of checks, pauses and resumes; nil disables tracing.
	Tracer trace.Tracer
}

// Controller reconciles workers. Create it with New.
type Controller struct {
	cfg     Config
	fleet   *fleet.Fleet
	log     *slog.Logger
	tracer  trace.Tracer
	count   counters
	measure measures
	ready   chan struct{}
	wake    chan struct{} // wakes the dispatcher
	jobs    sync.WaitGroup

	mu      sync.Mutex
	entries map[string]*entry
	due     dueHeap
	lanes   map[laneKey]*lane
	regions map[regionKey]*region
	shards  [Shards]*shard
	leaving []*shard // given up by this server, and not yet released in the store
	members map[string]Member
	lease   store.Lease
	tmpls   map[string]launch.Template
	loaded  bool
	waiting map[string][]fleet.Request // by worker
	resign  chan struct{}
	starts  starts
	sizes   map[string]sized // by selector
	loads   chan struct{}    // requests a read of loads now
	retag   []*entry         // workers whose policy tags may have to be written
	// tagAfter is when failed tags are retried. Owned by housekeep.
	tagAfter time.Time
}

// New returns a Controller. It does no I/O and starts nothing.
func New(cfg Config) (*Controller, error) {
	switch {
	case cfg.Fleet == nil || cfg.Clouds == nil || cfg.Consoles == nil:
		return nil, errors.New("cannot make a controller: Fleet, Clouds and Consoles are required")
	case cfg.Server == "":
		return nil, errors.New("cannot make a controller without a server id")
	}
	cfg.Lanes = cmp.Or(cfg.Lanes, defaultLanes)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Tracer == nil {
		cfg.Tracer = noop.NewTracerProvider().Tracer("")
	}
	if cfg.Secret == nil {
		cfg.Secret = func(s sealed.Secret) (sealed.Plain, error) { return "", fmt.Errorf("cannot open secret %s", s) }
	}
	c := &Controller{
		cfg: cfg, fleet: cfg.Fleet, log: cfg.Log, tracer: cfg.Tracer, measure: newMeasures(),
		ready: make(chan struct{}), wake: make(chan struct{}, 1), resign: make(chan struct{}, 1), loads: make(chan struct{}, 1),
		entries: map[string]*entry{}, lanes: map[laneKey]*lane{}, regions: map[regionKey]*region{},
		members: map[string]Member{}, tmpls: map[string]launch.Template{}, waiting: map[string][]fleet.Request{},
		sizes: map[string]sized{},
	}
	c.fleet.CountBy(c.size)
	c.fleet.OnRules(c.rulesChanged)
	return c, nil
}

// String names the controller in errors and logs.
func (c *Controller) String() string { return "worker controller" }

// Ready is closed when all records have been read.
func (c *Controller) Ready() <-chan struct{} { return c.ready }

// Run works until ctx ends. It releases its shards before it returns.
func (c *Controller) Run(ctx context.Context) error {
	if err := c.fleet.Refresh(ctx); err != nil && !errors.Is(err, store.ErrUnavailable) {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return c.fleet.Run(ctx, func(err error) { c.log.Error("cannot use a stored setting", "err", err) })
	})
	g.Go(func() error { return c.followWorkers(ctx) })
	g.Go(func() error { return c.followTemplates(ctx) })
	g.Go(func() error { return c.followRequests(ctx) })
	g.Go(func() error { return c.own(ctx) })
	g.Go(func() error { return c.dispatch(ctx) })
	g.Go(func() error { return c.observe(ctx) })
	g.Go(func() error { return c.housekeep(ctx) })
	g.Go(func() error { return c.readLoads(ctx) })
	err := g.Wait()
	c.jobs.Wait()
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// followWorkers applies the store's changes of workers to the entries in memory.
func (c *Controller) followWorkers(ctx context.Context) error {
	var seen map[string]bool
	return store.Follow(ctx, c.fleet.Store(), worker.Keys(), store.Follower{
		Listed: func(first bool, values []store.Value) {
			if first {
				seen = map[string]bool{}
			}
			for _, v := range values {
				seen[worker.IDOf(v.Key)] = true
				c.read(v)
			}
		},
		Reset: func(store.Page) error {
			c.mu.Lock()
			defer c.mu.Unlock()
			for id, e := range c.entries {
				if !seen[id] {
					c.drop(e)
				}
			}
			seen = nil
			if !c.loaded {
				c.loaded = true
				close(c.ready)
			}
			return nil
		},
		Apply: func(b store.Batch) error {
			for _, ev := range b.Events {
				if !ev.Deleted {
					c.read(ev.Value)
					continue
				}
				c.mu.Lock()
				if e := c.entries[worker.IDOf(ev.Value.Key)]; e != nil && e.w.Revision() < ev.Value.ModRevision {
					c.drop(e)
				}
				c.mu.Unlock()
			}
			return nil
		},
	})
}

// read processes a record from the store. An unreadable one is left alone,
// shown and counted.
func (c *Controller) read(v store.Value) {
	w, err := worker.Decode(v)
	if err != nil {
		c.count.unreadable.Add(1)
		c.log.Error("cannot read a worker", "key", v.Key, "err", err)
		return
	}
	c.learn(w, debounce)
}

// learn processes a newer record. It schedules a check of the worker after the delay
// after, so that changes in quick succession are handled together. A record that this
// server wrote itself is already known and is ignored.
func (c *Controller) learn(w worker.Worker, after time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.entries[w.ID]
	if e == nil {
		e = &entry{id: w.ID, heap: -1, shard: shardOf(w.ID)}
		c.entries[w.ID] = e
	}
	if w.Revision() <= e.w.Revision() {
		return
	}
	if r := c.region(&w); r != e.region {
		if e.region != nil {
			delete(e.region.entries, e.id)
		}
		e.region, r.entries[e.id] = r, e
	}
	if e.w.DesiredStatus != w.DesiredStatus && e.cancel != nil && !e.writing {
		e.cancel() // the job in progress acts on the former intent, so its write would be refused
	}
	e.w = w
	e.reconciled = false
	c.untag(e)
	c.region(&w)
	c.kick(e, time.Now().Add(after))
}

func (c *Controller) drop(e *entry) {
	if e.cancel != nil {
		e.cancel()
	}
	c.unschedule(e)
	delete(e.region.entries, e.id)
	delete(c.entries, e.id)
}

// followTemplates caches the templates, so that resolving a policy costs no
// read.
func (c *Controller) followTemplates(ctx context.Context) error {
	take := func(v store.Value) {
		t, err := launch.DecodeTemplate(v)
		if err != nil {
			c.count.unreadable.Add(1)
			c.log.Error("cannot read a template", "key", v.Key, "err", err)
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.tmpls[t.Name] = t
	}
	return store.Follow(ctx, c.fleet.Store(), launch.TemplateKeys(), store.Follower{
		Reset: func(p store.Page) error {
			for _, v := range p.Values {
				take(v)
			}
			return nil
		},
		Apply: func(b store.Batch) error {
			for _, ev := range b.Events {
				if ev.Deleted {
					c.mu.Lock()
					delete(c.tmpls, launch.TemplateName(ev.Value.Key))
					c.mu.Unlock()
					continue
				}
				take(ev.Value)
			}
			return nil
		},
	})
}

// followRequests answers requests that only the owner of a worker can answer.
func (c *Controller) followRequests(ctx context.Context) error {
	take := func(v store.Value) {
		r, err := fleet.DecodeRequest(v)
		if err != nil || r.AnsweredAt != nil || time.Since(r.At) > fleet.RequestTTL {
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.waiting[r.WorkerID] = append(c.waiting[r.WorkerID], r)
		if e := c.entries[r.WorkerID]; e != nil {
			c.kick(e, time.Now())
		}
	}
	return store.Follow(ctx, c.fleet.Store(), fleet.RequestKeys(), store.Follower{
		Reset: func(p store.Page) error {
			c.mu.Lock()
			clear(c.waiting)
			c.mu.Unlock()
			for _, v := range p.Values {
				take(v)
			}
			return nil
		},
		Apply: func(b store.Batch) error {
			for _, ev := range b.Events {
				if !ev.Deleted {
					take(ev.Value)
				}
			}
			return nil
		},
	})
}

// running counts the RUNNING workers.
func (c *Controller) running() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := int64(0)
	for _, e := range c.entries {
		if e.w.Status == power.WorkerRunning {
			n++
		}
	}
	return n
}

// jitter returns a random duration between half of d and d.
func jitter(d time.Duration) time.Duration {
	if d <= 1 {
		return d
	}
	return d/2 + rand.N(d/2)
}
