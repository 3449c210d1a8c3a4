// Package host runs instances on one machine and owns their power: it starts
// them, watches whether anybody uses them, freezes those that nobody does,
// wakes them on the first packet, and stops them gracefully in the end (spec,
// section 4).
//
// What it guarantees: a connection that the kernel or the relay accepted is
// never left frozen (fence.go has the order that makes it so); an unknown
// reading never allows a pause; a change of state is on disk before it is
// acknowledged; whatever instant the daemon is killed at, the next one finds
// every instance again.
//
// How it works: one lock for each instance covers a whole transition, one heap
// holds all deadlines, and the work of a deadline runs on a few workers, so
// that a paused instance costs a record, its guard and no goroutine.
//
// What it leaves out: how a runtime starts and freezes (Runtime), how a relay
// moves bytes (Gate), who decides (package idle) and how people ask (link
// hostctl and the API in this package).
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

	"go.opentelemetry.io/otel/trace"

	"lull/internal/evidence"
	"lull/internal/idle"
	"lull/internal/instance"
	"lull/internal/power"
	"lull/internal/router"
)

// The port to the runtimes lives in package instance, where both sides of it
// can see it.
type (
	Runtime  = instance.Runtime
	Workload = instance.Workload
	Guard    = instance.Guard
)

// Gate is the relay's half of an instance; router.Instance is the real one.
type Gate interface {
	Hold()    // arrivals are held from here on
	Sleep()   // held arrivals and bytes may ask for a wake again
	Release() // the backend accepts
	Activity() router.Activity
	Owed() int // connections whose last bytes went to the backend, unanswered
}

// Records keeps what must survive.
type Records interface {
	Put(r *instance.Record) error // durable when it returns nil
	Delete(id string) error
}

// Evidence keeps what instances were judged by.
type Evidence interface {
	Take(r evidence.Record) // never waits
	Read(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error)
}

// Config is what a Host needs. Times are the host's defaults for instances
// that do not say.
type Config struct {
	PauseAfter time.Duration // 0 never pauses
	StopAfter  time.Duration // 0 never stops a paused instance
	Probe      time.Duration // between two looks at a running instance, default 5 s, each jittered by a tenth
	CPUPercent float64       // of one processor from which an instance counts as used, default 1
	NetBytes   float64       // in 5 s, from which it does, default 512
	DiskBytes  float64       // read and written in 5 s, from which it does, default 8192
	Workers    int           // transitions that run at once from deadlines, default 8
	BaseEnv    []string      // environment of every instance, before its own
	LogDir     string        // where instances' logs are written
	Socket     string        // LULL_SOCKET of the instances; empty for none
	SharedHTTP bool          // instances without a relayed port get a gate too
	KeepEvents int           // newest events that are kept, default 4096
	EventLog   *EventLog     // keeps them over restarts; nil for none, and the caller's to close

	Runtimes map[string]Runtime
	Missing  map[string]error // why a runtime that lull knows is not among them, or can make no instance
	Records  Records
	Log      *slog.Logger
	Tracer   trace.Tracer // gets spans of checks, pauses and wakes; nil traces nothing

	// Memory bounds what instances of a known size may hold together, in bytes;
	// 0 does not. Available is what the machine can give to more of them, read
	// when one waits; nil leaves that to Memory.
	Memory    int64
	Available func() (int64, error)
	Places    int           // boots and restores from disk that run at once, of runtimes where they are slow; 0 does not bound them
	WakeWait  time.Duration // for room, until a start or wake fails; default 45 s, less than the relay waits

	// Images are what keeps images, by name; ImageAge how long one that nobody
	// uses is kept, 0 for ever; ImageSpace how many bytes all of them may take
	// together before those go that nobody uses, 0 for any.
	Images     map[string]instance.ImageKeeper
	ImageAge   time.Duration
	ImageSpace int64

	// Halted is the halt that was kept, and KeepHalt keeps one over restarts, or
	// that there is none.
	Halted   *idle.HaltedBy
	KeepHalt func(*idle.HaltedBy) error
	// FleetHalted is the fleet's halt as the server said last, and KeepFleetHalt
	// keeps one over restarts, or that there is none.
	FleetHalted   *idle.HaltedBy
	KeepFleetHalt func(*idle.HaltedBy) error

	// Evidence keeps every look and its verdict; nil keeps none.
	Evidence Evidence

	// NewGate makes the relay's half of an instance; nil where nothing relays.
	NewGate func(i RelayTarget) (Gate, error)
	// HeldListeners keeps the listening sockets of programs and watches those of a
	// stopped one; nil keeps none. One with the methods of handoffs also hands
	// them to a program at its bind.
	HeldListeners HeldListeners
}

// HeldListeners holds listening sockets whether or not their program runs.
type HeldListeners interface {
	Hold(ctx context.Context, id string, addrs []string) error
	Unhold(ctx context.Context, id string) error
	Watch(id string, wake func(reason string)) (Guard, error)
}

