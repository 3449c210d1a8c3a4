package control

import (
	"context"
	"net/url"
	"slices"
	"strconv"

	"lull/internal/core/policy"
	"lull/internal/fleet/worker"
)

// PolicyBody is a policy in a request.
type PolicyBody struct {
	Name        string `json:"name,omitempty" maxLength:"64" doc:"The name in the path"`
	Description string `json:"description,omitempty" maxLength:"1024"`
	policy.Values
}

// ScheduleBody is a schedule in a request.
type ScheduleBody struct {
	Name         string          `json:"name,omitempty" maxLength:"64" doc:"The name in the path"`
	Description  string          `json:"description,omitempty" maxLength:"1024"`
	Zone         string          `json:"zone" maxLength:"64" doc:"IANA name of a time zone"`
	Windows      []policy.Window `json:"windows" maxItems:"100"`
	Holidays     []string        `json:"holidays,omitempty" maxItems:"1000" doc:"2026-12-25, or 12-25 for every year"`
	Start        bool            `json:"start,omitempty" doc:"Resume workers when it opens"`
	GraceMinutes *int            `json:"grace_minutes,omitempty" doc:"How long a worker must be quiet in closed hours; 15 if not given"`
}

// BudgetBody is a budget in a request.
type BudgetBody struct {
	Name        string       `json:"name,omitempty" maxLength:"64" doc:"The name in the path"`
	Description string       `json:"description,omitempty" maxLength:"1024"`
	For         string       `json:"for" enum:"stop,start"`
	MaxActions  *int         `json:"max_actions,omitempty"`
	MaxPercent  *float64     `json:"max_percent,omitempty"`
	PerMinutes  int          `json:"per_minutes"`
	Reasons     []string     `json:"reasons,omitempty"`
	Selector    policy.Scope `json:"selector,omitzero"`
	During      string       `json:"during,omitempty" doc:"Schedule during which it applies"`
}

// Apply assigns a policy or schedule to named workers, or to all present and
// future workers that a selector matches.
type Apply struct {
	policy.Scope
	All      bool `json:"all,omitempty" doc:"Required for an empty selector"`
	Priority *int `json:"priority,omitempty" doc:"Among selectors that match a worker, the highest wins"`
	Remove   bool `json:"remove,omitempty" doc:"Remove it instead; refused if a different one is in place"`
}

// Applied lists the targets of an Apply: workers, or the selector's group.
type Applied struct {
	Workers []worker.Worker `json:"workers"`
	Group   *policy.Group   `json:"group,omitempty"`
}

// NewOverride requests an override.
type NewOverride struct {
	Kind     string       `json:"kind" enum:"keep,skip,freeze,policy"`
	Selector policy.Scope `json:"selector,omitzero"`
	All      bool         `json:"all,omitempty" doc:"Required for an empty selector"`
	Policy   string       `json:"policy,omitempty" maxLength:"64"`
	From     string       `json:"from,omitempty" maxLength:"80" doc:"Start, in the same format as until; default: now"`
	Until    string       `json:"until,omitempty" maxLength:"80" doc:"End; without until and for, keep and skip end with the day in NOTIFY_TIME_ZONE in which they begin: RFC 3339, 18:00, fri 18:00, 2006-01-02 15:04, with a zone such as Europe/Berlin behind it; UTC without"`
	For      string       `json:"for,omitempty" maxLength:"40" doc:"Length instead of an end: 2h, 1d"`
	Reason   string       `json:"reason,omitempty" maxLength:"256"`
}

// Exception is an override with the names of its workers.
type Exception struct {
	policy.Override
	WorkerNames map[string]string `json:"worker_names,omitempty" doc:"Names of its workers, by id; removed workers have none"`
}

// Whom returns the names of the workers to which the override applies.
func (e Exception) Whom() string {
	if e.Selector.All() {
		return "the whole fleet"
	}
	s := e.Selector
	s.Workers = slices.Clone(s.Workers)
	for i, id := range s.Workers {
		if name := e.WorkerNames[id]; name != "" {
			s.Workers[i] = name
		}
	}
	return s.String()
}

// BudgetState is a budget with its current state.
type BudgetState struct {
	policy.Budget
	State policy.Used `json:"state"`
}

// WorkerPolicy is a worker's effective policy with the origin of each value.
type WorkerPolicy struct {
	WorkerID   string `json:"worker_id"`
	WorkerName string `json:"worker_name"`
	policy.Resolved
	// Budgets lists the budgets that limit the worker's next automatic stop or
	// start.
	Budgets []policy.Used `json:"budgets"`
}

// Boundaries are the next boundaries of a schedule.
type Boundaries struct {
	Schedule string            `json:"schedule"`
	Zone     string            `json:"zone"`
	Open     bool              `json:"open"`
	Items    []policy.Boundary `json:"items"`
}

// WorkerPolicy returns a worker's effective policy.
func (c *Client) WorkerPolicy(ctx context.Context, id string) (WorkerPolicy, error) {
	return get[WorkerPolicy](ctx, c, WorkerPath(id, "policy"))
}

// Policies returns all policies.
func (c *Client) Policies(ctx context.Context) ([]policy.Named, error) {
	return All[policy.Named](ctx, c, api+"/policies", nil)
}

// Schedules returns all schedules.
func (c *Client) Schedules(ctx context.Context) ([]policy.Schedule, error) {
	return All[policy.Schedule](ctx, c, api+"/schedules", nil)
}

// Boundaries returns the next n boundaries of a schedule.
func (c *Client) Boundaries(ctx context.Context, name string, n int) (Boundaries, error) {
	return get[Boundaries](ctx, c, api+"/schedules/"+url.PathEscape(name)+"/boundaries?limit="+strconv.Itoa(n))
}
