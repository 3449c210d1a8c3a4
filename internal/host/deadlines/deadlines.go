// Package deadlines keeps a deadline for each of many items with a single timer.
package deadlines

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// Queue holds the deadlines of items of type T. It is safe for concurrent use.
//
// One goroutine of Run, the leader, waits for the first deadline and handles the
// item itself, so that no other goroutine has to be woken. If handling takes long,
// another goroutine becomes the leader.
type Queue[T any] struct {
	alarm func() (Alarm, error)

	mu      sync.Mutex
	heap    entries[T]
	handle  func(item T, yield func()) // nil unless Run runs
	width   int
	next    Alarm     // the leader waits on it for the first deadline
	watch   Alarm     // set while the leader handles an item, to notice if that takes long
	stint   uint64    // number of the current leader
	vacant  bool      // there is no leader: the next goroutine that has handled its item becomes it
	waiting bool      // the leader is waiting on next
	since   time.Time // when the leader began to handle an item; zero if it handles none
	running int       // number of items being handled
	busy    sync.WaitGroup
}

// patience is how long the leader may handle an item before another goroutine
// becomes the leader.
const patience = 20 * time.Millisecond

// Alarm lets one goroutine wait for a time that others can change.
type Alarm interface {
	Set(at time.Time) // replaces the time; zero means never. It does not block.
	Wait()            // returns once the time has come, and sometimes earlier
	Close()           // makes Wait return
}

// Entry is the place of one item in a Queue.
type Entry[T any] struct {
	item  T
	at    time.Time
	index int // index in the heap, or -1; like at, guarded by Queue.mu
}

// NewEntry returns an entry for item, without a deadline.
func NewEntry[T any](item T) *Entry[T] { return &Entry[T]{item: item, index: -1} }

// New returns an empty queue. alarm makes the alarms for Run. If it is nil or
// fails, Go timers are used.
func New[T any](alarm func() (Alarm, error)) *Queue[T] { return &Queue[T]{alarm: alarm} }

func (d *Queue[T]) newAlarm() Alarm {
	if d.alarm != nil {
		if a, err := d.alarm(); err == nil {
			return a
		}
	}
	return newTimer()
}

// Set replaces the deadline of e.
func (d *Queue[T]) Set(e *Entry[T], at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e.at = at
	if e.index < 0 {
		heap.Push(&d.heap, e)
	} else {
		heap.Fix(&d.heap, e.index)
	}
	if e.index == 0 && d.waiting {
		d.next.Set(at)
	}
}

// Remove removes the deadline of e, if it has one.
func (d *Queue[T]) Remove(e *Entry[T]) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e.index >= 0 {
		heap.Remove(&d.heap, e.index) // the alarm that is set for it will find nothing due
	}
}

// Run removes each deadline when it is due and calls handle with the item, at most
// width times concurrently. handle must call yield before it does anything that may
// take long, so that other items need not wait. When ctx ends, Run waits until all
// calls have returned. It may be called again afterwards, but not concurrently.
func (d *Queue[T]) Run(ctx context.Context, width int, handle func(item T, yield func())) {
	next, watch := d.newAlarm(), d.newAlarm()
	d.mu.Lock()
	d.handle, d.width, d.next, d.watch = handle, width, next, watch
	d.promoteLocked()
	d.mu.Unlock()
	d.busy.Go(d.supervise)
	<-ctx.Done()
	d.mu.Lock()
	d.handle = nil
	d.mu.Unlock()
	next.Close()
	watch.Close()
	d.busy.Wait()
}

// promoteLocked makes another goroutine the leader. d.mu must be held.
func (d *Queue[T]) promoteLocked() {
	d.stint++
	d.since = time.Time{}
	if d.vacant = d.running >= d.width; !d.vacant {
		mine := d.stint
		d.busy.Go(func() { d.lead(mine) })
	}
}

// lead handles items that are due until another goroutine is the leader. mine is
// the caller's number as the leader.
func (d *Queue[T]) lead(mine uint64) {
	yield := func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if mine == d.stint {
			d.promoteLocked()
		}
	}
	d.mu.Lock()
	for d.handle != nil {
		if mine != d.stint {
			if !d.vacant {
				break
			}
			d.stint++
			mine, d.vacant = d.stint, false
		}
		if len(d.heap) == 0 || time.Until(d.heap[0].at) > 0 {
			at := time.Time{}
			if len(d.heap) > 0 {
				at = d.heap[0].at
			}
			d.next.Set(at)
			d.waiting = true
			d.mu.Unlock()
			d.next.Wait()
			d.mu.Lock()
			d.waiting = false
			continue
		}
		e := heap.Pop(&d.heap).(*Entry[T])
		handle := d.handle
		d.running++
		d.since = time.Now()
		d.watch.Set(d.since.Add(patience))
		d.mu.Unlock()
		handle(e.item, yield)
		d.mu.Lock()
		d.running--
		if mine == d.stint {
			d.since = time.Time{}
			d.watch.Set(time.Time{})
		}
	}
	d.mu.Unlock()
}

// supervise makes another goroutine the leader if the leader has handled an item
// for longer than patience without yielding.
func (d *Queue[T]) supervise() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.handle != nil {
		d.mu.Unlock()
		d.watch.Wait()
		d.mu.Lock()
		if d.handle != nil && !d.since.IsZero() && time.Since(d.since) >= patience {
			d.promoteLocked()
		}
	}
}

// timer is an Alarm that uses a Go timer.
type timer struct {
	t      *time.Timer
	closed chan struct{}
}

func newTimer() *timer {
	t := &timer{time.NewTimer(time.Hour), make(chan struct{})}
	t.t.Stop()
	return t
}

func (t *timer) Set(at time.Time) {
	if at.IsZero() {
		t.t.Stop()
	} else {
		t.t.Reset(time.Until(at))
	}
}

func (t *timer) Wait() {
	select {
	case <-t.t.C:
	case <-t.closed:
	}
}

func (t *timer) Close() {
	t.t.Stop()
	close(t.closed)
}

type entries[T any] []*Entry[T]

func (h entries[T]) Len() int           { return len(h) }
func (h entries[T]) Less(a, b int) bool { return h[a].at.Before(h[b].at) }
func (h entries[T]) Swap(a, b int) {
	h[a], h[b] = h[b], h[a]
	h[a].index, h[b].index = a, b
}

// Push implements heap.Interface.
func (h *entries[T]) Push(x any) {
	e := x.(*Entry[T])
	e.index = len(*h)
	*h = append(*h, e)
}

// Pop implements heap.Interface.
func (h *entries[T]) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	e.index = -1
	return e
}