// Host runs instances. Make one with New, load it, then Run it.
type Host struct {
	cfg    Config
	log    *slog.Logger
	began  time.Time // anchor of now
	due    *deadlines
	saver  *saver
	room   *room
	events *Events
	// measures count for Prometheus.
	measures    measures
	halted      atomic.Pointer[idle.HaltedBy]
	fleetHalted atomic.Pointer[idle.HaltedBy] // as the server said last
	haltMu      sync.Mutex                    // of whoever changes it
	handoff     handoff
	// haltSet is told that the halt was changed.
	haltSet chan struct{}
	// illegal counts transitions that the table does not know: always 0.
	illegal atomic.Int64
	steps   fence
	at      func(point string, i *inst) // named points of a transition, for tests; nil otherwise

	mu     sync.RWMutex // the three maps
	byID   map[string]*inst
	byName map[string]*inst
	absent map[string]error  // by id and name: instances whose runtime is not here, and why
	away   []instance.Record // of those, as they were

	busy   sync.WaitGroup // work that was started outside Run's workers
	ctx    context.Context
	cancel context.CancelFunc
	// asked is the context of what people ask for; it ends when Run is to.
	asked    context.Context
	endAsked context.CancelFunc
}

// New returns a host without instances.
func New(cfg Config) *Host {
	cfg.Probe = cmp.Or(cfg.Probe, 5*time.Second)
	cfg.CPUPercent = cmp.Or(cfg.CPUPercent, cpuPercent)
	cfg.NetBytes = cmp.Or(cfg.NetBytes, netBytes)
	cfg.DiskBytes = cmp.Or(cfg.DiskBytes, diskBytes)
	cfg.Workers = cmp.Or(cfg.Workers, 8)
	cfg.WakeWait = cmp.Or(cfg.WakeWait, 45*time.Second)
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	h := &Host{cfg: cfg, log: cfg.Log, began: time.Now(), due: newDeadlines(), events: NewEvents(cmp.Or(cfg.KeepEvents, 4096), cfg.EventLog),
		steps: standardFence(), haltSet: make(chan struct{}, 1), byID: map[string]*inst{}, byName: map[string]*inst{}, absent: map[string]error{}}
	h.halted.Store(cfg.Halted)
	h.fleetHalted.Store(cfg.FleetHalted)
	h.saver = newSaver(cfg.Records)
	h.saver.find, h.saver.told = h.byIDNow, h.recordsFail
	h.measures = newMeasures(cfg.Runtimes)
	h.room = newRoom(h)
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.asked, h.endAsked = context.WithCancel(h.ctx)
	return h
}

// now is a wall time that does not step: durations of a running daemon are
// measured, not looked up.
func (h *Host) now() time.Time { return h.began.Add(time.Since(h.began)) }

func (h *Host) point(name string, i *inst) {
	if h.at != nil {
		h.at(name, i)
	}
}

// Run works on deadlines until ctx ends. Then it thaws what is paused and
// leaves everything running (spec, section 4).
func (h *Host) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for range h.cfg.Workers {
		wg.Go(func() {
			for {
				i, ok := h.due.next(ctx)
				if !ok {
					return
				}
				h.check(i)
			}
		})
	}
	wg.Go(func() { h.keepPruned(ctx) })
	wg.Go(func() { h.endHalts(ctx) })
	saving := make(chan struct{})
	go func() { h.saver.run(); close(saving) }()
	<-ctx.Done()
	h.endAsked()
	wg.Wait()
	err := h.thawAll()
	h.cancel()
	h.busy.Wait()
	h.saver.stop()
	<-saving
	return err
}

// thawAll leaves no instance frozen behind, and says so in their records.
func (h *Host) thawAll() error {
	var errs []error
	for _, i := range h.all() {
		i.acquire()
		// The lock is kept: nothing may begin any more. What is hibernated holds
		// nothing that a thaw would set free.
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

// missing returns why a runtime can make no instance now, nil if it can.
func (h *Host) missing(runtime string) error {
	if err := h.cfg.Missing[runtime]; err != nil {
		return err
	}
	if r, ok := h.cfg.Runtimes[runtime].(interface{ Missing() error }); ok {
		return r.Missing()
	}
	return nil
}

// Missing returns the runtimes that can make no instance now, with the reasons.
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

// find looks an instance up by name or id.
func (h *Host) find(ref string) (*inst, error) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if i, ok := h.byName[ref]; ok {
		return i, nil
	}
	if i, ok := h.byID[ref]; ok {
		return i, nil
	}
	if i, ok := h.byName[strings.ToLower(ref)]; ok { // a container's name may have capitals
		return i, nil
	}
	if err := h.absent[ref]; err != nil {
		return nil, &RefusedError{Name: ref, What: "reach", Reason: err.Error()}
	}
	return nil, &NotFoundError{Name: ref}
}

// NotFoundError names an instance that does not exist.
type NotFoundError struct {
	Name   string
	Holder string // whose lease of it is not there; "" where the instance is not
}

func (e *NotFoundError) Error() string {
	if e.Holder != "" {
		return fmt.Sprintf("cannot find a lease of %s on %s", e.Holder, e.Name)
	}
	return fmt.Sprintf("cannot find an instance %q", e.Name)
}

// RefusedError is a command that was understood and not done, with the reasons.
type RefusedError struct {
	Name   string
	What   string
	Reason string
	Blocks []idle.Block
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("cannot %s %s: %s", e.What, e.Name, e.Reason)
}

// carry does what somebody asks for, also when they do not wait for it any
// longer. Only the end of the host ends it early.
func (h *Host) carry(ctx context.Context, do func(ctx context.Context) error) error {
	done := make(chan error, 1)
	h.spawn(func() { done <- do(h.asked) })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("nobody waits for it any longer, it goes on: %w", context.Cause(ctx))
	}
}

// spawn runs f where somebody waits for it.
func (h *Host) spawn(f func()) { h.busy.Go(func() { f(); h.point("end", nil) }) }
