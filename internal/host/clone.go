package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/protocol/hostctl"
)

// byClone is the recorded cause of the pause of a clone, and of an instance that is
// hibernated to be cloned.
const byClone = "clone"

// Clone makes an instance from the snapshot of another. The clone starts out
// hibernated. It has the source's memory, files and programs, but its own network,
// host name and random numbers. The source stays asleep; if it is only paused, it
// is hibernated first.
func (h *Host) Clone(ctx context.Context, ref string, c hostctl.Clone) (id string, err error) {
	src, err := h.find(ref)
	if err != nil {
		return "", err
	}
	refuse := func(format string, args ...any) error {
		return &RefusedError{Name: src.name(), What: "clone", Reason: fmt.Sprintf(format, args...)}
	}
	rt, ok := src.rt.(instance.Cloner)
	if !ok {
		return "", refuse("the %s runtime cannot", src.spec().Runtime)
	}
	s := *src.spec()
	s.Name, s.Expose = c.Name, c.Expose
	switch {
	case !c.Workspace:
		s.Workspace = ""
	case s.Workspace == "":
		return "", refuse("its workspace cannot be shared with a clone")
	}
	if _, err := h.checkSpec(&s); err != nil {
		return "", err
	}
	if err := src.acquireCtx(ctx); err != nil {
		return "", err
	}
	defer src.release()
	src.serve()
	if err := src.toDisk(refuse); err != nil {
		return "", err
	}
	now := h.Now()
	rec := instance.Record{ID: newID(), Spec: s, State: power.Hibernated, Enabled: true, CreatedAt: now, StateSince: now, Endpoints: s.Expose,
		Generation: 1, StatusReason: "cloned from " + src.name(), Identity: &instance.Identity{Run: 1},
		StartedAt: now, LastActivityAt: now, LastPausedAt: now, PausedBy: byClone}
	i := newInst(h, rec, src.rt)
	if err := h.add(i); err != nil {
		return "", err
	}
	defer i.release()
	if err = i.openRelay(); err == nil {
		err = i.become(ctx, rt, src)
	}
	if err != nil {
		i.undoClone(context.WithoutCancel(ctx))
		return "", refuse("%v", err)
	}
	i.emit("created", byClone, "cloned from "+src.name())
	return i.id, nil
}

// undoClone removes every trace of a failed clone.
func (i *inst) undoClone(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, killLimit)
	defer cancel()
	var errs []error
	if w := i.workload(); w != nil {
		errs = append(errs, w.Kill(ctx))
	}
	if f, ok := i.rt.(instance.Forgetter); ok {
		errs = append(errs, f.Forget(ctx, i.id))
	}
	errs = append(errs, i.h.saver.Remove(i, i.id))
	if err := errors.Join(errs...); err != nil {
		i.h.log.Warn("cannot clean up after a clone", "instance", i.name(), "err", err)
	}
	i.h.drop(i)
}

// toDisk makes sure that a sleeping instance is saved to disk. i.lock must be held.
func (i *inst) toDisk(refuse func(string, ...any) error) error {
	switch s := i.state(); s {
	case power.Hibernated:
		return nil
	case power.Paused, power.Reclaimed:
		if i.pausedByOthers() {
			return refuse("it was paused outside lull")
		}
	default:
		return refuse("it is %s; put it to sleep first with: lull pause %s", s, i.name())
	}
	if n := len(i.workload().Sample(nil).Inbound); n > 0 {
		return refuse("%d clients are connected to it, and a copy would answer them too", n)
	}
	if i.hibernate(byClone); i.state() != power.Hibernated {
		i.mu.Lock()
		why := i.rec.StatusReason
		i.mu.Unlock()
		return refuse("it could not be saved to disk: %s", why)
	}
	return nil
}

// become makes i the clone of src. The runtime writes the snapshot, then the record
// is saved, and then i is adopted as after a restart of the daemon. If the daemon
// dies in between, the next prune removes the files.
func (i *inst) become(ctx context.Context, rt instance.Cloner, src *inst) error {
	saved, err := rt.Clone(ctx, src.id, instance.Launch{ID: i.id, Run: 1, Workspace: i.spec().Workspace,
		LogPath: i.logPath(), LogMax: cmp.Or(i.spec().LogMax, logMax)})
	if err != nil {
		return err
	}
	if err := i.save(func(r *instance.Record) { r.Saved = saved }); err != nil {
		return err
	}
	if err := i.adopt(ctx, adoptLimit); err != nil {
		return err
	}
	if s := i.state(); s == power.Stopped {
		return errors.New("its copy could not be adopted")
	}
	return nil // a client that already connected has woken it
}
