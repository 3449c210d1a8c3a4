package microvm

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
)

// A QEMU whose monitor does not answer serves no clients, and its guest cannot be
// probed. A QEMU that a signal has stopped is continued. One that is silent and
// inactive for a long time is killed, and its instance restarts by its own policy.
// One that is busy, starved of CPU, waiting for a disk or being debugged is left
// alone however long it is silent.

const (
	// stoppedLimit is the time for which a QEMU may be stopped by a signal.
	// Lull never stops one that way.
	stoppedLimit = 5 * time.Second
	// unresponsiveLimit is the time for which a QEMU may be silent and
	// inactive.
	unresponsiveLimit = 2 * time.Minute
)

// Process states, as in /proc.
const (
	procStopped = 'T'
	procTraced  = 't'
	procDisk    = 'D'
	procSleeps  = 'S'
)

// unresponsive tracks a QEMU that does not answer. The zero value stands for
// one that does.
type unresponsive struct {
	since time.Time
	pid   int
	state byte      // state of the process, as in /proc
	used  uint64    // since when it has been asleep or stopped and used no CPU
	still time.Time // since when it has been asleep or stopped without using CPU
}

// saw records an observation of the process.
func (m *unresponsive) saw(now time.Time, pid int, state byte, used uint64) {
	if m.since.IsZero() {
		m.since = now
	}
	if m.still.IsZero() || used != m.used || state != procSleeps && state != procStopped {
		m.still = now
	}
	m.pid, m.state, m.used = pid, state, used
}

// examine checks a QEMU whose guest did not answer and repairs it if possible.
// It reports whether QEMU itself answers.
func (w *Work) examine(ctx context.Context) bool {
	m, err := w.monitor()
	if err != nil {
		return false // QEMU has ended, or its monitor is connected
	}
	ctx, cancel := context.WithTimeout(ctx, w.r.cfg.LookLimit)
	defer cancel()
	if _, err := m.status(ctx); err == nil {
		w.answered()
		return true
	}
	ident := w.Identity()
	_, state, err := startTime(ident.PID)
	used, uerr := usedTicks(ident.PID)
	if err != nil || uerr != nil || w.isGone() || w.qctx.Err() != nil || m.ended() {
		return false
	}
	now := time.Now()
	w.mu.Lock()
	w.unresponsive.saw(now, ident.PID, state, used)
	quiet, still := now.Sub(w.unresponsive.since), now.Sub(w.unresponsive.still)
	w.mu.Unlock()
	switch {
	case still >= w.r.cfg.MuteLimit:
		w.endMute(process{ident.PID, ident.Start}, quiet)
	case state == procStopped && quiet >= w.r.cfg.StoppedLimit:
		w.letGoOn()
	}
	return false
}

func (w *Work) answered() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unresponsive = unresponsive{}
}

// letGoOn continues QEMU if a signal has stopped it and it is not being debugged.
func (w *Work) letGoOn() {
	ident := w.Identity()
	start, state, err := startTime(ident.PID)
	if err != nil || start != ident.Start || state != procStopped {
		return
	}
	err = unix.Kill(ident.PID, unix.SIGCONT)
	w.r.log.Warn("continuing a QEMU that a signal had stopped", "instance", w.id, "pid", ident.PID, "err", err)
}

// rouseEvery is how often a QEMU is checked while a client waits.
const rouseEvery = 250 * time.Millisecond

// keepGoing continues QEMU whenever a signal stops it, until stop is called. The
// sender of such a signal cannot know that a client is waiting.
func (w *Work) keepGoing() (stop func()) {
	ctx, cancel := context.WithCancel(w.ctx)
	var looking sync.WaitGroup
	looking.Go(func() {
		for ctx.Err() == nil {
			w.letGoOn()
			select {
			case <-time.After(rouseEvery):
			case <-ctx.Done():
			}
		}
	})
	return func() { cancel(); looking.Wait() }
}

// endMute kills a QEMU that has been silent for too long.
func (w *Work) endMute(p process, quiet time.Duration) {
	why := fmt.Sprintf("QEMU had not answered for %s and was ended", quiet.Round(time.Second))
	w.r.log.Error("a virtual machine hangs and is ended", "instance", w.id, "pid", p.pid, "quiet", quiet)
	w.mu.Lock()
	w.poweredOffBy = why
	w.mu.Unlock()
	ctx, cancel := context.WithTimeout(w.ctx, killLimit)
	defer cancel()
	if err := p.kill(ctx); err != nil {
		w.r.log.Error("cannot end QEMU", "instance", w.id, "err", err)
	}
}

// Trouble implements instance.Troubled.
func (w *Work) Trouble() string {
	w.mu.Lock()
	m := w.unresponsive
	w.mu.Unlock()
	if m.since.IsZero() {
		if _, scarce := w.shortOfSpace(); scarce && w.stands() == "" {
			return "writes to its own disk fail because the disk is full: " + w.r.roomSaying() +
				fmt.Sprintf(", of which %s are reserved for lull itself", instance.Bytes(layerSpare))
		}
		return cmp.Or(w.stands(), w.filesFault())
	}
	said := fmt.Sprintf("QEMU (process %d) has not answered for %s", m.pid, time.Since(m.since).Round(time.Second))
	switch m.state {
	case procStopped:
		return fmt.Sprintf("%s: stopped by a signal; lull continues it after %s", said, w.r.cfg.StoppedLimit)
	case procTraced:
		return said + ": a debugger has stopped it"
	case procDisk:
		return said + ": QEMU waits for a disk"
	}
	if now := time.Now(); now.Sub(m.still) < now.Sub(m.since)/2 {
		return said + ", although it is active"
	}
	return fmt.Sprintf("%s; it is killed once it has neither answered nor been active for %s", said, w.r.cfg.MuteLimit)
}
