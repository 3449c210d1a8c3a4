package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/protocol/hostctl"
)

// freezeLimit bounds the freeze of a workload.
const freezeLimit = 5 * time.Second

// saveLimit bounds a save of a workload to disk.
const saveLimit = 5 * time.Minute

// unwatchableRetry is the delay before the next attempt to pause a workload whose
// sockets could not be watched. By then it may have closed them.
const unwatchableRetry = time.Minute

// unansweredLimit is how long a pause that was requested from another daemon, which
// did not answer, may still take effect. That daemon may hang for minutes.
const unansweredLimit = 10 * time.Minute

// The fence is the order in which an instance is paused, woken and stopped. It is a
// table for three reasons: the order can be read, every step is a named point at
// which tests can stop the world, and tests can try wrong orders, which must be
// caught.
//
// Pausing happens under the instance's lock, after the workload has written out
// its data (attempt.flush):
//
//	intent      the intent to pause is on disk
//	gate        arrivals at the relay are held and counted
//	freeze      every task is frozen; on the direct path this is the gate
//	look        everything is read again while frozen
//	arm         duplicates of the sockets are taken and watched
//	look-again  arrivals between look and arm are found
//	commit      "paused" is on disk, and the relay may ask for wakes
//
// While an instance is hibernated, all of that stays in place. Clients that arrive
// meanwhile are served afterwards:
//
//	deeper-look    clients that have already arrived are served instead
//	deeper-save    the runtime has made the snapshot durable
//	deeper-commit  "hibernated" is on disk; before that, a daemon that takes over
//	               asks the runtime
//
// If a check finds anything, the instance is thawed at once and no pause is
// recorded. A wake requested before the end of the commit cancels the pause. One
// requested after it is served as soon as the lock is free. No wake waits for the
// disk: while the record is written, a request for one ends the commit. The record
// of such a canceled pause may still reach the disk. The next write replaces it,
// and a daemon that finds it also finds that the program runs.
type fence struct {
	pause  []step
	undo   []step // after a step of pause or stop has failed
	wake   []step
	stop   []step // for a paused instance
	deeper []step // saves a sleeping instance to disk
	// resumePause restores the pause, and resumeStop completes the stop, of an
	// earlier daemon.
	resumePause, resumeStop []step
	stopRunning             []step // for an instance that runs or is being started
}

type step struct {
	name string
	do   func(*attempt) error
}

// publishStep is the step of a wake that follows the thaw.
const publishStep = "publish"

// attempt is one execution of a sequence of steps.
type attempt struct {
	i      *inst
	ctx    context.Context
	by     string // actor, such as idle_timeout or manual
	reason string
	force  bool // a user forced it: open connections and leases do not prevent it
	// adopted is set for the pause of an earlier daemon. Its time, cause and count
	// are kept, because the next step of the ladder counts from them.
	adopted bool

	work   Workload
	guard  Guard
	frozen bool
	saved  int64 // size on disk, in bytes
}

func standardFence() fence {
	return fence{
		pause: []step{{"intent", intent}, {"gate", closeGate}, {"freeze", freeze}, {"look", checkFrozen},
			{"arm", arm}, {"look-again", finalCheck}, {"commit", commitPause}},
		undo:   []step{{"undo-disarm", disarm}, {"undo-thaw", thaw}, {"undo-publish", publishUndone}},
		deeper: []step{{"deeper-look", finalCheck}, {"deeper-save", save}, {"deeper-commit", commitSaved}},
		wake:   []step{{"disarm", disarm}, {"thaw", thaw}, {publishStep, publishWoken}},
		resumePause: []step{{"gate", closeGate}, {"freeze", freeze}, {"look", checkFrozen}, {"arm", arm},
			{"look-again", finalCheck}, {"commit", commitPause}},
		stop: []step{{"stop-intent", stopIntent}, {"stop-gate", closeGate}, {"stop-look", checkUnlessForced},
			{"stop-signal", askToEnd}, {"stop-disarm", disarm}, {"stop-thaw", thaw}},
		stopRunning: []step{{"stop-intent", stopIntent}, {"stop-gate", closeGate}, {"stop-signal", askToEnd}},
		resumeStop:  []step{{"stop-signal", askToEnd}, {"stop-thaw", thaw}},
	}
}

