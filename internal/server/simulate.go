package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/core/savings"
	"lull/internal/fleet"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

// Limits of computations over the past.
const (
	maxSimulated = 35 * 24 * time.Hour
	maxStops     = 200
	maxCompared  = 32 // named policies, if none is given
)

func (s *Server) simulateRoutes() {
	register(s, route{id: "simulate", method: "POST", path: base + "/simulate", role: access.Viewer, status: 200,
		doc: "What policies would have done in a recorded time: pauses, hours, money and false stops"},
		func(ctx context.Context, in *struct{ Body control.Simulate }) (*answer[control.Simulation], error) {
			return ok(s.simulate(ctx, in.Body, unheeded))
		})
	told := route{id: "simulate-told", method: "POST", path: base + "/simulate/progress", role: access.Viewer, status: 200,
		doc: "The same, told as it goes; it ends when the caller goes away"}
	register(s, told, func(_ context.Context, in *struct{ Body control.Simulate }) (*huma.StreamResponse, error) {
		return &huma.StreamResponse{Body: func(hc huma.Context) { s.simulateTold(hc, in.Body) }}, nil
	})
	describe(s, told, "application/jsonl", "One step in each line; the last has the answer, or why there is none")
}

// trial holds what a question about the past needs of a worker, or of a machine
// with an agent, which need not be a worker.
type trial struct {
	w       fleet.Worker
	machine string // of an agent
	tmpl    *fleet.Template
	policy  string // the present one; only if requested
	volumes []savings.Volume
	changes []control.TimelineChange
	off     []evidence.Off
	ended   time.Time // time of termination; zero if it is not terminated
	follow  evidence.Follow
	runs    []*evidence.Trial // one for each policy in question
}

// until returns the end of the question's range, or the worker's termination if
// that is earlier.
func (t *trial) until(to time.Time) time.Time {
	if !t.ended.IsZero() && t.ended.Before(to) {
		return t.ended
	}
	return to
}

