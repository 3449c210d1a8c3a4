package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
)

// unservedEvery is the minimum interval between published refusals of one
// instance for lack of room.
const unservedEvery = time.Minute

// call is a request for an instance, with what it needs to ask for room and for
// the lock.
type call struct {
	what   string // start, wake or stop
	by     string
	client bool // a client waits for it
	// may returns why the request no longer applies to the instance; nil if it
	// does. A nil may always applies. It is called under the room's mu.
	may func() error
	off *string // of the instance when the request was made; enter sets it
}

// over returns why c must not be carried out anymore: a user has stopped or
// removed the instance since, or the request no longer applies.
func (c *call) over(i *inst) error {
	off := i.off.Load()
	switch {
	case i.deleted.Load():
		return &NotFoundError{Name: i.name()}
	case off != c.off && c.what != "stop":
		return &RefusedError{Name: i.name(), What: c.what, Reason: *off}
	case c.may != nil:
		return c.may()
	}
	return nil
}

// BusyError means that a start or wake found no room in time.
type BusyError struct {
	Name   string
	What   string // start, wake or stop
	Reason string
	Waited time.Duration
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("cannot %s %s: %s", e.What, e.Name, e.cause())
}

func (e *BusyError) cause() string {
	return fmt.Sprintf("there was no room on this host for %s: %s", idle.Human(e.Waited), e.Reason)
}

// fromRoom reports whether err comes from waiting for room, or from a user who
// canceled a start or wake. enter has already published it.
func fromRoom(err error) bool {
	var busy *BusyError
	var refused *RefusedError
	return errors.As(err, &busy) || errors.As(err, &refused)
}

// upward returns the operation that brings i up from its present state.
func (i *inst) upward() string {
	if i.state() == power.Stopped {
		return "start"
	}
	return "wake"
}

// unserved publishes that c found no room. The reason stays as i's status until
// something else happens to it.
func (i *inst) unserved(c call, cause string) {
	if c.what == "stop" {
		return
	}
	now, what := i.h.Now(), i.upward()
	again := false
	i.update(func(r *instance.Record) {
		if again = r.Unserved != "" && i.refused == what+c.by && now.Sub(i.refusedAt) < unservedEvery; !again {
			i.refused, i.refusedAt = what+c.by, now
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

// enter takes the lock of i with room to start or wake it. If a user stops i
// while c waits, i is not started, because c came before the stop. If i still
// sleeps it may be woken; the stop follows.
func (h *Host) enter(ctx context.Context, i *inst, c call) (leave func(), err error) {
	c.off = i.off.Load()
	for {
		l, err := h.room.admit(ctx, i, c)
		if err != nil {
			if off := i.off.Load(); off != c.off && c.what != "stop" {
				i.emit(i.upward()+"_cancelled", c.by, *off)
			}
			return nil, err
		}
		if err := i.acquireCtx(ctx); err != nil {
			l.end()
			return nil, err
		}
		i.serve()
		if off := i.off.Load(); off != c.off && i.state() == power.Stopped && c.what != "stop" {
			i.release()
			l.end()
			return nil, &RefusedError{Name: i.name(), What: c.what, Reason: *off}
		}
		memory, slow := i.needs()
		if (memory == 0 || l.memory) && (!slow || l.slow) {
			return func() { i.release(); l.end() }, nil
		}
		i.release() // it has gone deeper in between
		l.end()
	}
}
