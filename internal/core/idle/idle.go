// Package idle defines idleness for all of lull: it is the only code that decides
// whether something is unused and may be paused.
//
// Decide is a pure function of now, a Policy and the Evidence. It does no I/O,
// starts nothing, keeps no state and has no clock, so that a verdict replayed
// from its recorded inputs is identical. It compares wall times only, so the
// callers on one machine must pass times of a clock that does not step.
//
// An unknown never counts as quiet. An active reading blocks until a newer one is
// quiet. More activity never makes a verdict more idle. If nothing new arrives,
// the verdict becomes eligible exactly at TargetPauseAt.
//
// The package does not act, does not know what a worker or an instance is, and
// does not decide between objects: floors, budgets and schedules are passed in as
// Guards.
package idle

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// FutureTolerance is how far a stored time may be ahead of now before it causes
// the block ClockInFuture.
const FutureTolerance = 60 * time.Second

// Policy contains the parameters of one decision, already resolved.
type Policy struct {
	Name          string   `json:"name,omitempty"`
	Timeout       Duration `json:"timeout_seconds"`        // an object unused for this long is idle; > 0
	Snooze        Duration `json:"snooze_seconds"`         // after a confirmed resume; >= 0
	WarnBefore    Duration `json:"warn_before_seconds"`    // 0 pauses without a warning; values above half of Timeout are reduced to it
	CheckInterval Duration `json:"check_interval_seconds"` // maximum time between two checks; > 0

	// Detection is the switch of the object and AutoPause the global one. A
	// pause requires both.
	Detection bool `json:"detection"`
	AutoPause bool `json:"auto_pause"`

	// Signals names the readings that count. Nil means all readings. Otherwise
	// only the named ones count, and a named signal without a reading is unknown.
	// Empty but not nil means that none counts.
	Signals []string `json:"signals"`

	// Action names what a pause does (stop, hibernate, freeze, ...). The engine
	// does not interpret it.
	Action string `json:"action,omitempty"`
}

// Validate returns every fault of p, each with its field's name.
func (p Policy) Validate() error {
	var errs []error
	positive := func(field string, d Duration) {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("cannot use policy %q: %s must be above 0, is %s", p.Name, field, time.Duration(d)))
		}
	}
	positive("timeout", p.Timeout)
	positive("check_interval", p.CheckInterval)
	if p.Snooze < 0 {
		errs = append(errs, fmt.Errorf("cannot use policy %q: snooze must not be negative, is %s", p.Name, time.Duration(p.Snooze)))
	}
	if p.WarnBefore < 0 {
		errs = append(errs, fmt.Errorf("cannot use policy %q: warn_before must not be negative, is %s", p.Name, time.Duration(p.WarnBefore)))
	}
	return errors.Join(errs...)
}

// Counts reports whether a signal counts under the policy.
func (p Policy) Counts(signal string) bool {
	return p.Signals == nil || slices.Contains(p.Signals, signal)
}

// Lease is a named hold on an object until it expires.
type Lease struct {
	Holder    string    `json:"holder"`
	Reason    string    `json:"reason,omitempty"`
	ExpiresAt time.Time `json:"expires_at"`
}

// Evidence is everything known about one object at one time. A zero time means
// never.
type Evidence struct {
	Status  string `json:"status"`  // as shown to users, for sentences
	Running bool   `json:"running"` // whether a pause is legal from Status

	// Idle time counts from the newest of these four.
	LastActivityAt time.Time `json:"last_activity_at,omitzero"`
	LastActivityBy string    `json:"last_activity_by,omitempty"` // the signal that showed it; empty if unknown
	LastResumedAt  time.Time `json:"last_resumed_at,omitzero"`   // last confirmed start or resume of any kind; the snooze counts from it
	RunningSince   time.Time `json:"running_since,omitzero"`     // when it was first seen running after it was last down
	CreatedAt      time.Time `json:"created_at,omitzero"`

	SnoozedUntil  time.Time `json:"snoozed_until,omitzero"` // set by a user
	WarningSentAt time.Time `json:"warning_sent_at,omitzero"`

	Readings    []Reading `json:"readings,omitempty"`
	Connections int       `json:"connections,omitempty"` // open connections that hold the object
	Leases      []Lease   `json:"leases,omitempty"`

	// Guards are blocks decided elsewhere: min_workers, cooldown, schedule,
	// budget, hook_veto, shadow and the preflight codes. A guard with an Until
	// ends then; one without has no known end.
	Guards []Block `json:"guards,omitempty"`
}

