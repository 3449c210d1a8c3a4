package evidence

import (
	"fmt"
	"strings"
	"time"

	"lull/internal/core/idle"
)

// Account answers "why" for a worker, an instance or an agent, now or at a past
// time.
type Account struct {
	Object   string    `json:"object" doc:"Id of the worker or instance; the name of the agent's machine"`
	Name     string    `json:"name"`
	Kind     string    `json:"kind" enum:"worker,instance,agent"`
	At       time.Time `json:"at" doc:"The time the account is about"`
	State    string    `json:"state" doc:"Power state at that time; empty if unknown"`
	Question string    `json:"question"`
	Answer   string    `json:"answer"`

	// Expiry is when its TTL ends; absent without a TTL.
	Expiry  *Expiry       `json:"expiry,omitempty" doc:"When the ttl_deadline takes effect, even if it is in use; a snooze does not delay it"`
	Verdict *idle.Verdict `json:"verdict,omitempty" doc:"Absent if nothing is known"`
	Policy  *idle.Policy  `json:"policy,omitempty"`
	Signals []Signal      `json:"signals"`
	Leases  []idle.Lease  `json:"leases" doc:"Held at that time"`
	Paused  *Turn         `json:"paused,omitempty" doc:"The last pause before that time"`
	Resumed *Turn         `json:"resumed,omitempty" doc:"The last resume before that time"`
	// Change lists what would have to change for it to be paused, or to stay.
	Change  []string  `json:"change"`
	Checked *Checked  `json:"checked,omitempty" doc:"The recorded check it is based on; absent if it was evaluated just now"`
	Missing []Missing `json:"missing,omitempty" doc:"Periods around that time without records"`
}

// The kinds of objects.
const (
	KindWorker   = "worker"
	KindInstance = "instance"
	KindAgent    = "agent"
)

// Turn is a pause or resume that happened.
type Turn struct {
	At     time.Time `json:"at"`
	By     string    `json:"by"`
	Reason string    `json:"reason,omitempty"`
}

// Expiry describes when an object expires, and what happens then.
type Expiry struct {
	At     time.Time `json:"at" doc:"When it takes effect: at the deadline, or later because of a warning or a halt"`
	Action string    `json:"action" enum:"stop,terminate"`
	// Deadline is the time set by a user or a tag.
	Deadline time.Time `json:"deadline"`
	WarnAt   time.Time `json:"warn_at" doc:"When users are, or were, warned"`
	Warned   bool      `json:"warned" doc:"The warning has been sent"`
	// HaltedUntil is the end of the halt that delays it.
	HaltedUntil *time.Time `json:"halted_until,omitempty"`
}

// Sentence states what will happen, and when.
func (x *Expiry) Sentence(now time.Time) string {
	done := "stopped"
	if x.Action == "terminate" {
		done = "terminated"
	}
	deadline := x.Deadline.UTC().Format(time.RFC3339)
	if !x.At.After(now) {
		return fmt.Sprintf("It is %s now: its ttl_deadline is over since %s.", done, deadline)
	}
	s := fmt.Sprintf("It is %s at %s, in %s, by its ttl_deadline", done, x.At.UTC().Format(time.RFC3339), idle.Human(x.At.Sub(now)))
	switch {
	case x.HaltedUntil != nil && x.At.After(*x.HaltedUntil):
		s += fmt.Sprintf(" %s: a halt puts that off until %s, and its users are warned then", deadline, x.HaltedUntil.UTC().Format(time.RFC3339))
	case x.HaltedUntil != nil:
		s += fmt.Sprintf(" %s: a halt puts that off until then", deadline)
	case x.At.After(x.Deadline) && x.Warned:
		s += fmt.Sprintf(" %s: its users were warned at %s, and have until then", deadline, x.WarnAt.UTC().Format(time.RFC3339))
	case x.At.After(x.Deadline):
		s += fmt.Sprintf(" %s: its users are warned first, now, and have until then", deadline)
	}
	return s + ", used or not; no snooze holds that back."
}

