// Package why composes the answers to "why is it running" and "why was it
// stopped", for workers, instances and agents, now and at a past time. Callers
// add facts and remedies; the sentences are here, in one table.
package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/evidence"
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
	Answer   string    `json:"answer" doc:"The sentences of the facts"`
	Facts    []Fact    `json:"facts" doc:"What the answer says, sentence by sentence"`

	// Expiry describes when the object's TTL expires; absent without a TTL.
	Expiry  *Expiry           `json:"expiry,omitempty" doc:"When the ttl_deadline takes effect, even if it is in use; a snooze does not delay it"`
	Verdict *idle.Verdict     `json:"verdict,omitempty" doc:"Absent if nothing is known"`
	Policy  *idle.Policy      `json:"policy,omitempty"`
	Signals []evidence.Signal `json:"signals"`
	Leases  []idle.Lease      `json:"leases" doc:"Held at that time"`
	Paused  *evidence.Turn    `json:"paused,omitempty" doc:"The last pause before that time"`
	Resumed *evidence.Turn    `json:"resumed,omitempty" doc:"The last resume before that time"`
	// Change lists the changes after which the object would be paused, or would
	// keep running.
	Change   []string           `json:"change" doc:"The sentences of the remedies"`
	Remedies []Fact             `json:"remedies" doc:"What would change that"`
	Checked  *evidence.Checked  `json:"checked,omitempty" doc:"The recorded check it is based on; absent if it was evaluated just now"`
	Missing  []evidence.Missing `json:"missing,omitempty" doc:"Periods around that time without records"`

	Prolong string `json:"-"` // how to postpone its expiry, for the remedy; empty for none
}

// The kinds of objects.
const (
	KindWorker   = "worker"
	KindInstance = "instance"
	KindAgent    = "agent"
)

// Fact is a reason for the state of an object, or a way to change it.
type Fact struct {
	Code     idle.Code  `json:"code"`
	Sentence string     `json:"sentence"`
	At       *time.Time `json:"at,omitempty" doc:"When it happened, or will"`
	By       string     `json:"by,omitempty" doc:"Who caused it"`
}

// fact returns a fact of kind k with its sentence. A zero at omits the time.
func (k Kind) fact(at time.Time, by string, details ...any) Fact {
	f := Fact{Code: k.Code, By: by}
	text := k.text
	if at.IsZero() {
		text = strings.NewReplacer(" at {at}", "", " since {at}", "").Replace(text)
	} else {
		f.At = &at
	}
	if by == "" && strings.HasPrefix(text, "{by}") {
		by = "An unknown user"
	}
	escaped := strings.ReplaceAll(cmp.Or(by, "an unknown user"), "%", "%%")
	f.Sentence = fmt.Sprintf(strings.NewReplacer("{at}", at.UTC().Format(time.RFC3339), "{by}", escaped).Replace(text), details...)
	return f
}

// Ask makes a the account of another question and clears its answer.
func (a *Account) Ask(question string) *Account {
	a.Question, a.Answer, a.Facts = question, "", []Fact{}
	return a
}

// Add appends a fact to the answer. at may be zero and by may be empty.
func (a *Account) Add(k Kind, at time.Time, by string, details ...any) *Account {
	return a.add(k.fact(at, by, details...))
}

// Note appends a fact with one detail to the answer, unless the detail is empty.
func (a *Account) Note(k Kind, detail string) *Account {
	if detail != "" {
		a.Add(k, time.Time{}, "", detail)
	}
	return a
}

// Fact returns the first fact or remedy with a code; nil for none.
func (a *Account) Fact(code idle.Code) *Fact {
	for _, l := range [][]Fact{a.Facts, a.Remedies} {
		if n := slices.IndexFunc(l, func(f Fact) bool { return f.Code == code }); n >= 0 {
			return &l[n]
		}
	}
	return nil
}

// Block appends a block to the answer.
func (a *Account) Block(b idle.Block) { a.add(Fact{Code: b.Code, Sentence: b.Sentence}) }

func (a *Account) add(f Fact) *Account {
	a.Facts = append(a.Facts, f)
	a.Answer = strings.TrimSpace(a.Answer + " " + f.Sentence)
	return a
}

// Advise appends a remedy.
func (a *Account) Advise(k Kind, details ...any) { a.advise(k.fact(time.Time{}, "", details...)) }

func (a *Account) advise(f Fact) {
	a.Remedies, a.Change = append(a.Remedies, f), append(a.Change, f.Sentence)
}

// NoRemedy removes every remedy.
func (a *Account) NoRemedy() { a.Remedies, a.Change = []Fact{}, []string{} }

// Because returns reason after a colon, to be appended to a sentence; "" if
// reason is empty.
func Because(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + reason
}

