package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
)

// Timing of queued starts.
const (
	// aged is how long a start waits before it gets the priority of an
	// interactive one, so that a stream of interactive starts starves nothing.
	aged = 10 * time.Minute
	// unused is how long a budget may have unused room before starts further back in
	// the queue may take it. The first in the queue may belong to a server that is
	// gone.
	unused = time.Minute
	// queued is the maximum age of the computed queue.
	queued = time.Second
)

// starts is the queue of automatic starts.
type starts struct {
	at        time.Time
	place     map[[2]string]int    // by budget and worker
	freeSince map[string]time.Time // since when the budget has had room, by budget
}

// waits reports whether a worker waits for an automatic start.
func waits(w *worker.Worker) bool {
	return w.Status == power.WorkerStopped && w.DesiredStatus == power.WorkerRunning && w.StartOrigin == worker.OriginAuto &&
		w.StartReason != policy.ByUser
}

// ahead compares two queued starts at now: starts for a wake, or that have waited for
// aged, come first; then the oldest request.
func ahead(now time.Time, a, b *worker.Worker) int {
	class := func(w *worker.Worker) int {
		if w.StartReason == policy.ForWake || now.Sub(askedAt(w)) >= aged {
			return 0
		}
		return 1
	}
	if c := class(a) - class(b); c != 0 {
		return c
	}
	if c := askedAt(a).Compare(askedAt(b)); c != 0 {
		return c
	}
	return strings.Compare(a.ID, b.ID)
}

// startReason returns the reason for an automatic start, as used by budgets.
func startReason(w *worker.Worker) string { return cmp.Or(w.StartReason, policy.ForRepair) }

func askedAt(w *worker.Worker) time.Time {
	if w.StartAskedAt != nil {
		return *w.StartAskedAt
	}
	return w.StatusSince
}

// turn returns how many starts of the budget are ahead of this worker's, and since
// when the budget has had room. free is whether it has room now; if not, freeSince is
// zero.
func (c *Controller) turn(id, budget string, free bool, now time.Time) (place int, freeSince time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.starts.freeSince == nil {
		c.starts.freeSince = map[string]time.Time{}
	}
	if now.Sub(c.starts.at) >= queued || now.Before(c.starts.at) {
		var waiting []*worker.Worker
		for _, e := range c.entries {
			if waits(&e.w) {
				waiting = append(waiting, &e.w)
			}
		}
		slices.SortFunc(waiting, func(a, b *worker.Worker) int { return ahead(now, a, b) })
		c.starts.at, c.starts.place = now, make(map[[2]string]int, len(waiting))
		for _, b := range c.fleet.Rules().Budgets {
			n := 0
			for _, w := range waiting {
				if b.Holds(&policy.Subject{ID: w.ID, Region: w.AWSRegion, Tags: w.Tags}, policy.Starts, startReason(w)) {
					c.starts.place[[2]string{b.Name, w.ID}] = n
					n++
				}
			}
		}
	}
	if !free {
		delete(c.starts.freeSince, budget)
	} else if c.starts.freeSince[budget].IsZero() {
		c.starts.freeSince[budget] = now
	}
	return c.starts.place[[2]string{budget, id}], c.starts.freeSince[budget]
}

// takeStart starts a STOPPED worker that is to run, once its budgets allow it. Starts
// that a user requests do not wait for budgets.
func (j *job) takeStart(ctx context.Context) outcome {
	if waits(&j.w) {
		if out, wait := j.waitTurn(ctx); wait {
			return out
		}
	}
	w, err := j.f.TakeStart(ctx, j.w.ID, j.w.Revision(), j.seen)
	if no, refused := errors.AsType[*failure.Refused](err); refused {
		next := j.s.ReconcileInterval
		if no.Reason == string(idle.Budget) {
			next = time.Second
		}
		return j.held(ctx, no.Reason, no.Detail, time.Now().Add(next))
	}
	if err != nil {
		return j.failedWrite(err)
	}
	j.took(w)
	return j.again()
}