// Before reports whether it expires before a pause; a nil pause has no known
// time.
func (x *Expiry) Before(pause *time.Time) bool {
	return x != nil && (pause == nil || !pause.Before(x.At))
}

// Explain fills in the account of an object from a decision as of at. It phrases
// question and answer for a running object; callers that know better replace
// them.
func Explain(a Account, d Decision) Account {
	v, p := d.Verdict, d.Policy
	a.Verdict, a.Policy, a.Change, a.Leases = &v, &p, []string{}, []idle.Lease{}
	if a.At.IsZero() {
		a.At = v.At
	}
	a.Signals = Signals(v.At, p, d.Evidence.Readings)
	for _, l := range d.Evidence.Leases {
		if l.ExpiresAt.After(v.At) {
			a.Leases = append(a.Leases, l)
		}
	}
	a.Question = "why is it running"
	var parts []string
	for _, b := range v.Blocks {
		parts = append(parts, b.Sentence)
		if !p.Detection && (b.Code == idle.NotIdleYet || b.Code == idle.RecentActivity) {
			continue // an object that never pauses for idleness has no end
		}
		a.Change = append(a.Change, a.end(b, d.Evidence.Readings))
	}
	a.Answer = strings.Join(parts, " ")
	if len(parts) == 0 {
		a.Answer = "Nothing holds it: it is about to be paused."
	}
	if t := v.TargetPauseAt; t != nil && t.After(v.At) {
		at := t.Format(time.RFC3339)
		if v.NotBefore() {
			a.Answer += fmt.Sprintf(" It is not paused before %s, when others may wait for the same budget.", at)
		} else {
			a.Answer += fmt.Sprintf(" If nothing happens it is paused at %s.", at)
		}
	}
	if t := v.TargetPauseAt; t != nil && !a.Expiry.Before(t) {
		a.Change = append(a.Change, "to stay beyond "+t.Format(time.RFC3339)+": use it, hold a lease, or: "+a.stay())
	}
	return a
}

// Past fills in the account of an object at a past time from its records.
func Past(a Account, c Recall) Account {
	a.Change, a.Signals, a.Leases = []string{}, []Signal{}, []idle.Lease{}
	a.Question = "why was it running"
	a.Checked, a.Missing = c.Checked(), c.Missing
	if c.Before != nil {
		at, state, missing := a.At, a.State, a.Missing
		d := c.Before.Decision
		d.Verdict = ahead(d.Verdict, c.Before.Next, at)
		a = Explain(a, d)
		a.At, a.State, a.Missing = at, state, missing
		a.Question = "why was it " + orRunning(a.State)
	}
	switch {
	case c.Before == nil:
		a.Answer = "No check of it is recorded at that time or before."
	case !c.Held(a.At):
		a.Verdict, a.Change = nil, []string{}
		a.Answer = fmt.Sprintf("Not known: the last recorded check was at %s, and the next was due at %s. What it said then: %s",
			c.Before.At.Format(time.RFC3339), c.Before.Next.Format(time.RFC3339), a.Answer)
	case a.At.Sub(c.Before.At) > fresh:
		a.Answer = fmt.Sprintf("As of the check at %s: %s", c.Before.At.Format(time.RFC3339), a.Answer)
	}
	return a
}

// fresh is the maximum age of a check for its verdict to be reported as that
// of the requested time.
const fresh = 5 * time.Second

// ahead returns a recorded verdict with the next check as planned, without
// future times that have passed by the requested time.
func ahead(v idle.Verdict, next, at time.Time) idle.Verdict {
	if !next.IsZero() {
		v.NextIdleCheckAt = next
	}
	if !v.NextIdleCheckAt.After(at) {
		v.NextIdleCheckAt = time.Time{}
	}
	if t := v.TargetPauseAt; t != nil && !t.After(at) {
		v.TargetPauseAt, v.WarnAt = nil, nil
	}
	return v
}

func orRunning(state string) string {
	if state == "" {
		return "running"
	}
	return state
}

func (a *Account) stay() string {
	switch a.Kind {
	case KindWorker:
		return "lull worker snooze " + a.Name
	case KindAgent:
		return "lull agent snooze"
	}
	return "lull snooze " + a.Name
}