// Verdict is the engine's answer. The JSON names are part of the API contract.
type Verdict struct {
	At              time.Time  `json:"at"`
	IsIdle          bool       `json:"is_idle"`
	IdleMinutes     float64    `json:"idle_minutes"`
	Baseline        string     `json:"baseline"` // the time from which idle_minutes counts
	LastActivityAt  *time.Time `json:"last_activity_at"`
	InSnoozePeriod  bool       `json:"in_snooze_period"`
	SnoozeUntil     *time.Time `json:"snooze_until"`
	Eligible        bool       `json:"eligible_for_pause"`
	TargetPauseAt   *time.Time `json:"target_pause_at"`
	WarnAt          *time.Time `json:"warn_at"`
	WarnDue         bool       `json:"warn_due"`                    // the warning must be sent now
	NextIdleCheckAt time.Time  `json:"next_idle_check_at,omitzero"` // zero if unknown, because the object's owner did not answer
	Reason          Code       `json:"reason"`
	Blocks          []Block    `json:"blocks"`
	Action          string     `json:"action,omitempty"`
}

// Has reports whether a block with that code prevents a pause.
func (v Verdict) Has(c Code) bool {
	return slices.ContainsFunc(v.Blocks, func(b Block) bool { return b.Code == c })
}

// NotBefore reports whether TargetPauseAt is only the earliest time of the pause,
// because other objects may wait for the same budget.
func (v Verdict) NotBefore() bool { return v.TargetPauseAt != nil && v.Has(Budget) }

// Used reports whether use of the object alone already blocks a pause.
func (v Verdict) Used() bool { return v.Has(RecentActivity) || v.Has(NotIdleYet) }

// Decide judges one object at one time. It evaluates and reports every guard,
// not only the first. With an invalid policy nothing is eligible.
func Decide(now time.Time, p Policy, e Evidence) Verdict {
	d := decision{now: now.Round(0), p: p, e: e, known: true}
	d.v = Verdict{At: d.now, Action: p.Action, Blocks: []Block{}}
	d.clocks()
	d.activity()
	d.snooze()
	d.switches()
	d.signals()
	d.holds()
	d.warning()
	d.finish()
	return d.v
}

// decision is the state of one evaluation. end is the latest known end of a
// block. known is whether every block has a known end.
type decision struct {
	now   time.Time
	p     Policy
	e     Evidence
	v     Verdict
	base  time.Time
	end   time.Time
	known bool
}

// until records that no pause is possible before t. The zero time means that the
// end is not known.
func (d *decision) until(t time.Time) {
	if t.IsZero() {
		d.known = false
		return
	}
	if t.After(d.end) {
		d.end = t
	}
}

func (d *decision) block(b Block) {
	d.v.Blocks = append(d.v.Blocks, b)
}

// clocks adds a block if times in the evidence are in the future.
func (d *decision) clocks() {
	check := func(what string, t time.Time) {
		if ahead := t.Sub(d.now); ahead > FutureTolerance {
			d.known = false
			d.block(Block{Code: ClockInFuture, Sentence: fmt.Sprintf(
				"The time of %s is %s in the future, so it is ignored. A clock is wrong.", what, Human(ahead))})
		}
	}
	check("the last activity", d.e.LastActivityAt)
	check("the last resume", d.e.LastResumedAt)
	check("the start", d.e.RunningSince)
	check("the creation", d.e.CreatedAt)
	check("the warning", d.e.WarningSentAt)
	for i := range d.e.Readings {
		if r := &d.e.Readings[i]; d.p.Counts(r.Signal) {
			check("the reading of "+r.Signal, r.At)
			check("the last event of "+r.Signal, r.LastEvent)
		}
	}
}

// activity determines the baseline and the idle time since then.
func (d *decision) activity() {
	last, signal := d.e.LastActivityAt, d.e.LastActivityBy
	seen := last // signal is the one that showed the use at this time
	for i := range d.e.Readings {
		r := &d.e.Readings[i]
		if !d.p.Counts(r.Signal) {
			continue
		}
		t := r.ActivityAt()
		if t.After(last) {
			last = t
		}
		// An older event of another signal does not change which signal showed
		// the last use.
		if t.After(seen) || signal == "" && t.Equal(seen) && !t.IsZero() {
			seen, signal = t, r.Signal
		}
	}
	if !last.IsZero() {
		t := last.Round(0)
		d.v.LastActivityAt = &t
	}
	d.v.Baseline = "none"
	for _, b := range []struct {
		name string
		at   time.Time
	}{{"last_activity_at", last}, {"last_resumed_at", d.e.LastResumedAt}, {"running_since", d.e.RunningSince}, {"created_at", d.e.CreatedAt}} {
		if b.at.After(d.base) {
			d.v.Baseline, d.base = b.name, b.at
		}
	}
	if d.base.IsZero() {
		d.known = false
		d.block(Block{Code: SignalUnknown, Signal: "last_activity_at",
			Sentence: "The idle time is unknown, because no time of activity, start or creation is known."})
		return
	}
	idle := max(d.now.Sub(d.base), 0)
	d.v.IdleMinutes = idle.Minutes()
	ends := d.base.Add(time.Duration(d.p.Timeout)).Round(0)
	d.v.IsIdle = d.p.Timeout > 0 && !d.now.Before(ends)
	if d.p.Timeout <= 0 {
		d.known = false
	}
	d.until(ends)
	if d.v.IsIdle {
		return
	}
	b := Block{Code: NotIdleYet}
	of, after := "", "" // the timeout has no effect without detection, so the sentence omits it
	if d.p.Detection && d.p.Timeout > 0 {
		b.Until = &ends
		of, after = " of "+Human(time.Duration(d.p.Timeout)), "; it is idle after "+Human(time.Duration(d.p.Timeout))
	}
	b.Sentence = "Idle for " + Human(idle) + of + "."
	if signal != "" && d.v.Baseline == "last_activity_at" {
		if idle <= d.p.lately() {
			b.Code, b.Signal = RecentActivity, signal
		}
		b.Sentence = fmt.Sprintf("Last used %s ago (%s)%s.", Human(idle), signal, after)
	}
	d.block(b)
}

