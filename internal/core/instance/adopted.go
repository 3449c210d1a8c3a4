package instance

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"
)

// RuntimeAdopted is the runtime of instances that lull did not start.
const RuntimeAdopted = "adopted"

// Adopted identifies a running program of which an instance was made: the process
// PID with its descendants, the processes of the control group Cgroup, or the
// systemd unit Unit, whatever processes it has.
type Adopted struct {
	PID    int    `json:"pid,omitempty" doc:"Root of a process tree; 0 for a control group"`
	Start  uint64 `json:"start,omitempty" doc:"When that process started, in clock ticks since boot"`
	Cgroup string `json:"cgroup,omitempty" doc:"Directory of a control group"`
	// CgroupID is the inode of the group's directory. It distinguishes the group
	// from a later one of the same name.
	CgroupID uint64 `json:"cgroup_id,omitempty" doc:"Inode of that directory"`
	BootID   string `json:"boot_id,omitempty"`
	Unit     string `json:"unit,omitempty" doc:"Name of a systemd unit, with its suffix"`
	// Manager is the systemd manager of Unit. It is empty for the machine's
	// manager.
	Manager string `json:"manager,omitempty" doc:"UID of the user whose manager runs the unit; empty for the machine's"`
	DropIn  bool   `json:"drop_in,omitempty" doc:"A drop-in starts the unit's program so that lull can hand it its sockets"`
}

// IsUnit reports whether a names a systemd unit, which can be stopped and started
// through systemd. It returns false if a is nil, as for an instance that lull
// started.
func (a *Adopted) IsUnit() bool { return a != nil && a.Unit != "" }

// Adopter is a runtime whose instances are programs that it did not start and
// cannot start again.
type Adopter interface {
	// Resolve completes a from the state of the machine and describes the
	// program. The error says why the program cannot be adopted. caller is a
	// process that must not be frozen, such as the user's shell; 0 for none.
	Resolve(a Adopted, caller int) (Adopted, Program, error)
}

// RuntimeDocker is the runtime of containers that another engine runs.
const RuntimeDocker = "docker"

// ContainerAdopter is a runtime whose instances are containers of another engine,
// which starts, stops and removes them.
type ContainerAdopter interface {
	// Container describes the container that a name or ID refers to.
	Container(ctx context.Context, ref string) (Container, error)
}

// Container describes a container of another engine.
type Container struct {
	// Images are the values of Spec.Image by which an instance may refer to the
	// container. The first one also finds a later container that takes its place.
	Images   []string
	Name     string // not always valid as the name of an instance
	Running  bool   // true for a paused container too
	Labelled bool   // its labels ask lull to control it
}

// UnitFollower is a runtime whose instances are systemd units, which others can
// stop and start.
type UnitFollower interface {
	// FollowUnit makes the runtime report when others start the unit of a stopped
	// instance, until the instance is forgotten.
	FollowUnit(id string, a Adopted)
	// Rebooted reports whether the machine was restarted since the run last. If
	// so, it closes the kept sockets of that run, because systemd now decides
	// what runs.
	Rebooted(ctx context.Context, id string, a Adopted, last Identity) (bool, error)
	// SystemdListens reports whether systemd starts the unit when a client connects
	// to one of its .socket units.
	SystemdListens(ctx context.Context, a Adopted) (bool, error)
}

// DropIn is a file that changes how systemd starts a unit.
type DropIn struct {
	Path  string   `json:"path"`
	Text  string   `json:"text"`
	Notes []string `json:"notes,omitempty" doc:"What else changes for the unit, one sentence each"`
}

// DropInWriter is a runtime that can hand kept sockets to a unit whose start a drop-in
// changes.
type DropInWriter interface {
	// PlanDropIn returns the drop-in of a unit without writing it. The error says why
	// there can be none.
	PlanDropIn(ctx context.Context, a Adopted) (DropIn, error)
	// KeepDropIns writes the drop-ins of the units in wanted, by instance ID, unless
	// they exist or a user has removed them, and removes all others of this host.
	KeepDropIns(ctx context.Context, wanted map[string]Adopted) error
}

// SocketKeeper is a workload whose listening sockets can be kept open after it
// ends. The host watches them through its HeldListeners.
type SocketKeeper interface {
	// KeepSockets makes a keeper hold the listening sockets. kept is false if
	// something else starts the workload when a client connects.
	KeepSockets(ctx context.Context) (kept bool, err error)
	// DropSockets releases the kept sockets while the workload continues to run.
	DropSockets(ctx context.Context) error
}

// Timed is a workload that knows when it next has to run. Due returns that time,
// zero for never, and the name of the timer, as found by the last Sample.
type Timed interface {
	Due() (at time.Time, by string)
}

// Program describes a program that lull did not start.
type Program struct {
	Name    string        // of its executable, its control group or its unit
	Command []string      // of its main process
	PIDs    []int         // all of its processes
	StopsIn time.Duration // how long a stop may take; 0 if unknown
}

// checkAdopted returns an error for every setting that only an instance that lull
// starts can have.
func (s *Spec) checkAdopted() (errs []error) {
	if (s.Adopted != nil) != (s.Runtime == RuntimeAdopted) {
		return []error{errors.New("cannot combine runtime and adopted: set both runtime adopted and what to adopt, or neither; use lull adopt")}
	}
	if s.Adopted == nil {
		return nil
	}
	bad := func(field string) {
		errs = append(errs, fmt.Errorf("cannot use %s: %s was not started by lull, which cannot start it again", field, s.Name))
	}
	if s.Restart != RestartNo {
		bad("restart")
	}
	if !s.Adopted.IsUnit() {
		if s.StopAfter == nil || *s.StopAfter != 0 {
			bad("stop_after")
		}
		if s.WakeFromStopped != nil && *s.WakeFromStopped {
			bad("wake_from_stopped")
		}
	} else if !s.Wakes() && (s.StopAfter == nil || *s.StopAfter != 0) {
		errs = append(errs, fmt.Errorf("cannot use stop_after: nothing would start %s again. Adopt it with --stop, or set wake_from_stopped too", s.Name))
	}
	for _, f := range []struct {
		name string
		set  bool
	}{{"env", len(s.Env) > 0}, {"user", s.User != ""}, {"workdir", s.Workdir != ""}, {"expose", len(s.Expose) > 0}, {"listen_fds", s.ListenFDs}} {
		if f.set {
			errs = append(errs, fmt.Errorf("cannot set %s of a program that lull did not start", f.name))
		}
	}
	a := s.Adopted
	if a.IsUnit() {
		if a.PID != 0 || a.Cgroup != "" {
			errs = append(errs, errors.New("cannot use adopted: with a unit, pid and cgroup must not be set"))
		}
		return errs
	}
	if (a.PID > 1) == (a.Cgroup != "") || a.Cgroup != "" && !filepath.IsAbs(a.Cgroup) {
		errs = append(errs, errors.New("cannot use adopted: want either the pid of a process or the absolute directory of a control group"))
	}
	return errs
}
