// Package instance defines the data types of a host: the requested instance
// (Spec), one run of it in the kernel (Identity), and what a runtime observes of
// it (Sample).
//
// The types are pure data: a value was observed or requested at some time, and
// may be outdated. Power states and their legal transitions are in package power,
// decisions in package idle.
package instance

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// Path is the way by which a client's bytes reach an exposed port.
type Path string

// The data paths of an exposed port.
const (
	PathAuto   Path = "auto"   // direct if every listener can be watched, otherwise relay
	PathDirect Path = "direct" // the program listens itself; lull is not in between
	PathRelay  Path = "relay"  // lull listens and relays
)

// The protocols of an Endpoint besides TCP.
const (
	ProtoUDP  = "udp"
	ProtoUnix = "unix"
)

// Endpoint is one exposed port or unix socket.
type Endpoint struct {
	Proto  string `json:"proto,omitempty"`  // empty is tcp; udp and unix are direct only
	Listen string `json:"listen"`           // host:port that clients use, or the absolute path of a unix socket
	Target string `json:"target"`           // host:port or path that the program listens on
	Path   Path   `json:"path"`             // auto until decided, then direct or relay
	Why    string `json:"why,omitempty"`    // why that path was chosen
	Status string `json:"status,omitempty"` // empty while healthy, otherwise the fault
}

// Restart is the rule for what happens after a workload ends by itself.
type Restart string

// Restart rules. The default is OnFailure.
const (
	RestartNo        Restart = "no"
	RestartOnFailure Restart = "on-failure"
	RestartAlways    Restart = "always"
)

// Launch is everything a runtime needs to start one run of an instance.
type Launch struct {
	ID      string   // instance id, also the cgroup's name
	Run     uint64   // generation of this run; rises with every start, never reused for the ID
	Command []string // argv; Command[0] is looked up in the PATH of Env
	Env     []string // the complete environment, KEY=VALUE
	Dir     string   // working directory, absolute; empty is the image's
	User    string   // name or uid[:gid]; empty is the daemon's own user
	Listen  []string // addresses (shimctl.Addr) of the sockets that the program inherits as LISTEN_FDS, in order
	Handoff []string // addresses (shimctl.Addr) whose kept sockets replace the program's own when it binds
	LogPath string   // file of standard output and error, rotated in place
	LogMax  int64    // bytes per log file; the previous one is kept as LogPath.1

	Image     string  // this and the following fields are as in Spec
	Memory    int64   // bytes, 0 for the runtime's default
	CPUs      float64 // 0 for the runtime's default
	Net       Net
	Workspace string // as ParseWorkspace reads it

	Adopted *Adopted // in place of a command: what is taken over as it runs
	Found   bool     // the adopted program must already be running; it is not started if it has ended
}

// Identity names one run in the kernel. A PID alone is never an identity: PIDs
// are reused, and none survives a reboot.
type Identity struct {
	BootID string `json:"boot_id"`
	Cgroup string `json:"cgroup,omitempty"` // absolute directory; empty where no cgroup could be made
	// CgroupID is the inode of Cgroup if the run is that group, whatever its
	// processes are. It is 0 if the run is a process.
	CgroupID uint64 `json:"cgroup_id,omitempty"`
	PID      int    `json:"pid"`
	Start    uint64 `json:"start"` // start time in clock ticks since boot, field 22 of /proc/PID/stat
	Run      uint64 `json:"run"`
	// Unit and Manager identify the systemd unit of the run, as in Adopted.
	// Invocation is systemd's identifier of one run of the unit. All are empty
	// for any other run.
	Unit       string `json:"unit,omitempty"`
	Manager    string `json:"manager,omitempty"`
	Invocation string `json:"invocation,omitempty"`
}

