package worker

import (
	"fmt"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/warning"
)

// Snooze protects w from automatic pauses until then, and withdraws a warning.
func (w *Worker) Snooze(tx *Tx, until time.Time) {
	t := until.UTC().Round(0)
	w.SnoozedUntil, w.SnoozedBy = &t, tx.By.Name
	w.TargetPauseAt, w.WarningSentAt, w.WarningFor = nil, nil, ""
	tx.Note(audit.Entry{Action: "snoozed", Detail: "until " + t.Format(time.RFC3339)})
}

// Awaits reports whether the warning that a answers is still in effect for w.
func (w *Worker) Awaits(a warning.Answer) bool {
	return w.WarningSentAt != nil && w.WarningSentAt.Sub(a.WarnedAt).Abs() < time.Millisecond && w.Intent == nil &&
		(w.Status == power.WorkerRunning || w.Status == power.WorkerStopped && w.WarningFor == power.ReasonTTL)
}

// ExtendTTL moves the ttl_deadline and withdraws its warning. A deadline that came
// from a tag no longer follows the tag.
func (w *Worker) ExtendTTL(tx *Tx, until time.Time) {
	t := until.UTC().Round(0)
	w.TTLDeadline, w.TTLFromTag = &t, false
	w.WarningSentAt, w.WarningFor = nil, ""
	tx.Note(audit.Entry{Action: "ttl_extended", Detail: "until " + t.Format(time.RFC3339)})
}

// Pause is a request to pause or drain a worker.
type Pause struct {
	Reason power.Reason // empty means manual
	Drain  bool
	// Decision is the decision behind an automatic pause, for the audit log.
	Decision *evidence.Decision
	Detail   string
	Policy   string // the policy that applied, as policy.Resolved names it; empty if unknown
	Force    bool   // readings do not cancel it
}

