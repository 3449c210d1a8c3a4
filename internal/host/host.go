// Package host runs instances on one machine and owns their power state. It
// starts them, watches whether they are in use, freezes those that are idle,
// wakes them on the first packet, and finally stops them gracefully.
//
// Guarantees: a connection that the kernel or the relay has accepted is never left
// frozen (fence.go has the order of steps that ensures this). An unknown reading
// never allows a pause. A state change is on disk before it is acknowledged. After
// the daemon is killed at any instant, the next one finds every instance again.
//
// Implementation: one lock per instance covers a whole transition (inst.go
// groups its fields by what guards them). One heap holds all deadlines, and a
// few workers handle them, so a paused instance costs a record and its guard
// but no goroutine.
//
// This package is the state machine of an instance. Code that needs only values
// of an instance, or a narrow interface to it, is in the packages below:
// records, events, logs and halt keep data; probe, listeners and why judge and
// explain without side effects; admission and deadlines decide which instance
// is next; api and report talk to users, programs and the server.
//
// Elsewhere: how a runtime starts and freezes (Runtime), how a relay forwards
// bytes (Gate), and what counts as idle (package idle).
package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/admission"
	"lull/internal/host/deadlines"
	"lull/internal/host/events"
	"lull/internal/host/halt"
	"lull/internal/host/images"
	"lull/internal/host/metrics"
	"lull/internal/host/probe"
	"lull/internal/host/records"
	"lull/internal/platform/activity"
	"lull/internal/relay"
)

// The runtime interface lives in package instance, where both sides can import
// it.
type (
	Runtime  = instance.Runtime
	Workload = instance.Workload
	Guard    = instance.Guard
)

// Gate is the relay's half of an instance. relay.Instance implements it.
type Gate interface {
	Hold()    // arrivals wait from now on
	Sleep()   // arrivals and bytes may request a wake again
	Release() // the backend accepts connections
	Activity() relay.Activity
	Owed() int // number of connections on which the backend has not answered the last bytes
}

// Evidence stores the evidence of verdicts.
type Evidence interface {
	Take(r evidence.Record) // must not block
	Read(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error)
}

// Config configures a Host. Durations are defaults for instances that do not
// set their own.
type Config struct {
	PauseAfter time.Duration // 0: never pause
	StopAfter  time.Duration // 0: never stop a paused instance
	Probe      time.Duration // interval between probes of a running instance, default 5 s, jittered by a tenth
	Thresholds probe.Thresholds
	ReadProbe  func(ctx context.Context, p *instance.Probe, env []string) activity.Reading // reads a probe from outside the instance; nil means activity.Read
	Workers    int                                                                         // concurrent transitions from deadlines, default 8
	BaseEnv    []string                                                                    // environment of every instance, before its own
	LogDir     string                                                                      // directory of instances' logs
	Socket     string                                                                      // LULL_SOCKET of the instances; empty for none
	SharedHTTP bool                                                                        // create a Gate for instances without a relayed port too
	KeepEvents int                                                                         // number of events to keep, default 4096
	EventLog   *events.Log                                                                 // keeps events across restarts, or nil; the caller must close it

	Runtimes map[string]Runtime
	Missing  map[string]error // by runtime: why it is missing or cannot create instances
	Records  records.Store
	Log      *slog.Logger
	Wall     func() time.Time                // the wall clock, which may be stepped; nil means the machine's
	Alarm    func() (deadlines.Alarm, error) // waits for deadlines; nil means Go timers
	Tracer   trace.Tracer                    // receives spans of checks, pauses and wakes; nil disables tracing

	// Memory bounds the total memory of instances of known size, in bytes; 0 means
	// no bound. Available returns how many more bytes the machine can give. It is
	// called when an instance waits for memory. If it is nil, only Memory counts.
	Memory    int64
	Available func() (int64, error)
	Places    int           // maximum concurrent boots and restores from disk, for runtimes in which they are slow; 0 means no bound
	WakeWait  time.Duration // how long a start or wake waits at most for memory and a boot slot; default 45 s, less than the relay waits

	// Images are the image caches, by name. An image that has not been used for
	// ImageAge is removed; 0 means never. If the caches have more than ImageSpace
	// bytes, unused images are removed; 0 means no limit.
	Images     map[string]instance.ImageKeeper
	ImageAge   time.Duration
	ImageSpace int64

	// Halted is the halt that was in effect before the restart. KeepHalt stores a
	// halt, or nil for none.
	Halted   *idle.HaltedBy
	KeepHalt func(*idle.HaltedBy) error
	// FleetHalted is the fleet's halt as last reported by the server. KeepFleetHalt
	// stores it, or nil for none.
	FleetHalted   *idle.HaltedBy
	KeepFleetHalt func(*idle.HaltedBy) error

	// Evidence receives every check and its verdict; nil drops them.
	Evidence Evidence

	// NewGate creates the relay's half of an instance. It is nil if there is no
	// relay.
	NewGate func(i RelayTarget) (Gate, error)
	// HeldListeners keeps the listening sockets of programs and watches those of
	// stopped ones. If it is nil, none are kept. If it also implements handoffs, it
	// hands the sockets to programs when they bind.
	HeldListeners HeldListeners
}

