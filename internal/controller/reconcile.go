package controller

import (
	"cmp"
	"context"
	"errors"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// Result is a handler's result for a worker.
type Result string

// The results.
const (
	Success Result = "SUCCESS" // reconciled
	Requeue Result = "REQUEUE" // not yet; again in the next cycle
	Retry   Result = "RETRY"   // a transient error; again with backoff
	Skip    Result = "SKIP"    // nothing to do
)

// outcome is a Result and the time at which the worker is due again. If Next is zero,
// the Result determines that time.
type outcome struct {
	Result
	Next time.Time
}

// job is one reconciliation of a worker, on a copy of what was known when it began.
type job struct {
	c      *Controller
	e      *entry
	sh     *shard
	f      *fleet.Fleet
	w      worker.Worker
	s      settings.Settings
	now    time.Time
	seen   string    // the state in EC2, empty if it was not listed
	seenAt time.Time // when the listing with that state began
	gone   bool      // EC2 does not know the instance
	fresh  bool      // seen is newer than the claim and the record's status
	inst   *Instance
	live   live
	ask    []fleet.Request
	unread *worker.Unread // nil if its region can be read
	read   *LicenseState  // read from CML by this job
}

// reconcile moves one worker one step.
func (c *Controller) reconcile(ctx context.Context, e *entry, sh *shard) outcome {
	now := time.Now()
	if now.Before(sh.since) { // requests for the owner keep waiting
		return outcome{Requeue, sh.since.Add(time.Millisecond)}
	}
	c.mu.Lock()
	j := &job{c: c, e: e, sh: sh, f: sh.fleet, w: e.w, s: c.fleet.Settings(), now: now, seen: e.seen, seenAt: e.seenAt, gone: e.missing,
		inst: e.inst, live: e.known(), ask: c.waiting[e.id], unread: c.unread(&e.w)}
	delete(c.waiting, e.id)
	// An observation that began before the worker entered its status, or before this
	// server owned it, does not show the effect of later actions.
	j.fresh = e.seenAt.After(sh.since) && !e.seenAt.Before(j.w.StatusSince)
	if j.inst != nil && j.inst.State != j.seen {
		j.inst = nil
	}
	c.mu.Unlock()
	out := j.handle(ctx)
	j.answer(ctx)
	c.keep(j, out)
	return out
}

// keep stores what a job learned in the entry.
func (c *Controller) keep(j *job, out outcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := j.e
	e.learnt(j.live)
	e.reconciled, e.reconciledSeen = out.Result == Success && j.rests() && e.w.Revision() == j.w.Revision(), j.seen
	if out.Result == Skip {
		e.reconciled = true
	}
}

// rests reports whether the worker's state can change only through a new record or
// observation.
func (j *job) rests() bool {
	return !power.WorkerTable.IsTransitional(j.w.Status) && (j.w.Status != power.WorkerRunning || j.w.DesiredStatus == power.WorkerRunning) &&
		!(j.w.Status == power.WorkerStopped && j.w.DesiredStatus == power.WorkerRunning)
}

// handle dispatches by status.
func (j *job) handle(ctx context.Context) outcome {
	switch j.w.Status {
	case power.WorkerPending:
		return j.pending(ctx)
	case power.WorkerProvisioning:
		return j.provisioning(ctx)
	case power.WorkerStarting:
		return j.starting(ctx)
	case power.WorkerRunning:
		return j.runningSteps(ctx)
	case power.WorkerDraining:
		return j.draining(ctx)
	case power.WorkerStopping:
		return j.stopping(ctx)
	case power.WorkerStopped:
		return j.stopped(ctx)
	case power.WorkerTerminating:
		return j.terminating(ctx)
	case power.WorkerFailed:
		return j.failed(ctx)
	case power.WorkerUnknown:
		return j.unknown(ctx)
	}
	return outcome{Result: Skip}
}

// write changes the record at the revision on which the decision was made.
func (j *job) write(ctx context.Context, fn func(w *worker.Worker, tx *worker.Tx) error) error {
	return j.writeBy(ctx, audit.ByController, false, fn)
}

func (j *job) writeBy(ctx context.Context, by audit.Actor, limits bool, fn func(w *worker.Worker, tx *worker.Tx) error) error {
	defer j.writes()()
	w, err := j.f.Change(ctx, j.w.ID, fleet.Changing{By: by, At: j.w.Revision(), Limits: limits}, fn)
	if err != nil {
		return err
	}
	j.took(w)
	return nil
}

// writes marks the beginning of a write by this job; end marks its end. In between,
// the change that the watch delivers does not cancel the job. If a different intent
// has arrived by the end, end cancels the job, because its next step was decided
// without that intent.
func (j *job) writes() (end func()) {
	j.c.mu.Lock()
	defer j.c.mu.Unlock()
	j.e.writing = true
	return func() {
		j.c.mu.Lock()
		defer j.c.mu.Unlock()
		j.e.writing = false
		if known := &j.e.w; known.Revision() > j.w.Revision() && known.DesiredStatus != j.w.DesiredStatus && j.e.cancel != nil {
			j.e.cancel()
		}
	}
}

// took makes w, which this job has just written, the current record of the job and
// its entry.
func (j *job) took(w worker.Worker) {
	j.w = w
	j.c.mu.Lock()
	defer j.c.mu.Unlock()
	if j.c.entries[w.ID] == j.e && w.Revision() > j.e.w.Revision() {
		j.e.w, j.e.reconciled = w, false
	}
}

// failedWrite returns the outcome of a failed write.
func (j *job) failedWrite(err error) outcome {
	switch {
	case errors.Is(err, fleet.ErrStale):
		return outcome{Requeue, time.Now().Add(debounce)} // by then the watch has delivered the newer record
	case errors.Is(err, store.ErrLeaseLost):
		j.c.forget(j.sh)
		return outcome{Result: Skip}
	}
	if _, ok := errors.AsType[*failure.NotFound](err); ok {
		return outcome{Result: Skip}
	}
	j.c.log.Warn("cannot write a worker", "worker", j.w.ID, "err", err)
	return outcome{Result: Retry}
}

// to moves the worker to status s in one write, with the further changes that more
// makes; more may be nil.
func (j *job) to(ctx context.Context, s power.Worker, why string, more func(w *worker.Worker, tx *worker.Tx)) error {
	return j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
		w.Status, w.StatusReason, w.EC2State = s, why, j.state(w)
		if more != nil {
			more(w, tx)
		}
		return nil
	})
}

