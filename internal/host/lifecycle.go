package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/listeners"
)

// Limits on starting and ending.
const (
	readyTimeout = 60 * time.Second
	stopGrace    = 10 * time.Second
	killLimit    = 10 * time.Second
	logMax       = 10 << 20
)

// startFor starts a stopped instance, after any transition in progress. It returns
// nil if the instance already runs. If a user requests the start, it also enables
// the instance.
func (h *Host) startFor(ctx context.Context, i *inst, by, why string) error {
	may := func() error { return i.mayStart(by) }
	if by != byRestart {
		defer i.ask()()
	}
	if may() == nil {
		h.wakeDependencies(ctx, i)
	}
	leave, err := h.enter(ctx, i, call{what: "start", by: by, client: by != byRestart, may: may})
	if err != nil {
		return err
	}
	defer leave()
	if err := i.stabilize(); err != nil {
		return err
	}
	if err := may(); err != nil {
		return err
	}
	if by != byRestart && by != byConnection && by != byDependent && by != byGroup {
		i.update(func(r *instance.Record) {
			r.Enabled, r.CrashLooping, r.Crashes = true, false, nil
		})
		h.saver.WriteLater(i, i.id)
	}
	switch i.state() {
	case power.Running:
		return nil
	case power.Paused, power.Reclaimed, power.Hibernated:
		return i.wake(by, why)
	}
	return i.start(ctx, by, why)
}

// mayStart returns why by cannot start i, or nil. Connections, dependents and
// groups cannot start an instance that a user stopped.
func (i *inst) mayStart(by string) error {
	i.mu.Lock()
	stopped, enabled, due := i.rec.State == power.Stopped, i.rec.Enabled, !i.retry.restart.IsZero()
	i.mu.Unlock()
	switch {
	case !stopped:
	case by == byRestart && !(due && enabled):
		return &RefusedError{Name: i.name(), What: "start", Reason: "there is nothing to restart"}
	case (by == byConnection || by == byDependent || by == byGroup) && i.unwakeable() != "":
		return &RefusedError{Name: i.name(), What: "start", Reason: i.unwakeable()}
	}
	return nil
}

// notStopped returns a precondition that fails once i has stopped. what names
// the requested operation.
func (i *inst) notStopped(what string) func() error {
	return func() error {
		if i.state() == power.Stopped {
			return &RefusedError{Name: i.name(), What: what, Reason: "it is stopped"}
		}
		return nil
	}
}

// start runs the program and waits until it accepts connections. i.lock must be
// held.
func (i *inst) start(ctx context.Context, by, why string) error {
	if err := i.move(power.Starting); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	i.requests.interrupt.Store(&cancel)
	defer i.requests.interrupt.Store(nil)

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
	i.proc.over, i.retry.restart = make(chan struct{}), time.Time{}
	i.requests.ended.Store(nil)
	i.mu.Unlock()
	w, err := i.launch(ctx, run)
	if err == nil {
		err = i.ready(ctx, w)
	}
	if err != nil {
		return i.startFailed(w, err, restart)
	}
	now := i.h.Now()
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
	i.wakeGroup(by, why)
	i.emit("started", by, why)
	i.h.log.Info("started", "instance", i.name(), "by", by, "pid", w.Identity().PID)
	return nil
}

// boxEnv is the base environment of a program that has its own files. Its image and
// its spec add to it.
var boxEnv = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}

