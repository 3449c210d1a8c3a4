package fleet

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
)

// Pause is the request for a pause or drain.
type Pause struct {
	Reason power.Reason // empty is manual
	Drain  bool
	// Decision is the basis of an automatic pause. It goes to the audit log.
	Decision *evidence.Decision
	Detail   string
	Policy   string // the one that applied, as policy.Resolved names it; empty if unknown
	Force    bool   // no reading cancels it
}

// PauseWorker records the intent to stop a worker: desired STOPPED, reason and
// generation. The controller acts on it. A worker that is stopped, or that a
// user is already stopping, stays as it is. Errors: NotFound, Refused.
func (f *Fleet) PauseWorker(ctx context.Context, by audit.Actor, id string, p Pause) (Worker, error) {
	if p.Reason == "" {
		p.Reason = power.ReasonManual
	}
	return f.Change(ctx, id, Changing{By: by, Limits: p.Reason.Automatic()}, func(w *Worker, tx *Tx) error {
		if p.Reason.Automatic() && tx.Halted {
			return &failure.Refused{Command: "pause", Name: w.Name, Reason: "halted", Detail: "automatic actions are halted"}
		}
		return w.intendStop(tx, p)
	})
}

// StopWorker is PauseWorker for a user.
func (f *Fleet) StopWorker(ctx context.Context, by audit.Actor, id string) (Worker, error) {
	return f.PauseWorker(ctx, by, id, Pause{})
}

// DrainWorker makes a RUNNING worker DRAINING at a user's request: it takes no
// new work, and stops when nothing runs or the drain times out.
func (f *Fleet) DrainWorker(ctx context.Context, by audit.Actor, id string) (Worker, error) {
	return f.PauseWorker(ctx, by, id, Pause{Drain: true})
}

// intendStop records a stop. Every pause is counted here, once, and nowhere
// else, except pauses made by the cloud.
func (w *Worker) intendStop(tx *Tx, p Pause) error {
	command, verb := "stop", power.VerbStop
	if p.Drain {
		command, verb = "drain", power.VerbDrain
	}
	refuse := func(reason, detail string) error {
		return &failure.Refused{Command: command, Name: w.Name, Reason: reason, Detail: detail}
	}
	starts := w.startPending()
	if w.DesiredStatus == power.WorkerStopped && (w.Status == power.WorkerStopped || w.Intent != nil) {
		switch {
		case p.Reason.Automatic():
			return refuse("already_intended", fmt.Sprintf("it is to stop already, for %s", w.PauseReason))
		case w.Intent == nil || !w.Intent.Reason.Automatic() && (p.Drain || !w.Intent.Drain):
			return nil // done, or already requested by a user
		case p.Drain && w.Status != power.WorkerRunning:
			return refuse("status", fmt.Sprintf("it is %s", w.Status))
		}
	}
	if starts && p.Reason.Automatic() {
		return refuse("status", fmt.Sprintf("it is %s and to start", w.Status)) // only a user withdraws a start
	}
	if w.startWaits() {
		if w.Status == power.WorkerStopped || w.Intent != nil && !w.Intent.Reason.Automatic() {
			// Only the start remains to be withdrawn: the pause was counted
			// when it was intended.
			w.DesiredStatus, w.StatusReason = power.WorkerStopped, ""
			w.withdrawStart(tx)
			return nil
		}
		p.Drain = false
	} else if w.Status != power.WorkerStopping || p.Drain {
		if _, err := w.Status.After(verb); err != nil {
			return refuse("status", err.Error()[len("cannot "):])
		}
	}
	if w.Status == power.WorkerFailed {
		if w.EC2InstanceID == "" {
			return refuse("no_instance", "it has no instance; terminate or retry it")
		}
		w.Status, w.StatusReason, w.StartSentAt = power.WorkerStopping, "", nil
	}
	if w.StopRefused() {
		w.StatusReason = ""
	}
	sent, before := w.stopSent(), w.beforeStop()
	w.PauseGeneration++
	w.DesiredStatus = power.WorkerStopped
	w.Intent = &Intent{Reason: p.Reason, By: tx.by.Name, At: tx.Now, Generation: w.PauseGeneration, Drain: p.Drain, Force: p.Force, SentAt: sent, Before: before}
	w.paused(tx, p.Reason, tx.by.Name)
	w.PausePolicy = p.Policy
	if d := p.Decision; d != nil && !d.Verdict.Has(idle.SignalUnknown) {
		w.Checked(d.Verdict.At)
	}
	action := "pause_intended"
	e := audit.Entry{Events: []string{audit.EventPaused}, Reason: string(p.Reason), Decision: p.Decision, Detail: p.Detail, Policy: p.Policy, Generation: w.PauseGeneration}
	if p.Drain {
		action = audit.DrainStarted
		w.Draining = true
		w.Status, w.StatusReason = power.WorkerDraining, "drain by "+tx.by.Name
	}
	e.Action = action
	tx.Note(e)
	if starts {
		w.StatusReason = ""
		w.withdrawStart(tx)
	}
	w.clearStart()
	return nil
}

