package evidence

import (
	"time"

	"lull/internal/core/idle"
)

// Missing is a period without records, and why.
type Missing struct {
	From   time.Time `json:"from"`
	To     time.Time `json:"to"`
	Server string    `json:"server,omitempty"` // the server whose records are missing
	Why    string    `json:"why"`
}

// Query selects records of one object or of all, from the check in effect at
// From to the first one after To.
type Query struct {
	Object   string
	From, To time.Time // zero means unbounded
}

// Stretch is the period between two successive checks. If Known is false, checks
// are missing from it, and Check is the last one before.
type Stretch struct {
	From, To time.Time
	Known    bool
	Check    *Record // nil before the first check
	After    *Record // the check at To; nil for the last stretch
}

// Covers reports whether the result of Check held until a moment in the stretch
// at which something else began, such as a stop. It did if the next check was not
// yet due, or had the same result.
func (s *Stretch) Covers(until time.Time) bool {
	return s.Known || s.Check != nil && !until.After(slack(s.Check))
}

// Follow joins the checks of one object into stretches. Call Add with the records
// in order. Each call yields the stretch that the record ends.
type Follow struct{ last *Record }

// Add takes the next record. It ignores records of changes.
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

// Reached reports whether the last check is at or after to, so that no later
// record is needed.
func (f *Follow) Reached(to time.Time) bool { return f.last != nil && !f.last.At.Before(to) }

// End yields the last stretch. It ends at to, or when the next check was due if
// that is earlier.
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

// Recall contains the records of an object around one moment: the last check at
// or before it and the first after it.
type Recall struct {
	Before, After *Record
	Missing       []Missing
}

// Add takes the next record.
func (c *Recall) Add(at time.Time, r *Record) {
	switch {
	case r.Change != nil:
	case !r.At.After(at):
		c.Before = r
	case c.After == nil:
		c.After = r
	}
}

// Turn is a pause or resume that happened.
type Turn struct {
	At     time.Time `json:"at"`
	By     string    `json:"by"`
	Reason string    `json:"reason,omitempty"`
}

// Held reports whether the result of the last check before at was still valid at
// that time.
func (c *Recall) Held(at time.Time) bool {
	if c.Before == nil {
		return false
	}
	a := c.After
	return !at.After(slack(c.Before)) || a != nil && !a.Since.IsZero() && !a.Since.After(c.Before.At)
}

// Checked describes the recorded check on which an account is based.
type Checked struct {
	At      time.Time `json:"at"`
	Since   time.Time `json:"since"`           // first check with the same result
	Until   time.Time `json:"until,omitzero"`  // last check with the same result
	Differs bool      `json:"engine_differs"`  // this version of the engine gives another verdict than the recorded one
	Was     []string  `json:"was,omitempty"`   // the recorded blocks, if Differs
	Next    time.Time `json:"next,omitzero"`   // when the next check was planned
	State   string    `json:"state,omitempty"` // recorded power state
}

// Checked describes the check before the moment; nil if there is none.
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

// Signal is one reading as shown in an account.
type Signal struct {
	Signal    string        `json:"signal"`
	Verdict   idle.State    `json:"verdict" doc:"unknown, quiet, active or absent"`
	Value     *float64      `json:"value" doc:"Null if the signal is unknown or has no source"`
	Threshold float64       `json:"threshold" doc:"Active at or above it"`
	Unit      string        `json:"unit,omitempty"`
	Window    idle.Duration `json:"window_seconds" doc:"Length of the window that the value covers"`
	Age       *float64      `json:"age_seconds" doc:"Age of the reading; null if never read"`
	LastEvent *time.Time    `json:"last_event" doc:"For signals that report the time of their last event"`
	Counts    bool          `json:"counts" doc:"Whether it counts in the policy"`
	Detail    string        `json:"detail,omitempty"`
}

// Signals returns the readings of a decision with their age at a time. Signals
// that count but have no reading are included as unknown.
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
			out = append(out, Signal{Signal: name, Verdict: idle.Unknown, Counts: true, Detail: "no reading"})
		}
	}
	return out
}
