package policy

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/layers"
)

// The layers of an Origin, weakest first.
const (
	LayerSettings = "settings" // the fleet's
	LayerDefault  = "default"  // the policy of all workers
	LayerTemplate = "template"
	LayerGroup    = "group"
	LayerPolicy   = "policy" // assigned to the worker
	LayerWorker   = "worker" // the worker's own fields
	LayerOverride = "override"
)

// Origin is the source of a value.
type Origin struct {
	Layer string `json:"layer"`
	// Name is the name of the template, the group's selector, the worker or the
	// override, depending on the layer.
	Name   string `json:"name,omitempty"`
	Policy string `json:"policy,omitempty"` // name of the policy that sets the value, if any
}

// String formats o for display.
func (o Origin) String() string {
	text := o.Layer
	if o.Name != "" {
		text += " " + o.Name
	}
	if o.Policy != "" && o.Policy != o.Name {
		text += " (" + o.Policy + ")"
	}
	return text
}

// Subject contains the properties of a worker that rules depend on.
type Subject struct {
	ID     string
	Region string
	Tags   map[string]string
	Policy string // by name
	Own    Values // its own fields
	// Since is when the worker was last assigned a policy or schedule.
	Since    time.Time
	Template string
	FromTmpl Values
}

// Base is the weakest layer, the fleet's settings.
type Base struct {
	Timeout, WarnBefore, CheckInterval, Snooze time.Duration
	AutoPause                                  bool
}

// Set holds all rules. It is immutable after New.
type Set struct {
	Policies  map[string]Named
	Schedules map[string]*Schedule
	Groups    []Group // weakest first
	Overrides []Override
	Budgets   []Budget // by name
}

