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
// (Wake), from a user (Host.Resume), or from a deadline (checkAsleep). All of
// them end in wake, which walks the steps of the fence under the instance's
// lock. An instance of known size that needs memory is admitted first, without
// the lock.

// wantWake requests a wake. It never blocks and needs no lock.
func (i *inst) wantWake(why string) {
	i.ask()
	if fromOutside(why) {
		i.requests.wanted.Store(&why)
	} else {
		i.requests.wanted.CompareAndSwap(nil, &why)
	}
	i.stirNow()
	i.h.point("wake-wanted", i)
	if i.tryAcquire() {
		if i.rt.Capabilities().Network {
			// The thaw talks to the guest and may restore it, which takes
			// longer than a caller can wait.
			i.h.spawn(func() { i.serve(); i.release() })
			return
		}
		i.serve()
		i.release()
	}
}

// serveWake wakes the instance under the lock if it is asleep and may be woken.
// Otherwise it does nothing.
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
	default: // it runs, or may not be woken
		i.requests.asked.Store(nil)
		if s == power.Running { // perhaps woken for less than a client
			i.wakeGroup(byConnection, why)
		}
	}
}

// wakeFor wakes i for a connection, under its lock, if it is asleep.
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

// Wake wakes the instance for the relay.
func (i *inst) Wake(ctx context.Context, a relay.Arrival) error {
	why := fmt.Sprintf("a client connected from %s", a.Remote)
	if i.rationed() { // a client that wakes nothing needs no admission
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

// mayWake returns why a relay client cannot wake i in its present state; nil if
// it can.
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

// restartsNow reports whether the instance exited and is about to be restarted.
// This applies to the first restart only: later ones are delayed.
func (i *inst) restartsNow() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.rec.Enabled && len(i.rec.Crashes) == 0 && !i.rec.RestartAt.IsZero()
}

// wakeLater wakes i when it is admitted. The requester does not wait, so it
// retries until i is awake or the reason is gone.
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
				i.loops.queued.Store(false) // under the lock: later requests are served when it is released
				if i.state().Asleep() {
					i.wakeNow(by, why)
				}
				leave()
				return
			}
			var busy *BusyError // enter has published it
			if !errors.As(err, &busy) || !i.state().Asleep() {
				i.loops.queued.Store(false)
				return
			}
		}
	})
}

// wakeNow wakes a sleeping instance under its lock for a requester that does
// not wait. It retries on failure.
func (i *inst) wakeNow(by, why string) {
	if by != byConnection && !i.rouse() { // for a connection, they have been woken before
		i.h.spawn(func() { i.h.wakeDependencies(i.h.ctx, i) })
	}
	if err := i.wake(by, why); err != nil {
		i.h.log.Error("cannot wake", "instance", i.name(), "why", why, "err", err)
	}
}

// wake thaws a paused instance. The caller holds the lock. The record is
// written after the thaw, because a thaw is safe whatever is on disk: a daemon
// that finds "paused" checks again before it freezes anything.
func (i *inst) wake(by, why string) error {
	if i.workload() == nil {
		return fmt.Errorf("cannot wake %s: its run has not been found again yet", i.name())
	}
	if s := i.state(); s != power.Resuming { // otherwise an earlier wake failed
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
	err := a.walk(i.h.steps.wake)
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
	// Its sockets are no longer watched, so the wake is retried until it
	// succeeds.
	i.update(func(r *instance.Record) { r.StatusReason = err.Error() })
	i.h.due.Set(i.due, i.h.Now().Add(100*time.Millisecond))
	return err
}

// stayHibernated handles a failed restore whose snapshot is good: the instance
// is watched again, and the next client tries again.
func (i *inst) stayHibernated(a *attempt, cause error) error {
	err := arm(a)
	if err == nil {
		err = i.save(func(r *instance.Record) { r.State, r.StatusReason = power.Hibernated, cause.Error() })
	}
	if err != nil {
		i.h.due.Set(i.due, i.h.Now().Add(time.Second)) // repair tries to wake it
		return err
	}
	if i.gate != nil {
		i.gate.Sleep()
	}
	i.emit("wake_failed", a.by, cause.Error())
	i.scheduleAsleep(i.h.Now())
	return nil
}

// wakes reports whether a connection is meant to start the instance after lull
// stopped it.
func (i *inst) wakes() bool {
	caps := i.rt.Capabilities()
	if _, ok := i.rt.(instance.PortHolder); ok || i.spec().Adopted.IsUnit() {
		return i.spec().Wakes() && i.stopAfter() > 0
	}
	return i.spec().Wakes() && caps.WakeFromStopped && !caps.Shared && len(i.spec().Expose) > 0
}

// unwakeable returns why a connection does not start a stopped instance; ""
// when it does.
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

// ask records that a caller is waiting for i, unless one already is. drop
// undoes that if the request fails.
func (i *inst) ask() (drop func()) {
	now := i.h.Now()
	i.requests.asked.CompareAndSwap(nil, &now)
	return func() { i.requests.asked.CompareAndSwap(&now, nil) }
}

// ran records how long callers waited until i ran. Wakes without a waiting
// caller, such as those when the host ends, are not counted.
func (i *inst) ran(from power.Instance) {
	if t := i.requests.asked.Swap(nil); t != nil {
		i.h.metrics.Woken(i.spec().Runtime, from, i.h.Now().Sub(*t))
	}
}
