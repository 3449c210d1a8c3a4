package host

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/core/admit"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/protocol/hostctl"
)

// roomTick is how often the queue is checked although nothing changed on this
// host: the machine's available memory may have.
const roomTick = time.Second

// byMemory is the actor when an instance is pushed down because another needs
// its memory.
const byMemory = "memory"

// room manages the memory and boot slots of this host for instances of known
// size. A start or wake takes what it needs before it takes the lock of its
// instance. So a waiting one blocks nothing: the instance can be leased,
// stopped or removed, and a stop or removal cancels the wait. An instance that
// only needs a thaw never asks.
type room struct {
	h       *Host
	changed chan struct{} // signals that some instance has changed
	waits   atomic.Int32  // len(queue), read without mu

	// mu is taken before the host's and an instance's mu, never after.
	mu      sync.Mutex
	queue   []*waiter // in the order of admit.Order
	seq     uint64
	taken   int           // boot slots in use
	given   map[*inst]int // grants to use memory that are in progress
	making  bool          // make is running
	granted uint64
	refused uint64
	pushed  uint64
	longest int
}

// waiter is a call that waits for room.
type waiter struct {
	i            *inst
	call         call
	ask          admit.Ask
	since, until time.Time
	leave        *leave
	err          error         // why it was refused
	done         chan struct{} // closed when leave or err is set
	reason       string        // why it waits
}

// leave is the room that was granted to a start or wake.
type leave struct {
	r            *room
	i            *inst
	memory, slow bool
}

func newRoom(h *Host) *room {
	return &room{h: h, changed: make(chan struct{}, 1), given: map[*inst]int{}}
}

// rationed reports whether starts and wakes of i need room.
func (i *inst) rationed() bool {
	c := &i.h.cfg
	return i.slow && c.Places > 0 || i.size > 0 && c.Memory > 0
}

// needs returns what a start or wake takes in the present state.
func (i *inst) needs() (memory int64, slow bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch i.rec.State {
	case power.Stopped, power.Hibernated:
		memory, slow = i.size, i.slow
	case power.Reclaimed:
		memory = min(i.rec.Freed, i.size)
	}
	if i.h.cfg.Memory == 0 {
		memory = 0
	}
	return memory, slow && i.h.cfg.Places > 0
}

// holds returns how much of the host's memory it may use in its present state,
// in bytes.
func (i *inst) holds() int64 {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch i.rec.State {
	case power.Stopped, power.Hibernated:
		return 0
	case power.Reclaimed:
		return max(i.size-i.rec.Freed, 0)
	}
	return i.size
}

// admit waits until there is room for i in its present state.
func (r *room) admit(ctx context.Context, i *inst, c call) (*leave, error) {
	memory, slow := i.needs()
	if !i.rationed() || memory == 0 && !slow {
		return &leave{}, nil
	}
	if memory > r.h.cfg.Memory {
		why := fmt.Sprintf("it may take %s, more than all instances together (memory %s)", instance.Bytes(memory), instance.Bytes(r.h.cfg.Memory))
		i.unserved(c, why)
		return nil, &RefusedError{Name: i.name(), What: c.what, Reason: why}
	}
	now := r.h.Now()
	w := &waiter{i: i, call: c, ask: admit.Ask{Client: c.client}, since: now, until: now.Add(r.h.cfg.WakeWait), done: make(chan struct{})}
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
		i.emit("waiting", "", reason)
	}
	return r.await(ctx, w)
}

func (r *room) await(ctx context.Context, w *waiter) (*leave, error) {
	deadline := time.NewTimer(r.h.cfg.WakeWait)
	defer deadline.Stop()
	tick := time.NewTicker(roomTick)
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
		case <-r.h.ctx.Done():
		}
		if !r.leaves(w) {
			return w.leave, w.err
		}
		err := &BusyError{Name: w.i.name(), What: w.call.what, Reason: w.reason, Waited: r.h.Now().Sub(w.since)}
		if ctx.Err() == nil && r.h.ctx.Err() == nil { // otherwise no caller needs the answer anymore
			w.i.unserved(w.call, err.cause())
		}
		return nil, err
	}
}

// leaves removes w from the queue. It returns false if w already has its
// answer.
func (r *room) leaves(w *waiter) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.leave != nil || w.err != nil {
		return false
	}
	r.queue = slices.DeleteFunc(r.queue, func(o *waiter) bool { return o == w })
	r.refused++
	r.pumpLocked() // it may have stood before others
	return true
}

