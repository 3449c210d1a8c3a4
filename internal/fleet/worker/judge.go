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

// Case is the complete input for judging a worker. Readings, Guards and Budget
// may be nil.
type Case struct {
	Now      time.Time
	Worker   *Worker
	Rules    *policy.Resolved
	Readings []idle.Reading
	Guards   []idle.Block
	// Budget returns the blocks of budgets for a pause with a reason.
	Budget    func(reason string) []idle.Block
	ScaleDown bool
}

// Ruling is the result of judging a Case.
type Ruling struct {
	evidence.Decision
	// Reason is the reason with which a pause would be recorded.
	Reason power.Reason
	// Force ignores the readings. Use contains what they show.
	Force bool
	Use   string
}

// Judge asks the engine whether the worker is to be paused, for its idleness or
// by its schedule, and returns the answer that comes first: among those
// possible now the one for idleness, otherwise the one whose pause is nearer.
//
// A schedule that has closed since the worker was last started shortens the
// timeout to its grace. One that will close does so from then on. With force,
// no reading keeps the worker up.
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

// scheduled returns the answer by the schedule; false without a schedule that
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

// offHours returns the engine's policy and evidence in closed hours.
func (c Case) offHours(st *policy.ScheduleState) (idle.Policy, idle.Evidence) {
	return st.OffHours(c.Rules.Idle(true), c.evidence())
}

// Use describes what is in use, for the record of a pause that does not wait.
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

// stopIntended returns the block of a running worker that is to be stopped or
// terminated: it is not paused a second time.
func stopIntended(w *Worker) idle.Block {
	what := "A stop of it is pending."
	switch in := w.Intent; {
	case w.DesiredStatus == power.WorkerTerminated:
		what = "Its termination is pending."
	case in != nil:
		what = fmt.Sprintf("A stop of it is pending: %s asked for it at %s (%s).", in.By, in.At.UTC().Format(time.RFC3339), in.Reason)
	}
	return idle.Block{Code: idle.StopIntended, Sentence: what}
}

func (c Case) decide(p idle.Policy, e idle.Evidence, guards []idle.Block) evidence.Decision {
	e.Guards = guards
	if slices.ContainsFunc(guards, func(b idle.Block) bool { return b.Code == idle.Shadow || b.Code == idle.Halted && b.Until == nil }) {
		p.WarnBefore = 0 // users are not warned of something that will not happen
	}
	return evidence.Decide(c.Now, p, e)
}

// FinalCheck judges again, right before the call, a pause that was intended for a
// reason. Blocks that apply only before a pause is intended are left out.
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

// LastStart returns when w last became running, for any reason.
func (w *Worker) LastStart() time.Time {
	t := w.CreatedAt
	for _, at := range []*time.Time{w.RunningSince, w.LastResumedAt} {
		if at != nil && at.After(t) {
			t = *at
		}
	}
	return t
}

// lastStop returns when w last went down, for any reason, or when a start was
// withdrawn after that: a withdrawn start means that the worker must be down.
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
