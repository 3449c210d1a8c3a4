package guest

import "time"

// Methods that a host calls in a guest agent.
const (
	Hello     = "hello"     // HelloCall -> HelloAnswer; the first call on every connection
	Run       = "run"       // RunCall -> {}; starts the one workload of this boot
	Exec      = "exec"      // ExecCall -> ExecAnswer
	Cancel    = "cancel"    // CancelCall; a notification: a command is killed
	Input     = "input"     // InputNote; a notification: part of a command's input
	Control   = "control"   // ControlNote; a notification: the size of a command's terminal, or a signal
	Health    = "health"    // {} -> HealthAnswer
	Signal    = "signal"    // SignalCall: to the workload's main process
	SetClock  = "set_clock" // ClockCall -> ClockAnswer; after every resume
	Workspace = "workspace" // WorkspaceCall -> {}; on every connection of the workspace's port, before Run
	Vsock     = "vsock"     // VsockCall -> {}, after connecting; on the serial port only
	Sync      = "sync"      // {} -> {}; answered once written files are on the guest's disk
	Room      = "room"      // RoomCall -> {}; whenever the free space has changed
	Shutdown  = "shutdown"  // ShutdownCall: ends the workload, syncs, powers off
)

// Notifications from a guest agent, besides those of workloads.
const (
	Log    = "log"    // LogNote
	Exited = "exited" // ExitNote: the workload's main process has ended
	Output = "output" // OutputNote: part of a command's output, before the answer to exec on the same connection
	Taken  = "taken"  // TakenNote; sent in both directions
)

// Version of the protocol. A host rejects guest agents with another version.
const Version = 1

// TimerRejected is the message that a guest agent prints to the console before it
// powers off its guest because the kernel rejected the timer that the host requires.
const TimerRejected = "the kernel has rejected its timer"

// Limits of one message.
const (
	MaxChunk   = 24 << 10 // bytes of log per note
	MaxOutput  = 20 << 10 // bytes of a command's stream per message
	MaxPrinted = 8 << 20  // bytes of a command's stream in all its notes
	MaxConns   = 128      // maximum entries of HealthAnswer.Conns
	// Window is how many bytes of a command's input, and of its output, may be in
	// flight. No more is buffered, so a slow command or caller delays only the
	// other one of the two.
	Window = 256 << 10
)

// HelloCall greets a guest agent.
type HelloCall struct {
	// LogTimes means that this host understands Age and At of LogNote.
	LogTimes bool `json:"log_times,omitempty"`
}

// HelloAnswer describes the guest agent and its workload.
type HelloAnswer struct {
	Version int       `json:"version"`
	Boot    string    `json:"boot"` // random, drawn at each boot of the guest
	Running bool      `json:"running"`
	Exit    *ExitNote `json:"exit,omitempty"` // set if the workload has ended
	Busy    bool      `json:"busy,omitempty"` // a program is busy
}

// RunCall starts the workload.
type RunCall struct {
	Command []string `json:"command"`
	Env     []string `json:"env,omitempty"`
	Dir     string   `json:"dir,omitempty"`
	User    string   `json:"user,omitempty"`   // name or uid[:gid] in the guest
	Groups  []int    `json:"groups,omitempty"` // in addition to the user's own
}

// WorkspaceCall mounts the workspace at its first call. From the answer on, both
// sides use Key on the workspace's port (package files).
type WorkspaceCall struct {
	Key      []byte `json:"key"`
	Path     string `json:"path"` // mount point in the workload's root
	ReadOnly bool   `json:"read_only,omitempty"`
	User     string `json:"user,omitempty"`   // owner of the files in the guest, as in RunCall
	Refuse   bool   `json:"refuse,omitempty"` // the workspace is not served: every access fails
}

// VsockCall moves the channel to a vsock connection that the guest agent opens
// (package vsock). Whenever that connection breaks, the channel returns to the
// serial port.
type VsockCall struct {
	Port uint32 `json:"port"` // port of the host
	Key  []byte `json:"key"`
}

// ExecCall runs a command inside the guest, beside the workload.
type ExecCall struct {
	Command []string `json:"command"`
	Env     []string `json:"env,omitempty"` // added to the workload's environment
	Dir     string   `json:"dir,omitempty"`
	Timeout int64    `json:"timeout_ms,omitempty"` // killed after this time; 0 means never
	// Number identifies the command in notes about it. If it is 0, output beyond
	// one message is lost.
	Number uint64 `json:"number,omitempty"`
	// Stream means that the host reports with TakenNote how much output it has
	// passed on; the output then has no limit. With its first TakenNote, the
	// guest agent reports that the command is running and that notes about it may
	// be sent.
	Stream bool   `json:"stream,omitempty"`
	Input  bool   `json:"input,omitempty"` // the host sends InputNote; otherwise the input is empty
	TTY    bool   `json:"tty,omitempty"`   // on a terminal; all output is on stream 1
	Rows   uint16 `json:"rows,omitempty"`
	Cols   uint16 `json:"cols,omitempty"`
	// Files, if set, copies files as root instead of running a command. FilesOut
	// copies from At, an absolute path in the workload's root, to the output.
	// FilesIn copies from the input to At. Both are tar streams (package
	// tartree).
	Files string `json:"files,omitempty"`
	At    string `json:"at,omitempty"`
}

// Values of ExecCall.Files.
const (
	FilesIn  = "in"
	FilesOut = "out"
)

