// Package power holds the power states of what lull controls and the legal
// transitions between them, as tables that code, docs and tests read.
//
// It guarantees that every state that only passes has a deadline, an owner and
// a repair, that none is unreachable and that none is a trap; the tests hold
// it to that. It is pure: whether a transition is wise is package idle's
// question, and carrying it out is the daemon's.
package power

// Instance is the power state of an instance on a host (spec, section 4).
// Whether it may run at all is the flag `enabled` beside it.
type Instance string

// The states of an instance. The in-between states exist so that no request
// ever acts on a half-done change.
const (
	Stopped    Instance = "stopped"
	Starting   Instance = "starting"
	Running    Instance = "running"
	Pausing    Instance = "pausing"
	Paused     Instance = "paused"
	Reclaimed  Instance = "reclaimed"
	Hibernated Instance = "hibernated"
	Resuming   Instance = "resuming"
	Stopping   Instance = "stopping"
)

// Asleep reports whether the instance is at rest on a step of the ladder from
// which a connection wakes it.
func (s Instance) Asleep() bool { return s == Paused || s == Reclaimed || s == Hibernated }

const hostOwner = "host daemon, the instance's one owner"

// InstanceTable is the one list of an instance's legal transitions.
var InstanceTable = &Table[Instance]{
	Name:    "instance",
	Initial: []Instance{Stopped, Hibernated}, // the latter of a clone
	States: []State[Instance]{
		{Name: Stopped, Kind: Resting, Doc: "No process of it exists."},
		{Name: Starting, Kind: Transitional, Doc: "Launched, and not ready yet.",
			Deadline: Deadline[Instance]{"start_timeout", hostOwner, "end the whole tree and record why it was not ready", []Instance{Stopped}}},
		{Name: Running, Kind: Resting, Doc: "Its program runs."},
		{Name: Pausing, Kind: Transitional, Doc: "The fence is closing: frozen perhaps, not committed.",
			Deadline: Deadline[Instance]{"freeze_timeout", hostOwner, "thaw and go on running; no pause is recorded", []Instance{Running}}},
		{Name: Paused, Kind: Resting, Doc: "Frozen with its memory in place; a connection wakes it."},
		{Name: Reclaimed, Kind: Resting, Doc: "Frozen with its memory pushed out; a connection wakes it."},
		{Name: Hibernated, Kind: Resting, Doc: "Saved to disk, without a process of its own; a connection wakes it."},
		{Name: Resuming, Kind: Transitional, Doc: "On its way back from a step of the ladder.",
			Deadline: Deadline[Instance]{"resume_timeout", hostOwner,
				"thaw again; what cannot be thawed is ended, a restore that fails keeps its image", []Instance{Hibernated, Stopping}}},
		{Name: Stopping, Kind: Transitional, Doc: "Thawed and asked to end.",
			Deadline: Deadline[Instance]{"stop_timeout", hostOwner, "kill the whole tree", []Instance{Stopped}}},
	},
	Transitions: []Transition[Instance]{
		{Stopped, Starting, []Cause{Command, Wake, Restart}, "wake only with wake-from-stopped"},
		{Starting, Running, []Cause{Done}, "the program accepts"},
		{Starting, Stopped, []Cause{Failure, Exit, Timeout}, "it could not be started"},
		{Starting, Stopping, []Cause{Command}, ""},
		{Running, Pausing, []Cause{Idle, Command}, "intent recorded, gate closed"},
		{Running, Stopping, []Cause{Command, Restart}, ""},
		{Running, Stopped, []Cause{Exit}, ""},
		{Pausing, Paused, []Cause{Done, Restart}, "frozen, looked again twice, committed"},
		{Pausing, Running, []Cause{Cancelled, Failure, Timeout, Restart}, "thawed at once"},
		{Pausing, Stopping, []Cause{Command}, "the pause failed and could not be undone"},
		{Pausing, Stopped, []Cause{Exit}, ""},
		{Paused, Resuming, []Cause{Wake, Command, Restart}, ""},
		{Paused, Reclaimed, []Cause{Ladder}, "memory pushed out"},
		{Paused, Hibernated, []Cause{Ladder}, "saved"},
		{Paused, Stopping, []Cause{Ladder, Command}, "thawed first, then asked to end"},
		{Paused, Stopped, []Cause{Exit}, "ended from outside"},
		{Reclaimed, Resuming, []Cause{Wake, Command, Restart}, ""},
		{Reclaimed, Hibernated, []Cause{Ladder}, "saved"},
		{Reclaimed, Stopping, []Cause{Ladder, Command}, "thawed first, then asked to end"},
		{Reclaimed, Stopped, []Cause{Exit}, "ended from outside"},
		{Hibernated, Resuming, []Cause{Wake, Command, Restart}, "restored"},
		{Hibernated, Stopping, []Cause{Ladder, Command}, "restored first, then asked to end"},
		{Hibernated, Stopped, []Cause{Exit}, "its image is gone or unusable"},
		{Resuming, Running, []Cause{Done}, "the program runs"},
		{Resuming, Hibernated, []Cause{Failure, Timeout}, "the restore failed; the image is kept"},
		{Resuming, Stopping, []Cause{Command, Timeout}, ""},
		{Resuming, Stopped, []Cause{Exit}, ""},
		{Stopping, Stopped, []Cause{Exit, Timeout}, "no process of it is left"},
		{Stopping, Running, []Cause{Cancelled, Failure, Restart}, "a client came first, or it could not be asked to end"},
	},
}

// Capabilities are what a runtime can do on this machine. What is false is
// refused by name, never tried.
type Capabilities struct {
	Freeze          bool `json:"freeze"`            // every task can be stopped and started again
	WatchSockets    bool `json:"watch_sockets"`     // its sockets can be duplicated while it is frozen
	Reclaim         bool `json:"reclaim"`           // memory of a paused instance can be pushed out
	Hibernate       bool `json:"hibernate"`         // a paused instance can be saved to disk
	WakeFromStopped bool `json:"wake_from_stopped"` // a port can stay open while nothing runs
	ExecInside      bool `json:"exec_inside"`       // a command can be run beside the program
	Heartbeat       bool `json:"heartbeat"`         // a harness inside reports activity
	Image           bool `json:"image"`             // it has files of its own: this machine's paths and environment mean nothing inside
	Network         bool `json:"network"`           // it has a network of its own: clients reach it through the relay only
	Limits          bool `json:"limits"`            // memory and processors can be bounded
	Shared          bool `json:"shared"`            // somebody else may start, pause and stop its instances too
	Workspace       bool `json:"workspace"`         // a directory of this machine can be shared with it
}

// Reaches reports whether a runtime with these capabilities can ever be in a
// state.
func (c Capabilities) Reaches(s Instance) bool {
	switch s {
	case Pausing, Paused, Resuming:
		return c.Freeze
	case Reclaimed:
		return c.Freeze && c.Reclaim
	case Hibernated:
		return c.Freeze && c.Hibernate
	}
	return InstanceTable.Has(s)
}