// agentEnds maps the guards that only agents have to what ends them.
var agentEnds = map[idle.Code]string{
	"no_policy":         "an idle-timeout would have to be set, by a tag of the machine or in /etc/lull/agent.yaml",
	"pause_holder":      "the agent would have to decide about the machine: pause-holder agent",
	"config_unreadable": "its configuration would have to be readable: lull agent reload says what is wrong",
	"policy_untold":     "its agent would have to be of this version",
}

// readable says how to make an unknown signal of a worker readable, by the
// reason with which its reading begins. Those with a %s get the worker's name.
var readable = []struct{ signal, begins, advice string }{
	{"cml", "not_opted_in", "switch telemetry on in CML: its opt-in is off, so CML may collect no events"},
	{"cml", "opt_in_unreadable", "CML must say whether telemetry is switched on: lull's CML user needs the right to read it"},
	{"cml", "unauthorized", "lull needs a user that CML accepts: cml_username and cml_password of the worker, or CML_DEFAULT_USERNAME and CML_DEFAULT_PASSWORD"},
	{"cml", "clock_offset_unknown", "CML's answers must have a Date header, so that its clock can be compared"},
	{"cml", "activity detection is switched off", "switch activity detection on: WORKER_ACTIVITY_DETECTION_ENABLED=true"},
	{"cml", "unreachable", "CML must answer at the worker's address, with a certificate that lull trusts"},
	{"", "it was not read yet", "wait for the next check, or: lull worker detect-idle %s"},
}

// read returns what makes an unknown signal readable.
func (a *Account) read(signal string, readings []idle.Reading) string {
	for _, r := range readings {
		if r.Signal != signal || a.Kind != KindWorker {
			continue
		}
		for _, x := range readable {
			if (x.signal == "" || x.signal == signal) && strings.HasPrefix(r.Detail, x.begins) {
				return strings.ReplaceAll(x.advice, "%s", a.Name)
			}
		}
	}
	return signal + " must be readable"
}

// statusEnds are the ends of status_not_running for a worker, by its status.
var statusEnds = map[string]string{
	"DRAINING": "cancel the drain: lull worker cancel-drain %s",
	"FAILED":   "try it again: lull worker retry %s",
	"STOPPED":  "start it: lull worker start %s",
}

// end returns what would have to happen for a block to end.
func (a *Account) end(b idle.Block, readings []idle.Reading) string {
	if b.Until != nil {
		return fmt.Sprintf("%s ends at %s", b.Code, b.Until.Format(time.RFC3339))
	}
	switch b.Code {
	case idle.ConnectionOpen:
		return "the open connections would have to close, or --quiet-connection-after be set"
	case idle.SignalActive:
		return b.Signal + " would have to read quiet"
	case idle.SignalIncomplete:
		return b.Signal + " would have to measure a complete quiet window"
	case "nothing_wakes":
		return "a port would have to be exposed, or --pause-after set for it: then only lull resume wakes it"
	case idle.SignalUnknown:
		return a.read(b.Signal, readings)
	case idle.StopIntended:
		return "take the stop back: lull worker start " + a.Name
	case idle.StatusNotRunning:
		if end := statusEnds[a.State]; a.Kind == KindWorker && end != "" {
			return strings.ReplaceAll(end, "%s", a.Name)
		}
	case idle.MinWorkers:
		return "more workers must run than MIN_WORKERS"
	case idle.Shadow:
		return "arm it: lull worker arm " + a.Name
	case idle.AutoPauseDisabled:
		if a.Kind == KindInstance {
			return "lull halt --off"
		}
		return "automatic pausing would have to be switched on"
	case idle.DetectionDisabled:
		if a.Kind == KindInstance {
			return "--pause-after would have to be above 0"
		}
		return "idle detection would have to be switched on for it"
	case idle.Halted:
		return "the halt would have to end"
	}
	if sentence := agentEnds[b.Code]; a.Kind == KindAgent && sentence != "" {
		return sentence
	}
	return string(b.Code) + " would have to end"
}
