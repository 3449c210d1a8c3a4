package fleet

import (
	"context"
	"fmt"
	"slices"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/settings"
)

// DetectResult is the result of DetectWorkerIdle.
type DetectResult struct {
	WorkerID            string       `json:"worker_id"`
	CheckedAt           time.Time    `json:"checked_at"`
	TelemetryFetched    bool         `json:"telemetry_fetched"`
	ActivityUpdated     bool         `json:"activity_updated"`
	IdleCheckPerformed  bool         `json:"idle_check_performed"`
	AutoPauseTriggered  bool         `json:"auto_pause_triggered"`
	IsIdle              bool         `json:"is_idle"`
	IdleMinutes         float64      `json:"idle_minutes"`
	EligibleForPause    bool         `json:"eligible_for_pause"`
	InSnoozePeriod      bool         `json:"in_snooze_period"`
	Error               string       `json:"error,omitempty"`
	Action              Action       `json:"action"`
	Guard               string       `json:"guard,omitempty"` // the arbiter's audit name, if one failed
	Blocks              []idle.Block `json:"blocks"`
	WouldHavePaused     bool         `json:"would_have_paused,omitempty"` // in dry run
	TelemetryUnknownWhy string       `json:"telemetry_unknown,omitempty"`
}

// Fill copies the contents of a verdict.
func (r *DetectResult) Fill(v idle.Verdict) {
	r.IdleCheckPerformed = true
	r.IsIdle, r.IdleMinutes = v.IsIdle, v.IdleMinutes
	r.EligibleForPause, r.InSnoozePeriod = v.Eligible, v.InSnoozePeriod
	r.Blocks = v.Blocks
}

// IdleStatus is the verdict on a worker with its evidence.
type IdleStatus struct {
	WorkerID string `json:"worker_id"`
	idle.Verdict
	IdleDuration     float64        `json:"idle_duration"` // seconds
	TimeoutMinutes   float64        `json:"timeout_minutes"`
	AutoPauseEnabled bool           `json:"auto_pause_enabled"`
	CheckedAt        time.Time      `json:"checked_at"`
	PolicyName       string         `json:"policy_name"` // whose timeout applies
	Readings         []idle.Reading `json:"readings"`
	// Expiry is the worker's expiry, which is not part of a verdict; absent if
	// it has none. target_pause_at only concerns its idleness.
	Expiry *evidence.Expiry `json:"expiry,omitempty"`
	// ReadingsUnknown means that no server with live readings could be asked.
	ReadingsUnknown bool `json:"readings_unknown,omitempty"`
	// CloudUnread means that EC2 cannot be asked about the worker's region.
	CloudUnread *Unread `json:"cloud_unread,omitempty"`
}

// Activity is the activity group of a worker, with the snooze.
type Activity struct {
	WorkerID               string       `json:"worker_id"`
	LastActivityAt         *time.Time   `json:"last_activity_at"`
	LastActivityCheckAt    *time.Time   `json:"last_activity_check_at"`
	RecentActivityEvents   []Event      `json:"recent_activity_events"`
	AutoPauseCount         int64        `json:"auto_pause_count"`
	ManualPauseCount       int64        `json:"manual_pause_count"`
	AutoResumeCount        int64        `json:"auto_resume_count"`
	ManualResumeCount      int64        `json:"manual_resume_count"`
	ExternalPauseCount     int64        `json:"external_pause_count"`
	ExternalResumeCount    int64        `json:"external_resume_count"`
	LastPausedAt           *time.Time   `json:"last_paused_at"`
	LastResumedAt          *time.Time   `json:"last_resumed_at"`
	LastPausedBy           string       `json:"last_paused_by"`
	LastResumedBy          string       `json:"last_resumed_by"`
	PauseReason            power.Reason `json:"pause_reason"`
	SnoozedUntil           *time.Time   `json:"snoozed_until"`
	SnoozedBy              string       `json:"snoozed_by"`
	InSnoozePeriod         bool         `json:"in_snooze_period"`
	SnoozeUntil            *time.Time   `json:"snooze_until"`
	NextIdleCheckAt        *time.Time   `json:"next_idle_check_at"`
	TargetPauseAt          *time.Time   `json:"target_pause_at"`
	IsIdleDetectionEnabled bool         `json:"is_idle_detection_enabled"`
}

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
	Defers          bool // the cooldown also defers a pause
	Intended        bool // a pause of this worker is already intended
}

