// Package admission grants the memory and the boot slots of a host to instances
// of known size, in the order that package core/admit defines.
//
// A start or wake waits for its grant before it takes the lock of its instance.
// A waiting request therefore blocks nothing: the instance can be leased,
// stopped or removed, and a stop or removal cancels the wait. An instance that
// only needs a thaw never asks.
package admission

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/core/admit"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/protocol/hostctl"
)

// CheckInterval is how often the queue is checked even if nothing changes on this
// host, because the machine's available memory may have changed.
const CheckInterval = time.Second

// Instance is an instance that needs memory or a boot slot, or can free some.
// Its methods may be called with the lock of Controller held and must not call Controller.
type Instance interface {
	Size() int64                      // maximum memory in bytes, which never changes; 0 if its runtime does not know
	Needs() (memory int64, slow bool) // what a start or wake needs in the current state: bytes, and whether it needs a boot slot
	Holds() int64                     // memory of the machine, in bytes, that it may use in its current state
	// Sleeper describes how the instance can be moved to a deeper state to free
	// memory. ok is false if it cannot be moved now.
	Sleeper() (s admit.Sleeper, ok bool)
	// PushDown takes the next step of the ladder now, and reports whether it did.
	// It is called without the lock of Controller, and may call Controller.
	PushDown(to power.Instance) bool
}

// Options configure a Controller.
type Options struct {
	// Memory bounds the total memory of instances of known size, in bytes; 0 means
	// no bound. Available returns how many more bytes the machine can give; nil
	// means that only Memory counts.
	Memory    int64
	Available func() (int64, error)
	Places    int           // maximum concurrent boots and restores from disk; 0 means no bound
	Wait      time.Duration // how long a request waits at most

	Ctx    context.Context // cancels all waiting requests when it ends
	Now    func() time.Time
	Spawn  func(func())               // runs a function in a goroutine that the host waits for
	Each   func(yield func(Instance)) // yields every instance, in any order
	Sorted func() []Instance          // returns every instance, in a fixed order
	Halted func() bool                // reports whether automatic actions are halted; then no instance is moved to a deeper state
}

// Request asks for the memory and boot slot that an instance needs.
type Request struct {
	Name   string // name of the instance, for errors
	What   string // start, wake or stop
	Client bool   // a client waits for it
	// Over returns why the request no longer applies, or nil. It is called with the
	// lock of Controller held.
	Over func() error
	// Waits is called once if the request has to wait.
	Waits func(reason string)
}

// BusyError means that a request has waited too long.
type BusyError struct {
	Name   string
	What   string // start, wake or stop
	Reason string
	Waited time.Duration
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("cannot %s %s: %s", e.What, e.Name, e.Cause())
}

// Cause returns how long the request waited, and for which resource.
func (e *BusyError) Cause() string {
	return fmt.Sprintf("there was no room on this host for %s: %s", idle.Human(e.Waited), e.Reason)
}

// TooLargeError means that an instance needs more memory than the host may ever
// use.
type TooLargeError struct{ Needs, Memory int64 } // bytes

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("it may need %s of memory, more than the budget of all instances together (%s)", instance.Bytes(e.Needs), instance.Bytes(e.Memory))
}

// Controller manages the memory and the boot slots of a host. It is safe for
// concurrent use.
type Controller struct {
	opts    Options
	changed chan struct{} // receives a value when some instance has changed
	waits   atomic.Int32  // len(queue), read without mu

	// mu is taken before the locks of the host and of instances, never after.
	mu      sync.Mutex
	queue   []*waiter // in the order of admit.Order
	seq     uint64
	taken   int              // boot slots in use
	given   map[Instance]int // number of grants in effect for each instance
	making  bool             // make is running
	granted uint64
	refused uint64
	pushed  uint64
	longest int
}

// waiter is a queued request.
type waiter struct {
	i            Instance
	req          Request
	ask          admit.Ask
	since, until time.Time
	leave        *Leave
	err          error         // why it was refused
	done         chan struct{} // closed when leave or err is set
	reason       string        // which resource the request waits for
}

// Leave is a grant. It is in effect until End.
type Leave struct {
	r            *Controller // nil if the request needed nothing
	i            Instance
	memory, slow bool
}

// Covers reports whether the grant is enough for these needs.
func (l *Leave) Covers(memory int64, slow bool) bool {
	return (memory == 0 || l.memory) && (!slow || l.slow)
}

// New returns a Controller without any grants.
func New(o Options) *Controller {
	return &Controller{opts: o, changed: make(chan struct{}, 1), given: map[Instance]int{}}
}