// startWaits reports whether a start was requested that waits for a stop or for
// its turn.
func (w *Worker) startWaits() bool {
	return w.DesiredStatus == power.WorkerRunning && (w.Status == power.WorkerStopping || w.Status == power.WorkerStopped)
}

// startPending reports whether a start is in progress or waiting.
func (w *Worker) startPending() bool {
	return w.startWaits() || w.DesiredStatus == power.WorkerRunning && w.Status == power.WorkerStarting
}

// withdrawStart withdraws a start that is not confirmed: it counts as no resume
// and begins no snooze. A start that was sent may take effect nevertheless, so
// StartSentAt is kept until EC2 has shown the outcome.
func (w *Worker) withdrawStart(tx *Tx) {
	now, detail := tx.Now, "the start of a new worker"
	if w.StartBy != "" {
		detail = "the start that " + w.StartBy + " asked for"
	}
	if at := w.StartAskedAt; at != nil {
		detail += " at " + at.Format(time.RFC3339)
	}
	tx.Note(audit.Entry{Action: audit.StartWithdrawn, Events: []string{audit.EventStartWithdrawn}, Reason: string(w.StartOrigin), Detail: detail})
	w.StartWithdrawnAt, w.StartWithdrawnBy = &now, tx.by.Name
	if w.StartOrigin == OriginExternal || w.EC2State == string(power.EC2Pending) || w.EC2State == string(power.EC2Running) {
		w.StartSentAt = nil // its outcome is known
	}
	w.clearStart()
}

// clearStart removes who requested a start and why.
func (w *Worker) clearStart() {
	w.StartOrigin, w.StartBy, w.StartReason, w.StartAskedAt = OriginNone, "", "", nil
}

func (w *Worker) stopSent() *time.Time {
	if w.Intent == nil {
		return nil
	}
	return w.Intent.SentAt
}

// paused records a pause of any kind in the activity group.
func (w *Worker) paused(tx *Tx, r power.Reason, by string) {
	now := tx.Now
	w.LastPausedAt, w.LastPausedBy, w.PauseReason, w.PausePolicy = &now, by, r, ""
	w.TargetPauseAt, w.WarningSentAt, w.WarningFor, w.StopCalledOff = nil, nil, "", nil
	switch {
	case r.Automatic():
		w.AutoPauseCount++
	case r == power.ReasonExternal:
		w.ExternalPauseCount++
	default:
		w.ManualPauseCount++
	}
}

// StartWorker and ResumeWorker are equivalent: desired RUNNING. A worker that
// is stopping comes back when it has stopped. One whose stop was not sent yet
// stays up. Errors: NotFound, Refused.
func (f *Fleet) StartWorker(ctx context.Context, by audit.Actor, id string) (Worker, error) {
	return f.ResumeWorker(ctx, by, id)
}

// ResumeWorker requests RUNNING. For an actor that is no user it is an
// automatic resume, which a halt refuses.
func (f *Fleet) ResumeWorker(ctx context.Context, by audit.Actor, id string) (Worker, error) {
	origin := OriginManual
	if by.Kind != audit.KindPerson {
		origin = OriginAuto
	}
	return f.Change(ctx, id, Changing{By: by, Limits: origin == OriginAuto, Rules: origin == OriginAuto}, func(w *Worker, tx *Tx) error {
		if origin == OriginAuto && tx.Halted {
			return &failure.Refused{Command: "resume", Name: w.Name, Reason: "halted", Detail: "automatic actions are halted"}
		}
		if origin == OriginAuto {
			if err := f.frozen(tx.Now, w, "resume"); err != nil {
				return err
			}
		}
		if err := f.overdue(tx.Now, w, "resume"); err != nil {
			return err
		}
		return w.intendStart(tx, origin)
	})
}

