package preview

import (
	"fmt"
	"math"
	"slices"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/protocol/control"
	"lull/internal/server/agents"
	"lull/internal/server/history"
)

// ofAgents is the value of Of that simulates machines from their agents' records.
const ofAgents = "agents"

// otherwise are the agents' guards that do not apply under a simulated policy: that
// no idle timeout is set, and that another program decides.
var otherwise = []idle.Code{"no_policy", "pause_holder"}

// fits checks that a policy can be simulated for the objects of kind of.
func fits(w *control.SimulatedPolicy, of string) error {
	if of != ofAgents {
		if w.Signals != nil || w.Thresholds != nil {
			return invalid("signals and thresholds apply to agents only: set \"of\" to agents")
		}
		return nil
	}
	if w.ActivitySources != nil || w.Schedule != nil {
		return invalid("agents have neither activity_sources nor a schedule: name signals")
	}
	if len(w.Thresholds) > 32 {
		return invalid("there are more than 32 thresholds")
	}
	for name, v := range w.Thresholds {
		if name == "" || len(name) > 64 || v <= 0 || math.IsInf(v, 0) || math.IsNaN(v) {
			return invalid(fmt.Sprintf("the threshold of %.64q must be above 0", name))
		}
	}
	return nil
}

// machines returns an empty map of pasts and the function that fills it while records
// arrive. That function returns the past of a record's machine, or nil if the machine
// was not requested; it calls each with every new past. A machine that is a worker
// has the worker's power, price and tags. Other machines are known only from their
// own reports, and have no tags.
func machines(workers map[string]*history.Past, in *control.Simulate, each func(*history.Past)) (map[string]*history.Past, func(*evidence.Record) *history.Past) {
	byMachine := map[string]*history.Past{}
	for id, p := range workers {
		byMachine[agents.Object(id)] = p
		if p.Worker.EC2InstanceID != "" {
			byMachine[agents.Object(p.Worker.EC2InstanceID)] = p
		}
	}
	all, passed := map[string]*history.Past{}, map[string]bool{}
	return all, func(r *evidence.Record) *history.Past {
		machine, agent := agents.Machine(r.Object)
		if p := all[r.Object]; !agent || p != nil || passed[r.Object] {
			return p
		}
		w := byMachine[r.Object]
		selected := w != nil && (len(in.WorkerIDs) == 0 || slices.Contains(in.WorkerIDs, w.Worker.ID)) ||
			w == nil && len(in.WorkerIDs) == 0 && len(in.Tags) == 0 && (in.Region == "" || r.Region == in.Region)
		if !selected || len(in.Machines) > 0 && !slices.Contains(in.Machines, machine) {
			passed[r.Object] = true
			return nil
		}
		p := &history.Past{Machine: machine}
		if w != nil {
			p.Worker, p.Volumes, p.Off, p.Ended = w.Worker, w.Volumes, w.Off, w.Ended
		} else {
			p.Worker.AWSRegion = r.Region
		}
		each(p)
		all[r.Object] = p
		return p
	}
}

// untold reports whether the agent did not report its policy.
func untold(r *evidence.Record) bool {
	return r != nil && slices.ContainsFunc(r.Evidence.Guards, func(b idle.Block) bool { return b.Code == agents.CodePolicyUntold })
}
