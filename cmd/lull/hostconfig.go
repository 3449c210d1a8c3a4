package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/cli/client"
	"lull/internal/cli/options"
	"lull/internal/cli/reporting"
	"lull/internal/cli/term"
	"lull/internal/lib/unixsock"
	"lull/internal/protocol/control"
)

// hostConfig holds all settings of lull host.
type hostConfig struct {
	Data       string
	Socket     string
	HTTP       string
	Metrics    string
	PauseAfter time.Duration
	StopAfter  time.Duration
	Probe      time.Duration
	CPU        string
	Net        uint
	Disk       uint
	Files      uint
	Shim       string
	Kernel     string
	Harness    string
	Machine    string
	Channel    string
	StopAll    bool
	Docker     string
	// DockerSocket is the absolute path of the socket that lull puts in front of
	// Docker's. It must differ from Docker's own socket.
	DockerSocket string
	Memory       string
	Wakes        uint
	WakeWait     time.Duration
	ImageAge     time.Duration
	ImageSpace   string
	Layer        string

	reporting.Target
	ReportEvery    time.Duration
	ServerCommands bool

	Listen, TLSCert, TLSKey string
	Insecure                bool
}

// dockerSocket is Docker's default socket.
const dockerSocket = "/var/run/docker.sock"

var hostOption = options.New[hostConfig]

