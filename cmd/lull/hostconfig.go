package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/base/unixsock"
	"lull/internal/link/control"
)

// hostConfig is everything that can be set about lull host.
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
	Memory     string
	Wakes      uint
	WakeWait   time.Duration
	ImageAge   time.Duration
	ImageSpace string
	Layer      string

	reporting
	ReportEvery time.Duration
}

// dockerSocket is Docker's default socket.
const dockerSocket = "/var/run/docker.sock"

var hostOptions = []option[hostConfig]{
	{"data", "LULL_HOST_DATA", "path", "directory of records, logs and the shim's state; one host daemon at a time", func(c *hostConfig) any { return &c.Data }},
	{"socket", "LULL_HOST_SOCKET", "path", "unix socket of the API, mode 0600", func(c *hostConfig) any { return &c.Socket }},
	{"http", "LULL_HOST_HTTP", "host:port", "shared HTTP port that routes by host name (NAME.localhost) or X-Lull-Instance; empty is off", func(c *hostConfig) any { return &c.HTTP }},
	{"metrics", "LULL_HOST_METRICS", "host:port", "where Prometheus finds /metrics and nothing else, without a token, so on an address that only it reaches; the API's socket has them too; empty is off", func(c *hostConfig) any { return &c.Metrics }},
	{"pause-after", "LULL_HOST_PAUSE_AFTER", "duration", "idle time until an instance is paused, where it does not say; 0 never pauses", func(c *hostConfig) any { return &c.PauseAfter }},
	{"stop-after", "LULL_HOST_STOP_AFTER", "duration", "time from entering paused until an instance is stopped, where it does not say; 0 never stops", func(c *hostConfig) any { return &c.StopAfter }},
	{"probe", "LULL_HOST_PROBE", "duration", "time between two looks at a running instance, jittered by a tenth", func(c *hostConfig) any { return &c.Probe }},
	{"cpu-threshold", "LULL_HOST_CPU_THRESHOLD", "percent", "processor time of an instance from which it counts as used, as 1%: of one processor between two looks, at least 20 ms of it", func(c *hostConfig) any { return &c.CPU }},
	{"net-threshold", "LULL_HOST_NET_THRESHOLD", "count", "bytes in 5 s, in and out, from which an instance counts as used", func(c *hostConfig) any { return &c.Net }},
	{"disk-threshold", "LULL_HOST_DISK_THRESHOLD", "count", "bytes read from and written to disks in 5 s from which an instance counts as active; scaled to shorter probe intervals, at least 4096", func(c *hostConfig) any { return &c.Disk }},
	{"files", "LULL_HOST_FILES", "count", "open files that are asked for; paused instances need one for each of their sockets", func(c *hostConfig) any { return &c.Files }},
	{"shim", "LULL_HOST_SHIM", "path", "the lull-shim program; empty finds it beside lull", func(c *hostConfig) any { return &c.Shim }},
	{"guest-kernel", "LULL_GUEST_KERNEL", "path", "kernel of microVMs: a tree as lull guest-kernel makes it, or a file; empty looks in the data directory, /usr/share/lull and /", func(c *hostConfig) any { return &c.Kernel }},
	{"harness", "LULL_HOST_HARNESS", "path", "the lull-harness program of microVMs; empty finds it beside lull", func(c *hostConfig) any { return &c.Harness }},
	{"vm-machine", "LULL_HOST_VM_MACHINE", "name", "QEMU's machine for microVMs: q35, or microvm, which starts sooner", func(c *hostConfig) any { return &c.Machine }},
	{"vm-channel", "LULL_HOST_VM_CHANNEL", "name", "over what the harness in a microVM is called: vsock where this machine and the guest's kernel have it (auto; not for guests with --net none), the serial port alone (serial), or vsock for every guest (vsock); lull doctor says which it is", func(c *hostConfig) any { return &c.Channel }},
	{"memory", "LULL_HOST_MEMORY", "size", "memory that instances of a known size (microVMs, containers with a limit) may hold together, as 8G: a start or wake beyond it waits while others are pushed down the ladder; auto is the machine's less a tenth (at most 1 GiB), 0 does not bound them", func(c *hostConfig) any { return &c.Memory }},
	{"wakes", "LULL_HOST_WAKES", "count", "boots and restores from disk of microVMs that run at once, others wait; 0 does not bound them", func(c *hostConfig) any { return &c.Wakes }},
	{"wake-wait", "LULL_HOST_WAKE_WAIT", "duration", "how long a start or wake waits for memory and its turn before it fails; a relayed client waits a minute at most", func(c *hostConfig) any { return &c.WakeWait }},
	{"image-age", "LULL_HOST_IMAGE_AGE", "duration", "how long an unpacked image, or the disk made of one, is kept that no instance uses; 0 keeps them until lull image prune", func(c *hostConfig) any { return &c.ImageAge }},
	{"image-space", "LULL_HOST_IMAGE_SPACE", "size", "how much unpacked images and the disks made of them may take together, as 20G: each hour those go that no instance uses, the longest unused first, until they fit; 0 does not bound them", func(c *hostConfig) any { return &c.ImageSpace }},
	{"layer", "LULL_HOST_LAYER", "size", "how much a microVM may write to files of its own, outside a workspace, as 10G: the size of a sparse file that is made at its first start, takes what is in it, and is kept until lull instance rm; 0 keeps them in the guest's memory and loses them when it stops", func(c *hostConfig) any { return &c.Layer }},
	{"docker", "LULL_HOST_DOCKER", "path", "take over the idling of Docker's containers with the label lull.pause-after, over its API at this socket; empty is off, --docker alone means " + dockerSocket, func(c *hostConfig) any { return &c.Docker }},
	{"server", "LULL_HOST_SERVER", "URL", "the server of a fleet to report to, https unless it is on this machine; empty reports to none", func(c *hostConfig) any { return &c.Server }},
	{"token-file", "LULL_HOST_TOKEN_FILE", "path", "file with the token of this host for the server, readable by nobody else", func(c *hostConfig) any { return &c.TokenFile }},
	{"server-ca", "LULL_HOST_SERVER_CA", "path", "certificates in PEM that the server's is checked against; empty takes the system's", func(c *hostConfig) any { return &c.ServerCA }},
	{"machine", "LULL_HOST_MACHINE", "text", "what this host is called at the server, as its token has it; empty is the machine's name", func(c *hostConfig) any { return &c.reporting.Machine }},
	{"report-every", "LULL_HOST_REPORT_EVERY", "duration", "how often it reports where nothing changes; after three times that in silence the server calls it unheard of", func(c *hostConfig) any { return &c.ReportEvery }},
	{"stop-all", "LULL_HOST_STOP_ALL", "bool", "stop every instance when the host ends, instead of leaving them running", func(c *hostConfig) any { return &c.StopAll }},
}

