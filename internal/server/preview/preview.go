// Package preview simulates policies over a recorded period, for workers or for
// machines with an agent: which pauses, hours, money and false stops each policy
// would have caused.
//
// It replays the recorded checks under each policy; see evidence.Trial. Time without
// checks counts as unknown, never as paused, and money is reported only where every
// price is known. A policy with a false stop is never recommended. Errors:
// *failure.Invalid for a question that cannot be answered, and those of the records.
// Nothing is changed.
package preview

import (
	"cmp"
	"context"
	"slices"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/savings"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/history"
)

// Records reads the past of workers. *history.Reader implements it.
type Records interface {
	Workers(ctx context.Context, q worker.Filter, from, to time.Time) (map[string]*history.Past, error)
	Replay(ctx context.Context, all map[string]*history.Past, of func(*evidence.Record) *history.Past, from, to time.Time,
		yield func(*history.Past, evidence.Stretch), progress func(share float64) error) ([]evidence.Missing, error)
}

// Preview holds the sources of simulations.
type Preview struct {
	Records Records
	Rules   *policy.Set
	Prices  savings.Prices
}

// Limits of a simulation: the longest period, the default period, and the size of an
// answer.
const (
	Longest     = 35 * 24 * time.Hour
	Usual       = 7 * 24 * time.Hour
	maxStops    = 200
	maxCompared = 32 // number of named policies compared if the request gives none
)

// candidate is a policy to simulate.
type candidate struct {
	idle.Policy
	never    bool           // it never pauses a worker for idleness
	snooze   *idle.Duration // nil keeps the recorded value, as for warn
	warn     *idle.Duration
	limits   map[string]float64 // thresholds of agents' signals
	hours    func(time.Time) *policy.ScheduleState
	schedule string
}

