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

// heart sends heartbeats to the shim while anything is frozen. If the daemon hangs,
// the shim thaws everything. While nothing is frozen, heart costs nothing.
type heart struct {
	r *Runtime

	mu      sync.Mutex      // comes before r.mu
	frozen  map[string]bool // instances that are frozen, may be, or are about to be
	emptied time.Time       // when frozen became empty
	pulse   shimctl.Pulse
	client  *shimctl.Client // the client whose shim watches pulse; nil if none does
	beating bool
	closed  bool
}

// hold starts the heartbeat for id, before its freeze. The heartbeat lasts until
// drop. If a shim cannot watch it, that is logged and the freeze continues.
func (h *heart) hold(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.frozen == nil {
		h.frozen = map[string]bool{}
	}
	h.frozen[id] = true
	h.armLocked()
}

// drop ends the heartbeat for id, because id runs or no longer exists.
func (h *heart) drop(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if delete(h.frozen, id); len(h.frozen) == 0 {
		h.emptied = time.Now()
	}
}

// connected makes a newly connected shim watch the heartbeat if anything is frozen.
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
		if fd, err := c.Beat(ctx); err == nil { // another shim than before watches now
			unix.Close(fd)
		}
	}
	if !h.beating {
		h.beating = true
		go h.beat()
	}
}

// beat sends heartbeats until nothing has been frozen for beatLinger.
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

// every returns a function that waits until the next multiple of d since the call,
// and one that ends the waiting. It prefers a timer of the kernel, because
// heartbeats are most of what the daemon does while everything sleeps.
func every(d time.Duration) (wait, end func()) {
	a, err := alarm.New()
	if err != nil {
		t := time.NewTicker(d)
		return func() { <-t.C }, t.Stop
	}
	a.Every(d)
	return a.Wait, a.Close
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