// launch starts the program as the given run and records its identity.
func (i *inst) launch(ctx context.Context, run uint64) (Workload, error) {
	i.h.point("launch", i)
	s := i.spec()
	l := instance.Launch{ID: i.id, Run: run, Command: s.Command, Dir: s.Workdir, User: s.User,
		LogPath: i.logPath(), LogMax: cmp.Or(s.LogMax, logMax)}
	l.Found = i.requests.found.Swap(false)
	l.Image, l.Memory, l.CPUs, l.Net, l.Workspace, l.Adopted = s.Image, s.Memory, s.CPUs, s.Net, s.Workspace, s.Adopted
	base := i.h.cfg.BaseEnv
	if i.rt.Capabilities().Image {
		base = boxEnv
	} else {
		l.Dir = cmp.Or(l.Dir, "/") // otherwise the image's directory would apply
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
	i.proc.work, i.proc.frozen, i.proc.guard, i.seen.block = w, false, nil, nil
	i.seen.window, i.seen.readings, i.seen.conns = nil, nil, 0
	i.resetProbesLocked()
	i.mu.Unlock()
	return w, i.save(func(r *instance.Record) { r.Identity, r.StartedAt = &ident, i.h.Now() })
}

// explainAfter is how long a start may take before its status says what it waits for.
const explainAfter = 3 * time.Second

// ready waits until the program listens on every exposed port. Connecting would
// prove nothing, because the kernel completes a connection even if the program does
// not run.
func (i *inst) ready(ctx context.Context, w Workload) error {
	i.mu.Lock()
	over := i.proc.over
	want := append([]instance.Endpoint(nil), i.spec().Expose...)
	i.mu.Unlock()
	limit := time.Duration(cmp.Or(i.spec().ReadyTimeout, idle.Duration(readyTimeout)))
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	pause := 2 * time.Millisecond
	explain := time.After(explainAfter)
	for {
		if len(want) == 0 {
			i.showListeners(w)
			return nil // there is no endpoint to wait for; an exit is handled as later
		}
		if e := i.requests.ended.Load(); e != nil {
			return fmt.Errorf("cannot start %s: %w: it %s%s", i.name(), errEnded, i.explained(e.exit).How(), i.taken(want, w))
		}
		ls, err := w.Listeners()
		if err == nil {
			if missing := listeners.Missing(want, ls); missing == "" {
				return i.decidePaths(want, ls)
			}
		}
		select {
		case <-time.After(pause):
			pause = min(pause*3/2, 50*time.Millisecond)
		case <-explain:
			if err == nil {
				i.update(func(r *instance.Record) { r.StatusReason = listeners.Awaited(want, ls) })
			}
		case <-over:
		case <-ctx.Done():
			return fmt.Errorf("cannot start %s: %w", i.name(), context.Cause(ctx))
		case <-deadline.C:
			if err != nil {
				return fmt.Errorf("cannot start %s: its sockets cannot be read: %w", i.name(), err)
			}
			return fmt.Errorf("cannot start %s: %s", i.name(), listeners.Explain(want, ls, i.rt.Capabilities().Network, limit))
		}
	}
}

var errEnded = errors.New("the program ended before it was ready")

// startFailed cleans up after a start that failed because of cause. If a restart
// failed for lack of disk space, it is tried again, because that is not the
// program's fault.
func (i *inst) startFailed(w Workload, cause error, restart bool) error {
	if w != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(i.h.ctx), killLimit)
		defer cancel()
		if err := w.Kill(ctx); err != nil {
			// The program still runs. If the record said stopped, a second one
			// could be started.
			i.h.due.Set(i.due, i.h.Now().Add(time.Second))
			return errors.Join(cause, fmt.Errorf("cannot end the failed run of %s: %w", i.name(), err))
		}
		i.awaitExit() // until the exit is known, the next start is refused
	}
	e := i.requests.ended.Swap(nil)
	now := i.h.Now()
	var ended *instance.EndedError
	if errors.As(cause, &ended) {
		e = &ending{exit: ended.Exit}
	}
	i.note(func(r *instance.Record) {
		r.State, r.StatusReason = power.Stopped, cause.Error()
		if full := (*instance.NoRoomError)(nil); restart && r.Enabled && errors.As(cause, &full) {
			r.RestartAt = now.Add(instance.RestartMax)
		}
		if e == nil {
			return
		}
		exit := e.exit
		r.Exit = &exit
		if ended != nil {
			r.StartedAt = exit.At // the program was never ready
		}
		if ended != nil || errors.Is(cause, errEnded) {
			r.ApplyRestartRule(exit, now)
		}
	})
	i.mu.Lock()
	due := !i.rec.RestartAt.IsZero()
	i.mu.Unlock()
	if !due {
		i.letGo() // disconnects waiting clients; the next one starts it again
	}
	i.forgetRun()
	i.armRestart()
	i.releaseEnded()
	i.emit("start_failed", "", cause.Error())
	i.h.log.Warn("start failed", "instance", i.name(), "err", cause)
	return cause
}

// forgetRun clears the state of a run that has ended.
func (i *inst) forgetRun() {
	i.mu.Lock()
	g := i.proc.guard
	i.proc.work, i.proc.guard, i.proc.frozen, i.proc.missing = nil, nil, false, nil
	i.seen.readings, i.seen.conns, i.seen.block, i.seen.trouble = nil, 0, nil, ""
	i.resetProbesLocked()
	i.timed = timed{reading: i.timed.reading}
	if i.says.inside { // the programs' work in progress has ended
		i.says.inside, i.says.busy = false, i.says.busy-1
	}
	i.mu.Unlock()
	if g != nil {
		g.Close()
	}
	i.ports.up.Store(false)
	if i.gate != nil {
		i.gate.Hold()
		i.gate.Sleep()
	}
	i.rest()
}

