// Package halt holds the switch that stops all automatic actions of a fleet.
package halt

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/fleet/audit"
	"lull/internal/store"
)

// Halt is the switch that stops all automatic actions, with who last set it and
// when.
type Halt struct {
	On     bool       `json:"on"`
	By     string     `json:"by,omitempty"`
	At     time.Time  `json:"at,omitzero"`
	Reason string     `json:"reason,omitempty"`
	Until  *time.Time `json:"until,omitempty" doc:"When the halt ends automatically; absent for no end"`
}

// Request stops all automatic actions, or allows them again.
type Request struct {
	On     bool
	Reason string
	Until  *time.Time
}

// halted is the beginning of a sentence about the fleet's halt.
const halted = "All automatic actions are"

func (h Halt) idle() idle.HaltedBy {
	return idle.HaltedBy{By: h.By, Since: h.At, Reason: h.Reason, Until: h.Until}
}

// Sentence says who halted all automatic actions, since when, until when and
// why.
func (h Halt) Sentence() string { return h.idle().Sentence(halted) }

// Block returns the halt as a reason that prevents a pause.
func (h Halt) Block() idle.Block { return h.idle().Block(halted) }

// AsOf returns the halt at now: off if it has expired.
func (h Halt) AsOf(now time.Time) Halt {
	h.On = h.On && !h.idle().Over(now)
	return h
}

var codec = store.Codec[Halt]{Version: 1}

func Decode(v store.Value) (Halt, error) {
	if !v.Exists() {
		return Halt{}, nil
	}
	return codec.Decode(v.Key, v.Data)
}

// Key is the store key of the halt.
const Key = "halt"

// Switch gives access to the halt in a store, as last read.
type Switch struct {
	store  store.Store
	guards []store.Cond
	now    *lastRead
}

// lastRead is shared by all views of a Switch.
type lastRead struct {
	halt  atomic.Pointer[Halt]
	mu    sync.Mutex
	again chan struct{} // closed and replaced, under mu, whenever the halt is read
}

// NewSwitch returns a Switch that is off until Take gets the stored halt.
func NewSwitch(s store.Store) *Switch {
	n := &lastRead{again: make(chan struct{})}
	n.halt.Store(&Halt{})
	return &Switch{store: s, now: n}
}

// Guarded returns a view of s in which EndHalt fails unless all guards hold.
func (s *Switch) Guarded(guards []store.Cond) *Switch {
	g := *s
	g.guards = guards
	return &g
}

// Take applies a halt that was read or watched. If it is unreadable, the last good
// one stays in effect.
func (s *Switch) Take(v store.Value) error {
	h, err := Decode(v)
	if err != nil {
		return err
	}
	s.now.mu.Lock()
	defer s.now.mu.Unlock()
	s.now.halt.Store(&h)
	close(s.now.again)
	s.now.again = make(chan struct{})
	return nil
}

// Halted returns the halt in effect now, as last read.
func (s *Switch) Halted() Halt { return s.now.halt.Load().AsOf(time.Now()) }

// HaltRead returns a channel that is closed when the halt is next read. To miss no
// change, call it before Halted. The expiry of a halt does not close it; see
// Halt.Until.
func (s *Switch) HaltRead() <-chan struct{} {
	s.now.mu.Lock()
	defer s.now.mu.Unlock()
	return s.now.again
}

// HaltedBy returns the halt in the form that is sent to reporting machines; nil if
// there is none.
func (h Halt) HaltedBy() *idle.HaltedBy {
	if !h.On {
		return nil
	}
	x := h.idle()
	x.Fleet = true
	return &x
}

// SetHalt halts automatic actions or lifts the halt. The change is durable when
// SetHalt returns. Every automatic intent is refused by a transaction that reads the
// halt. Errors: Invalid.
func (s *Switch) SetHalt(ctx context.Context, by audit.Actor, r Request) (Halt, error) {
	h := Halt{On: r.On, By: by.Name, At: time.Now().UTC().Round(0)}
	e := audit.Entry{Action: "halt_ended", By: by}
	if r.On {
		h.Reason = r.Reason
		if r.Until != nil {
			until := r.Until.UTC().Round(0)
			h.Until = &until
		}
		e.Action, e.Reason, e.Detail = "halted", r.Reason, untilText(h.Until)
	}
	switch {
	case len(r.Reason) > idle.MaxHaltReason:
		return Halt{}, failure.Invalidf("reason", "must have at most %d bytes", idle.MaxHaltReason)
	case h.idle().Over(h.At):
		return Halt{}, failure.Invalidf("until", "it is in the past")
	}
	return s.putHalt(ctx, func(Halt) (*Halt, audit.Entry) { return &h, e })
}

// EndHalt removes an expired halt and records that in the audit log. Automatic
// actions resume at the expiry itself, whether or not EndHalt is called.
func (s *Switch) EndHalt(ctx context.Context) error {
	if h := s.now.halt.Load(); !h.On || h.AsOf(time.Now()).On {
		return nil
	}
	_, err := s.putHalt(ctx, func(old Halt) (*Halt, audit.Entry) {
		now := time.Now().UTC().Round(0)
		if !old.On || old.AsOf(now).On {
			return nil, audit.Entry{} // the halt was lifted or extended meanwhile
		}
		return &Halt{By: audit.ByController.Name, At: now},
			audit.Entry{Action: "halt_ended", By: audit.ByController, Detail: "it expired; " + old.By + " had set it"}
	}, s.guards...)
	return err
}

// putHalt replaces the halt by the one that change returns, and writes its audit
// entry; nil leaves the halt unchanged.
func (s *Switch) putHalt(ctx context.Context, change func(old Halt) (*Halt, audit.Entry), guards ...store.Cond) (Halt, error) {
	var made Halt
	v, err := store.Update(ctx, s.store, Key, func(was store.Value) ([]byte, []store.Op, error) {
		old, err := Decode(was)
		if err != nil {
			old = Halt{} // an unreadable halt is replaced
		}
		h, e := change(old)
		if h == nil {
			made = old
			return was.Data, nil, nil
		}
		made = *h
		data, err := codec.Encode(Key, *h)
		if err != nil {
			return nil, nil, err
		}
		ops, err := audit.Ops(e)
		return data, ops, err
	}, guards...)
	if err != nil {
		return Halt{}, err
	}
	return made, s.Take(v)
}

// untilText formats the end of a halt for the log; empty if there is none.
func untilText(t *time.Time) string {
	if t == nil {
		return ""
	}
	return "until " + t.Format(time.RFC3339)
}
