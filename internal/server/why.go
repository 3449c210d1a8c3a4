package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/core/savings"
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
	expiry := st.Expiry
	d := evidence.Decision{Policy: p.Idle(w.IsIdleDetectionEnabled), Verdict: st.Verdict, Evidence: worker.EvidenceFor(&w, st.Readings, nil)}
	a := about(&w)
	a.Expiry = expiry
	y := control.Why{Account: evidence.Explain(a, d),
		WorkerID: w.ID, WorkerName: w.Name, Status: string(w.Status), IdleStatus: st, Last: last.Entries, Readings: "live", ActivitySourcesReason: w.ActivitySourcesReason}
	s.haltInto(&y)
	seen := &st
	if _, live := s.observe(ctx, id); !live {
		y.Readings, seen = "unknown", nil
	}
	y.Standing = board.Row(&w, seen, time.Now()).Standing
	if t := w.LastPausedAt; t != nil {
		y.Paused = &evidence.Turn{At: *t, By: w.LastPausedBy, Reason: string(w.PauseReason)}
	}
	if t := w.LastResumedAt; t != nil {
		y.Resumed = &evidence.Turn{At: *t, By: w.LastResumedBy}
	}
	y.Question, y.Answer = explain(&w, st, expiry, time.Now())
	y.Answer += notAsked(&w, st.CloudUnread)
	held, err := s.workerPolicy(ctx, &w)
	if err != nil {
		return control.Why{}, err
	}
	y.Policy = &held
	if !up(w.Status) {
		if err := s.atRest(ctx, &y, &w, time.Now()); err != nil {
			return control.Why{}, err
		}
	}
	if expiry != nil && !up(w.Status) {
		y.Answer += " " + expiry.Sentence(time.Now())
	}
	if expiry != nil {
		y.Change = slices.Insert(y.Change, 0, "for its time not to end then: "+w.Prolong())
	}
	y.Change = append(y.Change, y.Policy.Faults...)
	y.Change = append(y.Change, wayOut(&w, st.CloudUnread, time.Now())...)
	return y, nil
}

// atRest adapts the answer to a stopped worker. What would keep a running
// worker up does not matter then; what it was stopped from, what that has saved
// and what would start it do.
func (s *Server) atRest(ctx context.Context, y *control.Why, w *worker.Worker, now time.Time) error {
	y.Verdict, y.Signals, y.Change = nil, []evidence.Signal{}, []string{}
	y.IdleStatus.TargetPauseAt, y.IdleStatus.WarnAt, y.IdleStatus.Reason = nil, nil, idle.StatusNotRunning
	y.IdleStatus.Blocks = slices.DeleteFunc(slices.Clone(y.IdleStatus.Blocks), func(b idle.Block) bool {
		return slices.Contains([]idle.Code{idle.NotIdleYet, idle.RecentActivity, idle.SignalActive, idle.SignalIncomplete, idle.SignalUnknown, idle.WarningPending}, b.Code)
	})
	if w.Status != power.WorkerStopped && w.Status != power.WorkerStopping {
		return nil
	}
	y.Change = append(y.Change, comesBack(w, y.Policy, now)...)
	if w.LastPausedAt == nil || w.DesiredStatus != power.WorkerStopped {
		return nil
	}
	e, err := s.decided(ctx, w, y.Last)
	if err != nil {
		return err
	}
	groundsInto(y, e)
	if w.Status == power.WorkerStopped {
		y.Answer += " " + s.restedFor(w, now)
	}
	return nil
}

// restedFor returns for how long a worker has been stopped and, if lull stopped
// it, what that has saved. Unknown costs are omitted.
func (s *Server) restedFor(w *worker.Worker, now time.Time) string {
	d := now.Sub(w.StatusSince)
	out := fmt.Sprintf("It has been stopped for %s.", idle.Human(d))
	if !w.PauseReason.Automatic() {
		return out
	}
	use := savings.Use{Worker: w.ID, Region: w.AWSRegion, InstanceType: w.InstanceType, Volumes: history.Volumes(w, nil), Avoided: d}
	_, sum := s.prices.Group([]savings.Use{use}, func(u savings.Use) (string, string) { return u.Worker, "" })
	if sum.Saved == nil || *sum.Saved < 0.01 {
		return out
	}
	return fmt.Sprintf("It has been stopped for %s, which saved $%.2f so far.", idle.Human(d), *sum.Saved)
}

// haltInto adds that all automatic actions are halted, and by whom.
func (s *Server) haltInto(y *control.Why) {
	if h := s.fleet.Halted(); h.On {
		y.Halted, y.Halt = true, &h
	}
}

