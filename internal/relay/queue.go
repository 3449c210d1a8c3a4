package relay

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"
)

// waiter is a place in an instance's queue, either for a connection of an event
// loop (c) or for a goroutine (ch, which has room for one result).
type waiter struct {
	prev, next *waiter
	queued     bool
	noise      bool // whether it is noise, for which no wake is requested or continued
	rounds     int  // how often it was queued for the same purpose
	deadline   time.Time
	arrival    Arrival
	c          *conn
	ch         chan error
}

func (w *waiter) resume(err error) {
	if w.c != nil {
		w.c.loop.post(message{c: w.c, err: err})
		return
	}
	w.ch <- err
}

// queue holds the waiters of one instance, and the wake in progress for them.
// Guarded by Instance.mu.
type queue struct {
	first, last *waiter
	asking      int // waiters that are not noise
	arrivals    int // waiters that count against the limit
	cancel      context.CancelCauseFunc
	flying      bool
}

func (q *queue) push(w *waiter) {
	w.queued, w.prev, w.next = true, q.last, nil
	if q.last == nil {
		q.first = w
	} else {
		q.last.next = w
	}
	q.last = w
	if !w.noise {
		q.asking++
		if w.arrival.Cause != CauseData {
			q.arrivals++
		}
	}
}

func (q *queue) remove(w *waiter) {
	if w.prev == nil {
		q.first = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		q.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.queued, w.prev, w.next = false, nil, nil
	if !w.noise {
		q.asking--
		if w.arrival.Cause != CauseData {
			q.arrivals--
		}
	}
}

// takeAll empties the queue and returns the waiters in order of arrival.
func (q *queue) takeAll() []*waiter {
	var all []*waiter
	for w := q.first; w != nil; w = q.first {
		q.remove(w)
		all = append(all, w)
	}
	return all
}

// enqueue makes w wait for the gate to open and for a wake. The caller must have
// counted w as waiting in the gate, and stays responsible for that count. After an
// error w is not queued.
func (in *Instance) enqueue(w *waiter) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return ErrClosed
	}
	if w.rounds == 0 {
		w.deadline = time.Now().Add(in.opt.WakeTimeout)
		if w.arrival.Cause != CauseData && in.q.arrivals >= in.opt.MaxWaiting {
			return ErrQueueFull
		}
	} else if !w.noise && w.arrival.Cause != CauseData && time.Now().After(w.deadline) {
		return fmt.Errorf("cannot reach %s: %w within %v", in.name, ErrNotAccept, in.opt.WakeTimeout)
	}
	w.rounds++
	in.q.push(w)
	in.kick()
	return nil
}

// dequeue removes w from the queue. It returns false if w is already being resumed.
func (in *Instance) dequeue(w *waiter) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !w.queued {
		return false
	}
	in.q.remove(w)
	if in.q.asking == 0 && in.q.flying {
		in.q.cancel(errAbandoned)
	}
	return true
}

// kick starts a wake if a connection needs one and none is in progress. in.mu must
// be held.
func (in *Instance) kick() {
	if in.q.flying || in.q.asking == 0 || in.closed || in.gate.held() {
		return
	}
	w := in.q.first
	for w.noise {
		w = w.next
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	in.q.flying, in.q.cancel = true, cancel
	arrival, rounds := w.arrival, w.rounds
	in.flights.Go(func() { in.fly(ctx, arrival, rounds) })
}

// fly requests one wake and passes its result to every waiter.
func (in *Instance) fly(ctx context.Context, arrival Arrival, rounds int) {
	err := in.wake(ctx, arrival, rounds)
	in.mu.Lock()
	in.q.cancel(nil)
	in.q.flying = false
	if err != nil && errors.Is(context.Cause(ctx), errAbandoned) {
		// Connections may have come after the last waiter had left. They still need
		// a wake.
		in.kick()
		in.mu.Unlock()
		return
	}
	all := in.q.takeAll()
	in.mu.Unlock()
	if err != nil {
		in.stats.wakeFailed(err)
	}
	for _, w := range all {
		w.resume(err)
	}
}

// wake calls the waker once. It delays repeated calls for the same waiter, which
// happen if Wake succeeds but Ready returns false, so that a faulty waker does not
// use up the CPU.
func (in *Instance) wake(ctx context.Context, arrival Arrival, rounds int) (err error) {
	ctx, cancel := context.WithTimeout(ctx, in.opt.WakeTimeout)
	defer cancel()
	if rounds > 2 {
		pause := time.NewTimer(min(time.Millisecond<<min(rounds-2, 10), 100*time.Millisecond))
		defer pause.Stop()
		select {
		case <-pause.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	defer func() {
		if p := recover(); p != nil {
			in.stats.panics.Add(1)
			in.log.Error("wake panicked", "instance", in.name, "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("cannot wake %s: %w: panic: %v", in.name, ErrWake, p)
		}
	}()
	in.stats.wakes.Add(1)
	if err := in.waker.Wake(ctx, arrival); err != nil {
		return fmt.Errorf("cannot wake %s: %w: %w", in.name, ErrWake, err)
	}
	return nil
}