var hostOptions = []options.Option[hostConfig]{
	hostOption("data", "LULL_HOST_DATA", "path", "directory of records, logs and the shim's state; used by one host daemon at a time", func(c *hostConfig) any { return &c.Data }),
	hostOption("socket", "LULL_HOST_SOCKET", "path", "unix socket of the API, mode 0600", func(c *hostConfig) any { return &c.Socket }),
	hostOption("http", "LULL_HOST_HTTP", "host:port", "shared HTTP port that routes by host name (NAME.localhost) or X-Lull-Instance header; empty disables it", func(c *hostConfig) any { return &c.HTTP }),
	hostOption("listen", "LULL_HOST_LISTEN", "host:port", "address of this host's dashboard; lull open prints a sign-in link; empty disables it", func(c *hostConfig) any { return &c.Listen }),
	hostOption("tls-cert", "LULL_HOST_TLS_CERT", "path", "TLS certificate of the dashboard in PEM, reloaded on change", func(c *hostConfig) any { return &c.TLSCert }),
	hostOption("tls-key", "LULL_HOST_TLS_KEY", "path", "private key of the dashboard's certificate in PEM", func(c *hostConfig) any { return &c.TLSKey }),
	hostOption("insecure", "LULL_HOST_INSECURE", "bool", "allow the dashboard on a non-loopback address without TLS", func(c *hostConfig) any { return &c.Insecure }),
	hostOption("metrics", "LULL_HOST_METRICS", "host:port", "address that serves only /metrics, without a token: bind it where only Prometheus can reach it; the API's socket serves the metrics too; empty disables it", func(c *hostConfig) any { return &c.Metrics }),
	hostOption("pause-after", "LULL_HOST_PAUSE_AFTER", "duration", "default idle timeout until an instance is paused; 0 never pauses", func(c *hostConfig) any { return &c.PauseAfter }),
	hostOption("stop-after", "LULL_HOST_STOP_AFTER", "duration", "default time in paused until an instance is stopped; 0 never stops", func(c *hostConfig) any { return &c.StopAfter }),
	hostOption("probe-interval", "LULL_HOST_PROBE", "duration", "probe interval of running instances, with 10% jitter", func(c *hostConfig) any { return &c.Probe }),
	hostOption("cpu-threshold", "LULL_HOST_CPU_THRESHOLD", "percent", "CPU usage (percent of one CPU over a probe interval, at least 20 ms) at which an instance counts as active", func(c *hostConfig) any { return &c.CPU }),
	hostOption("net-threshold", "LULL_HOST_NET_THRESHOLD", "count", "network traffic (bytes in and out per 5 s) at which an instance counts as active", func(c *hostConfig) any { return &c.Net }),
	hostOption("disk-threshold", "LULL_HOST_DISK_THRESHOLD", "count", "disk traffic (bytes read and written per 5 s, scaled to shorter probe intervals, at least 4096) at which an instance counts as active", func(c *hostConfig) any { return &c.Disk }),
	hostOption("max-open-files", "LULL_HOST_FILES", "count", "RLIMIT_NOFILE to request; each socket of a paused instance uses one descriptor", func(c *hostConfig) any { return &c.Files }),
	hostOption("shim", "LULL_HOST_SHIM", "path", "path of lull-shim (default: inside lull, next to it, or lull itself)", func(c *hostConfig) any { return &c.Shim }),
	hostOption("guest-kernel", "LULL_GUEST_KERNEL", "path", "kernel of microVMs: a directory made by lull guest-kernel, or a file; empty searches the data directory, /usr/share/lull and /", func(c *hostConfig) any { return &c.Kernel }),
	hostOption("harness", "LULL_HOST_HARNESS", "path", "path of lull-harness, the guest agent of microVMs (default: inside lull, or next to it)", func(c *hostConfig) any { return &c.Harness }),
	hostOption("vm-machine", "LULL_HOST_VM_MACHINE", "name", "QEMU machine type of microVMs: q35, or microvm, which boots faster", func(c *hostConfig) any { return &c.Machine }),
	hostOption("vm-channel", "LULL_HOST_VM_CHANNEL", "name", "control channel of microVMs: serial, vsock, or auto, which uses vsock if this machine and the guest kernel support it (never for guests with --net none); lull doctor shows the choice", func(c *hostConfig) any { return &c.Channel }),
	hostOption("memory", "LULL_HOST_MEMORY", "size", "memory budget of all instances of known size (microVMs, containers with a limit), such as 8G. A start or wake over budget waits while sleeping instances are moved to cheaper sleep levels; auto is the machine's memory less a tenth (at most 1 GiB), 0 is unlimited", func(c *hostConfig) any { return &c.Memory }),
	hostOption("max-concurrent-boots", "LULL_HOST_WAKES", "count", "maximum number of microVMs that boot or restore at once, others queue; 0 is unlimited", func(c *hostConfig) any { return &c.Wakes }),
	hostOption("start-timeout", "LULL_HOST_WAKE_WAIT", "duration", "maximum wait of a start or wake for memory and a boot slot; relayed clients wait at most a minute", func(c *hostConfig) any { return &c.WakeWait }),
	hostOption("image-cache-ttl", "LULL_HOST_IMAGE_AGE", "duration", "how long unused unpacked images, and disks made from them, are kept; 0 keeps them until lull image prune", func(c *hostConfig) any { return &c.ImageAge }),
	hostOption("image-cache-size", "LULL_HOST_IMAGE_SPACE", "size", "size limit of unpacked images and disks made from them, such as 20G. Checked every hour: unused ones are removed, least recently used first, until the rest fits; 0 is unlimited", func(c *hostConfig) any { return &c.ImageSpace }),
	hostOption("disk-size", "LULL_HOST_LAYER", "size", "maximum size of a microVM's own files outside a workspace, such as 10G. They are kept in a sparse file from the first start until lull rm; 0 keeps them in guest memory, lost at every stop", func(c *hostConfig) any { return &c.Layer }),
	hostOption("docker", "LULL_HOST_DOCKER", "path", "pause idle Docker containers with the label lull.pause-after, through the Docker API at this socket; empty disables it, --docker alone means "+dockerSocket, func(c *hostConfig) any { return &c.Docker }),
	hostOption("docker-socket", "LULL_HOST_DOCKER_SOCKET", "path", "also serve Docker's API on this socket (DOCKER_HOST=unix://path); docker exec, attach, start and pause wake a container that lull paused; empty disables it", func(c *hostConfig) any { return &c.DockerSocket }),
	hostOption("server", "LULL_HOST_SERVER", "URL", "fleet server to report to, https unless it is on this machine; empty disables reporting", func(c *hostConfig) any { return &c.Server }),
	hostOption("token-file", "LULL_HOST_TOKEN_FILE", "path", "file with this host's server token, not readable by others", func(c *hostConfig) any { return &c.TokenFile }),
	hostOption("server-ca", "LULL_HOST_SERVER_CA", "path", "CA certificates in PEM for the server's certificate (default: the system's)", func(c *hostConfig) any { return &c.ServerCA }),
	hostOption("name", "LULL_HOST_MACHINE", "text", "name of this host at the server, as in its token (default: the host name)", func(c *hostConfig) any { return &c.Target.Machine }),
	hostOption("heartbeat-interval", "LULL_HOST_REPORT_EVERY", "duration", "heartbeat interval; the server marks the host stale after three missed heartbeats", func(c *hostConfig) any { return &c.ReportEvery }),
	hostOption("server-commands", "LULL_HOST_SERVER_COMMANDS", "bool", "carry out commands of the server's operators (pause, resume, snooze, start, stop) and let them read the last lines of logs; off by default, because the server's operators are not this machine's users and logs can contain secrets", func(c *hostConfig) any { return &c.ServerCommands }),
	hostOption("stop-all", "LULL_HOST_STOP_ALL", "bool", "stop every instance when the host exits, instead of leaving them running", func(c *hostConfig) any { return &c.StopAll }),
}