// Expiry describes when an object expires, and what happens then.
type Expiry struct {
	At     time.Time `json:"at" doc:"When it takes effect: at the deadline, or later because of a warning or a halt"`
	Action string    `json:"action" enum:"stop,terminate"`
	// Deadline is the time that a user or a tag set.
	Deadline time.Time `json:"deadline"`
	WarnAt   time.Time `json:"warn_at" doc:"When users are, or were, warned"`
	Warned   bool      `json:"warned" doc:"The warning has been sent"`
	// HaltedUntil is the end of a halt that delays the expiry.
	HaltedUntil *time.Time `json:"halted_until,omitempty"`
}

// Sentence states what will happen, and when.
func (x *Expiry) Sentence(now time.Time) string {
	done := cmp.Or(participles[x.Action], "stopped")
	deadline := x.Deadline.UTC().Format(time.RFC3339)
	if !x.At.After(now) {
		return fmt.Sprintf("It is %s now: its ttl_deadline passed at %s.", done, deadline)
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
	return s + ", even if it is in use; no snooze prevents that."
}

// Before reports whether the object expires before its pause. A nil pause means
// that its time is unknown.
func (x *Expiry) Before(pause *time.Time) bool {
	return x != nil && (pause == nil || !pause.Before(x.At))
}

// Explain fills in the account of an object from a decision as of a.At. Question
// and answer are those for a running object; callers that know better ask another
// question.
func Explain(a Account, d evidence.Decision) Account {
	v, p := d.Verdict, d.Policy
	a.Verdict, a.Policy, a.Leases = &v, &p, []idle.Lease{}
	a.NoRemedy()
	if a.At.IsZero() {
		a.At = v.At
	}
	a.Signals = evidence.Signals(v.At, p, d.Evidence.Readings)
	for _, l := range d.Evidence.Leases {
		if l.ExpiresAt.After(v.At) {
			a.Leases = append(a.Leases, l)
		}
	}
	if a.Expiry != nil && a.Prolong != "" {
		a.Advise(Prolong, a.Prolong)
	}
	for _, b := range v.Blocks {
		if p.Detection || b.Code != idle.NotIdleYet && b.Code != idle.RecentActivity { // without detection, waiting longer does not lead to a pause
			a.advise(a.end(b, d.Evidence.Readings))
		}
	}
	if t := v.TargetPauseAt; t != nil && !a.Expiry.Before(t) {
		a.advise(Stay.fact(*t, "", a.stay()))
	}
	return a.Running(v, a.At)
}

// participles are the past participles of the actions.
var participles = map[string]string{"stop": "stopped", "hibernate": "hibernated", "drain": "drained", "terminate": "terminated"}

// Running answers why an object is running at now. An instance's account lists
// every block of the verdict, a worker's only the strongest. The earlier of
// expiry and pause is added.
func (a Account) Running(v idle.Verdict, now time.Time) Account {
	a.Ask("why is it running")
	target := v.TargetPauseAt
	first := a.Expiry != nil && len(v.Blocks) > 0 && a.Expiry.Before(target)
	if first {
		a.Add(Expires, a.Expiry.At, "", a.Expiry.Sentence(now))
		target = nil // the object expires before that pause
	}
	blocks := v.Blocks
	if a.Kind == KindWorker && len(blocks) > 0 {
		blocks = []idle.Block{Strongest(blocks)}
	}
	for _, b := range blocks {
		a.Block(b)
	}
	switch {
	case len(blocks) == 0:
		a.Add(AboutTo, time.Time{}, "", idle.HumanMinutes(v.IdleMinutes), cmp.Or(participles[v.Action], "paused"))
	case target != nil && target.After(now) && v.NotBefore():
		a.Add(NotBefore, *target, "", idle.Human(target.Sub(now)))
	case target != nil && target.After(now):
		a.Add(Pauses, *target, "", idle.Human(target.Sub(now)))
	}
	if a.Kind != KindInstance && target == nil && !v.NextIdleCheckAt.IsZero() {
		a.Add(NextCheck, v.NextIdleCheckAt, "")
	}
	if a.Expiry != nil && !first {
		a.Add(Expires, a.Expiry.At, "", a.Expiry.Sentence(now))
	}
	return a
}

// Past fills in the account of an object at a past time from its records around
// that time.
func Past(a Account, c evidence.Recall) Account {
	a.Signals, a.Leases = []evidence.Signal{}, []idle.Lease{}
	a.NoRemedy()
	a.Checked, a.Missing = c.Checked(), c.Missing
	if c.Before == nil {
		return *a.Ask("why was it running").Add(Unrecorded, time.Time{}, "")
	}
	at, state, missing := a.At, a.State, a.Missing
	d := c.Before.Decision
	d.Verdict = ahead(d.Verdict, c.Before.Next, at)
	a = Explain(a, d)
	a.At, a.State, a.Missing = at, state, missing
	a.Question = "why was it " + cmp.Or(a.State, "running")
	switch was := a.Answer; {
	case !c.Held(a.At):
		a.Verdict = nil
		a.NoRemedy()
		a.Ask(a.Question).Add(StaleCheck, c.Before.At, "", c.Before.Next.Format(time.RFC3339), was)
	case a.At.Sub(c.Before.At) > fresh:
		a.Ask(a.Question).Add(EarlierCheck, c.Before.At, "", was)
	}
	return a
}

// Down explains why an object was not running at the time of the account, by the
// transition that led there. turn is nil if that is unknown.
func (a *Account) Down(turn *evidence.Turn) {
	a.NoRemedy()
	a.Ask("why was it "+a.State).Add(WasInState, a.At, "", a.State)
	if turn != nil {
		a.Add(Stopped, turn.At, turn.By, turn.Reason)
	}
}

// Strongest returns the block that would keep a worker running if all others
// ended. Blocks rank in this order: something is switched off, something is
// unknown, no known end, the latest end. If use alone keeps the worker running,
// budget blocks are ignored, because they say nothing about use. blocks must not be
// empty.
func Strongest(blocks []idle.Block) idle.Block {
	if (idle.Verdict{Blocks: blocks}).Used() {
		blocks = slices.DeleteFunc(slices.Clone(blocks), func(b idle.Block) bool { return b.Code == idle.Budget })
	}
	return slices.MinFunc(blocks, func(a, b idle.Block) int {
		if c := cmp.Compare(weakness(a), weakness(b)); c != 0 || a.Until == nil || b.Until == nil {
			return c
		}
		return b.Until.Compare(*a.Until)
	})
}

func weakness(b idle.Block) int {
	switch {
	case b.Code == idle.Halted:
		return 0
	case b.Code == idle.ClockInFuture || b.Code == idle.SignalUnknown:
		return 1
	case b.Until == nil:
		return 2
	}
	return 3
}

// fresh is the maximum age of a check for its verdict to count as that of the
// requested time.
const fresh = 5 * time.Second

// ahead returns a recorded verdict with the next check as planned, and without
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

func (a *Account) stay() string {
	switch a.Kind {
	case KindWorker:
		return "lull worker snooze " + a.Name
	case KindAgent:
		return "lull agent snooze"
	}
	return "lull snooze " + a.Name
}

// agentEnds maps the guards of an agent to the event that ends each.
var agentEnds = map[idle.Code]string{
	"no_policy":         "an idle-timeout would have to be set, by a tag of the machine or in /etc/lull/agent.yaml",
	"pause_holder":      "the agent would have to be in charge of the machine: pause-holder agent",
	"config_unreadable": "its configuration would have to be readable: lull agent reload says what is wrong",
	"policy_untold":     "its agent would have to be of this version",
}

// readable lists advice on how to make an unknown signal of a worker readable, by
// the beginning of the reason in its reading. A %s in the advice stands for the
// worker's name.
var readable = []struct{ signal, begins, advice string }{
	{"cml", "not_opted_in", "switch telemetry on in CML: its opt-in is off, so CML may collect no events"},
	{"cml", "opt_in_unreadable", "lull's CML user needs the right to read whether CML's telemetry is switched on"},
	{"cml", "unauthorized", "lull needs a user that CML accepts: cml_username and cml_password of the worker, or CML_DEFAULT_USERNAME and CML_DEFAULT_PASSWORD"},
	{"cml", "clock_offset_unknown", "CML's answers must have a Date header, so that its clock can be compared"},
	{"cml", "activity detection is switched off", "switch activity detection on: WORKER_ACTIVITY_DETECTION_ENABLED=true"},
	{"cml", "unreachable", "CML must answer at the worker's address, with a certificate that lull trusts"},
	{"", "it was not read yet", "wait for the next check, or: lull worker detect-idle %s"},
}

// read returns advice on how to make an unknown signal readable.
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

// statusEnds maps a worker's status to the event that ends the block
// status_not_running.
var statusEnds = map[string]string{
	"DRAINING": "cancel the drain: lull worker cancel-drain %s",
	"FAILED":   "try it again: lull worker retry %s",
	"STOPPED":  "start it: lull worker start %s",
}

// end returns the event that would end a block.
func (a *Account) end(b idle.Block, readings []idle.Reading) Fact {
	if b.Until != nil {
		f := Ends.fact(*b.Until, "", b.Code)
		f.Code = b.Code
		return f
	}
	return Fact{Code: b.Code, Sentence: a.ends(b, readings)}
}

// ends returns how to end a block whose end is not known.
func (a *Account) ends(b idle.Block, readings []idle.Reading) string {
	switch b.Code {
	case idle.ConnectionOpen:
		return "the open connections would have to close, or --quiet-connection-after be set"
	case idle.SignalActive:
		return b.Signal + " would have to read quiet"
	case idle.SignalIncomplete:
		return b.Signal + " would have to measure a complete quiet window"
	case "nothing_wakes":
		return "a port would have to be exposed, or --pause-after set for it: then only lull resume wakes it"
	case "needed_by":
		return b.Holder + " would have to sleep first: lull pause " + b.Holder
	case "group_in_use":
		return b.Holder + " would have to be idle too"
	case idle.SignalUnknown:
		return a.read(b.Signal, readings)
	case idle.StopIntended:
		return "cancel the stop: lull worker start " + a.Name
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
