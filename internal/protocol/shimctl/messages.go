package shimctl

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"lull/internal/core/instance"
)

// Version is the version of the protocol, which must be the same on both sides.
const Version = 1

// Limits of the protocol.
const (
	MaxMessage = 2 << 20 // bytes of one line
	MaxFDs     = 250     // descriptors per message; the kernel's limit is 253

	MaxThawedIDs = 100  // IDs in one Thawing
	MaxListed    = 1000 // runs in one List
)

// Verbs. Exited and ExecExited are events.
const (
	VerbHello     = "hello"
	VerbStart     = "start"
	VerbList      = "list"
	VerbAckExit   = "ack-exit"
	VerbAckThawed = "ack-thawed"
	VerbHold      = "hold"
	VerbUnhold    = "unhold"
	VerbListeners = "listeners"
	VerbHolds     = "holds"
	VerbRelease   = "release"
	VerbDoor      = "door"
	VerbDup       = "dup"
	VerbExec      = "exec"
	VerbForget    = "forget"
	VerbAdopt     = "adopt"
	VerbOutside   = "outside"
	VerbFilter    = "filter"
	VerbKeep      = "keep"
	VerbHandoff   = "check-handoff"
	VerbUnit      = "unit"

	VerbExited     = "exit"
	VerbExecExited = "exec-exit"
	VerbHeld       = "held"
)

// Exit is how a run ended.
type Exit = instance.Exit

// Hello opens a connection.
type Hello struct {
	Version int `json:"version"`
}

// Welcome answers Hello.
type Welcome struct {
	Version   int       `json:"version"`
	Release   string    `json:"release"` // version of the shim's binary
	PID       int       `json:"pid"`
	StartedAt time.Time `json:"started_at"`
	Thawed    []Thawing `json:"thawed,omitempty"` // thaws since the last ack-thawed
}

// Thawing reports that the shim thawed instances because no daemon was connected.
type Thawing struct {
	At    time.Time `json:"at"`
	Count int       `json:"count"` // instances that had been frozen
	IDs   []string  `json:"ids"`   // the first of them, at most MaxThawedIDs
}

// Start requests the start of one run. An ID has at most one live run.
type Start struct {
	ID      string   `json:"id"`
	Run     uint64   `json:"run"`
	Command []string `json:"command"`
	Env     []string `json:"env"`
	Dir     string   `json:"dir"`
	User    string   `json:"user,omitempty"`
	Listen  []string `json:"listen,omitempty"`
	LogPath string   `json:"log_path"`
	LogMax  int64    `json:"log_max"`
	Cgroups []string `json:"cgroups,omitempty"` // directories to join; the first is the freezer's
	// Handoff lists addresses whose sockets the shim holds and which replace the
	// program's own sockets when it binds them.
	Handoff []string `json:"handoff,omitempty"`
}

// StartOf returns the Start message for a launch.
func StartOf(l instance.Launch, cgroups []string) Start {
	return Start{ID: l.ID, Run: l.Run, Command: l.Command, Env: l.Env, Dir: l.Dir, User: l.User,
		Listen: l.Listen, Handoff: l.Handoff, LogPath: l.LogPath, LogMax: l.LogMax, Cgroups: cgroups}
}

// Started answers Start and Exec.
type Started struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot
	Exec  uint64 `json:"exec,omitempty"`
	// NoNewPrivs is set if the program runs with no_new_privs, which the kernel
	// requires for the handoff if the shim is not root. The answer to a Start
	// with Handoff carries the descriptor that reports binds.
	NoNewPrivs bool `json:"no_new_privs,omitempty"`
}

// Run is one run that the shim knows: alive, or ended and not yet acknowledged.
type Run struct {
	ID      string   `json:"id"`
	Run     uint64   `json:"run"`
	PID     int      `json:"pid"`
	Start   uint64   `json:"start"`
	BootID  string   `json:"boot_id"`
	Cgroups []string `json:"cgroups,omitempty"`
	LogPath string   `json:"log_path"`
	LogMax  int64    `json:"log_max"`
	User    string   `json:"user,omitempty"`
	Handoff bool     `json:"handoff,omitempty"` // its binds are reported
	Adopted bool     `json:"adopted,omitempty"` // not a child of this shim, which therefore cannot collect its exit code
	Exit    *Exit    `json:"exit,omitempty"`
}

// Listing requests the runs of ID, or if it is empty those of all IDs after
// After, in order.
type Listing struct {
	ID    string `json:"id,omitempty"`
	After string `json:"after,omitempty"`
}

// List answers list. More reports that there are runs after the last one.
type List struct {
	Runs []Run `json:"runs"`
	More bool  `json:"more,omitempty"`
}

// Ended reports a run that has ended. It is sent on every new connection until it
// is acknowledged by AckExit, whose body is an Ended without Exit.
type Ended struct {
	ID   string `json:"id"`
	Run  uint64 `json:"run"`
	Exit Exit   `json:"exit,omitzero"`
}

// Hold requests listening sockets for an ID. If descriptors are sent with it,
// they are the sockets, one for each address. Otherwise the shim binds the
// addresses.
type Hold struct {
	ID    string   `json:"id"`
	Addrs []string `json:"addrs,omitempty"` // see Addr; an empty host means every address
	// As lists the addresses to which the sockets are actually bound, in the
	// order of Addrs: a program may bind every address although only one is
	// exposed. [::]:port is IPv6 only, :port is both families. The shim sets it.
	As []string `json:"as,omitempty"`
}

