package host

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// deadlines is a heap with at most one deadline per instance: its next check.
// One timer serves them all.
type deadlines struct {
	mu   sync.Mutex
	heap dueHeap
	kick chan struct{} // signals that the first deadline changed
}

func newDeadlines() *deadlines { return &deadlines{kick: make(chan struct{}, 1)} }

// set replaces i's deadline.
func (d *deadlines) set(i *inst, at time.Time) {
	d.mu.Lock()
	i.dueAt = at
	if i.dueIndex < 0 {
		heap.Push(&d.heap, i)
	} else {
		heap.Fix(&d.heap, i.dueIndex)
	}
	first := i.dueIndex == 0
	d.mu.Unlock()
	if first {
		d.wakeOne()
	}
}

func (d *deadlines) remove(i *inst) {
	d.mu.Lock()
	if i.dueIndex >= 0 {
		heap.Remove(&d.heap, i.dueIndex)
	}
	d.mu.Unlock()
}

func (d *deadlines) wakeOne() {
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// next waits for the first deadline and removes it. It may be called
// concurrently. It returns false when ctx ends.
func (d *deadlines) next(ctx context.Context) (*inst, bool) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		d.mu.Lock()
		wait := time.Hour
		if len(d.heap) > 0 {
			i := d.heap[0]
			if wait = time.Until(i.dueAt); wait <= 0 {
				heap.Pop(&d.heap)
				more := len(d.heap) > 0
				d.mu.Unlock()
				if more {
					d.wakeOne() // another caller waits for the next one
				}
				return i, ctx.Err() == nil
			}
		}
		d.mu.Unlock()
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-d.kick:
		case <-ctx.Done():
			return nil, false
		}
	}
}

type dueHeap []*inst

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(a, b int) bool { return h[a].dueAt.Before(h[b].dueAt) }
func (h dueHeap) Swap(a, b int) {
	h[a], h[b] = h[b], h[a]
	h[a].dueIndex, h[b].dueIndex = a, b
}
func (h *dueHeap) Push(x any) {
	i := x.(*inst)
	i.dueIndex = len(*h)
	*h = append(*h, i)
}
func (h *dueHeap) Pop() any {
	old := *h
	i := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	i.dueIndex = -1
	return i
}
