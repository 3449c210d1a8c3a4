package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/relay"
)

// A wake comes from a guard of the program's sockets (wantWake), from the relay
// (Wake), from a user (Host.Resume) or from a deadline (checkAsleep). All of them
// end in wake, which executes the steps of the fence under the instance's lock. An
// instance of known size that needs memory is first admitted, without the lock.

// wantWake requests a wake. It needs no lock and does not wait for one.
//
// If the lock is free and nothing else has to be decided, it thaws the program
// first. After a silence every function that is called before the thaw delays the
// client by a microsecond or more, because its code is in no cache.
func (i *inst) wantWake(why string) {
	i.h.point("wake-wanted", i)
	since := i.h.Now()
	if i.tryAcquire() {
		i.thawFirst()
		i.leave(why, since)
	} else {
		i.leave(why, since)
		i.stirNow()
		i.h.point("wake-left", i)
		if !i.tryAcquire() {
			return // its holder will check
		}
	}
	if i.guest {
		// A guest may have to be restored for the thaw, which takes longer than
		// the caller can wait.
		i.h.spawn(func() { i.serve(); i.release() })
		return
	}
	i.serve()
	i.turn.early = 0
	i.mu.Lock()
	i.proc.thawing = false
	i.mu.Unlock()
	i.release()
}

// leave leaves a request for a wake to the holder of the lock.
func (i *inst) leave(why string, since time.Time) {
	i.requests.asked.CompareAndSwap(nil, &since)
	if fromOutside(why) {
		i.requests.wanted.Store(&why)
	} else {
		i.requests.wanted.CompareAndSwap(nil, &why)
	}
}

// thawFirst executes the steps of a wake up to the thaw, if the instance is a frozen
// program that the caller's request certainly wakes. wake executes the rest. The
// caller holds the lock and has the request served before it releases the lock.
func (i *inst) thawFirst() {
	i.mu.Lock()
	ready := !i.guest && i.rec.State == power.Paused && i.rec.PausedBy != byOutside && i.proc.frozen && i.proc.guard != nil
	i.proc.thawing = ready
	a := attempt{i: i, ctx: i.h.ctx, by: byConnection, work: i.proc.work, guard: i.proc.guard, frozen: true}
	i.mu.Unlock()
	if !ready || a.work == nil || len(i.spec().DependsOn) > 0 || i.endedNow() || i.h.cfg.Tracer != nil {
		return
	}
	for n, s := range i.h.steps.wake {
		if s.name == publishStep {
			return
		}
		i.h.point(s.name, i)
		if s.do(&a) != nil {
			return
		}
		i.turn.early = n + 1
	}
}

// serveWake wakes the instance if it is asleep and may be woken. i.lock must be
// held.
func (i *inst) serveWake(why string) {
	switch s := i.state(); {
	case i.pausedByOthers():
		i.requests.asked.Store(nil)
	case s.Asleep() && i.wakeAfterDependencies(why):
	case s.Asleep():
		i.wakeFor(why)
	case s == power.Stopped && i.unwakeable() == "":
		i.h.spawn(func() {
			if err := i.h.startFor(i.h.ctx, i, byConnection, why); err != nil && !fromRoom(err) {
				i.h.log.Error("cannot start for a connection", "instance", i.name(), "err", err)
			}
		})
	default: // the instance runs already, or must not be woken
		i.requests.asked.Store(nil)
		if s == power.Running { // possibly for a reason that has not woken its group
			i.wakeGroup(byConnection, why)
		}
	}
}

// wakeFor wakes i for a connection, if it is asleep. i.lock must be held.
func (i *inst) wakeFor(why string) {
	switch s := i.state(); {
	case !s.Asleep() || i.pausedByOthers():
		i.requests.asked.Store(nil)
	case s != power.Paused && i.rationed():
		i.wakeLater(byConnection, why)
	default:
		i.wakeNow(byConnection, why)
	}
}

