package idle

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// HaltedBy records that automatic actions are halted, for a fleet, a host or a
// machine: by whom, since when, why, and until when.
type HaltedBy struct {
	By     string     `json:"by,omitempty"`
	Since  time.Time  `json:"since"`
	Reason string     `json:"reason,omitempty"`
	Until  *time.Time `json:"until,omitempty"` // when the halt ends by itself; nil for no end
	Fleet  bool       `json:"fleet,omitempty"` // a halt of the fleet, as reported by this machine's server
}

// MaxHaltReason is the maximum length of a halt's reason, in bytes.
const MaxHaltReason = 512

// Check returns an error if h is not valid as a new halt at now.
func (h HaltedBy) Check(now time.Time) error {
	if len(h.Reason) > MaxHaltReason {
		return fmt.Errorf("cannot halt: the reason must have at most %d bytes", MaxHaltReason)
	}
	if h.Over(now) {
		return errors.New("cannot halt until a time in the past")
	}
	return nil
}

// Over reports whether h has expired at now.
func (h HaltedBy) Over(now time.Time) bool { return h.Until != nil && !now.Before(*h.Until) }

// wholeFleet is the beginning of sentences about a halt of the fleet.
const wholeFleet = "All automatic actions of the fleet are"

// Same reports whether h and o are the same halt. Nil is no halt.
func (h *HaltedBy) Same(o *HaltedBy) bool {
	if h == nil || o == nil {
		return h == o
	}
	return h.By == o.By && h.Reason == o.Reason && h.Fleet == o.Fleet && h.Since.Equal(o.Since) &&
		(h.Until == nil) == (o.Until == nil) && (h.Until == nil || h.Until.Equal(*o.Until))
}

// MovedBy returns the difference between the ends of h and o if both have an end
// and are otherwise the same halt. In all other cases it returns the maximum
// duration.
func (h *HaltedBy) MovedBy(o *HaltedBy) time.Duration {
	if h == nil || o == nil || h.Until == nil || o.Until == nil {
		return math.MaxInt64
	}
	at := *o
	at.Until = h.Until
	if !h.Same(&at) {
		return math.MaxInt64
	}
	return o.Until.Sub(*h.Until).Abs()
}

// Sentence returns a sentence that says that what is halted, by whom, since when,
// until when and why. what is the beginning of the sentence, such as "All
// automatic actions are"; for a fleet halt, a text about the fleet replaces it.
func (h HaltedBy) Sentence(what string) string {
	if h.Fleet {
		what = wholeFleet
	}
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

// Block returns the halt as a block. what is as in Sentence.
func (h HaltedBy) Block(what string) Block {
	return Block{Code: Halted, Sentence: h.Sentence(what), Until: h.Until}
}
