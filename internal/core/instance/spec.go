package instance

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"lull/internal/core/idle"
	"lull/internal/core/power"
)

// Policies of Spec.IdlePolicy.
const (
	PolicyDefault    = "default"     // connections, heartbeat and leases hold
	PolicyLeasesOnly = "leases_only" // the heartbeat is ignored
)

// Limits on a Spec.
const (
	MaxName     = 63
	MaxCommand  = 128 << 10 // bytes of argv and environment together
	MaxLease    = 24 * time.Hour
	MaxDeadline = 366 * 24 * time.Hour
	MaxGrace    = time.Hour // of StopGrace
	MaxHolders  = 256       // leases on one instance
	MaxEndpoint = 32
	MaxImage    = 4096    // bytes of an image's name or path
	MinMemory   = 4 << 20 // bytes
	MaxMemory   = 1 << 42
	MaxCPUs     = 1024
	MaxLabels   = 64
	MaxTimers   = 16       // schedules of one instance
	MaxDepends  = 64       // instances that one depends on
	MaxLabel    = 4096     // bytes of a label's key and value
	MinLog      = 64 << 10 // smallest size in bytes at which a log is rotated
)

// Spec contains a user's settings. A duration of zero means off, except that for
// PauseAfter and StopAfter nil means the host's default.
type Spec struct {
	Name    string   `json:"name"`
	Runtime string   `json:"runtime"`
	Command []string `json:"command,omitempty"` // empty is the image's own
	Env     []string `json:"env,omitempty"`     // KEY=VALUE, added to the daemon's base environment
	Workdir string   `json:"workdir,omitempty"`
	User    string   `json:"user,omitempty"`

	// Settings for a program that runs in a container or guest. A runtime that
	// lacks one refuses it.
	Image     string  `json:"image,omitempty"`        // directory, image file or registry reference of its files
	Memory    int64   `json:"memory_bytes,omitempty"` // 0 is the runtime's default
	CPUs      float64 `json:"cpus,omitempty"`         // processors; 0 is the runtime's default
	Net       Net     `json:"net,omitempty"`          // network access; empty means outbound
	Workspace string  `json:"workspace,omitempty"`    // directory of this machine to share, in the form that ParseWorkspace reads

	Expose []Endpoint `json:"expose,omitempty"`
	// ListenFDs passes the exposed sockets to the program (LISTEN_FDS). The
	// sockets are then kept open while the instance is STOPPED.
	ListenFDs bool `json:"listen_fds,omitempty"`

	PauseAfter           *idle.Duration `json:"pause_after,omitempty"`     // 0 never pauses
	StopAfter            *idle.Duration `json:"stop_after,omitempty"`      // counted from entering PAUSED; 0 never stops
	ReclaimAfter         idle.Duration  `json:"reclaim_after,omitempty"`   // counted from entering PAUSED; 0 is off
	HibernateAfter       idle.Duration  `json:"hibernate_after,omitempty"` // counted from entering PAUSED; 0 is off
	QuietConnectionAfter idle.Duration  `json:"quiet_connection_after,omitempty"`
	ReadyTimeout         idle.Duration  `json:"ready_timeout,omitempty"` // default 60 s
	StopGrace            idle.Duration  `json:"stop_grace,omitempty"`    // time from SIGTERM to SIGKILL, default 10 s

	// WakeFromStopped is whether a connection starts a stopped instance. By
	// default (nil) it does if lull stopped the instance. With true it does so
	// also before the first start and after an exit. An instance that a user
	// stopped stays stopped in any case.
	WakeFromStopped *bool   `json:"wake_from_stopped,omitempty"`
	WakeOnOutbound  bool    `json:"wake_on_outbound,omitempty"`
	IdlePolicy      string  `json:"idle_policy,omitempty"`
	Restart         Restart `json:"restart,omitempty"`
	LogMax          int64   `json:"log_max_bytes,omitempty"` // size at which the log is rotated, keeping one older file; default 10 MiB

	Noise *Noise `json:"noise,omitempty"`

	// WakeSchedule lists the times at which the instance has to run, in the form
	// that ParseCron reads.
	WakeSchedule []string `json:"wake_schedule,omitempty"`

	// DependsOn names instances that are woken before this one and stay awake as
	// long as it does.
	DependsOn []string `json:"depends_on,omitempty"`

	// Group is a name shared by instances that sleep and wake together.
	Group string `json:"group,omitempty"`

	Probes []Probe `json:"probes,omitempty"` // signals of the user's own

	Labels map[string]string `json:"labels,omitempty"` // for users and scripts; lull up marks the instances that it creates

	// Adopted describes a program that was running before the instance was made.
	// It is nil for a program that lull starts. If it is set, Command is
	// informative only.
	Adopted *Adopted `json:"adopted,omitempty"`
}

