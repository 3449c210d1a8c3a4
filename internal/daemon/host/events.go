package host

import (
	"strconv"
	"sync"
	"time"

	"lull/internal/link/hostctl"
)

// Events keeps the newest events and lets any number of readers follow. A
// reader that is too slow misses none that is still kept, and is told when
// some are gone.
//
// Numbers begin at the microsecond of the start, so that those of one daemon are
// not those of the one before it, unless the clock was put back, and are exact in
// JSON (below 2^53) until the year 2255.
type Events struct {
	mu    sync.Mutex
	ring  []hostctl.Event
	first uint64 // sequence number of the first event
	next  uint64 // and of the next one
	fresh chan struct{}
}

// NewEvents keeps the newest n events.
func NewEvents(n int) *Events {
	first := uint64(max(time.Now().UnixMicro(), 1))
	return &Events{ring: make([]hostctl.Event, 0, n), first: first, next: first, fresh: make(chan struct{})}
}

// Add appends e and gives it its number.
func (s *Events) Add(e hostctl.Event) {
	s.mu.Lock()
	e.Seq = s.next
	s.next++
	if len(s.ring) < cap(s.ring) {
		s.ring = append(s.ring, e)
	} else {
		s.ring[s.at(e.Seq)] = e
	}
	close(s.fresh)
	s.fresh = make(chan struct{})
	s.mu.Unlock()
}

// at is where the event of a number lies.
func (s *Events) at(seq uint64) uint64 { return (seq - s.first) % uint64(cap(s.ring)) }

// oldest is the number of the oldest event that is kept.
func (s *Events) oldest() uint64 { return s.next - uint64(len(s.ring)) }

// Since returns the kept events after seq, 0 being before all of them, whether some in between are gone,
// and a channel that is closed when more come.
func (s *Events) Since(seq uint64) (out []hostctl.Event, gone bool, more <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if oldest := s.oldest(); seq+1 < oldest {
		gone, seq = seq > 0 || oldest > s.first, oldest-1
	}
	for n := seq + 1; n < s.next; n++ {
		out = append(out, s.ring[s.at(n)])
	}
	return out, gone, s.fresh
}

// Last is the number of the newest event.
func (s *Events) Last() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next - 1
}

// from reads where a client of the stream wants to begin, and whether what came
// after that is not known here: it is the number of an event that is no longer
// kept, or of another daemon's. Then it begins with all that is kept.
func (s *Events) from(text string) (seq uint64, gone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if text == "now" {
		return s.next - 1, false
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n == 0 {
		return 0, false
	}
	if n+1 < s.oldest() || n >= s.next {
		return 0, true
	}
	return n, false
}
