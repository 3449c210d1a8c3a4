package controller

import (
	"context"
	"maps"
	"runtime/pprof"
	"slices"
	"sync"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
)

// regionKey identifies a region of an account.
type regionKey struct{ account, name string }

func keyOf(w *worker.Worker) regionKey { return regionKey{w.Account, w.AWSRegion} }

// region is the set of workers observed together.
type region struct {
	key  regionKey
	wake chan struct{}

	loading bool // a read of the load is in progress; guarded by the controller's lock

	// The rest is guarded by the controller's lock.
	entries  map[string]*entry
	listedAt time.Time // when the last complete listing began
	err      string
	errSince time.Time // when a cycle first failed after the last good one
	rolled   string    // last instance that the rolling pass described
	credit   float64   // number of descriptions it may request
}

// soon requests a listing before the next cycle.
func (r *region) soon() { signal(r.wake) }

// region returns the region of w. If it is new, observation of it starts. c.mu must
// be held.
func (c *Controller) region(w *worker.Worker) *region {
	k := keyOf(w)
	r := c.regions[k]
	if r == nil {
		r = &region{key: k, wake: make(chan struct{}, 1), entries: map[string]*entry{}}
		c.regions[k] = r
		c.poke()
	}
	return r
}

// observe runs a goroutine for each region, so that none waits for another.
func (c *Controller) observe(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	running := map[regionKey]bool{}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		c.mu.Lock()
		for k, r := range c.regions {
			if !running[k] {
				running[k] = true
				wg.Go(func() { c.watchRegion(ctx, r) })
			}
		}
		c.mu.Unlock()
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// watchRegion observes one region every cycle until ctx ends.
func (c *Controller) watchRegion(ctx context.Context, r *region) {
	failures := 0
	for {
		began := time.Now()
		var err error
		pprof.Do(ctx, pprof.Labels("part", "ec2"), func(ctx context.Context) { err = c.cycle(ctx, r) })
		took := time.Since(began)
		wait := c.fleet.Settings().ReconcileInterval - took
		c.concluded(r, err)
		if err != nil {
			if ctx.Err() == nil {
				c.log.Warn("cannot observe a region", "region", r.key.name, "err", err)
			}
			wait = jitter(backoff(failures))
			failures++
		} else {
			failures = 0
		}
		timer := time.NewTimer(max(wait, 0))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-r.wake:
			timer.Stop()
			// Requests in quick succession are combined. A region whose listing is
			// slow waits longer between listings.
			space := max(2*time.Second, 4*took) - time.Since(began)
			if delay.For(ctx, max(space, debounce)) != nil {
				return
			}
		}
	}
}

// concluded records the outcome of a cycle. After a first failure it wakes the
// workers that wait for EC2's first answer, so that their records show the error at
// once.
func (c *Controller) concluded(r *region, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		r.err, r.errSince = "", time.Time{}
		return
	}
	if r.err == "" {
		r.errSince = time.Now()
		for _, e := range r.entries {
			if c.shards[e.shard] != nil && (e.w.Status == power.WorkerUnknown || e.w.Status == power.WorkerTerminating) {
				c.kick(e, r.errSince)
			}
		}
	}
	r.err = err.Error()
}

// unread returns why the region of w cannot be read; nil if it can. c.mu must be
// held.
func (c *Controller) unread(w *worker.Worker) *worker.Unread {
	r := c.regions[keyOf(w)]
	if r == nil || r.err == "" {
		return nil
	}
	return &worker.Unread{Region: r.key.name, Since: r.errSince, Error: r.err}
}

// unreadRegions returns the regions that have workers. The value is true if the
// region cannot be read.
func (c *Controller) unreadRegions() map[regionKey]bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[regionKey]bool{}
	for k, r := range c.regions {
		if len(r.entries) > 0 {
			out[k] = r.err != ""
		}
	}
	return out
}