// Wakes reports whether, by the instance's own settings, a connection starts it
// after lull stopped it.
func (s *Spec) Wakes() bool { return s.WakeFromStopped == nil || *s.WakeFromStopped }

// Net is the network access of an instance with a separate network. Clients
// reach its exposed ports in any case.
type Net string

// The modes of Net. The default is outbound.
const (
	NetNone     Net = "none"     // nothing
	NetOutbound Net = "outbound" // other machines, never this one
	NetFull     Net = "full"     // this machine too
)

// Noise describes arrivals on relay endpoints that neither hold nor wake the
// instance.
type Noise struct {
	Sources    []string      `json:"sources,omitempty"`     // CIDR ranges
	Silent     idle.Duration `json:"silent,omitempty"`      // longest time that a connection without a first byte is held back
	Paths      []string      `json:"paths,omitempty"`       // HTTP health-check paths
	UserAgents []string      `json:"user_agents,omitempty"` // substrings
}

var nameRule = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$`)

// ValidName reports whether s can name an instance.
func ValidName(s string) error {
	if len(s) > MaxName || !nameRule.MatchString(s) {
		return fmt.Errorf("cannot use %q as a name: want 1 to %d of a-z, 0-9, '.', '_' and '-', beginning and ending with a letter or digit", s, MaxName)
	}
	return nil
}

// Validate returns every fault of s, each with its field.
func (s *Spec) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("cannot use %s: %s", field, fmt.Sprintf(format, args...)))
	}
	if err := ValidName(s.Name); err != nil {
		errs = append(errs, err)
	}
	switch { // an image may define the command
	case len(s.Command) == 0 && s.Image == "", len(s.Command) > 0 && s.Command[0] == "":
		bad("command", "must not be empty")
	}
	size := 0
	for i, a := range slices.Concat(s.Command, s.Env) {
		size += len(a)
		if strings.ContainsRune(a, 0) {
			bad("command or env", "entry %d contains a NUL byte", i)
		}
	}
	if size > MaxCommand {
		bad("command and env", "%d bytes, at most %d", size, MaxCommand)
	}
	for i, e := range s.Env {
		if k, _, ok := strings.Cut(e, "="); !ok || k == "" {
			bad(fmt.Sprintf("env[%d]", i), "%q is not KEY=VALUE", e)
		}
	}
	if s.Workdir != "" && !filepath.IsAbs(s.Workdir) {
		bad("workdir", "%q is not absolute", s.Workdir)
	}
	if !slices.Contains([]string{"", PolicyDefault, PolicyLeasesOnly}, s.IdlePolicy) {
		bad("idle_policy", "%q is neither %s nor %s", s.IdlePolicy, PolicyDefault, PolicyLeasesOnly)
	}
	if !slices.Contains([]Restart{"", RestartNo, RestartOnFailure, RestartAlways}, s.Restart) {
		bad("restart", "%q is not no, on-failure or always", s.Restart)
	}
	if s.LogMax < 0 || s.LogMax > 1<<40 {
		bad("log_max_bytes", "%d is out of range", s.LogMax)
	}
	if len(s.WakeSchedule) > MaxTimers {
		bad("wake_schedule", "%d schedules, at most %d", len(s.WakeSchedule), MaxTimers)
	}
	for n, text := range s.WakeSchedule {
		if _, err := ParseCron(text); err != nil {
			bad(fmt.Sprintf("wake_schedule[%d]", n), "%v", err)
		}
	}
	if len(s.DependsOn) > MaxDepends {
		bad("depends_on", "%d instances, at most %d", len(s.DependsOn), MaxDepends)
	}
	for _, name := range s.DependsOn {
		if ValidName(name) != nil {
			bad("depends_on", "%.40q cannot be the name of an instance", name)
		}
	}
	if s.Group != "" && ValidName(s.Group) != nil {
		bad("group", "%.40q does not have the form of an instance's name", s.Group)
	}
	if len(s.Labels) > MaxLabels {
		bad("labels", "%d labels, at most %d", len(s.Labels), MaxLabels)
	}
	for k, v := range s.Labels {
		if k == "" || len(k)+len(v) > MaxLabel || strings.ContainsFunc(k+v, unicode.IsControl) {
			bad("labels", "%.40q is empty, has more than %d bytes with its value, or contains control characters", k, MaxLabel)
		}
	}
	errs = append(errs, s.checkBox()...)
	errs = append(errs, s.checkDurations()...)
	errs = append(errs, s.checkEndpoints()...)
	errs = append(errs, s.checkAdopted()...)
	errs = append(errs, s.checkProbes()...)
	if s.Noise != nil {
		for i, c := range s.Noise.Sources {
			if _, err := netip.ParsePrefix(c); err != nil {
				bad(fmt.Sprintf("noise.sources[%d]", i), "%q is not an address range", c)
			}
		}
	}
	return errors.Join(errs...)
}

// CheckNew returns every fault of a newly requested spec. Validate is more
// lenient, because records of earlier versions must remain valid.
func (s *Spec) CheckNew() error {
	errs := []error{s.Validate(), s.CheckGrace()}
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("cannot use %s: %s", field, fmt.Sprintf(format, args...)))
	}
	if errs[0] == nil {
		if err := CheckWorkspace(s.Workspace); err != nil {
			bad("workspace", "%v", err)
		}
	}
	if s.LogMax > 0 && s.LogMax < MinLog {
		bad("log_max_bytes", "%d is below %d: a log that small would be rotated with every few lines", s.LogMax, MinLog)
	}
	if s.ListenFDs && len(s.Expose) == 0 {
		bad("listen_fds", "there is no socket to hand over: name one with expose")
	}
	return errors.Join(errs...)
}

// CheckGrace returns an error if the stop grace is too long. A stop waits up to
// that long.
func (s *Spec) CheckGrace() error {
	if d := time.Duration(s.StopGrace); d > MaxGrace {
		return fmt.Errorf("cannot use stop_grace: %s is above %s", idle.Human(d), idle.Human(MaxGrace))
	}
	return nil
}

// checkBox validates the settings for containers and guests.
func (s *Spec) checkBox() (errs []error) {
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("cannot use %s: %s", field, fmt.Sprintf(format, args...)))
	}
	if len(s.Image) > MaxImage || strings.ContainsRune(s.Image, 0) {
		bad("image", "more than %d bytes, or a NUL byte", MaxImage)
	}
	if s.Memory != 0 && (s.Memory < MinMemory || s.Memory > MaxMemory) {
		bad("memory_bytes", "%d is not between %d and %d", s.Memory, MinMemory, int64(MaxMemory))
	}
	if s.CPUs != 0 && !(s.CPUs >= 0.01 && s.CPUs <= MaxCPUs) {
		bad("cpus", "%v is not between 0.01 and %d", s.CPUs, MaxCPUs)
	}
	if !slices.Contains([]Net{"", NetNone, NetOutbound, NetFull}, s.Net) {
		bad("net", "%q is not none, outbound or full", s.Net)
	}
	if _, err := ParseWorkspace(s.Workspace); err != nil {
		bad("workspace", "%v", err)
	}
	return errs
}

// CheckFor returns an error for every setting of s that a runtime with these
// capabilities does not support. s must be valid.
func (s *Spec) CheckFor(c power.Capabilities) error {
	var errs []error
	lacks := func(field, why string) {
		errs = append(errs, fmt.Errorf("cannot use %s: the %s runtime %s", field, s.Runtime, why))
	}
	if s.Image != "" && !c.Image {
		lacks("image", "runs programs of this machine")
	}
	if s.Memory != 0 && !c.Limits {
		lacks("memory_bytes", "has no limits")
	}
	if s.CPUs != 0 && !c.Limits {
		lacks("cpus", "has no limits")
	}
	if s.Net != "" && !c.Network {
		lacks("net", "uses this machine's network")
	}
	if s.Workspace != "" && !c.Workspace {
		lacks("workspace", "cannot share a directory with it")
	}
	if s.ReclaimAfter > 0 && !c.Reclaim {
		lacks("reclaim_after", "cannot reclaim memory of other users' processes: the host needs root")
	}
	if s.HibernateAfter > 0 && !c.Hibernate {
		lacks("hibernate_after", "cannot save an instance to disk")
	}
	if s.ListenFDs && c.Network {
		lacks("listen_fds", "has a network of its own and inherits no sockets")
	}
	for i, e := range s.Expose {
		switch {
		case c.Network && e.Proto == ProtoUDP:
			lacks(fmt.Sprintf("expose[%d]", i), "is reached through the relay, which is tcp only")
		case c.Network && e.Proto == ProtoUnix:
			lacks(fmt.Sprintf("expose[%d]", i), "has files of its own, so a unix socket of its program does not exist on this machine; expose a port")
		case c.Network && e.Path == PathDirect:
			lacks(fmt.Sprintf("expose[%d]", i), "has a network of its own, so there is no direct path")
		case !c.Network && e.Path == PathRelay && e.Listen == e.Target:
			errs = append(errs, fmt.Errorf("cannot use expose[%d]: a relay cannot listen on %s, where the program listens itself", i, e.Listen))
		}
	}
	return errors.Join(errs...)
}

// CheckLadder returns an error unless the steps of the ladder rise. All of them
// count from entering PAUSED. stop is the effective stop_after, 0 for never.
func (s *Spec) CheckLadder(stop time.Duration) error {
	var errs []error
	last, name := time.Duration(0), ""
	for _, f := range []struct {
		name string
		d    time.Duration
	}{{"reclaim_after", time.Duration(s.ReclaimAfter)}, {"hibernate_after", time.Duration(s.HibernateAfter)}, {"stop_after", stop}} {
		if f.d <= 0 {
			continue
		}
		if last >= f.d {
			errs = append(errs, fmt.Errorf("cannot use %s: %s is not before %s %s, and both count from entering PAUSED", name, idle.Human(last), f.name, idle.Human(f.d)))
		}
		last, name = f.d, f.name
	}
	return errors.Join(errs...)
}

func (s *Spec) checkDurations() (errs []error) {
	val := func(d *idle.Duration) idle.Duration {
		if d == nil {
			return 0
		}
		return *d
	}
	for _, f := range []struct {
		name string
		d    idle.Duration
	}{{"pause_after", val(s.PauseAfter)}, {"stop_after", val(s.StopAfter)}, {"reclaim_after", s.ReclaimAfter}, {"hibernate_after", s.HibernateAfter},
		{"quiet_connection_after", s.QuietConnectionAfter}, {"ready_timeout", s.ReadyTimeout}, {"stop_grace", s.StopGrace}} {
		if f.d < 0 || time.Duration(f.d) > MaxDeadline {
			errs = append(errs, fmt.Errorf("cannot use %s: %s is not between 0 and %s", f.name, time.Duration(f.d), MaxDeadline))
		}
	}
	if err := s.CheckLadder(time.Duration(val(s.StopAfter))); err != nil {
		errs = append(errs, err)
	}
	return errs
}

func (s *Spec) checkEndpoints() (errs []error) {
	if len(s.Expose) > MaxEndpoint {
		return []error{fmt.Errorf("cannot use expose: %d endpoints, at most %d", len(s.Expose), MaxEndpoint)}
	}
	seen := map[string]bool{}
	for i := range s.Expose {
		e := &s.Expose[i]
		check := checkAddress
		if e.Proto == ProtoUnix {
			check = checkSocketPath
		}
		for _, a := range []string{e.Listen, e.Target} {
			if err := check(a); err != nil {
				errs = append(errs, fmt.Errorf("cannot use expose[%d]: %w", i, err))
			}
		}
		key := e.Proto + e.Listen
		if seen[key] {
			errs = append(errs, fmt.Errorf("cannot use expose[%d]: %s is exposed twice", i, e.Listen))
		}
		seen[key] = true
		switch {
		case e.Proto != "" && e.Proto != ProtoUDP && e.Proto != ProtoUnix:
			errs = append(errs, fmt.Errorf("cannot use expose[%d]: proto %q is neither udp nor unix (empty is tcp)", i, e.Proto))
		case e.Proto != "" && (e.Listen != e.Target || e.Path == PathRelay):
			errs = append(errs, fmt.Errorf("cannot use expose[%d]: %s is never relayed, so listen and target must be the same", i, e.Proto))
		}
		switch e.Path {
		case "", PathAuto, PathRelay:
		case PathDirect:
			if e.Listen != e.Target {
				errs = append(errs, fmt.Errorf("cannot use expose[%d]: on the direct path the program itself listens on %s, so the target cannot be %s", i, e.Listen, e.Target))
			}
		default:
			errs = append(errs, fmt.Errorf("cannot use expose[%d]: path %q is not auto, direct or relay", i, e.Path))
		}
	}
	return errs
}

func checkAddress(a string) error {
	host, port, err := net.SplitHostPort(a)
	if err != nil {
		return fmt.Errorf("%q is not host:port", a)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return fmt.Errorf("%q has no port between 1 and 65535", a)
	}
	if host != "" && host != "localhost" {
		if _, err := netip.ParseAddr(host); err != nil {
			return fmt.Errorf("%q has no IP address", a)
		}
	}
	return nil
}

// maxSocketPath is shorter than the kernel's limit of 107 bytes, because the
// supervisor also uses a longer name in the same directory.
const maxSocketPath = 94

// checkSocketPath checks the path of an exposed unix socket.
func checkSocketPath(p string) error {
	switch {
	case strings.HasPrefix(p, "@") || strings.HasPrefix(p, "\x00"):
		return fmt.Errorf("%q is an abstract socket, which has no file to keep for clients: write a path, as in unix:/run/app.sock", p)
	case !utf8.ValidString(p) || strings.ContainsFunc(p, unicode.IsControl):
		return fmt.Errorf("%q contains control characters or is not UTF-8: write a path, as in unix:/run/app.sock", p)
	case !filepath.IsAbs(p):
		return fmt.Errorf("%q is not an absolute path: write one, as in unix:/run/app.sock", p)
	case strings.Contains(p, ":/"):
		return fmt.Errorf("%q names two paths, and a unix socket is not relayed: write the one that the program binds, as in unix:/run/app.sock", p)
	case p != filepath.Clean(p) || p == "/":
		return fmt.Errorf("%q is not the plain path of a file: write unix:%s", p, filepath.Join("/", filepath.Clean(p)))
	case len(p) > maxSocketPath:
		return fmt.Errorf("%q has %d bytes: write a path of at most %d", p, len(p), maxSocketPath)
	}
	return nil
}

// ParseExpose parses the command line's short form of an endpoint: PORT or
// HOST:PORT, where the program listens on the same address; or LISTEN:TARGET,
// each of them [HOST:]PORT. The suffix /udp selects UDP. An IPv6 address is in
// brackets, and an omitted host is 127.0.0.1. unix:PATH is a unix socket.
func ParseExpose(s string, p Path) (Endpoint, error) {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		err := checkSocketPath(path)
		if err == nil && p == PathRelay {
			err = errors.New("a unix socket is never relayed: leave --path out")
		}
		if err != nil {
			return Endpoint{}, fmt.Errorf("cannot read %q as an exposed unix socket: %w", s, err)
		}
		return Endpoint{Proto: ProtoUnix, Listen: path, Target: path, Path: p}, nil
	}
	fail := fmt.Errorf("cannot read %q as an exposed port: want PORT, HOST:PORT, LISTEN:TARGET or HOST:LISTEN:HOST:TARGET, /udp behind it for UDP, or unix:PATH", s)
	if strings.HasPrefix(s, "/") || strings.HasPrefix(s, "@") {
		fail = fmt.Errorf("%w; a unix socket is written unix:/run/app.sock", fail)
	}
	if strings.Contains(s, "::") && !strings.Contains(s, "[") {
		fail = fmt.Errorf("%w; an IPv6 address needs brackets, as in [::1]:8080", fail)
	}
	s, udp := strings.CutSuffix(s, "/udp")
	parts := exposeParts(s)
	if slices.ContainsFunc(parts, func(p string) bool { return strings.ContainsAny(p, "[]") }) {
		return Endpoint{}, fail
	}
	isPort := func(x string) bool { n, err := strconv.Atoi(x); return err == nil && n >= 1 && n <= 65535 }
	const local = "127.0.0.1"
	var listen, target string
	switch {
	case len(parts) == 1 && isPort(parts[0]):
		listen = net.JoinHostPort(local, parts[0])
		target = listen
	case len(parts) == 2 && isPort(parts[0]) && isPort(parts[1]):
		listen, target = net.JoinHostPort(local, parts[0]), net.JoinHostPort(local, parts[1])
	case len(parts) == 2 && !isPort(parts[0]) && isPort(parts[1]):
		listen = net.JoinHostPort(parts[0], parts[1])
		target = listen
	case len(parts) == 3 && isPort(parts[1]) && isPort(parts[2]):
		listen, target = net.JoinHostPort(parts[0], parts[1]), net.JoinHostPort(local, parts[2])
	case len(parts) == 4 && isPort(parts[1]) && isPort(parts[3]):
		listen, target = net.JoinHostPort(parts[0], parts[1]), net.JoinHostPort(parts[2], parts[3])
	default:
		return Endpoint{}, fail
	}
	for _, a := range []string{listen, target} {
		if checkAddress(a) != nil {
			return Endpoint{}, fail
		}
	}
	e := Endpoint{Listen: listen, Target: target, Path: p}
	if udp {
		e.Proto = ProtoUDP
	}
	return e, nil
}

// exposeParts splits s at the colons outside brackets, and removes the brackets.
func exposeParts(s string) (parts []string) {
	begin, inside := 0, false
	for n, c := range s + ":" {
		switch {
		case c == '[':
			inside = true
		case c == ']':
			inside = false
		case c == ':' && (!inside || n == len(s)):
			part := s[begin:n]
			if v, ok := strings.CutPrefix(part, "["); ok && strings.HasSuffix(v, "]") && strings.Contains(v, ":") {
				part = v[:len(v)-1]
			}
			parts, begin = append(parts, part), n+1
		}
	}
	return parts
}

// Record contains everything that is durable about an instance. It is written
// before a change is acted on or acknowledged, with one safe exception: a wake
// thaws the instance first (docs/decisions, fenced stop).
type Record struct {
	ID         string         `json:"id"`
	Spec       Spec           `json:"spec"`
	Generation uint64         `json:"generation"` // rises with every durable change of state
	State      power.Instance `json:"state"`
	Enabled    bool           `json:"enabled"`
	Identity   *Identity      `json:"identity,omitempty"`
	Endpoints  []Endpoint     `json:"endpoints,omitempty"` // with the path that was chosen
	Leases     []idle.Lease   `json:"leases,omitempty"`

	CreatedAt      time.Time `json:"created_at"`
	StartedAt      time.Time `json:"started_at,omitzero"` // start of the present run, for its uptime
	StateSince     time.Time `json:"state_since,omitzero"`
	LastActivityAt time.Time `json:"last_activity_at,omitzero"`
	LastPausedAt   time.Time `json:"last_paused_at,omitzero"`
	LastResumedAt  time.Time `json:"last_resumed_at,omitzero"`
	SnoozedUntil   time.Time `json:"snoozed_until,omitzero"`
	NextDue        time.Time `json:"next_due,omitzero"`      // when the program's own timers need it to run; this and the next two are wall-clock times
	WakeAt         time.Time `json:"wake_at,omitzero"`       // when a user wants it to run
	TimersServed   time.Time `json:"timers_served,omitzero"` // timers up to this time have been served
	PausedBy       string    `json:"last_paused_by,omitempty"`
	StoppedBy      string    `json:"stopped_by,omitempty"` // who stopped the last run; empty while it runs and if it exited by itself
	ResumedBy      string    `json:"last_resumed_by,omitempty"`
	StatusReason   string    `json:"status_reason,omitempty"`
	Unserved       string    `json:"unserved,omitempty"` // the last start or wake that found no memory in this state, and why

	Exit         *Exit       `json:"exit,omitempty"`      // how the last run ended
	RestartAt    time.Time   `json:"restart_at,omitzero"` // when it will be restarted automatically
	RestartCount int         `json:"restart_count"`
	Crashes      []time.Time `json:"crashes,omitempty"` // times of runs that failed early, newest last
	CrashLooping bool        `json:"crash_looping"`
	PauseCount   uint64      `json:"pause_count"`
	WakeCount    uint64      `json:"wake_count"`
	Freed        int64       `json:"reclaimed_bytes,omitempty"`
	Saved        int64       `json:"saved_bytes,omitempty"` // size on disk while hibernated
	// BootedAnew is why the present run was booted although its predecessor had
	// been hibernated.
	BootedAnew string `json:"booted_anew,omitempty"`
}