// end returns the grant. What the instance then uses counts as its own.
func (l *leave) end() {
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

// kick signals that memory may have become free. It never blocks.
func (r *room) kick() {
	if r.waits.Load() == 0 {
		return
	}
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

func (r *room) pump() (short int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pumpLocked()
}

// callOff cancels every pending start and wake of i. why is a sentence about i.
func (r *room) callOff(i *inst, why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i.off.Store(&why)
	r.pumpLocked()
}

// pumpLocked admits the waiters for which there is room and dismisses those
// whose request no longer applies. short is how much memory the first one
// lacks.
func (r *room) pumpLocked() (short int64) {
	defer func() { r.waits.Store(int32(len(r.queue))) }()
	r.queue = slices.DeleteFunc(r.queue, func(w *waiter) bool {
		if w.err = w.call.over(w.i); w.err != nil {
			close(w.done)
		}
		return w.err != nil
	})
	if len(r.queue) == 0 {
		return 0
	}
	free := r.freeLocked()
	places := len(r.queue)
	if n := r.h.cfg.Places; n > 0 {
		places = n - r.taken
	}
	asks := make([]admit.Ask, len(r.queue))
	for n, w := range r.queue {
		if r.given[w.i] == 0 { // otherwise another call is already bringing it up
			w.ask.Memory, w.ask.Slow = w.i.needs()
		} else {
			w.ask.Memory, w.ask.Slow = 0, false
		}
		asks[n] = w.ask
	}
	granted, short := admit.Next(admit.Room{Free: free, Places: places}, asks)
	for _, n := range granted {
		w := r.queue[n]
		w.leave = &leave{}
		if w.ask.Memory > 0 || w.ask.Slow {
			w.leave = &leave{r: r, i: w.i, memory: w.ask.Memory > 0, slow: w.ask.Slow}
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
		case w.ask.Slow && r.taken >= r.h.cfg.Places && r.h.cfg.Places > 0:
			w.reason = fmt.Sprintf("%d are being started or restored, as many as may at once", r.taken)
		case w.ask.Memory > max(free, 0):
			w.reason = fmt.Sprintf("it may take %s more, and %s of %s are free", instance.Bytes(w.ask.Memory), instance.Bytes(max(free, 0)), instance.Bytes(r.h.cfg.Memory))
		default:
			w.reason = "others wait for memory before it"
		}
	}
	if short > 0 && !r.making {
		r.making = true
		r.h.spawn(r.make)
	}
	return short
}

// freeLocked returns the unassigned memory, limited by the budget and by what
// the machine has available.
func (r *room) freeLocked() int64 {
	used, coming := int64(0), int64(0)
	r.h.mu.RLock()
	for _, i := range r.h.byID {
		n := i.holds()
		if r.given[i] > 0 {
			coming += i.size - n
			n = i.size
		}
		used += n
	}
	r.h.mu.RUnlock()
	free := r.h.cfg.Memory - used
	if f := r.h.cfg.Available; f != nil {
		if n, err := f(); err == nil { // otherwise only the budget counts
			free = min(free, n-coming)
		}
	}
	return free
}

// make pushes sleeping instances down until the first waiter has enough memory.
func (r *room) make() {
	tried := map[*inst]power.Instance{}
	for {
		short := r.pump()
		i, to := r.pick(short, tried)
		if to == "" {
			break
		}
		tried[i] = to
		if i.pushDown(to) {
			r.mu.Lock()
			r.pushed++
			r.mu.Unlock()
		}
	}
	r.mu.Lock()
	r.making = false
	r.mu.Unlock()
}

// pick returns the instance to push one step down next.
func (r *room) pick(short int64, tried map[*inst]power.Instance) (*inst, power.Instance) {
	if short <= 0 || r.h.Halted() != nil {
		return nil, ""
	}
	r.mu.Lock()
	wait := map[*inst]bool{}
	for _, w := range r.queue {
		wait[w.i] = true
	}
	for i := range r.given {
		wait[i] = true
	}
	r.mu.Unlock()
	var who []*inst
	var list []admit.Sleeper
	for _, i := range r.h.all() {
		if wait[i] || !i.yields() {
			continue
		}
		c := i.rt.Capabilities()
		s := admit.Sleeper{State: i.state(), Holds: i.holds(), Reclaim: c.Reclaim && tried[i] != power.Reclaimed, Hibernate: c.Hibernate && tried[i] != power.Hibernated}
		i.mu.Lock()
		s.Used = i.rec.LastActivityAt
		i.mu.Unlock()
		who, list = append(who, i), append(list, s)
	}
	n, to := admit.Push(short, list)
	if to == "" {
		return nil, ""
	}
	return who[n], to
}

// yields reports whether i may be pushed down for another: it sleeps, its
// memory counts, and nothing holds it.
func (i *inst) yields() bool {
	now := i.h.Now()
	if i.size == 0 || i.rt.Capabilities().Shared || i.wanted.Load() != nil {
		return false
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	return (i.rec.State == power.Paused || i.rec.State == power.Reclaimed) && i.rec.PausedBy != byOutside &&
		i.guard != nil && !i.heldLocked().After(now) && !i.notBefore.After(now)
}

// pushDown takes one step of the ladder before its time.
func (i *inst) pushDown(to power.Instance) bool {
	if !i.tryAcquire() {
		return false // the lock is taken, which counts as use
	}
	defer i.release()
	i.serve()
	if !i.yields() || i.move(to) != nil {
		return false
	}
	if to == power.Reclaimed {
		i.reclaim(byMemory)
		i.scheduleAsleep(i.h.Now())
	} else {
		i.hibernate(byMemory)
	}
	return i.state() == to
}

// waiting returns how i waits for room; nil when it does not.
func (r *room) waiting(i *inst) *hostctl.Waiting {
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

// Room returns the room of this host and its queue.
func (h *Host) Room() hostctl.Room {
	r := h.room
	r.mu.Lock()
	defer r.mu.Unlock()
	o := hostctl.Room{Memory: h.cfg.Memory, Places: h.cfg.Places, Taken: r.taken, Waiting: len(r.queue), Longest: r.longest,
		Granted: r.granted, Refused: r.refused, Pushed: r.pushed}
	if h.cfg.Memory > 0 {
		o.Free = max(r.freeLocked(), 0)
	}
	return o
}