// cycle reads a region once. It lists the states of all instances, and describes the
// instances whose state changed, that are in a transition or that lack an address,
// and some of the others in turn.
func (c *Controller) cycle(ctx context.Context, r *region) error {
	owned, transit := c.inRegion(r)
	if owned == 0 || !c.fleet.Settings().ReconcilePollingEnabled && transit == 0 {
		return nil
	}
	cloud, err := c.cfg.Clouds(r.key.account, r.key.name)
	if err != nil {
		return err
	}
	began := time.Now()
	c.count.calls.add("states")
	states, err := cloud.Observe.States(ctx)
	if err != nil {
		return err
	}
	ids := c.changed(r, states, began)
	found, missing := map[string]Instance{}, map[string]bool{}
	var failed error
	if len(ids) > 0 {
		c.count.calls.add("instances")
		at := time.Now()
		f, m, err := cloud.Observe.Instances(ctx, ids)
		if err != nil {
			failed = err // the listing is still valid
		}
		found = f
		for _, id := range m {
			missing[id] = true
		}
		c.described(r, found, missing, at)
	}
	c.sweep(r, states, began, found, missing)
	if cloud.Size != nil && failed == nil {
		c.readVolumes(ctx, r, cloud.Size)
	}
	return failed
}

// inRegion counts this server's workers of a region.
func (c *Controller) inRegion(r *region) (owned, transit int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range r.entries {
		if c.shards[e.shard] != nil {
			owned++
			if power.WorkerTable.IsTransitional(e.w.Status) {
				transit++
			}
		}
	}
	return owned, transit
}

// changed lists the instances that need a description.
func (c *Controller) changed(r *region, states map[string]string, began time.Time) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.fleet.Settings()
	var ids, rest []string
	for _, e := range r.entries {
		id := e.w.EC2InstanceID
		if id == "" || c.shards[e.shard] == nil || e.w.Status == power.WorkerTerminated {
			continue
		}
		state, listed := states[id]
		switch {
		case !listed, state != e.w.EC2State, power.WorkerTable.IsTransitional(e.w.Status),
			e.w.Status == power.WorkerRunning && e.w.PrivateIP == "", e.inst == nil && e.w.Status == power.WorkerRunning:
			ids = append(ids, id)
		default:
			rest = append(rest, id)
		}
	}
	// The rolling pass describes each of the others once per FullPass.
	r.credit += float64(len(rest)) * float64(s.ReconcileInterval) / float64(FullPass)
	if n := int(r.credit); n > 0 {
		r.credit -= float64(n)
		slices.Sort(rest)
		from, found := slices.BinarySearch(rest, r.rolled)
		if found {
			from++
		}
		for i := range min(n, len(rest)) {
			r.rolled = rest[(from+i)%len(rest)]
			ids = append(ids, r.rolled)
		}
	}
	return ids
}

// described stores descriptions in the entries.
func (c *Controller) described(r *region, found map[string]Instance, missing map[string]bool, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(found) == 0 {
		return
	}
	for _, e := range r.entries {
		if in, ok := found[e.w.EC2InstanceID]; ok {
			if e.inst == nil || !maps.Equal(e.inst.Tags, in.Tags) {
				c.untag(e)
			}
			e.inst, e.instAt, e.missing = &in, at, false
		}
	}
}

// sweep passes each worker its observation and wakes the workers whose record does
// not match.
func (c *Controller) sweep(r *region, states map[string]string, began time.Time, found map[string]Instance, missing map[string]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r.listedAt = began
	now := time.Now()
	settings := c.fleet.Settings()
	polling := settings.ReconcilePollingEnabled
	for _, e := range r.entries {
		state := states[e.w.EC2InstanceID]
		if in, ok := found[e.w.EC2InstanceID]; ok {
			state = in.State // newer than the listing
		}
		e.seen, e.seenAt = state, began
		e.missing = state == "" && missing[e.w.EC2InstanceID]
		if e.reconciled && e.reconciledSeen == state && !c.moved(e) && !retimed(settings.TagPrefix, e) || c.shards[e.shard] == nil {
			continue
		}
		if polling || power.WorkerTable.IsTransitional(e.w.Status) {
			if !e.running {
				c.kick(e, now)
			}
		}
	}
}

// retimed reports whether the instance's deadline tag differs from the worker's
// record and the record must follow it.
func retimed(prefix string, e *entry) bool {
	if e.inst == nil || len(e.inst.Tags) == 0 && e.w.TTLDeadline == nil {
		return false
	}
	_, follow := deadlineTag(prefix, &e.w, e.inst)
	return follow
}

// moved reports whether a worker's addresses are no longer those in its record.
func (c *Controller) moved(e *entry) bool {
	return e.inst != nil && e.w.Status == power.WorkerRunning && e.inst.State == "running" &&
		(e.inst.PrivateIP != e.w.PrivateIP || e.inst.PublicIP != e.w.PublicIP)
}
