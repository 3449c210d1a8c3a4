package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

func (s *Server) agentRoutes() {
	s.agentWhyRoutes()
	s.enrollRoutes()
	register(s, route{id: "report-agent", method: "POST", path: base + "/agents/{name}/report", role: access.Admin, machine: true, status: http.StatusOK,
		doc: "Report an agent's readings and receive its requests; the token is valid for its machine only"},
		func(ctx context.Context, in *struct {
			Named
			Body map[string]any
		}) (*answer[control.AgentAnswer], error) {
			body, err := raw(in.Body)
			var r control.AgentReport
			if err == nil {
				err = json.Unmarshal(body, &r)
			}
			if err == nil {
				err = r.Check()
			}
			if err != nil {
				return nil, problem(invalid("report", err.Error()))
			}
			return ok(s.agentReport(ctx, in.Name, r, body))
		})
	register(s, route{id: "worker-agent", method: "GET", path: workersPath + "/{worker_id}/agent", role: access.Viewer, doc: "The last report of the worker's agent: its signals, with their ages"},
		func(ctx context.Context, in *One) (*answer[control.AgentView], error) {
			if _, err := s.fleet.Worker(ctx, in.ID); err != nil {
				return nil, problem(err)
			}
			seen, _ := s.observe(ctx, in.ID)
			if seen.Agent == nil {
				return nil, problem(notFound("agent report of worker", in.ID))
			}
			return ok(*seen.Agent, nil)
		})
}

// agentReport processes an agent's report. An intent is written to the worker's
// record, the readings are passed to the worker's owner, and the rest is kept for the
// listing. The answer depends only on the record, so any server can give it.
func (s *Server) agentReport(ctx context.Context, name string, r control.AgentReport, body json.RawMessage) (control.AgentAnswer, error) {
	var a control.AgentAnswer
	if h := s.fleet.Halted(); h.On {
		x := haltAnswer(h, time.Now())
		a.Halted, a.Halt, a.HaltedBy, a.HaltLeft = true, h.Sentence(), x.Halt, x.Left
	}
	w, err := s.fleet.WorkerOfMachine(ctx, name, r.Region)
	_, none := errors.AsType[*failure.NotFound](err)
	if err != nil && !none {
		return a, err
	}
	if !none && r.InstanceID != "" && w.EC2InstanceID != "" && r.InstanceID != w.EC2InstanceID {
		return a, fault(http.StatusConflict, "other_instance", "cannot take the report: worker "+w.ID+" is instance "+w.EC2InstanceID+", not "+r.InstanceID)
	}
	seen := control.Machine{Kind: "agent", Name: name, Report: body, WorkerID: w.ID, Version: r.Version, Outdated: control.Outdated(r.Version, r.BuildDate, s.version, s.built)}
	if seen, err = s.machines.put(seen, 2*time.Duration(r.Interval), time.Now()); err != nil {
		return a, err
	}
	s.agents.Take(name, r, *seen.ReportedAt)
	s.announce(ctx, seen)
	if none {
		return a, nil
	}
	if w, err = s.agentAction(ctx, w, r.Action, &a); err != nil {
		return a, err
	}
	a.WorkerID, a.Holder = w.ID, w.PauseHolder
	if err := s.agentOrders(ctx, &w, &a); err != nil {
		return a, err
	}
	if s.live == nil || !s.live.Report(ctx, w.ID, r) {
		return a, fault(http.StatusServiceUnavailable, "no_owner", "cannot hand the report to the server that owns worker "+w.ID+": it cannot be reached")
	}
	return a, nil
}

// agentAction records that the agent intends to act, or that its action failed.
func (s *Server) agentAction(ctx context.Context, w worker.Worker, x *control.AgentAction, a *control.AgentAnswer) (worker.Worker, error) {
	if x == nil {
		return w, nil
	}
	switch x.Phase {
	case "intent":
		reason := map[string]power.Reason{"idle_timeout": power.ReasonIdleTimeout, "ttl": power.ReasonTTL, "completion": power.ReasonManual}[x.Reason]
		if reason == "" {
			return w, invalid("action.reason", "want idle_timeout, ttl or completion")
		}
		after, err := s.fleet.AgentIntends(ctx, w.ID, fleet.AgentStop{Generation: x.Generation, Reason: reason, Detail: x.Action + ": " + x.Detail, Shadow: s.shadow})
		if no, refused := errors.AsType[*failure.Refused](err); refused {
			a.Refused = no.Reason + ": " + no.Detail
			return w, nil
		}
		if err != nil {
			return w, err
		}
		return after, nil
	case "cancelled", "failed":
		if in := w.Intent; in == nil || in.AgentGeneration != x.Generation {
			return w, nil // withdrawn already, or never requested
		}
		return s.fleet.AgentWithdraws(ctx, w.ID, x.Generation, "its agent did not stop it: "+x.Detail)
	}
	return w, nil
}

// agentOrders returns what the record requires of an agent that does not decide
// itself.
func (s *Server) agentOrders(ctx context.Context, w *worker.Worker, a *control.AgentAnswer) error {
	p, err := s.fleet.Policy(ctx, w)
	if err != nil {
		return err
	}
	if w.AgentConsulted() {
		in := w.Intent
		a.Order = &control.AgentOrder{Generation: in.Generation, Action: p.PauseAction, Reason: string(in.Reason), Forced: !in.ByReadings()}
	}
	if in := w.Intent; in != nil && in.SentAt != nil && in.By != worker.ByAgent.Name && w.DesiredStatus == power.WorkerStopped {
		a.Order = &control.AgentOrder{Generation: in.Generation, Action: p.PauseAction, Reason: string(in.Reason), Forced: !in.ByReadings(), Sent: true}
	}
	if w.TTLDeadline != nil {
		a.TTLDeadline, a.TTLAction, a.TTLFromTag = w.TTLDeadline, cmp.Or(w.TTLAction, worker.ActionStop), w.TTLFromTag
	}
	sent := w.WarningSentAt
	a.AllClear = sent == nil && w.Status == power.WorkerRunning && w.DesiredStatus == power.WorkerRunning
	if sent == nil || w.Status != power.WorkerRunning || w.DesiredStatus != power.WorkerRunning || w.PauseHolder == worker.HolderAgent {
		return nil
	}
	at := sent.Add(time.Duration(min(p.WarnBefore, p.Timeout/2)))
	a.Warning = &control.AgentWarning{ID: sent.UTC().Format(time.RFC3339Nano), Seconds: max(time.Until(at).Seconds(), 0), Action: p.PauseAction}
	return nil
}
