package fleet

import (
	"context"
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

// HaltRequest stops all automatic actions, or allows them again.
type HaltRequest struct {
	On     bool
	Reason string
	Until  *time.Time
}

// halted begins sentences about a halt of the fleet.
const halted = "All automatic actions are"

func (h Halt) idle() idle.HaltedBy {
	return idle.HaltedBy{By: h.By, Since: h.At, Reason: h.Reason, Until: h.Until}
}

// Sentence says who halted all automatic actions, since when, until when and
// why.
func (h Halt) Sentence() string { return h.idle().Sentence(halted) }

// Block returns the halt as a reason that prevents a pause.
func (h Halt) Block() idle.Block { return h.idle().Block(halted) }

// at returns the halt at a time: off once it has expired.
func (h Halt) at(now time.Time) Halt {
	h.On = h.On && !h.idle().Over(now)
	return h
}

var haltCodec = store.Codec[Halt]{Version: 1}

func decodeHalt(v store.Value) (Halt, error) {
	if !v.Exists() {
		return Halt{}, nil
	}
	return haltCodec.Decode(v.Key, v.Data)
}

// Halted returns the halt in effect now, as last read.
func (f *Fleet) Halted() Halt { return f.now.halt.Load().at(time.Now()) }

// HaltRead returns a channel that is closed when the halt is read again. Call
// it before Halted to miss no change. The expiry of a halt closes nothing: see
// Halt.Until.
func (f *Fleet) HaltRead() <-chan struct{} {
	f.now.mu.Lock()
	defer f.now.mu.Unlock()
	return f.now.haltSet
}

// HaltedBy returns the halt in the form that machines which report keep; nil
// while it is off.
func (h Halt) HaltedBy() *idle.HaltedBy {
	if !h.On {
		return nil
	}
	x := h.idle()
	x.Fleet = true
	return &x
}

// SetHalt stops or allows automatic actions. It is durable when SetHalt
// returns. Every automatic intent is refused in the same transaction that reads
// the halt. Errors: Invalid.
func (f *Fleet) SetHalt(ctx context.Context, by audit.Actor, r HaltRequest) (Halt, error) {
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
		return Halt{}, failure.Invalidf("reason", "it has at most %d bytes", idle.MaxHaltReason)
	case h.idle().Over(h.At):
		return Halt{}, failure.Invalidf("until", "it is over")
	}
	return f.putHalt(ctx, func(Halt) (*Halt, audit.Entry) { return &h, e })
}

// EndHalt removes an expired halt, and records that in the log. Automatic
// actions resume at the expiry itself, whether or not EndHalt is called.
func (f *Fleet) EndHalt(ctx context.Context) error {
	if h := f.now.halt.Load(); !h.On || h.at(time.Now()).On {
		return nil
	}
	_, err := f.putHalt(ctx, func(old Halt) (*Halt, audit.Entry) {
		now := time.Now().UTC().Round(0)
		if !old.On || old.at(now).On {
			return nil, audit.Entry{} // it was ended, or its end was moved
		}
		return &Halt{By: audit.ByController.Name, At: now},
			audit.Entry{Action: "halt_ended", By: audit.ByController, Detail: "its end was reached; " + old.By + " had set it"}
	}, f.guards...)
	return err
}

// putHalt writes the halt returned by change, with its entry; nil leaves it
// unchanged.
func (f *Fleet) putHalt(ctx context.Context, change func(old Halt) (*Halt, audit.Entry), guards ...store.Cond) (Halt, error) {
	var made Halt
	v, err := store.Update(ctx, f.store, haltKey, func(was store.Value) ([]byte, []store.Op, error) {
		old, err := decodeHalt(was)
		if err != nil {
			old = Halt{} // whatever it contained, it is replaced
		}
		h, e := change(old)
		if h == nil {
			made = old
			return was.Data, nil, nil
		}
		made = *h
		data, err := haltCodec.Encode(haltKey, *h)
		if err != nil {
			return nil, nil, err
		}
		ops, err := audit.Ops(e)
		return data, ops, err
	}, guards...)
	if err != nil {
		return Halt{}, err
	}
	return made, f.take(v)
}

// untilText formats an end for the log; empty for none.
func untilText(t *time.Time) string {
	if t == nil {
		return ""
	}
	return "until " + t.Format(time.RFC3339)
}
