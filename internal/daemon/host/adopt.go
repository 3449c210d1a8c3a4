package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"lull/internal/instance"
	"lull/internal/power"
)

// Limits of taking over.
const (
	adoptLimit   = 10 * time.Second // the search for one run
	adoptAgain   = 5 * time.Second  // and one that somebody waits for
	adoptAtOnce  = 16               // how many are searched for at once
	loadPatience = 2 * time.Second  // before those are served who ask
)

// beingSought is why an instance is not known yet.
var beingSought = errors.New("its run is being looked for")

// Load takes over what an earlier daemon left: records of any state, written
// at any instant. What still runs is adopted, what ended meanwhile is treated
// like any ending, and what was paused is looked at through the fence before
// it is frozen again. It waits for that, but not long: what hangs is looked for
// further while others are served. Call it once, before Run and before serving
// requests.
func (h *Host) Load(ctx context.Context, recs []instance.Record) error {
	var errs []error
	for n := range recs {
		rec := recs[n]
		rt, ok := h.cfg.Runtimes[rec.Spec.Runtime]
		if !ok {
			err := fmt.Errorf("cannot take over %s: %w", rec.Spec.Name, h.noRuntime(rec.Spec.Runtime))
			h.absent[rec.ID], h.absent[rec.Spec.Name] = err, err
			h.away = append(h.away, rec)
			errs = append(errs, err)
			continue
		}
		i := newInst(h, rec, rt)
		if err := i.openRelay(); err != nil {
			// The instance is kept: its state and promises do not depend on
			// the port, which the error names.
			errs = append(errs, fmt.Errorf("cannot open the ports of %s: %w", rec.Spec.Name, err))
			i.rec.StatusReason = "its ports could not be opened: " + err.Error()
		}
		if rec.State != power.Stopped {
			i.missing = beingSought
		}
		h.mu.Lock()
		h.byID[i.id], h.byName[i.name()] = i, i
		h.mu.Unlock()
		h.saver.seed(i.id, rec.Generation)
	}
	for _, what := range h.Misset() {
		h.log.Warn("the settings of an instance and of the host do not fit together", "fault", what)
	}
	return errors.Join(append(errs, h.adoptAll(ctx))...)
}

// adoptAll takes over every instance. It gives the faults that it has seen when it
// has waited long enough.
func (h *Host) adoptAll(ctx context.Context) error {
	var mu sync.Mutex
	var errs []error
	gone := false // nobody waits for errs any more
	take := func(i *inst) {
		i.acquire()
		err := i.seek(ctx)
		i.release()
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err == nil:
		case gone:
			h.log.Error("cannot take over", "instance", i.name(), "error", err)
		default:
			errs = append(errs, err)
		}
	}
	all, done := h.all(), make(chan struct{})
	h.spawn(func() {
		defer close(done)
		var wg sync.WaitGroup
		slots := make(chan struct{}, adoptAtOnce)
		for _, i := range all {
			slots <- struct{}{}
			wg.Go(func() { take(i); <-slots })
		}
		wg.Wait()
	})
	select {
	case <-done:
	case <-time.After(loadPatience):
		h.log.Warn("not everything has been taken over yet; it goes on")
	}
	mu.Lock()
	defer mu.Unlock()
	gone = true
	return errors.Join(errs...)
}