// Needs returns what a start or wake of i needs in its current state. It counts
// only resources that this host limits.
func (r *Controller) Needs(i Instance) (memory int64, slow bool) {
	memory, slow = i.Needs()
	if r.opts.Memory == 0 {
		memory = 0
	}
	return memory, slow && r.opts.Places > 0
}

// Admit waits until there is enough for a start or wake of i from its current
// state. Its error is a TooLargeError, a BusyError, or that of Over.
func (r *Controller) Admit(ctx context.Context, i Instance, q Request) (*Leave, error) {
	memory, slow := r.Needs(i)
	if memory == 0 && !slow {
		return &Leave{}, nil
	}
	if memory > r.opts.Memory {
		return nil, &TooLargeError{Needs: memory, Memory: r.opts.Memory}
	}
	now := r.opts.Now()
	w := &waiter{i: i, req: q, ask: admit.Ask{Client: q.Client}, since: now, until: now.Add(r.opts.Wait), done: make(chan struct{})}
	r.mu.Lock()
	r.seq++
	w.ask.Seq = r.seq
	at, _ := slices.BinarySearchFunc(r.queue, w, func(a, b *waiter) int { return admit.Order(a.ask, b.ask) })
	r.queue = slices.Insert(r.queue, at, w)
	r.longest = max(r.longest, len(r.queue))
	r.pumpLocked()
	reason := w.reason
	r.mu.Unlock()
	if reason != "" {
		q.Waits(reason)
	}
	return r.await(ctx, w)
}

func (r *Controller) await(ctx context.Context, w *waiter) (*Leave, error) {
	deadline := time.NewTimer(r.opts.Wait)
	defer deadline.Stop()
	tick := time.NewTicker(CheckInterval)
	defer tick.Stop()
	for {
		select {
		case <-w.done:
			return w.leave, w.err
		case <-r.changed:
			r.pump()
			continue
		case <-tick.C:
			r.pump()
			continue
		case <-deadline.C:
		case <-ctx.Done():
		case <-r.opts.Ctx.Done():
		}
		if !r.leaves(w) {
			return w.leave, w.err
		}
		return nil, &BusyError{Name: w.req.Name, What: w.req.What, Reason: w.reason, Waited: r.opts.Now().Sub(w.since)}
	}
}

// leaves removes w from the queue. It returns false if w has already been answered.
func (r *Controller) leaves(w *waiter) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.leave != nil || w.err != nil {
		return false
	}
	r.queue = slices.DeleteFunc(r.queue, func(o *waiter) bool { return o == w })
	r.refused++
	r.pumpLocked() // w may have blocked the requests behind it
	return true
}

// End ends the grant. From then on, the instance's own use counts.
func (l *Leave) End() {
	if l.r == nil {
		return
	}
	l.r.mu.Lock()
	defer l.r.mu.Unlock()
	if l.slow {
		l.r.taken--
	}
	if l.r.given[l.i]--; l.r.given[l.i] == 0 {
		delete(l.r.given, l.i)
	}
	l.r.pumpLocked()
}

