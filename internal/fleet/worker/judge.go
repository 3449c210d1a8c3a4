package worker

import (
	"fmt"
	"slices"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
)

// Case is the complete input for judging a worker. Readings, Guards and Budget may be
// nil.
type Case struct {
	Now      time.Time
	Worker   *Worker
	Rules    *policy.Resolved
	Readings []idle.Reading
	Guards   []idle.Block
	// Budget returns the blocks by budgets of a pause for reason.
	Budget    func(reason string) []idle.Block
	ScaleDown bool
}

// Ruling is the result of judging a Case.
type Ruling struct {
	evidence.Decision
	// Reason is the reason that would be recorded for a pause.
	Reason power.Reason
	// Force means that the pause ignores the readings. Use describes what is in use
	// then.
	Force bool
	Use   string
}

// Judge asks the engine whether to pause the worker, once for its idleness and once
// by its schedule. It returns the answer that leads to the earlier pause; if both are
// possible now, the one for idleness.
//
// If a schedule has closed since the worker's last start, the schedule's grace
// replaces the timeout. A schedule that will close has that effect from then on. With
// force, readings do not prevent the pause.
func (c Case) Judge() Ruling {
	asIdle := c.Idle()
	asScheduled, ok := c.scheduled()
	switch {
	case !ok:
		return asIdle
	case nearer(asScheduled.Verdict, asIdle.Verdict):
		return asScheduled
	}
	return asIdle
}

// nearer reports whether a's pause comes before b's.
func nearer(a, b idle.Verdict) bool {
	switch {
	case b.Eligible || a.Eligible:
		return !b.Eligible
	case a.TargetPauseAt == nil || b.TargetPauseAt == nil:
		return a.TargetPauseAt != nil
	}
	return a.TargetPauseAt.Before(*b.TargetPauseAt)
}

func (c Case) Idle() Ruling {
	r := Ruling{Reason: power.ReasonIdleTimeout}
	if c.ScaleDown {
		r.Reason = power.ReasonScaleDown
	}
	guards := c.guards(r.Reason)
	if c.Worker.PauseHolder == HolderAgent {
		guards = append(guards, idle.Block{Code: "pause_holder", Sentence: "Its agent is the pause holder."})
	}
	r.Decision = c.decide(c.Rules.Idle(c.Worker.IsIdleDetectionEnabled), c.evidence(), guards)
	return r
}

// scheduled returns the answer by the schedule; false if there is no schedule that
// pauses.
func (c Case) scheduled() (Ruling, bool) {
	st := c.Rules.ScheduleState
	if st == nil {
		return Ruling{}, false
	}
	guards := c.guards(power.ReasonSchedule)
	switch {
	case st.Pauses(c.Worker.LastStart()):
	case st.NextClose != nil:
		until := *st.NextClose
		guards = append(guards, idle.Block{Code: idle.Schedule, Until: &until, Sentence: st.Describe()})
	default:
		return Ruling{}, false
	}
	r := Ruling{Reason: power.ReasonSchedule, Force: st.Force}
	p, e := c.offHours(st)
	if st.Force {
		r.Use = c.Use()
	}
	r.Decision = c.decide(p, e, guards)
	return r, true
}

// offHours returns the engine's policy and evidence for closed hours.
func (c Case) offHours(st *policy.ScheduleState) (idle.Policy, idle.Evidence) {
	return st.OffHours(c.Rules.Idle(true), c.evidence())
}

// Use describes what is in use, for the record of a pause that ignores it.
func (c Case) Use() string {
	v := c.Idle().Verdict
	for _, b := range v.Blocks {
		switch b.Code {
		case idle.RecentActivity, idle.NotIdleYet, idle.SignalActive, idle.SignalUnknown, idle.ConnectionOpen:
			return b.Sentence
		}
	}
	return "Nothing is known to be in use."
}

// evidence returns the worker's evidence, including overrides that keep it
// running.
func (c Case) evidence() idle.Evidence {
	e := EvidenceFor(c.Worker, c.Readings, nil)
	if k := c.Rules.KeptUntil; k != nil && k.After(e.SnoozedUntil) {
		e.SnoozedUntil = *k
	}
	return e
}

func (c Case) guards(r power.Reason) []idle.Block {
	out := append(slices.Clone(c.Guards), c.Rules.Guards()...)
	if c.Worker.Status == power.WorkerRunning && c.Worker.DesiredStatus != power.WorkerRunning {
		out = append(out, stopIntended(c.Worker))
	}
	if c.Budget != nil {
		out = append(out, c.Budget(string(r))...)
	}
	return out
}

// stopIntended returns the block for a running worker whose stop or termination is
// pending already.
func stopIntended(w *Worker) idle.Block {
	what := "A stop is pending."
	switch in := w.Intent; {
	case w.DesiredStatus == power.WorkerTerminated:
		what = "Its termination is pending."
	case in != nil:
		what = fmt.Sprintf("A stop is pending: %s requested it at %s (%s).", in.By, in.At.UTC().Format(time.RFC3339), in.Reason)
	}
	return idle.Block{Code: idle.StopIntended, Sentence: what}
}

func (c Case) decide(p idle.Policy, e idle.Evidence, guards []idle.Block) evidence.Decision {
	e.Guards = guards
	if slices.ContainsFunc(guards, func(b idle.Block) bool { return b.Code == idle.Shadow || b.Code == idle.Halted && b.Until == nil }) {
		p.WarnBefore = 0 // do not warn users of something that will not happen
	}
	return evidence.Decide(c.Now, p, e)
}

// FinalCheck judges a pause for the reason why again, right before it is sent. Blocks
// that apply only before a pause is intended are left out.
func (c Case) FinalCheck(why power.Reason) evidence.Decision {
	p, e := c.Rules.Idle(c.Worker.IsIdleDetectionEnabled), c.evidence()
	if st := c.Rules.ScheduleState; why == power.ReasonSchedule && st != nil {
		p, e = c.offHours(st)
	}
	p.WarnBefore = 0
	e.Running = true
	e.Guards = append(slices.Clone(c.Guards), c.Rules.Guards()...)
	return evidence.Decide(c.Now, p, e)
}

// LastStart returns when w last started running, for any reason.
func (w *Worker) LastStart() time.Time {
	t := w.CreatedAt
	for _, at := range []*time.Time{w.RunningSince, w.LastResumedAt} {
		if at != nil && at.After(t) {
			t = *at
		}
	}
	return t
}

// lastStop returns when w last went down, for any reason. If a start was withdrawn
// later, it returns that time, because the worker must have been down then.
func (w *Worker) lastStop() time.Time {
	t := w.StatusSince
	if w.LastPausedAt != nil {
		t = *w.LastPausedAt
	}
	if at := w.StartWithdrawnAt; at != nil && at.After(t) {
		t = *at
	}
	return t
}