// adopt brings one instance into the state that its record says, for which it
// looks for its run no longer than limit. The caller holds the lock.
func (i *inst) adopt(ctx context.Context, limit time.Duration) error {
	was := i.state()
	i.mu.Lock()
	ident := i.rec.Identity
	i.over = make(chan struct{})
	i.mu.Unlock()
	if was == power.Stopped {
		i.forgetRun()
		i.armRestart()
		return nil
	}
	actx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var w Workload
	var err error = &instance.GoneError{ID: i.id, Exit: instance.Exit{Lost: true}}
	if ident != nil {
		w, err = i.rt.Adopt(actx, i.id, *ident)
	}
	var gone *instance.GoneError
	ended := errors.As(err, &gone)
	i.mu.Lock()
	if i.missing = err; ended {
		i.missing = nil
	}
	i.mu.Unlock()
	switch {
	case ended:
		if e := i.reported; e != nil && gone.Exit.Lost {
			gone.Exit = e.exit
		}
		why := ""
		if unusable := (*instance.SnapshotError)(nil); errors.As(err, &unusable) {
			why = unusable.Error()
		}
		return i.adoptEnded(was, gone.Exit, why)
	case err != nil:
		// Not found is not stopped: it stays as recorded and is tried again.
		i.h.retryAdopt(i)
		return fmt.Errorf("cannot take over %s: %w", i.name(), err)
	}
	found := w.Identity()
	i.mu.Lock()
	i.work, i.rec.Identity = w, &found
	if s, ok := w.(instance.Hibernator); ok && s.Hibernated() && was.Asleep() {
		// It was saved, and the daemon ended before it could say so.
		was, i.rec.State = power.Hibernated, power.Hibernated
	}
	i.mu.Unlock()
	switch was {
	case power.Starting:
		if err := i.continueStart(ctx, w); err == nil {
			return nil
		}
		// Nobody knows how far it came; the person or client that asked has
		// gone. A clean start is the only state that can be named.
		if err := i.startFailed(w, errors.New("the daemon ended while it was starting"), false); err != nil && i.state() != power.Stopped {
			return err
		}
		return i.start(ctx, "restart", "started again after the daemon ended while it was starting")
	case power.Stopping:
		a := &attempt{i: i, ctx: ctx, work: w, frozen: true, by: "restart"}
		err := a.walk([]step{{"stop-signal", askToEnd}, {"stop-thaw", thaw}})
		var unusable *instance.SnapshotError
		switch {
		case errors.As(err, &unusable): // there is nobody to ask
			if err := i.endNow(ctx); err != nil {
				return err
			}
		case err != nil:
			i.h.due.set(i, i.h.now().Add(time.Second)) // it is ended then
			return err
		}
		return i.finishStop(ctx, "restart", i.rec.StatusReason)
	}
	if err := i.adoptAlive(ctx, was, w); err != nil {
		i.h.due.set(i, i.h.now().Add(time.Second)) // looked at again
		return err
	}
	return nil
}

// settleLimit is how long something that an earlier daemon asked others for may
// still happen.
const settleLimit = 30 * time.Second

// adoptAlive takes over a run that was running, paused or in between.
func (i *inst) adoptAlive(ctx context.Context, was power.Instance, w Workload) error {
	// One with a network of its own is relayed to wherever it listens, also when it
	// cannot be asked where that is.
	if ls, err := w.Listeners(); err == nil || i.rt.Capabilities().Network {
		if err := i.decidePaths(append([]instance.Endpoint(nil), i.spec().Expose...), ls); err != nil {
			return err
		}
	}
	paused := was.Asleep()
	if paused {
		still, err := w.Still()
		i.mu.Lock()
		i.frozen = still || err != nil
		i.mu.Unlock()
		if err != nil { // nothing watches its sockets, so it is woken
			return fmt.Errorf("cannot tell whether %s is frozen: %w", i.name(), err)
		}
		if !still { // what it did meanwhile is not known, so it counts as used
			i.update(func(r *instance.Record) { r.State = power.Resuming })
			return i.foundResumed("supervisor", letRunSaying)
		}
	}
	if i.rt.Capabilities().Shared {
		if was == power.Pausing {
			i.mu.Lock()
			i.settles = i.h.now().Add(settleLimit)
			i.mu.Unlock()
		}
		// Its own pauses are recorded before they begin, so this is another's.
		if still, err := w.Still(); err == nil && still && (was == power.Running || i.pausedByOthers()) {
			if was == power.Running {
				return i.pausedOutside("it was paused while no daemon was there")
			}
			i.mu.Lock()
			i.frozen = true
			i.mu.Unlock()
			return nil
		}
	}
	if !paused {
		err := w.Thaw()
		var unusable *instance.SnapshotError
		switch {
		case errors.As(err, &unusable):
			i.update(func(r *instance.Record) { r.State = power.Resuming })
			return i.bootAnew(ctx, "restart", "the daemon ended in the middle of a wake", unusable)
		case err != nil: // it may be frozen, so it does not count as running
			if was == power.Running {
				i.update(func(r *instance.Record) { r.State, r.StatusReason = power.Pausing, err.Error() })
			}
			i.mu.Lock()
			i.frozen = true
			i.mu.Unlock()
			return fmt.Errorf("cannot thaw %s: %w", i.name(), err)
		}
		if was == power.Running {
			// Its activity since the last record was lost with the daemon that saw it.
			i.update(func(r *instance.Record) { r.LastActivityAt = i.h.now() })
			i.open()
			i.scheduleAwake(i.h.now())
			return nil
		}
		if was == power.Pausing {
			return i.foundPausing()
		}
		return i.foundResumed("restart", midChangeSaying)
	}
	a := i.asItIs(ctx, "restart", i.rec.StatusReason)
	a.force, a.adopted = true, true
	err := a.walk(i.h.steps.resumePause)
	if err == nil {
		return nil
	}
	if uerr := a.walk(i.h.steps.undo); uerr != nil {
		i.h.due.set(i, i.h.now().Add(100*time.Millisecond))
		return errors.Join(err, uerr)
	}
	i.emit("resumed", "restart", err.Error())
	return nil
}