// HeldListeners holds listening sockets whether or not their program runs.
type HeldListeners interface {
	Hold(ctx context.Context, id string, addrs []string) error
	Unhold(ctx context.Context, id string) error
	Watch(id string, wake func(reason string)) (Guard, error)
}

// Host runs instances. Create it with New, then call Load and Run.
type Host struct {
	cfg     Config
	log     *slog.Logger
	began   time.Time               // base of Now
	due     *deadlines.Queue[*inst] // when each instance is next checked
	saver   *records.Saver
	loaded  chan struct{} // closed when Load has searched for every run once
	room    *admission.Controller
	events  *events.Feed
	metrics *metrics.Metrics
	halts   *halt.Halts

	related related // by the names in the instances' settings
	images  *images.Caches
	handoff handoff
	// illegal counts transitions that are not in the table. It must stay 0.
	illegal atomic.Int64
	steps   fence
	at      func(point string, i *inst) // called at named points of a transition by tests; otherwise nil

	adopting sync.Mutex // held while an instance is made of something that already runs

	mu     sync.RWMutex // guards the three maps
	byID   map[string]*inst
	byName map[string]*inst
	absent map[string]error  // by ID and by name: why the instance's runtime is missing
	away   []instance.Record // the records of those instances

	pauses atomic.Int64  // since memory was last given back
	trims  chan struct{} // has room for one: memory may be given back soon

	busy   sync.WaitGroup // goroutines other than Run's workers
	ctx    context.Context
	cancel context.CancelFunc
	// asked is the context of requests. It is canceled when Run ends.
	asked    context.Context
	endAsked context.CancelFunc
}

// New returns a host without instances.
func New(cfg Config) *Host {
	cfg.Probe = cmp.Or(cfg.Probe, 5*time.Second)
	cfg.Workers = cmp.Or(cfg.Workers, 8)
	cfg.WakeWait = cmp.Or(cfg.WakeWait, 45*time.Second)
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	h := &Host{cfg: cfg, log: cfg.Log, began: time.Now(), due: deadlines.New[*inst](cfg.Alarm), events: events.New(cmp.Or(cfg.KeepEvents, 4096), cfg.EventLog),
		steps: standardFence(), byID: map[string]*inst{}, byName: map[string]*inst{}, absent: map[string]error{}, trims: make(chan struct{}, 1), loaded: make(chan struct{})}
	h.halts = halt.New(halt.Options{Own: cfg.Halted, Fleet: cfg.FleetHalted, KeepOwn: cfg.KeepHalt, KeepFleet: cfg.KeepFleetHalt,
		Now: h.Now, Changed: h.haltChanged, Log: h.log})
	h.saver = records.NewSaver(cfg.Records, h.owner, h.recordsFail)
	h.images = &images.Caches{Keepers: cfg.Images, UsersOf: h.usersOf, MaxAge: cfg.ImageAge, MaxSize: cfg.ImageSpace,
		Halted: func() bool { return h.Halted() != nil }, Log: h.log}
	h.metrics = metrics.New(h, slices.Collect(maps.Keys(cfg.Runtimes)))
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.asked, h.endAsked = context.WithCancel(h.ctx)
	h.room = admission.New(admission.Options{Memory: cfg.Memory, Available: cfg.Available, Places: cfg.Places, Wait: cfg.WakeWait,
		Ctx: h.ctx, Now: h.Now, Spawn: h.spawn, Each: h.each, Sorted: h.sorted, Halted: func() bool { return h.Halted() != nil }})
	return h
}

