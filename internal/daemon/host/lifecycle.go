package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"lull/internal/idle"
	"lull/internal/instance"
	"lull/internal/power"
)

// Limits of starting and ending (spec, section 4).
const (
	readyTimeout = 60 * time.Second
	stopGrace    = 10 * time.Second
	killLimit    = 10 * time.Second
	crashUptime  = 10 * time.Second // a run that fails sooner is a crash
	crashWindow  = 2 * time.Minute
	crashLimit   = 5 // crashes within the window are a loop
	restartMax   = 30 * time.Second
	logMax       = 10 << 20
)

// startFor brings a stopped instance up, waiting for whatever else is under
// way. It is nil too when it already runs. A person's start enables it.
func (h *Host) startFor(ctx context.Context, i *inst, by, why string) error {
	may := func() error { return i.mayStart(by) }
	if by != byRestart {
		defer i.ask()()
	}
	leave, err := h.enter(ctx, i, call{what: "start", by: by, client: by != byRestart, may: may})
	if err != nil {
		return err
	}
	defer leave()
	if err := i.settle(); err != nil {
		return err
	}
	if err := may(); err != nil {
		return err
	}
	if by != byRestart && by != byConnection {
		i.update(func(r *instance.Record) {
			r.Enabled, r.CrashLooping, r.Crashes = true, false, nil
		})
		h.saver.later(i)
	}
	switch i.state() {
	case power.Running:
		return nil
	case power.Paused, power.Reclaimed, power.Hibernated:
		return i.wake(by, why)
	}
	return i.start(ctx, by, why)
}

// mayStart says why i, as it is, is not started by whom a person's stop binds.
func (i *inst) mayStart(by string) error {
	i.mu.Lock()
	stopped, enabled, due := i.rec.State == power.Stopped, i.rec.Enabled, !i.restart.IsZero()
	i.mu.Unlock()
	switch {
	case !stopped:
	case by == byRestart && !(due && enabled):
		return &RefusedError{Name: i.name(), What: "start", Reason: "nothing is left to be restarted"}
	case by == byConnection && i.unwakeable() != "":
		return &RefusedError{Name: i.name(), What: "start", Reason: i.unwakeable()}
	}
	return nil
}

// notStopped is what of i has no use for once it is stopped.
func (i *inst) notStopped(what string) func() error {
	return func() error {
		if i.state() == power.Stopped {
			return &RefusedError{Name: i.name(), What: what, Reason: "it is stopped"}
		}
		return nil
	}
}

// start runs the program and waits until it accepts. The caller holds the lock.
func (i *inst) start(ctx context.Context, by, why string) error {
	if err := i.move(power.Starting); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	i.interrupt.Store(&cancel)
	defer i.interrupt.Store(nil)

	i.dropHeld()
	i.mu.Lock()
	restart := !i.rec.RestartAt.IsZero()
	i.mu.Unlock()
	var run uint64
	err := i.save(func(r *instance.Record) {
		run = 1
		if r.Identity != nil {
			run = r.Identity.Run + 1
		}
		r.Identity = &instance.Identity{Run: run}
		r.State, r.StatusReason = power.Starting, why
		r.Exit, r.RestartAt, r.BootedAnew, r.Freed = nil, time.Time{}, "", 0
	})
	if err != nil {
		return err
	}
	i.mu.Lock()
	i.over, i.restart = make(chan struct{}), time.Time{}
	i.ended.Store(nil)
	i.mu.Unlock()
	w, err := i.launch(ctx, run)
	if err == nil {
		err = i.ready(ctx, w)
	}
	if err != nil {
		return i.startFailed(w, err, restart)
	}
	now := i.h.now()
	err = i.save(func(r *instance.Record) {
		r.State, r.StatusReason, r.StoppedBy = power.Running, why, ""
		r.LastActivityAt, r.LastResumedAt, r.ResumedBy = now, now, by
	})
	if err != nil {
		return i.startFailed(w, err, restart)
	}
	i.open()
	i.scheduleAwake(now)
	i.ran(power.Stopped)
	i.emit("started", by, why)
	i.h.log.Info("started", "instance", i.name(), "by", by, "pid", w.Identity().PID)
	return nil
}