// wanted returns the candidate for a policy of the request.
func (v *Preview) wanted(w control.SimulatedPolicy, of string) (candidate, error) {
	if err := fits(&w, of); err != nil {
		return candidate{}, err
	}
	base, known := v.Rules.Policies[cmp.Or(w.Policy, w.Name)]
	switch {
	case w.Policy == "" && w.TimeoutMinutes > 0:
		base = policy.Named{} // the request gives all values itself
	case w.Policy != "" && !known:
		return candidate{}, invalid("there is no policy " + w.Policy)
	case !known || base.IdleTimeoutMinutes == nil && w.TimeoutMinutes == 0:
		return candidate{}, invalid(cmp.Or(w.Policy, w.Name) + " is not a policy with an idle timeout: give timeout_minutes")
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
	if of == ofAgents { // agents have their own signals and no schedule
		c.Signals, c.limits = w.Signals, w.Thresholds
		return c, nil
	}
	name := w.Schedule
	if name == nil {
		name = base.Schedule
	}
	err := c.follow(v.Rules, name, base.Force != nil && *base.Force)
	return c, err
}

// follow sets the candidate's schedule to the one called name; nil keeps the recorded
// schedule.
func (c *candidate) follow(rules *policy.Set, name *string, force bool) error {
	switch {
	case name == nil:
		return nil
	case *name == "":
		c.hours = func(time.Time) *policy.ScheduleState { return nil }
		return nil
	}
	is, known := rules.Schedules[*name]
	if !known {
		return invalid("there is no schedule " + *name)
	}
	c.schedule = *name
	c.hours = func(at time.Time) *policy.ScheduleState {
		st, err := is.State(at, time.Time{}, nil)
		if err != nil {
			return nil // the schedule was validated when it was written
		}
		st.Force = force
		return &st
	}
	return nil
}

// Run simulates the policies of in over [from, to), a period that history.Period has
// validated; the period in in is ignored. progress gets the share of the records
// read, from 0 to 1; an error of it ends the simulation.
func (v *Preview) Run(ctx context.Context, in control.Simulate, from, to time.Time, progress func(share float64) error) (control.Simulation, error) {
	out := control.Simulation{From: from, To: to, Policies: []control.SimulatedOutcome{}, Workers: map[string]string{}, WindowMinutes: in.WindowMinutes}
	if out.WindowMinutes == 0 {
		out.WindowMinutes = int(evidence.FalseStop.Minutes())
	}
	var err error
	if len(in.Policies) == 0 {
		in.Policies = everyPolicy(v.Rules)
	}
	policies := make([]candidate, len(in.Policies))
	for i, p := range in.Policies {
		if policies[i], err = v.wanted(p, in.Of); err != nil {
			return out, err
		}
	}
	all, err := v.Records.Workers(ctx, worker.Filter{Region: in.Region, Tags: in.Tags}, from, to)
	if err != nil {
		return out, err
	}
	trials := map[*history.Past][]*evidence.Trial{} // one trial per policy
	of, each := func(r *evidence.Record) *history.Past { return all[r.Object] }, func(p *history.Past, id string) {
		for i := range policies {
			c := &policies[i]
			trials[p] = append(trials[p], &evidence.Trial{Object: id, Policy: &c.Policy, Snooze: c.snooze, WarnBefore: c.warn, Never: c.never, Schedule: c.hours, Off: p.Off, From: from, To: p.Until(to), Window: time.Duration(out.WindowMinutes) * time.Minute})
		}
	}
	if in.Of == ofAgents {
		all, of = machines(all, &in, func(p *history.Past) {
			each(p, p.Machine)
			for i, x := range trials[p] {
				x.Measured, x.Thresholds, x.Ignored = true, policies[i].limits, otherwise
			}
		})
	} else {
		for id, p := range all {
			if len(in.WorkerIDs) > 0 && !slices.Contains(in.WorkerIDs, id) {
				delete(all, id)
				continue
			}
			each(p, id)
		}
	}
	first := to // time of the first recorded check
	if out.Missing, err = v.Records.Replay(ctx, all, of, from, to, func(p *history.Past, x evidence.Stretch) {
		if x.From.Before(first) {
			first = x.From
		}
		if p.Machine != "" && untold(x.Check) {
			x.Known = false
		}
		for _, r := range trials[p] {
			r.Add(x)
		}
	}, progress); err != nil {
		return out, err
	}
	out.Missing = append(unrecorded(len(all), in.Of, from, to, first), out.Missing...)
	for i := range policies {
		out.Policies = append(out.Policies, v.outcome(&policies[i], i, trials))
	}
	names := map[string]string{}
	for id, p := range all {
		names[cmp.Or(p.Machine, id)] = cmp.Or(p.Worker.Name, p.Machine)
	}
	for _, o := range out.Policies {
		for _, x := range o.Stops {
			out.Workers[x.Object] = names[x.Object]
		}
	}
	out.Recommended = recommended(out.Policies)
	return out, nil
}

// unrecorded returns the period before first as missing, if first is after from.
func unrecorded(matched int, of string, from, to, first time.Time) []evidence.Missing {
	why := "no check is recorded"
	switch {
	case matched == 0 && of == ofAgents:
		why = "no machine with an agent that was recorded matches"
	case matched == 0:
		why = "no worker matches"
	}
	if first.Sub(from) < time.Minute && first.Before(to) {
		return []evidence.Missing{}
	}
	return []evidence.Missing{{From: from, To: first, Why: why}}
}

func inMinutes(d *idle.Duration) *float64 {
	if d == nil {
		return nil
	}
	m := time.Duration(*d).Minutes()
	return &m
}

// outcome sums up the trials of one policy.
func (v *Preview) outcome(c *candidate, i int, trials map[*history.Past][]*evidence.Trial) control.SimulatedOutcome {
	o := control.SimulatedOutcome{Name: c.Name, TimeoutMinutes: time.Duration(c.Timeout).Minutes(), Snooze: inMinutes(c.snooze), WarnBefore: inMinutes(c.warn), Schedule: c.schedule, Stops: []evidence.Stop{}}
	var uses []savings.Use
	for p, runs := range trials {
		r := runs[i]
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
		u := p.Use()
		u.Running, u.Avoided, u.Other = r.Running, r.Paused, r.Other
		uses = append(uses, u)
	}
	_, o.Sum = v.Prices.Group(uses, func(savings.Use) (string, string) { return "", "" })
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

// recommended returns the policy that saves the most, among those without a false
// stop. Money decides or, if the money of a policy is unknown, hours. It returns ""
// if no policy saves anything.
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
func everyPolicy(rules *policy.Set) []control.SimulatedPolicy {
	var out []control.SimulatedPolicy
	for name, p := range rules.Policies {
		if p.IdleTimeoutMinutes != nil {
			out = append(out, control.SimulatedPolicy{Name: name})
		}
	}
	slices.SortFunc(out, func(a, b control.SimulatedPolicy) int { return cmp.Compare(a.Name, b.Name) })
	return out[:min(len(out), maxCompared)]
}

func invalid(detail string) error { return &failure.Invalid{Field: "policies", Detail: detail} }
