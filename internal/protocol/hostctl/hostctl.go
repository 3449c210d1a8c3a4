// Package hostctl is the protocol between a client and a host daemon over the
// host's unix socket: the objects of the API, and a client.
//
// Field names are a contract. Times are RFC 3339 or null; idle_for, pause_after
// and stop_after are in seconds.
package hostctl

import (
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/why"
)

// Instance is an instance as shown to users and scripts.
type Instance struct {
	ID                 string              `json:"id" doc:"Stable id of the instance"`
	Name               string              `json:"name"`
	State              string              `json:"state" enum:"stopped,starting,running,pausing,paused,reclaimed,hibernated,resuming,stopping"`
	StateSince         *time.Time          `json:"state_since"`
	StatusReason       string              `json:"status_reason"`
	Enabled            bool                `json:"enabled" doc:"False means stopped and not woken"`
	Runtime            string              `json:"runtime"`
	Command            []string            `json:"command"`
	PID                int                 `json:"pid" doc:"Main process; 0 if none"`
	CreatedAt          time.Time           `json:"created_at"`
	StartedAt          *time.Time          `json:"started_at"`
	LastActivityAt     *time.Time          `json:"last_activity_at"`
	LastPausedAt       *time.Time          `json:"last_paused_at"`
	LastPausedBy       string              `json:"last_paused_by"`
	LastResumedAt      *time.Time          `json:"last_resumed_at"`
	LastResumedBy      string              `json:"last_resumed_by"`
	IdleFor            float64             `json:"idle_for" doc:"Seconds since the last activity"`
	PauseAt            *time.Time          `json:"pause_at" doc:"When it will be paused without further activity; null if a block has no known end"`
	StopAt             *time.Time          `json:"stop_at" doc:"When a paused instance is stopped; null for never, as while connections are open that may not be ignored"`
	Connections        int                 `json:"connections" doc:"Open inbound connections that prevent a pause"`
	Leases             []idle.Lease        `json:"leases"`
	LeaseHeld          bool                `json:"lease_held"`
	LeaseReason        string              `json:"lease_reason"`
	LeaseExpiresAt     *time.Time          `json:"lease_expires_at" doc:"End of the lease that expires last"`
	IdlePolicy         string              `json:"idle_policy"`
	PauseAfter         float64             `json:"pause_after" doc:"Seconds; 0 is never"`
	StopAfter          float64             `json:"stop_after" doc:"Seconds from entering paused; 0 is never"`
	ReclaimAfter       float64             `json:"reclaim_after" doc:"Seconds from entering paused; 0 is off"`
	HibernateAfter     float64             `json:"hibernate_after" doc:"Seconds from entering paused; 0 is off"`
	Image              string              `json:"image"`
	MemoryLimit        int64               `json:"memory_limit" doc:"Bytes; 0 is the runtime's default"`
	CPUs               float64             `json:"cpus" doc:"0 is the runtime's default"`
	Net                string              `json:"net" doc:"none, outbound or full; empty if it has no separate network, or is outbound"`
	Workspace          string              `json:"workspace"`
	SnoozeUntil        *time.Time          `json:"snooze_until"`
	Adopted            *instance.Adopted   `json:"adopted,omitempty" doc:"The program that it was made from; absent if lull started it"`
	Endpoints          []instance.Endpoint `json:"endpoints"`
	Activity           []idle.Reading      `json:"activity" doc:"The last readings"`
	Blocks             []idle.Block        `json:"blocks" doc:"Everything that prevents a pause right now"`
	ExitCode           *int                `json:"exit_code"`
	RestartCount       int                 `json:"restart_count"`
	RestartAt          *time.Time          `json:"restart_at" doc:"When to restart a program that ended"`
	CrashLooping       bool                `json:"crash_looping"`
	PauseCount         uint64              `json:"pause_count"`
	WakeCount          uint64              `json:"wake_count"`
	MemoryBytes        int64               `json:"memory_bytes" doc:"Resident memory, 0 when stopped or unknown"`
	ReclaimedBytes     int64               `json:"reclaimed_bytes"`
	SavedBytes         int64               `json:"saved_bytes" doc:"On disk while hibernated"`
	BootedAnew         string              `json:"booted_anew" doc:"Why it was booted instead of restored after it had been hibernated"`
	Misset             string              `json:"misset,omitempty" doc:"Conflicts between its settings and the host's current settings"`
	WakesOnConnection  bool                `json:"wakes_on_connection" doc:"A client can wake it while it sleeps: it exposes a port, or listens on its own socket, including a unix socket"`
	Unwritable         string              `json:"unwritable,omitempty" doc:"Why the host cannot record its changes now, such as a full disk; automatic actions wait"`
	Trouble            string              `json:"trouble,omitempty" doc:"Fault that keeps a running instance from working, such as a QEMU that does not answer"`
	NextStep           string              `json:"next_step" doc:"State that a sleeping instance goes to next; empty for none"`
	NextStepAt         *time.Time          `json:"next_step_at"`
	Unavailable        string              `json:"unavailable,omitempty" doc:"Why its current state is unknown: its runtime is missing, or its run does not answer; state is the last recorded one"`
	Wakes              bool                `json:"wake_from_stopped" doc:"A connection to an exposed port starts it after lull stopped it"`
	StartsOnConnection bool                `json:"starts_on_connection" doc:"Stopped, and a connection to an exposed port starts it"`
	Deaf               string              `json:"wake_from_stopped_fault,omitempty" doc:"Why connections, or those to some ports, do not start it once lull has stopped it, although they wake it while it is paused"`
	NoNewPrivs         bool                `json:"no_new_privs,omitempty" doc:"Setuid programs inside run without their privileges: the kernel requires this for an ordinary user's bind filter"`
	Labels             map[string]string   `json:"labels,omitempty" doc:"Labels; those of lull up begin with lull."`
	DependsOn          []string            `json:"depends_on,omitempty" doc:"Instances that wake before it and sleep after it"`
	Group              string              `json:"group,omitempty" doc:"Instances of a group sleep and wake together"`
	WakeAt             *time.Time          `json:"wake_at" doc:"When it must run next; it is woken 2 s before"`
	WakeAtBy           string              `json:"wake_at_by,omitempty" doc:"Who set that: a user, its program or one of its schedules"`
	WakeSchedule       []string            `json:"wake_schedule,omitempty" doc:"Times at which it must run, as in a crontab"`
	Probes             []instance.Probe    `json:"probes,omitempty" doc:"Its own activity probes; their readings are in activity, as probe:NAME"`
	Waiting            *Waiting            `json:"waiting" doc:"Waiting for room to start or wake; null if not waiting"`
}

