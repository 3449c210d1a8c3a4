package fleet

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/policy"
	"lull/internal/core/power"
)

// Warning is the message to the users of a worker before it goes down, with the
// reason.
type Warning struct {
	PauseAt time.Time `json:"pause_at"`
	// Action is stop, hibernate or auto, drain, or terminate.
	Action string `json:"action"`
	Reason Reason `json:"reason"`
	// Cause is the schedule or the deadline, if that is the reason.
	Cause string `json:"cause,omitempty"`
	// Forced means that it happens whether or not the worker is in use. Use is
	// what was in use when the warning was sent.
	Forced bool   `json:"forced,omitempty"`
	Use    string `json:"use,omitempty"`
	// Stopped means that the worker is already stopped, and that its
	// termination is announced.
	Stopped bool `json:"stopped,omitempty"`
}

// warns returns the warning of an outcome whose pause is scheduled because the
// warning is due. use names what is in use.
func (o *Outcome) warns(use string) *Warning {
	d := &o.Decision
	x := &Warning{PauseAt: d.Verdict.TargetPauseAt.UTC(), Action: d.Verdict.Action, Reason: o.Reason, Forced: o.Force}
	switch o.Reason {
	case ReasonSchedule:
		x.Cause = d.Policy.Name
	case ReasonScaleDown:
		x.Action = string(ActDrain)
	}
	if o.Force {
		x.Use = use
	}
	return x
}

// WarnOfTTL writes the warning of a worker's ttl_deadline, which is acted on at
// a time. It is for the controller inside a Change.
func (w *Worker) WarnOfTTL(tx *Tx, at time.Time, use string) {
	now := tx.Now
	w.WarningSentAt, w.WarningFor = &now, ReasonTTL
	x := &Warning{PauseAt: at.UTC(), Action: cmp.Or(w.TTLAction, ActionStop), Reason: ReasonTTL, Forced: true, Use: use, Stopped: w.Status == power.WorkerStopped,
		Cause: "ttl_deadline " + w.TTLDeadline.UTC().Format(time.RFC3339)}
	if w.Status == power.WorkerRunning {
		w.notice(tx, x)
	}
	tx.Note(Entry{Action: "pause_warning", Events: []string{EventPauseWarning}, Reason: string(ReasonTTL), Warning: x,
		Detail: "its " + x.Cause + "; " + use})
}

// Times of the warning of a ttl_deadline.
const (
	// leastTTLWarning is the minimum time for which it is out, whatever the
	// policy says, because users then lose their machine.
	leastTTLWarning = time.Minute
	// ttlWarningGrace is how long after the announced time the warning is still
	// valid: users warned before a halt of hours were not warned.
	ttlWarningGrace = 10 * time.Minute
)