// IntendStop records the intent to stop w. Every pause is counted here, once; only
// those made by the cloud are counted elsewhere.
func (w *Worker) IntendStop(tx *Tx, p Pause) error {
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
			return refuse("already_intended", fmt.Sprintf("a stop is already pending, for %s", w.PauseReason))
		case w.Intent == nil || !w.Intent.Reason.Automatic() && (p.Drain || !w.Intent.Drain):
			return nil // already done, or already requested by a user
		case p.Drain && w.Status != power.WorkerRunning:
			return refuse("status", fmt.Sprintf("it is %s", w.Status))
		}
	}
	if starts && p.Reason.Automatic() {
		return refuse("status", fmt.Sprintf("it is %s and a start is pending", w.Status)) // only a user may withdraw a start
	}
	if w.startWaits() {
		if w.Status == power.WorkerStopped || w.Intent != nil && !w.Intent.Reason.Automatic() {
			// The pause was counted when it was intended. Only the start that waits
			// for it is withdrawn.
			w.DesiredStatus, w.StatusReason = power.WorkerStopped, ""
			w.WithdrawStart(tx)
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
	w.Intent = &Intent{Reason: p.Reason, By: tx.By.Name, At: tx.Now, Generation: w.PauseGeneration, Drain: p.Drain, Force: p.Force, SentAt: sent, Before: before}
	w.paused(tx, p.Reason, tx.By.Name)
	w.PausePolicy = p.Policy
	if d := p.Decision; d != nil && !d.Verdict.Has(idle.SignalUnknown) {
		w.Checked(d.Verdict.At)
	}
	action := "pause_intended"
	e := audit.Entry{Events: []string{audit.EventPaused}, Reason: string(p.Reason), Decision: p.Decision, Detail: p.Detail, Policy: p.Policy, Generation: w.PauseGeneration}
	if p.Drain {
		action = audit.DrainStarted
		w.Draining = true
		w.Status, w.StatusReason = power.WorkerDraining, "drain by "+tx.By.Name
	}
	e.Action = action
	tx.Note(e)
	if starts {
		w.StatusReason = ""
		w.WithdrawStart(tx)
	}
	w.clearStart()
	return nil
}

// startWaits reports whether a requested start waits for a stop or for its turn.
func (w *Worker) startWaits() bool {
	return w.DesiredStatus == power.WorkerRunning && (w.Status == power.WorkerStopping || w.Status == power.WorkerStopped)
}

// startPending reports whether a start is in progress or waiting.
func (w *Worker) startPending() bool {
	return w.startWaits() || w.DesiredStatus == power.WorkerRunning && w.Status == power.WorkerStarting
}

// WithdrawStart withdraws a start that is not confirmed. The start counts as no
// resume and begins no snooze. If it was sent, it may still take effect, so
// StartSentAt is kept until EC2 has shown the outcome.
func (w *Worker) WithdrawStart(tx *Tx) {
	now, detail := tx.Now, "the start of a new worker"
	if w.StartBy != "" {
		detail = "the start requested by " + w.StartBy
	}
	if at := w.StartAskedAt; at != nil {
		detail += " at " + at.Format(time.RFC3339)
	}
	tx.Note(audit.Entry{Action: audit.StartWithdrawn, Events: []string{audit.EventStartWithdrawn}, Reason: string(w.StartOrigin), Detail: detail})
	w.StartWithdrawnAt, w.StartWithdrawnBy = &now, tx.By.Name
	if w.StartOrigin == OriginExternal || w.EC2State == string(power.EC2Pending) || w.EC2State == string(power.EC2Running) {
		w.StartSentAt = nil // EC2 has shown its outcome
	}
	w.clearStart()
}

// clearStart clears who requested a start, and why.
func (w *Worker) clearStart() {
	w.StartOrigin, w.StartBy, w.StartReason, w.StartAskedAt = OriginNone, "", "", nil
}

func (w *Worker) stopSent() *time.Time {
	if w.Intent == nil {
		return nil
	}
	return w.Intent.SentAt
}

// paused records a pause, by anyone, as the last one.
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

// startReason returns the reason for a start by an actor, as used by budgets.
func startReason(by audit.Actor) string {
	switch by.Kind {
	case audit.KindUser:
		return policy.ByUser
	case audit.KindWake:
		return policy.ForWake
	case audit.KindSchedule:
		return policy.ForSchedule
	}
	return policy.ForRepair
}

func (w *Worker) IntendStart(tx *Tx, o Origin) error {
	refuse := func(detail string) error {
		return &failure.Refused{Command: "resume", Name: w.Name, Reason: "status", Detail: detail}
	}
	want := func() {
		now := tx.Now
		if w.DesiredStatus != power.WorkerRunning || w.StartAskedAt == nil {
			w.StartAskedAt = &now
		}
		w.DesiredStatus = power.WorkerRunning
		w.StartOrigin, w.StartBy, w.StartReason = o, tx.By.Name, startReason(tx.By)
		w.StartWithdrawnAt, w.StartWithdrawnBy = nil, ""
	}
	// A pending start stays as it is, unless the new requester has priority over the
	// earlier one.
	asked := w.DesiredStatus == power.WorkerRunning && (w.StartOrigin != OriginAuto || urgency(startReason(tx.By)) <= urgency(w.StartReason))
	switch w.Status {
	case power.WorkerTerminating, power.WorkerTerminated:
		return refuse(fmt.Sprintf("it is %s", w.Status))
	case power.WorkerDraining:
		return w.CancelStop(tx, audit.DrainCancelled, "resumed by "+tx.By.Name)
	case power.WorkerRunning:
		if w.Intent == nil {
			return nil
		}
		return w.CancelStop(tx, "pause_cancelled", "resumed by "+tx.By.Name)
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
			w.unpause(tx.Now, "resumed by "+tx.By.Name)
			w.Intent = nil
			tx.Note(audit.Entry{Action: "pause_cancelled", Events: []string{audit.EventPauseCancelled}, Detail: "resumed by " + tx.By.Name})
		}
	}
	tx.Note(audit.Entry{Action: "resume_intended", Reason: string(o)})
	return nil
}

// urgency orders the reasons for starts; starts that a user waits for are highest.
func urgency(reason string) int {
	switch reason {
	case policy.ByUser:
		return 2
	case policy.ForWake:
		return 1
	}
	return 0
}

// CancelStop withdraws a stop and returns w to RUNNING. The pause stays counted, but
// is no longer the last one. It must be called inside a Change.
func (w *Worker) CancelStop(tx *Tx, action, why string) error {
	w.unpause(tx.Now, why)
	if w.Intent != nil && w.Intent.SentAt != nil {
		w.CancelledStopAt = w.Intent.SentAt
	}
	if w.Intent != nil && w.Intent.By == ByAgent.Name {
		w.AgentCalledOff = w.Intent.AgentGeneration
	}
	w.DesiredStatus, w.Intent, w.Draining = power.WorkerRunning, nil, false
	w.clearStart() // w never went down, so nothing is resumed
	if w.Status != power.WorkerRunning {
		w.Status, w.StatusReason = power.WorkerRunning, ""
	}
	tx.Note(audit.Entry{Action: action, Events: []string{audit.EventPauseCancelled}, Detail: why})
	return nil
}

