// Package halt keeps the halts of a host's automatic actions: its own, which a user
// sets, and the fleet's, as last reported by the server.
package halt

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/core/idle"
)

// Options configure Halts.
type Options struct {
	Own, Fleet *idle.HaltedBy // the halts in effect at the start, or nil
	// KeepOwn and KeepFleet store a halt durably, or nil for none. A nil function
	// means that halts are not stored.
	KeepOwn, KeepFleet func(*idle.HaltedBy) error

	Now func() time.Time
	// Changed publishes that a halt has begun or, if x is nil, has ended, with the
	// actor and the reason.
	Changed func(x *idle.HaltedBy, by, why string)
	Log     *slog.Logger
}

// Halts holds the halts of a host. It is safe for concurrent use.
type Halts struct {
	opts       Options
	own, fleet atomic.Pointer[idle.HaltedBy]
	mu         sync.Mutex    // serializes changes
	changed    chan struct{} // signals a change
}

// New returns the halts of a host.
func New(o Options) *Halts {
	h := &Halts{opts: o, changed: make(chan struct{}, 1)}
	h.own.Store(o.Own)
	h.fleet.Store(o.Fleet)
	return h
}

// Set stops all automatic pauses and stops; if x is nil, it resumes them. by is who
// requested it. When Set returns, it is durable.
func (h *Halts) Set(x *idle.HaltedBy, by string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.set(x, by, "")
}

// slack is how far the end of a halt may move because clocks differ.
const slack = 5 * time.Second

// SetFleet applies the fleet's halt as reported by the server, or nil for none. A
// halt that cannot be stored takes effect too, but a restart of the daemon loses it
// until the server reports it again.
func (h *Halts) SetFleet(x *idle.HaltedBy) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	was := h.fleet.Load()
	if was.Same(x) || was.MovedBy(x) < slack {
		return nil
	}
	h.fleet.Store(x)
	by, why := "lull", "the fleet is no longer halted"
	if x != nil {
		by, why = x.By, ""
	}
	h.publish(x, by, why)
	if keep := h.opts.KeepFleet; keep != nil {
		if err := keep(x); err != nil {
			return fmt.Errorf("record the fleet halt: %w", err)
		}
	}
	return nil
}

// Fleet returns the fleet's halt as last reported by the server, or nil. It may
// have expired.
func (h *Halts) Fleet() *idle.HaltedBy { return h.fleet.Load() }

// InEffect returns the halts in effect; the host's own comes first.
func (h *Halts) InEffect() (out []*idle.HaltedBy) {
	for _, x := range []*idle.HaltedBy{h.own.Load(), h.fleet.Load()} {
		if x != nil && !x.Over(h.opts.Now()) {
			out = append(out, x)
		}
	}
	return out
}

// set stores the host's own halt. h.mu must be held.
func (h *Halts) set(x *idle.HaltedBy, by, why string) error {
	var unkept error // a halt takes effect even if it cannot be stored
	if keep := h.opts.KeepOwn; keep != nil {
		if err := keep(x); err != nil {
			unkept = fmt.Errorf("cannot record the halt: %w", err)
			if x == nil {
				return unkept
			}
			unkept = fmt.Errorf("the halt is in effect until the daemon ends: %w", unkept)
		}
	}
	h.own.Store(x)
	h.publish(x, by, why)
	return unkept
}

func (h *Halts) publish(x *idle.HaltedBy, by, why string) {
	select {
	case h.changed <- struct{}{}:
	default:
	}
	if x != nil {
		why = x.Reason
	}
	h.opts.Changed(x, by, why)
}

// checkEvery is how often Run checks for expired halts, because a suspended machine
// delays its timer.
const checkEvery = time.Minute

// Run records the end of each halt that expires, until ctx ends. The expiry itself
// takes effect without Run.
func (h *Halts) Run(ctx context.Context) {
	for {
		var check <-chan time.Time
		for _, x := range []*idle.HaltedBy{h.own.Load(), h.fleet.Load()} {
			if x != nil && x.Until != nil {
				h.expire()
				check = time.After(min(max(x.Until.Sub(h.opts.Now()), time.Second), checkEvery))
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-h.changed:
		case <-check:
		}
	}
}

func (h *Halts) expire() {
	if x := h.fleet.Load(); x != nil && x.Over(h.opts.Now()) {
		if err := h.SetFleet(nil); err != nil {
			h.opts.Log.Warn("cannot record the end of the fleet halt", "err", err)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.own.Load()
	if x == nil || !x.Over(h.opts.Now()) {
		return
	}
	if err := h.set(nil, "lull", "the halt by "+x.By+" has ended"); err != nil {
		h.opts.Log.Warn("cannot record the end of the halt", "err", err)
	}
}