// boxEnv is the environment of a program that has files of its own, before what
// its image and its spec add.
var boxEnv = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}

// launch starts the process and records who it is.
func (i *inst) launch(ctx context.Context, run uint64) (Workload, error) {
	i.h.point("launch", i)
	s := i.spec()
	l := instance.Launch{ID: i.id, Run: run, Command: s.Command, Dir: s.Workdir, User: s.User,
		LogPath: filepath.Join(i.h.cfg.LogDir, i.id+".log"), LogMax: cmp.Or(s.LogMax, logMax)}
	l.Image, l.Memory, l.CPUs, l.Net, l.Workspace = s.Image, s.Memory, s.CPUs, s.Net, s.Workspace
	base := i.h.cfg.BaseEnv
	if i.rt.Capabilities().Image {
		base = boxEnv
	} else {
		l.Dir = cmp.Or(l.Dir, "/") // in place of an image's
	}
	l.Env = append(append(l.Env, base...), s.Env...)
	l.Env = append(l.Env, "LULL_INSTANCE="+s.Name)
	if i.h.cfg.Socket != "" {
		l.Env = append(l.Env, "LULL_SOCKET="+i.h.cfg.Socket)
	}
	if err := i.keep(ctx, &l); err != nil {
		return nil, err
	}
	w, err := i.run(ctx, l)
	if err != nil {
		return nil, fmt.Errorf("cannot start %s: %w", s.Name, err)
	}
	ident := w.Identity()
	i.mu.Lock()
	i.work, i.frozen, i.guard, i.block = w, false, nil, nil
	i.base, i.last, i.readings, i.conns = instance.Sample{}, instance.Sample{}, nil, 0
	i.mu.Unlock()
	return w, i.save(func(r *instance.Record) { r.Identity, r.StartedAt = &ident, i.h.now() })
}

// ready waits until every exposed port has a listener of this program. A
// connect would prove nothing: the kernel completes it for a program that
// does not run.
func (i *inst) ready(ctx context.Context, w Workload) error {
	i.mu.Lock()
	over := i.over
	want := append([]instance.Endpoint(nil), i.spec().Expose...)
	i.mu.Unlock()
	limit := time.Duration(cmp.Or(i.spec().ReadyTimeout, idle.Duration(readyTimeout)))
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	pause := 2 * time.Millisecond
	for {
		if len(want) == 0 {
			return nil // started is all that it can be; how it ends is seen like any ending
		}
		if e := i.ended.Load(); e != nil {
			return fmt.Errorf("cannot start %s: %w: it %s%s", i.name(), errEnded, i.explained(e.exit).How(), i.taken(want, w))
		}
		ls, err := w.Listeners()
		if err == nil {
			if missing := notListening(want, ls); missing == "" {
				return i.decidePaths(want, ls)
			}
		}
		select {
		case <-time.After(pause):
			pause = min(pause*3/2, 50*time.Millisecond)
		case <-over:
		case <-ctx.Done():
			return fmt.Errorf("cannot start %s: %w", i.name(), context.Cause(ctx))
		case <-deadline.C:
			if err != nil {
				return fmt.Errorf("cannot start %s: its sockets cannot be read: %w", i.name(), err)
			}
			return fmt.Errorf("cannot start %s: %s", i.name(), silent(want, ls, i.rt.Capabilities().Network, limit))
		}
	}
}

var errEnded = errors.New("the program ended before it was ready")

