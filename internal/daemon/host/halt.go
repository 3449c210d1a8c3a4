package host

import (
	"context"
	"fmt"
	"time"

	"lull/internal/idle"
)

// haltedHere is what a halt of the host is called in sentences.
const haltedHere = "Automatic actions on this host are"

// Halt stops every automatic pause and stop, or, with nil, lets them go on. by
// is who wants that. It is durable when it returns.
func (h *Host) Halt(x *idle.HaltedBy, by string) error {
	h.haltMu.Lock()
	defer h.haltMu.Unlock()
	return h.setHalt(x, by, "")
}

// setHalt is called under haltMu: what is kept is what holds.
func (h *Host) setHalt(x *idle.HaltedBy, by, why string) error {
	var unkept error // a halt takes effect even if it cannot be recorded
	if keep := h.cfg.KeepHalt; keep != nil {
		if err := keep(x); err != nil {
			unkept = fmt.Errorf("cannot record the halt: %w", err)
			if x == nil {
				return unkept
			}
			unkept = fmt.Errorf("the halt is in effect until the daemon ends: %w", unkept)
		}
	}
	h.halted.Store(x)
	select {
	case h.haltSet <- struct{}{}:
	default:
	}
	kind := "halt_off"
	if x != nil {
		kind, why = "halt", x.Reason
	}
	for _, i := range h.all() {
		i.emit(kind, by, why)
	}
	return unkept
}

// Halted is the halt that holds now; nil for none.
func (h *Host) Halted() *idle.HaltedBy {
	if x := h.halted.Load(); x != nil && !x.Over(h.now()) {
		return x
	}
	return nil
}

// haltLook bounds how long it takes until the end of a halt is recorded where
// the machine was suspended.
const haltLook = time.Minute

// endHalts says, until ctx ends, of every halt whose end has come that it is
// over. For all else it is enough that its end has come.
func (h *Host) endHalts(ctx context.Context) {
	for {
		var look <-chan time.Time
		if x := h.halted.Load(); x != nil && x.Until != nil {
			h.endHalt()
			look = time.After(min(max(x.Until.Sub(h.now()), time.Second), haltLook))
		}
		select {
		case <-ctx.Done():
			return
		case <-h.haltSet:
		case <-look:
		}
	}
}

func (h *Host) endHalt() {
	h.haltMu.Lock()
	defer h.haltMu.Unlock()
	x := h.halted.Load()
	if x == nil || !x.Over(h.now()) {
		return
	}
	if err := h.setHalt(nil, "lull", "the halt by "+x.By+" came to its end"); err != nil {
		h.log.Warn("cannot record the end of the halt", "error", err)
	}
}
