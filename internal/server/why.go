package server

import (
	"cmp"
	"context"
	"slices"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/core/savings"
	"lull/internal/core/why"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/server/board"
	"lull/internal/server/history"
)

// lastEntries is the number of audit entries in a why answer.
const lastEntries = 10

func (s *Server) whyRoutes() {
	register(s, route{id: "why-worker", method: "GET", path: workersPath + "/{worker_id}/why", role: access.Viewer,
		doc: "Why it runs, or why it was stopped, by whom and when; now, or at a past time that is recorded"},
		func(ctx context.Context, in *struct {
			One
			Then
		}) (*answer[control.Why], error) {
			at, err := in.read()
			switch {
			case err != nil:
				return nil, problem(err)
			case at.IsZero():
				return ok(s.why(ctx, in.ID))
			}
			return ok(s.whyThen(ctx, in.ID, at))
		})
}

func (s *Server) why(ctx context.Context, id string) (control.Why, error) {
	w, err := s.fleet.Worker(ctx, id)
	if err != nil {
		return control.Why{}, err
	}
	st, err := s.idleStatus(ctx, &w)
	if err != nil {
		return control.Why{}, err
	}
	p, err := s.fleet.Policy(ctx, &w)
	if err != nil {
		return control.Why{}, err
	}
	last, err := s.fleet.NewestAudit(ctx, audit.Query{WorkerID: id, Limit: lastEntries})
	if err != nil {
		return control.Why{}, err
	}
	d := evidence.Decision{Policy: p.Idle(w.IsIdleDetectionEnabled), Verdict: st.Verdict, Evidence: worker.EvidenceFor(&w, st.Readings, nil)}
	a := about(&w)
	a.Expiry = st.Expiry
	y := control.Why{Account: why.Explain(a, d),
		WorkerID: w.ID, WorkerName: w.Name, Status: string(w.Status), IdleStatus: st, Last: last.Entries, Readings: "live", ActivitySourcesReason: w.ActivitySourcesReason}
	s.haltInto(&y)
	seen := &st
	if _, live := s.observe(ctx, id); !live {
		y.Readings, seen = "unknown", nil
	}
	now := time.Now()
	y.Standing = board.Row(&w, seen, now).Standing
	if t := w.LastPausedAt; t != nil {
		y.Paused = &evidence.Turn{At: *t, By: w.LastPausedBy, Reason: string(w.PauseReason)}
	}
	if t := w.LastResumedAt; t != nil {
		y.Resumed = &evidence.Turn{At: *t, By: w.LastResumedBy}
	}
	explain(&y.Account, &w, st, now)
	held, err := s.workerPolicy(ctx, &w)
	if err != nil {
		return control.Why{}, err
	}
	y.Policy = &held
	if !up(w.Status) {
		if err := s.atRest(ctx, &y, &w, now); err != nil {
			return control.Why{}, err
		}
		if x := st.Expiry; x != nil {
			y.Add(why.Expires, x.At, "", x.Sentence(now))
		}
	}
	for _, f := range y.Policy.Faults {
		y.Advise(why.PolicyFault, f)
	}
	wayOut(&y.Account, &w, st.CloudUnread, now)
	return y, nil
}

// atRest adapts the answer for a stopped worker. It removes what would keep a running
// worker running, and adds the check that the stop was based on, what the stop has
// saved, and what would start the worker.
func (s *Server) atRest(ctx context.Context, y *control.Why, w *worker.Worker, now time.Time) error {
	y.Verdict, y.Signals = nil, []evidence.Signal{}
	y.NoRemedy()
	if st := y.IdleStatus; st.Expiry != nil {
		y.Advise(why.Prolong, w.Prolong())
	}
	y.IdleStatus.TargetPauseAt, y.IdleStatus.WarnAt, y.IdleStatus.Reason = nil, nil, idle.StatusNotRunning
	y.IdleStatus.Blocks = slices.DeleteFunc(slices.Clone(y.IdleStatus.Blocks), func(b idle.Block) bool {
		return slices.Contains([]idle.Code{idle.NotIdleYet, idle.RecentActivity, idle.SignalActive, idle.SignalIncomplete, idle.SignalUnknown, idle.WarningPending}, b.Code)
	})
	if w.Status != power.WorkerStopped && w.Status != power.WorkerStopping {
		return nil
	}
	comesBack(y, w, now)
	if w.LastPausedAt == nil || w.DesiredStatus != power.WorkerStopped {
		return nil
	}
	e, err := s.decided(ctx, w, y.Last)
	if err != nil {
		return err
	}
	groundsInto(y, e)
	if w.Status == power.WorkerStopped {
		return s.restedFor(ctx, &y.Account, w, now)
	}
	return nil
}