// startReason returns the reason of an actor's start, as named in budgets.
func startReason(by audit.Actor) string {
	switch by.Kind {
	case audit.KindPerson:
		return policy.ByPerson
	case audit.KindWake:
		return policy.ForWake
	case audit.KindSchedule:
		return policy.ForSchedule
	}
	return policy.ForRepair
}

// TakeStart moves a STOPPED worker with a pending start to STARTING, within the
// budgets of automatic starts. Users' starts are counted and not held. Errors:
// NotFound, ErrStale, Refused with reason budget and its blocks.
func (f *Fleet) TakeStart(ctx context.Context, id string, at int64, ec2 string) (Worker, error) {
	return f.Change(ctx, id, Changing{By: audit.ByController, At: at, Limits: true, Rules: true}, func(w *Worker, tx *Tx) error {
		reason := cmp.Or(w.StartReason, policy.ForRepair)
		if w.StartOrigin != OriginAuto {
			reason = policy.ByPerson
		}
		if reason != policy.ByPerson {
			if tx.Halted {
				return &failure.Refused{Command: "start", Name: w.Name, Reason: "halted", Detail: "all automatic actions are halted"}
			}
			if err := f.frozen(tx.Now, w, "start"); err != nil {
				return err
			}
			used := f.Rules().BudgetsFor(tx.Now, f.subject(w, nil), policy.Starts, reason, tx.Pool.Spent, f.size)
			if blocks := policy.Blocks(used); len(blocks) > 0 {
				return &failure.Refused{Command: "start", Name: w.Name, Reason: string(idle.Budget), Detail: blocks[0].Sentence, Blocks: blocks}
			}
		}
		f.spend(tx, w, policy.Starts, reason)
		w.Status, w.StatusReason, w.EC2State, w.StartSentAt = power.WorkerStarting, "", ec2, nil
		return nil
	})
}

// spend counts an action against its budgets, in the change that makes it.
func (f *Fleet) spend(tx *Tx, w *Worker, what, reason string) {
	tx.Pool.Spent = f.Rules().Spend(tx.Now, f.subject(w, nil), what, reason, tx.Pool.Spent)
	tx.spent = true
}

func (w *Worker) intendStart(tx *Tx, o Origin) error {
	refuse := func(detail string) error {
		return &failure.Refused{Command: "resume", Name: w.Name, Reason: "status", Detail: detail}
	}
	want := func() {
		now := tx.Now
		if w.DesiredStatus != power.WorkerRunning || w.StartAskedAt == nil {
			w.StartAskedAt = &now
		}
		w.DesiredStatus = power.WorkerRunning
		w.StartOrigin, w.StartBy, w.StartReason = o, tx.by.Name, startReason(tx.by)
		w.StartWithdrawnAt, w.StartWithdrawnBy = nil, ""
	}
	// A pending start stays as it is, unless the new requester has priority
	// over the earlier one.
	asked := w.DesiredStatus == power.WorkerRunning && (w.StartOrigin != OriginAuto || urgency(startReason(tx.by)) <= urgency(w.StartReason))
	switch w.Status {
	case power.WorkerTerminating, power.WorkerTerminated:
		return refuse(fmt.Sprintf("it is %s", w.Status))
	case power.WorkerDraining:
		return w.CancelStop(tx, audit.DrainCancelled, "resumed by "+tx.by.Name)
	case power.WorkerRunning:
		if w.Intent == nil {
			return nil
		}
		return w.CancelStop(tx, "pause_cancelled", "resumed by "+tx.by.Name)
	case power.WorkerStopped, power.WorkerStopping:
		if asked {
			return nil
		}
		want()
	case power.WorkerFailed:
		if w.EC2InstanceID == "" {
			return refuse("it was never launched; retry it")
		}
		if o == OriginAuto {
			return refuse("it has failed, and only a manual retry starts it: " + w.StatusReason)
		}
		want()
		w.Status, w.StatusReason, w.StartSentAt = power.WorkerStarting, "", nil
	case power.WorkerUnknown:
		want()
	default:
		if asked {
			return nil
		}
		want()
		if w.Intent != nil {
			w.unpause(tx.Now, "resumed by "+tx.by.Name)
			w.Intent = nil
			tx.Note(audit.Entry{Action: "pause_cancelled", Events: []string{audit.EventPauseCancelled}, Detail: "resumed by " + tx.by.Name})
		}
	}
	tx.Note(audit.Entry{Action: "resume_intended", Reason: string(o)})
	return nil
}

