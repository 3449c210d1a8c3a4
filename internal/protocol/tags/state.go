package tags

import "time"

// The values of State.
const (
	StatusActive = "active"
	StatusIdle   = "idle"

	ActionHibernating = "hibernating"
	ActionHibernated  = "hibernated"
	ActionStopping    = "stopping"
	ActionStopped     = "stopped"

	// ActionNone withdraws an action that was announced in its -ing form. It is
	// written as an empty value.
	ActionNone = "none"
)

// State is an agent's report about its machine in tags. The agent writes an
// action in its -ing form, and the server writes the final form when EC2 confirms
// it. Without a server, the agent writes the final form at its next start.
type State struct {
	Status string    // active or idle; not written if empty
	Since  time.Time // when the idle period began; omitted if zero
	Action string    // not written if empty
}

// StateKeys returns the names of the three state tags. With PrismPrefix they are
// the names that Prism uses.
func StateKeys(prefix string) (status, since, action string) {
	if prefix == PrismPrefix {
		return "Prism:IdleStatus", "Prism:IdleSince", "Prism:IdleAction"
	}
	return prefix + "idle-status", prefix + "idle-since", prefix + "idle-action"
}

// Encode writes the state as tags.
func (s State) Encode(prefix string) map[string]string {
	status, since, action := StateKeys(prefix)
	out := map[string]string{}
	if s.Status != "" {
		out[status] = s.Status
	}
	if !s.Since.IsZero() {
		out[since] = s.Since.UTC().Format(time.RFC3339)
	}
	switch s.Action {
	case "":
	case ActionNone:
		out[action] = ""
	default:
		out[action] = s.Action
	}
	return out
}

// DecodeState reads the state from an instance's tags. It ignores values that it
// does not know, because another program may have written them.
func DecodeState(prefix string, t map[string]string) State {
	status, since, action := StateKeys(prefix)
	var s State
	switch v := t[status]; v {
	case StatusActive, StatusIdle:
		s.Status = v
	}
	if v, err := time.Parse(time.RFC3339, t[since]); err == nil {
		s.Since = v
	}
	switch v := t[action]; v {
	case ActionHibernating, ActionHibernated, ActionStopping, ActionStopped:
		s.Action = v
	}
	return s
}
