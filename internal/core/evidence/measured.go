package evidence

import (
	"slices"
	"time"

	"lull/internal/core/idle"
)

// counts reports whether a signal counts under the trial's policy.
func (t *Trial) counts(signal string) bool { return t.Policy == nil || t.Policy.Counts(signal) }

// tried returns the threshold with which the trial overrides that of a reading.
// ok is false if it does not override it.
func (t *Trial) tried(r *idle.Reading) (float64, bool) {
	if r.Unit == "" || r.State != idle.Active && r.State != idle.Quiet {
		return 0, false
	}
	v, given := t.Thresholds[r.Signal]
	return v, given
}

// judged returns r with its state under the trial's threshold.
func (t *Trial) judged(r idle.Reading) idle.Reading {
	if v, given := t.tried(&r); given {
		r.Threshold, r.State = v, idle.Quiet
		if r.Value >= v {
			r.State = idle.Active
		}
	}
	return r
}

// measured returns the times of use that a check proves about an object that
// measures itself: by its readings, by the Levels since the previous record, and
// by its creation or last resume, which also reset the idle clock.
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

// tops returns the times of the slots in which a signal reached a threshold of
// the trial. A slot's time is that of its last check.
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

// topped reports whether a signal reached a threshold of the trial in the slot
// with that index.
func (t *Trial) topped(r *Record, slot int) bool {
	return slices.ContainsFunc(r.Evidence.Readings, func(x idle.Reading) bool {
		v, given := t.tried(&x)
		high := r.Levels.High[x.Signal]
		return given && t.counts(x.Signal) && len(high) > slot && high[slot] >= v
	})
}

// between returns the events that a check reports about the time before it: a
// start or resume and, if the time before it was not recorded, the object's own
// last-activity time.
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
	// The exact time within a slot is not recorded, so the whole slot counts as
	// use.
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

// steadily returns the time until which use continued throughout a stretch, or
// zero if it did not. If both ends belong to the same run, single times of use
// are not kept, except for signals with Levels.
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

// asked reports whether enough signals were read in a stretch. A signal that was
// skipped because others were active is unknown wherever the trial's thresholds
// make those others quiet.
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

// holds reports whether a signal is active that counts and whose threshold is not
// overridden.
func (t *Trial) holds(r *Record) bool {
	return slices.ContainsFunc(r.Evidence.Readings, func(x idle.Reading) bool {
		_, own := t.tried(&x)
		return !own && t.counts(x.Signal) && x.State == idle.Active
	})
}