// formerHostOptions maps the names of settings in the last release to the present
// names.
var formerHostOptions = map[string]string{
	"probe":        "probe-interval",
	"files":        "max-open-files",
	"wakes":        "max-concurrent-boots",
	"wake-wait":    "start-timeout",
	"image-age":    "image-cache-ttl",
	"image-space":  "image-cache-size",
	"layer":        "disk-size",
	"machine":      "name",
	"report-every": "heartbeat-interval",
}

func defaultHostConfig(getenv func(string) string) hostConfig {
	return hostConfig{Data: client.DefaultData(getenv, "host"), Socket: client.DefaultSocket(getenv), PauseAfter: time.Minute,
		StopAfter: 5 * time.Minute, Probe: 5 * time.Second, CPU: "1%", Net: 512, Disk: 8192, Files: 65536, Machine: "q35", Channel: "auto",
		Memory: "auto", Wakes: 4, WakeWait: 45 * time.Second, ImageAge: 7 * 24 * time.Hour, ImageSpace: "0", Layer: "10G", ReportEvery: 15 * time.Second}
}

// cpuPercent returns the CPU threshold in percent of one CPU.
func (c hostConfig) cpuPercent() (float64, error) {
	text, ok := strings.CutSuffix(c.CPU, "%")
	f, err := strconv.ParseFloat(text, 64)
	if !ok || err != nil || !(f > 0 && f <= 100) { // also rejects NaN
		return 0, fmt.Errorf("%q is not a percentage above 0%% and up to 100%%, such as 2.5%%", c.CPU)
	}
	return f, nil
}