// Now returns the time, without steps of the wall clock: durations within one
// daemon are measured with the monotonic clock.
func (h *Host) Now() time.Time { return h.began.Add(time.Since(h.began)) }

func (h *Host) point(name string, i *inst) {
	if h.at != nil {
		h.at(name, i)
	}
}

// Run handles deadlines until ctx ends. Then it thaws everything that is frozen,
// and leaves all instances running.
func (h *Host) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { h.due.Run(ctx, h.cfg.Workers, h.check) })
	wg.Go(func() { h.images.Run(ctx) })
	wg.Go(func() { h.halts.Run(ctx) })
	wg.Go(func() { h.trim(ctx) })
	saving := make(chan struct{})
	go func() { h.saver.Run(); close(saving) }()
	<-ctx.Done()
	h.endAsked()
	wg.Wait()
	err := h.thawAll()
	h.cancel()
	h.busy.Wait()
	h.saver.Stop()
	<-saving
	return err
}

// thawAll thaws every frozen instance and updates its record.
func (h *Host) thawAll() error {
	var errs []error
	for _, i := range h.all() {
		i.acquire()
		// The lock is not released, so that no new transition can begin. A
		// hibernated instance has nothing to thaw.
		if s := i.state(); s == power.Pausing || s == power.Resuming {
			i.repair()
		}
		if s := i.state(); !s.Asleep() || s == power.Hibernated || i.pausedByOthers() {
			continue
		}
		if err := i.wake("host", "the host ended"); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// haltedHere is the start of sentences about a halt of this host.
const haltedHere = "Automatic actions on this host are"

// Halt stops all automatic pauses and stops; if x is nil, it resumes them. by is
// who requested it. When Halt returns, it is durable.
func (h *Host) Halt(x *idle.HaltedBy, by string) error { return h.halts.Set(x, by) }

// FleetHalt applies the fleet's halt as reported by the server, or nil for none.
func (h *Host) FleetHalt(x *idle.HaltedBy) error { return h.halts.SetFleet(x) }

// FleetHalted returns the fleet's halt as last reported by the server, or nil. It
// may have expired.
func (h *Host) FleetHalted() *idle.HaltedBy { return h.halts.Fleet() }

// Halted returns the halt in effect, or nil. The host's own takes precedence over
// the fleet's.
func (h *Host) Halted() *idle.HaltedBy {
	if all := h.halts.InEffect(); len(all) > 0 {
		return all[0]
	}
	return nil
}

// haltChanged publishes that a halt has begun or, if x is nil, has ended.
func (h *Host) haltChanged(x *idle.HaltedBy, by, why string) {
	kind := "halt_off"
	if x != nil {
		kind = "halt"
	}
	for _, i := range h.all() {
		i.emit(kind, by, why)
	}
}

// missing returns why a runtime cannot create instances at present, or nil.
func (h *Host) missing(runtime string) error {
	if err := h.cfg.Missing[runtime]; err != nil {
		return err
	}
	if r, ok := h.cfg.Runtimes[runtime].(interface{ Missing() error }); ok {
		return r.Missing()
	}
	return nil
}

// Missing returns the runtimes that cannot create instances at present, each with
// the reason.
func (h *Host) Missing() map[string]error {
	out := maps.Clone(h.cfg.Missing)
	if out == nil {
		out = map[string]error{}
	}
	for name := range h.cfg.Runtimes {
		if err := h.missing(name); err != nil {
			out[name] = err
		}
	}
	return out
}

func (h *Host) all() []*inst {
	h.mu.RLock()
	defer h.mu.RUnlock()
	out := make([]*inst, 0, len(h.byID))
	for _, i := range h.byID {
		out = append(out, i)
	}
	slices.SortFunc(out, func(a, b *inst) int { return strings.Compare(a.id, b.id) })
	return out
}

// each calls yield for every instance, in any order, with the maps locked.
func (h *Host) each(yield func(admission.Instance)) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	for _, i := range h.byID {
		yield(i)
	}
}

// sorted returns all instances for admission, sorted.
func (h *Host) sorted() (out []admission.Instance) {
	for _, i := range h.all() {
		out = append(out, i)
	}
	return out
}

// find returns the instance with a name or ID.
func (h *Host) find(ref string) (*inst, error) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if i, ok := h.byName[ref]; ok {
		return i, nil
	}
	if i, ok := h.byID[ref]; ok {
		return i, nil
	}
	if i, ok := h.byName[strings.ToLower(ref)]; ok { // the name of a container may have capitals
		return i, nil
	}
	if err := h.absent[ref]; err != nil {
		return nil, &RefusedError{Name: ref, What: "reach", Reason: err.Error()}
	}
	return nil, &NotFoundError{Name: ref}
}

