package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/logfile"
	"lull/internal/protocol/hostctl"
)

// AdoptProgram makes an instance of a running program, without moving it. Unless q
// has a name, the instance gets that of the program.
func (h *Host) AdoptProgram(ctx context.Context, q hostctl.Adopt) (id string, err error) {
	named := 0
	for _, given := range []bool{q.PID != 0, q.Cgroup != "", q.Unit != "", q.Container != ""} {
		if given {
			named++
		}
	}
	switch {
	case named != 1:
		return "", &InvalidError{errors.New("cannot adopt: want exactly one of pid, cgroup, unit and container")}
	case q.Container != "":
		return h.adoptContainer(ctx, q)
	case q.StopAfter != nil && q.Unit == "":
		return "", &InvalidError{errors.New("cannot use stop_after: lull did not start the program, and cannot start it again")}
	case q.DropIn && !q.Stop:
		return "", &InvalidError{errors.New("cannot use drop_in without stop: a drop-in is for a unit that lull stops and starts")}
	case q.Unit == "" && (q.Manager != "" || q.Stop):
		return "", &InvalidError{errors.New("cannot adopt: manager and stop apply only to units")}
	case q.StopAfter != nil && (!q.Stop || *q.StopAfter <= 0):
		return "", &InvalidError{errors.New("cannot adopt: stop_after needs stop, and must be positive")}
	}
	what := cmp.Or(q.Cgroup, q.Unit)
	if what == "" {
		what = fmt.Sprintf("process %d", q.PID)
	}
	refuse := func(err error) error { return &RefusedError{Name: what, What: "adopt", Reason: err.Error()} }
	rt, ok := h.cfg.Runtimes[instance.RuntimeAdopted].(instance.Adopter)
	if !ok {
		return "", refuse(errors.New("this host cannot adopt programs"))
	}
	h.adopting.Lock() // otherwise two concurrent adoptions of a program could both pass the check
	defer h.adopting.Unlock()
	target, p, err := rt.Resolve(instance.Adopted{PID: q.PID, Cgroup: q.Cgroup, Unit: q.Unit, Manager: q.Manager}, q.Caller)
	if err == nil {
		err = h.heldAlready(p.PIDs)
	}
	if err != nil {
		return "", refuse(err)
	}
	if q.DropIn {
		if _, err := h.PlanDropIn(ctx, q); err != nil {
			return "", err
		}
		target.DropIn = true
	}
	s := instance.Spec{Name: q.Name, Runtime: instance.RuntimeAdopted, Command: p.Command, Adopted: &target, PauseAfter: q.PauseAfter,
		StopAfter: new(idle.Duration), Restart: instance.RestartNo, WakeFromStopped: new(bool)}
	if q.Stop {
		s.StopAfter, s.WakeFromStopped = q.StopAfter, nil
	}
	if p.StopsIn > 0 {
		s.StopGrace = idle.Duration(min(p.StopsIn, instance.MaxGrace))
	}
	s.Probes, s.WakeSchedule = q.Probes, q.WakeSchedule
	if s.Name == "" {
		s.Name = h.freeName(p.Name, q.PID)
	}
	if id, err = h.Create(ctx, s); err != nil {
		return "", err
	}
	i := h.byIDNow(id)
	i.requests.found.Store(true)
	err = h.startFor(ctx, i, ByManual, "adopted by "+requester(ctx))
	if err == nil && q.DropIn {
		err = h.KeepDropIns(ctx)
	}
	if err != nil {
		if i.acquireCtx(h.ctx) == nil {
			err = errors.Join(err, i.remove(h.ctx, ByManual, "the adoption failed"))
			i.release()
		}
		return "", fmt.Errorf("cannot adopt %s: %w", what, err)
	}
	return id, nil
}

// heldAlready returns an error if one of pids already belongs to an instance.
func (h *Host) heldAlready(pids []int) error {
	for _, i := range h.all() {
		w := i.workload()
		if w == nil {
			continue
		}
		own := []int{w.Identity().PID}
		if l, ok := w.(interface{ PIDs() ([]int, error) }); ok {
			of, err := l.PIDs()
			if err != nil && len(of) == 0 {
				return fmt.Errorf("cannot list the processes of the instance %s, which may be part of it: %w", i.name(), err)
			}
			own = append(own, of...)
		}
		for _, pid := range own {
			if slices.Contains(pids, pid) {
				return fmt.Errorf("process %d belongs to the instance %s already", pid, i.name())
			}
		}
	}
	return nil
}

// freeName returns an unused instance name derived from a program's name.
func (h *Host) freeName(program string, pid int) string {
	var b strings.Builder
	for _, r := range strings.ToLower(program) {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r) {
			b.WriteRune(r)
		}
	}
	name := strings.Trim(b.String()[:min(b.Len(), instance.MaxName-12)], "-._")
	if name == "" {
		name = "adopted"
	}
	try := name
	if pid > 0 && h.nameIsFree(try, "adopt") != nil {
		try = fmt.Sprintf("%s-%d", name, pid)
	}
	for n := 2; h.nameIsFree(try, "adopt") != nil && n < MaxInstances; n++ {
		try = fmt.Sprintf("%s-%d", name, n)
	}
	return try
}

// ListAdopted returns the instances whose programs lull did not start, sorted by
// name.
func (h *Host) ListAdopted() []hostctl.Instance {
	return slices.DeleteFunc(h.List(false), func(o hostctl.Instance) bool { return o.Adopted == nil && o.Runtime != instance.RuntimeDocker })
}

