package fleet

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"lull/internal/evidence"
	"lull/internal/idle"
	"lull/internal/policy"
	"lull/internal/power"
)

// Pause is what a pause or drain is asked for with.
type Pause struct {
	Reason Reason // empty is manual
	Drain  bool
	// Decision is what an automatic pause rests on; it goes to the audit.
	Decision *evidence.Decision
	Detail   string
	Force    bool // nothing that is read calls it off
}

// PauseWorker records the intent to stop a worker: desired STOPPED, reason
// and generation. The controller acts on it. One that is stopped, or will be
// for a person, stays as it is. Errors: NotFound, Refused.
func (f *Fleet) PauseWorker(ctx context.Context, by Actor, id string, p Pause) (Worker, error) {
	if p.Reason == "" {
		p.Reason = ReasonManual
	}
	return f.Change(ctx, id, Changing{By: by, Limits: p.Reason.Automatic()}, func(w *Worker, tx *Tx) error {
		if p.Reason.Automatic() && tx.Halted {
			return &Refused{Command: "pause", Name: id, Reason: "halted", Detail: "automatic actions are halted"}
		}
		return w.intendStop(tx, p)
	})
}

// StopWorker is PauseWorker by a person.
func (f *Fleet) StopWorker(ctx context.Context, by Actor, id string) (Worker, error) {
	return f.PauseWorker(ctx, by, id, Pause{})
}

// DrainWorker makes a RUNNING worker DRAINING by a person's wish: it takes
// nothing new and stops when nothing runs or the drain times out.
func (f *Fleet) DrainWorker(ctx context.Context, by Actor, id string) (Worker, error) {
	return f.PauseWorker(ctx, by, id, Pause{Drain: true})
}

// intendStop records a stop. Every pause is counted here, once, and nowhere
// else but where the cloud did it.
func (w *Worker) intendStop(tx *Tx, p Pause) error {
	command, verb := "stop", power.VerbStop
	if p.Drain {
		command, verb = "drain", power.VerbDrain
	}
	refuse := func(reason, detail string) error {
		return &Refused{Command: command, Name: w.ID, Reason: reason, Detail: detail}
	}
	if w.DesiredStatus == power.WorkerStopped && (w.Status == power.WorkerStopped || w.Intent != nil) {
		switch {
		case p.Reason.Automatic():
			return refuse("already_intended", fmt.Sprintf("it is to stop already, for %s", w.PauseReason))
		case w.Intent == nil || !w.Intent.Reason.Automatic() && (p.Drain || !w.Intent.Drain):
			return nil // done, or on the way for a person
		case p.Drain && w.Status != power.WorkerRunning:
			return refuse("status", fmt.Sprintf("it is %s", w.Status))
		}
	}
	if w.Status == power.WorkerStopping && w.DesiredStatus == power.WorkerRunning && w.Intent != nil && !p.Reason.Automatic() {
		p.Drain = false // the resume that waits for the stop is withdrawn
	} else if w.Status != power.WorkerStopping || p.Drain {
		if _, err := w.Status.After(verb); err != nil {
			return refuse("status", err.Error()[len("cannot "):])
		}
	}
	if w.Status == power.WorkerFailed {
		if w.EC2InstanceID == "" {
			return refuse("no_instance", "it has no instance; terminate or retry it")
		}
		w.Status, w.StatusReason = power.WorkerStopping, ""
	}
	sent := w.stopSent()
	w.PauseGeneration++
	w.DesiredStatus = power.WorkerStopped
	w.Intent = &Intent{Reason: p.Reason, By: tx.by.Name, At: tx.Now, Generation: w.PauseGeneration, Drain: p.Drain, Force: p.Force, SentAt: sent}
	w.paused(tx, p.Reason, tx.by.Name)
	action := "pause_intended"
	e := Entry{Events: []string{EventPaused}, Reason: string(p.Reason), Decision: p.Decision, Detail: p.Detail, Generation: w.PauseGeneration}
	if p.Drain {
		action = AuditDrainStarted
		w.Draining = true
		w.Status, w.StatusReason = power.WorkerDraining, "drain by "+tx.by.Name
	}
	e.Action = action
	tx.Note(e)
	return nil
}

