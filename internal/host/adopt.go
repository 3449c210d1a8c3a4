package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/account"
)

// Limits on adoption.
const (
	adoptLimit  = 10 * time.Second // time for the search for one run
	adoptAgain  = 5 * time.Second  // time for an attempt for which a caller waits
	adoptAtOnce = 16               // concurrent searches
	loadWait    = 2 * time.Second  // how long Load waits before requests are served
)

// beingSought means that the search for a run is still in progress.
var beingSought = errors.New("the search for its run is in progress")

// Load takes over what an earlier daemon left. The records may be in any state and
// may have been written at any instant.
//
// A run that still exists is adopted, and one that has ended is handled like any
// other exit. A paused one passes through the fence before it is frozen again. Load
// waits only briefly; searches that hang continue while other instances are served.
// Load must be called once, before Run and before requests are served.
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
			// The instance is kept: its state and promises do not depend on the
			// port.
			errs = append(errs, fmt.Errorf("cannot open the ports of %s: %w", rec.Spec.Name, err))
			i.rec.StatusReason = "its ports could not be opened: " + err.Error()
		}
		if rec.State != power.Stopped {
			i.proc.missing = beingSought
		}
		h.mu.Lock()
		h.byID[i.id], h.byName[i.name()] = i, i
		h.mu.Unlock()
		h.related.add(i)
		h.saver.Loaded(i.id, rec.Generation)
	}
	for _, what := range h.Misset() {
		h.log.Warn("the settings of an instance and of the host contradict each other", "fault", what)
	}
	return errors.Join(append(errs, h.adoptAll(ctx))...)
}

// adoptAll adopts every instance. It returns the errors that occurred before its
// wait ended.
func (h *Host) adoptAll(ctx context.Context) error {
	var mu sync.Mutex
	var errs []error
	gone := false // nothing receives from errs anymore
	take := func(i *inst) {
		i.acquire()
		err := i.seek(ctx)
		i.release()
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err == nil:
		case gone:
			h.log.Error("cannot take over", "instance", i.name(), "err", err)
		default:
			errs = append(errs, err)
		}
	}
	all := h.all()
	h.spawn(func() {
		defer close(h.loaded)
		var wg sync.WaitGroup
		slots := make(chan struct{}, adoptAtOnce)
		for _, i := range all {
			slots <- struct{}{}
			wg.Go(func() { take(i); <-slots })
		}
		wg.Wait()
	})
	select {
	case <-h.loaded:
	case <-time.After(loadWait):
		h.log.Warn("not everything has been adopted yet; retrying")
	}
	mu.Lock()
	defer mu.Unlock()
	gone = true
	return errors.Join(errs...)
}