// state returns the EC2 state to record.
func (j *job) state(w *worker.Worker) string {
	if j.seen == "" {
		return w.EC2State
	}
	return j.seen
}

// step is like to, for the last action of a handler.
func (j *job) step(ctx context.Context, s power.Worker, why string, more func(w *worker.Worker, tx *worker.Tx)) outcome {
	if err := j.to(ctx, s, why, more); err != nil {
		return j.failedWrite(err)
	}
	return j.again()
}

// again returns SUCCESS with an immediate next turn, because the worker has a new
// status.
func (j *job) again() outcome {
	j.c.mu.Lock()
	j.c.region(&j.w).soon() // earlier observations do not show the new status
	j.c.mu.Unlock()
	return outcome{Result: Success, Next: time.Now().Add(debounce)}
}

// fail moves the worker to FAILED and records the cause.
func (j *job) fail(ctx context.Context, action, why string) outcome {
	err := j.to(ctx, power.WorkerFailed, why, func(w *worker.Worker, tx *worker.Tx) {
		tx.Note(audit.Entry{Action: action, Detail: why})
	})
	if err != nil {
		return j.failedWrite(err)
	}
	return outcome{Result: Retry}
}

// note records why a worker makes no progress, once per cause.
func (j *job) note(ctx context.Context, why string) outcome {
	if len(why) > 300 {
		why = why[:300]
	}
	if j.w.StatusReason != why {
		if err := j.write(ctx, func(w *worker.Worker, _ *worker.Tx) error { w.StatusReason = why; return nil }); err != nil {
			return j.failedWrite(err)
		}
	}
	return outcome{Result: Retry}
}

// unobserved waits for the first observation of a worker since it entered its status.
// If its region cannot be read, it records that once.
func (j *job) unobserved(ctx context.Context) outcome {
	if u := j.unread; u != nil && !u.SaidOf(&j.w) {
		j.note(ctx, u.Sentence())
	}
	return outcome{Result: Requeue}
}

// overdue reports whether the worker has been in its status for longer than d.
func (j *job) overdue(d time.Duration) bool { return j.now.Sub(j.w.StatusSince) > d }

// cloud returns the worker's region.
func (j *job) cloud() (Cloud, error) { return j.c.cfg.Clouds(j.w.Account, j.w.AWSRegion) }