func (w *Worker) stopSent() *time.Time {
	if w.Intent == nil {
		return nil
	}
	return w.Intent.SentAt
}

// paused writes what a pause of any kind leaves in the activity group.
func (w *Worker) paused(tx *Tx, r Reason, by string) {
	now := tx.Now
	w.LastPausedAt, w.LastPausedBy, w.PauseReason = &now, by, r
	w.TargetPauseAt, w.WarningSentAt, w.WarningFor = nil, nil, ""
	switch {
	case r.Automatic():
		w.AutoPauseCount++
	case r == ReasonExternal:
		w.ExternalPauseCount++
	default:
		w.ManualPauseCount++
	}
}

// StartWorker and ResumeWorker are the same: desired RUNNING. A worker that
// stops comes back when it has stopped; one whose stop was not sent yet
// stays up. Errors: NotFound, Refused.
func (f *Fleet) StartWorker(ctx context.Context, by Actor, id string) (Worker, error) {
	return f.ResumeWorker(ctx, by, id)
}

// ResumeWorker asks for RUNNING. Actors that are not people make it an
// automatic resume, which a halt refuses.
func (f *Fleet) ResumeWorker(ctx context.Context, by Actor, id string) (Worker, error) {
	origin := OriginManual
	if by.Kind != KindPerson {
		origin = OriginAuto
	}
	return f.Change(ctx, id, Changing{By: by, Limits: origin == OriginAuto, Rules: origin == OriginAuto}, func(w *Worker, tx *Tx) error {
		if origin == OriginAuto && tx.Halted {
			return &Refused{Command: "resume", Name: id, Reason: "halted", Detail: "automatic actions are halted"}
		}
		if origin == OriginAuto {
			if err := f.frozen(tx.Now, w, "resume"); err != nil {
				return err
			}
		}
		return w.intendStart(tx, origin)
	})
}

// startReason is why an actor starts something, as budgets name it.
func startReason(by Actor) string {
	switch by.Kind {
	case KindPerson:
		return policy.ByPerson
	case KindWake:
		return policy.ForWake
	case KindSchedule:
		return policy.ForSchedule
	}
	return policy.ForRepair
}