// errStirred is returned when an arrival cancels a pause. what describes the
// arrival.
type errStirred struct{ what string }

func (e *errStirred) Error() string { return "cannot pause: " + e.what }

// asked reports whether a user requested the attempt. A full disk then does not
// prevent it.
func (a *attempt) asked() bool {
	return !a.adopted && a.by != byIdle && a.by != stopAfter
}

func (a *attempt) walk(steps []step) error {
	for _, s := range steps {
		a.i.h.point(s.name, a.i)
		_, span := a.i.span(a.ctx, s.name)
		err := s.do(a)
		fault(span, err)
		span.End()
		if err != nil {
			return err
		}
	}
	return nil
}

// pause pauses a running instance through the fence. i.lock must be held.
func (i *inst) pause(ctx context.Context, by, reason string, force bool) error {
	if err := i.move(power.Pausing); err != nil {
		return err
	}
	ctx, span := i.span(ctx, "instance.pause")
	defer span.End()
	traceCause(span, by, reason)
	a := &attempt{i: i, ctx: ctx, by: by, reason: reason, force: force, work: i.workload()}
	if a.work == nil {
		return fmt.Errorf("cannot pause %s: it has no process", i.name())
	}
	i.endRound()
	if by != byIdle { // an idle decision has just read them
		i.readTimers(a.work)
	}
	if err := a.flush(); err != nil {
		fault(span, err)
		i.emit("pause_cancelled", by, err.Error())
		return err
	}
	err := a.walk(i.h.steps.pause)
	fault(span, err)
	i.h.point("pause-end", i)
	if err == nil {
		i.emit("paused", by, reason)
		i.h.log.Info("paused", "instance", i.name(), "by", by, "reason", reason)
		return nil
	}
	if i.state() == power.Running { // the intent was not recorded
		return err
	}
	if uerr := a.walk(i.h.steps.undo); uerr != nil {
		// The workload may still be frozen. The instance stays PAUSING, and the
		// check at this deadline repairs it.
		i.h.due.Set(i.due, i.h.Now().Add(100*time.Millisecond))
		return errors.Join(err, uerr)
	}
	var stirred *errStirred
	if errors.As(err, &stirred) {
		i.emit("pause_cancelled", by, stirred.what)
	} else {
		i.h.log.Error("cannot pause", "instance", i.name(), "err", err)
		i.emit("pause_failed", by, err.Error())
	}
	return err
}

// flush makes the workload write out data that must not be lost. Clients are served
// meanwhile. If one arrives, the pause is canceled before it begins.
func (a *attempt) flush() error {
	s, ok := a.work.(instance.Flusher)
	if !ok {
		return nil
	}
	s.Flush(a.ctx)
	return checkFrozen(a)
}

// asItIs returns an attempt for the instance in its current state.
func (i *inst) asItIs(ctx context.Context, by, why string) *attempt {
	a := &attempt{i: i, ctx: ctx, by: by, reason: why, work: i.workload()}
	i.mu.Lock()
	a.guard, a.frozen = i.proc.guard, i.proc.frozen
	i.mu.Unlock()
	return a
}

func intent(a *attempt) error {
	return a.i.saveOrNote(a.asked(), func(r *instance.Record) { r.State, r.StatusReason = power.Pausing, a.reason })
}

func closeGate(a *attempt) error {
	a.i.ports.up.Store(false)
	if a.i.gate != nil {
		a.i.gate.Hold()
	}
	return nil
}

func freeze(a *attempt) error {
	ctx, cancel := context.WithTimeout(a.ctx, freezeLimit)
	defer cancel()
	if err := a.work.Freeze(ctx); err != nil {
		if errors.Is(err, instance.ErrUnanswered) {
			a.i.expectOwnPause(a.i.h.Now().Add(unansweredLimit))
		}
		return fmt.Errorf("cannot freeze %s: %w", a.i.name(), err)
	}
	a.frozen = true
	a.i.mu.Lock()
	a.i.proc.frozen, a.i.proc.ownPauseUntil = true, time.Time{} // this freeze also answers all earlier requests
	a.i.mu.Unlock()
	return nil
}