// lost handles an instance that is not in the listing. "Not found" is believed only
// after two answers at least MissingConfirm apart. A launch may take longer than that
// to become visible.
func (j *job) lost(ctx context.Context) outcome {
	if !j.gone {
		return outcome{Result: Requeue} // not listed, and not described yet
	}
	confirm := MissingConfirm
	if j.w.Status == power.WorkerProvisioning {
		confirm = 5 * time.Minute
	}
	since := j.w.MissingSince
	if since == nil {
		err := j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
			now := tx.Now
			w.MissingSince = &now
			tx.Note(audit.Entry{Action: "instance_missing", By: audit.ByCloud, Detail: w.EC2InstanceID})
			return nil
		})
		if err != nil {
			return j.failedWrite(err)
		}
		return outcome{Result: Requeue}
	}
	if left := confirm - j.seenAt.Sub(*since); left > 0 {
		return outcome{Requeue, j.now.Add(max(left-j.now.Sub(j.seenAt), j.s.ReconcileInterval/2))} // a repeated listing is no second answer
	}
	return j.endGone(ctx, "external: EC2 does not know the instance")
}

// endGone ends the worker in TERMINATED. The audit entry names the user who requested
// the termination, or an external cause.
func (j *job) endGone(ctx context.Context, why string) outcome {
	asked := j.w.DesiredStatus == power.WorkerTerminated
	err := j.writeBy(ctx, audit.ByCloud, false, func(w *worker.Worker, tx *worker.Tx) error {
		w.Status, w.EC2State, w.MissingSince, w.Intent = power.WorkerTerminated, "terminated", nil, nil
		w.DesiredStatus, w.Draining, w.CMLNotice = power.WorkerTerminated, false, nil
		w.License.Ended()
		clearAddress(w)
		if !asked {
			w.TerminateFor, w.TerminateBy, w.StatusReason = power.ReasonExternal, nil, why
		}
		e := audit.Entry{Action: "terminated", Reason: string(w.TerminateFor), Detail: why}
		if by := w.TerminateBy; by != nil {
			e.By, e.Reason, w.StatusReason = *by, string(cmp.Or(w.TerminateFor, power.ReasonManual)), "by "+by.Name
			if w.TerminateFor == power.ReasonTTL && w.TTLDeadline != nil {
				w.StatusReason = "by its ttl_deadline " + w.TTLDeadline.UTC().Format(time.RFC3339)
			}
		}
		tx.Note(e)
		return nil
	})
	if err != nil {
		return j.failedWrite(err)
	}
	j.c.count.terminated.Add(1)
	return outcome{Result: Success}
}

func clearAddress(w *worker.Worker) {
	w.PublicIP, w.PrivateIP, w.HTTPSEndpoint, w.CMLReady, w.RunningSince = "", "", "", false, nil
}

// found clears the mark that the instance was missing.
func (j *job) found(ctx context.Context) error {
	if j.w.MissingSince == nil {
		return nil
	}
	return j.write(ctx, func(w *worker.Worker, _ *worker.Tx) error { w.MissingSince = nil; return nil })
}

// drift adapts the worker to EC2's state where that differs from the record, by the
// rules of power.Observe. It returns false if nothing differs. If lull did not
// request a stop, the stop is kept if a user made it, and reversed if the cloud did.
func (j *job) drift(ctx context.Context) (outcome, bool) {
	if !j.fresh {
		return outcome{}, false
	}
	if j.seen == "" {
		return j.lost(ctx), true
	}
	if err := j.found(ctx); err != nil {
		return j.failedWrite(err), true
	}
	addressed := j.inst != nil && j.inst.PrivateIP != ""
	to := power.Observe(j.w.Status, power.Observation{State: power.EC2(j.seen), Changed: j.seen != j.w.EC2State, Addressed: addressed})
	if to == j.w.Status {
		return outcome{}, false
	}
	switch to {
	case power.WorkerStopping, power.WorkerStopped:
		return j.stoppedOutside(ctx, to), true
	case power.WorkerTerminated:
		return j.endGone(ctx, "external: EC2 terminated the instance"), true
	case power.WorkerTerminating:
		return j.step(ctx, to, "external: EC2 is terminating the instance", func(w *worker.Worker, tx *worker.Tx) {
			w.DesiredStatus, w.Intent, w.Draining = power.WorkerTerminated, nil, false
			w.TerminateFor, w.TerminateBy = power.ReasonExternal, nil
			tx.Note(audit.Entry{Action: "external_terminate", By: audit.ByCloud, Reason: string(power.ReasonExternal)})
		}), true
	case power.WorkerStarting:
		return j.startedOutside(ctx), true
	}
	return j.step(ctx, to, "EC2 reports state "+j.seen, nil), true
}

