package evidence

import (
	"slices"
	"time"

	"lull/internal/idle"
)

// counts tells whether the trial lets a signal count.
func (t *Trial) counts(signal string) bool { return t.Policy == nil || t.Policy.Counts(signal) }

// tried is the trial's threshold of a reading, if it has one of its own.
func (t *Trial) tried(r *idle.Reading) (float64, bool) {
	if r.Unit == "" || r.State != idle.Active && r.State != idle.Quiet {
		return 0, false
	}
	v, given := t.Thresholds[r.Signal]
	return v, given
}

// judged is a reading as the trial's threshold makes it.
func (t *Trial) judged(r idle.Reading) idle.Reading {
	if v, given := t.tried(&r); given {
		r.Threshold, r.State = v, idle.Quiet
		if r.Value >= v {
			r.State = idle.Active
		}
	}
	return r
}

// measured are the times of use that a check of one that measures itself tells
// of: what its readings prove, the values before it, and that it began or came
// back, which its own idle clock counts as well.
func (t *Trial) measured(r *Record) []time.Time {
	out := t.tops(r)
	for _, x := range r.Evidence.Readings {
		if x = t.judged(x); t.counts(x.Signal) {
			if at := x.ActivityAt(); !at.IsZero() {
				out = append(out, at)
			}
		}
	}
	for _, at := range []time.Time{r.Evidence.CreatedAt, r.Evidence.LastResumedAt} {
		if !at.IsZero() {
			out = append(out, at)
		}
	}
	return out
}

// tops are the checks that end slots in which a signal reached a threshold of
// the trial's own.
func (t *Trial) tops(r *Record) (out []time.Time) {
	if r.Levels == nil {
		return nil
	}
	for i, at := range r.Levels.At {
		if t.topped(r, i) {
			out = append(out, at)
		}
	}
	return out
}

// topped tells whether a signal reached a threshold of the trial's own in a slot.
func (t *Trial) topped(r *Record, slot int) bool {
	return slices.ContainsFunc(r.Evidence.Readings, func(x idle.Reading) bool {
		v, given := t.tried(&x)
		high := r.Levels.High[x.Signal]
		return given && t.counts(x.Signal) && len(high) > slot && high[slot] >= v
	})
}

// between are turns that only what came before a check tells of: it began or
// came back; and where nobody heard of it, its own word on when it was used.
func (t *Trial) between(s *Stretch) (out []turn) {
	e, was := &s.After.Evidence, &s.Check.Evidence
	if !e.CreatedAt.Equal(was.CreatedAt) && e.CreatedAt.After(s.Check.At) {
		out = append(out, turn{at: e.CreatedAt, resume: true})
	}
	if !e.LastResumedAt.Equal(was.LastResumedAt) && e.LastResumedAt.After(s.Check.At) {
		out = append(out, turn{at: e.LastResumedAt, resume: true})
	}
	if !s.Known && e.LastActivityAt.After(s.Check.At) {
		out = append(out, turn{at: e.LastActivityAt})
	}
	// When in a slot the value was reached is not kept: it counts for all of it.
	step := levelSlot
	if t.Policy != nil && t.Policy.Timeout > 0 {
		step = max(min(step, time.Duration(t.Policy.Timeout)/2), 10*time.Second)
	}
	for _, end := range t.tops(s.After) {
		from := end.Truncate(levelSlot)
		if !from.After(s.Check.At) {
			from = s.Check.At.Add(time.Second)
		}
		for ; from.Before(end); from = from.Add(step) {
			out = append(out, turn{at: from})
		}
	}
	return out
}

// steadily is until when use went on all through a stretch: where its end is of
// the same run as its beginning, the single times of use are not kept. Zero is
// not at all. Of a signal whose values are kept the single times are known.
func (t *Trial) steadily(s *Stretch, turns []turn) (last time.Time) {
	if s.After == nil || s.After.Since.IsZero() {
		return last
	}
	if !t.Measured {
		for _, x := range turns {
			if x.at.After(last) {
				last = x.at
			}
		}
		return last
	}
	for i := range s.After.Evidence.Readings {
		x := &s.After.Evidence.Readings[i]
		if _, own := t.tried(x); own || !t.counts(x.Signal) {
			continue
		}
		if at := x.ActivityAt(); at.After(last) && at.After(s.From) {
			last = at
		}
	}
	return last
}

// asked tells whether enough was read of a stretch: signals that were left out,
// since others were in use already, are not known where the trial's thresholds
// call those others quiet at any moment of it.
func (t *Trial) asked(s *Stretch) bool {
	if !slices.ContainsFunc(s.Check.Unasked, t.counts) {
		return true
	}
	used := func(r *Record) bool {
		return slices.ContainsFunc(r.Evidence.Readings, func(x idle.Reading) bool {
			return t.counts(x.Signal) && t.judged(x).State == idle.Active
		})
	}
	if !used(s.Check) {
		return false
	}
	if a := s.After; a != nil && !a.Since.IsZero() && a.Levels != nil && !t.holds(a) {
		for i := range a.Levels.At {
			if !t.topped(a, i) {
				return false
			}
		}
	}
	return true
}

// holds tells whether a signal without a threshold of the trial's own is active.
func (t *Trial) holds(r *Record) bool {
	return slices.ContainsFunc(r.Evidence.Readings, func(x idle.Reading) bool {
		_, own := t.tried(&x)
		return !own && t.counts(x.Signal) && x.State == idle.Active
	})
}