// SeatOutOfReach reports whether w holds a CML license seat that cannot be released
// because its machine is not running.
func (w *Worker) SeatOutOfReach() bool {
	down := w.EC2State == string(power.EC2Stopped) || w.EC2State == string(power.EC2Stopping)
	return down && w.EC2InstanceID != "" && w.License.MayHoldSeat()
}

func (w *Worker) IntendEnd(tx *Tx, action, why string) error {
	to, err := w.Status.After(power.VerbTerminate)
	if err != nil {
		return &failure.Refused{Command: "terminate", Name: w.Name, Reason: "status", Detail: err.Error()[len("cannot "):]}
	}
	starts := w.startPending()
	w.DesiredStatus, w.Intent, w.Draining = power.WorkerTerminated, nil, false
	w.Status, w.StatusReason, w.MissingSince, w.TerminateBy = to, why, nil, &tx.By
	tx.Note(audit.Entry{Action: action, Reason: string(w.TerminateFor), Detail: why})
	if starts {
		w.WithdrawStart(tx)
	}
	return nil
}

// External records a pause that was made by the cloud or in it, outside lull.
func (w *Worker) External(tx *Tx, by string) { w.paused(tx, power.ReasonExternal, by) }

// Resumed records that RUNNING is confirmed, and counts a requested start. It begins
// the snooze, even after a first launch, but not for an imported worker that was
// already running.
func (w *Worker) Resumed(tx *Tx) {
	now := tx.Now
	if found := w.Imported && w.LastPausedAt == nil; w.RunningSince == nil && !found {
		w.LastResumedAt, w.LastResumedBy = &now, tx.By.Name
	}
	w.Status, w.StatusReason, w.RunningSince = power.WorkerRunning, "", &now
	w.Intent, w.Draining, w.MissingSince, w.StartSentAt = nil, false, nil, nil
	w.TargetPauseAt, w.WarningSentAt, w.WarningFor, w.CancelledStopAt, w.StopCalledOff = nil, nil, "", nil, nil
	if w.License.OperationInProgress != nil {
		w.License.OperationInProgress = &now // restart CML's time limit
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

// Repair requests a start after a stop without a request.
func (w *Worker) Repair(tx *Tx) {
	now := tx.Now
	w.StartOrigin, w.StartBy, w.StartReason, w.StartAskedAt = OriginAuto, tx.By.Name, policy.ForRepair, &now
	w.StartSentAt, w.StartWithdrawnAt, w.StartWithdrawnBy = nil, nil, ""
}

// StoppedOutside withdraws the start that was in progress or waiting in before, if
// any, because the machine was stopped outside lull meanwhile.
func (w *Worker) StoppedOutside(tx *Tx, before *Worker) {
	w.DesiredStatus = power.WorkerStopped
	if before.startPending() {
		w.WithdrawStart(tx)
	}
	w.clearStart()
	w.StartSentAt = nil
}

// StopLateStart makes a start that took effect after it was withdrawn end in a stop
// by the user who withdrew it. That stop is already counted.
func (w *Worker) StopLateStart(tx *Tx) {
	w.DesiredStatus, w.StartSentAt = power.WorkerStopped, nil
	w.Intent = &Intent{Reason: power.ReasonManual, By: w.StartWithdrawnBy, At: tx.Now, Generation: w.PauseGeneration}
	w.clearStart()
}

// CallOff is CancelStop for an automatic stop. d is the decision that canceled it,
// for the audit log.
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

// ForSchedule reports whether a start requested by a schedule is pending.
func (w *Worker) ForSchedule() bool {
	return w.startWaits() && w.StartReason == policy.ForSchedule && strings.HasPrefix(w.StartBy, BySchedule)
}

// BySchedule is the prefix of the actor name of a schedule.
const BySchedule = "schedule "

// WantsStart reports whether a schedule wants a stopped worker started now.
func (w *Worker) WantsStart(now time.Time, r *policy.Resolved) bool {
	return w.Status == power.WorkerStopped && w.DesiredStatus == power.WorkerStopped && w.Intent == nil &&
		r.ScheduleState != nil && r.ScheduleState.Starts(w.lastStop()) && !w.Overdue(now)
}
