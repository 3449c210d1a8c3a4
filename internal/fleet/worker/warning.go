package worker

import (
	"cmp"
	"time"

	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/warning"
)

// warns returns the warning for an outcome whose pause is due after that warning. use
// describes what is in use.
func (o *Outcome) warns(use string) *warning.Warning {
	d := &o.Decision
	x := &warning.Warning{PauseAt: d.Verdict.TargetPauseAt.UTC(), Action: d.Verdict.Action, Reason: o.Reason, Forced: o.Force}
	switch o.Reason {
	case power.ReasonSchedule:
		x.Cause = d.Policy.Name
	case power.ReasonScaleDown:
		x.Action = string(ActDrain)
	}
	if o.Force {
		x.Use = use
	}
	return x
}

// WarnOfTTL records the warning of a worker's ttl_deadline, which will be acted on at
// at. It must be called inside a Change.
func (w *Worker) WarnOfTTL(tx *Tx, at time.Time, use string) {
	now := tx.Now
	w.WarningSentAt, w.WarningFor = &now, power.ReasonTTL
	x := &warning.Warning{PauseAt: at.UTC(), Action: cmp.Or(w.TTLAction, ActionStop), Reason: power.ReasonTTL, Forced: true, Use: use, Stopped: w.Status == power.WorkerStopped,
		Cause: "ttl_deadline " + w.TTLDeadline.UTC().Format(time.RFC3339)}
	if w.Status == power.WorkerRunning {
		w.notice(tx, x)
	}
	tx.Note(audit.Entry{Action: "pause_warning", Events: []string{audit.EventPauseWarning}, Reason: string(power.ReasonTTL), Warning: x,
		Detail: "its " + x.Cause + "; " + use})
}

// Times for the warning of a ttl_deadline.
const (
	// leastTTLWarning is the minimum time from the warning to the action, whatever
	// the policy says, because users then lose their machine.
	leastTTLWarning = time.Minute
	// ttlWarningGrace is how long after the announced time the warning is still
	// valid. If a halt of hours delayed the action, users are warned again.
	ttlWarningGrace = 10 * time.Minute
)

// Ends returns the expiry of a worker: when lull acts, which action, and when users
// are warned. It applies to a worker that runs, one that is stopped and will be
// terminated, and one that failed and has an instance. The time is that of the
// ttl_deadline; it is later if the warning would be too short, or until a halt ends.
// Users are warned as early as r warns of any pause. Ends returns nil without a
// deadline, during a halt without an end, and in dry run.
func (w *Worker) Ends(now time.Time, r *policy.Resolved, h halt.Halt) *why.Expiry {
	acts := w.Status == power.WorkerRunning && w.Intent == nil || w.Status == power.WorkerStopped && w.TTLAction == "terminate" || w.failedExpires()
	halted := h.AsOf(now).On
	if w.TTLDeadline == nil || !acts || !w.Armed || r.Shadow || halted && h.Until == nil {
		return nil
	}
	x := &why.Expiry{At: *w.TTLDeadline, Action: cmp.Or(w.TTLAction, ActionStop), Deadline: *w.TTLDeadline}
	lead, from := max(time.Duration(r.WarnBefore), leastTTLWarning), now
	if halted {
		from = *h.Until
	}
	x.WarnAt = x.At.Add(-lead)
	sent := w.WarningSentAt
	x.Warned = w.WarningFor == power.ReasonTTL && sent != nil && !sent.Before(x.WarnAt) && !from.After(sent.Add(lead+ttlWarningGrace))
	switch {
	case x.Warned:
		x.WarnAt = *sent
	case from.After(x.WarnAt):
		x.WarnAt = from
	}
	if t := x.WarnAt.Add(lead); t.After(x.At) {
		x.At = t
	}
	if halted && from.After(x.At) {
		x.At = from
	}
	if halted && from.After(x.Deadline.Add(-lead)) && x.At.After(x.Deadline) {
		x.HaltedUntil = h.Until
	}
	return x
}

// failedExpires reports whether w is FAILED and its ttl_deadline leads to an action,
// because its instance may still run and cost money. If a stop or termination was
// intended and failed, it is not repeated but left to a user.
func (w *Worker) failedExpires() bool {
	if w.Status != power.WorkerFailed || w.EC2InstanceID == "" || w.DesiredStatus == power.WorkerTerminated {
		return false
	}
	return w.TTLAction == "terminate" || w.DesiredStatus == power.WorkerRunning && w.EC2State != "stopped"
}

// Overdue reports whether the ttl_deadline of w has passed.
func (w *Worker) Overdue(now time.Time) bool {
	return w.TTLDeadline != nil && !now.Before(*w.TTLDeadline)
}

// Unstartable returns why w, whose ttl_deadline has passed, cannot be started, and
// how to change that.
func (w *Worker) Unstartable() string {
	return "Nothing can start it: " + w.OverdueSince() + "; " + w.Prolong() + "."
}

func (w *Worker) OverdueSince() string {
	return "its ttl_deadline passed at " + w.TTLDeadline.UTC().Format(time.RFC3339) + ", which would end it again"
}

// Prolong returns how a user can extend the worker's expiry.
func (w *Worker) Prolong() string {
	if w.TTLFromTag {
		return "change or remove the tag ttl-deadline of its instance, or set another deadline: lull worker ttl " + w.Name + " --for 2h"
	}
	return "move the deadline: lull worker ttl " + w.Name + " --for 2h, or remove it: lull worker ttl " + w.Name + " --off"
}

// EndTTL removes the ttl_deadline and its warning.
func (w *Worker) EndTTL() {
	w.TTLDeadline, w.TTLFromTag, w.TTLAction = nil, false, ""
	w.unwarnTTL()
}

// unwarnTTL withdraws the warning of a ttl_deadline, because the deadline has
// changed.
func (w *Worker) unwarnTTL() {
	if w.WarningFor == power.ReasonTTL {
		w.WarningSentAt, w.WarningFor = nil, ""
	}
}

// Notice is a warning that CML's own pages should show.
type Notice struct {
	// ID is CML's ID of the notice; empty until CML has confirmed it.
	ID       string          `json:"id,omitempty"`
	WarnedAt time.Time       `json:"warned_at"`
	Warning  warning.Warning `json:"warning"`
}

// notice makes CML show x in place of the current notice.
func (w *Worker) notice(tx *Tx, x *warning.Warning) {
	w.CMLNotice = &Notice{WarnedAt: tx.Now, Warning: *x}
}

// Of reports whether n belongs to the current warning of w.
func (n *Notice) Of(w *Worker) bool {
	return w.WarningSentAt != nil && w.WarningSentAt.Equal(n.WarnedAt)
}
