package evidence

import (
	"slices"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy"
)

// Jitter is how far the time of one event may differ between two readings of the
// same history, because the clock offset of its host is known only that
// precisely.
const Jitter = 2 * time.Second

// Off is a period in which an object did not run. Automatic is set if lull's
// idle pause stopped it, so that another policy might have kept it running.
type Off struct {
	From, To  time.Time
	Automatic bool
	Policy    string // policy that stopped it; empty if not recorded
}

// Stop is a pause that a policy would have made.
type Stop struct {
	Object string    `json:"object"`
	From   time.Time `json:"from"`
	To     time.Time `json:"to"`
	// Back reports whether use resumed at To; otherwise the simulated period
	// ended.
	Back bool `json:"back"`
	// False marks a false stop: use resumed within the window.
	False bool `json:"false_stop"`
}

// Trial replays the recorded history of one object under a policy: it pauses at
// the second at which the engine would have, and resumes at the next use or
// start. Call Add with the stretches in order, then End.
type Trial struct {
	Object string
	// Policy replaces the timeout, action and signals of the recorded policy; nil
	// keeps them. Periods in which one of its signals was not read are unknown.
	Policy *idle.Policy
	// Snooze and WarnBefore replace those of the recorded policy; nil keeps
	// them, 0 disables them.
	Snooze, WarnBefore *idle.Duration
	// Measured is set for objects that measure themselves and whose records have
	// Levels. Use is then derived from the values of the signals.
	Measured bool
	// Thresholds replace the recorded thresholds of numeric signals, in their
	// units; only with Measured.
	Thresholds map[string]float64
	// Ignored lists guards that would not exist under the policy.
	Ignored []idle.Code
	// Never means that the policy never pauses for idleness.
	Never bool
	// Schedule returns the state of the policy's schedule at a time. If it is
	// nil, the recorded schedules and freezes apply.
	Schedule func(time.Time) *policy.ScheduleState

	Off      []Off         // recorded, in order
	Window   time.Duration // activity this soon after a pause makes it a false stop
	From, To time.Time     // the period that is evaluated

	Stops          []Stop
	Paused         time.Duration // paused by the policy
	Running, Other time.Duration // running; stopped by others
	Unknown        time.Duration // no checks

	down    time.Time // start of the simulated pause; zero while running
	resumed time.Time
	warned  time.Time
	used    time.Time // last use, by the signals that count
}

// turn is one use or start of the object that ends a simulated pause.
type turn struct {
	at     time.Time
	resume bool
	opens  bool // a schedule that starts workers
}

// Add replays one stretch.
func (t *Trial) Add(s Stretch) {
	if s.Check == nil {
		return
	}
	known := t.used
	for _, a := range t.uses(s.Check) {
		if a.After(known) {
			known = a
		}
	}
	if t.Measured && s.Known && !t.asked(&s) {
		s.Known = false
	}
	var turns []turn
	if s.After != nil {
		for _, a := range t.uses(s.After) {
			turns = append(turns, turn{at: a})
		}
	}
	// A use whose time is only slightly different is the same use, read again.
	same := Jitter
	if t.Measured {
		same = 0 // its own clock measured it, so equal times are equal
		if s.After != nil {
			turns = append(turns, t.between(&s)...)
		}
	}
	turns = slices.DeleteFunc(turns, func(x turn) bool { return x.at.Sub(known) <= same })
	if s.To.After(t.To) {
		s.To = t.To // later use is reported by the next check and does not count here
	}
	at := s.From
	if last := t.steadily(&s, turns); last.After(known) {
		// Use continued throughout the stretch; only its end is known.
		if !t.down.IsZero() {
			t.back(turn{at: s.From})
		}
		if last.After(at) {
			t.count(&t.Running, at, last)
			at = last
		}
		known, t.warned = last, time.Time{}
		turns = slices.DeleteFunc(turns, func(x turn) bool { return !x.at.After(last) })
	}
	turns = slices.DeleteFunc(turns, func(x turn) bool { return !x.at.Before(t.To) })
	for _, o := range t.Off {
		if !o.To.Before(at) && o.To.Before(s.To) {
			turns = append(turns, turn{at: o.To, resume: true})
		}
	}
	turns = append(turns, t.openings(at, s.To)...)
	slices.SortStableFunc(turns, byTime)
	for _, x := range turns {
		if x.at.After(at) {
			t.span(at, x.at, &s, known)
			at = x.at
		}
		t.back(x)
		if x.at.After(known) && !x.resume && !x.opens {
			known = x.at
		}
	}
	if s.To.After(at) {
		t.span(at, s.To, &s, known)
	}
	t.used = known
}

func byTime(a, b turn) int { return a.at.Compare(b.at) }

// eventful is the signal for which records keep every time of use.
const eventful = "cml"

// uses returns the times of use that a check proves, by the signals that count.
func (t *Trial) uses(r *Record) []time.Time {
	if t.Measured {
		return t.measured(r)
	}
	if t.Policy == nil || t.Policy.Signals == nil {
		out := slices.Clone(r.Activity)
		if a := r.Verdict.LastActivityAt; a != nil {
			out = append(out, *a)
		}
		return out
	}
	var out []time.Time
	if t.Policy.Counts(eventful) {
		out = slices.Clone(r.Activity)
	}
	for i := range r.Evidence.Readings {
		if x := &r.Evidence.Readings[i]; t.Policy.Counts(x.Signal) {
			if at := x.ActivityAt(); !at.IsZero() {
				out = append(out, at)
			}
		}
	}
	return out
}