// AwaitLoaded waits until Load has searched for every run once. Load itself may have
// returned before. It returns the cause if ctx ends first.
func (h *Host) AwaitLoaded(ctx context.Context) error {
	select {
	case <-h.loaded:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// adopt brings one instance into the state that its record names. It searches for
// the run for at most limit. i.lock must be held.
func (i *inst) adopt(ctx context.Context, limit time.Duration) error {
	was := i.state()
	i.mu.Lock()
	ident := i.rec.Identity
	i.proc.over = make(chan struct{})
	i.mu.Unlock()
	if was == power.Stopped {
		i.noteReboot(ctx)
		i.forgetRun()
		i.armRestart()
		i.releaseEnded()
		i.startUnwatched()
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
	if i.proc.missing = err; ended {
		i.proc.missing = nil
	}
	i.mu.Unlock()
	switch {
	case ended:
		if e := i.turn.reported; e != nil && gone.Exit.Lost {
			gone.Exit = e.exit
		}
		why := ""
		if unusable := (*instance.SnapshotError)(nil); errors.As(err, &unusable) {
			why = unusable.Error()
		}
		return i.adoptEnded(was, gone.Exit, why)
	case err != nil:
		// The run may exist although it was not found. The instance therefore stays
		// as recorded, and the search is repeated.
		i.h.retryAdopt(i)
		return fmt.Errorf("cannot take over %s: %w", i.name(), err)
	}
	found := w.Identity()
	i.mu.Lock()
	i.proc.work, i.rec.Identity = w, &found
	automatic := was == power.Stopping && i.rec.StoppedBy == stopAfter
	again := was == power.Stopping && !i.rec.RestartAt.IsZero()
	i.mu.Unlock()
	if automatic || again { // keep holding the ports as the earlier daemon did, until the next run
		i.shut(true)
	}
	if automatic {
		switch i.stopProgress(ctx, w) {
		case stopOver:
			return i.finishStop(ctx, "restart", i.rec.StatusReason)
		case stopOff:
			was = power.Paused
		}
	}
	i.mu.Lock()
	if automatic && was == power.Paused { // the stop is decided again
		i.rec.State, i.rec.StoppedBy = was, ""
	}
	if s, ok := w.(instance.Hibernator); ok && s.Hibernated() && was.Asleep() {
		// The guest was saved, but the daemon ended before it recorded that.
		was, i.rec.State = power.Hibernated, power.Hibernated
	}
	i.mu.Unlock()
	switch was {
	case power.Starting:
		if err := i.continueStart(ctx, w); err == nil {
			return nil
		}
		// How far the start came is unknown, and its caller no longer exists. Only
		// a new start leads to a known state.
		if err := i.startFailed(w, errors.New("the daemon ended while it was starting"), false); err != nil && i.state() != power.Stopped {
			return err
		}
		return i.start(ctx, "restart", "started again after the daemon ended while it was starting")
	case power.Stopping:
		a := &attempt{i: i, ctx: ctx, work: w, frozen: true, by: "restart"}
		err := a.walk(i.h.steps.resumeStop)
		var unusable *instance.SnapshotError
		switch {
		case errors.As(err, &unusable): // no caller is left to whom this could be reported
			if err := i.endNow(ctx); err != nil {
				return err
			}
		case err != nil:
			i.h.due.Set(i.due, i.h.Now().Add(time.Second)) // the check at this deadline completes the stop
			return err
		}
		return i.finishStop(ctx, "restart", i.rec.StatusReason)
	}
	if err := i.adoptAlive(ctx, was, w); err != nil {
		i.h.due.Set(i.due, i.h.Now().Add(time.Second)) // the check at this deadline tries again
		return err
	}
	return nil
}

// How far an automatic stop came before its daemon died.
const (
	stopOff  = iota // canceled, or the program was not asked to exit: the stop is decided again
	stopOn          // the program exits when it is thawed
	stopOver        // the program has exited
)

// stopProgress returns how far the automatic stop of an earlier daemon came. The
// record does not show whether a client canceled it. A program that was asked to
// exit must not serve any more clients. While it is frozen, its signal is pending.
// If the supervisor has thawed it, it may be about to exit, so stopProgress waits
// for the stop grace, and clients wait meanwhile. i.lock must be held.
func (i *inst) stopProgress(ctx context.Context, w Workload) int {
	still, err := w.Still()
	if err == nil && still {
		var exiting bool
		switch exiting, err = w.Exiting(); {
		case err == nil && exiting:
			return stopOn
		case err == nil:
			return stopOff
		}
	}
	if err != nil { // unknown: once thawed, the program either exits or serves clients
		if err := w.Thaw(); err != nil {
			return stopOff // adoption will report it
		}
	}
	i.mu.Lock()
	over := i.proc.over
	i.mu.Unlock()
	grace := time.NewTimer(i.stopGrace())
	defer grace.Stop()
	select {
	case <-over:
		return stopOver
	case <-grace.C:
	case <-ctx.Done(): // a user stops it
	}
	return stopOff
}

// requestLimit is how long a request that an earlier daemon sent to another process
// may still take effect.
const requestLimit = 30 * time.Second

// adoptAlive adopts a run that was running, paused or in a transition before the
// daemon ended.
func (i *inst) adoptAlive(ctx context.Context, was power.Instance, w Workload) error {
	i.shut(false) // the earlier daemon may have died just before it recorded a stop
	// The relay reaches an instance with its own network wherever that listens, so
	// adoption continues even if its listeners cannot be read.
	if ls, err := w.Listeners(); err == nil || i.rt.Capabilities().Network {
		if err := i.decidePaths(append([]instance.Endpoint(nil), i.spec().Expose...), ls); err != nil {
			return err
		}
	}
	i.showListeners(w)
	paused := was.Asleep()
	if paused {
		still, err := w.Still()
		i.mu.Lock()
		i.proc.frozen = still || err != nil
		i.mu.Unlock()
		if i.readTimers(w) {
			i.mu.Lock()
			i.timed.since = i.rec.LastPausedAt
			i.mu.Unlock()
		}
		if err != nil { // Nothing watches its sockets, so it must be woken.
			return fmt.Errorf("cannot determine whether %s is frozen: %w", i.name(), err)
		}
		if !still { // the program may have been active recently, so it counts as active now
			i.update(func(r *instance.Record) { r.State = power.Resuming })
			return i.foundResumed("supervisor", letRunSaying)
		}
	}
	if i.rt.Capabilities().Shared {
		if was == power.Pausing {
			i.expectOwnPause(i.h.Now().Add(requestLimit))
		}
		// lull records its own pauses before they begin, so this one was not made
		// by lull.
		if still, err := w.Still(); err == nil && still && (was == power.Running || i.pausedByOthers()) {
			if was == power.Running {
				return i.pausedOutside("it was paused while no daemon was running")
			}
			i.mu.Lock()
			i.proc.frozen = true
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
		case err != nil: // the program may be frozen, so it does not count as running
			if was == power.Running {
				i.update(func(r *instance.Record) { r.State, r.StatusReason = power.Pausing, err.Error() })
			}
			i.mu.Lock()
			i.proc.frozen = true
			i.mu.Unlock()
			return fmt.Errorf("cannot thaw %s: %w", i.name(), err)
		}
		if was == power.Running {
			// Activity after the last record is unknown, because only the earlier
			// daemon saw it.
			i.update(func(r *instance.Record) { r.LastActivityAt = i.h.Now() })
			i.open()
			i.scheduleAwake(i.h.Now())
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
		i.h.due.Set(i.due, i.h.Now().Add(100*time.Millisecond))
		return errors.Join(err, uerr)
	}
	i.emit("resumed", "restart", err.Error())
	return nil
}

// Reasons for the state of an instance that was asleep or in a power transition
// when its daemon ended.
const (
	letRunSaying    = account.LetRun
	restartedSaying = account.Restarted             // start of a reason
	disorderSaying  = "it could not exit cleanly: " // in the reason of a stop, before the cause
	midChangeSaying = "the daemon ended in the middle of a change"
)

// foundResumed records a resume that happened while no daemon ran. Its time is when
// it was found.
func (i *inst) foundResumed(by, why string) error {
	now := i.h.Now()
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

// foundPausing returns an instance whose pause was not completed to running. It
// records no resume.
func (i *inst) foundPausing() error {
	now := i.h.Now()
	i.note(func(r *instance.Record) {
		r.State, r.StatusReason, r.LastActivityAt = power.Running, midChangeSaying, now
	})
	i.open()
	i.scheduleAwake(now)
	return nil
}

// adoptEnded records an exit that happened while no daemon ran, and restarts the
// instance if its restart rule says so.
func (i *inst) adoptEnded(was power.Instance, e instance.Exit, cause string) error {
	now := i.h.Now()
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
		if i.spec().Adopted.IsUnit() {
			r.RestartAt = time.Time{} // restarting a unit is up to systemd
		} else if was != power.Stopping {
			r.ApplyRestartRule(e, now)
		} else {
			r.Leases = nil
		}
	})
	i.forgetRun()
	i.emit("exited", "", why)
	i.armRestart()
	i.releaseEnded()
	return nil
}

// retryAdopt repeats a failed search for a run until it succeeds.
func (h *Host) retryAdopt(i *inst) {
	if !i.loops.lost.CompareAndSwap(false, true) {
		return // another retry is in progress
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
		i.loops.lost.Store(false)
		i.mu.Lock()
		before := i.proc.missing
		i.mu.Unlock()
		if err := i.seek(h.ctx); err != nil && (before == nil || !strings.Contains(err.Error(), before.Error())) {
			h.log.Error("cannot take over", "instance", i.name(), "err", err)
		}
	})
}

// seek adopts i, with adoptLimit for the search. A stop interrupts the search.
// i.lock must be held.
func (i *inst) seek(ctx context.Context) error {
	if i.workload() != nil {
		return nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	i.requests.interrupt.Store(&cancel)
	defer i.requests.interrupt.Store(nil)
	return i.adopt(ctx, adoptLimit)
}

// takenOver makes sure that a run left by an earlier daemon has been adopted. Until
// then the instance can be neither woken nor stopped, and no second run may start.
// i.lock must be held.
func (i *inst) takenOver() error {
	if i.workload() != nil || i.state() == power.Stopped {
		return nil
	}
	return i.adopt(i.h.ctx, adoptAgain)
}

// endUnknown ends, at a user's request, a run that could not be adopted because of
// cause. The program cannot be asked to exit, but its runtime can identify and kill
// it.
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
	return i.finishStop(ctx, by, "stopped by a user; "+disorderSaying+cause.Error())
}
