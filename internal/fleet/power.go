package fleet

import (
	"cmp"
	"context"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
)

// PauseWorker records the intent to stop a worker: desired STOPPED, reason and
// generation. The controller acts on it. A worker that is stopped, or that a user is
// already stopping, is left unchanged. Errors: NotFound, Refused.
func (f *Fleet) PauseWorker(ctx context.Context, by audit.Actor, id string, p worker.Pause) (worker.Worker, error) {
	if p.Reason == "" {
		p.Reason = power.ReasonManual
	}
	return f.Change(ctx, id, Changing{By: by, Limits: p.Reason.Automatic()}, func(w *worker.Worker, tx *worker.Tx) error {
		if p.Reason.Automatic() && tx.Halted {
			return &failure.Refused{Command: "pause", Name: w.Name, Reason: "halted", Detail: "automatic actions are halted"}
		}
		return w.IntendStop(tx, p)
	})
}

// StopWorker is PauseWorker for a user.
func (f *Fleet) StopWorker(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
	return f.PauseWorker(ctx, by, id, worker.Pause{})
}

// DrainWorker makes a RUNNING worker DRAINING at a user's request: it takes no
// new work, and stops when nothing runs or the drain times out.
func (f *Fleet) DrainWorker(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
	return f.PauseWorker(ctx, by, id, worker.Pause{Drain: true})
}

// StartWorker requests RUNNING, like ResumeWorker. A worker that is stopping is
// started once it has stopped; one whose stop was not sent yet stays up. Errors:
// NotFound, Refused.
func (f *Fleet) StartWorker(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
	return f.ResumeWorker(ctx, by, id)
}

// ResumeWorker requests RUNNING. Unless by is a user, this is an automatic resume,
// which a halt refuses.
func (f *Fleet) ResumeWorker(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
	origin := worker.OriginManual
	if by.Kind != audit.KindUser {
		origin = worker.OriginAuto
	}
	return f.Change(ctx, id, Changing{By: by, Limits: origin == worker.OriginAuto, Rules: origin == worker.OriginAuto}, func(w *worker.Worker, tx *worker.Tx) error {
		if origin == worker.OriginAuto && tx.Halted {
			return &failure.Refused{Command: "resume", Name: w.Name, Reason: "halted", Detail: "automatic actions are halted"}
		}
		if origin == worker.OriginAuto {
			if err := f.frozen(tx.Now, w, "resume"); err != nil {
				return err
			}
		}
		if err := f.overdue(tx.Now, w, "resume"); err != nil {
			return err
		}
		return w.IntendStart(tx, origin)
	})
}

// TakeStart moves a STOPPED worker with a pending start to STARTING, if the budgets
// of automatic starts allow it. Starts of users are counted but not delayed. Errors:
// NotFound, ErrStale, Refused with reason budget and its blocks.
func (f *Fleet) TakeStart(ctx context.Context, id string, at int64, ec2 string) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: audit.ByController, At: at, Limits: true, Rules: true}, func(w *worker.Worker, tx *worker.Tx) error {
		reason := cmp.Or(w.StartReason, policy.ForRepair)
		if w.StartOrigin != worker.OriginAuto {
			reason = policy.ByUser
		}
		if reason != policy.ByUser {
			if tx.Halted {
				return &failure.Refused{Command: "start", Name: w.Name, Reason: "halted", Detail: "all automatic actions are halted"}
			}
			if err := f.frozen(tx.Now, w, "start"); err != nil {
				return err
			}
			used := f.Rules().BudgetsFor(tx.Now, f.subject(w, nil), policy.Starts, reason, tx.Pool.Spent, f.Size)
			if blocks := policy.Blocks(used); len(blocks) > 0 {
				return &failure.Refused{Command: "start", Name: w.Name, Reason: string(idle.Budget), Detail: blocks[0].Sentence, Blocks: blocks}
			}
		}
		f.spend(tx, w, policy.Starts, reason)
		w.Status, w.StatusReason, w.EC2State, w.StartSentAt = power.WorkerStarting, "", ec2, nil
		return nil
	})
}

// CancelDrain returns a DRAINING worker to RUNNING. Errors: NotFound, Refused.
func (f *Fleet) CancelDrain(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *worker.Worker, tx *worker.Tx) error {
		if _, err := w.Status.After(power.VerbCancelDrain); err != nil {
			return &failure.Refused{Command: "cancel the drain of", Name: w.Name, Reason: "status", Detail: err.Error()[len("cannot "):]}
		}
		return w.CancelStop(tx, audit.DrainCancelled, "cancelled by "+tx.By.Name)
	})
}

// Termination are the options of a termination.
type Termination struct {
	// LeaveLicense allows terminating a stopped worker whose CML license is
	// registered, although its seat can then not be released.
	LeaveLicense bool
}

// TerminateWorker terminates a worker permanently, after releasing its CML license.
// It is never called because of idleness. Errors: NotFound, Refused.
func (f *Fleet) TerminateWorker(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
	return f.Terminate(ctx, by, id, Termination{})
}