// ReleaseProgram stops managing an adopted program or container. It thaws the
// program, unless others froze it, and removes the instance.
func (h *Host) ReleaseProgram(ctx context.Context, ref, by string) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if err := i.mayRelease(ctx); err != nil {
		return err
	}
	h.callOff(i, "it was released by a user in the meantime")
	if cancel := i.requests.interrupt.Load(); cancel != nil {
		(*cancel)(errors.New("it is being released"))
	}
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	i.serve()
	if err := i.stabilize(); err != nil {
		return &RefusedError{Name: i.name(), What: "release", Reason: "it may be frozen, and cannot be found: " + err.Error()}
	}
	if i.state().Asleep() && !i.pausedByOthers() {
		if err := i.wake(by, "released by "+requester(ctx)); err != nil {
			return err
		}
	}
	if i.state() == power.Stopped && i.unwakeable() == "" {
		if err := i.start(ctx, by, "released by "+requester(ctx)); err != nil {
			return fmt.Errorf("cannot start %s, which lull has stopped: %w", i.name(), err)
		}
	}
	if i.halfway() {
		return &RefusedError{Name: i.name(), What: "release", Reason: fmt.Sprintf("it is %s", i.state())}
	}
	return i.remove(ctx, by, "released by "+requester(ctx))
}

// foreign reports whether lull can neither stop nor start the instance, because
// lull did not start its program.
func (i *inst) foreign() bool {
	s := i.spec()
	return s.Adopted != nil && !s.Adopted.IsUnit()
}

// notOurs returns the error for a request to stop a program that lull did not
// start.
func (i *inst) notOurs(what string) error {
	if a := i.spec().Adopted; a.IsUnit() {
		return &RefusedError{Name: i.name(), What: what, Reason: "it is a unit of systemd. Use systemctl, which lull follows"}
	}
	return &RefusedError{Name: i.name(), What: what, Reason: fmt.Sprintf(
		"lull did not start it and could not start it again. Stop it where it was started, or let lull forget it with: lull adopt release %s", i.name())}
}

// releaseAgain is the interval between attempts to remove the record of an adopted
// program that has ended.
const releaseAgain = time.Second

// releaseEnded removes an adopted instance whose program has ended, as soon as the
// instance's lock is free. Other instances, and units, which systemd can start
// again, are kept.
func (i *inst) releaseEnded() {
	if a := i.spec().Adopted; a.IsUnit() {
		if f, ok := i.rt.(instance.UnitFollower); ok {
			f.FollowUnit(i.id, *a)
		}
		return
	}
	if i.spec().Adopted == nil {
		return
	}
	i.h.spawn(func() {
		for i.acquireCtx(i.h.ctx) == nil {
			var err error
			if i.state() == power.Stopped {
				err = i.remove(i.h.ctx, "", "its program has ended")
			}
			i.release()
			if err == nil {
				return
			}
			i.h.log.Error("cannot release an adopted program that has ended", "instance", i.name(), "err", err)
			select {
			case <-time.After(releaseAgain):
			case <-i.h.ctx.Done():
			}
		}
	})
}

// remove removes an instance, without ending a program that lull did not start.
// i.lock must be held.
func (i *inst) remove(ctx context.Context, by, why string) error {
	if i.requests.deleted.Load() {
		return nil
	}
	if err := i.h.saver.Remove(i, i.id); err != nil {
		return fmt.Errorf("cannot remove %s: %w", i.name(), err)
	}
	i.letGo()
	if f, ok := i.rt.(instance.Forgetter); ok {
		if err := f.Forget(ctx, i.id); err != nil {
			i.h.log.Warn("cannot clean up after an instance", "instance", i.name(), "err", err)
		}
	}
	if i.h.cfg.LogDir != "" {
		if err := logfile.Remove(i.logPath()); err != nil {
			i.h.log.Warn("cannot remove the logs of an instance", "instance", i.name(), "err", err)
		}
	}
	if i.state() != power.Stopped { // the program continues to run, but lull no longer manages it
		i.forgetRun()
		i.update(func(r *instance.Record) { r.State, r.StatusReason = power.Stopped, why })
	}
	i.h.drop(i)
	if a := i.spec().Adopted; a.IsUnit() && a.DropIn {
		if err := i.h.KeepDropIns(ctx); err != nil {
			i.h.log.Warn("a drop-in is left until the next start of the daemon", "instance", i.name(), "err", err)
		}
	}
	i.emit("removed", by, why)
	return nil
}

// showListeners reports the listeners of an adopted program as the instance's
// endpoints, because no setting names them. If one of them cannot be watched, the
// program is never paused.
func (i *inst) showListeners(w Workload) {
	if i.spec().Adopted == nil {
		return
	}
	ls, err := w.Listeners()
	var eps []instance.Endpoint
	var cannot []string
	for _, l := range ls {
		e := instance.Endpoint{Listen: l.Addr, Target: l.Addr, Path: instance.PathDirect, Why: "the program itself listens there"}
		if l.Network != "tcp" {
			e.Proto = l.Network
		}
		if !l.Watchable {
			e.Status, e.Why = "unwatchable_socket", l.Why
			cannot = append(cannot, l.Addr+": "+l.Why)
		}
		if len(eps) < instance.MaxEndpoint && !slices.ContainsFunc(eps, func(o instance.Endpoint) bool { return o.Listen == e.Listen && o.Proto == e.Proto }) {
			eps = append(eps, e)
		}
	}
	if err != nil {
		cannot = append(cannot, err.Error())
	}
	var block *idle.Block
	if len(cannot) > 0 {
		block = &idle.Block{Code: "unwatchable_socket", Sentence: "It cannot be watched while frozen: " + strings.Join(cannot, "; ")}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.rec.Endpoints, i.seen.block = eps, block
}
