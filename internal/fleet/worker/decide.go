package worker

import (
	"slices"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/settings"
)

// Action is the arbiter's choice.
type Action string

// The arbiter's actions.
const (
	ActNothing Action = "none"
	ActPause   Action = "pause"
	ActDrain   Action = "drain"
)

// Limits are the limits that the arbiter checks a decision against.
type Limits struct {
	ScaleDown       bool
	MinWorkers      int
	Up              int // running and not intended to stop, including this worker
	LastScaleDownAt *time.Time
	Cooldown        time.Duration
	Defers          bool // the cooldown also delays pauses
	Intended        bool // a pause of this worker is already intended
}

// LimitsOf returns the limits that apply to a worker, from the pool and the
// settings.
func LimitsOf(w *Worker, r power.Reason, p *Pool, s *settings.Settings) Limits {
	return Limits{
		ScaleDown: s.ScaleDownEnabled && r != power.ReasonSchedule, MinWorkers: s.MinWorkers, Up: p.Up,
		LastScaleDownAt: p.LastScaleDownAt, Cooldown: s.ScaleDownCooldown, Defers: s.ScaleDownCooldownDefersPause,
		Intended: w.Intent != nil,
	}
}

// block returns the block for a guard of the pool, if the guard keeps the worker up;
// false for other guards, or if a is an action.
func (l Limits) block(a Action, guard string) (idle.Block, bool) {
	switch {
	case a != ActNothing:
	case guard == audit.SkippedMinWorkers:
		return idle.Block{Code: idle.MinWorkers, Sentence: "The fleet would have fewer running workers than its floor."}, true
	case guard == audit.SkippedCooldown:
		until := l.LastScaleDownAt.Add(l.Cooldown)
		return idle.Block{Code: idle.Cooldown, Until: &until, Sentence: "Another worker was drained at " + l.LastScaleDownAt.UTC().Format(time.RFC3339) +
			", and the cooldown lasts until " + until.UTC().Format(time.RFC3339) + "."}, true
	}
	return idle.Block{}, false
}

// Hold adds the guard of the pool that keeps the worker up to d. It returns d
// unchanged if there is none.
func (l Limits) Hold(d evidence.Decision, a Action, guard string) evidence.Decision {
	b, ok := l.block(a, guard)
	if !ok {
		return d
	}
	d.Evidence.Guards = append(slices.Clone(d.Evidence.Guards), b)
	return evidence.Decide(d.Verdict.At, d.Policy, d.Evidence)
}

// Arbitrate chooses exactly one action for a worker, and returns the guard that
// prevented an action. v is the verdict without the guards of the pool. With
// scale-down enabled, the guard is the first one that failed. min_workers is also
// returned without scale-down, if it keeps an eligible worker up.
func Arbitrate(now time.Time, v idle.Verdict, l Limits) (Action, string) {
	floor := l.Up <= l.MinWorkers
	cooling := l.LastScaleDownAt != nil && now.Sub(*l.LastScaleDownAt) < l.Cooldown
	guard := ""
	switch {
	case l.Intended:
		guard = audit.SkippedAutoPause
	case !v.IsIdle:
		guard = audit.SkippedNotIdle
	case !v.Eligible:
		guard = audit.SkippedNotEligible
	case floor:
		guard = audit.SkippedMinWorkers
	case cooling && l.ScaleDown:
		guard = audit.SkippedCooldown
	}
	switch {
	case guard == "" && l.ScaleDown:
		return ActDrain, ""
	case guard == "" || guard == audit.SkippedCooldown && !l.Defers:
		return ActPause, guard
	case !l.ScaleDown && guard != audit.SkippedMinWorkers:
		return ActNothing, ""
	}
	return ActNothing, guard
}

// EvidenceFor returns the engine's evidence, from a worker's record, its readings and
// guards.
func EvidenceFor(w *Worker, readings []idle.Reading, guards []idle.Block) idle.Evidence {
	at := func(t *time.Time) time.Time {
		if t == nil {
			return time.Time{}
		}
		return *t
	}
	created := w.CreatedAt
	if up := at(w.RunningSince); w.Imported && !up.IsZero() && up.Before(created) {
		created = up // the machine is older than its record
	}
	return idle.Evidence{
		Status: string(w.Status), Running: w.Status == power.WorkerRunning,
		LastActivityAt: at(w.LastActivityAt), LastResumedAt: at(w.LastResumedAt), RunningSince: at(w.RunningSince), CreatedAt: created,
		SnoozedUntil: at(w.SnoozedUntil), WarningSentAt: at(w.WarningSentAt),
		Readings: readings, Guards: guards,
	}
}