// Terminate is TerminateWorker with options.
func (f *Fleet) Terminate(ctx context.Context, by audit.Actor, id string, t Termination) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *worker.Worker, tx *worker.Tx) error {
		switch {
		case w.Status == power.WorkerTerminating && w.TerminateFor == power.ReasonTTL:
			w.TerminateFor, w.TerminateBy, w.StatusReason = "", &tx.By, "by "+tx.By.Name // requested by a user, so a halt no longer delays it
			tx.Note(audit.Entry{Action: "terminate_intended", Detail: w.StatusReason})
			return nil
		case w.Status == power.WorkerTerminating || w.Status == power.WorkerTerminated:
			return nil
		}
		if !t.LeaveLicense && w.SeatOutOfReach() {
			return &failure.Refused{Command: "terminate", Name: w.Name, Reason: "license_held", Detail: "its CML license is registered, and only a running CML can release the seat: " +
				"start it first, or give up the seat with: lull worker terminate " + w.Name + " --leave-license"}
		}
		w.TerminateFor = ""
		return w.IntendEnd(tx, "terminate_intended", "by "+tx.By.Name)
	})
}

// ExpireTTL carries out a worker's expired ttl_deadline: it stops the worker, or
// terminates it if its ttl_action says so. use describes what was in use, for the
// record.
func (f *Fleet) ExpireTTL(ctx context.Context, id string, at int64, use string) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: audit.ByController, At: at, Limits: true}, func(w *worker.Worker, tx *worker.Tx) error {
		switch {
		case tx.Halted:
			return &failure.Refused{Command: "expire", Name: w.Name, Reason: "halted", Detail: "automatic actions are halted"}
		case w.TTLDeadline == nil || tx.Now.Before(*w.TTLDeadline):
			return &failure.Refused{Command: "expire", Name: w.Name, Reason: "ttl", Detail: "its deadline has not passed"}
		case w.TTLAction == "terminate":
			w.TerminateFor = power.ReasonTTL
			return w.IntendEnd(tx, "ttl_terminate", strings.TrimSuffix("by its ttl_deadline "+w.TTLDeadline.UTC().Format(time.RFC3339)+"; "+use, "; "))
		}
		return w.IntendStop(tx, worker.Pause{Reason: power.ReasonTTL, Detail: use})
	})
}

// RetryWorker retries a FAILED worker. A worker with an instance is started. One
// without is launched again, once the controller has proved that the earlier launch
// left nothing.
func (f *Fleet) RetryWorker(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: by}, func(w *worker.Worker, tx *worker.Tx) error {
		if err := f.overdue(tx.Now, w, "retry"); err != nil {
			return err
		}
		if w.Status == power.WorkerFailed && w.EC2InstanceID != "" {
			return w.IntendStart(tx, worker.OriginManual)
		}
		to, err := w.Status.After(power.VerbRelaunch)
		if err != nil {
			return &failure.Refused{Command: "retry", Name: w.Name, Reason: "status", Detail: err.Error()[len("cannot "):]}
		}
		w.Status, w.StatusReason, w.DesiredStatus = to, "retry by "+tx.By.Name, power.WorkerRunning
		w.RetryLook = w.Launch != nil && w.Launch.SentAt != nil
		if !w.RetryLook {
			w.Launch = nil
			w.LaunchGeneration++
		}
		tx.Note(audit.Entry{Action: "retry"})
		return nil
	})
}

// ScheduleStart requests RUNNING because a schedule has opened. at must be the newest
// revision, so that it never overrides a later decision of a user. Errors: NotFound,
// ErrStale, Refused.
func (f *Fleet) ScheduleStart(ctx context.Context, id string, at int64, schedule string) (worker.Worker, error) {
	by := audit.Actor{Name: worker.BySchedule + schedule, Kind: audit.KindSchedule}
	return f.Change(ctx, id, Changing{By: by, At: at, Limits: true, Rules: true}, func(w *worker.Worker, tx *worker.Tx) error {
		if tx.Halted {
			return &failure.Refused{Command: "resume", Name: w.Name, Reason: "halted", Detail: "automatic actions are halted"}
		}
		if err := f.frozen(tx.Now, w, "resume"); err != nil {
			return err
		}
		if err := f.overdue(tx.Now, w, "resume"); err != nil {
			return err
		}
		return w.IntendStart(tx, worker.OriginAuto)
	})
}

// ScheduleWithdraws withdraws the pending start of a schedule that no longer wants
// it. Errors: NotFound, ErrStale.
func (f *Fleet) ScheduleWithdraws(ctx context.Context, id string, at int64) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: audit.ByController, At: at}, func(w *worker.Worker, tx *worker.Tx) error {
		if !w.ForSchedule() || w.Status != power.WorkerStopped {
			return nil
		}
		tx.By = audit.Actor{Name: w.StartBy, Kind: audit.KindSchedule}
		w.DesiredStatus, w.StatusReason = power.WorkerStopped, ""
		w.WithdrawStart(tx)
		return nil
	})
}