// Lately is how long after its last use an object is described as active. At most
// a third of the timeout is used, so that with a short timeout there is time
// between active and idle.
const Lately = 10 * time.Minute

func (p Policy) lately() time.Duration { return time.Duration(min(Duration(Lately), p.Timeout/3)) }

// snooze adds the blocks of an object that was just resumed or that a user
// snoozed.
func (d *decision) snooze() {
	var end time.Time
	what := ""
	if d.p.Snooze > 0 && !d.e.LastResumedAt.IsZero() {
		end, what = d.e.LastResumedAt.Add(time.Duration(d.p.Snooze)), "resumed"
	}
	if d.e.SnoozedUntil.After(end) {
		end, what = d.e.SnoozedUntil, "snoozed by a user"
	}
	if end.IsZero() {
		return
	}
	end = end.Round(0)
	d.until(end)
	if !d.now.Before(end) {
		return
	}
	d.v.InSnoozePeriod, d.v.SnoozeUntil = true, &end
	d.block(Block{Code: InSnoozePeriod, Until: &end, Sentence: fmt.Sprintf(
		"Protected for another %s because it was %s.", Human(end.Sub(d.now)), what)})
}

// switches adds the blocks that end only through a user or another part of lull.
func (d *decision) switches() {
	open := func(c Code, s string) {
		d.known = false
		d.block(Block{Code: c, Sentence: s})
	}
	if !d.p.AutoPause {
		open(AutoPauseDisabled, "Automatic pausing is switched off.")
	}
	if !d.p.Detection {
		open(DetectionDisabled, "Idle detection is switched off for it.")
	}
	if !d.e.Running {
		open(StatusNotRunning, fmt.Sprintf("It is %s, and only a running one can be paused.", d.e.Status))
	}
	for _, g := range d.e.Guards {
		if g.Until != nil {
			d.until(*g.Until)
			if !d.now.Before(*g.Until) {
				continue
			}
		} else {
			d.known = false
		}
		d.block(g)
	}
}

// signals adds a block for every counted signal that is active, unknown, or not
// quiet for long enough. An active reading blocks at any age: only a newer
// reading proves that the use is over.
func (d *decision) signals() {
	for i := range d.e.Readings {
		r := &d.e.Readings[i]
		if !d.p.Counts(r.Signal) {
			continue
		}
		if r.State == Active {
			d.known = false
			d.block(Block{Code: SignalActive, Signal: r.Signal,
				Sentence: "Active: " + r.describe(d.now) + ". It must read quiet first."})
		}
		if r.StateAt(d.now) == Unknown {
			d.known = false
			d.block(Block{Code: SignalUnknown, Signal: r.Signal,
				Sentence: "Unknown: " + r.describe(d.now) + ". An unknown signal never counts as quiet."})
			continue
		}
		d.covered(r)
	}
	for _, s := range d.p.Signals {
		if !slices.ContainsFunc(d.e.Readings, func(r Reading) bool { return r.Signal == s }) {
			d.known = false
			d.block(Block{Code: SignalUnknown, Signal: s,
				Sentence: fmt.Sprintf("Unknown: %s has no reading. An unknown signal never counts as quiet.", s)})
		}
	}
}

