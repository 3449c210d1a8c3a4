// Package events keeps the events of a host's instances, lets any number of
// readers follow them, and stores them across restarts of the daemon.
package events

import (
	"sort"
	"strconv"
	"sync"
	"time"

	"lull/internal/protocol/hostctl"
)

// Feed keeps the newest events and lets any number of readers follow them. A slow
// reader gets every event that is still kept, and is told if some are gone.
//
// Event numbers are unique and increase. The first one is the time of the daemon's
// start in microseconds, but well above the highest number in the log of an earlier
// daemon, whose last events may be missing from the log. Numbers are exact in JSON
// (below 2^53) until the year 2255.
type Feed struct {
	log *Log // nil for none

	mu      sync.Mutex
	ring    []hostctl.Event
	begin   int    // index of the oldest event, once the ring is full
	next    uint64 // number of the next event
	dropped bool   // older events have existed
	fresh   chan struct{}
}

// unkept is more than the number of events that a daemon can add before it dies
// without having logged them.
const unkept = 1 << 20

// New returns a feed that keeps the newest n events, beginning with those in l. If
// l is nil, events do not survive this process.
func New(n int, l *Log) *Feed {
	s := &Feed{log: l, ring: make([]hostctl.Event, 0, n), next: uint64(max(time.Now().UnixMicro(), 1)), fresh: make(chan struct{})}
	if l != nil {
		s.ring = append(s.ring, l.kept[max(0, len(l.kept)-n):]...)
		s.dropped = l.dropped || len(l.kept) > n
		l.kept = nil
	}
	if k := len(s.ring); k > 0 {
		s.next = max(s.next, s.ring[k-1].Seq+unkept)
	}
	return s
}

// Add gives e its number and appends it. Readers see e only after it is in the log.
func (s *Feed) Add(e hostctl.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e.Seq = s.next
	s.next++
	if s.log != nil {
		s.log.take(e)
	}
	if len(s.ring) < cap(s.ring) {
		s.ring = append(s.ring, e)
	} else {
		s.ring[s.begin] = e
		s.begin, s.dropped = (s.begin+1)%len(s.ring), true
	}
	close(s.fresh)
	s.fresh = make(chan struct{})
}

// nth returns the nth event; the oldest is number 0.
func (s *Feed) nth(n int) *hostctl.Event { return &s.ring[(s.begin+n)%len(s.ring)] }

// after returns the index of the first event with a number above seq. whole reports
// whether no event in between has been dropped.
func (s *Feed) after(seq uint64) (n int, whole bool) {
	n = sort.Search(len(s.ring), func(n int) bool { return s.nth(n).Seq > seq })
	switch {
	case n > 0 && s.nth(n-1).Seq == seq, n < len(s.ring) && s.nth(n).Seq == seq+1, seq+1 == s.next:
		return n, true
	case seq == 0:
		return n, !s.dropped
	}
	return n, false
}

// Since returns the kept events after number seq; 0 is before all of them. gone
// reports whether some in between have been dropped. more is closed when there are
// new events.
func (s *Feed) Since(seq uint64) (out []hostctl.Event, gone bool, more <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, whole := s.after(seq)
	for ; n < len(s.ring); n++ {
		out = append(out, *s.nth(n))
	}
	return out, !whole, s.fresh
}

// Last returns the number of the newest event.
func (s *Feed) Last() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next - 1
}

// From parses the position at which a client wants to start: "now", a number, or ""
// for everything. If text is not the number of a kept event, the stream begins with
// the oldest one, and gone is true.
func (s *Feed) From(text string) (seq uint64, gone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if text == "now" {
		return s.next - 1, false
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n == 0 {
		return 0, false
	}
	if _, whole := s.after(n); !whole {
		return 0, true
	}
	return n, false
}
