package cml

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// digestBytes is how many bytes of a SHA-256 identify an event.
const digestBytes = 12

// memory holds the future-dated events seen before and those seen in this pass.
type memory struct {
	max    int
	first  map[string]time.Time // digest -> first seen
	met    map[string]bool      // digests seen in this pass
	oldest time.Time            // earliest first-seen time; zero when empty
}

func newMemory(seen Seen, most int) *memory {
	m := &memory{max: most, first: map[string]time.Time{}, met: map[string]bool{}}
	for _, s := range seen {
		if len(m.first) == most {
			break
		}
		m.first[s.Digest] = s.FirstSeen
		if m.oldest.IsZero() || s.FirstSeen.Before(m.oldest) {
			m.oldest = s.FirstSeen
		}
	}
	return m
}

// concerns reports whether an event with time at may be a stored one. Every
// stored event is dated later than it was first seen.
func (m *memory) concerns(at time.Time) bool {
	return !m.oldest.IsZero() && at.After(m.oldest)
}

// recall returns when ev was first seen.
func (m *memory) recall(ev *found) (time.Time, bool) {
	if len(m.first) == 0 {
		return time.Time{}, false
	}
	d := digest(ev)
	first, ok := m.first[d]
	if ok {
		m.met[d] = true
	}
	return first, ok
}

// store stores ev as first seen now. It returns false if the memory is full.
func (m *memory) store(ev *found, now time.Time) bool {
	if len(m.first) == m.max {
		return false
	}
	d := digest(ev)
	m.first[d] = now
	m.met[d] = true
	if m.oldest.IsZero() || now.Before(m.oldest) {
		m.oldest = now
	}
	return true
}

// seen returns the events to store, in a fixed order. After a complete pass,
// events that are no longer in the history are dropped.
func (m *memory) seen(complete bool) Seen {
	var out Seen
	for d, first := range m.first {
		if !complete || m.met[d] {
			out = append(out, SeenEvent{Digest: d, FirstSeen: first})
		}
	}
	slices.SortFunc(out, func(a, b SeenEvent) int { return cmp.Compare(a.Digest, b.Digest) })
	return out
}

// digest returns the identity of an event across readings. It is derived from the
// host's timestamp, not from the corrected time, which changes with the measured
// offset.
func digest(ev *found) string {
	h := sha256.New()
	fmt.Fprintf(h, "%d.%09d %q %t ", ev.stamp.Unix(), ev.stamp.Nanosecond(), ev.category, ev.dropped)
	h.Write(ev.data)
	return hex.EncodeToString(h.Sum(nil)[:digestBytes])
}

// UnmarshalJSON rejects a digest that this package did not write.
func (s *SeenEvent) UnmarshalJSON(b []byte) error {
	var v struct {
		Digest    string    `json:"digest"`
		FirstSeen time.Time `json:"first_seen"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return fmt.Errorf("cannot read seen event: %w", err)
	}
	if d, err := hex.DecodeString(v.Digest); err != nil || len(d) != digestBytes {
		return fmt.Errorf("cannot read seen event: digest %q is not %d bytes of hex", v.Digest, digestBytes)
	}
	s.Digest, s.FirstSeen = v.Digest, v.FirstSeen
	return nil
}