// Why an instance runs that slept, or was on the way to or from it, when its daemon
// ended.
const (
	letRunSaying    = "it was let run while no daemon was there"
	midChangeSaying = "the daemon ended in the middle of a change"
)

// foundResumed records a resume that nobody saw, at the time at which it is found.
func (i *inst) foundResumed(by, why string) error {
	now := i.h.now()
	i.note(func(r *instance.Record) {
		r.State, r.StatusReason = power.Running, why
		r.LastActivityAt, r.LastResumedAt, r.ResumedBy = now, now, by
		r.Freed, r.Saved = 0, 0
	})
	i.open()
	i.scheduleAwake(now)
	i.emit("resumed", by, why)
	return nil
}

// foundPausing returns one to running whose pause had not come to its end: there
// is no resume to tell of.
func (i *inst) foundPausing() error {
	now := i.h.now()
	i.note(func(r *instance.Record) {
		r.State, r.StatusReason, r.LastActivityAt = power.Running, midChangeSaying, now
	})
	i.open()
	i.scheduleAwake(now)
	return nil
}

// adoptEnded records what ended while no daemon watched, then applies the
// restart rule.
func (i *inst) adoptEnded(was power.Instance, e instance.Exit, cause string) error {
	now := i.h.now()
	if e.At.IsZero() {
		e.At = now
	}
	why := "ended while the daemon was away"
	if !e.Lost {
		why = e.How() + ", while the daemon was away"
	}
	if cause != "" {
		why += ": " + cause
	}
	i.note(func(r *instance.Record) {
		r.State, r.StatusReason, r.Exit, r.Saved, r.Freed = power.Stopped, why, &e, 0, 0
		if was != power.Stopping {
			afterEnd(r, e, now)
		} else {
			r.Leases = nil
		}
	})
	i.forgetRun()
	i.emit("exited", "", why)
	i.armRestart()
	return nil
}

// retryAdopt checks again for a run that could not be looked for.
func (h *Host) retryAdopt(i *inst) {
	if !i.lost.CompareAndSwap(false, true) {
		return // somebody is at it
	}
	h.spawn(func() {
		select {
		case <-time.After(time.Second):
		case <-h.ctx.Done():
			return
		}
		if i.acquireCtx(h.ctx) != nil {
			return
		}
		defer i.release()
		i.lost.Store(false)
		i.mu.Lock()
		before := i.missing
		i.mu.Unlock()
		if err := i.seek(h.ctx); err != nil && (before == nil || !strings.Contains(err.Error(), before.Error())) {
			h.log.Error("cannot take over", "instance", i.name(), "error", err)
		}
	})
}

// seek takes i over for nobody who waits, unless somebody else has: a stop does not
// wait for it. The caller holds the lock.
func (i *inst) seek(ctx context.Context) error {
	if i.workload() != nil {
		return nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	i.interrupt.Store(&cancel)
	defer i.interrupt.Store(nil)
	return i.adopt(ctx, adoptLimit)
}

// takenOver sees to it that a run which an earlier daemon left is known: until
// then it can be neither woken nor stopped, and nothing is started beside it.
// The caller holds the lock.
func (i *inst) takenOver() error {
	if i.workload() != nil || i.state() == power.Stopped {
		return nil
	}
	return i.adopt(i.h.ctx, adoptAgain)
}

// endUnknown ends, for a user, a run that could not be taken over because of
// cause: nobody can ask it to end, and its runtime knows which one it is.
func (i *inst) endUnknown(ctx context.Context, by string, cause error) error {
	e, ok := i.rt.(instance.Ender)
	if !ok {
		return cause
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	if err := e.End(ctx, i.id); err != nil {
		return errors.Join(cause, fmt.Errorf("cannot stop %s: %w", i.name(), err))
	}
	return i.finishStop(ctx, by, "stopped by a person; it could not end in order: "+cause.Error())
}