// TakeStart moves a STOPPED worker that is to run to STARTING, within the
// budgets of automatic starts: those of people are counted and not held.
// Errors: NotFound, ErrStale, Refused with reason budget and its blocks.
func (f *Fleet) TakeStart(ctx context.Context, id string, at int64, ec2 string) (Worker, error) {
	return f.Change(ctx, id, Changing{By: ByController, At: at, Limits: true, Rules: true}, func(w *Worker, tx *Tx) error {
		reason := cmp.Or(w.StartReason, policy.ForRepair)
		if w.StartOrigin != OriginAuto {
			reason = policy.ByPerson
		}
		if reason != policy.ByPerson {
			used := f.Rules().BudgetsFor(tx.Now, f.subject(w, nil), policy.Starts, reason, tx.Pool.Spent, f.size)
			if blocks := policy.Blocks(used); len(blocks) > 0 {
				return &Refused{Command: "start", Name: id, Reason: string(idle.Budget), Detail: blocks[0].Sentence, Blocks: blocks}
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
		return &Refused{Command: "resume", Name: w.ID, Reason: "status", Detail: detail}
	}
	want := func() {
		w.DesiredStatus = power.WorkerRunning
		w.StartOrigin, w.StartBy = o, tx.by.Name
		w.StartReason, w.StartAskedAt = startReason(tx.by), &tx.Now
	}
	switch w.Status {
	case power.WorkerTerminating, power.WorkerTerminated:
		return refuse(fmt.Sprintf("it is %s", w.Status))
	case power.WorkerDraining:
		return w.CancelStop(tx, AuditDrainCancelled, "resumed by "+tx.by.Name)
	case power.WorkerRunning:
		if w.Intent == nil {
			return nil
		}
		return w.CancelStop(tx, "pause_cancelled", "resumed by "+tx.by.Name)
	case power.WorkerStopped, power.WorkerStopping:
		if w.DesiredStatus == power.WorkerRunning {
			return nil
		}
		want()
	case power.WorkerFailed:
		if w.EC2InstanceID == "" {
			return refuse("it was never launched; retry it")
		}
		want()
		w.Status, w.StatusReason, w.StartSentAt = power.WorkerStarting, "", nil
	case power.WorkerUnknown:
		want()
	default:
		if w.DesiredStatus == power.WorkerRunning {
			return nil
		}
		want()
		w.Intent = nil
	}
	tx.Note(Entry{Action: "resume_intended", Reason: string(o)})
	return nil
}

// CancelStop withdraws a stop and returns the worker to RUNNING; the pause
// was counted when it was intended and stays counted. It is for the
// controller and for commands inside a Change.
func (w *Worker) CancelStop(tx *Tx, action, why string) error {
	if w.Intent != nil && w.Intent.SentAt != nil {
		w.CancelledStopAt = w.Intent.SentAt
	}
	if w.Intent != nil && w.Intent.By == ByAgent.Name {
		w.AgentCalledOff = w.Intent.AgentGeneration
	}
	w.DesiredStatus, w.Intent, w.Draining = power.WorkerRunning, nil, false
	if w.Status != power.WorkerRunning {
		w.Status, w.StatusReason = power.WorkerRunning, ""
	}
	tx.Note(Entry{Action: action, Events: []string{EventPauseCancelled}, Detail: why})
	return nil
}

// CancelDrain returns a DRAINING worker to RUNNING. Errors: NotFound, Refused.
func (f *Fleet) CancelDrain(ctx context.Context, by Actor, id string) (Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *Worker, tx *Tx) error {
		if _, err := w.Status.After(power.VerbCancelDrain); err != nil {
			return &Refused{Command: "cancel the drain of", Name: id, Reason: "status", Detail: err.Error()[len("cannot "):]}
		}
		return w.CancelStop(tx, AuditDrainCancelled, "cancelled by "+tx.by.Name)
	})
}

// TerminateWorker ends a worker for ever. Idleness never calls it.
func (f *Fleet) TerminateWorker(ctx context.Context, by Actor, id string) (Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *Worker, tx *Tx) error {
		if w.Status == power.WorkerTerminating || w.Status == power.WorkerTerminated {
			return nil
		}
		return w.intendEnd(tx, "terminate_intended", "by "+tx.by.Name)
	})
}

func (w *Worker) intendEnd(tx *Tx, action, why string) error {
	to, err := w.Status.After(power.VerbTerminate)
	if err != nil {
		return &Refused{Command: "terminate", Name: w.ID, Reason: "status", Detail: err.Error()[len("cannot "):]}
	}
	w.DesiredStatus, w.Intent, w.Draining = power.WorkerTerminated, nil, false
	w.Status, w.StatusReason, w.MissingSince = to, why, nil
	tx.Note(Entry{Action: action, Detail: why})
	return nil
}

// ExpireTTL acts on a worker's ttl_deadline: stop, or terminate if its
// ttl_action says so. use is what was in use, for the record.
func (f *Fleet) ExpireTTL(ctx context.Context, id string, at int64, use string) (Worker, error) {
	return f.Change(ctx, id, Changing{By: ByController, At: at, Limits: true}, func(w *Worker, tx *Tx) error {
		switch {
		case tx.Halted:
			return &Refused{Command: "expire", Name: id, Reason: "halted", Detail: "automatic actions are halted"}
		case w.TTLDeadline == nil || tx.Now.Before(*w.TTLDeadline):
			return &Refused{Command: "expire", Name: id, Reason: "ttl", Detail: "its deadline has not passed"}
		case w.TTLAction == "terminate":
			return w.intendEnd(tx, "ttl_terminate", use)
		}
		return w.intendStop(tx, Pause{Reason: ReasonTTL, Detail: use})
	})
}