// Waiting is a start or wake that waits for memory or a boot slot.
type Waiting struct {
	Reason string    `json:"reason"`
	Place  int       `json:"place" doc:"In the queue, from 1"`
	Since  time.Time `json:"since"`
	Until  time.Time `json:"until" doc:"When it fails"`
}

// Capacity is a host's capacity for instances of known size, and its queue.
// Counters start at zero with each daemon.
type Capacity struct {
	Memory  int64  `json:"memory_bytes" doc:"Total memory that instances of a known size may hold; 0 if unlimited"`
	Free    int64  `json:"free_bytes" doc:"Free part of the memory limit; 0 if unlimited"`
	Places  int    `json:"wakes" doc:"Maximum concurrent slow starts and restores; 0 if unlimited"`
	Taken   int    `json:"wakes_running"`
	Waiting int    `json:"waiting"`
	Longest int    `json:"waiting_most" doc:"Maximum length of the queue so far"`
	Granted uint64 `json:"granted"`
	Refused uint64 `json:"refused" doc:"Starts and wakes that timed out waiting for room"`
	Pushed  uint64 `json:"pushed_down" doc:"Steps down the ladder that an instance took to make room for another"`
}

// Why explains why an instance is running, or why it was paused or stopped.
type Why struct {
	why.Account
	Instance Instance    `json:"instance" doc:"Current state"`
	Relay    *RelayStats `json:"relay,omitempty"`
}

// RelayStats are the relay's statistics for an instance.
type RelayStats struct {
	Accepted    uint64            `json:"accepted"`
	Relayed     uint64            `json:"relayed"`
	Waiting     int               `json:"waiting"`
	ClientsGone uint64            `json:"clients_gone"`
	Refused     uint64            `json:"refused"`
	FailedWakes uint64            `json:"failed_wakes"`
	LastFailure string            `json:"last_failure,omitempty"`
	Ignored     map[string]uint64 `json:"ignored,omitempty"`
}