// trials returns the workers with their changes since from, and what they were
// before.
func (s *Server) trials(ctx context.Context, q fleet.WorkerFilter, from, to time.Time) (map[string]*trial, error) {
	changes, err := s.changes(ctx, fleet.AuditQuery{From: from})
	if err != nil {
		return nil, err
	}
	q.WithTerminated = true
	lines, _, err := s.roster.All(ctx)
	if err != nil {
		return nil, err
	}
	tmpls := map[string]*fleet.Template{}
	out := map[string]*trial{}
	for _, l := range lines {
		w := l.Worker
		if !q.Matches(&w) {
			continue
		}
		tmpl, known := tmpls[w.TemplateName]
		if !known && w.TemplateName != "" {
			if t, err := s.fleet.Template(ctx, w.TemplateName); err == nil {
				tmpl = &t
			}
			tmpls[w.TemplateName] = tmpl
		}
		if out[w.ID], err = s.trial(ctx, &w, tmpl, changes[w.ID], from, to); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// trial returns the trial of one worker from its changes since from. Without
// changes, it was then as it is now.
func (s *Server) trial(ctx context.Context, w *fleet.Worker, tmpl *fleet.Template, changes []control.TimelineChange, from, to time.Time) (*trial, error) {
	if changes == nil && !runs(string(w.Status)) && w.Status != power.WorkerTerminated {
		before := newStory()
		if err := s.fleet.PowerBefore(ctx, w.ID, from, func(e *fleet.Entry) error { before.add(e); return nil }); err != nil {
			return nil, err
		}
		changes = before.changes[w.ID]
	}
	t := &trial{w: *w, tmpl: tmpl, changes: changes, volumes: volumes(w, tmpl), ended: ended(changes, string(w.Status), from)}
	t.off = offs(w, changes, from, t.until(to))
	return t, nil
}

// volumes returns the volumes that a worker pays for: as read from EC2,
// otherwise those of its template, which are gp3.
func volumes(w *fleet.Worker, tmpl *fleet.Template) []savings.Volume {
	var out []savings.Volume
	for _, v := range w.Volumes {
		out = append(out, savings.Volume{Type: v.Type, GB: float64(v.GB)})
	}
	if out == nil && tmpl != nil && tmpl.Capacity.StorageGB > 0 {
		out = []savings.Volume{{Type: "gp3", GB: float64(tmpl.Capacity.StorageGB)}}
	}
	return out
}

// offs returns the times within [from, to] at which a worker did not run.
func offs(w *fleet.Worker, changes []control.TimelineChange, from, to time.Time) []evidence.Off {
	var out []evidence.Off
	why := func(at time.Time) (automatic bool, held string) {
		for _, c := range changes {
			if c.At.Equal(at) {
				return fleet.Reason(c.Reason).Automatic(), c.Policy
			}
		}
		return w.PauseReason.Automatic(), w.PausePolicy // of the last one
	}
	for _, o := range stops(changes, string(w.Status), to) {
		off := evidence.Off{From: o.from, To: o.to}
		switch {
		case !o.from.IsZero():
			off.Automatic, off.Policy = why(o.from)
		case len(changes) == 0 && w.LastPausedAt != nil && w.Status == power.WorkerStopped:
			off.Automatic, off.Policy = w.PauseReason.Automatic(), w.PausePolicy // since before all that is kept
		}
		if off.From.Before(from) {
			off.From = from
		}
		if off.To.After(to) {
			off.To = to
		}
		if off.From.Before(off.To) {
			out = append(out, off)
		}
	}
	return out
}

// unheeded is a progress function that does nothing.
func unheeded(float64) error { return nil }

// among returns a function that finds the trial of a record by its object.
func among(all map[string]*trial) func(*evidence.Record) *trial {
	return func(r *evidence.Record) *trial { return all[r.Object] }
}

// replay feeds the recorded evidence to all trials. of finds a record's trial
// and may add one. progress gets how far it is.
func (s *Server) replay(ctx context.Context, all map[string]*trial, of func(*evidence.Record) *trial, from, to time.Time, yield func(*trial, evidence.Stretch), tell func(share float64) error) ([]evidence.Missing, error) {
	// The first check after to covers the time until then. What it covers
	// beyond is cut off.
	give := func(t *trial) func(evidence.Stretch) {
		return func(x evidence.Stretch) {
			if end := t.until(to); x.To.After(end) {
				x.To = end
			}
			if x.From.Before(x.To) {
				yield(t, x)
			}
		}
	}
	missing, err := s.recorded(ctx, evidence.Query{From: from, To: to}, func(r evidence.Record) error {
		if ctx.Err() != nil {
			return context.Cause(ctx) // the caller has stopped waiting
		}
		if err := tell(min(1, max(0, float64(r.At.Sub(from))/float64(to.Sub(from))))); err != nil {
			return err
		}
		if t := of(&r); t != nil && !t.follow.Reached(to) {
			t.follow.Add(&r, give(t))
		}
		return nil
	})
	for _, t := range all {
		t.follow.End(to, give(t))
	}
	if missing == nil {
		missing = []evidence.Missing{}
	}
	return missing, err
}

// candidate is a policy on trial.
type candidate struct {
	idle.Policy
	never    bool           // it never pauses for idleness
	snooze   *idle.Duration // nil keeps what was in force, like warn
	warn     *idle.Duration
	limits   map[string]float64 // thresholds of agents' signals
	hours    func(time.Time) *policy.Standing
	schedule string
}

// wanted returns the candidate that a requested policy stands for.
func (s *Server) wanted(w control.SimulatedPolicy, of string) (candidate, error) {
	if err := fits(&w, of); err != nil {
		return candidate{}, err
	}
	rules := s.fleet.Rules()
	base, known := rules.Policies[cmp.Or(w.Policy, w.Name)]
	switch {
	case w.Policy == "" && w.TimeoutMinutes > 0:
		base = policy.Named{} // explicit values
	case w.Policy != "" && !known:
		return candidate{}, invalid("policies", "there is no policy "+w.Policy)
	case !known || base.IdleTimeoutMinutes == nil && w.TimeoutMinutes == 0:
		return candidate{}, invalid("policies", cmp.Or(w.Policy, w.Name)+" is no policy with an idle timeout, and timeout_minutes is not given")
	}
	minutes := func(given, named *int) *idle.Duration {
		if given = cmp.Or(given, named); given == nil {
			return nil
		}
		d := idle.Duration(time.Duration(*given) * time.Minute)
		return &d
	}
	timeout := base.IdleTimeoutMinutes
	if w.TimeoutMinutes > 0 {
		timeout = &w.TimeoutMinutes
	}
	c := candidate{never: base.Enabled != nil && !*base.Enabled, snooze: minutes(w.SnoozeMinutes, base.SnoozeMinutes), warn: minutes(w.WarnBeforeMinutes, base.WarnBeforeMinutes),
		Policy: idle.Policy{Name: w.Name, Action: w.Action, Timeout: *minutes(timeout, nil), Signals: base.ActivitySources}}
	if base.PauseAction != nil && c.Action == "" {
		c.Action = *base.PauseAction
	}
	if len(w.ActivitySources) > 0 {
		c.Signals = w.ActivitySources
	}
	if of == ofAgents { // they have their own signals, and follow no schedule
		c.Signals, c.limits = w.Signals, w.Thresholds
		return c, nil
	}
	name := w.Schedule
	if name == nil {
		name = base.Schedule
	}
	err := c.follow(rules, name, base.Force != nil && *base.Force)
	return c, err
}

// follow gives a candidate its schedule; nil keeps what was in force.
func (c *candidate) follow(rules *policy.Set, name *string, force bool) error {
	switch {
	case name == nil:
		return nil
	case *name == "":
		c.hours = func(time.Time) *policy.Standing { return nil }
		return nil
	}
	is, known := rules.Schedules[*name]
	if !known {
		return invalid("policies", "there is no schedule "+*name)
	}
	c.schedule = *name
	c.hours = func(at time.Time) *policy.Standing {
		st, err := is.Standing(at, time.Time{}, nil)
		if err != nil {
			return nil // it was validated when it was written
		}
		st.Force = force
		return &st
	}
	return nil
}

func (s *Server) simulate(ctx context.Context, in control.Simulate, tell func(share float64) error) (control.Simulation, error) {
	out := control.Simulation{Policies: []control.SimulatedOutcome{}, Workers: map[string]string{}, WindowMinutes: in.WindowMinutes}
	if out.WindowMinutes == 0 {
		out.WindowMinutes = int(evidence.FalseStop.Minutes())
	}
	from, err := bound("from", in.From)
	if err != nil {
		return out, err
	}
	to, err := bound("to", in.To)
	if err != nil {
		return out, err
	}
	if out.From, out.To, err = period(from, to, time.Now(), 7*24*time.Hour, maxSimulated); err != nil {
		return out, err
	}
	if len(in.Policies) == 0 {
		in.Policies = s.everyPolicy()
	}
	policies := make([]candidate, len(in.Policies))
	for i, p := range in.Policies {
		if policies[i], err = s.wanted(p, in.Of); err != nil {
			return out, err
		}
	}
	q := fleet.WorkerFilter{Region: in.Region, Tags: in.Tags}
	all, err := s.trials(ctx, q, out.From, out.To)
	if err != nil {
		return out, err
	}
	of, each := among(all), func(t *trial, id string) {
		for i := range policies {
			c := &policies[i]
			t.runs = append(t.runs, &evidence.Trial{Object: id, Policy: &c.Policy, Snooze: c.snooze, WarnBefore: c.warn, Never: c.never, Schedule: c.hours, Off: t.off, From: out.From, To: t.until(out.To), Window: time.Duration(out.WindowMinutes) * time.Minute})
		}
	}
	if in.Of == ofAgents {
		all, of = s.agentTrials(all, &in, policies, each)
	} else {
		for id, t := range all {
			if len(in.WorkerIDs) > 0 && !slices.Contains(in.WorkerIDs, id) {
				delete(all, id)
				continue
			}
			each(t, id)
		}
	}
	first := out.To // check of any of them
	if out.Missing, err = s.replay(ctx, all, of, out.From, out.To, func(t *trial, x evidence.Stretch) {
		if x.From.Before(first) {
			first = x.From
		}
		if t.machine != "" && untold(x.Check) {
			x.Known = false
		}
		for _, r := range t.runs {
			r.Add(x)
		}
	}, tell); err != nil {
		return out, err
	}
	out.Missing = append(unrecorded(all, in.Of, out.From, out.To, first), out.Missing...)
	for i := range policies {
		out.Policies = append(out.Policies, s.outcome(&policies[i], i, all))
	}
	names := map[string]string{}
	for id, t := range all {
		if t.machine != "" {
			id = t.machine
		}
		names[id] = cmp.Or(t.w.Name, t.machine)
	}
	for _, o := range out.Policies {
		for _, x := range o.Stops {
			out.Workers[x.Object] = names[x.Object]
		}
	}
	out.Recommended = recommended(out.Policies)
	return out, nil
}

// unrecorded returns the time before first, of which no check of any trial is
// recorded.
func unrecorded(all map[string]*trial, of string, from, to, first time.Time) []evidence.Missing {
	why := "no check is recorded"
	switch {
	case len(all) == 0 && of == ofAgents:
		why = "no machine with an agent that was recorded matches"
	case len(all) == 0:
		why = "no worker matches"
	}
	if first.Sub(from) < time.Minute && first.Before(to) {
		return []evidence.Missing{}
	}
	return []evidence.Missing{{From: from, To: first, Why: why}}
}

// tellEvery is the minimum interval between two progress messages of a
// simulation.
const tellEvery = 100 * time.Millisecond

// simulateTold streams a simulation's progress. A fault before the first
// message is answered as a problem.
func (s *Server) simulateTold(hc huma.Context, in control.Simulate) {
	_, w := humago.Unwrap(hc)
	answer, begun := http.NewResponseController(w), false
	line := func(step control.SimulateStep) error {
		if !begun {
			begun = true
			hc.SetHeader("Content-Type", "application/jsonl")
			hc.SetStatus(http.StatusOK)
		}
		// A response that is stored for its idempotency key is written only at
		// the end.
		if err := answer.SetWriteDeadline(time.Now().Add(sendWithin)); err != nil && !errors.Is(err, http.ErrNotSupported) {
			return fmt.Errorf("cannot bound the answer: %w", err)
		}
		if err := json.NewEncoder(w).Encode(step); err != nil {
			return fmt.Errorf("cannot tell how far the simulation is: %w", err)
		}
		if err := answer.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
			return fmt.Errorf("cannot tell how far the simulation is: %w", err)
		}
		return nil
	}
	var last time.Time
	out, err := s.simulate(hc.Context(), in, func(share float64) error {
		if time.Since(last) < tellEvery {
			return nil
		}
		last = time.Now()
		return line(control.SimulateStep{Share: share})
	})
	switch {
	case err == nil:
		err = line(control.SimulateStep{Share: 1, Simulation: &out})
	case !begun:
		refuse(hc, problem(err))
		return
	default:
		err = errors.Join(err, line(control.SimulateStep{Fault: err.Error()}))
	}
	if err != nil {
		s.log.Debug("a simulation was not told to its end", "err", err)
	}
}

func inMinutes(d *idle.Duration) *float64 {
	if d == nil {
		return nil
	}
	m := time.Duration(*d).Minutes()
	return &m
}

// outcome sums up one policy over all workers.
func (s *Server) outcome(p *candidate, i int, all map[string]*trial) control.SimulatedOutcome {
	o := control.SimulatedOutcome{Name: p.Name, TimeoutMinutes: time.Duration(p.Timeout).Minutes(), Snooze: inMinutes(p.snooze), WarnBefore: inMinutes(p.warn), Schedule: p.schedule, Stops: []evidence.Stop{}}
	var uses []savings.Use
	for _, t := range all {
		r := t.runs[i]
		r.End()
		begun := slices.DeleteFunc(slices.Clone(r.Stops), func(x evidence.Stop) bool { return x.From.Before(r.From) })
		o.Pauses += len(begun)
		for _, x := range begun {
			if x.False {
				o.FalseStops++
			}
		}
		o.UnknownHours += r.Unknown.Hours()
		o.Stops = append(o.Stops, begun...)
		u := t.use()
		u.Running, u.Avoided, u.Other = r.Running, r.Paused, r.Other
		uses = append(uses, u)
	}
	_, o.Sum = s.prices.Group(uses, func(savings.Use) (string, string) { return "", "" })
	slices.SortFunc(o.Stops, func(a, b evidence.Stop) int {
		if a.False != b.False {
			if a.False {
				return -1
			}
			return 1
		}
		return a.From.Compare(b.From)
	})
	if len(o.Stops) > maxStops {
		o.Stops = o.Stops[:maxStops]
	}
	return o
}

func (t *trial) use() savings.Use {
	if t.w.ID == "" {
		return savings.Use{Worker: t.machine, Name: t.machine, Region: t.w.AWSRegion} // its cost is unknown
	}
	return savings.Use{Worker: t.w.ID, Name: t.w.Name, Region: t.w.AWSRegion, InstanceType: t.w.InstanceType, Policy: t.policy, Tags: t.w.Tags, Volumes: t.volumes}
}

// recommended returns, among the policies without a false stop, the one that
// saves the most money or, unless the money of each is known, the most hours;
// empty if none saves anything.
func recommended(l []control.SimulatedOutcome) string {
	var fit []control.SimulatedOutcome
	money := true
	for _, o := range l {
		if o.FalseStops == 0 && o.AvoidedHours > 0 {
			fit = append(fit, o)
			money = money && o.Sum.Saved != nil
		}
	}
	if len(fit) == 0 {
		return ""
	}
	return slices.MaxFunc(fit, func(a, b control.SimulatedOutcome) int {
		byHours := cmp.Compare(a.AvoidedHours, b.AvoidedHours)
		if money {
			return cmp.Or(cmp.Compare(*a.Sum.Saved, *b.Sum.Saved), byHours)
		}
		return byHours
	}).Name
}

// everyPolicy returns the named policies with an idle timeout, by name.
func (s *Server) everyPolicy() []control.SimulatedPolicy {
	var out []control.SimulatedPolicy
	for name, p := range s.fleet.Rules().Policies {
		if p.IdleTimeoutMinutes != nil {
			out = append(out, control.SimulatedPolicy{Name: name})
		}
	}
	slices.SortFunc(out, func(a, b control.SimulatedPolicy) int { return cmp.Compare(a.Name, b.Name) })
	return out[:min(len(out), maxCompared)]
}
