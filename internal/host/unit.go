package host

import (
	"context"
	"errors"
	"fmt"

	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// systemd stops and starts its units, for lull and for others. While a unit is
// stopped by lull, its sockets are held, and a client starts it.

// byRepair is the actor of a start that is needed because lull has lost something.
const byRepair = "repair"

// listens reports whether any endpoint of the instance is known.
func (i *inst) listens() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return len(i.rec.Endpoints) > 0
}

// keepSockets makes the shim hold the sockets of a unit that lull is about to stop.
// If it fails, the unit must not be stopped. It does nothing for other instances.
func (i *inst) keepSockets(ctx context.Context) error {
	k, ok := i.workload().(instance.SocketKeeper)
	if !ok || !i.spec().Adopted.IsUnit() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, keepLimit)
	defer cancel()
	kept, err := k.KeepSockets(ctx)
	i.ports.kept.Store(kept && err == nil)
	if err != nil {
		return fmt.Errorf("cannot keep the sockets of %s for a stop: %w", i.name(), err)
	}
	return nil
}

// dropSockets undoes keepSockets, because the unit continues to run.
func (i *inst) dropSockets() {
	k, ok := i.workload().(instance.SocketKeeper)
	if !ok || !i.ports.kept.Swap(false) {
		return
	}
	ctx, cancel := context.WithTimeout(i.h.ctx, keepLimit)
	defer cancel()
	if err := k.DropSockets(ctx); err != nil {
		i.h.log.Warn("the sockets of a running unit stay open", "instance", i.name(), "err", err)
	}
}

// restUnit watches the held sockets of a unit that lull has stopped, and closes
// those of any other stopped unit. i.lock must be held.
func (i *inst) restUnit() {
	if i.h.cfg.HeldListeners == nil {
		return
	}
	if i.unwakeable() != "" {
		if i.ports.kept.Load() {
			i.letGo()
		}
		return
	}
	g, err := i.h.cfg.HeldListeners.Watch(i.id, i.wantWake)
	if err != nil {
		i.h.log.Debug("the sockets of a stopped unit are not held", "instance", i.name(), "err", err)
		return
	}
	i.shut(false)
	i.mu.Lock()
	i.proc.held = g
	i.mu.Unlock()
}

// noteReboot checks whether the machine was restarted since lull stopped a unit. If
// so, it records that lull did not stop it, so starting it is up to systemd. i.lock
// must be held.
func (i *inst) noteReboot(ctx context.Context) {
	a := i.spec().Adopted
	f, ok := i.rt.(instance.UnitFollower)
	i.mu.Lock()
	last := i.rec.Identity
	i.mu.Unlock()
	if !ok || !a.IsUnit() || last == nil {
		return
	}
	rebooted, err := f.Rebooted(ctx, i.id, *a, *last)
	if err != nil {
		i.h.log.Warn("other programs may have taken the addresses of a unit since the machine was restarted", "instance", i.name(), "err", err)
	}
	if rebooted && i.unwakeable() == "" {
		i.note(func(r *instance.Record) { r.StoppedBy, r.StatusReason = "", "the machine was restarted" })
	}
}

// PlanDropIn returns the drop-in that the adoption of a unit would write.
func (h *Host) PlanDropIn(ctx context.Context, q hostctl.Adopt) (d instance.DropIn, err error) {
	rt, ok := h.cfg.Runtimes[instance.RuntimeAdopted].(interface {
		instance.Adopter
		instance.DropInWriter
	})
	switch {
	case q.Unit == "":
		return d, &InvalidError{errors.New("cannot show a drop-in: name a unit")}
	case !ok:
		err = errors.New("this host cannot adopt units")
	default:
		var a instance.Adopted
		if a, _, err = rt.Resolve(instance.Adopted{Unit: q.Unit, Manager: q.Manager}, q.Caller); err == nil {
			d, err = rt.PlanDropIn(ctx, a)
		}
	}
	if err != nil {
		err = &RefusedError{Name: q.Unit, What: "start with a drop-in", Reason: err.Error()}
	}
	return d, err
}

// KeepDropIns writes the drop-ins that the instances need, and removes all others.
func (h *Host) KeepDropIns(ctx context.Context) error {
	rt, ok := h.cfg.Runtimes[instance.RuntimeAdopted].(instance.DropInWriter)
	if !ok {
		return nil
	}
	wanted := map[string]instance.Adopted{}
	for _, i := range h.all() {
		if a := i.spec().Adopted; a.IsUnit() && a.DropIn && i.wakes() {
			wanted[i.id] = *a
		}
	}
	return rt.KeepDropIns(ctx, wanted)
}

// startUnwatched starts a unit that lull has stopped if its sockets were lost,
// because then no client could start it. i.lock must be held.
func (i *inst) startUnwatched() {
	a := i.spec().Adopted
	i.mu.Lock()
	watched := i.proc.held != nil
	i.mu.Unlock()
	f, ok := i.rt.(instance.UnitFollower)
	if !ok || !a.IsUnit() || watched || i.unwakeable() != "" {
		return
	}
	i.h.spawn(func() {
		if listens, err := f.SystemdListens(i.h.ctx, *a); err == nil && listens {
			return
		}
		if err := i.h.startFor(i.h.ctx, i, byRepair, "its sockets were lost"); err != nil {
			i.h.log.Error("cannot start a unit whose sockets were lost", "instance", i.name(), "err", err)
		}
	})
}

// Unwatch closes the guard on a stopped unit's sockets. It is called before they
// are closed.
func (h *Host) Unwatch(id string) {
	if i := h.byIDNow(id); i != nil {
		i.dropHeld()
	}
}