// stop ends an instance gracefully. An automatic stop of a paused instance is
// canceled if clients have arrived. Any other stop continues whatever fails: a
// program that cannot be asked to exit is killed. i.lock must be held.
func (i *inst) stop(ctx context.Context, by, why string) error {
	steps := i.h.steps.stop
	switch i.state() {
	case power.Stopped:
		return nil
	case power.Stopping: // an earlier stop has not been completed
		return i.finishStop(ctx, by, why)
	case power.Running, power.Starting:
		steps = i.h.steps.stopRunning
	}
	if err := i.move(power.Stopping); err != nil {
		return err
	}
	if by == stopAfter {
		if err := i.mayStop(); err != nil {
			return err
		}
		if err := i.keepSockets(ctx); err != nil {
			i.h.due.Set(i.due, i.h.Now().Add(unwatchableRetry))
			i.update(func(r *instance.Record) { r.StatusReason = err.Error() })
			return err
		}
	}
	a := i.asItIs(ctx, by, why)
	a.force = by != stopAfter
	if keeps := by == stopAfter || i.turn.again; keeps {
		i.shut(true)
	} else {
		i.letGo()
	}
	err := a.walk(steps)
	var unusable *instance.SnapshotError
	switch {
	case err == nil:
	case i.state() != power.Stopping: // the intent was not recorded
		i.shut(false)
		i.dropSockets()
		return err
	case a.force || errors.As(err, &unusable):
		why += "; " + disorderSaying + err.Error()
		if err := i.endNow(ctx); err != nil {
			return err
		}
	default:
		if uerr := a.walk(i.h.steps.undo); uerr != nil {
			i.update(func(r *instance.Record) { // so that repair wakes it and does not complete the stop
				r.State, r.StatusReason, r.StoppedBy, r.RestartAt = power.Resuming, uerr.Error(), "", time.Time{}
			})
			i.h.due.Set(i.due, i.h.Now().Add(100*time.Millisecond))
			return errors.Join(err, uerr)
		}
		i.shut(false)
		i.dropSockets()
		i.emit("stop_cancelled", by, err.Error())
		return err
	}
	return i.finishStop(ctx, by, why)
}

// enterToStop takes i.lock for a stop. It restores a hibernated instance first if
// there is memory, so that the program can be asked to exit. Without memory or a
// boot slot, it takes the lock anyway.
func (i *inst) enterToStop(ctx context.Context) (leave func(), err error) {
	if i.state() == power.Hibernated {
		if leave, err := i.h.enter(ctx, i, call{what: "stop", by: ByManual, may: i.notStopped("stop")}); err == nil {
			return leave, nil
		}
	}
	if err := i.acquireCtx(ctx); err != nil {
		return nil, err
	}
	i.serve()
	return i.release, nil
}

// endNow kills a workload that cannot be asked to exit.
func (i *inst) endNow(ctx context.Context) error {
	kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	if err := i.workload().Kill(kctx); err != nil {
		i.h.due.Set(i.due, i.h.Now().Add(time.Second))
		return fmt.Errorf("cannot stop %s: %w", i.name(), err)
	}
	return nil
}

// finishStop waits for the program to exit, and kills it after its grace period.
func (i *inst) finishStop(ctx context.Context, by, why string) error {
	w := i.workload()
	i.mu.Lock()
	over := i.proc.over
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
		if err := w.Kill(kctx); err != nil { // children may have outlived the program
			i.h.due.Set(i.due, i.h.Now().Add(time.Second))
			return fmt.Errorf("cannot stop %s: %w", i.name(), err)
		}
		i.awaitExit()
	}
	i.h.point("stopped", i)
	e := i.requests.ended.Swap(nil)
	i.note(func(r *instance.Record) { // no process is left, so this must be recorded even if the disk is full
		r.State, r.StatusReason, r.Saved, r.Freed = power.Stopped, why, 0, 0
		if r.RestartAt.IsZero() { // otherwise the next run gets them
			r.Leases = nil
		}
		if by == ByManual && !i.turn.again {
			r.StoppedBy, r.NextDue = ByManual, time.Time{}
		}
		if e != nil {
			exit := e.exit
			r.Exit = &exit
		}
	})
	i.forgetRun()
	i.h.due.Remove(i.due)
	i.armRestart()
	i.emit("stopped", by, why)
	i.h.log.Info("stopped", "instance", i.name(), "by", by, "reason", why)
	return nil
}