// Wake implements relay.Waker.
func (i *inst) Wake(ctx context.Context, a relay.Arrival) error {
	why := fmt.Sprintf("a client connected from %s", a.Remote)
	if i.rationed() { // a client that cannot wake i needs no admission
		if err := i.mayWake(a); err != nil {
			return err
		}
	}
	defer i.ask()()
	if i.mayWake(a) == nil {
		i.h.wakeDependencies(ctx, i)
	}
	i.stirNow()
	leave, err := i.h.enter(ctx, i, call{what: "wake", by: byConnection, client: true, may: func() error { return i.mayWake(a) }})
	if err != nil {
		return err
	}
	defer leave()
	if err := i.stabilize(); err != nil {
		return err
	}
	if err := i.mayWake(a); err != nil {
		return err
	}
	switch s := i.state(); s {
	case power.Running:
		return nil
	case power.Paused, power.Reclaimed, power.Hibernated:
		return i.wake(byConnection, why)
	case power.Stopped:
		return i.start(ctx, byConnection, i.restarted(why))
	default:
		return fmt.Errorf("%s is %s", i.name(), s)
	}
}

// mayWake returns why a client of the relay cannot wake i in its current state, or
// nil.
func (i *inst) mayWake(a relay.Arrival) error {
	switch i.state() {
	case power.Paused, power.Reclaimed, power.Hibernated:
		if i.pausedByOthers() {
			return fmt.Errorf("%s was paused outside lull; resume it there or with: lull resume %s", i.name(), i.name())
		}
	case power.Stopped:
		switch {
		case a.Cause == relay.CauseData:
			return fmt.Errorf("%s was stopped, and the connection belonged to its last run", i.name())
		case !i.enabled():
			return fmt.Errorf("%s is disabled", i.name())
		case i.restartsNow(): // the client waits for the restart
		case i.unwakeable() != "":
			return fmt.Errorf("%s is stopped (%s); start it with: lull start %s", i.name(), i.unwakeable(), i.name())
		}
	}
	return nil
}

// restartsNow reports whether the program has exited and is about to be restarted
// for the first time. Later restarts are delayed.
func (i *inst) restartsNow() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.rec.Enabled && len(i.rec.Crashes) == 0 && !i.rec.RestartAt.IsZero()
}

// wakeLater wakes i in the background once it is admitted. Nothing waits for the
// result, so it retries until i is awake or the reason no longer applies.
func (i *inst) wakeLater(by, why string) {
	if !i.loops.queued.CompareAndSwap(false, true) {
		return
	}
	i.h.spawn(func() {
		for {
			leave, err := i.h.enter(i.h.ctx, i, call{what: "wake", by: by, client: true, may: i.notStopped("wake")})
			if i.h.ctx.Err() != nil {
				if err == nil {
					leave()
				}
				return
			}
			if err == nil {
				i.loops.queued.Store(false) // cleared while the lock is held: requests that come later are served at its release
				if i.state().Asleep() {
					i.wakeNow(by, why)
				}
				leave()
				return
			}
			var busy *BusyError // enter has already published this
			if !errors.As(err, &busy) || !i.state().Asleep() {
				i.loops.queued.Store(false)
				return
			}
		}
	})
}

// wakeNow wakes a sleeping instance for a requester that does not wait. If that
// fails, it is retried. i.lock must be held.
func (i *inst) wakeNow(by, why string) {
	if by != byConnection && !i.rouse() { // before a wake for a connection, the dependencies were woken already
		i.h.spawn(func() { i.h.wakeDependencies(i.h.ctx, i) })
	}
	if err := i.wake(by, why); err != nil {
		i.h.log.Error("cannot wake", "instance", i.name(), "why", why, "err", err)
	}
}