// Create requests a new instance.
type Create struct {
	instance.Spec
	Start bool `json:"start" doc:"Start it at once"`
	// RemoveFailed removes the new instance if it does not start.
	RemoveFailed bool `json:"remove_failed,omitempty" doc:"With start: remove it again if it does not start; the error has its last output"`
	// Replace replaces the instance with the same name.
	Replace bool `json:"replace,omitempty" doc:"Replace the instance of that name and start it; if it does not start, the earlier one is as before"`
}

// Adopt requests an instance made of something that already runs: a process with
// its descendants, a control group, a systemd unit, or a Docker container.
type Adopt struct {
	PID        int            `json:"pid,omitempty" minimum:"0" doc:"Root of a process tree; or name a cgroup, a unit or a container"`
	Cgroup     string         `json:"cgroup,omitempty" maxLength:"4096" doc:"Directory of a control group, or its path as in /proc/PID/cgroup"`
	Name       string         `json:"name,omitempty" maxLength:"63" doc:"Default: the name of the program or control group"`
	PauseAfter *idle.Duration `json:"pause_after,omitempty" doc:"Seconds; 0 never pauses. Default: the host's, unless nothing could wake it"`
	Caller     int            `json:"caller,omitempty" minimum:"0" doc:"Process that asks; refused if it would be frozen"`
	Container  string         `json:"container,omitempty" maxLength:"255" doc:"Name or ID of a container, which may be stopped"`
	Unit       string         `json:"unit,omitempty" maxLength:"255" doc:"Name of a systemd service"`
	Manager    string         `json:"manager,omitempty" pattern:"^[0-9]*$" maxLength:"10" doc:"UID of the user whose systemd runs the unit; empty for the machine's"`
	Stop       bool           `json:"stop,omitempty" doc:"Stop the unit after it was paused for a while, and start it when a client connects"`
	DropIn     bool           `json:"drop_in,omitempty" doc:"With stop: write a drop-in, with which the unit gets its sockets back and serves every client itself"`
	StopAfter  *idle.Duration `json:"stop_after,omitempty" doc:"Seconds paused until a container or unit is stopped. Default for a container: 0, which never stops it; for a unit with stop: the host's"`

	Probes       []instance.Probe `json:"probes,omitempty" doc:"Activity probes"`
	WakeSchedule []string         `json:"wake_schedule,omitempty" doc:"Times at which it has to run, as in a crontab"`
}

// DropIn is a file that changes how systemd starts a unit.
type DropIn = instance.DropIn

// Logs selects a part of an instance's output.
type Logs = instance.LogQuery

// Clone requests an instance made from the snapshot of another one.
type Clone struct {
	Name      string              `json:"name" doc:"Name of the new instance"`
	Expose    []instance.Endpoint `json:"expose,omitempty" doc:"Ports of the clone; the source's ports are not copied"`
	Workspace bool                `json:"workspace,omitempty" doc:"Share the source's workspace; otherwise everything in it fails with EIO until the clone is restarted"`
}

// Image is an image in a host's cache.
type Image struct {
	instance.Image
	Keeper string   `json:"keeper" doc:"Component that keeps the image"`
	UsedBy []string `json:"used_by" doc:"Instances created from it"`
}

// Change contains settings that can be changed on an existing instance. Absent
// settings are left unchanged.
type Change struct {
	PauseAfter           *idle.Duration    `json:"pause_after,omitempty" doc:"Seconds; 0 never pauses"`
	ReclaimAfter         *idle.Duration    `json:"reclaim_after,omitempty" doc:"Seconds from entering PAUSED; 0 is off, as of the two below"`
	HibernateAfter       *idle.Duration    `json:"hibernate_after,omitempty"`
	StopAfter            *idle.Duration    `json:"stop_after,omitempty"`
	QuietConnectionAfter *idle.Duration    `json:"quiet_connection_after,omitempty" doc:"Seconds; 0 is off"`
	StopGrace            *idle.Duration    `json:"stop_grace,omitempty" doc:"Seconds from SIGTERM to SIGKILL; 0 is 10"`
	IdlePolicy           *string           `json:"idle_policy,omitempty"`
	WakeFromStopped      *bool             `json:"wake_from_stopped,omitempty"`
	Restart              *instance.Restart `json:"restart,omitempty"`
	Labels               map[string]string `json:"labels,omitempty" doc:"All labels; they replace those before"`
}

