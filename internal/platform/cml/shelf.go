package cml

import (
	"bytes"
	"cmp"
	"encoding/json"
	"time"
)

// found is a relevant event before it is put on the shelf.
type found struct {
	at       time.Time // by our clock
	stamp    time.Time // as written, in UTC
	category string
	data     []byte
	dropped  bool
}

// compare orders events by time, newest first. It is a total order in which
// only equal events are equal, so the content of a shelf does not depend on the
// order in which events arrive.
func (a *found) compare(b *found) int {
	byDropped := 0
	if a.dropped != b.dropped {
		byDropped = 1
		if b.dropped {
			byDropped = -1
		}
	}
	return cmp.Or(
		b.at.Compare(a.at),
		b.stamp.Compare(a.stamp),
		cmp.Compare(a.category, b.category),
		bytes.Compare(a.data, b.data),
		byDropped,
	)
}

// shelf keeps the newest max distinct events.
type shelf struct {
	max  int
	kept []found // newest first; owns its data
}

// put keeps ev if it is among the newest max events. Its data is copied, into the
// memory of the event that it replaces if there is one. put reports whether the
// shelf already contained ev.
func (s *shelf) put(ev found) (duplicate bool) {
	n := len(s.kept)
	if s.max == 0 || n == s.max && s.kept[n-1].at.After(ev.at) {
		return false
	}
	at := 0
	for at < n && s.kept[at].compare(&ev) < 0 {
		at++
	}
	if at < n && s.kept[at].compare(&ev) == 0 {
		return true
	}
	if at == s.max {
		return false
	}
	var room []byte
	if n < s.max {
		s.kept = append(s.kept, found{})
	} else {
		room = s.kept[n-1].data[:0]
	}
	ev.data = append(room, ev.data...)
	copy(s.kept[at+1:], s.kept[at:])
	s.kept[at] = ev
	return false
}

func (s *shelf) events() []Event {
	if len(s.kept) == 0 {
		return nil
	}
	events := make([]Event, len(s.kept))
	for i, k := range s.kept {
		events[i] = Event{Category: k.category, Timestamp: k.stamp, DataDropped: k.dropped, At: k.at}
		if len(k.data) > 0 {
			events[i].Data = json.RawMessage(k.data)
		}
	}
	return events
}
