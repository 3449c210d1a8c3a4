package evidence

import (
	"slices"
	"time"

	"lull/internal/idle"
)

// Off is a time during which an object did not run. Automatic: lull's own
// idleness stopped it, so that under another policy it might have gone on.
type Off struct {
	From, To  time.Time
	Automatic bool
}

// Stop is a pause that a policy would have made.
type Stop struct {
	Object string    `json:"object"`
	From   time.Time `json:"from"`
	To     time.Time `json:"to"`
	// Back is whether somebody came back at To, and not only the end of the
	// time that was looked at.
	Back bool `json:"back"`
	// False: they came back within the window, so that it was in their way.
	False bool `json:"false_stop"`
}

// Trial replays the recorded time of one object under a policy: pauses at the
// very second at which the engine would have, a resume whenever somebody used
// it or started it. Feed it stretches in their order, then End.
type Trial struct {
	Object string
	// Policy replaces timeout, snooze, warning and action of the recorded one;
	// nil leaves it.
	Policy   *idle.Policy
	Off      []Off         // recorded, in their order
	Window   time.Duration // activity this soon after a pause makes it a false stop
	From, To time.Time     // what is counted

	Stops          []Stop
	Paused         time.Duration // stopped by the policy
	Running, Other time.Duration // up; stopped by somebody else
	Unknown        time.Duration // nobody looked

	down    time.Time // stopped since; zero while it runs
	resumed time.Time
	warned  time.Time
}

// turn is somebody's use or start of the object.
type turn struct {
	at     time.Time
	resume bool
}

// Add replays one stretch.
func (t *Trial) Add(s Stretch) {
	if s.Check == nil {
		return
	}
	known := time.Time{}
	if a := s.Check.Verdict.LastActivityAt; a != nil {
		known = *a
	}
	var turns []turn
	if s.After != nil {
		for _, a := range s.After.Activity {
			turns = append(turns, turn{at: a})
		}
		if a := s.After.Verdict.LastActivityAt; a != nil {
			turns = append(turns, turn{at: *a})
		}
	}
	turns = slices.DeleteFunc(turns, func(x turn) bool { return !x.at.After(known) })
	if s.To.After(t.To) {
		s.To = t.To // what came after it is told by the check after it, and counts no more
	}
	at := s.From
	if s.After != nil && !s.After.Since.IsZero() && len(turns) > 0 {
		// Use went on all the time, and its end is all there is to know.
		last := slices.MaxFunc(turns, byTime).at
		if !t.down.IsZero() {
			t.back(turn{at: s.From})
		}
		if last.After(at) {
			t.count(&t.Running, at, last)
			at = last
		}
		known, turns, t.warned = last, nil, time.Time{}
	}
	turns = slices.DeleteFunc(turns, func(x turn) bool { return !x.at.Before(t.To) })
	for _, o := range t.Off {
		if !o.To.Before(at) && o.To.Before(s.To) {
			turns = append(turns, turn{at: o.To, resume: true})
		}
	}
	slices.SortStableFunc(turns, byTime)
	for _, x := range turns {
		if x.at.After(at) {
			t.span(at, x.at, &s, known)
			at = x.at
		}
		t.back(x)
		if x.at.After(known) && !x.resume {
			known = x.at
		}
	}
	if s.To.After(at) {
		t.span(at, s.To, &s, known)
	}
}

func byTime(a, b turn) int { return a.at.Compare(b.at) }

// back ends a stop: somebody is there.
func (t *Trial) back(x turn) {
	if !t.down.IsZero() {
		end := x.at
		if end.Before(t.down) {
			end = t.down // it was told late
		}
		t.stop(end, true)
		t.resumed = end
	}
	if x.resume {
		t.resumed = x.at
	}
	t.warned = time.Time{}
}

func (t *Trial) stop(end time.Time, back bool) {
	t.Stops = append(t.Stops, Stop{Object: t.Object, From: t.down, To: end, Back: back, False: back && end.Sub(t.down) <= t.Window})
	t.down = time.Time{}
}

// span is a time without anybody's use, in pieces by what was recorded off.
func (t *Trial) span(from, to time.Time, s *Stretch, known time.Time) {
	for _, o := range t.Off {
		if !o.From.Before(to) || !o.To.After(from) {
			continue
		}
		if o.From.After(from) {
			t.piece(from, o.From, s, known, s.Covers(o.From))
		}
		end := o.To
		if end.After(to) {
			end = to
		}
		if o.From.After(from) {
			from = o.From
		}
		if o.Automatic {
			t.piece(from, end, s, known, true)
		} else {
			if !t.down.IsZero() {
				t.stop(from, false)
			}
			t.count(&t.Other, from, end)
		}
		if from = end; !from.Before(to) {
			return
		}
		t.piece(from, to, s, known, true) // it has just been started
		return
	}
	t.piece(from, to, s, known, s.Known)
}

// piece is a time during which the same is known all along.
func (t *Trial) piece(from, to time.Time, s *Stretch, known time.Time, looked bool) {
	if !looked {
		t.count(&t.Unknown, from, to)
		return
	}
	if t.down.IsZero() {
		at, paused := t.pause(from, to, s, known)
		t.count(&t.Running, from, at)
		if !paused {
			return
		}
		t.down, from = at, at
	}
	t.count(&t.Paused, from, to)
}

func (t *Trial) count(sum *time.Duration, from, to time.Time) {
	if from.Before(t.From) {
		from = t.From
	}
	if to.After(t.To) {
		to = t.To
	}
	*sum += max(to.Sub(from), 0)
}

// pause finds when the policy pauses it in [from, to).
func (t *Trial) pause(from, to time.Time, s *Stretch, known time.Time) (time.Time, bool) {
	p, e := s.Check.Policy, s.Check.Evidence
	if q := t.Policy; q != nil {
		p.Name, p.Timeout, p.Action, p.AutoPause = q.Name, q.Timeout, q.Action, true
		if q.Snooze > 0 {
			p.Snooze = q.Snooze
		}
		if q.WarnBefore > 0 {
			p.WarnBefore = q.WarnBefore
		}
	}
	e.Running, e.LastActivityAt, e.WarningSentAt = true, known, t.warned
	if t.resumed.After(e.LastResumedAt) {
		e.LastResumedAt = t.resumed
	}
	e.Readings = slices.Clone(e.Readings)
	for i := range e.Readings {
		r := &e.Readings[i]
		r.MaxAge = 0 // it was read again all the time
		if r.LastEvent.After(known) {
			r.LastEvent = known
		}
		if r.State == idle.Active && r.LastEvent.IsZero() && r.At.After(known) {
			r.At = known
		}
	}
	e.Guards = slices.DeleteFunc(slices.Clone(e.Guards), func(b idle.Block) bool { return b.Code == idle.Shadow || b.Code == "halted" })
	now := from
	for range 1000 { // each turn is a later moment, or the one warning at it
		if !now.Before(to) {
			break
		}
		v := idle.Decide(now, p, e)
		if v.Eligible {
			return now, true
		}
		if v.WarnDue {
			t.warned, e.WarningSentAt = now, now
			continue
		}
		next := to
		for _, x := range []*time.Time{v.TargetPauseAt, v.WarnAt} {
			if x != nil && x.After(now) && x.Before(next) {
				next = *x
			}
		}
		for _, b := range v.Blocks {
			if b.Until != nil && b.Until.After(now) && b.Until.Before(next) {
				next = *b.Until
			}
		}
		now = next
	}
	return to, false
}

// End closes what is open.
func (t *Trial) End() {
	if !t.down.IsZero() {
		t.stop(t.To, false)
	}
}