// stoppedOutside records a stop that lull did not request and moves the worker to
// status to.
func (j *job) stoppedOutside(ctx context.Context, to power.Worker) outcome {
	if j.w.DesiredStatus == power.WorkerStopped && j.w.Intent != nil {
		// The worker was being stopped anyway, and that stop is counted already.
		if to == power.WorkerStopped {
			return j.down(ctx)
		}
		return j.step(ctx, to, "", nil)
	}
	if j.inst == nil {
		return outcome{Result: Requeue} // the description shows why it stopped
	}
	late := j.w.CancelledStopAt != nil && j.now.Sub(*j.w.CancelledStopAt) < lateWindow
	cause, why := j.inst.Cause, j.inst.Reason
	out := j.stepBy(ctx, audit.ByCloud, to, func(w *worker.Worker, tx *worker.Tx) {
		w.Intent, w.Draining = nil, false
		switch {
		case late:
			w.CancelledStopAt = nil
			w.TookEffect()
			w.StatusReason = "a canceled stop took effect; starting the worker again"
			w.Repair(tx)
			tx.Note(audit.Entry{Action: "late_action", Events: []string{audit.EventLateAction}, Detail: why})
		case cause == CauseServer:
			w.StatusReason = "stopped by the cloud: " + why
			w.External(tx, "cloud")
			w.Repair(tx)
			w.Restarts++
			if w.RunningSince != nil && tx.Now.Sub(*w.RunningSince) > time.Hour {
				w.Restarts = 1
			}
			tx.Note(audit.Entry{Action: "external_pause", Events: []string{audit.EventPaused}, Reason: string(power.ReasonExternal), Detail: why})
		default:
			w.StatusReason = "stopped from outside: " + why
			w.External(tx, "external")
			tx.Note(audit.Entry{Action: "external_pause", Events: []string{audit.EventPaused}, Reason: string(power.ReasonExternal), Detail: why})
			if j.w.Status != power.WorkerUnknown || j.w.StartAskedAt == nil { // otherwise a start was requested meanwhile
				w.StoppedOutside(tx, &j.w)
			}
		}
	})
	if late && out.Result == Success {
		j.c.count.lateActions.Add(1)
	}
	return out
}

func (j *job) stepBy(ctx context.Context, by audit.Actor, s power.Worker, more func(w *worker.Worker, tx *worker.Tx)) outcome {
	err := j.writeBy(ctx, by, false, func(w *worker.Worker, tx *worker.Tx) error {
		w.Status, w.StatusReason, w.EC2State = s, "", j.state(w)
		more(w, tx)
		if s == power.WorkerStopped {
			clearAddress(w)
		}
		return nil
	})
	if err != nil {
		return j.failedWrite(err)
	}
	if s == power.WorkerStopped {
		j.c.count.stopped.Add(1)
	}
	return j.again()
}

// startedOutside records a start that lull did not request. If the start was sent by
// lull and withdrawn afterwards, the worker is stopped again.
func (j *job) startedOutside(ctx context.Context) outcome {
	if sent := j.w.StartSentAt; j.w.Status == power.WorkerStopped && j.w.StartWithdrawnAt != nil && sent != nil && j.now.Sub(*sent) < lateWindow {
		out := j.stepBy(ctx, audit.ByCloud, power.WorkerStarting, func(w *worker.Worker, tx *worker.Tx) {
			w.StopLateStart(tx)
			w.StatusReason = "a canceled start took effect; stopping the worker again"
			tx.Note(audit.Entry{Action: "late_action", Events: []string{audit.EventLateAction}, Detail: "start"})
		})
		if out.Result == Success {
			j.c.count.lateActions.Add(1)
		}
		return out
	}
	return j.stepBy(ctx, audit.ByCloud, power.WorkerStarting, func(w *worker.Worker, tx *worker.Tx) {
		// A worker that was running when it was imported, or whose state was only
		// unknown, was not started just now.
		first := j.w.Status == power.WorkerUnknown && (w.RunningSince != nil || w.Imported && w.LastPausedAt == nil)
		if w.StartOrigin == worker.OriginNone && !first {
			w.StartOrigin, w.StartBy = worker.OriginExternal, "external"
		}
		w.Intent, w.Draining = nil, false
		if w.DesiredStatus != power.WorkerTerminated {
			w.DesiredStatus = power.WorkerRunning
		}
		sent := tx.Now
		w.StartSentAt = &sent
		w.StatusReason = "started from outside"
		tx.Note(audit.Entry{Action: "external_start", Reason: string(power.ReasonExternal)})
	})
}