// ActivityUpdate is the result of reading a worker's telemetry.
type ActivityUpdate struct {
	Telemetry
	// Late is the delay with which the activity was reported, if the last pause
	// was decided without it and would not have been decided with it; otherwise
	// 0.
	Late time.Duration
	// Check and Target are when the worker will be checked and paused next.
	Check, Target *time.Time
}

// Jitter is how far the time of an event may differ between two readings of the same
// history without counting as new.
const Jitter = evidence.Jitter

// Complete reports whether u has all recent events. If not, the events in the record
// are kept.
func (u ActivityUpdate) Complete() bool { return u.Unknown == "" && u.Recent != nil }

// Moves reports whether u has activity newer than that known for w.
func (u ActivityUpdate) Moves(w *Worker) bool {
	return !u.Newest.IsZero() && (w.LastActivityAt == nil || u.Newest.Sub(*w.LastActivityAt) > Jitter)
}

// Changes reports whether u has anything that the record of w does not have.
func (u ActivityUpdate) Changes(w *Worker) bool {
	if u.Moves(w) {
		return true
	}
	return u.Complete() && !slices.EqualFunc(u.Recent, w.RecentActivityEvents, func(a, b Event) bool {
		return a.Category == b.Category && a.Timestamp.Sub(b.Timestamp).Abs() <= Jitter
	})
}

// Checked records when the activity was last checked. The time never moves
// back.
func (w *Worker) Checked(at time.Time) {
	at = at.UTC().Round(0)
	if !at.IsZero() && (w.LastActivityCheckAt == nil || at.After(*w.LastActivityCheckAt)) {
		w.LastActivityCheckAt = &at
	}
}

// Judgement is the input of an automatic decision besides the record: the readings,
// and everything else that the record does not hold. The decision is made again
// inside its transaction.
type Judgement struct {
	At       int64 // revision at which the readings were taken
	Now      time.Time
	Rules    func(w *Worker) policy.Resolved
	Readings []idle.Reading
	Guards   []idle.Block
	Shadow   bool // the whole server is in dry run
}

// Outcome is the result of a judgement.
type Outcome struct {
	Action   Action
	Guard    string
	Reason   power.Reason // reason of the pause, whether or not it is carried out
	Force    bool
	Decision evidence.Decision
	Worker   Worker
	// Shadowed means that only dry run prevented the pause.
	Shadowed bool
}

// WriteOutcome carries the outcome out on the record. held is the policy that applied
// to the decision.
func (w *Worker) WriteOutcome(tx *Tx, out *Outcome, held, use string) error {
	d := out.Decision
	outcome := out.Guard
	if out.Shadowed {
		outcome = "shadow"
	}
	switch out.Action {
	case ActPause, ActDrain:
		p := Pause{Reason: out.Reason, Drain: out.Action == ActDrain, Decision: &d, Detail: string(d.Verdict.Reason), Policy: held, Force: out.Force}
		switch {
		case p.Force:
			p.Detail = d.Policy.Name + ", forced: " + use
		case p.Reason == power.ReasonSchedule:
			p.Detail = d.Policy.Name
		default:
			p.Reason = power.ReasonIdleTimeout
		}
		if p.Drain {
			p.Reason = power.ReasonScaleDown
			at := tx.Now
			tx.Pool.LastScaleDownAt = &at
		}
		w.LastGuard = ""
		return w.IntendStop(tx, p)
	}
	// A warning of a ttl_deadline is kept: it already says everything that this one
	// would.
	if d.Verdict.WarnDue && !d.Verdict.Has(idle.Shadow) && w.WarningFor != power.ReasonTTL {
		at := tx.Now
		w.WarningSentAt, w.WarningFor = &at, ""
		e := audit.Entry{Action: "pause_warning", Events: []string{audit.EventPauseWarning}, Reason: string(out.Reason), Decision: &d,
			Warning: out.warns(use)}
		w.notice(tx, e.Warning)
		if out.Force {
			w.WarningFor, e.Detail = out.Reason, use
		}
		tx.Note(e)
	}
	if outcome != w.LastGuard {
		w.LastGuard = outcome
		if outcome != "" {
			action := outcome
			if out.Shadowed {
				action = "would_pause"
			}
			tx.Note(audit.Entry{Action: action, Decision: &d})
		}
	}
	return nil
}