// urgency orders reasons of starts by who is waiting for them.
func urgency(reason string) int {
	switch reason {
	case policy.ByPerson:
		return 2
	case policy.ForWake:
		return 1
	}
	return 0
}

// CancelStop withdraws a stop and returns the worker to RUNNING. The pause was
// counted when it was intended and stays counted, but is not its last one. It
// is for the controller and for commands inside a Change.
func (w *Worker) CancelStop(tx *Tx, action, why string) error {
	w.unpause(tx.Now, why)
	if w.Intent != nil && w.Intent.SentAt != nil {
		w.CancelledStopAt = w.Intent.SentAt
	}
	if w.Intent != nil && w.Intent.By == ByAgent.Name {
		w.AgentCalledOff = w.Intent.AgentGeneration
	}
	w.DesiredStatus, w.Intent, w.Draining = power.WorkerRunning, nil, false
	w.clearStart() // it never went down, so nothing is resumed
	if w.Status != power.WorkerRunning {
		w.Status, w.StatusReason = power.WorkerRunning, ""
	}
	tx.Note(audit.Entry{Action: action, Events: []string{audit.EventPauseCancelled}, Detail: why})
	return nil
}

// CancelDrain returns a DRAINING worker to RUNNING. Errors: NotFound, Refused.
func (f *Fleet) CancelDrain(ctx context.Context, by audit.Actor, id string) (Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *Worker, tx *Tx) error {
		if _, err := w.Status.After(power.VerbCancelDrain); err != nil {
			return &failure.Refused{Command: "cancel the drain of", Name: w.Name, Reason: "status", Detail: err.Error()[len("cannot "):]}
		}
		return w.CancelStop(tx, audit.DrainCancelled, "cancelled by "+tx.by.Name)
	})
}

// Termination are the options of a termination.
type Termination struct {
	// LeaveLicense terminates a stopped worker although its CML license is
	// registered and only a running CML can release the seat.
	LeaveLicense bool
}

// TerminateWorker terminates a worker permanently, and releases its CML license
// first. Idleness never calls it. Errors: NotFound, Refused.
func (f *Fleet) TerminateWorker(ctx context.Context, by audit.Actor, id string) (Worker, error) {
	return f.Terminate(ctx, by, id, Termination{})
}

// Terminate is TerminateWorker with options.
func (f *Fleet) Terminate(ctx context.Context, by audit.Actor, id string, t Termination) (Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *Worker, tx *Tx) error {
		switch {
		case w.Status == power.WorkerTerminating && w.TerminateFor == power.ReasonTTL:
			w.TerminateFor, w.TerminateBy, w.StatusReason = "", &tx.by, "by "+tx.by.Name // a halt no longer holds it
			tx.Note(audit.Entry{Action: "terminate_intended", Detail: w.StatusReason})
			return nil
		case w.Status == power.WorkerTerminating || w.Status == power.WorkerTerminated:
			return nil
		}
		if !t.LeaveLicense && w.seatOutOfReach() {
			return &failure.Refused{Command: "terminate", Name: w.Name, Reason: "license_held", Detail: "its CML license is registered, and only a running CML can release the seat: " +
				"start it first, or give up the seat with: lull worker terminate " + w.Name + " --leave-license"}
		}
		w.TerminateFor = ""
		return w.intendEnd(tx, "terminate_intended", "by "+tx.by.Name)
	})
}

// seatOutOfReach reports whether w holds a CML license that cannot be released
// because its machine does not run.
func (w *Worker) seatOutOfReach() bool {
	down := w.EC2State == string(power.EC2Stopped) || w.EC2State == string(power.EC2Stopping)
	return down && w.EC2InstanceID != "" && w.License.MayHoldSeat()
}

