package project

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/protocol/hostctl"
)

// Labels of an instance that lull up has created.
const (
	labelProject = "lull.project"
	labelService = "lull.service"
	labelApplied = "lull.applied" // digest of each setting as last applied
)

// action is an operation on an instance in a plan.
type action string

const (
	create    action = "create"
	change    action = "change"  // possible without recreating the instance
	replace   action = "replace" // recreate the instance with new settings
	start     action = "start"
	adopt     action = "adopt" // a container that is running already
	unchanged action = "unchanged"
	remove    action = "remove"
	orphan    action = "orphan" // an instance of the project that is no longer in its file; left alone
)

// step is one line of a plan.
type step struct {
	Action   action   `json:"action"`
	Service  string   `json:"service"`
	Instance string   `json:"instance"`
	State    string   `json:"state,omitempty"`   // state before the step
	Changed  []string `json:"changed,omitempty"` // names of the settings that change
	Error    string   `json:"error,omitempty"`

	spec   instance.Spec
	change hostctl.Change
	after  []string
}

// settings returns the fields of a spec that are set, in the API's JSON. Those that
// name the instance are left out.
func settings(s instance.Spec) map[string]json.RawMessage {
	data, err := json.Marshal(s)
	fields := map[string]json.RawMessage{}
	if err == nil {
		err = json.Unmarshal(data, &fields)
	}
	if err != nil {
		panic(err) // impossible: a spec can always be encoded
	}
	delete(fields, "name")
	if len(s.Labels) == 0 {
		delete(fields, "labels")
	}
	return fields
}

// digests returns the value of labelApplied: a digest of each setting. The digests do
// not reveal environment variables.
func digests(s instance.Spec) string {
	fields := settings(s)
	parts := make([]string, 0, len(fields))
	for _, k := range slices.Sorted(maps.Keys(fields)) {
		sum := sha256.Sum256(append([]byte(k+"="), fields[k]...))
		parts = append(parts, k+":"+hex.EncodeToString(sum[:5]))
	}
	return strings.Join(parts, ",")
}

// labeled returns s with the labels that mark it as part of the project.
func labeled(project, service string, s instance.Spec) instance.Spec {
	applied := digests(s)
	s.Labels = maps.Clone(s.Labels)
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	s.Labels[labelProject], s.Labels[labelService], s.Labels[labelApplied] = project, service, applied
	return s
}

