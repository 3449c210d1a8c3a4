// Package policy decides which rules apply to a worker: named policies,
// groups, schedules, overrides and budgets.
//
// A Set holds every rule. Set.Resolve layers them over the fleet's settings for
// one worker at one moment, weakest first:
//
//	settings < default < template < group < policy < worker < override
//
// The result records the origin of every value; Resolved.Idle converts it into
// the idle engine's policy. A Schedule states when workers run, a Budget how
// many are stopped or started per period.
//
// The package is pure: it has no clock and does no I/O except to load time
// zones. Package fleet stores the rules and checks who may change them;
// internal/controller acts on them.
package policy

import (
	"maps"
	"slices"
	"time"
)

// Stamp records who last changed an object, and when. The store fills it in.
type Stamp struct {
	UpdatedAt time.Time `json:"updated_at,omitzero"`
	UpdatedBy string    `json:"updated_by,omitempty"`
}

// Values are the settings of one layer. Nil means that the layer does not set the
// value.
type Values struct {
	Enabled              *bool    `json:"enabled,omitempty"` // whether idleness leads to a pause
	IdleTimeoutMinutes   *int     `json:"idle_timeout_minutes,omitempty"`
	WarnBeforeMinutes    *int     `json:"warn_before_minutes,omitempty"` // 0 pauses without a warning
	CheckIntervalMinutes *int     `json:"check_interval_minutes,omitempty"`
	SnoozeMinutes        *int     `json:"snooze_minutes,omitempty"`   // after a confirmed resume
	PauseAction          *string  `json:"pause_action,omitempty"`     // stop, hibernate, auto
	ActivitySources      []string `json:"activity_sources,omitempty"` // cml, agent, cloudwatch
	// Signals lists which of the agent's seven signals count.
	Signals []string `json:"signals,omitempty"`
	// Thresholds are the levels at which signals count as active: percent
	// for cpu and gpu, bytes per minute for network and disk.
	Thresholds map[string]float64 `json:"thresholds,omitempty"`
	// AcceptedRisks lists preflight codes that do not block.
	AcceptedRisks []string `json:"accepted_risks,omitempty"`
	// Shadow means dry run: everything is decided and recorded, but nothing is
	// done.
	Shadow   *bool   `json:"shadow,omitempty"`
	Schedule *string `json:"schedule,omitempty"` // by name; empty means none
	// Force lets the schedule pause a worker that is in use, after a warning.
	Force *bool `json:"force,omitempty"`
}

// The allowed values.
var (
	actions = []string{"stop", "hibernate", "auto"}
	sources = []string{"cml", "agent", "cloudwatch"}
	signals = []string{"cpu", "network", "disk", "gpu", "terminals", "users", "recent"}
	risks   = []string{"instance_store", "no_elastic_ip", "asg_member", "spot", "stop_protected"}
	units   = map[string]float64{"cpu": 100, "gpu": 100, "network": 1e15, "disk": 1e15}
)

const maxMinutes = 525_600 // a year

func (v Values) validate(f *faults) {
	f.between("idle_timeout_minutes", v.IdleTimeoutMinutes, 1, maxMinutes)
	f.between("warn_before_minutes", v.WarnBeforeMinutes, 0, 1440)
	f.between("check_interval_minutes", v.CheckIntervalMinutes, 1, 1440)
	f.between("snooze_minutes", v.SnoozeMinutes, 0, maxMinutes)
	f.oneOf("pause_action", v.PauseAction, actions...)
	if v.WarnBeforeMinutes != nil && v.IdleTimeoutMinutes != nil && *v.WarnBeforeMinutes > *v.IdleTimeoutMinutes {
		f.add("warn_before_minutes", "%d is longer than the timeout, %d", *v.WarnBeforeMinutes, *v.IdleTimeoutMinutes)
	}
	for _, l := range []struct {
		field       string
		is, allowed []string
	}{{"activity_sources", v.ActivitySources, sources}, {"signals", v.Signals, signals}, {"accepted_risks", v.AcceptedRisks, risks}} {
		for i, s := range l.is {
			f.oneOf(l.field, &s, l.allowed...)
			if slices.Contains(l.is[:i], s) {
				f.add(l.field, "%s is listed twice", s)
			}
		}
	}
	for _, k := range slices.Sorted(maps.Keys(v.Thresholds)) {
		most, known := units[k]
		switch n := v.Thresholds[k]; {
		case !known:
			f.add("thresholds", "there is no threshold %.40q; want cpu, gpu, network or disk", k)
		case !(n > 0 && n <= most):
			f.add("thresholds."+k, "%g is out of range: want more than 0 and at most %g", n, most)
		}
	}
	if v.Schedule != nil && *v.Schedule != "" {
		f.name("schedule", *v.Schedule)
	}
}