func (w *Worker) intendEnd(tx *Tx, action, why string) error {
	to, err := w.Status.After(power.VerbTerminate)
	if err != nil {
		return &failure.Refused{Command: "terminate", Name: w.Name, Reason: "status", Detail: err.Error()[len("cannot "):]}
	}
	starts := w.startPending()
	w.DesiredStatus, w.Intent, w.Draining = power.WorkerTerminated, nil, false
	w.Status, w.StatusReason, w.MissingSince, w.TerminateBy = to, why, nil, &tx.by
	tx.Note(audit.Entry{Action: action, Reason: string(w.TerminateFor), Detail: why})
	if starts {
		w.withdrawStart(tx)
	}
	return nil
}

// ExpireTTL acts on a worker's ttl_deadline: it stops the worker, or terminates
// it if its ttl_action says so. use names what was in use, for the record.
func (f *Fleet) ExpireTTL(ctx context.Context, id string, at int64, use string) (Worker, error) {
	return f.Change(ctx, id, Changing{By: audit.ByController, At: at, Limits: true}, func(w *Worker, tx *Tx) error {
		switch {
		case tx.Halted:
			return &failure.Refused{Command: "expire", Name: w.Name, Reason: "halted", Detail: "automatic actions are halted"}
		case w.TTLDeadline == nil || tx.Now.Before(*w.TTLDeadline):
			return &failure.Refused{Command: "expire", Name: w.Name, Reason: "ttl", Detail: "its deadline has not passed"}
		case w.TTLAction == "terminate":
			w.TerminateFor = power.ReasonTTL
			return w.intendEnd(tx, "ttl_terminate", strings.TrimSuffix("by its ttl_deadline "+w.TTLDeadline.UTC().Format(time.RFC3339)+"; "+use, "; "))
		}
		return w.intendStop(tx, Pause{Reason: power.ReasonTTL, Detail: use})
	})
}

// RetryWorker launches a FAILED worker without an instance again, after the
// controller has proved that the earlier launch left nothing. One with an
// instance is started.
func (f *Fleet) RetryWorker(ctx context.Context, by audit.Actor, id string) (Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *Worker, tx *Tx) error {
		if err := f.overdue(tx.Now, w, "retry"); err != nil {
			return err
		}
		if w.Status == power.WorkerFailed && w.EC2InstanceID != "" {
			return w.intendStart(tx, OriginManual)
		}
		to, err := w.Status.After(power.VerbRelaunch)
		if err != nil {
			return &failure.Refused{Command: "retry", Name: w.Name, Reason: "status", Detail: err.Error()[len("cannot "):]}
		}
		w.Status, w.StatusReason, w.DesiredStatus = to, "retry by "+tx.by.Name, power.WorkerRunning
		w.RetryLook = w.Launch != nil && w.Launch.SentAt != nil
		if !w.RetryLook {
			w.Launch = nil
			w.LaunchGeneration++
		}
		tx.Note(audit.Entry{Action: "retry"})
		return nil
	})
}

// External records a pause made by the cloud, or through it.
func (w *Worker) External(tx *Tx, by string) { w.paused(tx, power.ReasonExternal, by) }

// Resumed records that RUNNING is confirmed. It begins the snooze, also after a
// first launch. An imported worker that already ran gets none. A requested
// start is counted here, once.
func (w *Worker) Resumed(tx *Tx) {
	now := tx.Now
	if found := w.Imported && w.LastPausedAt == nil; w.RunningSince == nil && !found {
		w.LastResumedAt, w.LastResumedBy = &now, tx.by.Name
	}
	w.Status, w.StatusReason, w.RunningSince = power.WorkerRunning, "", &now
	w.Intent, w.Draining, w.MissingSince, w.StartSentAt = nil, false, nil, nil
	w.TargetPauseAt, w.WarningSentAt, w.WarningFor, w.CancelledStopAt, w.StopCalledOff = nil, nil, "", nil, nil
	if w.License.OperationInProgress != nil {
		w.License.OperationInProgress = &now // CML's time limit starts again
	}
	action, events := "started", []string(nil)
	if w.StartOrigin != OriginNone {
		action, events = "resumed", []string{audit.EventResumed}
		w.LastResumedAt, w.LastResumedBy = &now, w.StartBy
	}
	switch w.StartOrigin {
	case OriginManual:
		w.ManualResumeCount++
	case OriginAuto:
		w.AutoResumeCount++
	case OriginExternal:
		w.ExternalResumeCount++
	}
	tx.Note(audit.Entry{Action: action, Events: events, Reason: string(w.StartOrigin), Detail: w.StartBy})
	w.clearStart()
	w.StartWithdrawnAt, w.StartWithdrawnBy = nil, ""
}