// Exit is how a run ended.
type Exit struct {
	Code   int       `json:"code"`             // exit code; 128+signal if a signal ended it
	Signal int       `json:"signal,omitempty"` // the signal; 0 if it exited by itself
	At     time.Time `json:"at"`
	Lost   bool      `json:"lost,omitempty"` // the code is unknown, because the shim was not running to collect it
	// Why is the cause, if more is known than the code.
	Why  string `json:"why,omitempty"`
	Unit bool   `json:"unit,omitempty"` // the run was a unit's: Why is all that systemd reports
	// Machine describes how the run's virtual machine ended, if that ended and
	// not the program.
	Machine string `json:"machine,omitempty"`
}

// How describes for users how the run ended, as in "exited with code 1".
func (e Exit) How() string {
	how := fmt.Sprintf("exited with code %d", e.Code)
	switch {
	case e.Machine != "":
		how = "the virtual machine ended: " + e.Machine
	case e.Unit:
		return e.Why
	case e.Lost:
		how = "ended with an unknown exit status"
	case e.Signal != 0:
		how = fmt.Sprintf("ended by signal %d (%s)", e.Signal, syscall.Signal(e.Signal))
	}
	if e.Why != "" {
		how += ": " + e.Why
	}
	return how
}

// Starved returns the Exit.Why of a run that the kernel killed because memory ran
// out. limit is the run's memory limit in bytes, 0 if it has none.
func Starved(kernel string, limit int64) string {
	why := "out of memory: " + kernel + " ended it"
	if limit > 0 {
		why += fmt.Sprintf("; it has %d MiB: raise --memory", limit>>20)
	}
	return why
}

// ErrAbsent means that the source of a signal does not exist on this machine:
// the signal is quiet, and shown as absent.
var ErrAbsent = errors.New("not counted on this machine")

// Sample is one probe of an instance from outside. Each part can fail on its own:
// a nil error means that the value beside it was read, and an error makes that
// signal unknown, never quiet.
type Sample struct {
	At time.Time // with a monotonic reading

	CPU    time.Duration // used by the whole tree since it started, including ended children
	CPUErr error

	NetBytes uint64 // bytes moved by the tree's sockets, cumulative, if the kernel reports them
	NetErr   error

	// DiskBytes is the number of bytes that the tree read from and wrote to
	// disks, cumulative. DiskErr is ErrAbsent if they cannot be counted.
	DiskBytes uint64
	DiskErr   error

	Outbound int    // established connections that the tree opened, except to loopback
	Calls    []Conn // details of some of these connections and of those to loopback

	// Listens is set while one of the tree's sockets accepts connections or
	// datagrams from outside, so that a client could wake the instance.
	Listens bool

	Inbound    []Conn
	LastClosed time.Time // when the most recently ended inbound connection ended; zero if none is known
	Unseen     *Unseen   // connections that LastClosed may not cover; nil if it covers all
	ConnErr    error     // covers Inbound, Outbound, Calls, Listens, LastClosed and Unseen
}

// Unseen are inbound connections that may have begun and ended between two
// samples.
type Unseen struct {
	Until     time.Time // none of them ended later
	Forgotten time.Time // from then on Newest may miss the earliest ones; zero for never
	// Newest returns when the last of them ended; zero if there was none. It
	// skips connections for whose end ignore returns true. It costs much more
	// than a sample, so call it only for a decision that depends on it, or just
	// before Forgotten. It must not be called after the next sample.
	Newest func(ignore func(end time.Time) bool) (time.Time, error)
}

// Command is a command to run inside an instance.
type Command struct {
	Command []string `json:"command"`
	Env     []string `json:"env,omitempty"` // KEY=VALUE, after the instance's own
	Dir     string   `json:"dir,omitempty"` // empty means the instance's
}

// Outcome is the result of a Command.
type Outcome struct {
	ExitCode int    `json:"exit_code"`
	Stdout   string `json:"stdout"`
	Stderr   string `json:"stderr"`
	// Truncated means that only the beginning of a stream is present, because it
	// was longer than MaxOutput or the connection broke.
	Truncated bool `json:"truncated,omitempty"`
}

// MaxOutput is how many bytes of each stream of a Command are kept.
const MaxOutput = 8 << 20
