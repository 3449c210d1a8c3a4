// Package deadlines keeps one deadline for each of many items, with one timer.
package deadlines

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// Queue holds the deadlines of items of type T. It is safe for concurrent use.
type Queue[T any] struct {
	mu   sync.Mutex
	heap entries[T]
	kick chan struct{} // signals that the first deadline changed
}

// Entry is the place of one item in a Queue.
type Entry[T any] struct {
	item  T
	at    time.Time
	index int // in the heap, -1 outside; guarded by Queue.mu, as at is
}

// NewEntry returns the entry of an item, without a deadline.
func NewEntry[T any](item T) *Entry[T] { return &Entry[T]{item: item, index: -1} }

// New returns an empty queue.
func New[T any]() *Queue[T] { return &Queue[T]{kick: make(chan struct{}, 1)} }

// Set replaces the deadline of e.
func (d *Queue[T]) Set(e *Entry[T], at time.Time) {
	d.mu.Lock()
	e.at = at
	if e.index < 0 {
		heap.Push(&d.heap, e)
	} else {
		heap.Fix(&d.heap, e.index)
	}
	first := e.index == 0
	d.mu.Unlock()
	if first {
		d.wakeOne()
	}
}

// Remove removes the deadline of e, if it has one.
func (d *Queue[T]) Remove(e *Entry[T]) {
	d.mu.Lock()
	if e.index >= 0 {
		heap.Remove(&d.heap, e.index)
	}
	d.mu.Unlock()
}

func (d *Queue[T]) wakeOne() {
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// Next waits for the first deadline, removes it and returns its item. It may be
// called concurrently. It returns false when ctx ends.
func (d *Queue[T]) Next(ctx context.Context) (item T, ok bool) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		d.mu.Lock()
		wait := time.Hour
		if len(d.heap) > 0 {
			e := d.heap[0]
			if wait = time.Until(e.at); wait <= 0 {
				heap.Pop(&d.heap)
				more := len(d.heap) > 0
				d.mu.Unlock()
				if more {
					d.wakeOne() // another caller waits for the next one
				}
				return e.item, ctx.Err() == nil
			}
		}
		d.mu.Unlock()
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-d.kick:
		case <-ctx.Done():
			return item, false
		}
	}
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
