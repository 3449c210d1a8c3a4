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

// An instance whose runtime is an instance.PortHolder has ports that another
// program publishes, such as Docker. Before lull stops such an instance, it makes
// new clients of the ports wait; the first one starts the instance again. If lull
// cannot do that, the instance stays paused, because a client could not start it.

// Intervals between attempts to hold ports.
const (
	holdAgain   = time.Minute // before a stop
	holdOverdue = time.Second // while an instance is stopped
)

// holdPorts makes new clients of the published ports wait, and calls wake for the
// first one. i.lock must be held.
func (i *inst) holdPorts(p instance.PortHolder, wake func(string)) error {
	ctx, cancel := context.WithTimeout(i.h.ctx, keepLimit)
	defer cancel()
	return p.HoldPorts(ctx, i.id, i.spec().Image, wake)
}

// mayStop holds the published ports of a paused instance that is about to be
// stopped automatically. If it fails, it returns why the instance must stay paused.
// An instance without ports may be stopped if others wake it.
//
// An instance is not stopped while a dependent is awake or another member of its
// group is in use, because those may connect to it without the published ports. Such
// a connection wakes a paused instance, but does not start a stopped one.
//
// i.lock must be held.
func (i *inst) mayStop() error {
	p, ok := i.rt.(instance.PortHolder)
	if !ok || !i.spec().Wakes() {
		return nil
	}
	for _, b := range []*idle.Block{i.neededBlock(), i.groupBlock()} {
		if b != nil {
			return i.staysPaused(errors.New(b.Sentence), i.probeEvery())
		}
	}
	err := i.holdPorts(p, nil)
	if err == nil {
		return nil
	}
	p.ReleasePorts(i.id) // some may be held, and nothing would wake it for their clients
	if errors.Is(err, instance.ErrNoPorts) && i.h.related.wakes(i) {
		return nil
	}
	return i.staysPaused(err, holdAgain)
}

// staysPaused publishes that a paused instance is not stopped because of err, and
// returns err. The stop is tried again after again.
func (i *inst) staysPaused(err error, again time.Duration) error {
	why := fmt.Sprintf("not stopped after %s paused: %v", i.stopAfter(), err)
	i.mu.Lock()
	news := i.rec.StatusReason != why
	i.mu.Unlock()
	if news {
		i.update(func(r *instance.Record) { r.StatusReason = why })
		i.emit("stop_cancelled", stopAfter, err.Error())
		i.h.log.Info("not stopped", "instance", i.name(), "reason", err)
	}
	i.h.due.Set(i.due, i.h.Now().Add(again))
	return &staysPausedError{err}
}

// staysPausedError is why a paused instance was not stopped, which has been published.
type staysPausedError struct{ error }

// wakes reports whether another instance, a dependent or a member of i's group,
// wakes i.
func (d *related) wakes(i *inst) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.needing[i.name()]) > 0 || len(d.members[i.spec().Group]) > 1
}

// holdAtRest is rest for an instance with published ports. i.lock must be held.
func (i *inst) holdAtRest(p instance.PortHolder) {
	switch {
	case i.turn.again: // a start follows
		return
	case i.unwakeable() != "":
		p.ReleasePorts(i.id)
		return
	}
	err := i.holdPorts(p, i.wantWake)
	if err == nil || errors.Is(err, instance.ErrNoPorts) {
		return
	}
	if !i.loops.holding.CompareAndSwap(false, true) {
		return // another goroutine already retries
	}
	i.h.log.Error("connections to a stopped instance are refused", "instance", i.name(), "err", err)
	i.emit("handoff_failed", "", err.Error())
	i.h.spawn(func() {
		defer i.loops.holding.Store(false)
		for err != nil && !errors.Is(err, instance.ErrNoPorts) {
			select {
			case <-time.After(holdOverdue):
			case <-i.h.ctx.Done():
				return
			}
			if i.acquireCtx(i.h.ctx) != nil {
				return
			}
			if err = nil; i.state() == power.Stopped && i.unwakeable() == "" {
				err = i.holdPorts(p, i.wantWake)
			}
			i.release()
		}
	})
}
