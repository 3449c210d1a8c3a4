package relay

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"
)

// waiter is one place in an instance's queue: a connection of an event loop (c)
// or a goroutine (ch, with capacity for one answer).
type waiter struct {
	prev, next *waiter
	queued     bool
	noise      bool // it neither requests a wake nor keeps one in progress
	rounds     int  // how often it queued for the same purpose
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

// queue is the list of waiters of one instance and the one wake requested for
// them. Guarded by Instance.mu.
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

// takeAll empties the list and returns it in order of arrival.
func (q *queue) takeAll() []*waiter {
	var all []*waiter
	for w := q.first; w != nil; w = q.first {
		q.remove(w)
		all = append(all, w)
	}
	return all
}

// enqueue makes w wait for a wake, or for the gate and then a wake. The caller
// has counted w as waiting in the gate and keeps that count whatever the answer
// is. After an error w is not queued.
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

// dequeue removes w from the queue. It returns false if w's answer is already
// in progress.
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

// kick starts a wake if a connection waits for one and none is in progress. The
// caller holds the lock.
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

// fly requests one wake and passes its outcome to every waiter.
func (in *Instance) fly(ctx context.Context, arrival Arrival, rounds int) {
	err := in.wake(ctx, arrival, rounds)
	in.mu.Lock()
	in.q.cancel(nil)
	in.q.flying = false
	if err != nil && errors.Is(context.Cause(ctx), errAbandoned) {
		// Connections that came after the last waiter had left still need a
		// wake.
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

// wake calls the waker once. A repeated call for the same waiter (Wake
// succeeded, but Ready returned false) is delayed, so that a faulty waker costs
// no CPU.
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