// exitLimit bounds the wait for the exit code of a run that has just been killed.
const exitLimit = time.Second

// awaitExit waits until the exit of the current run is reported. Its processes must
// have ended.
func (i *inst) awaitExit() {
	i.mu.Lock()
	over := i.proc.over
	i.mu.Unlock()
	select {
	case <-over:
	case <-time.After(exitLimit):
	}
}

// stopGrace returns how long a program gets to exit.
func (i *inst) stopGrace() time.Duration {
	return time.Duration(cmp.Or(i.spec().StopGrace, idle.Duration(stopGrace)))
}

// askToEnd sends SIGTERM to the program. A frozen program receives it when it is
// thawed, before it can accept any connection.
func askToEnd(a *attempt) error {
	if a.work == nil {
		return nil
	}
	if err := a.signal(); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("cannot signal %s: %w", a.i.name(), err)
	}
	return nil
}

// signal asks the program to exit. In a guest, the guest agent forwards the signal.
// If the guest agent hangs, signal waits no longer than it would for a program that
// ignores the signal.
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
		return fmt.Errorf("the guest did not answer within %s", grace)
	}
}

// OnExit must be called by a runtime when a run has ended. It does not block.
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
	i.requests.ended.Store(&ending{run, e})
	if i.proc.over != nil {
		select {
		case <-i.proc.over:
		default:
			close(i.proc.over)
		}
	}
	i.mu.Unlock()
	h.point("exit-noted", i)
	h.spawn(func() {
		if i.tryAcquire() { // otherwise the holder of the lock serves it
			i.serve()
			i.release()
		}
	})
}

// explained adds to e what only the workload knows about its end.
func (i *inst) explained(e instance.Exit) instance.Exit {
	if x, ok := i.workload().(instance.Explainer); ok && e.Why == "" {
		return x.Explain(e)
	}
	return e
}

// handleEnding records that the program has exited by itself. i.lock must be held,
// and no transition may be in progress.
func (i *inst) handleEnding(e *ending) {
	switch i.state() {
	case power.Running, power.Paused, power.Reclaimed, power.Hibernated, power.Pausing, power.Resuming:
	default:
		return
	}
	i.mu.Lock()
	lost := i.proc.work == nil && i.rec.Identity != nil
	i.mu.Unlock()
	if lost {
		// This is the run of an earlier daemon, which has not been adopted yet.
		// Adoption finds out why it ended, and cleans up.
		i.turn.reported = e
		err := i.seek(i.h.ctx)
		i.turn.reported = nil
		if err != nil {
			i.h.log.Error("cannot take over", "instance", i.name(), "err", err)
		}
		if err != nil || i.workload() == nil {
			return
		}
	}
	exit := i.explained(e.exit)
	if w := i.workload(); w != nil { // children may have outlived the program
		ctx, cancel := context.WithTimeout(context.WithoutCancel(i.h.ctx), killLimit)
		err := w.Kill(ctx)
		cancel()
		if err != nil {
			i.h.log.Error("cannot end the remaining processes", "instance", i.name(), "err", err)
			i.h.spawn(func() { // tries until nothing is left
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
	now := i.h.Now()
	i.note(func(r *instance.Record) {
		r.State, r.StatusReason, r.Exit, r.Saved, r.Freed, r.NextDue = power.Stopped, why, &exit, 0, 0, time.Time{}
		if !i.spec().Adopted.IsUnit() { // restarting a unit is up to systemd
			r.ApplyRestartRule(exit, now)
		}
	})
	i.forgetRun()
	i.h.due.Remove(i.due)
	i.emit("exited", "", why)
	i.h.log.Info("exited", "instance", i.name(), "reason", why)
	i.armRestart()
	i.releaseEnded()
}

// armRestart sets the deadline for a pending restart.
func (i *inst) armRestart() {
	i.mu.Lock()
	at := i.rec.RestartAt
	i.retry.restart = at
	i.mu.Unlock()
	if !at.IsZero() {
		i.h.due.Set(i.due, at)
	}
	i.scheduleStopped()
}
