package controller

import (
	"context"
	"slices"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
)

const (
	// sizedEach is how often the volumes of a worker are read again that are
	// still the same ones: their size and type may have been changed.
	sizedEach = 24 * time.Hour
	// sizeAgain is the least time between two questions about other volumes.
	sizeAgain = time.Hour
	// mostSized is how many volumes are asked about in a cycle: one call, which
	// takes a fleet of 100,000 workers through within some hours.
	mostSized = 200
	// sizeLimit bounds the question: states and power wait for it.
	sizeLimit = 5 * time.Second
)

// readVolumes reads the volumes of workers of a region that are due, a part in each
// cycle, and writes what is news. What storage costs is all that rests on it,
// so nothing waits for it and a failure is tried again an hour later.
func (c *Controller) readVolumes(ctx context.Context, r *region, from Sizer) {
	due, ids := c.unsized(r, time.Now())
	if len(ids) == 0 {
		return
	}
	c.count.calls.add("volumes")
	asked, cancel := context.WithTimeout(ctx, sizeLimit)
	known, err := from.Volumes(asked, ids)
	cancel()
	if err != nil {
		c.log.Warn("cannot read the sizes of volumes, so the cost of storage is unknown", "region", r.key.name, "err", err)
		return
	}
	for id, want := range due {
		var volumes []worker.Volume
		for _, v := range want {
			if x, ok := known[v]; ok {
				volumes = append(volumes, x)
			}
		}
		if len(volumes) < len(want) {
			continue // one has just been detached
		}
		_, err := c.fleet.Change(ctx, id, fleet.Changing{By: audit.ByCloud}, func(w *worker.Worker, _ *worker.Tx) error {
			if !slices.Equal(w.Volumes, volumes) {
				w.Volumes = volumes
			}
			return nil
		})
		if err != nil && ctx.Err() == nil {
			c.log.Warn("cannot write the sizes of volumes", "worker", id, "err", err)
		}
	}
}

// unsized are the workers whose volumes are due, with the ids of these, and all
// ids together.
func (c *Controller) unsized(r *region, now time.Time) (due map[string][]string, ids []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	due = map[string][]string{}
	for _, e := range r.entries {
		if e.inst == nil || len(e.inst.Volumes) == 0 || c.shards[e.shard] == nil || e.w.Status == power.WorkerTerminated {
			continue
		}
		same := slices.EqualFunc(e.w.Volumes, e.inst.Volumes, func(v worker.Volume, id string) bool { return v.ID == id })
		if same && e.sizedAt.IsZero() {
			e.sizedAt = now.Add(-spread(e.id, sizedEach)) // read before this server had it
		}
		wait := sizeAgain
		if same {
			wait = sizedEach
		}
		if now.Sub(e.sizedAt) < wait {
			continue
		}
		if len(ids)+len(e.inst.Volumes) > mostSized && len(ids) > 0 {
			break
		}
		e.sizedAt = now
		due[e.id] = e.inst.Volumes
		ids = append(ids, e.inst.Volumes...)
	}
	return due, ids
}
