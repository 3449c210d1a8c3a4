// Package power defines the power states of workers and instances and the legal
// transitions between them, as tables that code, docs and tests share.
//
// Every transitional state has a deadline, an owner and a repair. No state is
// unreachable, and none is a dead end; the tests enforce both. The package is
// pure: package idle decides whether a transition is wise, and the daemon that
// owns the worker or instance carries it out.
package power

// Instance is the power state of a host's instance. Whether the instance may
// run at all is the separate `enabled` flag.
type Instance string

// The states of an instance. Transitional states exist so that no request acts
// on a half-completed change.
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

// Asleep reports whether s is a state from which a connection wakes the instance
// without starting its program again.
func (s Instance) Asleep() bool { return s == Paused || s == Reclaimed || s == Hibernated }

const hostOwner = "host daemon, the instance's only owner"

// InstanceTable lists an instance's legal transitions.
var InstanceTable = &Table[Instance]{
	Name:    "instance",
	Initial: []Instance{Stopped, Hibernated}, // clones start hibernated
	States: []State[Instance]{
		{Name: Stopped, Kind: Resting, Doc: "No process exists."},
		{Name: Starting, Kind: Transitional, Doc: "Launched, but not ready yet.",
			Deadline: Deadline[Instance]{"start_timeout", hostOwner, "kill the process tree and record why it did not become ready", []Instance{Stopped}}},
		{Name: Running, Kind: Resting, Doc: "The program is running."},
		{Name: Pausing, Kind: Transitional, Doc: "The pause is in progress: possibly frozen, not committed.",
			Deadline: Deadline[Instance]{"freeze_timeout", hostOwner, "thaw and keep running; no pause is recorded", []Instance{Running}}},
		{Name: Paused, Kind: Resting, Doc: "Frozen in memory; a connection wakes it."},
		{Name: Reclaimed, Kind: Resting, Doc: "Frozen, with its memory paged out; a connection wakes it."},
		{Name: Hibernated, Kind: Resting, Doc: "Saved to disk without a process; a connection wakes it."},
		{Name: Resuming, Kind: Transitional, Doc: "Being thawed or restored.",
			Deadline: Deadline[Instance]{"resume_timeout", hostOwner,
				"thaw again; stop it if that fails; keep the image if a restore fails", []Instance{Hibernated, Stopping}}},
		{Name: Stopping, Kind: Transitional, Doc: "Thawed and asked to shut down.",
			Deadline: Deadline[Instance]{"stop_timeout", hostOwner, "kill the process tree", []Instance{Stopped}}},
	},
	Transitions: []Transition[Instance]{
		{Stopped, Starting, []Cause{Command, Wake, Restart}, "wake only with wake-from-stopped"},
		{Starting, Running, []Cause{Done}, "the program accepts connections"},
		{Starting, Stopped, []Cause{Failure, Exit, Timeout}, "it could not be started"},
		{Starting, Stopping, []Cause{Command}, ""},
		{Running, Pausing, []Cause{Idle, Command}, "intent recorded, gate closed"},
		{Running, Stopping, []Cause{Command, Restart}, ""},
		{Running, Stopped, []Cause{Exit}, ""},
		{Pausing, Paused, []Cause{Done, Restart}, "frozen, checked twice more, committed"},
		{Pausing, Running, []Cause{Cancelled, Failure, Timeout, Restart}, "thawed immediately"},
		{Pausing, Stopping, []Cause{Command}, "the pause failed and could not be undone"},
		{Pausing, Stopped, []Cause{Exit}, ""},
		{Paused, Resuming, []Cause{Wake, Command, Restart}, ""},
		{Paused, Reclaimed, []Cause{Ladder}, "memory paged out"},
		{Paused, Hibernated, []Cause{Ladder}, "saved"},
		{Paused, Stopping, []Cause{Ladder, Command}, "thawed first, then asked to shut down"},
		{Paused, Stopped, []Cause{Exit}, "ended by something else"},
		{Reclaimed, Resuming, []Cause{Wake, Command, Restart}, ""},
		{Reclaimed, Hibernated, []Cause{Ladder}, "saved"},
		{Reclaimed, Stopping, []Cause{Ladder, Command}, "thawed first, then asked to shut down"},
		{Reclaimed, Stopped, []Cause{Exit}, "ended by something else"},
		{Hibernated, Resuming, []Cause{Wake, Command, Restart}, "restored"},
		{Hibernated, Stopping, []Cause{Ladder, Command}, "restored first, then asked to shut down"},
		{Hibernated, Stopped, []Cause{Exit}, "its image is gone or unusable"},
		{Resuming, Running, []Cause{Done}, "the program is running"},
		{Resuming, Hibernated, []Cause{Failure, Timeout}, "the restore failed; the image is kept"},
		{Resuming, Stopping, []Cause{Command, Timeout}, ""},
		{Resuming, Stopped, []Cause{Exit}, ""},
		{Stopping, Stopped, []Cause{Exit, Timeout}, "no process is left"},
		{Stopping, Running, []Cause{Cancelled, Failure, Restart}, "a client connected first, or the shutdown request failed"},
		{Stopping, Resuming, []Cause{Cancelled}, "a client connected first, and the first thaw failed"},
		{Stopping, Paused, []Cause{Restart}, "an automatic stop that was interrupted before the program was asked to exit is decided anew"},
	},
}

// Capabilities lists what a runtime can do on this machine. A request that
// needs a missing capability is rejected with its name and never tried.
type Capabilities struct {
	Freeze          bool `json:"freeze"`            // can freeze and thaw every task
	WatchSockets    bool `json:"watch_sockets"`     // can duplicate sockets of a frozen instance
	Reclaim         bool `json:"reclaim"`           // can page out the memory of a paused instance
	Hibernate       bool `json:"hibernate"`         // can save a paused instance to disk
	WakeFromStopped bool `json:"wake_from_stopped"` // can keep a port open while nothing runs
	ExecInside      bool `json:"exec_inside"`       // can run a command inside the instance
	Heartbeat       bool `json:"heartbeat"`         // has a guest agent that reports activity
	Image           bool `json:"image"`             // has its own root file system; the host's paths and environment do not apply
	Network         bool `json:"network"`           // has its own network; clients reach it only through the relay
	Limits          bool `json:"limits"`            // can limit memory and CPUs
	Shared          bool `json:"shared"`            // other programs or users (such as Docker's) may start, pause and stop its instances
	Workspace       bool `json:"workspace"`         // can share a host directory with the instance
}

// Reaches reports whether an instance of a runtime with these capabilities can
// ever be in state s.
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
