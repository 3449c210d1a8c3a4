package host

import (
	"errors"
	"fmt"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
)

// A workload may have timers of its own, such as those of a cron (instance.Scheduled).
// They are read afresh before every pause, and once a minute while it sleeps, since
// a cron notices a changed crontab within a minute. A cron that is thawed before a
// job is due runs it as if it had never been frozen. What it makes up for after a
// freeze or a step of the clock is up to the cron.

const (
	// timersLimit is how long a reading of timers may take.
	timersLimit = 2 * time.Second
	// timersEvery is the interval of readings of a running workload that may have
	// timers. Before a pause they are always read.
	timersEvery = time.Minute
	// jobGrace is how long after its time a job may need to start.
	jobGrace = 10 * time.Second
)

// cronSignal is the signal of the block while timers are unknown, or a job runs.
const cronSignal = "cron"

// timed has the timers of a workload. Guarded by mu.
type timed struct {
	timers  instance.Timers // nil for none
	since   time.Time       // wall time until which jobs are done with, or were missed for good
	read    time.Time       // wall time of the last reading; zero for none in this run
	block   *idle.Block     // they are unknown, or a job runs
	reading bool            // a reading has not returned yet
}

// readTimers reads the timers of the workload, and reports whether it has any, or
// may have. The caller holds the lock of the instance.
func (i *inst) readTimers(w Workload) bool {
	t, ok := w.(instance.Scheduled)
	if !ok {
		return false
	}
	i.mu.Lock()
	hangs := i.timed.reading
	i.timed.reading = true
	i.mu.Unlock()
	if hangs {
		return i.noteTimers(nil, errors.New("the last reading has not returned"))
	}
	type result struct {
		timers instance.Timers
		err    error
	}
	read := make(chan result, 1)
	go func() { // it may outlive the check
		timers, err := t.Timers()
		i.mu.Lock()
		i.timed.reading = false
		i.mu.Unlock()
		read <- result{timers, err}
	}()
	late := time.NewTimer(timersLimit)
	defer late.Stop()
	select {
	case got := <-read:
		return i.noteTimers(got.timers, got.err)
	case <-late.C:
		return i.noteTimers(nil, fmt.Errorf("no answer within %s", timersLimit))
	}
}

// noteTimers keeps what was read.
func (i *inst) noteTimers(timers instance.Timers, err error) bool {
	now := i.h.wallNow()
	i.mu.Lock()
	defer i.mu.Unlock()
	c := &i.timed
	c.read, c.block = now, nil
	switch {
	case err != nil: // the last known timers stay
		c.block = &idle.Block{Code: idle.SignalUnknown, Signal: cronSignal,
			Sentence: fmt.Sprintf("Unknown: when its cron has to run a job, %v. An unknown signal never counts as quiet.", err)}
		return true
	case timers == nil:
		c.timers = nil
		return false
	}
	c.timers, c.since = timers, now.Add(-jobGrace)
	if timers.Working() != "" {
		c.block = &idle.Block{Code: idle.RecentActivity, Signal: cronSignal, Sentence: upperFirst(timers.Working()) + "."}
	}
	return true
}

// refreshTimers reads the timers of a running workload if it is time. The caller
// holds the lock.
func (i *inst) refreshTimers(w Workload) {
	i.mu.Lock()
	c := &i.timed
	may := c.read.IsZero() || c.timers != nil || i.seen.unheard
	old := i.h.wallNow().Sub(c.read).Abs() >= timersEvery
	due := c.block != nil || may && old
	i.mu.Unlock()
	if due {
		i.readTimers(w)
	}
}

// rereadLocked returns when the timers of a sleeping workload are read again, on the
// wall clock: before the next minute in which a job may be due. Zero for never.
func (i *inst) rereadLocked() time.Time {
	if i.timed.timers == nil {
		return time.Time{}
	}
	at := i.timed.read.Truncate(time.Minute).Add(time.Minute - Lead)
	if !at.After(i.timed.read) {
		at = at.Add(time.Minute)
	}
	if now := i.h.wallNow(); at.Sub(now) > time.Minute { // the clock was set back
		at = now
	}
	return at
}

// rereadTimers reads the timers of a sleeping workload if it is time. It returns why
// the workload must be woken at once; "" if it may sleep. The caller holds the lock.
func (i *inst) rereadTimers() string {
	i.mu.Lock()
	at := i.rereadLocked()
	i.mu.Unlock()
	if at.IsZero() || i.h.wallNow().Before(at) {
		return ""
	}
	i.readTimers(i.workload())
	i.mu.Lock()
	defer i.mu.Unlock()
	if b := i.timed.block; b != nil && b.Code == idle.SignalUnknown && !i.heldOutsideLocked() {
		return b.Sentence
	}
	return ""
}

// jobsBlockLocked blocks a pause while timers are unknown or a job runs or may be
// about to start; nil otherwise. i.mu is held.
func (i *inst) jobsBlockLocked() *idle.Block {
	c := &i.timed
	if c.block != nil || c.timers == nil {
		return c.block
	}
	if d := i.h.wallNow().Sub(i.rec.TimersServed); d >= 0 && d < jobGrace {
		end := i.h.Now().Add(jobGrace - d)
		return &idle.Block{Code: idle.Schedule, Sentence: "A job of its cron may be about to start.", Until: &end}
	}
	return nil
}