// Exit codes of a copy of files. Any other code except 0 comes with an error on
// stderr.
const (
	FilesNoPath    = 3 // At does not exist
	FilesIrregular = 4 // At is neither a file nor a directory
)

// InputNote is the next part of a command's input.
type InputNote struct {
	Number uint64 `json:"number"` // the number of its ExecCall
	Data   []byte `json:"data,omitempty"`
	End    bool   `json:"end,omitempty"` // nothing follows
}

// ControlNote is a signal for a command's process group or, if Signal is 0, the
// new size of its terminal.
type ControlNote struct {
	Number uint64 `json:"number"` // the number of its ExecCall
	Signal int    `json:"signal,omitempty"`
	Rows   uint16 `json:"rows,omitempty"`
	Cols   uint16 `json:"cols,omitempty"`
}

// TakenNote reports how many bytes of a command's input or output the receiver
// has passed on since its last TakenNote.
type TakenNote struct {
	Number uint64 `json:"number"` // the number of its ExecCall
	Bytes  int    `json:"bytes"`
}

// OutputNote is the next part of a stream of a command's output.
type OutputNote struct {
	Number uint64 `json:"number"` // the number of its ExecCall
	Stream int    `json:"stream"` // 1 stdout, 2 stderr
	Data   []byte `json:"data"`
}

// ExecAnswer reports how a command ended, and contains the rest of each stream.
type ExecAnswer struct {
	Code      int    `json:"code"`
	Stdout    []byte `json:"stdout"`
	Stderr    []byte `json:"stderr"`
	Truncated bool   `json:"truncated,omitempty"` // the end of a stream is missing
}

// CancelCall kills a command whose caller has left.
type CancelCall struct {
	Number uint64 `json:"number"` // the number of its ExecCall
}

// SignalCall sends a signal to the workload's main process.
type SignalCall struct {
	Signal int `json:"signal"`
}

// ClockCall sets the guest's clock and reseeds its random number generator.
type ClockCall struct {
	UnixNano int64  `json:"unix_ns"`
	Seed     []byte `json:"seed"` // fresh random bytes, 16 to 512
	// For a cloned guest: its new host name and machine id.
	Name    string `json:"name,omitempty"`
	Machine string `json:"machine_id,omitempty"`
}

// ClockAnswer reports by how much the guest's clock was wrong before the call;
// positive means that it was behind.
type ClockAnswer struct {
	Behind int64        `json:"behind_ns"`
	Hello  *HelloAnswer `json:"hello,omitempty"` // saves a waking guest another call
}

// RoomCall limits how much more space the guest's own disk may use on the host.
// Beyond that, programs get ENOSPC.
type RoomCall struct {
	Free int64 `json:"free_bytes"` // negative means unlimited
}

// ShutdownCall ends everything within Grace, then powers off the guest.
type ShutdownCall struct {
	Grace int64 `json:"grace_ms"`
}

// ExitNote reports how the workload ended.
type ExitNote struct {
	Code   int   `json:"code"` // 128+signal if a signal ended it
	Signal int   `json:"signal,omitempty"`
	At     int64 `json:"unix_ms"`
	// Starved reports whether the guest's kernel killed the workload because
	// memory ran out.
	Starved bool `json:"starved,omitempty"`
}

// Time returns when the workload ended, by the guest's clock.
func (e ExitNote) Time() time.Time { return time.UnixMilli(e.At) }

// LogNote carries output of the workload.
type LogNote struct {
	Data    []byte `json:"data"`
	Dropped uint64 `json:"dropped,omitempty"` // bytes dropped before Data because they were not read in time
	// Age and At are when Data was printed, if the host set LogTimes: how long
	// before the note was sent, and by the guest's clock. Notes wait while no
	// host is connected.
	Age int64 `json:"age_ms,omitempty"`
	At  int64 `json:"unix_ms,omitempty"`
}

// HealthAnswer contains measurements of the workload from inside the guest. CPU
// and Net only grow, so that the host can compute rates. A value that could not
// be read is unknown and has its error set.
type HealthAnswer struct {
	Running  bool   `json:"running"`
	CPU      int64  `json:"cpu_ms"` // CPU of the workload's tree, including exited children
	CPUErr   string `json:"cpu_error,omitempty"`
	Net      uint64 `json:"net_bytes"`
	NetErr   string `json:"net_error,omitempty"`
	Outbound int    `json:"tcp"` // established connections opened by the guest, except to loopback
	TCPErr   string `json:"tcp_error,omitempty"`
	// Conns lists inbound connections that have data or events for the program.
	Conns   []WaitingConn `json:"conns,omitempty"`
	Listens []ListenAddr  `json:"listens,omitempty"`
	Now     int64         `json:"unix_ns,omitempty"` // the guest's clock
	Free    int64         `json:"mem_available_bytes,omitempty"`
	Dropped uint64        `json:"log_dropped_bytes,omitempty"`
}

// WaitingConn is an inbound connection with unread bytes or one not yet accepted.
type WaitingConn struct {
	Port     uint16 `json:"port"`   // guest port
	Remote   uint16 `json:"remote"` // client port
	Unread   uint32 `json:"unread"`
	Accepted bool   `json:"accepted"`
}

// ListenAddr is a listening socket in the guest.
type ListenAddr struct {
	Network string `json:"network"` // tcp or udp
	Addr    string `json:"addr"`
}