// Apply returns s with the changes in c.
func (c Change) Apply(s instance.Spec) instance.Spec {
	if c.PauseAfter != nil {
		s.PauseAfter = c.PauseAfter
	}
	if c.StopAfter != nil {
		s.StopAfter = c.StopAfter
	}
	put(&s.ReclaimAfter, c.ReclaimAfter)
	put(&s.HibernateAfter, c.HibernateAfter)
	put(&s.QuietConnectionAfter, c.QuietConnectionAfter)
	put(&s.StopGrace, c.StopGrace)
	put(&s.IdlePolicy, c.IdlePolicy)
	if c.WakeFromStopped != nil {
		s.WakeFromStopped = c.WakeFromStopped
	}
	put(&s.Restart, c.Restart)
	if c.Labels != nil {
		s.Labels = c.Labels
	}
	return s
}

func put[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

// LeaseRequest takes or renews a lease.
type LeaseRequest struct {
	Holder string        `json:"holder" doc:"Default: default" required:"false"`
	Reason string        `json:"reason" required:"false"`
	TTL    idle.Duration `json:"ttl_seconds" doc:"Above 0, at most 24 h"`
}

// Event is something that happened on the host.
type Event struct {
	Seq      uint64    `json:"seq"`
	Time     time.Time `json:"time"`
	Type     string    `json:"type"`
	Instance string    `json:"instance"`
	ID       string    `json:"id"`
	State    string    `json:"state"`
	By       string    `json:"by,omitempty"`
	Reason   string    `json:"reason,omitempty"`
}

// Status is the host daemon's own state.
type Status struct {
	Version    string            `json:"version"`
	PID        int               `json:"pid"`
	StartedAt  time.Time         `json:"started_at"`
	Halted     bool              `json:"halted"`
	Halt       *idle.HaltedBy    `json:"halt,omitempty" doc:"Who halted it, since when, until when and why; absent if not halted"`
	DataDir    string            `json:"data_dir"`
	Instances  map[string]int    `json:"instances" doc:"Count by state"`
	Freezer    string            `json:"freezer" doc:"How processes are frozen here"`
	Shim       string            `json:"shim"`
	OpenFiles  int               `json:"open_files"`
	FileLimit  uint64            `json:"file_limit"`
	Goroutines int               `json:"goroutines"`
	Room       Capacity          `json:"room" doc:"Memory and places for starts and wakes"`
	Faults     []string          `json:"faults" doc:"Problems, each with what to do"`
	Missing    map[string]string `json:"missing" doc:"Why a runtime cannot create instances here, by runtime; checked on every read"`
	// FollowsDocker reports whether the host puts Docker's containers to sleep.
	FollowsDocker bool        `json:"follows_docker" doc:"Whether it follows a Docker daemon (--docker)"`
	LeftAlone     []string    `json:"left_alone,omitempty" doc:"Docker containers with lull labels that cannot be managed, each with the reason"`
	Server        *ServerLink `json:"server" doc:"Server it reports to; null if none"`
}

// ServerLink is the state of the connection to the server that a host reports
// to.
type ServerLink struct {
	URL          string     `json:"url"`
	Host         string     `json:"host" doc:"This host's name on the server"`
	ReportedAt   *time.Time `json:"reported_at" doc:"The last report that arrived since the last failure"`
	Error        string     `json:"error" doc:"Why the last report did not arrive; empty if it did"`
	FailingSince *time.Time `json:"failing_since"`
}

// ExecRequest is a command to run inside an instance, ExecResult its outcome.
type (
	ExecRequest = instance.Command
	ExecResult  = instance.Outcome
)

// Reset is sent in the event stream when events are missing. The reader must then
// read the current state again.
type Reset struct {
	Reason string `json:"reason"`
}