// wake wakes a paused instance. The record is written after the thaw, because a
// thaw is safe whatever is on disk: a daemon that finds "paused" checks again
// before it freezes anything. i.lock must be held.
func (i *inst) wake(by, why string) error {
	if i.workload() == nil {
		return fmt.Errorf("cannot wake %s: its run has not been found again yet", i.name())
	}
	if s := i.state(); s != power.Resuming { // if it is already resuming, an earlier wake has failed
		if err := i.move(power.Resuming); err != nil {
			return err
		}
		i.turn.from = s
	}
	ctx, span := i.span(i.h.ctx, "instance.wake")
	defer span.End()
	traceCause(span, by, why)
	a := i.asItIs(ctx, by, why)
	i.update(func(r *instance.Record) { r.State = power.Resuming })
	err := a.walk(i.h.steps.wake[i.turn.early:])
	if err == nil {
		return nil
	}
	fault(span, err)
	var unusable *instance.SnapshotError
	if errors.As(err, &unusable) {
		return i.bootAnew(a.ctx, by, why, unusable)
	}
	err = fmt.Errorf("cannot wake %s: %w", i.name(), err)
	if s, ok := a.work.(instance.Hibernator); ok && s.Hibernated() {
		return errors.Join(err, i.stayHibernated(a, err))
	}
	// The instance's sockets are no longer watched, so the wake is retried until it
	// succeeds.
	i.update(func(r *instance.Record) { r.StatusReason = err.Error() })
	i.h.due.Set(i.due, i.h.Now().Add(100*time.Millisecond))
	return err
}

// stayHibernated handles a restore that failed although the snapshot is good. It
// watches the instance again, and the next client causes another attempt.
func (i *inst) stayHibernated(a *attempt, cause error) error {
	err := arm(a)
	if err == nil {
		err = i.save(func(r *instance.Record) { r.State, r.StatusReason = power.Hibernated, cause.Error() })
	}
	if err != nil {
		i.h.due.Set(i.due, i.h.Now().Add(time.Second)) // repair will try to wake it
		return err
	}
	if i.gate != nil {
		i.gate.Sleep()
	}
	i.emit("wake_failed", a.by, cause.Error())
	i.scheduleAsleep(i.h.Now())
	return nil
}

// wakes reports whether a connection should start the instance after lull has
// stopped it.
func (i *inst) wakes() bool {
	caps := i.rt.Capabilities()
	if _, ok := i.rt.(instance.PortHolder); ok || i.spec().Adopted.IsUnit() {
		return i.spec().Wakes() && i.stopAfter() > 0
	}
	return i.spec().Wakes() && caps.WakeFromStopped && !caps.Shared && len(i.spec().Expose) > 0
}

// unwakeable returns why a connection does not start the stopped instance, or "".
func (i *inst) unwakeable() string {
	i.mu.Lock()
	r := i.rec
	i.mu.Unlock()
	switch {
	case !r.Enabled:
		return "it is disabled"
	case !i.spec().Wakes():
		return "it is stopped, and connections do not start it"
	case r.StoppedBy == ByManual:
		return "it was stopped by a user"
	case i.spec().WakeFromStopped == nil && r.StoppedBy != stopAfter && r.RestartAt.IsZero():
		return "lull did not stop it"
	case r.CrashLooping:
		return "it failed too often and is not restarted automatically"
	case !r.RestartAt.IsZero() && len(r.Crashes) > 0:
		return "it failed, and is started again in a moment"
	}
	return ""
}

// ask records that a caller waits for i to run, unless one already does. drop
// undoes that; the caller calls it if the request fails.
func (i *inst) ask() (drop func()) {
	now := i.h.Now()
	i.requests.asked.CompareAndSwap(nil, &now)
	return func() { i.requests.asked.CompareAndSwap(&now, nil) }
}

// ran records how long callers have waited for i to run. Wakes for which no caller
// waits, such as those at the end of the host, are not counted.
func (i *inst) ran(from power.Instance) {
	if t := i.requests.asked.Swap(nil); t != nil {
		i.h.metrics.Woken(i.spec().Runtime, from, i.h.Now().Sub(*t))
	}
}
