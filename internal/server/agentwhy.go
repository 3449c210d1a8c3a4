package server

import (
	"context"
	"errors"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/failure"
	"lull/internal/core/why"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/server/agents"
	"lull/internal/server/history"
)

func (s *Server) agentWhyRoutes() {
	each := base + "/agents/{name}"
	register(s, route{id: "why-agent", method: "GET", path: each + "/why", role: access.Viewer, machine: true,
		doc: "Why the machine of an agent runs, or was stopped, from the agent's reports; now, or at a past time that is recorded"},
		func(ctx context.Context, in *struct {
			Named
			Then
		}) (*answer[control.AgentWhy], error) {
			at, err := in.read()
			if err != nil {
				return nil, problem(err)
			}
			return ok(s.agentWhy(ctx, in.Name, at))
		})
	register(s, route{id: "agent-timeline", method: "GET", path: each + "/timeline", role: access.Viewer, machine: true,
		doc: "The recorded signals and verdicts of an agent in a period"},
		func(ctx context.Context, in *struct {
			Named
			Between
			Points int `query:"points" minimum:"10" maximum:"2000" default:"500" doc:"Approximate number of points per signal; never more than twice as many"`
		}) (*answer[control.Timeline], error) {
			w, err := s.agentWorker(ctx, in.Name)
			if err != nil {
				return nil, problem(err)
			}
			return ok(s.timeline(ctx, agents.Object(in.Name), w, in.Between, in.Points))
		})
}

// agentWorker returns the worker whose machine this is, or nil.
func (s *Server) agentWorker(ctx context.Context, name string) (*worker.Worker, error) {
	region := ""
	if r, heard := s.agents.Seen(name); heard {
		region = r.Region
	}
	m, err := s.machine(ctx, "agent", name)
	if _, none := errors.AsType[*failure.NotFound](err); err != nil && !none {
		return nil, err
	}
	var w worker.Worker
	if m.WorkerID != "" {
		w, err = s.fleet.Worker(ctx, m.WorkerID)
	} else {
		w, err = s.fleet.WorkerOfMachine(ctx, name, region)
	}
	if _, none := errors.AsType[*failure.NotFound](err); none {
		return nil, nil
	}
	return &w, err
}

// agentWhy explains the state of an agent's machine at a time: for now from the
// agent's last report, for the past from the checks recorded by all servers.
func (s *Server) agentWhy(ctx context.Context, name string, at time.Time) (control.AgentWhy, error) {
	now := time.Now().UTC()
	if at.After(now.Add(history.Skew)) {
		return control.AgentWhy{}, invalid("at", "want a time in the past")
	}
	y := control.AgentWhy{Machine: name, Last: []audit.Entry{}, Readings: "recorded"}
	w, err := s.agentWorker(ctx, name)
	if err != nil {
		return y, err
	}
	about := why.Account{Object: name, Name: name, Kind: why.KindAgent, At: at}
	if at.IsZero() {
		if seen, heard := s.agents.Seen(name); heard && !now.After(seen.Next.Add(seen.Next.Sub(seen.At))) {
			y.Readings, y.Account = "live", why.Explain(about, seen.Decision)
			y.State = seen.Evidence.Status
			s.agentTurns(&y, &seen)
			return s.withWorker(ctx, y, w, now)
		}
		about.At = now
	}
	var c evidence.Recall
	when := about.At
	c.Missing, err = history.Recorded(ctx, s.past.Evidence, evidence.Query{Object: agents.Object(name), From: when, To: when}, func(r evidence.Record) error { c.Add(when, &r); return nil })
	if err != nil {
		return y, err
	}
	known := c.Before != nil || c.After != nil || w != nil
	if !known {
		_, err := s.machine(ctx, "agent", name)
		_, none := errors.AsType[*failure.NotFound](err)
		if known = !none; err != nil && (!none || at.IsZero()) {
			return y, err
		}
	}
	y.Account = why.Past(about, c)
	switch {
	case y.Verdict != nil:
		if y.State = c.Before.Evidence.Status; at.IsZero() {
			y.Question = "why is it running" // another server receives the agent's reports
		}
	case at.IsZero():
		y.Readings, y.Unheard = "unknown", "Its agent does not report, so its current readings are unknown."
	case !known: // a removed machine looks like one that never existed
		y.Readings, y.Unheard = "unknown", "No report of this agent is recorded for that time, and no running server has heard from it."
	default:
		y.Readings, y.Unheard = "unknown", "No report of its agent is recorded for that time."
	}
	if c.Before != nil {
		s.agentTurns(&y, c.Before)
	}
	return s.withWorker(ctx, y, w, when)
}

// agentTurns adds when and why the machine last went down and came up, as its agent
// reported.
func (s *Server) agentTurns(y *control.AgentWhy, r *evidence.Record) {
	y.Paused = r.Paused
	if t := r.Evidence.LastResumedAt; !t.IsZero() {
		y.Resumed = &evidence.Turn{At: t, By: "the machine"}
	}
}

// withWorker adds what the worker's record and audit log say about the machine: its
// power state at the time, and who changed it.
func (s *Server) withWorker(ctx context.Context, y control.AgentWhy, w *worker.Worker, at time.Time) (control.AgentWhy, error) {
	if w == nil {
		return y, nil
	}
	past, err := history.At(ctx, s.fleet, w, at)
	if err != nil {
		return y, err
	}
	last, err := s.fleet.NewestAudit(ctx, audit.Query{WorkerID: w.ID, To: at.Add(time.Nanosecond), Limit: lastEntries})
	if err != nil {
		return y, err
	}
	y.WorkerID, y.Last, y.State = w.ID, last.Entries, past.State
	if past.Paused != nil {
		y.Paused = past.Paused
	}
	if past.Resumed != nil {
		y.Resumed = past.Resumed
	}
	if past.State == "" || history.Runs(past.State) {
		return y, nil
	}
	y.At = at
	y.Down(y.Paused)
	return y, nil
}