// restedFor adds for how long a worker has been stopped and, if lull stopped it, what
// that has saved. The money is omitted if a cost is unknown.
func (s *Server) restedFor(ctx context.Context, a *why.Account, w *worker.Worker, now time.Time) error {
	table, err := s.prices.Prices(ctx)
	if err != nil {
		return err
	}
	d := now.Sub(w.StatusSince)
	use := savings.Use{Worker: w.ID, Region: w.AWSRegion, InstanceType: w.InstanceType, Volumes: history.Volumes(w, nil), Avoided: d}
	_, sum := table.Group([]savings.Use{use}, func(u savings.Use) (string, string) { return u.Worker, "" })
	if !w.PauseReason.Automatic() || sum.Saved == nil || *sum.Saved < 0.01 {
		a.Add(why.Rested, w.StatusSince, "", idle.Human(d))
		return nil
	}
	a.Add(why.Saved, w.StatusSince, "", idle.Human(d), *sum.Saved)
	return nil
}

// haltInto adds the halt of all automatic actions, and who set it.
func (s *Server) haltInto(y *control.Why) {
	if h := s.fleet.Halted(); h.On {
		y.Halted, y.Halt = true, &h
	}
}

func about(w *worker.Worker) why.Account {
	return why.Account{Object: w.ID, Name: w.Name, Kind: why.KindWorker, State: string(w.Status), Prolong: w.Prolong()}
}

// whyThen explains a worker's state at a past moment, from the evidence of all
// servers and the audit log.
func (s *Server) whyThen(ctx context.Context, id string, at time.Time) (control.Why, error) {
	w, err := s.fleet.Worker(ctx, id)
	if err != nil {
		return control.Why{}, err
	}
	if at.After(time.Now().Add(history.Skew)) {
		return control.Why{}, invalid("at", "want a time in the past")
	}
	around := evidence.Query{Object: id, From: at, To: at}
	var c evidence.Recall
	c.Missing, err = history.Recorded(ctx, s.past.Evidence, around, func(r evidence.Record) error { c.Add(at, &r); return nil })
	if err != nil {
		return control.Why{}, err
	}
	past, err := history.At(ctx, s.fleet, &w, at)
	if err != nil {
		return control.Why{}, err
	}
	last, err := s.fleet.NewestAudit(ctx, audit.Query{WorkerID: id, To: at.Add(time.Nanosecond), Limit: lastEntries})
	if err != nil {
		return control.Why{}, err
	}
	a := about(&w)
	a.At, a.State = at, past.State
	y := control.Why{WorkerID: w.ID, WorkerName: w.Name, Status: a.State, Last: last.Entries, Readings: "recorded"}
	s.haltInto(&y)
	y.Account = why.Past(a, c)
	y.Paused, y.Resumed = past.Paused, past.Resumed
	if v := y.Verdict; v != nil {
		y.IdleStatus = worker.IdleStatus{WorkerID: id, Verdict: *v, IdleDuration: v.IdleMinutes * 60, CheckedAt: v.At, Readings: c.Before.Evidence.Readings,
			TimeoutMinutes: time.Duration(c.Before.Policy.Timeout).Minutes(), AutoPauseEnabled: c.Before.Policy.AutoPause && c.Before.Policy.Detection}
	} else {
		y.Readings, y.IdleStatus = "unknown", worker.IdleStatus{WorkerID: id, Verdict: idle.Verdict{At: at, Blocks: []idle.Block{}}, ReadingsUnknown: true}
	}
	var stopped *audit.Entry
	if a.State != "" && !up(power.Worker(a.State)) {
		if v := y.Verdict; v != nil { // the verdict is about the time before the stop
			v.NextIdleCheckAt, v.TargetPauseAt, v.WarnAt = time.Time{}, nil, nil
		}
		y.Down(y.Paused)
		if e := past.Decided; e != nil && y.Paused != nil && e.Reason == y.Paused.Reason {
			stopped = e
		}
	}
	if c.Held(at) {
		y.PolicyThen = y.Account.Policy
	}
	groundsInto(&y, stopped)
	if b := past.Created; b != nil {
		unborn(&y, b, w.Imported)
	}
	return y, nil
}