// read reports whether every signal that the policy names was read.
func (t *Trial) read(r *Record) bool {
	if t.Policy == nil {
		return true
	}
	for _, name := range t.Policy.Signals {
		if !slices.ContainsFunc(r.Evidence.Readings, func(x idle.Reading) bool { return x.Signal == name }) {
			return false
		}
	}
	return true
}

// openings returns the times in [from, to) at which the schedule starts workers.
func (t *Trial) openings(from, to time.Time) (out []turn) {
	if t.Schedule == nil {
		return nil
	}
	for at := from.Add(-time.Nanosecond); ; { // from itself counts
		st := t.Schedule(at)
		if st == nil || st.Next == nil || !st.Next.At.Before(to) {
			return out
		}
		if at = st.Next.At; st.Next.Opens && st.Start {
			out = append(out, turn{at: at, opens: true})
		}
	}
}

// back ends the simulated stop because of a use or a scheduled start.
func (t *Trial) back(x turn) {
	if x.opens {
		if !t.down.IsZero() {
			t.stop(x.at, false)
			t.resumed = x.at
		}
		return
	}
	if !t.down.IsZero() {
		end := x.at
		if end.Before(t.down) {
			end = t.down // it was reported late
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

// span replays a period without use. It is split where the object was recorded as
// off.
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
		t.piece(from, to, s, known, true) // just started
		return
	}
	t.piece(from, to, s, known, s.Known)
}

// piece replays a period in which nothing is recorded to change.
func (t *Trial) piece(from, to time.Time, s *Stretch, known time.Time, looked bool) {
	if !looked || !t.read(s.Check) {
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

// trialled returns the policy and evidence of a check, as changed by the trial.
func (t *Trial) trialled(s *Stretch, known time.Time) (idle.Policy, idle.Evidence) {
	p, e := s.Check.Policy, s.Check.Evidence
	scheduled := strings.HasPrefix(p.Name, "schedule ") // a schedule decided it, which need not apply in the trial
	if q := t.Policy; q != nil {
		p.Name, p.Timeout, p.Action, p.AutoPause = q.Name, q.Timeout, q.Action, true
		if q.Signals != nil {
			p.Signals = q.Signals
		} else if scheduled && len(p.Signals) == 0 {
			p.Signals = nil // with force, readings do not matter
		}
	}
	if t.Snooze != nil {
		p.Snooze = *t.Snooze
	}
	if t.WarnBefore != nil {
		p.WarnBefore = *t.WarnBefore
	}
	if !e.LastActivityAt.Equal(known) {
		e.LastActivityBy = ""
	}
	e.Running, e.LastActivityAt = true, known
	if t.resumed.After(e.LastResumedAt) {
		e.LastResumedAt = t.resumed
	}
	e.Readings = slices.Clone(e.Readings)
	for i := range e.Readings {
		r := &e.Readings[i]
		*r = t.judged(*r)
		r.MaxAge, r.QuietSince = 0, time.Time{} // the source refreshed it throughout
		if r.Signal == eventful && r.State == idle.Active && !r.LastEvent.IsZero() {
			r.State = idle.Quiet // earlier versions recorded an event within the timeout as active
		}
		if r.LastEvent.After(known) {
			r.LastEvent = known
		}
		if r.State == idle.Active && r.LastEvent.IsZero() && r.At.After(known) {
			r.At = known
		}
	}
	e.Guards = slices.DeleteFunc(slices.Clone(e.Guards), func(b idle.Block) bool {
		return slices.Contains(t.Ignored, b.Code) || b.Code == idle.Shadow || b.Code == idle.Halted || b.Code == idle.Schedule && (t.Schedule != nil || t.Policy != nil && scheduled)
	})
	return p, e
}

// judge returns the engine's verdicts at now for idleness and for the schedule.
// next is when the schedule next changes.
func (t *Trial) judge(now time.Time, p idle.Policy, e idle.Evidence) (verdicts []idle.Verdict, next *time.Time) {
	e.WarningSentAt = t.warned
	var st *policy.ScheduleState
	if t.Schedule != nil {
		st = t.Schedule(now)
	}
	if st != nil {
		if st.Next != nil {
			next = &st.Next.At
		}
		if st.HeldUntil != nil {
			e.Guards = append(slices.Clone(e.Guards), idle.Block{Code: idle.Schedule, Until: st.HeldUntil})
		}
		started := e.CreatedAt
		if e.LastResumedAt.After(started) {
			started = e.LastResumedAt
		}
		if st.Pauses(started) {
			off, seen := st.OffHours(p, e)
			verdicts = append(verdicts, idle.Decide(now, off, seen))
		}
	}
	if !t.Never {
		verdicts = append(verdicts, idle.Decide(now, p, e))
	}
	return verdicts, next
}

// pause returns the first time in [from, to) at which the policy pauses.
func (t *Trial) pause(from, to time.Time, s *Stretch, known time.Time) (time.Time, bool) {
	p, e := t.trialled(s, known)
	now := from
	for range 1000 { // each iteration is at a later time, or sends the one warning
		if !now.Before(to) {
			break
		}
		verdicts, boundary := t.judge(now, p, e)
		next, warn := to, false
		sooner := func(x *time.Time) {
			if x != nil && x.After(now) && x.Before(next) {
				next = *x
			}
		}
		sooner(boundary)
		for _, v := range verdicts {
			if v.Eligible {
				return now, true
			}
			warn = warn || v.WarnDue
			sooner(v.TargetPauseAt)
			sooner(v.WarnAt)
			for _, b := range v.Blocks {
				sooner(b.Until)
			}
		}
		if warn {
			t.warned = now
			continue
		}
		now = next
	}
	return to, false
}

// End closes the simulated stop that is still open, if any.
func (t *Trial) End() {
	if !t.down.IsZero() {
		t.stop(t.To, false)
	}
}
