package host

import (
	"context"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
)

// byOutside is the actor of a pause, resume or start that was made through the
// runtime without lull, as with docker pause or docker start.
const byOutside = "external"

// ByImage returns the ID of the instance that a runtime made from an image. For
// Docker, the image names the container.
func (h *Host) ByImage(runtime, image string) (id string, ok bool) {
	for _, i := range h.all() {
		if i.spec().Runtime == runtime && i.spec().Image == image {
			return i.id, true
		}
	}
	return "", false
}

// ImagesOf returns the images of all instances of a runtime.
func (h *Host) ImagesOf(runtime string) (images []string) {
	for _, i := range h.all() {
		if i.spec().Runtime == runtime {
			images = append(images, i.spec().Image)
		}
	}
	return images
}

// RenamedOutside renames an instance because its container was renamed. It fails if
// the name is taken, or if the instance has relayed ports, because the relay knows
// the instance by its name.
func (h *Host) RenamedOutside(ctx context.Context, ref, name string) error {
	i, err := h.find(ref)
	if err != nil || i.name() == name {
		return err
	}
	if err := h.nameIsFree(name, "rename"); err != nil { // checked first, so as not to wait for the lock if the name is taken
		return err
	}
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	old := i.name()
	switch err := instance.ValidName(name); {
	case err != nil:
		return &InvalidError{err}
	case i.gate != nil:
		return &RefusedError{Name: old, What: "rename", Reason: "its relay uses the current name"}
	}
	if err := i.rename(name); err != nil {
		return err
	}
	i.emit("renamed", byOutside, "it was named "+old)
	return nil
}

// rename changes the name of an instance that has no relay. name must be valid.
// i.lock must be held.
func (i *inst) rename(name string) error {
	h, s, gone := i.h, *i.spec(), i.name()
	s.Name = name
	h.mu.Lock()
	err := h.nameIsFreeLocked(name, "rename")
	if err == nil {
		h.byName[name] = i
	}
	h.mu.Unlock()
	if err != nil {
		return err
	}
	if err = i.save(func(r *instance.Record) { r.Spec = s }); err != nil {
		gone = name
	}
	h.mu.Lock()
	if err == nil {
		i.set.Store(&s)
	}
	delete(h.byName, gone)
	h.mu.Unlock()
	return err
}

// StartedOutside adopts an instance that is recorded as stopped and was started
// outside lull.
func (h *Host) StartedOutside(ctx context.Context, ref, why string) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	i.serve()
	if i.state() != power.Stopped {
		return nil
	}
	i.update(func(r *instance.Record) { r.Enabled, r.CrashLooping, r.Crashes = true, false, nil })
	i.requests.found.Store(true)
	return i.start(ctx, byOutside, why)
}

// Observe compares an instance with its workload.
//
// If the workload was paused outside lull, that is recorded: until it is resumed
// outside lull or by a user, no connection wakes it and it takes no step of the
// ladder. If it was resumed outside lull, the instance is recorded as running.
// Observe does not block. If a transition is in progress, the comparison happens
// after it.
func (h *Host) Observe(ref, why string) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	i.requests.observe.Store(&why)
	if i.tryAcquire() {
		i.serve()
		i.release()
	}
	return nil
}

// serveObserve does the work of Observe. i.lock must be held.
func (i *inst) serveObserve(why string) {
	w := i.workload()
	if w == nil {
		return
	}
	if i.noteDue(w) {
		i.reschedule()
	}
	still, err := w.Still()
	if err == nil {
		err = i.follow(still, why)
	}
	if err != nil {
		i.h.log.Error("cannot follow changes made outside lull", "instance", i.name(), "err", err)
	}
}

func (i *inst) follow(still bool, why string) error {
	switch s := i.state(); {
	case s == power.Running && still:
		i.mu.Lock()
		own := i.h.Now().Before(i.proc.ownPauseUntil)
		i.mu.Unlock()
		if !own {
			return i.pausedOutside(why)
		}
		if err := i.workload().Thaw(); err != nil {
			return err
		}
		i.expectOwnPause(time.Time{})
	case s.Asleep() && s != power.Hibernated && !still:
		return i.wake(byOutside, why)
	}
	return nil
}

// expectOwnPause sets until when a pause from outside counts as one that lull has
// requested, which is undone. Zero means that none is expected.
func (i *inst) expectOwnPause(until time.Time) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.proc.ownPauseUntil = until
}

func (i *inst) pausedOutside(why string) error {
	i.ports.up.Store(false)
	if i.gate != nil {
		i.gate.Hold()
	}
	i.mu.Lock()
	i.proc.frozen = true
	i.mu.Unlock()
	now := i.h.Now()
	i.update(func(r *instance.Record) { r.State = power.Pausing })
	err := i.save(func(r *instance.Record) {
		r.State, r.StatusReason, r.Freed = power.Paused, why, 0
		r.LastPausedAt, r.PausedBy = now, byOutside
		r.PauseCount++
	})
	if err != nil {
		i.h.due.Set(i.due, now) // repair will thaw it
		return err
	}
	if i.gate != nil {
		i.gate.Sleep()
	}
	i.h.due.Remove(i.due)
	i.emit("paused", byOutside, why)
	return nil
}

// pausedByOthers reports whether the instance was paused outside lull.
func (i *inst) pausedByOthers() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.heldOutsideLocked()
}

// heldOutsideLocked is pausedByOthers for callers that hold i.mu.
func (i *inst) heldOutsideLocked() bool {
	return i.rec.State.Asleep() && i.rec.PausedBy == byOutside
}
