package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/admission"
)

// scheduleAwake schedules the first check after a start or wake. It is early,
// because the first sample is only the base for later ones.
func (i *inst) scheduleAwake(now time.Time) {
	i.h.due.Set(i.due, now.Add(i.probeEvery()/5))
}

// scheduleAsleep schedules the next step of the ladder, which counts from the
// pause. Without a ladder there is no deadline.
func (i *inst) scheduleAsleep(now time.Time) {
	t, _ := i.nextStep()
	if d := i.wakeDue(); !d.IsZero() && (t.IsZero() || d.Before(t)) {
		t = d
	}
	if !t.IsZero() {
		i.h.due.Set(i.due, latest(t, now))
	} else {
		i.h.due.Remove(i.due)
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// nextStep returns when a paused instance enters the next deeper state, and which
// one. Leases and snoozes delay it until they end.
func (i *inst) nextStep() (time.Time, power.Instance) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.rec.PausedBy == byOutside {
		return time.Time{}, ""
	}
	at, to := i.ladderLocked()
	if to != "" {
		at = latest(at, i.heldLocked())
	}
	return at, to
}

// ladderLocked returns the next step of the ladder, ignoring leases and
// snoozes.
func (i *inst) ladderLocked() (time.Time, power.Instance) {
	since, s := i.rec.LastPausedAt, i.rec.State
	if r := time.Duration(i.spec().ReclaimAfter); r > 0 && s == power.Paused {
		return since.Add(r), power.Reclaimed
	}
	var at time.Time
	var to power.Instance
	if d := time.Duration(i.spec().HibernateAfter); d > 0 && s != power.Hibernated {
		at, to = latest(since.Add(d), i.retry.notBefore), power.Hibernated
	}
	if stop := i.stopDueLocked(); !stop.IsZero() && (to == "" || stop.Before(at)) {
		at, to = stop, power.Stopped
	}
	return at, to
}

// stopDueLocked returns when the ladder ends in a stop, or zero for never. Every
// other step keeps connections, but a stop closes them. If connections were open
// when a user forced the pause, the stop waits until they may be ignored, if ever.
// A connection that carries data or closes before then wakes the instance.
func (i *inst) stopDueLocked() time.Time {
	d, quiet := i.stopAfter(), time.Duration(i.spec().QuietConnectionAfter)
	switch {
	case d == 0, i.seen.conns > 0 && quiet == 0, i.timed.timers != nil: // timers: a stopped cron would run no jobs
		return time.Time{}
	case i.seen.conns > 0:
		d = max(d, quiet)
	}
	return i.rec.LastPausedAt.Add(d)
}

// heldLocked returns until when a lease or snooze keeps an instance from entering a
// deeper state. If the time is zero or past, none does. Leases and snoozes never
// wake an instance.
func (i *inst) heldLocked() time.Time {
	end := i.rec.SnoozedUntil
	for _, l := range i.rec.Leases {
		end = latest(end, l.ExpiresAt)
	}
	return end
}

// checkAsleep takes the next step of the ladder if it is due. It wakes the instance
// instead for a timer, or if its sockets are not watched.
func (i *inst) checkAsleep() {
	i.mu.Lock()
	unguarded := i.proc.guard == nil && i.rec.PausedBy != byOutside
	i.mu.Unlock()
	timer, due := i.takeTimer()
	unknown := ""
	if !due { // a known timer takes precedence
		unknown = i.rereadTimers()
		timer, due = i.takeTimer()
	}
	if unguarded || due || unknown != "" {
		by, why := byTimer, cmp.Or(timer, unknown)
		if unguarded {
			by, why = "repair", "nothing watched its sockets"
		}
		if i.rationed() && i.state() != power.Paused {
			i.wakeLater(by, why)
		} else {
			i.wakeNow(by, why)
		}
		return
	}
	now := i.h.Now()
	if i.h.room.Waiting(i) != nil { // a wake is pending
		i.h.due.Set(i.due, now.Add(admission.CheckInterval))
		return
	}
	at, to := i.nextStep()
	if at.IsZero() {
		i.scheduleAsleep(now)
		return
	}
	if i.h.Halted() != nil || i.h.unwritable() != "" {
		at = latest(at, now.Add(time.Second))
	}
	if now.Before(at) {
		if d := i.wakeDue(); !d.IsZero() && d.Before(at) {
			at = d
		}
		i.h.due.Set(i.due, at)
		return
	}
	switch to {
	case power.Reclaimed:
		i.reclaim("reclaim_after")
		i.scheduleAsleep(i.h.Now())
	case power.Hibernated:
		i.hibernate("hibernate_after")
	case power.Stopped:
		if i.rationed() && i.state() == power.Hibernated {
			i.stopLater()
			return
		}
		i.stopNow()
	}
}

func (i *inst) stopNow() {
	err := i.stop(i.h.ctx, stopAfter, fmt.Sprintf("paused for %s", idle.Human(i.stopAfter())))
	var published *staysPausedError
	if err != nil && !errors.As(err, &published) {
		i.h.log.Info("not stopped", "instance", i.name(), "reason", err)
	}
}

// stopLater stops a hibernated instance once there is memory to restore it, so that
// its program can be asked to exit.
func (i *inst) stopLater() {
	if !i.loops.ending.CompareAndSwap(false, true) {
		return
	}
	i.h.spawn(func() {
		leave, err := i.h.enter(i.h.ctx, i, call{what: "stop", by: stopAfter, may: i.notStopped("stop")})
		i.loops.ending.Store(false)
		if err != nil {
			i.h.due.Set(i.due, i.h.Now().Add(hibernateRetry))
			return
		}
		defer leave()
		if i.h.Halted() != nil {
			i.scheduleAsleep(i.h.Now())
			return
		}
		if at, to := i.nextStep(); i.state().Asleep() && to == power.Stopped && !i.h.Now().Before(at) {
			i.stopNow()
		}
	})
}

// reclaim pages out the memory of a paused instance. A failure is only reported.
func (i *inst) reclaim(by string) {
	ctx, cancel := context.WithTimeout(i.h.ctx, 30*time.Second)
	defer cancel()
	freed, err := i.workload().Reclaim(ctx)
	reason := fmt.Sprintf("freed %d bytes", freed)
	if err != nil {
		reason = "nothing was freed: " + err.Error()
	}
	err = i.asItIs(ctx, by, reason).saveFrozen(false, true, func(r *instance.Record) {
		r.State, r.Freed, r.StatusReason = power.Reclaimed, freed, reason
	})
	if err != nil {
		i.h.log.Error("cannot record", "instance", i.name(), "err", err)
		return
	}
	i.emit("reclaimed", by, reason)
}

// hibernateRetry is the delay after a failed save before the next.
const hibernateRetry = time.Minute

// hibernate saves a sleeping instance to disk. On failure the instance stays as it
// was, and its status has the reason. i.lock must be held.
func (i *inst) hibernate(by string) {
	a := &attempt{i: i, ctx: i.h.ctx, by: by, work: i.workload()}
	err := a.walk(i.h.steps.deeper)
	now := i.h.Now()
	i.mu.Lock()
	i.retry.notBefore = time.Time{}
	if err != nil {
		i.retry.notBefore = now.Add(hibernateRetry)
	}
	i.mu.Unlock()
	var stirred *errStirred
	switch {
	case err == nil:
		i.emit("hibernated", a.by, a.reason)
		i.h.log.Info("hibernated", "instance", i.name(), "bytes", a.saved)
	case !errors.As(err, &stirred):
		i.h.log.Error("cannot hibernate", "instance", i.name(), "err", err)
		rec := i.update(func(r *instance.Record) { r.StatusReason = err.Error() })
		if err := i.h.saver.Write(i, &rec); err != nil {
			i.h.log.Error("cannot record", "instance", i.name(), "err", err)
		}
		i.emit("hibernate_failed", a.by, err.Error())
	}
	i.scheduleAsleep(now)
}

// bootAnew boots an instance whose saved state cannot be used. i.lock must be held,
// and the instance must be resuming.
func (i *inst) bootAnew(ctx context.Context, by, why string, cause *instance.SnapshotError) error {
	i.h.log.Warn("a hibernated instance is booted instead of restored", "instance", i.name(), "err", cause)
	kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	if w := i.workload(); w != nil {
		if err := w.Kill(kctx); err != nil {
			i.h.due.Set(i.due, i.h.Now().Add(time.Second))
			return errors.Join(cause, fmt.Errorf("cannot remove the saved state of %s: %w", i.name(), err))
		}
		i.awaitExit()
	}
	i.requests.ended.Store(nil)
	err := i.save(func(r *instance.Record) {
		r.State, r.StatusReason, r.Saved, r.Freed = power.Stopped, cause.Error(), 0, 0
	})
	i.forgetRun()
	i.emit("snapshot_refused", by, cause.Reason)
	if err != nil {
		return errors.Join(cause, err)
	}
	if err := i.start(ctx, by, why); err != nil {
		return errors.Join(cause, err)
	}
	rec := i.update(func(r *instance.Record) { r.BootedAnew = cause.Error(); r.WakeCount++ })
	return i.h.saver.Write(i, &rec)
}

// checkStopped restarts a failed instance once its restart delay has passed.
func (i *inst) checkStopped() {
	i.mu.Lock()
	at, enabled, timed := i.retry.restart, i.rec.Enabled, i.timedLocked()
	i.mu.Unlock()
	if timed {
		if why, due := i.takeTimer(); due {
			i.h.spawn(func() {
				if err := i.h.startFor(i.h.ctx, i, byTimer, why); err != nil && !fromRoom(err) {
					i.h.log.Error("cannot start for a timer", "instance", i.name(), "err", err)
				}
			})
			return
		}
		i.scheduleStopped()
	}
	if at.IsZero() || !enabled {
		return
	}
	if now := i.h.Now(); now.Before(at) {
		i.h.due.Set(i.due, at)
		return
	}
	i.h.spawn(func() {
		err := i.h.startFor(i.h.ctx, i, byRestart, i.restarted(""))
		if fromRoom(err) {
			err = i.restartLater(err)
		}
		if err != nil {
			i.h.log.Warn("restart failed", "instance", i.name(), "err", err)
		}
	})
}

// restartLater schedules another attempt at a restart for which there was no
// memory. If there can never be enough, it gives up.
func (i *inst) restartLater(cause error) error {
	i.acquire()
	defer i.release()
	if i.requests.deleted.Load() || i.state() != power.Stopped || i.mayStart(byRestart) != nil {
		return nil
	}
	var at time.Time
	memory, _ := i.h.room.Needs(i)
	if busy := (*BusyError)(nil); errors.As(cause, &busy) {
		at = i.h.Now().Add(instance.RestartMax)
	} else if memory <= i.h.cfg.Memory {
		return nil // a stop has canceled the restart
	}
	err := i.save(func(r *instance.Record) { r.RestartAt = at })
	i.armRestart()
	return err
}

// restarted returns the reason for a restart: why, or else how the last run ended.
func (i *inst) restarted(why string) string {
	i.mu.Lock()
	defer i.mu.Unlock()
	how := ""
	if e := i.rec.Exit; e != nil && !i.rec.RestartAt.IsZero() {
		how = restartedSaying + e.How()
	}
	switch {
	case how == "":
		return cmp.Or(why, "restarted after it ended")
	case why == "":
		return how
	}
	return why + "; " + how
}

// repair completes or reverts a transition that failed halfway. i.lock must be
// held.
func (i *inst) repair() {
	var err error
	switch i.state() {
	case power.Pausing:
		if err = i.asItIs(i.h.ctx, "repair", "").walk(i.h.steps.undo); err == nil {
			i.emit("pause_failed", "repair", "it was thawed after a pause that failed")
		}
	case power.Resuming:
		err = i.wake("repair", "a wake that had failed was tried again")
	case power.Stopping:
		err = i.finishStop(i.h.ctx, "repair", "its stop had not ended")
	case power.Starting:
		err = i.startFailed(i.workload(), errors.New("its start was given up"), false)
	}
	if err != nil {
		i.h.log.Error("cannot repair", "instance", i.name(), "err", err)
	}
	if i.halfway() {
		i.h.due.Set(i.due, i.h.Now().Add(time.Second))
	}
}

// stabilize brings i into a stable state before a request is carried out: it adopts
// a run left by an earlier daemon, and repairs a transition that failed halfway.
// i.lock must be held.
func (i *inst) stabilize() error {
	if err := i.takenOver(); err != nil {
		return err
	}
	if i.halfway() {
		i.repair()
	}
	return nil
}

// halfway reports whether a transition was begun and has not been completed.
func (i *inst) halfway() bool {
	switch i.state() {
	case power.Pausing, power.Resuming, power.Stopping, power.Starting:
		return true
	}
	return false
}

// dropHeld stops watching the kept sockets.
func (i *inst) dropHeld() {
	i.mu.Lock()
	g := i.proc.held
	i.proc.held = nil
	i.mu.Unlock()
	if g != nil {
		g.Close()
	}
}
