package guest

import "time"

// Methods that a host calls in the harness of a guest.
const (
	Hello     = "hello"     // {} -> HelloAnswer; the first call on every connection
	Run       = "run"       // RunCall -> {}; starts the one workload of this boot
	Exec      = "exec"      // ExecCall -> ExecAnswer
	Cancel    = "cancel"    // CancelCall; a notification: a command is killed
	Health    = "health"    // {} -> HealthAnswer
	Signal    = "signal"    // SignalCall: to the workload's main process
	SetClock  = "set_clock" // ClockCall -> ClockAnswer; after every resume
	Workspace = "workspace" // WorkspaceCall -> {}; on every connection of the workspace's port, before run
	Vsock     = "vsock"     // VsockCall -> {}, once connected; on the serial port only
	Sync      = "sync"      // {} -> {}, once what was written to files is on the guest's disk
	Room      = "room"      // RoomCall -> {}; whenever it has changed
	Shutdown  = "shutdown"  // ShutdownCall: ends the workload, syncs, powers off
)

// Methods by which a harness notifies its host, beside those of workloads.
const (
	Log    = "log"    // LogNote
	Exited = "exited" // ExitNote: the workload's main process has ended
	Output = "output" // OutputNote: a part of what a command printed, before the answer to exec on the same connection
)

// Version of these messages. A host refuses a harness of another one.
const Version = 1

// Bounds of what is carried in one message.
const (
	MaxChunk   = 24 << 10 // bytes of log in one note
	MaxOutput  = 20 << 10 // bytes of a stream of a command in one message
	MaxPrinted = 8 << 20  // bytes of a stream of a command in its notes
	MaxConns   = 128      // entries of HealthAnswer.Conns
)

// HelloAnswer is what the harness is and what it runs.
type HelloAnswer struct {
	Version int       `json:"version"`
	Boot    string    `json:"boot"` // random, made at each boot of the guest
	Running bool      `json:"running"`
	Exit    *ExitNote `json:"exit,omitempty"` // the workload has ended
	Busy    bool      `json:"busy,omitempty"` // a program said busy and has not taken it back
}

// RunCall starts the workload.
type RunCall struct {
	Command []string `json:"command"`
	Env     []string `json:"env,omitempty"`
	Dir     string   `json:"dir,omitempty"`
	User    string   `json:"user,omitempty"`   // name or uid[:gid] in the guest's own files
	Groups  []int    `json:"groups,omitempty"` // beside the user's own
}

// WorkspaceCall mounts the workspace at its first call; from its answer on both
// sides speak with Key on the workspace's port (package files).
type WorkspaceCall struct {
	Key      []byte `json:"key"`
	Path     string `json:"path"` // in the workload's files
	ReadOnly bool   `json:"read_only,omitempty"`
	User     string `json:"user,omitempty"`   // whose the files are in the guest, as in RunCall
	Refuse   bool   `json:"refuse,omitempty"` // nobody serves it: everything in it fails from here on
}

// VsockCall moves this channel to a vsock connection, on which the harness has
// to ask for it (package vsock). The serial port stays, and serves whenever that
// connection is cut.
type VsockCall struct {
	Port uint32 `json:"port"` // of the host
	Key  []byte `json:"key"`
}

// ExecCall runs a command beside the workload.
type ExecCall struct {
	Command []string `json:"command"`
	Env     []string `json:"env,omitempty"` // after the workload's
	Dir     string   `json:"dir,omitempty"`
	Timeout int64    `json:"timeout_ms,omitempty"` // it is killed then; 0 never
	// Number is what the notes of its output bear; 0 for none, then what is beyond
	// one message is lost.
	Number uint64 `json:"number,omitempty"`
}

// OutputNote is a part of a stream of a command, in order.
type OutputNote struct {
	Number uint64 `json:"number"` // of its ExecCall
	Stream int    `json:"stream"` // 1 is stdout, 2 stderr
	Data   []byte `json:"data"`
}