// checkFrozen reads every source again while the workload is frozen, and returns an
// error if any shows use.
func checkFrozen(a *attempt) error {
	i := a.i
	v, _ := i.decide(a.work)
	if a.by == byIdle && !v.Eligible {
		return &errStirred{v.Blocks[0].Sentence}
	}
	if a.by != byIdle && !a.force {
		for _, b := range v.Blocks {
			if b.Code == idle.ConnectionOpen || b.Code == idle.LeaseHeld || b.Signal == besideSignal {
				return &errStirred{b.Sentence}
			}
		}
	}
	return a.stirred()
}

func arm(a *attempt) error {
	i := a.i
	i.mu.Lock()
	ports, outbound := i.rec.Endpoints, i.spec().WakeOnOutbound || i.spec().QuietConnectionAfter > 0
	i.mu.Unlock()
	g, err := a.work.Guard(ports, outbound, i.wantWake)
	if err != nil {
		again := i.h.Now().Add(unwatchableRetry)
		i.mu.Lock()
		i.seen.block = &idle.Block{Code: "unwatchable_socket", Until: &again, Sentence: "It cannot be watched while frozen: " + err.Error()}
		i.mu.Unlock()
		return err
	}
	a.guard = g
	i.mu.Lock()
	i.proc.guard, i.seen.block = g, nil
	i.mu.Unlock()
	return nil
}

func finalCheck(a *attempt) error {
	if a.guard != nil {
		if what := a.guard.Pending(); what != "" {
			return &errStirred{what}
		}
	}
	return a.stirred()
}

// checkUnlessForced is checkFrozen, except that a forced stop ignores the result.
func checkUnlessForced(a *attempt) error {
	if a.force {
		return nil
	}
	return finalCheck(a)
}

// stirred returns an errStirred if something has arrived that is not seen at the
// workload's sockets: a request for a wake, a client at the relay, or the program's
// exit.
func (a *attempt) stirred() error {
	i := a.i
	if why := i.requests.wanted.Load(); why != nil {
		return &errStirred{*why}
	}
	if i.gate != nil {
		if act := i.gate.Activity(); act.Stirred() {
			return &errStirred{"a client has just connected to the relay"}
		}
	}
	if i.endedNow() {
		return &errStirred{"the program has just ended"}
	}
	return nil
}

func commitPause(a *attempt) error {
	i := a.i
	if err := a.stirred(); err != nil {
		return err
	}
	if i.gate != nil {
		i.gate.Sleep()
	}
	now := i.h.Now()
	err := a.saveFrozen(a.asked(), false, func(r *instance.Record) {
		if a.adopted { // an adopted pause keeps its state
			return
		}
		r.State, r.StatusReason = power.Paused, a.reason
		r.Freed, r.Saved = 0, 0
		r.LastPausedAt, r.PausedBy = now, a.by
		r.PauseCount++
	})
	if err != nil {
		return err
	}
	i.mu.Lock()
	i.retry.notBefore = time.Time{}
	i.seen.window = nil // thousands sleep
	i.mu.Unlock()
	i.scheduleAsleep(now)
	i.h.notePause()
	return nil
}

// saveFrozen changes and writes the record of a frozen workload. A failed write is
// an error unless asked is set; then it is retried later.
//
// If a wake is requested during the write, saveFrozen returns an errStirred at once
// and does not change the record in memory. The write may still complete; the next
// one replaces it. fact means that the change has already happened: then it is made
// in any case, and the write is retried later.
func (a *attempt) saveFrozen(asked, fact bool, change func(r *instance.Record)) error {
	i := a.i
	rec := i.update(func(*instance.Record) {})
	before := rec.State
	if change(&rec); rec.State != before {
		rec.StateSince, rec.Unserved = i.h.Now(), ""
	}
	written := make(chan error, 1)
	i.h.spawn(func() {
		err := i.h.saver.Write(i, &rec)
		i.h.point("written", i)
		written <- err
	})
	for {
		err, late := error(nil), false
		select {
		case err = <-written:
			if err != nil && !asked {
				return fmt.Errorf("cannot record %s: %w", i.name(), err)
			}
		case <-i.stir: // possibly for a request that has already been served
			if err = a.stirred(); err == nil {
				continue
			}
			if late = fact; !late {
				return err
			}
		}
		i.update(func(r *instance.Record) {
			late = late || err != nil || r.Generation != rec.Generation
			change(r)
		})
		if late {
			i.h.saver.WriteLater(i, i.id)
		}
		return nil
	}
}

