package controller

import (
	"context"
	"slices"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
)

// Times of reading loads.
const (
	loadTick = 5 * time.Second  // interval of the check for due loads
	loadLag  = 30 * time.Second // earliest request for a window, after its end
	loadPoll = time.Minute      // interval of requests for an overdue window
	loadBack = 24 * time.Hour   // how far back windows are read and kept
	// loadFresh is the maximum age of a read of the load in a final check. CloudWatch
	// returns whole windows, so a newer read would say the same.
	loadFresh = time.Minute
	// loadWait is how long a final check waits for a read.
	loadWait = 2 * time.Minute
)

// loadSeen holds the load that CloudWatch reported for an instance.
type loadSeen struct {
	Load
	instance string
	readAt   time.Time // when the last successful read began
	askedAt  time.Time // when the last attempt began, whatever its outcome
}

// end returns the end of the newest window, or zero if there is none.
func (l *loadSeen) end() time.Time {
	if l == nil || len(l.Windows) == 0 {
		return time.Time{}
	}
	return l.Windows[len(l.Windows)-1].End
}

// with returns l extended by the result n of a read that began at began. Windows of n
// replace those of l with the same end. l may be nil and is not modified.
func (l *loadSeen) with(instance string, n Load, began time.Time) *loadSeen {
	out := &loadSeen{Load: n, instance: instance, readAt: began, askedAt: began}
	if l == nil || l.instance != instance {
		return out
	}
	if n.Err != nil && len(n.Windows) == 0 {
		out.readAt = l.readAt
	}
	if out.Period == 0 {
		out.Period = l.Period
	}
	old := slices.DeleteFunc(slices.Clone(l.Windows), func(w LoadWindow) bool {
		return w.End.Before(began.Add(-loadBack)) || slices.ContainsFunc(n.Windows, func(x LoadWindow) bool { return x.End.Equal(w.End) })
	})
	out.Windows = append(old, n.Windows...)
	slices.SortFunc(out.Windows, func(a, b LoadWindow) int { return a.End.Compare(b.End) })
	return out
}

// reading judges the windows; there must be at least one. The reading has the time
// and value of the newest window. QuietSince is the start of the unbroken run of
// quiet windows up to it, and LastEvent the end of the newest active window.
func (l *loadSeen) reading(threshold float64) idle.Reading {
	newest := l.Windows[len(l.Windows)-1]
	r := idle.Judge(worker.SourceCloudWatch, newest.CPU, threshold, "%", l.Period, newest.End)
	r.MaxAge = idle.Duration(2 * l.Period)
	next := newest.End
	for _, w := range slices.Backward(l.Windows) {
		if w.CPU >= threshold {
			r.LastEvent = w.End
			break
		}
		if w.End.Equal(next) {
			next = w.End.Add(-l.Period)
			r.QuietSince = next
		}
	}
	return r
}

// wantsLoad reports whether the load is one of the worker's activity sources.
func (c *Controller) wantsLoad(w *worker.Worker, t *launch.Template, now time.Time) bool {
	return slices.Contains(c.fleet.PolicyWith(now, w, t).ActivitySources, worker.SourceCloudWatch)
}

// readLoads reads the load of this server's RUNNING workers until ctx ends. A new
// worker's load is read at once, that of an activity source when its next window
// should be available, and others at the metrics interval. Workers of a region are
// read together, and regions do not wait for each other.
func (c *Controller) readLoads(ctx context.Context) error {
	for {
		timer := time.NewTimer(loadTick)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-c.loads:
			timer.Stop()
			if err := delay.For(ctx, debounce); err != nil { // combines requests in quick succession
				return err
			}
		case <-timer.C:
		}
		for r, due := range c.loadsDue(time.Now()) {
			c.jobs.Go(func() {
				for _, part := range due {
					c.readLoad(ctx, r, part)
				}
				c.mu.Lock()
				r.loading = false
				c.mu.Unlock()
			})
		}
	}
}

// runs reports whether the instance of a worker with status s may be running.
func runs(s power.Worker) bool {
	return s == power.WorkerRunning || s == power.WorkerDraining || s == power.WorkerStopping
}

// loadPart is the set of instances whose load is read with one request.
type loadPart struct {
	ids   []string
	since time.Time
}

