package idle

import (
	"errors"
	"fmt"
	"time"
)

// HaltedBy says that nothing happens by itself in a fleet, on a host or on a
// machine (spec, promise 7): who wanted that, since when, why, and until when.
type HaltedBy struct {
	By     string     `json:"by,omitempty"`
	Since  time.Time  `json:"since"`
	Reason string     `json:"reason,omitempty"`
	Until  *time.Time `json:"until,omitempty"` // it ends by itself then; nil for no end
}

// MaxHaltReason bounds the reason of a halt, in bytes.
const MaxHaltReason = 512

// Check says what is wrong with a halt that is about to begin.
func (h HaltedBy) Check(now time.Time) error {
	if len(h.Reason) > MaxHaltReason {
		return fmt.Errorf("cannot halt: a reason has at most %d bytes", MaxHaltReason)
	}
	if h.Over(now) {
		return errors.New("cannot halt until a time that is over")
	}
	return nil
}

// Over tells whether its end has come.
func (h HaltedBy) Over(now time.Time) bool { return h.Until != nil && !now.Before(*h.Until) }

// Sentence says of what, such as "All automatic actions are", that it is
// halted, with all that is known of it.
func (h HaltedBy) Sentence(what string) string {
	s := what + " halted"
	if h.By != "" {
		s += " by " + h.By
	}
	if !h.Since.IsZero() {
		s += " since " + h.Since.UTC().Format(time.RFC3339)
	}
	if h.Until != nil {
		s += " until " + h.Until.UTC().Format(time.RFC3339)
	}
	if h.Reason != "" {
		s += ": " + h.Reason
	}
	return s + "."
}

// Block is the halt as a reason that prevents a pause.
func (h HaltedBy) Block(what string) Block {
	return Block{Code: Halted, Sentence: h.Sentence(what), Until: h.Until}
}