func save(a *attempt) error {
	s, ok := a.work.(instance.Hibernator)
	if !ok {
		return fmt.Errorf("cannot hibernate %s: its runtime cannot", a.i.name())
	}
	ctx, cancel := context.WithTimeout(a.ctx, saveLimit)
	defer cancel()
	began := time.Now()
	n, err := s.Hibernate(ctx)
	if err != nil {
		return fmt.Errorf("cannot hibernate %s: %w", a.i.name(), err)
	}
	a.saved, a.reason = n, fmt.Sprintf("saved %d bytes in %s", n, idle.Human(time.Since(began)))
	return nil
}

func commitSaved(a *attempt) error {
	ident := a.work.Identity() // hibernated: it has no process
	return a.saveFrozen(false, true, func(r *instance.Record) {
		r.State, r.StatusReason, r.Saved, r.Identity = power.Hibernated, a.reason, a.saved, &ident
	})
}

func disarm(a *attempt) error {
	a.i.mu.Lock()
	g := a.i.proc.guard
	a.i.proc.guard = nil
	a.i.mu.Unlock()
	if g == nil {
		g = a.guard
	}
	a.guard = nil
	if g != nil {
		g.Close()
	}
	return nil
}

func thaw(a *attempt) error {
	if !a.frozen {
		return nil
	}
	if err := a.work.Thaw(); err != nil {
		return fmt.Errorf("cannot thaw %s: %w", a.i.name(), err)
	}
	a.frozen = false
	a.i.mu.Lock()
	a.i.proc.frozen = false
	a.i.mu.Unlock()
	return nil
}

// publishWoken makes the instance running for everyone. The record is written
// later, without a sync of its own: after a power failure no program is left, so it
// does not matter which state the record names.
func publishWoken(a *attempt) error {
	i := a.i
	now := i.h.Now()
	ident := a.work.Identity() // a restore changes the identity
	i.mu.Lock()
	i.seen.window, i.seen.readings, i.seen.conns = nil, nil, 0
	i.resetProbesLocked()
	i.mu.Unlock()
	rec := i.update(func(r *instance.Record) {
		if r.Identity == nil || *r.Identity != ident {
			r.Identity = &ident
		}
		r.State, r.StatusReason = power.Running, a.reason
		r.LastResumedAt, r.LastActivityAt, r.ResumedBy = now, now, a.by
		r.WakeCount++
		r.Freed, r.Saved = 0, 0
	})
	i.open()
	i.h.saver.NoteLater(i, i.id)
	i.scheduleAwake(now)
	i.ran(i.turn.from)
	i.wakeGroup(a.by, a.reason)
	i.h.happened(hostctl.Event{Time: now, Type: "resumed", Instance: i.name(), ID: i.id, State: string(rec.State), By: a.by, Reason: a.reason})
	return nil
}

// publishUndone returns the instance to running as if no pause had been tried. What
// canceled the pause counts as activity.
func publishUndone(a *attempt) error {
	i := a.i
	now := i.h.Now()
	if s := i.state(); s.Asleep() {
		i.update(func(r *instance.Record) { r.State = power.Resuming })
	}
	i.update(func(r *instance.Record) {
		r.State, r.StatusReason = power.Running, ""
		r.StoppedBy, r.RestartAt = "", time.Time{} // set by a stop that was canceled
		r.LastActivityAt = now
	})
	i.requests.wanted.Store(nil)
	i.requests.asked.Store(nil)
	i.open()
	i.h.saver.NoteLater(i, i.id)
	i.scheduleAwake(now)
	return nil
}

// open makes the relay forward connections, because the application accepts them.
func (i *inst) open() {
	i.ports.up.Store(true)
	if i.gate != nil {
		i.gate.Release()
	}
}

func stopIntent(a *attempt) error {
	change := func(r *instance.Record) {
		r.State, r.StatusReason, r.StoppedBy = power.Stopping, a.reason, a.by
		if a.i.turn.again {
			r.StoppedBy, r.RestartAt = "", a.i.h.Now()
		}
	}
	if a.frozen && !a.force {
		return a.saveFrozen(false, false, change)
	}
	return a.i.saveOrNote(a.asked(), change)
}