// limits returns those of a worker, from the pool and the settings.
func limits(w *Worker, r power.Reason, p *Pool, s *settings.Settings) Limits {
	return Limits{
		ScaleDown: s.ScaleDownEnabled && r != power.ReasonSchedule, MinWorkers: s.MinWorkers, Up: p.Up,
		LastScaleDownAt: p.LastScaleDownAt, Cooldown: s.ScaleDownCooldown, Defers: s.ScaleDownCooldownDefersPause,
		Intended: w.Intent != nil,
	}
}

// block returns the block of a guard of the pool that keeps a worker up; false
// if the guard is no such guard, or does not.
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

// hold returns d with the guard of the pool that keeps the worker up, or d
// itself if none does.
func (l Limits) hold(d evidence.Decision, a Action, guard string) evidence.Decision {
	b, ok := l.block(a, guard)
	if !ok {
		return d
	}
	d.Evidence.Guards = append(slices.Clone(d.Evidence.Guards), b)
	return evidence.Decide(d.Verdict.At, d.Policy, d.Evidence)
}

// Arbitrate chooses exactly one action for a worker. v is the verdict without
// the guards of the pool. It returns the guard that failed first if scale-down
// is enabled, and min_workers whenever that keeps an eligible worker up.
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

// EvidenceFor returns the engine's evidence of a record and its readings.
func EvidenceFor(w *Worker, readings []idle.Reading, guards []idle.Block) idle.Evidence {
	at := func(t *time.Time) time.Time {
		if t == nil {
			return time.Time{}
		}
		return *t
	}
	created := w.CreatedAt
	if up := at(w.RunningSince); w.Imported && !up.IsZero() && up.Before(created) {
		created = up // the record is younger than the machine
	}
	return idle.Evidence{
		Status: string(w.Status), Running: w.Status == power.WorkerRunning,
		LastActivityAt: at(w.LastActivityAt), LastResumedAt: at(w.LastResumedAt), RunningSince: at(w.RunningSince), CreatedAt: created,
		SnoozedUntil: at(w.SnoozedUntil), WarningSentAt: at(w.WarningSentAt),
		Readings: readings, Guards: guards,
	}
}

// ActivityUpdate is the result of a telemetry reading about a worker.
type ActivityUpdate struct {
	LastActivityAt time.Time // zero: none seen
	Recent         []Event   // newest first; nil keeps the stored ones
	CheckedAt      time.Time
	// Late is the delay with which the activity was reported, if the last pause
	// was decided without it and would not have been with it; otherwise 0.
	Late time.Duration
	// Check and Target are when the worker is next checked and paused.
	Check, Target *time.Time
}

// Jitter is how far a time of activity may differ between two readings of the
// same history without counting as new.
const Jitter = evidence.Jitter

// moves reports whether u has activity newer than that known for w.
func (u ActivityUpdate) moves(w *Worker) bool {
	return !u.LastActivityAt.IsZero() && (w.LastActivityAt == nil || u.LastActivityAt.Sub(*w.LastActivityAt) > Jitter)
}