// startFailed leaves nothing of the run behind. A restart that was due is tried
// again where there was no room for it on disk: that is no fault of the program's.
func (i *inst) startFailed(w Workload, cause error, restart bool) error {
	if w != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(i.h.ctx), killLimit)
		defer cancel()
		if err := w.Kill(ctx); err != nil {
			// It is not down: a record that says stopped would start it twice.
			i.h.due.set(i, i.h.now().Add(time.Second))
			return errors.Join(cause, fmt.Errorf("cannot end the failed run of %s: %w", i.name(), err))
		}
		i.awaitExit() // a start that follows is refused while the end is not known
	}
	e := i.ended.Swap(nil)
	now := i.h.now()
	var ended *instance.EndedError
	if errors.As(cause, &ended) {
		e = &ending{exit: ended.Exit}
	}
	i.note(func(r *instance.Record) {
		r.State, r.StatusReason = power.Stopped, cause.Error()
		if full := (*instance.NoRoomError)(nil); restart && r.Enabled && errors.As(cause, &full) {
			r.RestartAt = now.Add(restartMax)
		}
		if e == nil {
			return
		}
		exit := e.exit
		r.Exit = &exit
		if ended != nil {
			r.StartedAt = exit.At // it never was up
		}
		if ended != nil || errors.Is(cause, errEnded) {
			afterEnd(r, exit, now)
		}
	})
	i.mu.Lock()
	due := !i.rec.RestartAt.IsZero()
	i.mu.Unlock()
	if !due {
		i.letGo() // who has come is told by that; the next one tries again
	}
	i.forgetRun()
	i.armRestart()
	i.emit("start_failed", "", cause.Error())
	i.h.log.Warn("start failed", "instance", i.name(), "error", cause)
	return cause
}

// forgetRun clears what belonged to a run that is over.
func (i *inst) forgetRun() {
	i.mu.Lock()
	g := i.guard
	i.work, i.guard, i.frozen, i.missing = nil, nil, false, nil
	i.readings, i.conns, i.block, i.nextDue, i.trouble = nil, 0, nil, time.Time{}, ""
	if i.inside { // what was in the middle of work is gone
		i.inside, i.busy = false, i.busy-1
	}
	i.mu.Unlock()
	if g != nil {
		g.Close()
	}
	i.up.Store(false)
	if i.gate != nil {
		i.gate.Hold()
		i.gate.Sleep()
	}
	i.rest()
}

// stop ends an instance gracefully. The caller holds the lock. An automatic
// stop of a paused instance gives way to whoever came in the meantime; any other
// goes on whatever fails: a program that cannot be asked to end is ended.
func (i *inst) stop(ctx context.Context, by, why string) error {
	steps := i.h.steps.stop
	switch i.state() {
	case power.Stopped:
		return nil
	case power.Stopping: // a stop before this one could not be finished
		return i.finishStop(ctx, by, why)
	case power.Running, power.Starting:
		steps = []step{{"stop-intent", stopIntent}, {"stop-gate", closeGate}, {"stop-signal", askToEnd}}
	}
	if err := i.move(power.Stopping); err != nil {
		return err
	}
	a := i.asItIs(ctx, by, why)
	a.force = by != stopAfter
	if keeps := by == stopAfter || i.again; keeps {
		i.shut(true)
	} else {
		i.letGo()
	}
	err := a.walk(steps)
	var unusable *instance.SnapshotError
	switch {
	case err == nil:
	case i.state() != power.Stopping: // it could not be recorded
		return err
	case a.force || errors.As(err, &unusable):
		why += "; it could not end in order: " + err.Error()
		if err := i.endNow(ctx); err != nil {
			return err
		}
	default:
		if uerr := a.walk(i.h.steps.undo); uerr != nil {
			i.h.due.set(i, i.h.now().Add(100*time.Millisecond))
			return errors.Join(err, uerr)
		}
		i.shut(false)
		i.emit("stop_cancelled", by, err.Error())
		return err
	}
	return i.finishStop(ctx, by, why)
}

// enterToStop takes the lock of i for a stop. What is on disk is restored
// first, so that it can be asked to end; a person's stop does not fail for lack
// of room.
func (i *inst) enterToStop(ctx context.Context) (leave func(), err error) {
	if i.state() == power.Hibernated {
		if leave, err := i.h.enter(ctx, i, call{what: "stop", by: byManual, may: i.notStopped("stop")}); err == nil {
			return leave, nil
		}
	}
	if err := i.acquireCtx(ctx); err != nil {
		return nil, err
	}
	i.serve()
	return i.release, nil
}

