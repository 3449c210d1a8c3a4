package cml

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// reference computes what Filter.Read returns in the simplest way: the whole text
// in memory, encoding/json, maps and sorting. It shares no code with the scanner.
type reference struct {
	cfg  FilterConfig
	now  time.Time
	off  Offset
	seen map[string]time.Time // by the reference's own key for an event

	unknown Reason
	newest  time.Time
	recent  []refEvent
	counts  Counts
	after   map[string]time.Time
}

type refEvent struct {
	category string
	stamp    time.Time
	at       time.Time
	data     string
	dropped  bool
}

func (e refEvent) id() string {
	return e.stamp.Format(time.RFC3339Nano) + "|" + e.category + "|" + e.data + map[bool]string{true: "|dropped"}[e.dropped]
}

func (r *reference) read(text []byte) {
	r.after = map[string]time.Time{}
	r.counts.ByCategory = map[string]int64{}
	r.counts.UnknownCategories = map[string]int64{}
	var events []refEvent
	dec := json.NewDecoder(bytes.NewReader(text))
	tok, err := dec.Token()
	if err == nil && tok != json.Delim('[') {
		r.unknown = ReasonMalformed
		return
	}
	for err == nil && dec.More() {
		var raw json.RawMessage
		if err = dec.Decode(&raw); err == nil {
			r.event(raw, &events)
		}
	}
	if err == nil {
		if tok, err = dec.Token(); err == nil && tok != json.Delim(']') {
			err = errors.New("no closing bracket")
		}
	}
	if err == nil {
		if _, tail := dec.Token(); tail != io.EOF {
			err = errors.New("something follows the array")
		}
	}
	if err != nil {
		r.unknown = ReasonMalformed
		return
	}
	r.shelve(events)
}

func (r *reference) event(raw json.RawMessage, events *[]refEvent) {
	r.counts.Events++
	over := len(raw) > r.cfg.MaxEventBytes
	if over {
		r.counts.Oversized++
	}
	var members map[string]json.RawMessage
	if raw[0] != '{' || json.Unmarshal(raw, &members) != nil {
		r.counts.Malformed++
		return
	}
	var category, stamp *string
	if json.Unmarshal(members["category"], &category) != nil || category == nil || len(members["category"]) > maxShort+2 {
		r.counts.Malformed++
		return
	}
	relevant := slices.Contains(r.cfg.Categories, *category)
	if !relevant && !slices.Contains(documented, *category) && !slices.Contains(relevantByDefault, *category) {
		r.counts.UnknownCategories[*category]++
		return
	}
	if !relevant {
		r.counts.ByCategory[*category]++
		return
	}
	e := refEvent{category: *category, dropped: over}
	ok := json.Unmarshal(members["timestamp"], &stamp) == nil && stamp != nil
	if ok {
		e.stamp, ok = refTime(*stamp)
	}
	if !ok {
		r.counts.Malformed++
		return
	}
	r.counts.ByCategory[*category]++
	if !over {
		e.data = string(members["data"])
	}
	if *category == "user_activity" {
		var data map[string]json.RawMessage
		var user *string
		if json.Unmarshal([]byte(e.data), &data) == nil && json.Unmarshal(data["user_id"], &user) == nil &&
			user != nil && (r.cfg.ExcludedUsers.MatchString(*user) || slices.Contains(r.cfg.ExcludedIDs, *user)) {
			r.counts.ExcludedUsers++
			return
		}
	}
	r.counts.Relevant++
	r.place(&e)
	if e.at.After(r.newest) {
		r.newest = e.at
	}
	*events = append(*events, e)
}

// place sets the time of an event by our clock.
func (r *reference) place(e *refEvent) {
	e.at = e.stamp.Add(-r.off.Low)
	ahead := e.at.Sub(r.now) > time.Minute
	if ahead {
		r.counts.Future++
	}
	first, known := r.seen[e.id()]
	if f, again := r.after[e.id()]; again {
		first, known = f, true
	}
	if ahead && !known {
		first, known = r.now, true
	}
	if known {
		r.after[e.id()] = first
		if e.at.After(first) {
			e.at = first
		}
	}
}

func refTime(s string) (time.Time, bool) {
	s = strings.ToUpper(strings.Replace(s, " ", "T", 1))
	// time.Parse also accepts "T2:00:00" and a comma before the fraction; CML
	// writes neither.
	if len(s) < 19 || s[13] != ':' || strings.Contains(s, ",") {
		return time.Time{}, false
	}
	for _, layout := range []string{"2006-01-02T15:04:05.999999999Z07:00", "2006-01-02T15:04:05.999999999"} {
		if t, err := time.Parse(layout, s); err == nil {
			return t.UTC(), true
		}
	}
	return time.Time{}, false
}

// shelve keeps the newest distinct events as the result.
func (r *reference) shelve(events []refEvent) {
	slices.SortStableFunc(events, func(a, b refEvent) int {
		if c := b.at.Compare(a.at); c != 0 {
			return c
		}
		if c := b.stamp.Compare(a.stamp); c != 0 {
			return c
		}
		return strings.Compare(a.category+"\x00"+a.data+"\x00"+fmt.Sprint(a.dropped), b.category+"\x00"+b.data+"\x00"+fmt.Sprint(b.dropped))
	})
	events = slices.CompactFunc(events, func(a, b refEvent) bool { return a.id() == b.id() })
	r.recent = events[:min(len(events), r.cfg.MaxStored)]
	if r.newest.After(r.now) {
		r.newest = r.now
	}
}