// Door makes new clients of the unix sockets held under ID wait (Shut), or ends
// that.
type Door struct {
	ID   string `json:"id"`
	Shut bool   `json:"shut,omitempty"`
}

// Holds answers a Listing of holds, with the sorted IDs under which listening
// sockets are held. More means that there are further IDs.
type Holds struct {
	IDs  []string `json:"ids"`
	More bool     `json:"more,omitempty"`
}

// Filter requests the descriptor that reports the binds of a run. If a descriptor
// is sent with it, it passes that descriptor to a new shim instead.
type Filter struct {
	ID  string `json:"id"`
	Run uint64 `json:"run"`
}

// HandoffCheck reports whether bind handoff works for programs of this shim.
type HandoffCheck struct {
	Why        string `json:"why,omitempty"`          // why it does not work; empty if it does
	NoNewPrivs bool   `json:"no_new_privs,omitempty"` // programs run with no_new_privs
}

// Unit describes a systemd unit whose program puts itself under a filter that
// reports its binds (UnitSocket), so that held sockets can be handed to it. A
// Unit with only an ID asks for its UnitState.
type Unit struct {
	ID string `json:"id"`
	// Group is its control group, as in /proc/PID/cgroup. Only processes in it are
	// handed anything.
	Group   string `json:"group,omitempty"`
	Unlinks bool   `json:"unlinks,omitempty"` // report the removal of files too, for its unix sockets
	Forget  bool   `json:"forget,omitempty"`  // remove the entry
}

// UnitState answers Unit.
type UnitState struct {
	// Invocation is the systemd invocation ID of the last run whose binds are
	// reported; empty for none.
	Invocation string `json:"invocation,omitempty"`
	NoNewPrivs bool   `json:"no_new_privs,omitempty"` // that run has no_new_privs
}

// Unhold closes the sockets held under an ID. With Leave, the files of unix
// sockets that a process of the unit has stay, because it listens there.
type Unhold struct {
	ID    string `json:"id"`
	Leave bool   `json:"leave,omitempty"`
}

// HeldChanged reports that the sockets held under an ID have changed. Why is set
// if one of them had to be closed.
type HeldChanged struct {
	ID  string `json:"id"`
	Why string `json:"why,omitempty"`
}

// Name is the name of an instance or of a process.
type Name struct {
	ID string `json:"id"`
}

// Outside describes something that may be frozen and that the shim did not start,
// and how to thaw it after the daemon has ended. Docker's containers and QEMU's
// guests are thawed by a POST to Path on the unix socket Socket or, with QMP, by
// a continue command to QEMU's monitor. Processes that the daemon froze in place
// are the control group Group, or the processes Tree with their descendants. An
// Outside with only an ID removes the entry.
type Outside struct {
	ID     string    `json:"id"`
	Socket string    `json:"socket,omitempty"`
	Path   string    `json:"path,omitempty"`
	QMP    bool      `json:"qmp,omitempty"`
	Group  string    `json:"group,omitempty"`
	Tree   []Process `json:"tree,omitempty"`
}

// Process identifies a process. Because its PID may be reused, Start is its start
// time in clock ticks since boot.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
}

// Dup requests duplicates of a process's descriptors.
type Dup struct {
	PID int   `json:"pid"`
	FDs []int `json:"fds"`
}

// Exec runs a command inside an instance, in its control groups and with its
// mark. Three descriptors are sent with it: standard input, output and error.
type Exec struct {
	ID      string   `json:"id"`
	Command []string `json:"command"`
	Env     []string `json:"env"`
	Dir     string   `json:"dir"`
	User    string   `json:"user,omitempty"`
	TTY     bool     `json:"tty,omitempty"` // standard input is a terminal and becomes the controlling terminal
}

// ExecEnded reports that a command has ended.
type ExecEnded struct {
	Exec uint64 `json:"exec"`
	Exit Exit   `json:"exit"`
}

// Code classifies the errors of the shim.
type Code string

// The codes.
const (
	CodeFailed   Code = "failed"
	CodeNotFound Code = "not_found"
	CodeBusy     Code = "busy"    // the id already has a run
	CodeInvalid  Code = "invalid" // the request is invalid
	CodeStage    Code = "stage"   // a step failed before the program ran; see Step and Errno
	CodeGone     Code = "gone"    // the process has ended
)

// StepHandoff is the Step of a CodeStage error if the filter that reports binds
// could not be installed for the program.
const StepHandoff = "handoff"

// Error is an error response.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
	Step    string `json:"step,omitempty"`
	Errno   int    `json:"errno,omitempty"`
}

// Error implements error.
func (e *Error) Error() string { return e.Message }

// Unwrap returns the errno, so that for example errors.Is(err, syscall.EACCES)
// works on the client's side.
func (e *Error) Unwrap() error {
	if e.Errno == 0 {
		return nil
	}
	return syscall.Errno(e.Errno)
}

// Errorf returns an error with a code. If an argument contains an errno, the
// error keeps it.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	out := &Error{Code: code, Message: err.Error()}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		out.Errno = int(errno)
	}
	return out
}

// asError returns err as an *Error to be sent.
func asError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return Errorf(CodeFailed, "%w", err)
}

// VersionError means that the shim uses another version of the protocol.
type VersionError struct {
	Ours, Theirs int
	PID          int // process ID of the shim
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("cannot use the shim (process %d): it has protocol version %d, this binary has %d", e.PID, e.Theirs, e.Ours)
}