func defaultHostConfig(getenv func(string) string) hostConfig {
	return hostConfig{Data: "lull-data/host", Socket: defaultSocket(getenv), PauseAfter: time.Minute,
		StopAfter: 5 * time.Minute, Probe: 5 * time.Second, CPU: "1%", Net: 512, Disk: 8192, Files: 65536, Machine: "q35", Channel: "auto",
		Memory: "auto", Wakes: 4, WakeWait: 45 * time.Second, ImageAge: 7 * 24 * time.Hour, ImageSpace: "0", Layer: "10G", ReportEvery: 15 * time.Second}
}

// cpuPercent is the threshold of processor time in percent of one processor.
func (c hostConfig) cpuPercent() (float64, error) {
	text, ok := strings.CutSuffix(c.CPU, "%")
	f, err := strconv.ParseFloat(text, 64)
	if !ok || err != nil || !(f > 0 && f <= 100) { // no NaN either
		return 0, fmt.Errorf("%q is no percentage above 0%% and at most 100%%, such as 2.5%%", c.CPU)
	}
	return f, nil
}

// resolve reads every source. Every fault is reported, each naming the
// variable, flag or line.
func resolve(getenv func(string) string, file string, flags *pflag.FlagSet) (hostConfig, []setting, error) {
	cfg := defaultHostConfig(getenv)
	read, err := readConfigFile(file)
	out, faults := readOptions(&cfg, hostOptions, read, getenv, flags)
	errs := []error{err, unknown(read, hostOptions, func(string) bool { return false }), faults}
	for name, d := range map[string]time.Duration{"pause-after": cfg.PauseAfter, "stop-after": cfg.StopAfter, "image-age": cfg.ImageAge} {
		if d < 0 {
			errs = append(errs, fmt.Errorf("cannot use %s: %s is negative", name, d))
		}
	}
	if cfg.Probe < 50*time.Millisecond || cfg.Probe > time.Hour {
		errs = append(errs, fmt.Errorf("cannot use probe: %s is not between 50ms and 1h", cfg.Probe))
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
		errs = append(errs, fmt.Errorf("cannot use wake-wait: %s is not above 0 and at most 1h", cfg.WakeWait))
	}
	if _, err := cfg.imageSpace(); err != nil {
		errs = append(errs, fmt.Errorf("cannot use image-space: %w", err))
	}
	if _, err := cfg.layer(); err != nil {
		errs = append(errs, fmt.Errorf("cannot use layer: %w", err))
	}
	if _, _, err := cfg.budget(); err != nil {
		errs = append(errs, fmt.Errorf("cannot use memory: %w", err))
	}
	if cfg.Machine != "q35" && cfg.Machine != "microvm" {
		errs = append(errs, fmt.Errorf("cannot use vm-machine: %q is neither q35 nor microvm", cfg.Machine))
	}
	if !slices.Contains([]string{"auto", "serial", "vsock"}, cfg.Channel) {
		errs = append(errs, fmt.Errorf("cannot use vm-channel: %q is none of auto, serial, vsock", cfg.Channel))
	}
	errs = append(errs, cfg.checkReporting(), cfg.placeSocket())
	if abs, err := filepath.Abs(cfg.Data); err == nil {
		cfg.Data = abs
	}
	return cfg, out, errors.Join(errs...)
}

