package host

import (
	"lull/internal/link/hostctl"
	"sync"
)

// Events keeps the newest events and lets any number of readers follow. A
// reader that is too slow misses none that is still kept, and is told when
// some are gone.
type Events struct {
	mu    sync.Mutex
	ring  []hostctl.Event
	next  uint64 // sequence number of the next event; the first is 1
	fresh chan struct{}
}

// NewEvents keeps the newest n events.
func NewEvents(n int) *Events {
	return &Events{ring: make([]hostctl.Event, 0, n), next: 1, fresh: make(chan struct{})}
}

// Add appends e and gives it its number.
func (s *Events) Add(e hostctl.Event) {
	s.mu.Lock()
	e.Seq = s.next
	s.next++
	if len(s.ring) < cap(s.ring) {
		s.ring = append(s.ring, e)
	} else {
		s.ring[(e.Seq-1)%uint64(cap(s.ring))] = e
	}
	close(s.fresh)
	s.fresh = make(chan struct{})
	s.mu.Unlock()
}

// Since returns the kept events after seq, whether some in between are gone,
// and a channel that is closed when more come.
func (s *Events) Since(seq uint64) (out []hostctl.Event, gone bool, more <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	oldest := s.next - uint64(len(s.ring))
	if seq+1 < oldest {
		gone, seq = true, oldest-1
	}
	for n := seq + 1; n < s.next; n++ {
		out = append(out, s.ring[(n-1)%uint64(cap(s.ring))])
	}
	return out, gone, s.fresh
}

// Last is the number of the newest event.
func (s *Events) Last() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next - 1
}