func about(w *worker.Worker) evidence.Account {
	return evidence.Account{Object: w.ID, Name: w.Name, Kind: evidence.KindWorker, State: string(w.Status)}
}

// whyThen answers for a past moment, from the evidence of all servers and the
// audit log.
func (s *Server) whyThen(ctx context.Context, id string, at time.Time) (control.Why, error) {
	w, err := s.fleet.Worker(ctx, id)
	if err != nil {
		return control.Why{}, err
	}
	if at.After(time.Now().Add(history.Skew)) {
		return control.Why{}, invalid("at", "it is not in the past")
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
	y.Account = evidence.Past(a, c)
	y.Paused, y.Resumed = past.Paused, past.Resumed
	if v := y.Verdict; v != nil {
		y.IdleStatus = worker.IdleStatus{WorkerID: id, Verdict: *v, IdleDuration: v.IdleMinutes * 60, CheckedAt: v.At, Readings: c.Before.Evidence.Readings,
			TimeoutMinutes: time.Duration(c.Before.Policy.Timeout).Minutes(), AutoPauseEnabled: c.Before.Policy.AutoPause && c.Before.Policy.Detection}
	} else {
		y.Readings, y.IdleStatus = "unknown", worker.IdleStatus{WorkerID: id, Verdict: idle.Verdict{At: at, Blocks: []idle.Block{}}, ReadingsUnknown: true}
	}
	var stopped *audit.Entry
	if a.State != "" && !up(power.Worker(a.State)) {
		if v := y.Verdict; v != nil { // it describes what ran until then
			v.NextIdleCheckAt, v.TargetPauseAt, v.WarnAt = time.Time{}, nil, nil
		}
		y.Question, y.Change = "why was it "+a.State, []string{}
		y.Answer = fmt.Sprintf("It was %s at %s.", a.State, clock(at))
		if p := y.Paused; p != nil {
			y.Answer += fmt.Sprintf(" %s stopped it at %s (%s).", by(p.By), clock(p.At), p.Reason)
			if e := past.Decided; e != nil && e.Reason == p.Reason {
				stopped = e
			}
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

// comesBack lists what would start a stopped worker, and what prevents it.
func comesBack(w *worker.Worker, p *control.WorkerPolicy, now time.Time) []string {
	out := []string{}
	for _, o := range p.Overrides {
		if o.Kind == policy.Freeze {
			out = append(out, o.Sentence())
		}
	}
	if w.DesiredStatus == power.WorkerRunning {
		for _, b := range p.Budgets {
			if !b.Free {
				out = append(out, b.Sentence)
			}
		}
		return out
	}
	if w.Overdue(now) && w.Armed && !p.Shadow {
		return append(out, w.Unstartable())
	}
	if st := p.Standing; st != nil && st.Start {
		out = append(out, st.Describe()+opening(st))
	}
	who := "Start it"
	if w.WakeTokenHash != "" {
		who = "Start it, or use its wake token,"
	}
	return append(out, who+" at any time: lull worker start "+w.Name, "to keep it up then: lull worker snooze "+w.Name)
}

// up reports whether the question about a worker is why it runs.
func up(w power.Worker) bool {
	switch w {
	case power.WorkerPending, power.WorkerProvisioning, power.WorkerStarting, power.WorkerRunning, power.WorkerDraining:
		return true
	}
	return false
}

// explain answers why a worker is in its state.
func explain(w *worker.Worker, st worker.IdleStatus, expiry *evidence.Expiry, now time.Time) (question, text string) {
	switch {
	case w.Intent != nil && w.DesiredStatus == power.WorkerRunning:
		return "why is it not running yet", fmt.Sprintf("It is %s, and is to start for %s when that is done%s.", w.Status, cmp.Or(w.StartBy, "the cloud's sake"), because(w.StatusReason))
	case w.Intent != nil:
		return "why is it about to stop", fmt.Sprintf("%s asked for it at %s (%s); it is %s.", w.Intent.By, clock(w.Intent.At), w.Intent.Reason, w.Status) + withdrawn(w)
	case w.Status == power.WorkerRunning:
		switch {
		case len(st.Blocks) > 0 && expiry.Before(st.TargetPauseAt):
			st.TargetPauseAt = nil // that pause will not happen
			text = expiry.Sentence(now) + " " + running(st, now)
		case expiry != nil:
			text = running(st, now) + " " + expiry.Sentence(now)
		default:
			text = running(st, now)
		}
		return "why is it still running", text + calledOff(w, now)
	case up(w.Status):
		return "why is it not running yet", fmt.Sprintf("It is %s since %s%s.", w.Status, clock(w.StatusSince), because(w.StatusReason))
	case w.Status == power.WorkerStopped && w.DesiredStatus == power.WorkerRunning:
		return "why is it not running yet", fmt.Sprintf("It is to start for %s%s.", cmp.Or(w.StartBy, "the cloud's sake"), because(w.StatusReason))
	case w.Status == power.WorkerStopped || w.Status == power.WorkerStopping:
		if w.LastPausedAt == nil {
			return "why is it stopped", fmt.Sprintf("It was %s when lull first saw it.", w.Status) + withdrawn(w)
		}
		return "why was it stopped", fmt.Sprintf("%s stopped it at %s (%s).", by(w.LastPausedBy), clock(*w.LastPausedAt), w.PauseReason) + withdrawn(w)
	case w.Status == power.WorkerFailed:
		return "why has it failed", fmt.Sprintf("Since %s%s. Retry it or terminate it.", clock(w.StatusSince), because(w.StatusReason))
	}
	if w.Status == power.WorkerTerminated {
		return "why was it terminated", endedBy(w)
	}
	return "why is it " + string(w.Status), fmt.Sprintf("Since %s%s.", clock(w.StatusSince), because(w.StatusReason))
}

// endedBy returns who ended a worker that is gone, and when that was seen.
func endedBy(w *worker.Worker) string {
	var who string
	switch {
	case w.TerminateFor == power.ReasonTTL && w.TTLDeadline != nil:
		who = "Its ttl_deadline " + clock(*w.TTLDeadline)
	case w.TerminateFor == power.ReasonExternal || w.TerminateBy == nil:
		return fmt.Sprintf("It is gone since %s%s.", clock(w.StatusSince), because(w.StatusReason))
	default:
		who = by(w.TerminateBy.Name)
	}
	return fmt.Sprintf("%s ended it; EC2 had terminated it by %s.", who, clock(w.StatusSince))
}

// calledOffTold is for how long a canceled stop is reported. A failed one is
// reported until something else happens.
const calledOffTold = 24 * time.Hour

// calledOff returns that the last requested stop did not happen.
func calledOff(w *worker.Worker, now time.Time) string {
	c := w.StopCalledOff
	if c == nil || !w.StopRefused() && now.Sub(c.At) > calledOffTold {
		return ""
	}
	return " " + c.Sentence()
}

// withdrawn returns that a start was canceled.
func withdrawn(w *worker.Worker) string {
	if w.StartWithdrawnAt == nil {
		return ""
	}
	return fmt.Sprintf(" %s took a start of it back at %s.", by(w.StartWithdrawnBy), clock(*w.StartWithdrawnAt))
}

func running(st worker.IdleStatus, now time.Time) string {
	switch {
	case len(st.Blocks) == 0:
		return fmt.Sprintf("It is idle for %s and is paused at the next check.", idle.HumanMinutes(st.IdleMinutes)) + nextCheck(st)
	case st.TargetPauseAt != nil && st.TargetPauseAt.After(now) && st.NotBefore():
		return fmt.Sprintf("%s It is not paused before %s, in %s, when others may wait for the same budget.", strongest(st.Blocks).Sentence, clock(*st.TargetPauseAt), idle.Human(st.TargetPauseAt.Sub(now)))
	case st.TargetPauseAt != nil && st.TargetPauseAt.After(now):
		return fmt.Sprintf("%s If nothing happens it is paused at %s, in %s.", strongest(st.Blocks).Sentence, clock(*st.TargetPauseAt), idle.Human(st.TargetPauseAt.Sub(now)))
	}
	return strongest(st.Blocks).Sentence + nextCheck(st)
}

// nextCheck returns when the next check is, if known.
func nextCheck(st worker.IdleStatus) string {
	if st.NextIdleCheckAt.IsZero() {
		return ""
	}
	return fmt.Sprintf(" The next check is at %s.", clock(st.NextIdleCheckAt))
}

// strongest returns the block that would keep a worker up if all others ended:
// first what is switched off, then what is unknown, then what has no known end,
// then what ends last. A budget says nothing about use, so another block exists
// then. blocks must not be empty.
func strongest(blocks []idle.Block) idle.Block {
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

func by(who string) string {
	if who == "" {
		return "Somebody"
	}
	return who
}

func because(why string) string {
	if why == "" {
		return ""
	}
	return ": " + why
}

func clock(t time.Time) string { return t.UTC().Format(time.RFC3339) }