// Kick must be called when memory may have become free. It does not block.
func (r *Controller) Kick() {
	if r.waits.Load() == 0 {
		return
	}
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

func (r *Controller) pump() (short int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pumpLocked()
}

// Recheck calls f with the lock of Controller held, and then drops requests that no
// longer apply.
func (r *Controller) Recheck(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	r.pumpLocked()
}

// pumpLocked admits the requests for which there is enough, and drops those that no
// longer apply. It returns how many bytes are missing for the first that waits.
// r.mu must be held.
func (r *Controller) pumpLocked() (short int64) {
	defer func() { r.waits.Store(int32(len(r.queue))) }()
	r.queue = slices.DeleteFunc(r.queue, func(w *waiter) bool {
		if w.err = w.req.Over(); w.err != nil {
			close(w.done)
		}
		return w.err != nil
	})
	if len(r.queue) == 0 {
		return 0
	}
	free := r.freeLocked()
	places := len(r.queue)
	if n := r.opts.Places; n > 0 {
		places = n - r.taken
	}
	asks := make([]admit.Ask, len(r.queue))
	for n, w := range r.queue {
		if r.given[w.i] == 0 { // otherwise another request already has a grant for it
			w.ask.Memory, w.ask.Slow = r.Needs(w.i)
		} else {
			w.ask.Memory, w.ask.Slow = 0, false
		}
		asks[n] = w.ask
	}
	granted, short := admit.Next(admit.Capacity{Free: free, Places: places}, asks)
	for _, n := range granted {
		w := r.queue[n]
		w.leave = &Leave{}
		if w.ask.Memory > 0 || w.ask.Slow {
			w.leave = &Leave{r: r, i: w.i, memory: w.ask.Memory > 0, slow: w.ask.Slow}
			r.given[w.i]++
			if w.ask.Slow {
				r.taken++
			}
		}
		r.granted++
		close(w.done)
	}
	r.queue = slices.DeleteFunc(r.queue, func(w *waiter) bool { return w.leave != nil })
	for _, w := range r.queue {
		switch {
		case w.ask.Slow && r.taken >= r.opts.Places && r.opts.Places > 0:
			w.reason = fmt.Sprintf("%d instances are being started or restored, which is the limit", r.taken)
		case w.ask.Memory > max(free, 0):
			w.reason = fmt.Sprintf("it may take %s more, and %s of %s are free", instance.Bytes(w.ask.Memory), instance.Bytes(max(free, 0)), instance.Bytes(r.opts.Memory))
		default:
			w.reason = "others are first in the queue for memory"
		}
	}
	if short > 0 && !r.making {
		r.making = true
		r.opts.Spawn(r.make)
	}
	return short
}

// freeLocked returns how much memory can be granted, which the budget and the
// machine's available memory limit. r.mu must be held.
func (r *Controller) freeLocked() int64 {
	used, coming := int64(0), int64(0)
	r.opts.Each(func(i Instance) {
		n := i.Holds()
		if r.given[i] > 0 {
			coming += i.Size() - n
			n = i.Size()
		}
		used += n
	})
	free := r.opts.Memory - used
	if f := r.opts.Available; f != nil {
		if n, err := f(); err == nil { // on an error, only the budget counts
			free = min(free, n-coming)
		}
	}
	return free
}

// make moves sleeping instances to deeper states until there is enough memory for
// the first request.
func (r *Controller) make() {
	tried := map[Instance]power.Instance{}
	for {
		short := r.pump()
		i, to := r.pick(short, tried)
		if to == "" {
			break
		}
		tried[i] = to
		if i.PushDown(to) {
			r.mu.Lock()
			r.pushed++
			r.mu.Unlock()
		}
	}
	r.mu.Lock()
	r.making = false
	r.mu.Unlock()
}

// pick returns the instance to move next, and its next state.
func (r *Controller) pick(short int64, tried map[Instance]power.Instance) (Instance, power.Instance) {
	if short <= 0 || r.opts.Halted() {
		return nil, ""
	}
	r.mu.Lock()
	wait := map[Instance]bool{}
	for _, w := range r.queue {
		wait[w.i] = true
	}
	for i := range r.given {
		wait[i] = true
	}
	r.mu.Unlock()
	var who []Instance
	var list []admit.Sleeper
	for _, i := range r.opts.Sorted() {
		s, ok := i.Sleeper()
		if wait[i] || !ok {
			continue
		}
		s.Reclaim, s.Hibernate = s.Reclaim && tried[i] != power.Reclaimed, s.Hibernate && tried[i] != power.Hibernated
		who, list = append(who, i), append(list, s)
	}
	n, to := admit.Push(short, list)
	if to == "" {
		return nil, ""
	}
	return who[n], to
}

// Waiting returns the waiting request of i, or nil.
func (r *Controller) Waiting(i Instance) *hostctl.Waiting {
	if r.waits.Load() == 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for n, w := range r.queue {
		if w.i == i {
			return &hostctl.Waiting{Reason: w.reason, Place: n + 1, Since: w.since.Round(0), Until: w.until.Round(0)}
		}
	}
	return nil
}

// Status returns the free capacity and the queue.
func (r *Controller) Status() hostctl.Capacity {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := hostctl.Capacity{Memory: r.opts.Memory, Places: r.opts.Places, Taken: r.taken, Waiting: len(r.queue), Longest: r.longest,
		Granted: r.granted, Refused: r.refused, Pushed: r.pushed}
	if r.opts.Memory > 0 {
		o.Free = max(r.freeLocked(), 0)
	}
	return o
}

// Snapshot is the state on which the future behavior of a Controller depends.
type Snapshot struct {
	Waiting []Waiting
	Taken   int              // boot slots in use
	Given   map[Instance]int // grants in progress
	Making  bool             // instances are being pushed down
}

// Waiting is a request in the queue.
type Waiting struct {
	Granted      bool
	Since, Until time.Time
}

// Snapshot returns the current state.
func (r *Controller) Snapshot() Snapshot {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := Snapshot{Taken: r.taken, Given: maps.Clone(r.given), Making: r.making}
	for _, w := range r.queue {
		s.Waiting = append(s.Waiting, Waiting{Granted: w.leave != nil, Since: w.since, Until: w.until})
	}
	return s
}