// loadsDue returns the regions that have something to read, marked as loading.
func (c *Controller) loadsDue(now time.Time) map[*region][]loadPart {
	every := c.fleet.Settings().WorkerMetricsInterval
	out := map[*region][]loadPart{}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.regions {
		if r.loading {
			continue
		}
		var fresh, known []string
		for _, e := range r.entries {
			if !runs(e.w.Status) || e.w.EC2InstanceID == "" || c.shards[e.shard] == nil {
				continue
			}
			l := e.load
			switch {
			case l == nil || l.instance != e.w.EC2InstanceID:
				fresh = append(fresh, e.w.EC2InstanceID)
			case e.loadAsk.After(l.askedAt):
				known = append(known, e.w.EC2InstanceID)
			case now.Sub(l.askedAt) >= min(every, loadPoll) && c.loadDue(e, now, every):
				known = append(known, e.w.EC2InstanceID)
			}
		}
		if len(fresh) > 0 {
			out[r] = append(out[r], loadPart{fresh, now.Add(-loadBack)})
		}
		if len(known) > 0 {
			out[r] = append(out[r], loadPart{known, time.Time{}})
		}
		r.loading = out[r] != nil
	}
	return out
}

// loadDue reports whether a load that was read before is due again. c.mu is
// held.
func (c *Controller) loadDue(e *entry, now time.Time, every time.Duration) bool {
	l := e.load
	if now.Sub(l.askedAt) >= every {
		return true
	}
	var t *launch.Template
	if x, ok := c.tmpls[e.w.TemplateName]; ok {
		t = &x
	}
	if !c.wantsLoad(&e.w, t, now) {
		return false
	}
	return l.Err != nil || !now.Before(l.end().Add(l.Period+loadLag))
}

// readLoad asks CloudWatch for one part of a region's loads, and wakes the workers
// whose reading is new.
func (c *Controller) readLoad(ctx context.Context, r *region, part loadPart) {
	cloud, err := c.cfg.Clouds(r.key.account, r.key.name)
	began := time.Now()
	var loads map[string]Load
	if err == nil && cloud.Load != nil {
		call, cancel := context.WithTimeout(ctx, time.Minute)
		c.count.calls.add("metrics")
		loads = cloud.Load.Load(call, part.ids, part.since)
		cancel()
	}
	asked := make(map[string]bool, len(part.ids))
	for _, id := range part.ids {
		asked[id] = true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range r.entries {
		id := e.w.EC2InstanceID
		if !asked[id] {
			continue
		}
		was := e.load.end()
		e.load = e.load.with(id, loads[id], began)
		if err != nil {
			e.load.Err = err
		}
		switch {
		case !e.loadAsk.IsZero():
			e.loadAsk = time.Time{}
			c.kick(e, time.Now())
		case e.load.end().After(was):
			c.kick(e, time.Now().Add(spread(e.id, loadTick)))
		}
	}
}

// loadSeen returns what CloudWatch has reported about the worker's instance, or
// nil.
func (j *job) loadSeen() *loadSeen {
	j.c.mu.Lock()
	defer j.c.mu.Unlock()
	if l := j.e.load; l != nil && l.instance == j.w.EC2InstanceID {
		return l
	}
	return nil
}

// freshAt reports whether l was read recently enough for a final check.
func (l *loadSeen) freshAt(now time.Time) bool { return l != nil && now.Sub(l.readAt) <= loadFresh }

// freshLoad requests a read of the load for a final check, and returns true while the
// check must wait for it. Workers of a region share one read. After loadWait the
// final check goes ahead and finds the signal unknown.
func (j *job) freshLoad() (outcome, bool) {
	now := time.Now()
	if !j.wantsLoad() || j.loadSeen().freshAt(now) {
		j.live.loadWait = time.Time{}
		return outcome{}, false
	}
	if j.live.loadWait.IsZero() {
		j.live.loadWait = now
	}
	if now.Sub(j.live.loadWait) > loadWait {
		j.live.loadWait = time.Time{}
		return outcome{}, false
	}
	j.c.mu.Lock()
	if l := j.e.load; l == nil || now.Sub(l.askedAt) > loadTick {
		j.e.loadAsk = now
	}
	j.c.mu.Unlock()
	signal(j.c.loads)
	return outcome{Requeue, now.Add(loadTick)}, true // the read itself wakes the worker earlier
}
