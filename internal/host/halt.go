package host

import (
	"context"
	"fmt"
	"time"

	"lull/internal/core/idle"
)

// haltedHere begins sentences about a halt of the host.
const haltedHere = "Automatic actions on this host are"

// Halt stops every automatic pause and stop or, with nil, resumes them. by is
// who requested it. It is durable when Halt returns.
func (h *Host) Halt(x *idle.HaltedBy, by string) error {
	h.haltMu.Lock()
	defer h.haltMu.Unlock()
	return h.setHalt(x, by, "")
}

// FleetHalt applies the fleet's halt as reported by the server; nil for none.
// It takes effect even if it could not be recorded; then a restart before the
// server is reached again loses it.
func (h *Host) FleetHalt(x *idle.HaltedBy) error {
	h.haltMu.Lock()
	defer h.haltMu.Unlock()
	was := h.fleetHalted.Load()
	if was.Same(x) || was.MovedBy(x) < haltSlack {
		return nil
	}
	h.fleetHalted.Store(x)
	by, why := "lull", "the fleet is no longer halted"
	if x != nil {
		by, why = x.By, ""
	}
	h.haltChanged(x, by, why)
	if keep := h.cfg.KeepFleetHalt; keep != nil {
		if err := keep(x); err != nil {
			return fmt.Errorf("record the fleet halt: %w", err)
		}
	}
	return nil
}

// haltSlack is how far the end of a halt may move because clocks differ.
const haltSlack = 5 * time.Second

// setHalt stores the halt that is in effect. The caller holds haltMu.
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
	h.haltChanged(x, by, why)
	return unkept
}

// haltChanged publishes that a halt began or, with nil, ended.
func (h *Host) haltChanged(x *idle.HaltedBy, by, why string) {
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
}

// Halted returns the halt in effect, the host's own before the fleet's; nil for
// none.
func (h *Host) Halted() *idle.HaltedBy {
	if all := h.halts(); len(all) > 0 {
		return all[0]
	}
	return nil
}

// halts returns the halts in effect: the host's own and the fleet's.
func (h *Host) halts() (out []*idle.HaltedBy) {
	for _, x := range []*idle.HaltedBy{h.halted.Load(), h.fleetHalted.Load()} {
		if x != nil && !x.Over(h.now()) {
			out = append(out, x)
		}
	}
	return out
}

// haltLook bounds how long it takes to record the end of a halt after the
// machine was suspended.
const haltLook = time.Minute

// endHalts records each halt that has expired, until ctx ends. Expiry itself
// needs no action.
func (h *Host) endHalts(ctx context.Context) {
	for {
		var look <-chan time.Time
		for _, x := range []*idle.HaltedBy{h.halted.Load(), h.fleetHalted.Load()} {
			if x != nil && x.Until != nil {
				h.endHalt()
				look = time.After(min(max(x.Until.Sub(h.now()), time.Second), haltLook))
			}
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
	if x := h.fleetHalted.Load(); x != nil && x.Over(h.now()) {
		if err := h.FleetHalt(nil); err != nil {
			h.log.Warn("cannot record the end of the fleet halt", "err", err)
		}
	}
	h.haltMu.Lock()
	defer h.haltMu.Unlock()
	x := h.halted.Load()
	if x == nil || !x.Over(h.now()) {
		return
	}
	if err := h.setHalt(nil, "lull", "the halt by "+x.By+" came to its end"); err != nil {
		h.log.Warn("cannot record the end of the halt", "err", err)
	}
}