// comesBack adds what would start a stopped worker, and what prevents it.
func comesBack(y *control.Why, w *worker.Worker, now time.Time) {
	p := y.Policy
	for _, o := range p.Overrides {
		if o.Kind == policy.Freeze {
			y.Advise(why.Frozen, o.Sentence())
		}
	}
	if w.DesiredStatus == power.WorkerRunning {
		for _, b := range p.Budgets {
			if !b.Free {
				y.Advise(why.NoBudget, b.Sentence)
			}
		}
		return
	}
	if w.Overdue(now) && w.Armed && !p.Shadow {
		y.Advise(why.Overdue, w.Unstartable())
		return
	}
	if st := p.ScheduleState; st != nil && st.Start {
		y.Advise(why.Opens, st.Describe(), opening(st))
	}
	who := "Start it"
	if w.WakeTokenHash != "" {
		who = "Start it, or use its wake token,"
	}
	y.Advise(why.Start, who, w.Name)
	y.Advise(why.Snooze, w.Name)
}

// up reports whether why about a worker of status w is about its running.
func up(w power.Worker) bool {
	switch w {
	case power.WorkerPending, power.WorkerProvisioning, power.WorkerStarting, power.WorkerRunning, power.WorkerDraining:
		return true
	}
	return false
}

// explain answers why a worker is in its state.
func explain(a *why.Account, w *worker.Worker, st worker.IdleStatus, now time.Time) {
	reason, starter := why.Because(w.StatusReason), cmp.Or(w.StartBy, "an unknown requester")
	switch {
	case w.Intent != nil && w.DesiredStatus == power.WorkerRunning:
		a.Ask("why is it not running yet").Add(why.StartAsked, time.Time{}, starter, w.Status, reason)
	case w.Intent != nil:
		a.Ask("why is it about to stop").Add(why.StopAsked, w.Intent.At, w.Intent.By, w.Intent.Reason, w.Status)
		withdrawn(a, w)
	case w.Status == power.WorkerRunning:
		*a = a.Running(st.Verdict, now)
		a.Question = "why is it still running"
		// A canceled stop is reported for a day, a failed one until something else
		// happens.
		if c := w.StopCalledOff; c != nil && (w.StopRefused() || now.Sub(c.At) <= 24*time.Hour) {
			a.Add(why.CalledOff, c.At, c.By, c.Sentence())
		}
	case up(w.Status):
		a.Ask("why is it not running yet").Add(why.ComingUp, w.StatusSince, "", w.Status, reason)
	case w.Status == power.WorkerStopped && w.DesiredStatus == power.WorkerRunning:
		a.Ask("why is it not running yet").Add(why.ToStart, time.Time{}, starter, reason)
	case w.Status == power.WorkerStopped || w.Status == power.WorkerStopping:
		if w.LastPausedAt == nil {
			a.Ask("why is it stopped").Add(why.FirstSeen, time.Time{}, "", w.Status)
		} else {
			a.Ask("why was it stopped").Add(why.Stopped, *w.LastPausedAt, w.LastPausedBy, w.PauseReason)
		}
		withdrawn(a, w)
	case w.Status == power.WorkerFailed:
		a.Ask("why has it failed").Add(why.Failed, w.StatusSince, "", reason)
	case w.Status != power.WorkerTerminated:
		a.Ask("why is it "+string(w.Status)).Add(why.Since, w.StatusSince, "", reason)
	case w.TerminateFor == power.ReasonTTL && w.TTLDeadline != nil:
		a.Ask("why was it terminated").Add(why.Terminated, w.StatusSince, "Its ttl_deadline "+w.TTLDeadline.UTC().Format(time.RFC3339))
	case w.TerminateFor == power.ReasonExternal || w.TerminateBy == nil:
		a.Ask("why was it terminated").Add(why.Gone, w.StatusSince, "", reason)
	default:
		a.Ask("why was it terminated").Add(why.Terminated, w.StatusSince, w.TerminateBy.Name)
	}
	if u := st.CloudUnread; u != nil && w.Status != power.WorkerTerminated && !u.SaidOf(w) {
		a.Add(why.CloudUnread, u.Since, "", u.Sentence())
	}
}

// withdrawn adds that a start was canceled.
func withdrawn(a *why.Account, w *worker.Worker) {
	if t := w.StartWithdrawnAt; t != nil {
		a.Add(why.Withdrawn, *t, w.StartWithdrawnBy)
	}
}