// covered adds a block until the windows of a quiet reading cover the idle time.
// That requires a complete window after the baseline, and windows without a gap
// for the length of the timeout. It applies only to readings with QuietSince,
// whose source publishes windows that can be missing or end before the baseline.
func (d *decision) covered(r *Reading) {
	if r.State != Quiet || r.QuietSince.IsZero() || d.base.IsZero() {
		return
	}
	ends := r.QuietSince.Add(time.Duration(d.p.Timeout)).Round(0)
	if !r.QuietSince.After(d.base) {
		ends = time.Time{}
	}
	first := d.base.Add(time.Duration(r.Window)).Round(0) // the earliest end of a complete window after the baseline
	lacks := r.At.Add(-time.Duration(r.Window)).Before(d.base)
	if lacks && d.now.Before(first) && first.After(ends) {
		ends = first
	}
	if !ends.IsZero() {
		d.until(ends)
	}
	switch {
	case lacks && !d.now.Before(first):
		d.known = false
		d.block(Block{Code: SignalIncomplete, Signal: r.Signal, Sentence: fmt.Sprintf(
			"%s has not measured a complete window of %s since the machine was last in use.", r.Signal, Human(time.Duration(r.Window)))})
	case d.now.Before(ends):
		d.block(Block{Code: SignalIncomplete, Signal: r.Signal, Until: &ends, Sentence: fmt.Sprintf(
			"%s has been quiet without a gap for only %s.", r.Signal, Human(d.now.Sub(r.QuietSince)))})
	}
}

// holds adds the blocks of connections and leases.
func (d *decision) holds() {
	if n := d.e.Connections; n > 0 {
		d.known = false
		s := "1 connection is open."
		if n > 1 {
			s = fmt.Sprintf("%d connections are open.", n)
		}
		d.block(Block{Code: ConnectionOpen, Sentence: s})
	}
	for _, l := range d.e.Leases {
		ends := l.ExpiresAt.Round(0)
		d.until(ends)
		if !d.now.Before(ends) {
			continue
		}
		s := fmt.Sprintf("%s holds it for another %s", l.Holder, Human(ends.Sub(d.now)))
		if l.Reason != "" {
			s += " (" + l.Reason + ")"
		}
		d.block(Block{Code: LeaseHeld, Holder: l.Holder, Until: &ends, Sentence: s + "."})
	}
}

// WarnsBefore returns how long before a pause the warning is sent. It is at most
// half of the timeout, because otherwise users would be warned again at every
// short break.
func (p Policy) WarnsBefore() time.Duration {
	return time.Duration(min(p.WarnBefore, p.Timeout/2))
}

// warningGrace returns how long after the announced pause a warning remains
// valid. A user who was told "in five minutes" an hour ago has not been warned.
func (p Policy) warningGrace() time.Duration {
	return max(p.WarnsBefore(), 2*time.Duration(p.CheckInterval))
}

// warnFrom returns the earliest time at which a warning may be sent: now or,
// during a halt that has an end, that end, because nothing is sent automatically
// before.
func (d *decision) warnFrom() time.Time {
	from := d.now
	for _, g := range d.e.Guards {
		if g.Code == Halted && g.Until != nil && g.Until.After(from) {
			from = *g.Until
		}
	}
	return from
}

// warning postpones the pause until a warning has been out for WarnBefore.
func (d *decision) warning() {
	before := d.p.WarnsBefore()
	if before <= 0 {
		return
	}
	sent := d.e.WarningSentAt.Round(0)
	latest := d.end
	if d.now.After(latest) {
		latest = d.now
	}
	from := d.warnFrom()
	valid := !sent.IsZero() && !sent.Before(d.base) && !sent.Before(d.e.LastResumedAt) &&
		!sent.After(d.now.Add(FutureTolerance)) && !latest.After(sent.Add(before+d.p.warningGrace()))
	var warned time.Time // when the warning will have been out for WarnBefore
	switch {
	case valid:
		warned = sent.Add(before)
	case from.Before(d.end.Add(-before)):
		return // the warning is sent in time, at WarnAt
	default:
		warned = from.Add(before)
		d.v.WarnDue = d.known && from.Equal(d.now)
	}
	d.until(warned)
	if d.now.Before(warned) && !d.now.Before(d.end.Add(-before)) {
		d.block(Block{Code: WarningPending, Until: &warned, Sentence: fmt.Sprintf(
			"Users are warned first, for another %s.", Human(warned.Sub(d.now)))})
	}
}

// finish sets the parts of the verdict that follow from the blocks.
func (d *decision) finish() {
	d.v.Eligible = len(d.v.Blocks) == 0
	d.v.Reason = IdleTimeoutExceeded
	if !d.v.Eligible {
		d.v.Reason = d.v.Blocks[0].Code
	}
	next := d.now.Add(time.Duration(max(d.p.CheckInterval, Duration(time.Second))))
	if d.known {
		t := d.end.Round(0)
		d.v.TargetPauseAt = &t
		if b := d.p.WarnsBefore(); b > 0 {
			w := t.Add(-b)
			d.v.WarnAt = &w
			if w.After(d.now) && w.Before(next) {
				next = w
			}
		}
		if t.Before(next) {
			next = t
		}
		if next.Before(d.now) {
			next = d.now
		}
	}
	d.v.NextIdleCheckAt = next
}