// RetryWorker lets a FAILED worker that has no instance be launched again,
// after the controller has proved that the earlier launch left nothing; one
// that has an instance is started.
func (f *Fleet) RetryWorker(ctx context.Context, by Actor, id string) (Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *Worker, tx *Tx) error {
		if w.Status == power.WorkerFailed && w.EC2InstanceID != "" {
			return w.intendStart(tx, OriginManual)
		}
		to, err := w.Status.After(power.VerbRelaunch)
		if err != nil {
			return &Refused{Command: "retry", Name: id, Reason: "status", Detail: err.Error()[len("cannot "):]}
		}
		w.Status, w.StatusReason, w.DesiredStatus = to, "retry by "+tx.by.Name, power.WorkerRunning
		w.RetryLook = w.Launch != nil && w.Launch.SentAt != nil
		if !w.RetryLook {
			w.Launch = nil
			w.LaunchGeneration++
		}
		tx.Note(Entry{Action: "retry"})
		return nil
	})
}

// External records a pause that the cloud, or somebody through it, made.
func (w *Worker) External(tx *Tx, by string) { w.paused(tx, ReasonExternal, by) }

// Resumed records that RUNNING is confirmed. A start that somebody asked for
// is counted here, once, and begins the snooze; a first launch is none.
func (w *Worker) Resumed(tx *Tx) {
	now := tx.Now
	w.Status, w.StatusReason, w.RunningSince = power.WorkerRunning, "", &now
	w.Intent, w.Draining, w.MissingSince, w.StartSentAt = nil, false, nil, nil
	w.TargetPauseAt, w.WarningSentAt, w.WarningFor, w.CancelledStopAt = nil, nil, "", nil
	action, events := "started", []string(nil)
	if w.StartOrigin != OriginNone {
		action, events = "resumed", []string{EventResumed}
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
	tx.Note(Entry{Action: action, Events: events, Reason: string(w.StartOrigin), Detail: w.StartBy})
	w.StartOrigin, w.StartBy, w.StartReason, w.StartAskedAt = OriginNone, "", "", nil
}

// CallOff is CancelStop of an automatic stop, with the decision that called it
// off, for the audit.
func (w *Worker) CallOff(tx *Tx, d *evidence.Decision, why string) error {
	action := "pause_cancelled"
	if w.Intent != nil && w.Intent.Drain {
		action = AuditDrainCancelled
	}
	if err := w.CancelStop(tx, action, why); err != nil {
		return err
	}
	tx.entries[len(tx.entries)-1].Decision = d
	return nil
}

// ScheduleStart asks for RUNNING because a schedule has opened. What at names
// must be the newest, so that it never stands against a person's later word.
// Errors: NotFound, ErrStale, Refused.
func (f *Fleet) ScheduleStart(ctx context.Context, id string, at int64, schedule string) (Worker, error) {
	by := Actor{Name: "schedule " + schedule, Kind: KindSchedule}
	return f.Change(ctx, id, Changing{By: by, At: at, Limits: true, Rules: true}, func(w *Worker, tx *Tx) error {
		if tx.Halted {
			return &Refused{Command: "resume", Name: id, Reason: "halted", Detail: "automatic actions are halted"}
		}
		if err := f.frozen(tx.Now, w, "resume"); err != nil {
			return err
		}
		return w.intendStart(tx, OriginAuto)
	})
}

// WantsStart tells whether a schedule wants a stopped worker started now.
func (w *Worker) WantsStart(now time.Time, r *policy.Resolved) bool {
	return w.Status == power.WorkerStopped && w.DesiredStatus == power.WorkerStopped && w.Intent == nil &&
		r.Standing != nil && r.Standing.Starts(w.lastStop()) && (w.TTLDeadline == nil || now.Before(*w.TTLDeadline))
}
