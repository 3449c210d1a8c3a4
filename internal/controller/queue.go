package controller

import (
	"container/heap"
	"context"
	"encoding/json"
	"reflect"
	"runtime/pprof"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/worker"
)

// entry is one worker in memory. c.mu guards it. A job works on a copy of what it
// needs.
type entry struct {
	id     string
	shard  int
	region *region
	w      worker.Worker

	// The last observation. seen is the state in the region's listing, empty if
	// the instance was not listed.
	seen    string
	seenAt  time.Time // when that listing began
	inst    *Instance
	instAt  time.Time
	missing bool      // not in the listing, and unknown to DescribeInstances
	sizedAt time.Time // when the volumes were last requested

	reconciled     bool // the record was reconciled with reconciledSeen
	reconciledSeen string

	due      time.Time
	heap     int // index in the heap, -1 for none
	queued   bool
	running  bool
	again    bool
	cancel   context.CancelFunc
	writing  bool // its job is writing the record; the change that the watch delivers is its own
	failures int

	tagged  bool       // its policy tags match its policy
	tagging bool       // it is in the controller's list of tags to check
	live    *live      // nil while nothing is known; owned by the entry
	load    *loadSeen  // CloudWatch's last report; replaced, never modified
	loadAsk time.Time  // a read of the load that began after this is wanted; zero for none
	agent   *agentSeen // the agent's last report; replaced, never modified
}

// known returns a copy of what is known about the worker beyond its record.
func (e *entry) known() live {
	if e.live == nil {
		return live{}
	}
	return *e.live
}

// learnt stores l. Most workers of a fleet are stopped and have no such state, so an
// empty l is stored as nil.
func (e *entry) learnt(l live) {
	if reflect.ValueOf(l).IsZero() {
		e.live = nil
		return
	}
	if e.live == nil {
		e.live = new(live)
	}
	*e.live = l
}

// live holds what the controller knows about a worker beyond its record. It is lost with the
// process, and read again by the next owner.
type live struct {
	cml       idle.Reading
	telemetry worker.Telemetry
	seen      json.RawMessage
	fetchedAt time.Time
	failed    int       // fetches in a row that left telemetry unknown
	told      time.Time // newest activity written to the journal
	checkedAt time.Time
	verdict   *idle.Verdict
	readings  []idle.Reading
	nextCheck time.Time
	unknown   bool // the last check had an unknown signal

	system    System
	systemAt  time.Time
	systemErr string
	loadEnd   time.Time // end of the newest window of load that was judged
	loadWait  time.Time // since when a final check has waited for a read of the load
	metricsAt time.Time
	nextLoad  time.Time

	nextProbe time.Time // when its activity sources are detected next

	noticeAt   time.Time     // when CML is asked about its notice next
	noticeWait time.Duration // current delay between attempts, while CML does not answer

	resumeAsked time.Time // when a resume was requested whose CML is not ready yet
	readyAt     time.Time // when CML is next asked whether it is ready
	wouldAt     time.Time // when dry run first prevented the current pause

	preflight    []string // codes of findings
	preflightErr string   // why some are unknown
	unchecked    []string // codes of checks that could not be made; nil with preflightErr means all
	preflightAt  time.Time

	labs   *int
	labsAt time.Time
	tagged bool // the draining tag was written

	line   evidence.Line // last log line about its checks
	looked evidence.Line // last log line about its final checks
	traced traced

	wouldStart time.Time // the schedule boundary at which dry run prevented its start

	licensed     time.Time // when the license was last worked on
	licenseAsked time.Time // when CML was asked to register
	licenseTaken bool      // CML has accepted that request
}

// dueHeap orders entries by when they are due.
type dueHeap []*entry

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].due.Before(h[j].due) }
func (h dueHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i]; h[i].heap, h[j].heap = i, j }

// Push implements heap.Interface.
func (h *dueHeap) Push(x any) {
	e := x.(*entry)
	e.heap = len(*h)
	*h = append(*h, e)
}

// Pop implements heap.Interface.
func (h *dueHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	e.heap = -1
	return e
}

