package evidence

import (
	"time"

	"lull/internal/idle"
)

// Missing is a time of which nothing is known, and why.
type Missing struct {
	From   time.Time `json:"from"`
	To     time.Time `json:"to"`
	Server string    `json:"server,omitempty"` // whose records are missing
	Why    string    `json:"why"`
}

// Query selects records: of one object or of all, from the check that held at
// From until the one after To.
type Query struct {
	Object   string
	From, To time.Time // zero bounds nothing
}

// Stretch is a time during which what a check found held. Known is false where
// nobody looked; then Check is what was known before.
type Stretch struct {
	From, To time.Time
	Known    bool
	Check    *Record // nil before the first
	After    *Record // the check at To; nil at the end
}

// Covers tells whether what the check found is known until a moment of the
// stretch at which something else is known to begin, such as a stop: the next
// check was not due yet, or came and said the same.
func (s *Stretch) Covers(until time.Time) bool {
	return s.Known || s.Check != nil && !until.After(slack(s.Check))
}

// Follow puts the checks of one object together. Feed it records in their
// order; each call of Add gives the stretch that the record ends.
type Follow struct{ last *Record }

// Add takes the next check in. Changes are passed over.
func (f *Follow) Add(r *Record, yield func(Stretch)) {
	if r.Change != nil {
		return
	}
	old := f.last
	f.last = r
	if old == nil {
		return
	}
	known := !r.At.After(slack(old)) || !r.Since.IsZero() && !r.Since.After(old.At)
	yield(Stretch{From: old.At, To: r.At, Known: known, Check: old, After: r})
}

// Reached tells whether the last check is at a time or after it, so that no
// more is needed to know what was until then.
func (f *Follow) Reached(to time.Time) bool { return f.last != nil && !f.last.At.Before(to) }

// End gives the last stretch, which ends at a time or when the next check had
// been due.
func (f *Follow) End(to time.Time, yield func(Stretch)) {
	if f.last == nil || !to.After(f.last.At) {
		return
	}
	known := slack(f.last)
	if known.After(to) {
		known = to
	}
	yield(Stretch{From: f.last.At, To: known, Known: true, Check: f.last})
	if to.After(known) {
		yield(Stretch{From: known, To: to, Check: f.last})
	}
}

// Recall is what is recorded of an object around one moment: the last check
// until then and the first after it.
type Recall struct {
	Before, After *Record
	Missing       []Missing
}

// Add takes the next record in.
func (c *Recall) Add(at time.Time, r *Record) {
	switch {
	case r.Change != nil:
	case !r.At.After(at):
		c.Before = r
	case c.After == nil:
		c.After = r
	}
}

// Held tells whether what the check before the moment found was still known
// to hold at it.
func (c *Recall) Held(at time.Time) bool {
	if c.Before == nil {
		return false
	}
	a := c.After
	return !at.After(slack(c.Before)) || a != nil && !a.Since.IsZero() && !a.Since.After(c.Before.At)
}

// Checked says which recorded check an account rests on.
type Checked struct {
	At      time.Time `json:"at"`
	Since   time.Time `json:"since"`           // checks have said the same since
	Until   time.Time `json:"until,omitzero"`  // and until
	Differs bool      `json:"engine_differs"`  // this version of the engine judges otherwise; was is what was recorded
	Was     []string  `json:"was,omitempty"`   // blocks that were recorded, where it differs
	Next    time.Time `json:"next,omitzero"`   // when the next check was planned
	State   string    `json:"state,omitempty"` // power at the time, as recorded
}

// Checked describes the check before the moment.
func (c *Recall) Checked() *Checked {
	r := c.Before
	if r == nil {
		return nil
	}
	out := &Checked{At: r.At, Since: r.At, Differs: r.Differs, Next: r.Next, State: r.Evidence.Status}
	if !r.Since.IsZero() {
		out.Since = r.Since
	}
	if a := c.After; a != nil && !a.Since.IsZero() && !a.Since.After(r.At) {
		out.Until = a.At
	}
	if r.Differs {
		for _, b := range r.Was.Blocks {
			out.Was = append(out.Was, string(b))
		}
	}
	return out
}

// Signal is one reading as an account shows it.
type Signal struct {
	Signal    string        `json:"signal"`
	Verdict   idle.State    `json:"verdict" doc:"unknown, quiet, active or absent"`
	Value     *float64      `json:"value" doc:"Null where the signal is not known or has no source"`
	Threshold float64       `json:"threshold" doc:"Active at or above it"`
	Unit      string        `json:"unit,omitempty"`
	Window    idle.Duration `json:"window_seconds" doc:"Measured time that the value covers"`
	Age       *float64      `json:"age_seconds" doc:"Of the reading; null where it was never read"`
	LastEvent *time.Time    `json:"last_event" doc:"Of a signal that carries the time of its last event"`
	Counts    bool          `json:"counts" doc:"Whether the policy lets it count"`
	Detail    string        `json:"detail,omitempty"`
}

// Signals shows the readings of a decision, as old as they were at a time. A
// signal that counts and was not read is there as unknown.
func Signals(at time.Time, p idle.Policy, readings []idle.Reading) []Signal {
	out := []Signal{}
	seen := map[string]bool{}
	for _, r := range readings {
		seen[r.Signal] = true
		s := Signal{Signal: r.Signal, Verdict: r.StateAt(at), Threshold: r.Threshold, Unit: r.Unit, Window: r.Window, Detail: r.Detail, Counts: p.Counts(r.Signal)}
		if r.State == idle.Quiet || r.State == idle.Active {
			v := r.Value
			s.Value = &v
		}
		if !r.At.IsZero() {
			age := max(at.Sub(r.At), 0).Seconds()
			s.Age = &age
		}
		if t := r.LastEvent; !t.IsZero() {
			s.LastEvent = &t
		}
		out = append(out, s)
	}
	for _, name := range p.Signals {
		if !seen[name] {
			out = append(out, Signal{Signal: name, Verdict: idle.Unknown, Counts: true, Detail: "it has no reading"})
		}
	}
	return out
}
