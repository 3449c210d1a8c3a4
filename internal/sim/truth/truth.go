// Package truth defines when simulated users and loads really used something.
//
// A Use is drawn or written before a test starts, and never derived from a reading,
// so it exposes errors of the code that takes readings. A test drives the simulated
// world from a Use, lets lull run, and calls Check for every automatic action.
package truth

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Span is one period of use, including From and excluding To.
type Span struct{ From, To time.Time }

// Use says when something was in use, as ordered spans that do not touch. The zero
// value means never. A Use is immutable and safe for concurrent use.
type Use struct{ spans []Span }

// Of returns the union of spans. Spans may overlap and be in any order; empty
// ones are dropped.
func Of(spans ...Span) Use {
	sorted := slices.Clone(spans)
	slices.SortFunc(sorted, func(a, b Span) int { return a.From.Compare(b.From) })
	var u Use
	for _, s := range sorted {
		if !s.From.Before(s.To) {
			continue
		}
		if n := len(u.spans); n > 0 && !s.From.After(u.spans[n-1].To) {
			if s.To.After(u.spans[n-1].To) {
				u.spans[n-1].To = s.To
			}
			continue
		}
		u.spans = append(u.spans, s)
	}
	return u
}

// Draw returns random use between from and from+length. Spans and the gaps
// between them range from a second to longest, short ones more often than long
// ones. length and longest must be at least a second.
func Draw(r *rand.Rand, from time.Time, length, longest time.Duration) Use {
	end := from.Add(length)
	var spans []Span
	for t := from; t.Before(end); {
		t = t.Add(drawLength(r, longest))
		to := t.Add(drawLength(r, longest))
		if to.After(end) {
			to = end
		}
		spans = append(spans, Span{t, to})
		t = to
	}
	return Of(spans...)
}

// drawLength returns a duration between a second and longest; half of the draws
// are below an eighth of longest.
func drawLength(r *rand.Rand, longest time.Duration) time.Duration {
	x := r.Float64()
	return max(time.Second, time.Duration(x*x*x*float64(longest)))
}

// Spans returns a copy of the periods of use, in order.
func (u Use) Spans() []Span { return slices.Clone(u.spans) }

// At reports whether t is within a span of use.
func (u Use) At(t time.Time) bool {
	return slices.ContainsFunc(u.spans, func(s Span) bool { return !t.Before(s.From) && t.Before(s.To) })
}

// Share returns the fraction of [from, to) that was in use, from 0 to 1. It is
// 0 for an empty window.
func (u Use) Share(from, to time.Time) float64 {
	if !from.Before(to) {
		return 0
	}
	var used time.Duration
	for _, s := range u.spans {
		a, b := s.From, s.To
		if a.Before(from) {
			a = from
		}
		if b.After(to) {
			b = to
		}
		if d := b.Sub(a); d > 0 {
			used += d
		}
	}
	return float64(used) / float64(to.Sub(from))
}

// Last returns the newest moment of use at or before t; false if there was none.
// During use, it returns t itself.
func (u Use) Last(t time.Time) (time.Time, bool) {
	for _, s := range slices.Backward(u.spans) {
		if t.Before(s.From) {
			continue
		}
		if t.Before(s.To) {
			return t, true
		}
		return s.To, true
	}
	return time.Time{}, false
}

// Check returns an error if there was use less than timeout before the automatic
// action at at. Use that began at most blind before at is ignored, because the
// documented resolution of the sources may hide it.
func (u Use) Check(at time.Time, timeout, blind time.Duration) error {
	for _, s := range slices.Backward(u.spans) {
		if at.Before(s.From) || at.Sub(s.From) <= blind {
			continue
		}
		end := s.To
		if at.Before(end) {
			end = at
		}
		if idle := at.Sub(end); idle < timeout {
			return fmt.Errorf("acted at %s on what was in use from %s to %s: idle for %s, must be %s (blind for %s)",
				at.Format(time.RFC3339), s.From.Format(time.RFC3339), s.To.Format(time.RFC3339), idle, timeout, blind)
		}
		return nil
	}
	return nil
}
