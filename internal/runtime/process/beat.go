package process

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/platform/alarm"
	"lull/internal/protocol/shimctl"
)

// Limits of the heartbeat.
const (
	beatAsk    = 2 * time.Second  // for the shim to begin watching
	beatLinger = 10 * time.Second // after the last thaw
)

// heart sends heartbeats to the shim while something is frozen. If the
// daemon hangs, the shim thaws everything. Without frozen instances it costs
// nothing.
type heart struct {
	r *Runtime

	mu      sync.Mutex
	frozen  map[string]bool // instances that are, are about to be, or may be frozen
	emptied time.Time       // when frozen became empty
	pulse   shimctl.Pulse
	client  *shimctl.Client // the client that watches pulse; nil if none does
	beating bool
	closed  bool
}

// hold covers id, starting before its freeze, until drop. If a shim cannot
// watch, that is logged and the freeze continues.
func (h *heart) hold(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.frozen == nil {
		h.frozen = map[string]bool{}
	}
	h.frozen[id] = true
	h.armLocked()
}

// drop ends the cover of id, because it runs or no longer exists.
func (h *heart) drop(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if delete(h.frozen, id); len(h.frozen) == 0 {
		h.emptied = time.Now()
	}
}

// connected makes a newly connected shim watch, if anything is frozen.
func (h *heart) connected() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.frozen) > 0 {
		h.armLocked()
	}
}

func (h *heart) armLocked() {
	c := h.r.shim()
	if h.closed || c == nil || h.client == c && h.pulse.Armed() {
		return
	}
	if h.client != c {
		ctx, cancel := context.WithTimeout(context.Background(), beatAsk)
		defer cancel()
		fd, err := c.Beat(ctx)
		if err != nil {
			h.r.cfg.Log.Warn("the shim does not watch the heartbeat; if this daemon hangs, instances stay frozen", "err", err)
			return
		}
		p, err := shimctl.OpenPulse(fd)
		unix.Close(fd)
		if err != nil {
			h.r.cfg.Log.Warn("no heartbeat", "err", err)
			return
		}
		h.pulse.Close()
		h.pulse, h.client = p, c
		h.pulse.Arm(true)
	} else {
		h.pulse.Arm(true)
		ctx, cancel := context.WithTimeout(context.Background(), beatAsk)
		defer cancel()
		if fd, err := c.Beat(ctx); err == nil { // another shim watches now
			unix.Close(fd)
		}
	}
	if !h.beating {
		h.beating = true
		go h.beat()
	}
}

// beat beats until nothing has been frozen for a while.
func (h *heart) beat() {
	wait, end := every(shimctl.BeatEvery)
	defer end()
	for {
		wait()
		h.mu.Lock()
		idle := len(h.frozen) == 0 && time.Since(h.emptied) > beatLinger
		if h.closed || idle {
			h.beating = false
			if h.pulse.Mapped() {
				h.pulse.Arm(false)
			}
			if h.closed {
				h.pulse.Close()
				h.pulse = shimctl.Pulse{}
			}
			h.mu.Unlock()
			return
		}
		h.pulse.Beat()
		h.mu.Unlock()
	}
}

// every returns how to wait until the next multiple of d has passed, and how to end
// that. It uses a timer of the kernel if it can, because beats are most of what the
// daemon does while everything sleeps.
func every(d time.Duration) (wait, end func()) {
	a, err := alarm.New()
	if err != nil {
		t := time.NewTicker(d)
		return func() { <-t.C }, t.Stop
	}
	next := time.Now()
	return func() {
		if next = next.Add(d); time.Until(next) < 0 {
			next = time.Now()
		}
		a.Set(next)
		a.Wait()
	}, a.Close
}

// close ends the heartbeat.
func (h *heart) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	if !h.beating {
		h.pulse.Close()
		h.pulse = shimctl.Pulse{}
	}
}
