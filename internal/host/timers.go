package host

import (
	"context"
	"fmt"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
)

// A timer is a time at which an instance must run. Its program sets one over
// LULL_SOCKET (next_due), a user with lull wake-at, or its spec with a schedule.
// The instance is woken Lead earlier (or started, if lull had stopped it). It is
// not paused until the timer has passed, and then has its full idle timeout. Timers
// are wall-clock times and survive the daemon. A timer that passed while no daemon
// ran, or that a clock step skipped, is served at once.

// Lead is how long before a timer the instance is woken.
const Lead = 2 * time.Second

// byTimer is the actor of a wake by a timer.
const byTimer = "timer"

// wallNow returns the wall-clock time. Unlike Now it follows clock steps.
func (h *Host) wallNow() time.Time {
	if h.cfg.Wall != nil {
		return h.cfg.Wall()
	}
	return time.Now().Round(0)
}

// nextTimerLocked returns the next timer and who set it, or a zero time. A timer in
// the past has not been served yet. i.mu must be held.
func (i *inst) nextTimerLocked() (at time.Time, by string) {
	now, served := i.h.wallNow(), latest(i.rec.TimersServed, i.rec.CreatedAt)
	switch woken := i.says.wokenFor; {
	case !now.Before(woken): // if the instance sleeps again, a user has paused it before the timer passed
		served = latest(served, woken)
	case now.Before(woken.Add(-Lead)): // the clock was set back
		i.says.wokenFor = time.Time{}
	}
	take := func(t time.Time, from string) {
		if !t.IsZero() && (at.IsZero() || t.Before(at)) && (t.After(served) || t.After(now)) {
			at, by = t, from
		}
	}
	take(i.rec.NextDue, "its program")
	take(i.rec.WakeAt, "a user")
	take(i.seen.due, i.seen.dueBy)
	if served.After(now) { // the clock was set back
		served = now
	}
	for _, text := range i.spec().WakeSchedule {
		if s, err := instance.ParseCron(text); err == nil {
			take(s.Next(served), "the schedule "+text)
		}
	}
	if c := &i.timed; c.timers != nil {
		since := latest(served, c.since)
		if since.After(now) {
			since = now
		}
		take(c.timers.Next(since))
	}
	return at, by
}

// wakeDue returns when i must be woken for its next timer, or checked for a new
// one, as a time of Host.Now. Zero means never.
func (i *inst) wakeDue() time.Time {
	i.mu.Lock()
	defer i.mu.Unlock()
	at, _ := i.nextTimerLocked()
	if i.heldOutsideLocked() {
		return time.Time{}
	}
	if !at.IsZero() && !at.Equal(i.says.wokenFor) { // otherwise it was already woken for this timer
		at = at.Add(-Lead)
	}
	if again := i.rereadLocked(); !again.IsZero() && (at.IsZero() || again.Before(at)) {
		at = again
	}
	if at.IsZero() {
		return at
	}
	return i.h.Now().Add(at.Sub(i.h.wallNow()))
}

// noteDue stores when the workload next has to run, and reports whether that has
// changed.
func (i *inst) noteDue(w Workload) bool {
	t, ok := w.(instance.Timed)
	if !ok {
		return false
	}
	at, by := t.Due()
	i.mu.Lock()
	defer i.mu.Unlock()
	changed := !at.Equal(i.seen.due)
	i.seen.due, i.seen.dueBy = at, by
	return changed
}

// takeTimer reports whether a timer is due, and which. Each timer is reported once,
// so that a user can pause the instance afterwards.
func (i *inst) takeTimer() (why string, due bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	at, by := i.nextTimerLocked()
	if at.IsZero() || i.heldOutsideLocked() || at.Equal(i.says.wokenFor) || i.h.wallNow().Before(at.Add(-Lead)) {
		return "", false
	}
	i.says.wokenFor = at
	return fmt.Sprintf("%s set a timer for %s", by, at.UTC().Format(time.RFC3339)), true
}

