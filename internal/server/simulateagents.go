package server

import (
	"fmt"
	"math"
	"slices"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/protocol/control"
	"lull/internal/server/agents"
)

// ofAgents selects machines as their agents saw themselves.
const ofAgents = "agents"

// otherwise are agents' guards that a policy on trial removes: that no idle
// timeout is set, and that another program decides.
var otherwise = []idle.Code{"no_policy", "pause_holder"}

// fits checks that a policy can be tried on these machines.
func fits(w *control.SimulatedPolicy, of string) error {
	if of != ofAgents {
		if w.Signals != nil || w.Thresholds != nil {
			return invalid("policies", "signals and thresholds are of agents: ask for of agents")
		}
		return nil
	}
	if w.ActivitySources != nil || w.Schedule != nil {
		return invalid("policies", "agents have neither activity_sources nor a schedule: name signals")
	}
	if len(w.Thresholds) > 32 {
		return invalid("policies", "there are more than 32 thresholds")
	}
	for name, v := range w.Thresholds {
		if name == "" || len(name) > 64 || v <= 0 || math.IsInf(v, 0) || math.IsNaN(v) {
			return invalid("policies", fmt.Sprintf("the threshold of %.64q is not above 0", name))
		}
	}
	return nil
}

// agentTrials creates the trials of machines with agents as their records
// arrive. Machines that are workers get the workers' power, price and tags. The
// others are known only by their own reports, and have no tags.
func (s *Server) agentTrials(workers map[string]*trial, in *control.Simulate, policies []candidate, each func(*trial, string)) (map[string]*trial, func(*evidence.Record) *trial) {
	byMachine := map[string]*trial{}
	for id, t := range workers {
		byMachine[agents.Object(id)] = t
		if t.w.EC2InstanceID != "" {
			byMachine[agents.Object(t.w.EC2InstanceID)] = t
		}
	}
	all, passed := map[string]*trial{}, map[string]bool{}
	return all, func(r *evidence.Record) *trial {
		machine, agent := agents.Machine(r.Object)
		if t := all[r.Object]; !agent || t != nil || passed[r.Object] {
			return t
		}
		w := byMachine[r.Object]
		selected := w != nil && (len(in.WorkerIDs) == 0 || slices.Contains(in.WorkerIDs, w.w.ID)) ||
			w == nil && len(in.WorkerIDs) == 0 && len(in.Tags) == 0 && (in.Region == "" || r.Region == in.Region)
		if !selected || len(in.Machines) > 0 && !slices.Contains(in.Machines, machine) {
			passed[r.Object] = true
			return nil
		}
		t := &trial{machine: machine}
		if w != nil {
			t.w, t.volumes, t.off, t.ended = w.w, w.volumes, w.off, w.ended
		} else {
			t.w.AWSRegion = r.Region
		}
		each(t, machine)
		for i, x := range t.runs {
			x.Measured, x.Thresholds, x.Ignored = true, policies[i].limits, otherwise
		}
		all[r.Object] = t
		return t
	}
}

// untold reports whether an agent did not report its policy.
func untold(r *evidence.Record) bool {
	return r != nil && slices.ContainsFunc(r.Evidence.Guards, func(b idle.Block) bool { return b.Code == agents.CodePolicyUntold })
}