// waitTurn returns true while the worker must wait: a budget has no room, or only
// enough for the starts ahead.
func (j *job) waitTurn(ctx context.Context) (outcome, bool) {
	now := time.Now()
	for _, u := range j.c.fleet.BudgetsOf(now, &j.w, policy.Starts, startReason(&j.w)) {
		place, freeSince := j.c.turn(j.w.ID, u.Budget, u.Free, now)
		switch {
		case !u.Free:
			next := now.Add(j.s.ReconcileInterval)
			if u.FreeAt != nil && u.FreeAt.Before(next) {
				next = u.FreeAt.Add(spread(j.w.ID, queued))
			}
			return j.held(ctx, string(idle.Budget), u.Sentence, next), true
		case place >= u.Left && now.Sub(freeSince) < unused:
			return j.held(ctx, string(idle.Budget), fmt.Sprintf("Budget %s has capacity, but other workers are first in the queue.", u.Budget), now.Add(queued+spread(j.w.ID, queued))), true
		}
	}
	return outcome{}, false
}

// turnSaying is the prefix of the status reason while a start waits for a budget.
const turnSaying = "start is queued: "

// held records why a start waits; while it waits for a budget, only once. The worker
// is due again at next.
func (j *job) held(ctx context.Context, code, why string, next time.Time) outcome {
	status := turnSaying + why
	if code != string(idle.Budget) {
		status = "does not start: " + why
	}
	if j.w.StatusReason != status && !(code == string(idle.Budget) && strings.HasPrefix(j.w.StatusReason, turnSaying)) {
		err := j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
			w.StatusReason = status
			tx.Note(audit.Entry{Action: "start_held", Reason: code, Detail: why})
			return nil
		})
		if err != nil {
			return j.failedWrite(err)
		}
	}
	return outcome{Requeue, next}
}

// opens starts a stopped worker whose schedule has opened. Otherwise it returns when
// to check the schedule again; zero for never.
func (j *job) opens(ctx context.Context) (outcome, bool, time.Time) {
	r := j.rules()
	st := r.ScheduleState
	if st == nil {
		return outcome{}, false, time.Time{}
	}
	next := time.Time{}
	if st.Next != nil {
		next = st.Next.At
	}
	if !j.w.WantsStart(j.now, r) {
		return outcome{}, false, next
	}
	soon := j.now.Add(j.s.ReconcileInterval)
	switch {
	case r.FrozenUntil != nil:
		if next = *r.FrozenUntil; next.After(j.now.Add(time.Hour)) {
			next = j.now.Add(time.Hour)
		}
		return outcome{}, false, next
	case j.c.fleet.Halted().On:
		return outcome{}, false, soon
	case j.shadow():
		if !j.live.wouldStart.Equal(st.Last.At) {
			j.live.wouldStart = st.Last.At
			if err := j.write(ctx, func(_ *worker.Worker, tx *worker.Tx) error {
				tx.Note(audit.Entry{Action: "would_resume", Reason: string(power.ReasonSchedule), Detail: "schedule " + st.Schedule})
				return nil
			}); err != nil {
				return j.failedWrite(err), true, next
			}
		}
		return outcome{}, false, next
	}
	w, err := j.f.ScheduleStart(ctx, j.w.ID, j.w.Revision(), st.Schedule)
	if _, refused := errors.AsType[*failure.Refused](err); refused {
		return outcome{}, false, soon
	}
	if err != nil {
		return j.failedWrite(err), true, next
	}
	j.took(w)
	return outcome{Requeue, time.Now().Add(spread(j.w.ID, queued))}, true, next
}

// countFor is how long a count of a selector's workers is cached.
const countFor = 10 * time.Second

// sized is a cached count and when it was made.
type sized struct {
	n  int
	at time.Time
}

// size returns the number of workers that match sel, except TERMINATED ones.
func (c *Controller) size(sel policy.Scope) int {
	key, now := sel.String(), time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.sizes[key]; ok && now.Sub(s.at) < countFor && !now.Before(s.at) {
		return s.n
	}
	n := 0
	for _, e := range c.entries {
		sub := policy.Subject{ID: e.w.ID, Region: e.w.AWSRegion, Tags: e.w.Tags}
		if e.w.Status != power.WorkerTerminated && sel.Matches(&sub) {
			n++
		}
	}
	c.sizes[key] = sized{n, now}
	return n
}

// rulesChanged schedules a check of every worker, spread out so that they do not act
// in step.
func (c *Controller) rulesChanged() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.sizes)
	now := time.Now()
	within := c.fleet.Settings().ReconcileInterval / 2
	for _, e := range c.entries {
		if c.shards[e.shard] == nil {
			continue
		}
		e.reconciled = false
		c.untag(e)
		at := now.Add(debounce + spread(e.id, within))
		if e.live != nil && e.live.nextCheck.After(at) {
			e.live.nextCheck = at
		}
		c.kick(e, at)
	}
}