// changes reports whether u contains anything new for w.
func (u ActivityUpdate) changes(w *Worker) bool {
	if u.moves(w) {
		return true
	}
	return u.Recent != nil && !slices.EqualFunc(u.Recent, w.RecentActivityEvents, func(a, b Event) bool {
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

// UpdateWorkerActivity writes new activity. It never moves activity back. A
// reading without anything new writes nothing unless the stored times of the
// last check are older than stale; 0 always writes them.
func (f *Fleet) UpdateWorkerActivity(ctx context.Context, id string, at int64, u ActivityUpdate, stale time.Duration) (Worker, error) {
	return f.Change(ctx, id, Changing{By: audit.ByController, At: at}, func(w *Worker, tx *Tx) error {
		news := u.changes(w)
		if !news && w.LastActivityCheckAt != nil && u.CheckedAt.Sub(*w.LastActivityCheckAt) < stale {
			return nil
		}
		checked := u.CheckedAt.UTC().Round(0)
		w.LastActivityCheckAt, w.NextIdleCheckAt, w.TargetPauseAt = &checked, u.Check, u.Target
		if !news {
			return nil
		}
		moved := u.moves(w)
		if moved {
			t := u.LastActivityAt.UTC().Round(0)
			w.LastActivityAt = &t
			if w.WarningFor == "" {
				w.WarningSentAt = nil
			}
		}
		if u.Recent != nil {
			w.RecentActivityEvents = u.Recent[:min(len(u.Recent), tx.Settings.WorkerActivityEventsMaxStored)]
		}
		if u.Late > 0 && w.LastPausedAt != nil {
			tx.Note(audit.Entry{Action: "late_activity", Events: []string{audit.EventLateActivity}, Reason: string(w.PauseReason),
				Detail: fmt.Sprintf("activity of %s was reported %s later; the pause of %s was decided without it",
					u.LastActivityAt.UTC().Format(time.RFC3339), idle.Human(u.Late), w.LastPausedAt.Format(time.RFC3339))})
		}
		if moved {
			tx.Note(audit.Entry{Action: "activity_updated", Events: []string{audit.EventActivity}})
		}
		return nil
	})
}

// Judgement is the input of an automatic decision, which is made again inside
// its transaction: the readings, and everything that the record does not hold.
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
	Reason   power.Reason // of the pause in question
	Force    bool
	Decision evidence.Decision
	Worker   Worker
	// Shadowed means that only dry run kept the worker up.
	Shadowed bool
}

// Settle judges a worker and carries out the arbiter's choice, in one
// transaction with the pool: the intent to pause or drain is durable when it
// returns. It also writes a warning that is due, and records a guard's outcome
// in the audit log when it changed.
func (f *Fleet) Settle(ctx context.Context, id string, j Judgement) (Outcome, error) {
	var out Outcome
	w, err := f.Change(ctx, id, Changing{By: audit.ByController, At: j.At, Limits: true, Rules: true}, func(w *Worker, tx *Tx) error {
		out = Outcome{}
		guards, rules := slices.Clone(j.Guards), j.Rules(w)
		halted := f.Halted()
		if halted.On != tx.Halted {
			halted = halt.Halt{On: tx.Halted} // as in this transaction
		}
		guards = append(guards, Standstill(w, &rules, halted, j.Shadow)...)
		d := Case{Now: j.Now, Worker: w, Rules: &rules, Readings: j.Readings, Guards: guards,
			Budget: f.stopBudget(j.Now, w, tx.Pool.Spent), ScaleDown: tx.Settings.ScaleDownEnabled}.Judge()
		out.Reason, out.Force = d.Reason, d.Force
		l := limits(w, d.Reason, &tx.Pool, &tx.Settings)
		out.Action, out.Guard = Arbitrate(j.Now, d.Verdict, l)
		out.Decision = l.hold(d.Decision, out.Action, out.Guard)
		out.Shadowed = len(d.Verdict.Blocks) == 1 && d.Verdict.Blocks[0].Code == idle.Shadow
		if err := w.settle(tx, &out, rules.Name, d.Use); err != nil {
			return err
		}
		if out.Action != ActNothing {
			f.spend(tx, w, policy.Stops, string(w.PauseReason))
		}
		return nil
	})
	out.Worker = w
	return out, err
}

// settle writes the outcome. held is the policy that applied when it was
// decided.
func (w *Worker) settle(tx *Tx, out *Outcome, held, use string) error {
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
		return w.intendStop(tx, p)
	}
	// The warning of a ttl_deadline stays: it says everything that this one
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
