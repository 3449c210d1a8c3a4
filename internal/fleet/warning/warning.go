// Package warning holds the message that users of a worker get before it goes down,
// and the answers in its links.
package warning

import (
	"fmt"
	"strings"
	"time"

	"lull/internal/core/power"
)

// Warning is the message to the users of a worker before it goes down, with the
// reason.
type Warning struct {
	PauseAt time.Time `json:"pause_at"`
	// Action is stop, hibernate or auto, drain, or terminate.
	Action string       `json:"action"`
	Reason power.Reason `json:"reason"`
	// Cause is the schedule or the deadline, if one is the reason.
	Cause string `json:"cause,omitempty"`
	// Forced means that the pause happens even if the worker is in use. Use describes
	// what was in use when the warning was sent.
	Forced bool   `json:"forced,omitempty"`
	Use    string `json:"use,omitempty"`
	// Stopped means that the worker is stopped and will be terminated.
	Stopped bool `json:"stopped,omitempty"`
}

// Sentence returns what will happen to who, when and why, without a full stop.
func (x *Warning) Sentence(who string, zone *time.Location) string {
	return x.sentence(who, "will be", "is", zone)
}

// Late is like Sentence, for a warning that is sent after the announced time.
func (x *Warning) Late(who string, zone *time.Location) string {
	return x.sentence(who, "was to be", "was", zone) + "; this warning was delayed"
}

func (x *Warning) sentence(who, verb, is string, zone *time.Location) string {
	done := "paused"
	switch {
	case x.Action == "terminate":
		done = "terminated"
	case x.Action == "drain":
		done = "drained and stopped"
	case x.Reason == power.ReasonTTL:
		done = "stopped"
	}
	s := fmt.Sprintf("%s %s %s at %s", who, verb, done, x.PauseAt.In(zone).Format("15:04 MST"))
	if x.Cause != "" {
		s += " by its " + x.Cause
	}
	if !x.Forced {
		return s + " because it " + is + " not in use"
	}
	s += ", even if it is in use"
	if x.Use != "" {
		s += ": " + strings.TrimSuffix(x.Use, ".")
	}
	return s
}
