package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"lull/internal/core/admit"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/admission"
	"lull/internal/protocol/hostctl"
)

// byMemory is the actor of a step of the ladder taken because another instance
// needs the memory.
const byMemory = "memory"

// unservedEvery is the minimum interval between published refusals of the same
// request of an instance for lack of memory.
const unservedEvery = time.Minute

// call is a request for an instance that may have to wait for admission and for the
// lock.
type call struct {
	what   string // start, wake or stop
	by     string
	client bool // a client waits for it
	// may returns why the request no longer applies, or nil. A nil may means that
	// the request always applies. It is called with the lock of the room held.
	may func() error
	off *string // value of the instance's off when the request was made; set by enter
}

// over returns why c no longer applies, or nil: a user has stopped or removed the
// instance since, or c.may fails.
func (c *call) over(i *inst) error {
	off := i.requests.off.Load()
	switch {
	case i.requests.deleted.Load():
		return &NotFoundError{Name: i.name()}
	case off != c.off && c.what != "stop":
		return &RefusedError{Name: i.name(), What: c.what, Reason: *off, Overtaken: true}
	case c.may != nil:
		return c.may()
	}
	return nil
}

// BusyError means that a start or wake timed out in the admission queue.
type BusyError = admission.BusyError

// fromRoom reports whether err is a refusal by admission or a cancellation by a
// user. enter has already published such an error.
func fromRoom(err error) bool {
	var busy *BusyError
	var refused *RefusedError
	return errors.As(err, &busy) || errors.As(err, &refused)
}

// upward returns the operation that makes i run from its current state: start or
// wake.
func (i *inst) upward() string {
	if i.state() == power.Stopped {
		return "start"
	}
	return "wake"
}

// unserved publishes that admission has refused c. The reason stays in i's status
// until i's state changes.
func (i *inst) unserved(c call, cause string) {
	if c.what == "stop" {
		return
	}
	now, what := i.h.Now(), i.upward()
	again := false
	i.update(func(r *instance.Record) {
		if again = r.Unserved != "" && i.retry.refused == what+c.by && now.Sub(i.retry.refusedAt) < unservedEvery; !again {
			i.retry.refused, i.retry.refusedAt = what+c.by, now
			r.Unserved = fmt.Sprintf("a %s by %s failed at %s: %s", what, c.by, now.UTC().Format(time.RFC3339), cause)
		}
	})
	if again {
		return
	}
	i.h.saver.WriteLater(i, i.id)
	i.emit(what+"_failed", c.by, cause)
	i.h.log.Warn("no room to run", "instance", i.name(), "by", c.by, "reason", cause)
}

// enter waits until i is admitted for a start or wake, and takes i.lock. If a user
// stops i while c waits, c is refused, unless i still sleeps: then it may be woken,
// and the stop follows.
func (h *Host) enter(ctx context.Context, i *inst, c call) (leave func(), err error) {
	c.off = i.requests.off.Load()
	for {
		l, err := h.admit(ctx, i, c)
		if err != nil {
			if off := i.requests.off.Load(); off != c.off && c.what != "stop" {
				i.emit(i.upward()+"_cancelled", c.by, *off)
			}
			return nil, err
		}
		if err := i.acquireCtx(ctx); err != nil {
			l.End()
			return nil, err
		}
		i.serve()
		if off := i.requests.off.Load(); off != c.off && i.state() == power.Stopped && c.what != "stop" {
			i.release()
			l.End()
			return nil, &RefusedError{Name: i.name(), What: c.what, Reason: *off, Overtaken: true}
		}
		if l.Covers(h.room.Needs(i)) {
			return func() { i.release(); l.End() }, nil
		}
		i.release() // i has gone deeper meanwhile and needs more
		l.End()
	}
}

// admit waits for admission of c. It publishes a refusal.
func (h *Host) admit(ctx context.Context, i *inst, c call) (*admission.Leave, error) {
	if !i.rationed() {
		return &admission.Leave{}, nil
	}
	l, err := h.room.Admit(ctx, i, admission.Request{Name: i.name(), What: c.what, Client: c.client,
		Over: func() error { return c.over(i) }, Waits: func(reason string) { i.emit("waiting", "", reason) }})
	var busy *BusyError
	var large *admission.TooLargeError
	switch {
	case errors.As(err, &large):
		i.unserved(c, large.Error())
		return nil, &RefusedError{Name: i.name(), What: c.what, Reason: large.Error()}
	case errors.As(err, &busy) && ctx.Err() == nil && h.ctx.Err() == nil: // otherwise the caller no longer waits
		i.unserved(c, busy.Cause())
	}
	return l, err
}

// callOff cancels all pending starts and wakes of i. why is a sentence about i for
// their errors.
func (h *Host) callOff(i *inst, why string) {
	h.room.Recheck(func() { i.requests.off.Store(&why) })
}

// Capacity returns the free memory and boot slots of this host, and the queue for
// them.
func (h *Host) Capacity() hostctl.Capacity { return h.room.Status() }

// Size implements admission.Instance.
func (i *inst) Size() int64 { return i.size }

// Needs implements admission.Instance.
func (i *inst) Needs() (memory int64, slow bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch i.rec.State {
	case power.Stopped, power.Hibernated:
		memory, slow = i.size, i.slow
	case power.Reclaimed:
		memory = min(i.rec.Freed, i.size)
	}
	return memory, slow
}

// Holds implements admission.Instance.
func (i *inst) Holds() int64 {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch i.rec.State {
	case power.Stopped, power.Hibernated:
		return 0
	case power.Reclaimed:
		return max(i.size-i.rec.Freed, 0)
	}
	return i.size
}

// Sleeper implements admission.Instance.
func (i *inst) Sleeper() (s admit.Sleeper, ok bool) {
	if !i.yields() {
		return s, false
	}
	c := i.rt.Capabilities()
	s = admit.Sleeper{State: i.state(), Holds: i.Holds(), Reclaim: c.Reclaim, Hibernate: c.Hibernate}
	i.mu.Lock()
	defer i.mu.Unlock()
	s.Used = i.rec.LastActivityAt
	return s, true
}

// yields reports whether i may be moved to a deeper state for another instance: it
// sleeps, its memory counts, and neither a lease nor a snooze holds it.
func (i *inst) yields() bool {
	now := i.h.Now()
	if i.size == 0 || i.rt.Capabilities().Shared || i.requests.wanted.Load() != nil {
		return false
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	return (i.rec.State == power.Paused || i.rec.State == power.Reclaimed) && i.rec.PausedBy != byOutside &&
		i.proc.guard != nil && !i.heldLocked().After(now) && !i.retry.notBefore.After(now)
}

// PushDown implements admission.Instance.
func (i *inst) PushDown(to power.Instance) bool {
	if !i.tryAcquire() {
		return false // the instance is in a transition, which counts as use
	}
	defer i.release()
	i.serve()
	if !i.yields() || i.move(to) != nil {
		return false
	}
	if to == power.Reclaimed {
		i.reclaim(byMemory)
		i.scheduleAsleep(i.h.Now())
	} else {
		i.hibernate(byMemory)
	}
	return i.state() == to
}

// rationed reports whether starts and wakes of i need admission.
func (i *inst) rationed() bool {
	c := &i.h.cfg
	return i.slow && c.Places > 0 || i.size > 0 && c.Memory > 0
}
