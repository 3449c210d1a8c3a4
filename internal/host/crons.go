package host

import (
	"errors"
	"fmt"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
)

// A workload may have timers of its own, such as those of a cron daemon
// (instance.Scheduled). They are read before every pause, and once a minute while
// the workload sleeps, because a cron daemon notices a changed crontab within a
// minute. If a cron daemon is thawed before a job is due, it runs the job as if it
// had never been frozen. Which jobs it catches up on after a longer freeze or a
// clock step is up to the cron daemon.

const (
	// timersLimit bounds one reading of timers.
	timersLimit = 2 * time.Second
	// timersEvery is the interval between readings while the workload runs, if it
	// may have timers. They are also read before every pause.
	timersEvery = time.Minute
	// jobGrace is how long after its time a job may start.
	jobGrace = 10 * time.Second
)

// cronSignal is the signal of the block that exists while timers are unknown or a
// job runs.
const cronSignal = "cron"

// timed holds the timers of a workload. Guarded by mu.
type timed struct {
	timers  instance.Timers // nil for none
	since   time.Time       // wall time up to which jobs have run, or have been missed permanently
	read    time.Time       // wall time of the last reading; zero if there was none in this run
	block   *idle.Block     // set if the timers are unknown or a job runs
	reading bool            // a reading is in progress
}

// readTimers reads the timers of the workload. It reports whether the workload has
// any, or may have. i.lock must be held.
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
	go func() { // the reading may outlive the check
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

// noteTimers stores the result of a reading. It reports whether the workload has
// timers, or may have.
func (i *inst) noteTimers(timers instance.Timers, err error) bool {
	now := i.h.wallNow()
	i.mu.Lock()
	defer i.mu.Unlock()
	c := &i.timed
	c.read, c.block = now, nil
	switch {
	case err != nil: // keep the last known timers
		c.block = &idle.Block{Code: idle.SignalUnknown, Signal: cronSignal,
			Sentence: fmt.Sprintf("Unknown: the next job of its cron, %v. An unknown signal never counts as quiet.", err)}
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

// refreshTimers reads the timers of a running workload if timersEvery has passed.
// i.lock must be held.
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

// rereadLocked returns the wall time at which the timers of a sleeping workload are
// read again: before the next minute in which a job may be due. Zero means never.
// i.mu must be held.
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

// rereadTimers reads the timers of a sleeping workload if that is due. It returns
// why the workload must be woken at once, or "". i.lock must be held.
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

// jobsBlockLocked returns a block while timers are unknown, or while a job runs or
// may be about to start. Otherwise it returns nil. i.mu must be held.
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