// IDOf returns the ID of the instance with a name or ID.
func (h *Host) IDOf(ref string) (string, error) {
	i, err := h.find(ref)
	if err != nil {
		return "", err
	}
	return i.id, nil
}

// Collector returns the host's metrics.
func (h *Host) Collector() prometheus.Collector { return h.metrics }

// Events returns the feed of events about instances.
func (h *Host) Events() *events.Feed { return h.events }

// Images returns the image caches.
func (h *Host) Images() *images.Caches { return h.images }

// usersOf returns the names of the instances that were made from an image or whose
// files are in it, in any state.
func (h *Host) usersOf(img instance.Image) []string {
	out := []string{}
	for _, i := range h.all() {
		if img.Source != "" && img.Source == i.spec().Image || img.ID == i.id {
			out = append(out, i.name())
		}
	}
	return out
}

// NotFoundError means that an instance, a lease or a file does not exist.
type NotFoundError struct {
	Name   string
	Holder string // holder of the lease that does not exist, otherwise ""
	File   string // path that does not exist in the instance, otherwise ""
}

func (e *NotFoundError) Error() string {
	if e.File != "" {
		return fmt.Sprintf("cannot find %s in %s", e.File, e.Name)
	}
	if e.Holder != "" {
		return fmt.Sprintf("cannot find a lease of %s on %s", e.Holder, e.Name)
	}
	return fmt.Sprintf("cannot find an instance %q", e.Name)
}

// RefusedError means that a valid command was refused, and has the reasons.
type RefusedError struct {
	Name   string
	What   string
	Reason string
	Blocks []idle.Block
	// Overtaken is set if a user's command arrived while the request waited.
	Overtaken bool
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("cannot %s %s: %s", e.What, e.Name, e.Reason)
}

// Complete runs do to completion, even if ctx ends. Only the end of the host
// cancels do's context.
func (h *Host) Complete(ctx context.Context, do func(ctx context.Context) error) error {
	done := make(chan error, 1)
	h.spawn(func() { done <- do(h.asked) })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("the request was canceled; the operation continues: %w", context.Cause(ctx))
	}
}

// spawn runs f in a goroutine. The host waits for it when it ends.
func (h *Host) spawn(f func()) { h.busy.Go(func() { f(); h.point("end", nil) }) }