// Named is a named policy.
type Named struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	Values
	// Shipped is set on an unmodified built-in policy.
	Shipped bool `json:"shipped,omitempty"`
	// ScheduleSince is when the policy's schedule was last changed.
	ScheduleSince time.Time `json:"schedule_since,omitzero"`

	Stamp
}

// Validate returns every fault of p, each a *failure.Invalid.
func (p Named) Validate() error {
	var f faults
	f.name("name", p.Name)
	f.text("description", p.Description, 1024)
	p.Values.validate(&f)
	return f.err()
}

// Shipped returns the built-in policies.
func Shipped() []Named {
	named := func(name, doc, action string, minutes int) Named {
		return Named{Name: name, Description: doc, Shipped: true, Values: Values{IdleTimeoutMinutes: &minutes, PauseAction: &action}}
	}
	return []Named{
		named("aggressive", "Hibernates after a quarter of an hour", "hibernate", 15),
		named("balanced", "Hibernates after an hour", "hibernate", 60),
		named("conservative", "Stops after four hours", "stop", 240),
		named("development", "Stops after half an hour", "stop", 30),
		named("research", "Hibernates after two hours, for long computations", "hibernate", 120),
	}
}

// IsShipped reports whether name is a built-in policy. Removing a modified one
// restores the original.
func IsShipped(name string) bool {
	return slices.ContainsFunc(Shipped(), func(p Named) bool { return p.Name == name })
}

// Scope selects workers. All conditions must match; an empty scope matches
// every worker.
type Scope struct {
	Workers []string          `json:"worker_ids,omitempty"`
	Tags    map[string]string `json:"tags,omitempty"` // an empty value matches any
	Region  string            `json:"aws_region,omitempty"`
}

// All reports whether s selects every worker.
func (s Scope) All() bool { return len(s.Workers) == 0 && len(s.Tags) == 0 && s.Region == "" }

// Matches reports whether s selects w.
func (s Scope) Matches(w *Subject) bool {
	if s.Region != "" && s.Region != w.Region || len(s.Workers) > 0 && !slices.Contains(s.Workers, w.ID) {
		return false
	}
	for k, v := range s.Tags {
		if got, ok := w.Tags[k]; !ok || v != "" && got != v {
			return false
		}
	}
	return true
}

// String formats s for display: team=ml,env in us-east-1, or all workers.
func (s Scope) String() string {
	text := ""
	for i, k := range slices.Sorted(maps.Keys(s.Tags)) {
		if i > 0 {
			text += ","
		}
		text += k
		if v := s.Tags[k]; v != "" {
			text += "=" + v
		}
	}
	for i, id := range s.Workers {
		if i > 0 || text != "" {
			text += ","
		}
		text += id
	}
	switch {
	case s.Region != "" && text != "":
		return text + " in " + s.Region
	case s.Region != "":
		return "all in " + s.Region
	case text == "":
		return "all workers"
	}
	return text
}

func (s Scope) validate(f *faults) {
	if len(s.Workers) > 1000 {
		f.add("worker_ids", "there are %d, the limit is 1000", len(s.Workers))
	}
	if len(s.Tags) > 20 {
		f.add("tags", "there are %d, the limit is 20", len(s.Tags))
	}
	for k, v := range s.Tags {
		if k == "" || len(k) > 127 || len(v) > 255 {
			f.add("tags", "%.40q is empty or too long", k)
		}
	}
	f.text("aws_region", s.Region, 32)
}

// Group assigns a policy, a schedule or both to the workers of a scope.
type Group struct {
	ID       string  `json:"id"`
	Selector Scope   `json:"selector"`
	Policy   string  `json:"policy,omitempty"`
	Schedule *string `json:"schedule,omitempty"` // overrides the policy's
	// Priority ranks the groups of a worker. The group with the highest priority
	// wins, then the one with more tags, then the one with the later id.
	Priority int `json:"priority,omitempty"`
	// ScheduleSince is when the group's effective schedule last changed.
	ScheduleSince time.Time `json:"schedule_since,omitzero"`

	Stamp
}

// Validate returns every fault of g, each a *failure.Invalid.
func (g Group) Validate() error {
	var f faults
	g.Selector.validate(&f)
	if len(g.Selector.Workers) > 0 {
		f.add("worker_ids", "a group is selected by tags or a region: assign the policy to the worker itself")
	}
	f.between("priority", &g.Priority, -1000, 1000)
	return f.err()
}