// ExecAnswer is how it ended, and the rest of each stream behind the notes.
type ExecAnswer struct {
	Code      int    `json:"code"`
	Stdout    []byte `json:"stdout"`
	Stderr    []byte `json:"stderr"`
	Truncated bool   `json:"truncated,omitempty"` // the end of a stream is lost
}

// CancelCall ends a command for which nobody waits any more.
type CancelCall struct {
	Number uint64 `json:"number"` // of its ExecCall
}

// SignalCall sends a signal to the workload's main process.
type SignalCall struct {
	Signal int `json:"signal"`
}

// ClockCall sets the guest's clock and stirs its random numbers.
type ClockCall struct {
	UnixNano int64  `json:"unix_ns"`
	Seed     []byte `json:"seed"` // fresh random bytes, 16 to 512
	// Of a guest that was cloned: its own host name and machine id from here on.
	Name    string `json:"name,omitempty"`
	Machine string `json:"machine_id,omitempty"`
}

// ClockAnswer is by how much the clock was off, behind being positive.
type ClockAnswer struct {
	Behind int64        `json:"behind_ns"`
	Hello  *HelloAnswer `json:"hello,omitempty"` // so that a guest that wakes is not asked twice
}

// RoomCall says how much more the disk of the guest's own files may take on its
// host. Programs hear ENOSPC beyond it, as on a disk of that size.
type RoomCall struct {
	Free int64 `json:"free_bytes"` // negative: as much as it has
}

// ShutdownCall ends everything within Grace, then the guest powers off.
type ShutdownCall struct {
	Grace int64 `json:"grace_ms"`
}

// ExitNote is how the workload ended.
type ExitNote struct {
	Code   int   `json:"code"` // 128+signal when a signal ended it
	Signal int   `json:"signal,omitempty"`
	At     int64 `json:"unix_ms"`
	// Starved says that the guest's kernel ended it for want of memory.
	Starved bool `json:"starved,omitempty"`
}

// Time of the end by the guest's clock.
func (e ExitNote) Time() time.Time { return time.UnixMilli(e.At) }

// LogNote carries output of the workload.
type LogNote struct {
	Data    []byte `json:"data"`
	Dropped uint64 `json:"dropped,omitempty"` // bytes lost before Data, because nobody took them in time
}

// HealthAnswer is a look at the workload from inside, now. CPU and Net only
// grow, so that the host makes rates of them; a part that could not be read
// has its error set and is unknown.
type HealthAnswer struct {
	Running  bool   `json:"running"`
	CPU      int64  `json:"cpu_ms"` // of the workload's tree, ended children included
	CPUErr   string `json:"cpu_error,omitempty"`
	Net      uint64 `json:"net_bytes"`
	NetErr   string `json:"net_error,omitempty"`
	Outbound int    `json:"tcp"` // established, opened by the guest, not to loopback
	TCPErr   string `json:"tcp_error,omitempty"`
	// Conns are inbound connections on which something waits for the program.
	Conns   []WaitingConn `json:"conns,omitempty"`
	Listens []ListenAddr  `json:"listens,omitempty"`
	Now     int64         `json:"unix_ns,omitempty"` // of its clock
	Free    int64         `json:"mem_available_bytes,omitempty"`
	Dropped uint64        `json:"log_dropped_bytes,omitempty"`
}

// WaitingConn is an inbound connection with unread bytes, or one that the
// program has not accepted yet.
type WaitingConn struct {
	Port     uint16 `json:"port"`   // the guest's
	Remote   uint16 `json:"remote"` // the client's
	Unread   uint32 `json:"unread"`
	Accepted bool   `json:"accepted"`
}

// ListenAddr is a listening socket in the guest.
type ListenAddr struct {
	Network string `json:"network"` // tcp or udp
	Addr    string `json:"addr"`
}