// passTimers drops the timers that have passed, each of which counts as activity.
// The instance must run, and i.lock must be held.
func (i *inst) passTimers() {
	now := i.h.wallNow()
	i.mu.Lock()
	at, _ := i.nextTimerLocked()
	passed := false
	for _, t := range []time.Time{at, i.says.wokenFor, i.rec.NextDue, i.rec.WakeAt} {
		passed = passed || !t.IsZero() && !t.After(now)
	}
	i.mu.Unlock()
	if !passed {
		return
	}
	i.update(func(r *instance.Record) {
		if !r.NextDue.After(now) {
			r.NextDue = time.Time{}
		}
		if !r.WakeAt.After(now) {
			r.WakeAt = time.Time{}
		}
		r.TimersServed, r.LastActivityAt = now, latest(r.LastActivityAt, i.h.Now())
		i.says.wokenFor = time.Time{} // so that the timer is due again if the clock is set back
	})
	i.h.saver.WriteLater(i, i.id)
}

// timerBlockLocked returns a block shortly before a timer, or nil. i.mu must be
// held.
func (i *inst) timerBlockLocked(now time.Time) *idle.Block {
	at, by := i.nextTimerLocked()
	if at.IsZero() {
		return nil
	}
	due := now.Add(at.Sub(i.h.wallNow()))
	if due.Sub(now) >= max(i.pauseAfter(), Lead+time.Second) {
		return nil
	}
	return &idle.Block{Code: idle.Schedule, Sentence: "It must run soon: " + by + " set a timer.", Until: &due}
}

// WakeAt sets a user's timer for an instance. The zero time clears it.
func (h *Host) WakeAt(ctx context.Context, ref string, t time.Time) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if d := t.Sub(h.wallNow()); !t.IsZero() && (d <= 0 || d > instance.MaxDeadline) {
		return &InvalidError{fmt.Errorf("cannot use wake time %s: want a time in the future, at most %s from now", t.Format(time.RFC3339), instance.MaxDeadline)}
	}
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	if err := i.save(func(r *instance.Record) { r.WakeAt = t.Round(0) }); err != nil {
		return err
	}
	if t.IsZero() {
		i.emit("wake_at_ended", ByManual, "by "+requester(ctx))
	} else {
		i.emit("wake_at_set", ByManual, t.UTC().Format(time.RFC3339)+" by "+requester(ctx))
	}
	i.reschedule()
	return nil
}

// setNextDue sets the program's timer. It waits for i.lock until ctx ends. When it
// returns, the timer is durable.
func (i *inst) setNextDue(ctx context.Context, at time.Time) error {
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	if err := i.save(func(r *instance.Record) { r.NextDue = at.Round(0) }); err != nil {
		return err
	}
	i.reschedule()
	return nil
}

// reschedule recomputes the deadline of an instance that does not run, after its
// timers or the clock have changed.
func (i *inst) reschedule() {
	switch s := i.state(); {
	case s.Asleep():
		i.scheduleAsleep(i.h.Now())
	case s == power.Stopped:
		i.scheduleStopped()
	}
}

// scheduleStopped sets the deadline of a stopped instance: for its restart or, if
// lull had stopped it, for its next timer.
func (i *inst) scheduleStopped() {
	i.mu.Lock()
	at, enabled, timed := i.retry.restart, i.rec.Enabled, i.timedLocked()
	i.mu.Unlock()
	if !enabled {
		return
	}
	if t := i.wakeDue(); timed && !t.IsZero() && (at.IsZero() || t.Before(at)) {
		at = t
	}
	if !at.IsZero() {
		i.h.due.Set(i.due, latest(at, i.h.Now()))
	}
}

// timedLocked reports whether a timer may start the stopped instance. It may not if
// a user stopped the instance or its program exited. i.mu must be held.
func (i *inst) timedLocked() bool { return i.rec.Enabled && i.rec.StoppedBy == stopAfter }

// ClockStepped must be called when the wall clock was set or the machine was
// suspended. It recomputes when timers are due.
func (h *Host) ClockStepped() {
	for _, i := range h.all() {
		i.mu.Lock()
		at, _ := i.nextTimerLocked()
		i.mu.Unlock()
		if !at.IsZero() {
			i.reschedule()
		}
	}
}
