package fleet

import (
	"context"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/rules"
	"lull/internal/fleet/worker"
)

// Apply assigns a policy or a schedule to workers: individually to those that the
// selector names, otherwise to the group of all workers that it selects, now and
// later. It returns the changed workers, or the group. A group without assignments is
// removed. Errors: Invalid, NotFound; Refused if a name to be removed is not
// assigned.
func (f *Fleet) Apply(ctx context.Context, by audit.Actor, sel policy.Scope, a rules.Application) ([]worker.Worker, *policy.Group, error) {
	if err := f.RefreshRules(ctx); err != nil {
		return nil, nil, err
	}
	if err := f.Known(a); err != nil {
		return nil, nil, err
	}
	if len(sel.Workers) == 0 {
		g, err := f.ApplyGroup(ctx, by, sel, a)
		return nil, &g, err
	}
	if len(sel.Tags) > 0 || sel.Region != "" {
		return nil, nil, failure.Invalidf("worker_ids", "give workers or a selector, not both")
	}
	for _, id := range sel.Workers { // all or none, unless one changes concurrently
		w, err := f.Worker(ctx, id)
		if err != nil {
			return nil, nil, err
		}
		if _, err := a.Profile(&w); err != nil {
			return nil, nil, err
		}
	}
	out := []worker.Worker{}
	for _, id := range sel.Workers {
		w, err := f.updateWorker(ctx, by, id, 0, a.Profile)
		if err != nil {
			return out, nil, err
		}
		out = append(out, w)
	}
	return out, nil, nil
}