// resolve reads the settings from all sources. The error joins every fault, each with
// its variable, flag or line.
func resolve(getenv func(string) string, file string, flags *pflag.FlagSet) (hostConfig, []options.Setting, error) {
	cfg := defaultHostConfig(getenv)
	read, err := options.ReadFile(file)
	renamed := read.Rename(formerHostOptions)
	out, faults := options.Read(&cfg, hostOptions, read, getenv, flags)
	errs := []error{err, renamed, options.Unknown(read, hostOptions, func(string) bool { return false }), faults}
	for name, d := range map[string]time.Duration{"pause-after": cfg.PauseAfter, "stop-after": cfg.StopAfter, "image-cache-ttl": cfg.ImageAge} {
		if d < 0 {
			errs = append(errs, fmt.Errorf("cannot use %s: %s is negative", name, d))
		}
	}
	if cfg.Probe < 50*time.Millisecond || cfg.Probe > time.Hour {
		errs = append(errs, fmt.Errorf("cannot use probe-interval: %s is not between 50ms and 1h", cfg.Probe))
	}
	if _, err := cfg.cpuPercent(); err != nil {
		errs = append(errs, fmt.Errorf("cannot use cpu-threshold: %w", err))
	}
	if cfg.Net < 1 || cfg.Net > 1<<30 {
		errs = append(errs, fmt.Errorf("cannot use net-threshold: %d is not between 1 and %d", cfg.Net, 1<<30))
	}
	if cfg.Disk < 1 || cfg.Disk > 1<<40 {
		errs = append(errs, fmt.Errorf("cannot use disk-threshold: %d is not between 1 and %d", cfg.Disk, 1<<40))
	}
	if cfg.WakeWait <= 0 || cfg.WakeWait > time.Hour {
		errs = append(errs, fmt.Errorf("cannot use start-timeout: %s is out of range: want more than 0 and at most 1h", cfg.WakeWait))
	}
	if _, err := cfg.imageSpace(); err != nil {
		errs = append(errs, fmt.Errorf("cannot use image-cache-size: %w", err))
	}
	if _, err := cfg.layer(); err != nil {
		errs = append(errs, fmt.Errorf("cannot use disk-size: %w", err))
	}
	if _, _, err := cfg.budget(); err != nil {
		errs = append(errs, fmt.Errorf("cannot use memory: %w", err))
	}
	if cfg.Machine != "q35" && cfg.Machine != "microvm" {
		errs = append(errs, fmt.Errorf("cannot use vm-machine: %q is neither q35 nor microvm", cfg.Machine))
	}
	if !slices.Contains([]string{"auto", "serial", "vsock"}, cfg.Channel) {
		errs = append(errs, fmt.Errorf("cannot use vm-channel: %q is not auto, serial or vsock", cfg.Channel))
	}
	errs = append(errs, cfg.checkReporting(), cfg.checkListen(), cfg.placeSocket(), cfg.placeDockerSocket())
	if abs, err := filepath.Abs(cfg.Data); err == nil {
		cfg.Data = abs
	}
	return cfg, out, errors.Join(errs...)
}

// guestSocket is the name of LULL_SOCKET in the directory that is mounted into
// containers.
const guestSocket = "guest.sock"

// guestPath returns the path of LULL_SOCKET that belongs to the API's socket:
// guest.sock beside host.sock, and NAME.guest.sock beside NAME.sock, so that several
// hosts can share a directory.
func guestPath(api string) string {
	dir, base := filepath.Split(api)
	if name := strings.TrimSuffix(base, ".sock"); name != "host" {
		return dir + name + "." + guestSocket
	}
	return dir + guestSocket
}

// placeSocket makes the path of the API's socket absolute, because containers and
// programs use that path with other working directories.
func (c *hostConfig) placeSocket() error {
	abs, err := filepath.Abs(c.Socket)
	if err != nil || c.Socket == "" {
		return errors.Join(errors.New("cannot use socket: want the path of a unix socket (--socket)"), err)
	}
	c.Socket = abs
	for _, p := range []string{abs, guestPath(abs)} {
		if len(p) > unixsock.MaxPath {
			return fmt.Errorf("cannot use socket: %s has %d bytes, the path of a unix socket at most %d; set a shorter one with --socket", p, len(p), unixsock.MaxPath)
		}
	}
	return nil
}