// New returns a Set. Built-in policies and the default budget are included
// unless one of the same name is given.
func New(policies []Named, schedules []Schedule, groups []Group, overrides []Override, budgets []Budget) *Set {
	s := &Set{Policies: map[string]Named{}, Schedules: map[string]*Schedule{}, Groups: slices.Clone(groups),
		Overrides: slices.Clone(overrides), Budgets: slices.Clone(budgets)}
	for _, p := range append(Shipped(), policies...) {
		s.Policies[p.Name] = p
	}
	for _, c := range schedules {
		if h, err := c.hours(); err == nil {
			c.read = h
		}
		s.Schedules[c.Name] = &c
	}
	if !slices.ContainsFunc(budgets, func(b Budget) bool { return b.Name == DefaultStarts.Name }) {
		s.Budgets = append(s.Budgets, DefaultStarts)
	}
	slices.SortFunc(s.Budgets, func(a, b Budget) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Groups, func(a, b Group) int {
		return cmp.Or(cmp.Compare(a.Priority, b.Priority), cmp.Compare(specific(a), specific(b)), cmp.Compare(a.ID, b.ID))
	})
	slices.SortFunc(s.Overrides, func(a, b Override) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return s
}

// specific ranks a group's selector: the narrower, the higher.
func specific(g Group) int {
	n := 2 * len(g.Selector.Tags)
	if g.Selector.Region != "" {
		n++
	}
	return n
}

// Resolved is the effective policy of one worker at one moment, with the origin
// of every value.
type Resolved struct {
	// Name is the name of the strongest policy that sets a timeout. Without one
	// it is "template NAME", the worker's ID, or "global".
	Name            string             `json:"name"`
	Enabled         bool               `json:"enabled"`
	Timeout         idle.Duration      `json:"idle_timeout_seconds"`
	WarnBefore      idle.Duration      `json:"warn_before_seconds"`
	CheckInterval   idle.Duration      `json:"check_interval_seconds"`
	Snooze          idle.Duration      `json:"snooze_seconds"`
	PauseAction     string             `json:"pause_action"`
	ActivitySources []string           `json:"activity_sources"`
	Signals         []string           `json:"signals"` // of the agent; null means all
	Thresholds      map[string]float64 `json:"thresholds"`
	AcceptedRisks   []string           `json:"accepted_risks"`
	Shadow          bool               `json:"shadow"`
	Schedule        string             `json:"schedule"`
	Force           bool               `json:"force"`
	AutoPause       bool               `json:"auto_pause"` // the fleet-wide switch
	// From maps each value's name above, without the unit, to its origin.
	From map[string]Origin `json:"from"`

	// ScheduleState is the schedule's state; absent without a schedule.
	ScheduleState *ScheduleState `json:"standing,omitempty"`
	// Overrides lists the overrides in force, oldest first.
	Overrides []Override `json:"overrides"`
	// KeptUntil and FrozenUntil are the latest ends of the overrides in force of
	// kind Keep and Freeze.
	KeptUntil   *time.Time `json:"kept_until,omitempty"`
	FrozenUntil *time.Time `json:"frozen_until,omitempty"`
	// Faults lists rules that cannot be applied, for example because a named
	// policy does not exist.
	Faults []string `json:"faults,omitempty"`
	// Applied means that a user assigned a policy to the worker, so that its tags
	// are written.
	Applied bool `json:"applied"`

	since time.Time // when its schedule was assigned
}

// Resolve returns the effective policy of w at now.
func (s *Set) Resolve(now time.Time, base Base, w *Subject) Resolved {
	r := Resolved{
		Name: "global", Enabled: true, AutoPause: base.AutoPause, Timeout: idle.Duration(base.Timeout), WarnBefore: idle.Duration(base.WarnBefore),
		CheckInterval: idle.Duration(base.CheckInterval), Snooze: idle.Duration(base.Snooze), PauseAction: "stop",
		ActivitySources: []string{"cml"}, Thresholds: map[string]float64{}, AcceptedRisks: []string{}, From: map[string]Origin{}, Overrides: []Override{},
	}
	for _, field := range fields {
		r.From[field] = Origin{Layer: LayerSettings}
	}
	r.take(s.stack(now, &r, w))
	r.WarnBefore = max(0, min(r.WarnBefore, r.Timeout))
	s.stand(now, &r, w)
	return r
}

// layer contains the values that one rule sets.
type layer struct {
	Values
	origin Origin
	name   string    // of the policy, if this layer sets the timeout
	since  time.Time // when the schedule was assigned
}

// stack returns the layers of w, strongest first. It records faults and the
// overrides in force in r.
func (s *Set) stack(now time.Time, r *Resolved, w *Subject) []layer {
	var out []layer // weakest first
	for _, g := range s.Groups {
		if g.Selector.All() {
			out = s.group(out, r, LayerDefault, g)
		}
	}
	if w.Template != "" {
		out = append(out, layer{w.FromTmpl, Origin{Layer: LayerTemplate, Name: w.Template}, "template " + w.Template, time.Time{}})
	}
	for _, g := range s.Groups {
		if !g.Selector.All() && g.Selector.Matches(w) {
			out = s.group(out, r, LayerGroup, g)
		}
	}
	out = s.named(out, r, w.Policy, Origin{Layer: LayerPolicy, Name: w.Policy, Policy: w.Policy}, w.Since)
	out = append(out, layer{w.Own, Origin{Layer: LayerWorker, Name: w.ID}, "worker " + w.ID, w.Since})
	out = s.override(out, now, r, w)
	slices.Reverse(out)
	return out
}

// group appends the layers of a group to to.
func (s *Set) group(to []layer, r *Resolved, in string, g Group) []layer {
	o := Origin{Layer: in, Name: g.Selector.String(), Policy: g.Policy}
	to = s.named(to, r, g.Policy, o, g.ScheduleSince)
	if g.Schedule != nil {
		to = append(to, layer{Values{Schedule: g.Schedule}, o, "", g.ScheduleSince})
	}
	return to
}

// named appends the layer of the policy with that name. A missing policy is
// recorded as a fault and sets nothing.
func (s *Set) named(to []layer, r *Resolved, name string, o Origin, since time.Time) []layer {
	if name == "" {
		return to
	}
	p, ok := s.Policies[name]
	if !ok {
		r.Faults = append(r.Faults, fmt.Sprintf("Policy %q, which %s names, does not exist.", name, o.Layer))
		return to
	}
	if p.ScheduleSince.After(since) {
		since = p.ScheduleSince
	}
	r.Applied = true
	return append(to, layer{p.Values, o, name, since})
}

// override appends the layers of the overrides in force.
func (s *Set) override(to []layer, now time.Time, r *Resolved, w *Subject) []layer {
	for _, o := range s.Overrides {
		if !o.In(now) || !o.Selector.Matches(w) {
			continue
		}
		r.Overrides = append(r.Overrides, o)
		latest := func(t **time.Time) {
			if *t == nil || o.Until.After(**t) {
				until := o.Until
				*t = &until
			}
		}
		switch o.Kind {
		case Keep:
			latest(&r.KeptUntil)
		case Freeze:
			latest(&r.FrozenUntil)
		case Use:
			to = s.named(to, r, o.Policy, Origin{Layer: LayerOverride, Name: o.ID, Policy: o.Policy}, o.From)
		}
	}
	return to
}

// stand evaluates the schedule. It ignores boundaries that overrides suppress.
func (s *Set) stand(now time.Time, r *Resolved, w *Subject) {
	if r.Schedule == "" {
		return
	}
	c, ok := s.Schedules[r.Schedule]
	if !ok {
		r.Faults = append(r.Faults, fmt.Sprintf("Schedule %q, which %s names, does not exist.", r.Schedule, r.From["schedule"].Layer))
		return
	}
	since := r.since
	if c.ChangedAt.After(since) {
		since = c.ChangedAt
	}
	skips := s.overrides(w, Skip)
	st, err := c.State(now, since, func(t time.Time) bool {
		return slices.ContainsFunc(skips, func(o Override) bool { return o.In(t) })
	})
	if err != nil {
		r.Faults = append(r.Faults, fmt.Sprintf("Schedule %s cannot be applied: %v.", c.Name, err))
		return
	}
	st.Force = r.Force
	r.ScheduleState = &st
}

// fields are the keys of From.
var fields = []string{"enabled", "idle_timeout", "warn_before", "check_interval", "snooze", "pause_action", "activity_sources", "signals",
	"thresholds", "accepted_risks", "shadow", "schedule", "force"}

// pick returns the strongest value of a field and the layer that sets it, and
// records the origin. It returns nil if no layer sets the field.
func pick[T any](r *Resolved, from []layer, field string, get func(*Values) *T) (*T, *layer) {
	v, l := layers.Strongest(from, func(l *layer) (*T, bool) { p := get(&l.Values); return p, p != nil })
	if l != nil {
		r.From[field] = l.origin
	}
	return v, l
}

// take sets the values of r from the layers.
func (r *Resolved) take(from []layer) {
	span := func(field string, to *idle.Duration, get func(*Values) *int) *layer {
		m, l := pick(r, from, field, get)
		if m != nil {
			*to = idle.Duration(time.Duration(*m) * time.Minute)
		}
		return l
	}
	truth := func(field string, to *bool, get func(*Values) *bool) {
		if b, _ := pick(r, from, field, get); b != nil {
			*to = *b
		}
	}
	list := func(field string, to *[]string, get func(*Values) *[]string) {
		set := func(v *Values) *[]string {
			if l := get(v); *l != nil {
				return l
			}
			return nil
		}
		if l, _ := pick(r, from, field, set); l != nil {
			*to = slices.Clone(*l)
		}
	}
	if l := span("idle_timeout", &r.Timeout, func(v *Values) *int { return v.IdleTimeoutMinutes }); l != nil {
		r.Name = l.name
	}
	span("warn_before", &r.WarnBefore, func(v *Values) *int { return v.WarnBeforeMinutes })
	span("check_interval", &r.CheckInterval, func(v *Values) *int { return v.CheckIntervalMinutes })
	span("snooze", &r.Snooze, func(v *Values) *int { return v.SnoozeMinutes })
	truth("enabled", &r.Enabled, func(v *Values) *bool { return v.Enabled })
	truth("shadow", &r.Shadow, func(v *Values) *bool { return v.Shadow })
	truth("force", &r.Force, func(v *Values) *bool { return v.Force })
	list("activity_sources", &r.ActivitySources, func(v *Values) *[]string { return &v.ActivitySources })
	list("signals", &r.Signals, func(v *Values) *[]string { return &v.Signals })
	list("accepted_risks", &r.AcceptedRisks, func(v *Values) *[]string { return &v.AcceptedRisks })
	if a, _ := pick(r, from, "pause_action", func(v *Values) *string { return v.PauseAction }); a != nil {
		r.PauseAction = *a
	}
	thresholds := func(v *Values) *map[string]float64 {
		if v.Thresholds == nil {
			return nil
		}
		return &v.Thresholds
	}
	if m, _ := pick(r, from, "thresholds", thresholds); m != nil {
		r.Thresholds = maps.Clone(*m)
	}
	if name, l := pick(r, from, "schedule", func(v *Values) *string { return v.Schedule }); l != nil {
		r.Schedule, r.since = *name, l.since
	}
}

// Idle converts r to the idle engine's policy. detection is the worker's own
// switch for idle detection.
func (r *Resolved) Idle(detection bool) idle.Policy {
	return idle.Policy{
		Name: r.Name, Timeout: r.Timeout, Snooze: r.Snooze, WarnBefore: r.WarnBefore, CheckInterval: r.CheckInterval,
		Detection: detection && r.Enabled, AutoPause: r.AutoPause, Signals: r.ActivitySources, Action: r.PauseAction,
	}
}

// Guards returns the blocks by which r prevents every automatic pause: a freeze,
// and a maintenance window that is open.
func (r *Resolved) Guards() []idle.Block {
	var out []idle.Block
	for _, o := range r.Overrides {
		if o.Kind == Freeze {
			until := o.Until
			out = append(out, idle.Block{Code: idle.Schedule, Sentence: o.Sentence(), Until: &until})
		}
	}
	if st := r.ScheduleState; st != nil && st.HeldUntil != nil {
		until := *st.HeldUntil
		out = append(out, idle.Block{Code: idle.Schedule, Until: &until,
			Sentence: fmt.Sprintf("A maintenance window of schedule %s is open until %s.", st.Schedule, ClockIn(until, st.Zone))})
	}
	return out
}