// differing returns the names of settings that differ from those last applied.
func differing(applied string, s instance.Spec) (names []string) {
	was := map[string]bool{}
	for part := range strings.SplitSeq(applied, ",") {
		was[part] = true
	}
	for part := range strings.SplitSeq(digests(s), ",") {
		name, _, _ := strings.Cut(part, ":")
		if !was[part] {
			names = append(names, name)
		}
		maps.DeleteFunc(was, func(p string, _ bool) bool { return strings.HasPrefix(p, name+":") })
	}
	for part := range was { // these were set before and are not set now
		if name, _, ok := strings.Cut(part, ":"); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// drifted returns the names of settings that a user has changed since they were
// applied, as far as the host reports them.
func drifted(o hostctl.Instance, s instance.Spec) (names []string) {
	differs := func(name string, set bool, want idle.Duration, got float64) {
		if set && time.Duration(want).Seconds() != got {
			names = append(names, name)
		}
	}
	if s.PauseAfter != nil {
		differs("pause_after", true, *s.PauseAfter, o.PauseAfter)
	}
	if s.StopAfter != nil {
		differs("stop_after", true, *s.StopAfter, o.StopAfter)
	}
	differs("reclaim_after", s.ReclaimAfter != 0, s.ReclaimAfter, o.ReclaimAfter)
	differs("hibernate_after", s.HibernateAfter != 0, s.HibernateAfter, o.HibernateAfter)
	if s.IdlePolicy != "" && s.IdlePolicy != o.IdlePolicy {
		names = append(names, "idle_policy")
	}
	if s.WakeFromStopped != nil && *s.WakeFromStopped != o.Wakes {
		names = append(names, "wake_from_stopped")
	}
	return names
}

// changeOf returns the change that sets the named settings to those of s; false if
// one of them cannot be changed on an existing instance.
func changeOf(names []string, s instance.Spec) (c hostctl.Change, ok bool) {
	for _, name := range names {
		switch name {
		case "pause_after":
			c.PauseAfter, ok = s.PauseAfter, s.PauseAfter != nil
		case "stop_after":
			c.StopAfter, ok = s.StopAfter, s.StopAfter != nil
		case "wake_from_stopped":
			c.WakeFromStopped, ok = s.WakeFromStopped, s.WakeFromStopped != nil
		case "reclaim_after":
			c.ReclaimAfter, ok = &s.ReclaimAfter, true
		case "hibernate_after":
			c.HibernateAfter, ok = &s.HibernateAfter, true
		case "quiet_connection_after":
			c.QuietConnectionAfter, ok = &s.QuietConnectionAfter, true
		case "stop_grace":
			c.StopGrace, ok = &s.StopGrace, true
		case "idle_policy":
			c.IdlePolicy, ok = &s.IdlePolicy, true
		case "restart":
			c.Restart, ok = &s.Restart, true
		case "labels":
			ok = true // the loop below sets all of them
		default:
			ok = false
		}
		if !ok {
			return c, false
		}
	}
	return c, true
}

// plan compares a project with the instances of the host and returns the steps to
// take. only names the services to consider; empty means all.
func plan(p *project, now []hostctl.Instance, only []string, removeOrphans bool) ([]step, error) {
	byName := map[string]hostctl.Instance{}
	for _, o := range now {
		byName[o.Name] = o
	}
	chosen, err := p.choose(only)
	if err != nil {
		return nil, err
	}
	var steps []step
	mine := map[string]bool{}
	for _, s := range p.services {
		mine[s.spec.Name] = true
		if !chosen[s.name] {
			continue
		}
		o, exists := byName[s.spec.Name]
		st := step{Action: create, Service: s.name, Instance: s.spec.Name, spec: labeled(p.name, s.name, s.spec), after: s.after}
		if exists {
			if o.Labels[labelProject] != p.name || o.Labels[labelService] != s.name {
				return nil, fmt.Errorf("cannot create %s: an instance with this name exists that lull up did not create; remove it with lull rm %s, or change name: in the file", s.spec.Name, s.spec.Name)
			}
			st.State = o.State
			st.Changed = differing(o.Labels[labelApplied], s.spec)
			for _, name := range drifted(o, s.spec) {
				if !slices.Contains(st.Changed, name) {
					st.Changed = append(st.Changed, name)
				}
			}
			var fits bool
			switch st.change, fits = changeOf(st.Changed, s.spec); {
			case len(st.Changed) > 0 && fits:
				st.Action, st.change.Labels = change, st.spec.Labels
			case len(st.Changed) > 0:
				st.Action = replace
			case rests(o):
				st.Action = start
			default:
				st.Action = unchanged
			}
		}
		steps = append(steps, st)
	}
	for _, o := range now {
		if o.Labels[labelProject] != p.name || mine[o.Name] || len(only) > 0 {
			continue
		}
		st := step{Action: orphan, Service: o.Labels[labelService], Instance: o.Name, State: o.State}
		if removeOrphans {
			st.Action = remove
		}
		steps = append(steps, st)
	}
	return steps, nil
}

// rests reports whether an instance is stopped and nothing will start it.
func rests(o hostctl.Instance) bool {
	return o.State == string(power.Stopped) && !o.StartsOnConnection && o.RestartAt == nil
}

// choose returns the named services and their dependencies; if none is named, all
// services.
func (p *project) choose(only []string) (map[string]bool, error) {
	chosen := map[string]bool{}
	for _, name := range only {
		if !slices.ContainsFunc(p.services, func(s member) bool { return s.name == name }) {
			return nil, fmt.Errorf("cannot find the service %s in the file", name)
		}
		chosen[name] = true
	}
	for _, s := range slices.Backward(p.services) { // backward, because dependencies come first
		if len(only) == 0 {
			chosen[s.name] = true
		}
		if chosen[s.name] {
			for _, d := range s.after {
				chosen[d] = true
			}
		}
	}
	return chosen, nil
}

// teardown returns the plan of lull down: it removes every instance of a project,
// each before its dependencies. p determines the order and may be nil.
func teardown(name string, p *project, now []hostctl.Instance) (steps []step) {
	rank := map[string]int{}
	if p != nil {
		for n, s := range p.services {
			rank[s.name] = n + 1
		}
	}
	for _, o := range now {
		if o.Labels[labelProject] == name {
			steps = append(steps, step{Action: remove, Service: o.Labels[labelService], Instance: o.Name, State: o.State})
		}
	}
	slices.SortStableFunc(steps, func(a, b step) int { return rank[b.Service] - rank[a.Service] })
	return steps
}