// Repair requests a start after an unintended stop.
func (w *Worker) Repair(tx *Tx) {
	now := tx.Now
	w.StartOrigin, w.StartBy, w.StartReason, w.StartAskedAt = OriginAuto, tx.by.Name, policy.ForRepair, &now
	w.StartSentAt, w.StartWithdrawnAt, w.StartWithdrawnBy = nil, nil, ""
}

// StoppedOutside withdraws the start that was in progress or waiting in the
// earlier state before, if there was one: the machine was stopped outside lull
// meanwhile.
func (w *Worker) StoppedOutside(tx *Tx, before *Worker) {
	w.DesiredStatus = power.WorkerStopped
	if before.startPending() {
		w.withdrawStart(tx)
	}
	w.clearStart()
	w.StartSentAt = nil
}

// StopLateStart ends a start that was withdrawn and took effect nevertheless in
// a stop, attributed to the user who withdrew it. That stop is already counted.
func (w *Worker) StopLateStart(tx *Tx) {
	w.DesiredStatus, w.StartSentAt = power.WorkerStopped, nil
	w.Intent = &Intent{Reason: power.ReasonManual, By: w.StartWithdrawnBy, At: tx.Now, Generation: w.PauseGeneration}
	w.clearStart()
}

// CallOff is CancelStop for an automatic stop, with the decision that canceled
// it, for the audit log.
func (w *Worker) CallOff(tx *Tx, d *evidence.Decision, why string) error {
	action := "pause_cancelled"
	if w.Intent != nil && w.Intent.Drain {
		action = audit.DrainCancelled
	}
	if err := w.CancelStop(tx, action, why); err != nil {
		return err
	}
	tx.entries[len(tx.entries)-1].Decision = d
	return nil
}

// ScheduleStart requests RUNNING because a schedule has opened. The revision at
// must be the newest, so that it never overrides a later decision of a user.
// Errors: NotFound, ErrStale, Refused.
func (f *Fleet) ScheduleStart(ctx context.Context, id string, at int64, schedule string) (Worker, error) {
	by := audit.Actor{Name: bySchedule + schedule, Kind: audit.KindSchedule}
	return f.Change(ctx, id, Changing{By: by, At: at, Limits: true, Rules: true}, func(w *Worker, tx *Tx) error {
		if tx.Halted {
			return &failure.Refused{Command: "resume", Name: w.Name, Reason: "halted", Detail: "automatic actions are halted"}
		}
		if err := f.frozen(tx.Now, w, "resume"); err != nil {
			return err
		}
		if err := f.overdue(tx.Now, w, "resume"); err != nil {
			return err
		}
		return w.intendStart(tx, OriginAuto)
	})
}

// ScheduleWithdraws withdraws a pending start requested by a schedule that no
// longer wants it. Errors: NotFound, ErrStale.
func (f *Fleet) ScheduleWithdraws(ctx context.Context, id string, at int64) (Worker, error) {
	return f.Change(ctx, id, Changing{By: audit.ByController, At: at}, func(w *Worker, tx *Tx) error {
		if !w.ForSchedule() || w.Status != power.WorkerStopped {
			return nil
		}
		tx.by = audit.Actor{Name: w.StartBy, Kind: audit.KindSchedule}
		w.DesiredStatus, w.StatusReason = power.WorkerStopped, ""
		w.withdrawStart(tx)
		return nil
	})
}

// ForSchedule reports whether a start requested by a schedule is pending.
func (w *Worker) ForSchedule() bool {
	return w.startWaits() && w.StartReason == policy.ForSchedule && strings.HasPrefix(w.StartBy, bySchedule)
}

// bySchedule is the prefix of a schedule's actor name.
const bySchedule = "schedule "

// WantsStart reports whether a schedule wants a stopped worker started now.
func (w *Worker) WantsStart(now time.Time, r *policy.Resolved) bool {
	return w.Status == power.WorkerStopped && w.DesiredStatus == power.WorkerStopped && w.Intent == nil &&
		r.Standing != nil && r.Standing.Starts(w.lastStop()) && !w.Overdue(now)
}
