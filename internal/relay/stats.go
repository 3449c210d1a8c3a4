package relay

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Stats counts the outcomes of an instance's clients since it was added.
type Stats struct {
	Accepted    uint64 // accepted connections, and HTTP requests routed to the instance
	Relayed     uint64 // those that reached the backend
	Waiting     int    // clients that wait at present
	Wakes       uint64 // requested wakes
	WakesFailed uint64
	Gone        uint64 // clients that left while they waited
	Refused     uint64 // rejected because the queue, or the listener's limit, was full
	Unreachable uint64 // clients whose ready backend did not accept them
	Panics      uint64

	LastFailure   string // the last failed wake or dial; "" for none
	LastFailureAt time.Time

	Ignored []IgnoredBy // traffic ignored by each noise rule; empty if no rule is set
}

// IgnoredBy counts the traffic that one noise rule has ignored.
type IgnoredBy struct {
	Rule       string // as configured
	Count      uint64
	LastRemote netip.AddrPort
	LastAt     time.Time
}

type stats struct {
	accepted, relayed, wakes, failed, gone, refused, unreachable, panics atomic.Uint64

	mu        sync.Mutex
	failure   string
	failureAt time.Time
	ignored   map[string]*IgnoredBy
}

func (s *stats) wakeFailed(err error) {
	s.failed.Add(1)
	s.note(err)
}

func (s *stats) note(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failure, s.failureAt = err.Error(), time.Now()
}

func (s *stats) ignore(rule string, remote netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ignored == nil {
		s.ignored = map[string]*IgnoredBy{}
	}
	by := s.ignored[rule]
	if by == nil {
		by = &IgnoredBy{Rule: rule}
		s.ignored[rule] = by
	}
	by.Count++
	by.LastRemote, by.LastAt = remote, time.Now()
}

func (s *stats) snapshot(n Noise) Stats {
	out := Stats{
		Accepted:    s.accepted.Load(),
		Relayed:     s.relayed.Load(),
		Wakes:       s.wakes.Load(),
		WakesFailed: s.failed.Load(),
		Gone:        s.gone.Load(),
		Refused:     s.refused.Load(),
		Unreachable: s.unreachable.Load(),
		Panics:      s.panics.Load(),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out.LastFailure, out.LastFailureAt = s.failure, s.failureAt
	for _, rule := range n.rules() {
		by := IgnoredBy{Rule: rule}
		if have := s.ignored[rule]; have != nil {
			by = *have
		}
		out.Ignored = append(out.Ignored, by)
	}
	return out
}

func (b IgnoredBy) String() string {
	if b.Count == 0 {
		return fmt.Sprintf("%s: none", b.Rule)
	}
	return fmt.Sprintf("%s: %d, last from %v at %s", b.Rule, b.Count, b.LastRemote, b.LastAt.Format(time.RFC3339))
}