// kick makes e due at a time, unless it is due earlier. An entry whose job is running
// is due again when the job ends.
func (c *Controller) kick(e *entry, at time.Time) {
	switch {
	case e.running && !at.After(time.Now().Add(debounce)):
		e.again = true
		return
	case e.running, e.queued:
		return
	case e.heap >= 0 && !at.Before(e.due):
		return
	}
	e.due = at
	if e.heap >= 0 {
		heap.Fix(&c.due, e.heap)
	} else {
		heap.Push(&c.due, e)
	}
	if c.due[0] == e {
		c.poke()
	}
}

func (c *Controller) unschedule(e *entry) {
	if e.heap >= 0 {
		heap.Remove(&c.due, e.heap)
	}
}

func (c *Controller) poke() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// laneKey identifies a lane. Regions have separate lanes, and within a region,
// workers whose last attempt failed have their own.
type laneKey struct {
	region regionKey
	slow   bool
}

// lane limits the number of its workers that are handled concurrently.
type lane struct {
	busy  int
	first []*entry // served before the queue
	queue []*entry
}

// take removes and returns the next entry, or nil.
func (l *lane) take() *entry {
	from := &l.first
	if len(l.first) == 0 {
		from = &l.queue
	}
	if len(*from) == 0 {
		return nil
	}
	e := (*from)[0]
	(*from)[0] = nil
	*from = (*from)[1:]
	return e
}

// urgent reports whether a worker is served before routine checks: it is in a
// transition or about to be, or a request waits for it. c.mu must be held.
func (c *Controller) urgent(e *entry) bool {
	return power.WorkerTable.IsTransitional(e.w.Status) || e.w.DesiredStatus != e.w.Status || len(c.waiting[e.id]) > 0
}

// dispatch starts the work that is due, until ctx ends.
func (c *Controller) dispatch(ctx context.Context) error {
	for {
		c.mu.Lock()
		now := time.Now()
		for len(c.due) > 0 && !c.due[0].due.After(now) {
			e := heap.Pop(&c.due).(*entry)
			if c.shards[e.shard] == nil {
				continue // another server owns it
			}
			e.queued = true
			k := laneKey{keyOf(&e.w), e.failures > 1}
			l := c.lanes[k]
			if l == nil {
				l = &lane{}
				c.lanes[k] = l
			}
			if c.urgent(e) {
				l.first = append(l.first, e)
			} else {
				l.queue = append(l.queue, e)
			}
			c.start(ctx, l)
		}
		wait := time.Hour
		if len(c.due) > 0 {
			wait = c.due[0].due.Sub(now)
		}
		c.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-c.wake:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// start starts as many jobs of a lane's queue as the lane has room for. c.mu must be
// held.
func (c *Controller) start(ctx context.Context, l *lane) {
	for l.busy < c.cfg.Lanes {
		e := l.take()
		if e == nil {
			return
		}
		e.queued = false
		sh := c.shards[e.shard]
		if sh == nil || c.entries[e.id] != e || ctx.Err() != nil {
			continue
		}
		job, cancel := context.WithCancel(sh.ctx)
		e.running, e.again, e.cancel = true, false, cancel
		l.busy++
		sh.jobs.Add(1)
		c.jobs.Go(func() {
			defer sh.jobs.Done()
			defer cancel()
			pprof.Do(job, pprof.Labels("part", "idle"), func(job context.Context) { c.work(job, e, sh) })
			c.mu.Lock()
			defer c.mu.Unlock()
			l.busy--
			c.start(ctx, l)
		})
	}
}

// work runs one job for a worker and schedules the next.
func (c *Controller) work(ctx context.Context, e *entry, sh *shard) {
	out := c.reconcile(ctx, e, sh)
	c.count.results.add(string(out.Result))
	c.mu.Lock()
	defer c.mu.Unlock()
	e.running, e.cancel = false, nil
	if c.entries[e.id] != e {
		return
	}
	now := time.Now()
	at := out.Next
	switch out.Result {
	case Success, Skip:
		e.failures = 0
	case Requeue:
		if at.IsZero() {
			at = now.Add(c.fleet.Settings().ReconcileInterval)
		}
	case Retry:
		at = now.Add(jitter(backoff(e.failures)))
		e.failures++
	}
	if e.again {
		e.again = false
		at = now
		if out.Result == Retry {
			at = now.Add(debounce)
		}
	}
	if !at.IsZero() {
		c.kick(e, at)
	}
}

// backoff returns 2^n s, at most 60 s.
func backoff(n int) time.Duration { return min(time.Second<<min(n, 6), time.Minute) }
