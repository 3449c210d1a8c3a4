package server

import (
	"context"
	"errors"
	"net/http"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/core/policy/when"
	"lull/internal/core/power"
	"lull/internal/fleet/rules"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

// RuleName is the path of a rule.
type RuleName struct {
	Name string `path:"name" maxLength:"64"`
}

// Putting is a request that writes a rule.
type Putting struct {
	RuleName
	Create bool `query:"create" doc:"Refuse to replace one that exists"`
}

// named checks that the name in a body matches the path.
func named(path, body string) error {
	if body != "" && body != path {
		return invalid("name", "differs from the name in the path")
	}
	return nil
}

func (s *Server) policyRoutes() {
	all, each := base+"/policies", base+"/policies/{name}"
	register(s, route{id: "list-policies", method: "GET", path: all, role: access.Viewer, doc: "Policies, including built-in ones, by name"},
		func(ctx context.Context, in *Paged) (*answer[control.List[policy.Named]], error) {
			l, err := s.fleet.Policies(ctx)
			return ok(pageOf(l, in, func(p policy.Named) string { return p.Name }), err)
		})
	register(s, route{id: "get-policy", method: "GET", path: each, role: access.Viewer, doc: "One policy"},
		func(ctx context.Context, in *RuleName) (*answer[policy.Named], error) {
			return ok(s.fleet.NamedPolicy(ctx, in.Name))
		})
	register(s, route{id: "put-policy", method: "PUT", path: each, role: access.Admin, doc: "Create or replace a policy"},
		func(ctx context.Context, in *struct {
			Putting
			Body control.PolicyBody
		}) (*answer[policy.Named], error) {
			if err := named(in.Name, in.Body.Name); err != nil {
				return nil, problem(err)
			}
			p := policy.Named{Name: in.Name, Description: in.Body.Description, Values: in.Body.Values}
			return ok(s.fleet.PutPolicy(ctx, actor(ctx), p, in.Create))
		})
	register(s, route{id: "delete-policy", method: "DELETE", path: each, role: access.Admin, doc: "Remove an unused policy, or reset a built-in one to its defaults"},
		func(ctx context.Context, in *RuleName) (*struct{}, error) {
			return nil, problem(s.fleet.DeletePolicy(ctx, actor(ctx), in.Name))
		})
	register(s, route{id: "apply-policy", method: "POST", path: each + "/apply", role: access.Admin, doc: "Assign a policy to workers, or to all that a selector matches, now and later"},
		func(ctx context.Context, in *struct {
			RuleName
			Body control.Apply
		}) (*answer[control.Applied], error) {
			return ok(s.apply(ctx, in.Body, rules.Application{Policy: &in.Name}))
		})
	register(s, route{id: "list-policy-groups", method: "GET", path: base + "/policy-groups", role: access.Viewer, doc: "Selectors that a policy or schedule was applied to, weakest first"},
		func(ctx context.Context, _ *struct{}) (*answer[control.List[policy.Group]], error) {
			l, err := s.fleet.Groups(ctx)
			return ok(control.List[policy.Group]{Items: l}, err)
		})
	register(s, route{id: "delete-policy-group", method: "DELETE", path: base + "/policy-groups/{name}", role: access.Admin, doc: "Remove the assignment of a policy or schedule to a selector"},
		func(ctx context.Context, in *RuleName) (*struct{}, error) {
			return nil, problem(s.fleet.DeleteGroup(ctx, actor(ctx), in.Name))
		})
	register(s, route{id: "worker-policy", method: "GET", path: workersPath + "/{worker_id}/policy", role: access.Viewer, doc: "The effective policy of a worker now, with the source of each value"},
		func(ctx context.Context, in *One) (*answer[control.WorkerPolicy], error) {
			w, err := s.fleet.Worker(ctx, in.ID)
			if err != nil {
				return nil, problem(err)
			}
			return ok(s.workerPolicy(ctx, &w))
		})
}

// apply assigns a to the workers of a selector. It returns the changed workers, or
// the group.
func (s *Server) apply(ctx context.Context, in control.Apply, a rules.Application) (control.Applied, error) {
	if in.Scope.All() && !in.All {
		return control.Applied{}, invalid("all", "an empty selector needs all: true")
	}
	a.Priority, a.Remove = in.Priority, in.Remove
	l, g, err := s.fleet.Apply(ctx, actor(ctx), in.Scope, a)
	out := control.Applied{Workers: []worker.Worker{}, Group: g}
	for _, w := range l {
		out.Workers = append(out.Workers, w.Public())
	}
	return out, err
}

func (s *Server) workerPolicy(ctx context.Context, w *worker.Worker) (control.WorkerPolicy, error) {
	if err := s.fleet.Refresh(ctx); err != nil {
		return control.WorkerPolicy{}, err
	}
	r, err := s.fleet.Policy(ctx, w)
	if err != nil {
		return control.WorkerPolicy{}, err
	}
	return control.WorkerPolicy{WorkerID: w.ID, WorkerName: w.Name, Resolved: r, Budgets: s.budgetsOf(w, &r)}, nil
}

// budgetsOf returns the budgets that apply to the next automatic stop or start
// of w.
func (s *Server) budgetsOf(w *worker.Worker, r *policy.Resolved) []policy.Used {
	now, out := time.Now(), []policy.Used{}
	if up(w.Status) {
		reasons := []string{policy.ForIdle}
		if r.ScheduleState != nil {
			reasons = append(reasons, policy.ForSchedule)
		}
		for _, reason := range reasons {
			for _, u := range s.fleet.BudgetsOf(now, w, policy.Stops, reason) {
				if len(out) == 0 || out[len(out)-1].Budget != u.Budget {
					out = append(out, u)
				}
			}
		}
		return out
	}
	reason := w.StartReason
	if reason == "" {
		reason = policy.ForSchedule
	}
	if w.Status == power.WorkerTerminated || reason == policy.ByUser {
		return out
	}
	return append(out, s.fleet.BudgetsOf(now, w, policy.Starts, reason)...)
}

func (s *Server) scheduleRoutes() {
	all, each := base+"/schedules", base+"/schedules/{name}"
	register(s, route{id: "list-schedules", method: "GET", path: all, role: access.Viewer, doc: "Schedules, by name"},
		func(ctx context.Context, in *Paged) (*answer[control.List[policy.Schedule]], error) {
			l, err := s.fleet.Schedules(ctx)
			return ok(pageOf(l, in, func(p policy.Schedule) string { return p.Name }), err)
		})
	register(s, route{id: "get-schedule", method: "GET", path: each, role: access.Viewer, doc: "One schedule"},
		func(ctx context.Context, in *RuleName) (*answer[policy.Schedule], error) {
			return ok(s.fleet.Schedule(ctx, in.Name))
		})
	register(s, route{id: "put-schedule", method: "PUT", path: each, role: access.Admin, doc: "Create or replace a schedule; changed hours take effect at their next boundary"},
		func(ctx context.Context, in *struct {
			Putting
			Body control.ScheduleBody
		}) (*answer[policy.Schedule], error) {
			b := in.Body
			if err := named(in.Name, b.Name); err != nil {
				return nil, problem(err)
			}
			return ok(s.fleet.PutSchedule(ctx, actor(ctx), policy.Schedule{Name: in.Name, Description: b.Description, Zone: b.Zone,
				Windows: b.Windows, Holidays: b.Holidays, Start: b.Start, GraceMinutes: b.GraceMinutes}, in.Create))
		})
	register(s, route{id: "delete-schedule", method: "DELETE", path: each, role: access.Admin, doc: "Remove a schedule that is not used"},
		func(ctx context.Context, in *RuleName) (*struct{}, error) {
			return nil, problem(s.fleet.DeleteSchedule(ctx, actor(ctx), in.Name))
		})
	register(s, route{id: "apply-schedule", method: "POST", path: each + "/apply", role: access.Admin, doc: "Assign a schedule to workers, or to all that a selector matches, now and later"},
		func(ctx context.Context, in *struct {
			RuleName
			Body control.Apply
		}) (*answer[control.Applied], error) {
			return ok(s.apply(ctx, in.Body, rules.Application{Schedule: &in.Name}))
		})
	register(s, route{id: "schedule-boundaries", method: "GET", path: each + "/boundaries", role: access.Viewer, doc: "When a schedule opens and closes next"},
		func(ctx context.Context, in *struct {
			RuleName
			From  string `query:"from" maxLength:"80" doc:"RFC 3339, 18:00, fri 18:00, tomorrow, 2006-01-02 15:04 or +2h, in UTC or with a zone behind it; now if not given"`
			Limit int    `query:"limit" minimum:"1" maximum:"200" default:"10"`
		}) (*answer[control.Boundaries], error) {
			c, err := s.fleet.Schedule(ctx, in.Name)
			if err != nil {
				return nil, problem(err)
			}
			from := time.Now()
			if in.From != "" {
				if from, err = when.Moment(from.UTC(), in.From); err != nil {
					return nil, problem(invalid("from", err.Error()))
				}
			}
			out := control.Boundaries{Schedule: c.Name, Zone: c.Zone}
			if out.Open, err = c.Open(from); err == nil {
				out.Items, err = c.Boundaries(from, in.Limit)
			}
			return ok(out, err)
		})
}

func (s *Server) overrideRoutes() {
	all := base + "/overrides"
	register(s, route{id: "list-overrides", method: "GET", path: all, role: access.Viewer, doc: "Overrides set by users, in order of creation"},
		func(ctx context.Context, in *struct {
			Ended bool `query:"ended" doc:"Include those that ended, for 60 days"`
		}) (*answer[control.List[control.Exception]], error) {
			l, err := s.fleet.Overrides(ctx, in.Ended)
			if err != nil {
				return nil, problem(err)
			}
			items, err := s.exceptions(ctx, l...)
			return ok(control.List[control.Exception]{Items: items}, err)
		})
	register(s, route{id: "add-override", method: "POST", path: all, role: access.Operator, status: http.StatusOK, doc: "Make an exception with an end: keep running, skip the schedule, freeze, or use another policy"},
		func(ctx context.Context, in *struct{ Body control.NewOverride }) (*answer[control.Exception], error) {
			o, err := overrideOf(time.Now().UTC(), s.fleet.Settings().Zone(), in.Body)
			if err != nil {
				return nil, problem(err)
			}
			return s.exception(ctx)(s.fleet.AddOverride(ctx, actor(ctx), o))
		})
	register(s, route{id: "end-override", method: "DELETE", path: all + "/{name}", role: access.Operator, status: http.StatusOK, doc: "End an exception now"},
		func(ctx context.Context, in *RuleName) (*answer[control.Exception], error) {
			return s.exception(ctx)(s.fleet.EndOverride(ctx, actor(ctx), in.Name))
		})
}

// exceptions returns overrides together with the names of their workers.
func (s *Server) exceptions(ctx context.Context, l ...policy.Override) ([]control.Exception, error) {
	names, out := map[string]string{}, make([]control.Exception, 0, len(l))
	for _, o := range l {
		e := control.Exception{Override: o}
		for _, id := range o.Selector.Workers {
			name, known := names[id]
			if !known {
				w, err := s.fleet.Worker(ctx, id)
				if _, gone := errors.AsType[*failure.NotFound](err); err != nil && !gone {
					return nil, err
				}
				name, names[id] = w.Name, w.Name
			}
			if name != "" && e.WorkerNames == nil {
				e.WorkerNames = map[string]string{}
			}
			if name != "" {
				e.WorkerNames[id] = name
			}
		}
		out = append(out, e)
	}
	return out, nil
}

// exception returns the answer of a command that changed an override.
func (s *Server) exception(ctx context.Context) func(policy.Override, error) (*answer[control.Exception], error) {
	return func(o policy.Override, err error) (*answer[control.Exception], error) {
		if err != nil {
			return nil, problem(err)
		}
		l, err := s.exceptions(ctx, o)
		if err != nil {
			return nil, problem(err)
		}
		return ok(l[0], nil)
	}
}

// overrideOf validates the times of an override. A keep or skip override without an
// end lasts until the end of the day on which it begins, in zone.
func overrideOf(now time.Time, zone *time.Location, n control.NewOverride) (policy.Override, error) {
	o := policy.Override{Kind: n.Kind, Selector: n.Selector, Policy: n.Policy, Reason: n.Reason}
	if n.Selector.All() && !n.All {
		return o, invalid("all", "an empty selector needs all: true")
	}
	var err error
	start := now
	if n.From != "" {
		if o.From, err = when.Moment(now, n.From); err != nil {
			return o, invalid("from", err.Error())
		}
		start = o.From
	}
	if n.Until == "" && n.For == "" && (n.Kind == policy.Keep || n.Kind == policy.Skip) {
		o.Until = when.Midnight(start, zone)
		return o, nil
	}
	if n.Until != "" && n.For == "" {
		start = now // an end without a start is valid
	}
	if o.Until, err = when.End(start, n.Until, n.For); err != nil {
		field := "until"
		if n.For != "" {
			field = "for"
		}
		return o, invalid(field, err.Error())
	}
	return o, nil
}

func (s *Server) budgetRoutes() {
	all, each := base+"/budgets", base+"/budgets/{name}"
	register(s, route{id: "list-budgets", method: "GET", path: all, role: access.Viewer, doc: "Budgets of automatic stops and starts, with their present use"},
		func(ctx context.Context, _ *struct{}) (*answer[control.List[control.BudgetState]], error) {
			l, err := s.fleet.Budgets(ctx)
			if err != nil {
				return nil, problem(err)
			}
			states, err := s.fleet.BudgetStates(ctx)
			out := control.List[control.BudgetState]{Items: []control.BudgetState{}}
			for _, b := range l {
				out.Items = append(out.Items, control.BudgetState{Budget: b, State: states[b.Name]})
			}
			return ok(out, err)
		})
	register(s, route{id: "put-budget", method: "PUT", path: each, role: access.Admin, doc: "Create or replace a budget"},
		func(ctx context.Context, in *struct {
			RuleName
			Body control.BudgetBody
		}) (*answer[policy.Budget], error) {
			b := in.Body
			if err := named(in.Name, b.Name); err != nil {
				return nil, problem(err)
			}
			return ok(s.fleet.PutBudget(ctx, actor(ctx), policy.Budget{Name: in.Name, Description: b.Description, For: b.For, MaxActions: b.MaxActions,
				MaxPercent: b.MaxPercent, PerMinutes: b.PerMinutes, Reasons: b.Reasons, Selector: b.Selector, During: b.During}))
		})
	register(s, route{id: "delete-budget", method: "DELETE", path: each, role: access.Admin, doc: "Remove a budget, or reset the default one"},
		func(ctx context.Context, in *RuleName) (*struct{}, error) {
			return nil, problem(s.fleet.DeleteBudget(ctx, actor(ctx), in.Name))
		})
}