// placeDockerSocket makes the path of the socket in front of Docker's absolute.
// Docker's own socket may be given in the form of DOCKER_HOST.
func (c *hostConfig) placeDockerSocket() error {
	c.Docker = strings.TrimPrefix(c.Docker, "unix://")
	if c.DockerSocket == "" {
		return nil
	}
	abs, err := filepath.Abs(c.DockerSocket)
	if err != nil {
		return fmt.Errorf("cannot use docker-socket: %w", err)
	}
	c.DockerSocket = abs
	// Docker's path may contain a symbolic link, such as /var/run.
	front, ferr := filepath.EvalSymlinks(filepath.Dir(abs))
	engine, eerr := filepath.EvalSymlinks(filepath.Dir(c.Docker))
	switch {
	case c.Docker == "":
		return errors.New("cannot use docker-socket: it needs docker, the socket of Docker itself (--docker)")
	case abs == c.Docker, ferr == nil && eerr == nil && front == engine && filepath.Base(abs) == filepath.Base(c.Docker):
		return fmt.Errorf("cannot use docker-socket: %s is Docker's own socket", abs)
	case len(abs) > unixsock.MaxPath:
		return fmt.Errorf("cannot use docker-socket: %s has %d bytes, the path of a unix socket at most %d", abs, len(abs), unixsock.MaxPath)
	}
	return nil
}

// checkListen validates the address and TLS settings of the dashboard.
func (c *hostConfig) checkListen() error {
	switch host, _, err := net.SplitHostPort(c.Listen); {
	case (c.TLSCert == "") != (c.TLSKey == ""):
		return errors.New("cannot use tls-cert without tls-key, or tls-key without tls-cert")
	case c.Listen == "":
		return nil
	case err != nil:
		return fmt.Errorf("cannot use listen: %q is not host:port", c.Listen)
	case c.TLSCert == "" && !c.Insecure && !reporting.Loopback(host):
		return fmt.Errorf("cannot use listen: on %s without TLS, sessions could be read in transit; give --tls-cert and --tls-key, or --insecure", c.Listen)
	}
	return nil
}

// checkReporting validates the settings for reporting to a server, and sets the
// host's name.
func (c *hostConfig) checkReporting() error {
	if c.Server == "" {
		if c.ServerCommands {
			return errors.New("cannot use server-commands: it needs server, the fleet server to report to (--server)")
		}
		return nil
	}
	if c.ReportEvery < 2*time.Second || c.ReportEvery > control.MaxInterval {
		return fmt.Errorf("cannot use heartbeat-interval: %s is not between 2s and %s", c.ReportEvery, control.MaxInterval)
	}
	if c.Target.Machine == "" {
		var err error
		if c.Target.Machine, err = os.Hostname(); err != nil {
			return fmt.Errorf("cannot determine the name of this host (set --name): %w", err)
		}
	}
	if err := control.ValidHost(c.Target.Machine); err != nil {
		return fmt.Errorf("cannot use name: %w", err)
	}
	return c.Check("host", reporting.HostOption)
}

// bindFlags defines the flags. resolve reads their values.
func bindFlags(f *pflag.FlagSet, getenv func(string) string) {
	term.AcceptFormer(f, formerHostOptions)
	options.Bind(f, defaultHostConfig(getenv), hostOptions)
	f.Lookup("docker").NoOptDefVal = dockerSocket
}

// configHost returns the verb lull config host.
func (c *cli) configHost() *cobra.Command {
	var file string
	cmd := options.Command(&c.Term, "host", "Show the settings of lull host", func(flags *pflag.FlagSet) ([]options.Setting, error) {
		_, l, err := resolve(c.Getenv, file, flags)
		return l, err
	})
	cmd.Flags().StringVar(&file, "config", "", "YAML config file")
	bindFlags(cmd.Flags(), c.Getenv)
	return cmd
}

// hostSettingsPage returns the generated reference of lull host's settings.
func hostSettingsPage() string {
	var b strings.Builder
	b.WriteString("# Settings of lull host\n\nGenerated from cmd/lull/hostconfig.go. Precedence: flag, environment, config file (`--config`), default.\n\n")
	def := defaultHostConfig(func(string) string { return "" })
	def.Data = "/var/lib/lull/host (root), $XDG_STATE_HOME/lull/host"
	def.Socket = "/run/lull/host.sock (root), $XDG_RUNTIME_DIR/lull/host.sock"
	options.Rows(&b, def, hostOptions)
	return b.String()
}