// endNow ends a workload that cannot be asked to.
func (i *inst) endNow(ctx context.Context) error {
	kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	if err := i.workload().Kill(kctx); err != nil {
		i.h.due.set(i, i.h.now().Add(time.Second))
		return fmt.Errorf("cannot stop %s: %w", i.name(), err)
	}
	return nil
}

// finishStop waits for the program's own end, then ends it.
func (i *inst) finishStop(ctx context.Context, by, why string) error {
	w := i.workload()
	i.mu.Lock()
	over := i.over
	i.mu.Unlock()
	if w != nil {
		grace := time.NewTimer(i.stopGrace())
		select {
		case <-over:
		case <-grace.C:
		}
		grace.Stop()
		kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
		defer cancel()
		if err := w.Kill(kctx); err != nil { // children may have outlived it
			i.h.due.set(i, i.h.now().Add(time.Second))
			return fmt.Errorf("cannot stop %s: %w", i.name(), err)
		}
		i.awaitExit()
	}
	i.h.point("stopped", i)
	e := i.ended.Swap(nil)
	i.note(func(r *instance.Record) { // there is no process any more, whatever the disk says
		r.State, r.StatusReason, r.Saved, r.Freed = power.Stopped, why, 0, 0
		if r.RestartAt.IsZero() { // otherwise they were given to what is started again
			r.Leases = nil
		}
		if by == byManual && !i.again {
			r.StoppedBy = byManual
		}
		if e != nil {
			exit := e.exit
			r.Exit = &exit
		}
	})
	i.forgetRun()
	i.h.due.remove(i)
	i.armRestart()
	i.emit("stopped", by, why)
	i.h.log.Info("stopped", "instance", i.name(), "by", by, "reason", why)
	return nil
}

// exitLimit bounds the wait for the exit code of a run that was just ended.
const exitLimit = time.Second

// awaitExit waits until the end of the present run, whose processes are gone,
// has been reported.
func (i *inst) awaitExit() {
	i.mu.Lock()
	over := i.over
	i.mu.Unlock()
	select {
	case <-over:
	case <-time.After(exitLimit):
	}
}

// stopGrace is how long a program has to end.
func (i *inst) stopGrace() time.Duration {
	return time.Duration(cmp.Or(i.spec().StopGrace, idle.Duration(stopGrace)))
}

// askToEnd sends SIGTERM. A frozen program gets it at the thaw, before it can
// accept anything more.
func askToEnd(a *attempt) error {
	if a.work == nil {
		return nil
	}
	if err := a.signal(); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("cannot signal %s: %w", a.i.name(), err)
	}
	return nil
}

// signal asks for the end. Inside a guest somebody has to pass that on, and one
// that hangs is not waited for longer than a program is that ignores it.
func (a *attempt) signal() error {
	if !a.i.rt.Capabilities().Network {
		return a.work.Signal(syscall.SIGTERM)
	}
	sent, grace := make(chan error, 1), a.i.stopGrace()
	a.i.h.busy.Go(func() { sent <- a.work.Signal(syscall.SIGTERM) })
	select {
	case err := <-sent:
		return err
	case <-time.After(grace):
		return fmt.Errorf("it was not answered within %s", grace)
	}
}

// OnExit is told by a runtime that a run is over. It never waits.
func (h *Host) OnExit(id string, run uint64, e instance.Exit) {
	h.mu.RLock()
	i := h.byID[id]
	h.mu.RUnlock()
	if i == nil {
		return
	}
	i.mu.Lock()
	if i.rec.Identity == nil || i.rec.Identity.Run != run {
		i.mu.Unlock()
		return
	}
	i.ended.Store(&ending{run, e})
	if i.over != nil {
		select {
		case <-i.over:
		default:
			close(i.over)
		}
	}
	i.mu.Unlock()
	h.point("exit-noted", i)
	h.spawn(func() {
		if i.tryAcquire() { // otherwise the holder serves it
			i.serve()
			i.release()
		}
	})
}