// guestSocket is the name of LULL_SOCKET in the directory that containers are
// given.
const guestSocket = "guest.sock"

// guestPath returns the path of LULL_SOCKET for the API's socket: guest.sock
// beside host.sock, and NAME.guest.sock beside NAME.sock, so that several hosts
// can have their sockets in one directory.
func guestPath(api string) string {
	dir, base := filepath.Split(api)
	if name := strings.TrimSuffix(base, ".sock"); name != "host" {
		return dir + name + "." + guestSocket
	}
	return dir + guestSocket
}

// placeSocket makes the socket's path absolute: containers are given its
// directory, and programs LULL_SOCKET, whose working directory is another.
func (c *hostConfig) placeSocket() error {
	abs, err := filepath.Abs(c.Socket)
	if err != nil || c.Socket == "" {
		return errors.Join(errors.New("cannot use socket: want the path of a unix socket (--socket)"), err)
	}
	c.Socket = abs
	for _, p := range []string{abs, guestPath(abs)} {
		if len(p) > unixsock.MaxPath {
			return fmt.Errorf("cannot use socket: %s has %d bytes and the path of a unix socket at most %d; name a shorter one with --socket", p, len(p), unixsock.MaxPath)
		}
	}
	return nil
}

// checkReporting tells what is wrong with where the host reports to, and finds
// its name.
func (c *hostConfig) checkReporting() error {
	if c.Server == "" {
		return nil
	}
	if c.ReportEvery < 2*time.Second || c.ReportEvery > control.MaxInterval {
		return fmt.Errorf("cannot use report-every: %s is not between 2s and %s", c.ReportEvery, control.MaxInterval)
	}
	if c.reporting.Machine == "" {
		var err error
		if c.reporting.Machine, err = os.Hostname(); err != nil {
			return fmt.Errorf("cannot name this host: %w; set machine", err)
		}
	}
	if err := control.ValidHost(c.reporting.Machine); err != nil {
		return fmt.Errorf("cannot use machine: %w", err)
	}
	return c.check("host", hostToken)
}

// bindFlags declares the flags; their values are read by resolve.
func bindFlags(f *pflag.FlagSet, getenv func(string) string) {
	bindOptions(f, defaultHostConfig(getenv), hostOptions)
	f.Lookup("docker").NoOptDefVal = dockerSocket
}

// configHost is lull config host.
func (c *cli) configHost() *cobra.Command {
	var file string
	cmd := c.configOf("host", "Settings of lull host", func(flags *pflag.FlagSet) ([]setting, error) {
		_, l, err := resolve(c.getenv, file, flags)
		return l, err
	})
	cmd.Flags().StringVar(&file, "config", "", "YAML file of settings")
	bindFlags(cmd.Flags(), c.getenv)
	return cmd
}

// hostSettingsPage is the generated reference of lull host's settings.
func hostSettingsPage() string {
	var b strings.Builder
	b.WriteString("# Settings of lull host\n\nGenerated from cmd/lull/hostconfig.go. Precedence: flag, environment, config file (`--config`), default.\n\n")
	def := defaultHostConfig(func(string) string { return "" })
	def.Socket = "/run/lull/host.sock (root), $XDG_RUNTIME_DIR/lull/host.sock"
	optionRows(&b, def, hostOptions)
	return b.String()
}