// Ends returns the expiry of a worker that runs, that is stopped and will be
// terminated, or that failed and has an instance: when, the action, and when its
// users are warned, which is as early as r warns of any pause. The time is its ttl_deadline, but later if the
// warning would be too short, and not before the end of a halt. It is nil
// without a deadline, in a halt without an end, and where lull does not act: in
// dry run.
func (w *Worker) Ends(now time.Time, r *policy.Resolved, h Halt) *evidence.Expiry {
	acts := w.Status == power.WorkerRunning && w.Intent == nil || w.Status == power.WorkerStopped && w.TTLAction == "terminate" || w.failedExpires()
	halted := h.at(now).On
	if w.TTLDeadline == nil || !acts || !w.Armed || r.Shadow || halted && h.Until == nil {
		return nil
	}
	x := &evidence.Expiry{At: *w.TTLDeadline, Action: cmp.Or(w.TTLAction, ActionStop), Deadline: *w.TTLDeadline}
	lead, from := max(time.Duration(r.WarnBefore), leastTTLWarning), now
	if halted {
		from = *h.Until
	}
	x.WarnAt = x.At.Add(-lead)
	sent := w.WarningSentAt
	x.Warned = w.WarningFor == ReasonTTL && sent != nil && !sent.Before(x.WarnAt) && !from.After(sent.Add(lead+ttlWarningGrace))
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

// failedExpires reports whether w is FAILED and its ttl_deadline leads to an
// action: its instance may still run and cost money. What already failed is not
// repeated: a stop or termination that was intended before is left to a user.
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

// Unstartable returns why w, whose ttl_deadline has passed, cannot be started,
// and what would have to change.
func (w *Worker) Unstartable() string {
	return "Nothing starts it: " + w.overdueSince() + "; " + w.Prolong() + "."
}

func (w *Worker) overdueSince() string {
	return "its ttl_deadline is over since " + w.TTLDeadline.UTC().Format(time.RFC3339) + ", which would end it again"
}

// Prolong describes how the worker's expiry can be extended.
func (w *Worker) Prolong() string {
	if w.TTLFromTag {
		return "change or remove the tag ttl-deadline of its instance, or give it another: lull worker ttl " + w.Name + " --for 2h"
	}
	return "move it: lull worker ttl " + w.Name + " --for 2h, or take it away: lull worker ttl " + w.Name + " --off"
}

// EndTTL removes a ttl_deadline, and its warning.
func (w *Worker) EndTTL() {
	w.TTLDeadline, w.TTLFromTag, w.TTLAction = nil, false, ""
	w.unwarnTTL()
}

// unwarnTTL withdraws the warning of a ttl_deadline that has changed.
func (w *Worker) unwarnTTL() {
	if w.WarningFor == ReasonTTL {
		w.WarningSentAt, w.WarningFor = nil, ""
	}
}

// Notice is the part of a warning that CML's own pages show.
type Notice struct {
	// ID is CML's; empty while it is unknown whether it was posted.
	ID       string    `json:"id,omitempty"`
	WarnedAt time.Time `json:"warned_at"`
	Warning  Warning   `json:"warning"`
}

// notice makes CML show x, replacing what it shows.
func (w *Worker) notice(tx *Tx, x *Warning) {
	w.CMLNotice = &Notice{WarnedAt: tx.Now, Warning: *x}
}

// Of reports whether n belongs to the warning that is out for w.
func (n *Notice) Of(w *Worker) bool {
	return w.WarningSentAt != nil && w.WarningSentAt.Equal(n.WarnedAt)
}

// Answers returns those that a link in the warning may give. No snooze delays a
// ttl_deadline: an extension moves it, and a stopped worker can only be
// extended.
func (x *Warning) Answers() []string {
	switch {
	case x.Reason == ReasonTTL && x.Stopped:
		return []string{AnswerExtend}
	case x.Reason == ReasonTTL:
		return []string{AnswerExtend, AnswerStop}
	}
	return Answers()
}

// Sentence says what will happen to who, when and why, without a full stop.
func (x *Warning) Sentence(who string, zone *time.Location) string {
	return x.sentence(who, "will be", "is", zone)
}

// Late is Sentence for when that time has passed.
func (x *Warning) Late(who string, zone *time.Location) string {
	return x.sentence(who, "was to be", "was", zone) + "; this warning was delayed"
}

func (x *Warning) sentence(who, verb, is string, zone *time.Location) string {
	done := "paused"
	switch {
	case x.Action == "terminate":
		done = "terminated"
	case x.Action == string(ActDrain):
		done = "drained and stopped"
	case x.Reason == ReasonTTL:
		done = "stopped"
	}
	s := fmt.Sprintf("%s %s %s at %s", who, verb, done, x.PauseAt.In(zone).Format("15:04 MST"))
	if x.Cause != "" {
		s += " by its " + x.Cause
	}
	if !x.Forced {
		return s + " because it " + is + " not in use"
	}
	s += ", even if it is in use"
	if x.Use != "" {
		s += ": " + strings.TrimSuffix(x.Use, ".")
	}
	return s
}
