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
	// sizedEach is how often a worker's unchanged set of volumes is read again,
	// because their size or type may have changed.
	sizedEach = 24 * time.Hour
	// sizeAgain is the minimum time between two reads of a worker whose volumes have
	// changed.
	sizeAgain = time.Hour
	// mostSized is the maximum number of volumes read per cycle, in one call. A fleet
	// of 100,000 workers is read within hours.
	mostSized = 200
	// sizeLimit is the time limit of the call, because the region's next cycle waits
	// for it.
	sizeLimit = 5 * time.Second
)

// readVolumes reads the volumes of workers of a region that are due, some in each
// cycle, and records changes. They are used only for the cost of storage, so nothing
// waits for them, and a failed read is retried an hour later.
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
			continue // a volume has just been detached
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

// unsized returns the volume IDs of the workers whose volumes are due, by worker, and
// all those IDs together.
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
			e.sizedAt = now.Add(-spread(e.id, sizedEach)) // an earlier owner has read them
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