// explained adds what the workload knows of its end and is not said yet.
func (i *inst) explained(e instance.Exit) instance.Exit {
	if x, ok := i.workload().(instance.Explainer); ok && e.Why == "" {
		return x.Explain(e)
	}
	return e
}

// handleEnding records that the program ended by itself. The caller holds the
// lock and is in no transition.
func (i *inst) handleEnding(e *ending) {
	switch i.state() {
	case power.Running, power.Paused, power.Reclaimed, power.Hibernated, power.Pausing, power.Resuming:
	default:
		return
	}
	i.mu.Lock()
	lost := i.work == nil && i.rec.Identity != nil
	i.mu.Unlock()
	if lost {
		// An earlier daemon's run, reported before it could be taken over. Adoption
		// knows why it ended, and removes what it left.
		i.reported = e
		err := i.seek(i.h.ctx)
		i.reported = nil
		if err != nil {
			i.h.log.Error("cannot take over", "instance", i.name(), "err", err)
		}
		if err != nil || i.workload() == nil {
			return
		}
	}
	exit := i.explained(e.exit)
	if w := i.workload(); w != nil { // children may have outlived it
		ctx, cancel := context.WithTimeout(context.WithoutCancel(i.h.ctx), killLimit)
		err := w.Kill(ctx)
		cancel()
		if err != nil {
			i.h.log.Error("cannot end what is left", "instance", i.name(), "error", err)
			i.h.spawn(func() { // tried again until nothing is left
				select {
				case <-time.After(time.Second):
					i.h.OnExit(i.id, e.run, exit)
				case <-i.h.ctx.Done():
				}
			})
			return
		}
	}
	why := exit.How()
	now := i.h.now()
	i.note(func(r *instance.Record) {
		r.State, r.StatusReason, r.Exit, r.Saved, r.Freed = power.Stopped, why, &exit, 0, 0
		afterEnd(r, exit, now)
	})
	i.forgetRun()
	i.h.due.remove(i)
	i.emit("exited", "", why)
	i.h.log.Info("exited", "instance", i.name(), "reason", why)
	i.armRestart()
}

// afterEnd applies the restart rule to a record, so that what is due is written
// together with the end. Uptime is the run's own, never the time since its last
// activity. Leases were given to the instance and not to the run, so they are
// there when it is started again.
func afterEnd(r *instance.Record, e instance.Exit, now time.Time) {
	failed := e.Code != 0 && !e.Lost
	if failed && e.At.Sub(r.StartedAt) < crashUptime {
		r.Crashes = append(slices.Clip(r.Crashes), now)
	}
	for len(r.Crashes) > 0 && now.Sub(r.Crashes[0]) > crashWindow {
		r.Crashes = r.Crashes[1:]
	}
	rule := cmp.Or(r.Spec.Restart, instance.RestartOnFailure)
	again := r.Enabled && (rule == instance.RestartAlways || rule == instance.RestartOnFailure && (failed || e.Lost))
	if len(r.Crashes) >= crashLimit {
		r.CrashLooping, again = true, false
		r.StatusReason += fmt.Sprintf("; it failed %d times within %s, so it is not started again by itself", len(r.Crashes), idle.Human(crashWindow))
	}
	r.RestartAt = time.Time{}
	if !again {
		r.Leases = nil
	} else {
		r.RestartAt = now.Add(min(time.Second<<min(len(r.Crashes), 5), restartMax))
		if len(r.Crashes) == 0 {
			r.RestartAt = now.Add(100 * time.Millisecond)
		}
		r.RestartCount++
	}
}

// armRestart sets the deadline of a restart that is due.
func (i *inst) armRestart() {
	i.mu.Lock()
	at := i.rec.RestartAt
	i.restart = at
	i.mu.Unlock()
	if !at.IsZero() {
		i.h.due.set(i, at)
	}
}
