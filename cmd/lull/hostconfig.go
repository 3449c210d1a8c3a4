package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"gopkg.in/yaml.v3"
)

// hostConfig is everything that can be set about lull host.
type hostConfig struct {
	Data       string
	Socket     string
	HTTP       string
	PauseAfter time.Duration
	StopAfter  time.Duration
	Probe      time.Duration
	Files      uint
	Shim       string
	Kernel     string
	Harness    string
	Machine    string
	StopAll    bool
	Docker     string
	Memory     string
	Wakes      uint
	WakeWait   time.Duration
}

// dockerSocket is where Docker listens when nobody says otherwise.
const dockerSocket = "/var/run/docker.sock"

// option is one setting: its flag, its environment variable, its unit and what
// it means. Precedence is flag, environment, file, default.
type option struct {
	Name, Env, Unit, Doc string
	bind                 func(*hostConfig) any // *string, *time.Duration, *uint or *bool
}

var hostOptions = []option{
	{"data", "LULL_HOST_DATA", "path", "directory of records, logs and the shim's state; one host daemon at a time", func(c *hostConfig) any { return &c.Data }},
	{"socket", "LULL_HOST_SOCKET", "path", "unix socket of the API, mode 0600", func(c *hostConfig) any { return &c.Socket }},
	{"http", "LULL_HOST_HTTP", "host:port", "shared HTTP port that routes by host name (NAME.localhost) or X-Lull-Instance; empty is off", func(c *hostConfig) any { return &c.HTTP }},
	{"pause-after", "LULL_HOST_PAUSE_AFTER", "duration", "idle time until an instance is paused, where it does not say; 0 never pauses", func(c *hostConfig) any { return &c.PauseAfter }},
	{"stop-after", "LULL_HOST_STOP_AFTER", "duration", "time from entering paused until an instance is stopped, where it does not say; 0 never stops", func(c *hostConfig) any { return &c.StopAfter }},
	{"probe", "LULL_HOST_PROBE", "duration", "time between two looks at a running instance, jittered by a tenth", func(c *hostConfig) any { return &c.Probe }},
	{"files", "LULL_HOST_FILES", "count", "open files that are asked for; paused instances need one for each of their sockets", func(c *hostConfig) any { return &c.Files }},
	{"shim", "LULL_HOST_SHIM", "path", "the lull-shim program; empty finds it beside lull", func(c *hostConfig) any { return &c.Shim }},
	{"guest-kernel", "LULL_GUEST_KERNEL", "path", "kernel of microVMs: a tree as lull guest-kernel makes it, or a file; empty looks in the data directory, /usr/share/lull and /", func(c *hostConfig) any { return &c.Kernel }},
	{"harness", "LULL_HOST_HARNESS", "path", "the lull-harness program of microVMs; empty finds it beside lull", func(c *hostConfig) any { return &c.Harness }},
	{"vm-machine", "LULL_HOST_VM_MACHINE", "name", "QEMU's machine for microVMs: q35, or microvm, which starts sooner", func(c *hostConfig) any { return &c.Machine }},
	{"memory", "LULL_HOST_MEMORY", "size", "memory that instances of a known size (microVMs, containers with a limit) may hold together, as 8G: a start or wake beyond it waits while others are pushed down the ladder; auto is the machine's less a tenth (at most 1 GiB), 0 does not bound them", func(c *hostConfig) any { return &c.Memory }},
	{"wakes", "LULL_HOST_WAKES", "count", "boots and restores from disk of microVMs that run at once, others wait; 0 does not bound them", func(c *hostConfig) any { return &c.Wakes }},
	{"wake-wait", "LULL_HOST_WAKE_WAIT", "duration", "how long a start or wake waits for memory and its turn before it fails; a relayed client waits a minute at most", func(c *hostConfig) any { return &c.WakeWait }},
	{"docker", "LULL_HOST_DOCKER", "path", "take over the idling of Docker's containers with the label lull.pause-after, over its API at this socket; empty is off, --docker alone means " + dockerSocket, func(c *hostConfig) any { return &c.Docker }},
	{"stop-all", "LULL_HOST_STOP_ALL", "bool", "stop every instance when the host ends, instead of leaving them running", func(c *hostConfig) any { return &c.StopAll }},
}

func defaultHostConfig(getenv func(string) string) hostConfig {
	return hostConfig{Data: "lull-data/host", Socket: defaultSocket(getenv), PauseAfter: time.Minute,
		StopAfter: 5 * time.Minute, Probe: 5 * time.Second, Files: 65536, Machine: "q35",
		Memory: "auto", Wakes: 4, WakeWait: 45 * time.Second}
}

// setting is an effective value and where it came from.
type setting struct {
	Name    string `json:"name"`
	Env     string `json:"env"`
	Unit    string `json:"unit"`
	Default string `json:"default"`
	Value   string `json:"value"`
	Source  string `json:"source"`
	Doc     string `json:"doc"`
}

func text(p any) string {
	switch v := p.(type) {
	case *string:
		return *v
	case *time.Duration:
		return v.String()
	case *uint:
		return fmt.Sprint(*v)
	case *bool:
		return fmt.Sprint(*v)
	}
	return ""
}

func set(p any, s string) (err error) {
	switch v := p.(type) {
	case *string:
		*v = s
	case *time.Duration:
		*v, err = time.ParseDuration(s)
	case *uint:
		_, err = fmt.Sscanf(s, "%d", v)
		if err == nil && fmt.Sprint(*v) != s {
			err = errors.New("not a number")
		}
	case *bool:
		switch s {
		case "true", "1":
			*v = true
		case "false", "0":
			*v = false
		default:
			err = errors.New("want true or false")
		}
	}
	return err
}

// resolve reads every source. Every fault is reported, each naming the
// variable, flag or line.
func resolve(getenv func(string) string, file string, flags *pflag.FlagSet) (hostConfig, []setting, error) {
	cfg := defaultHostConfig(getenv)
	fromFile, errs := readConfigFile(file)
	var out []setting
	for _, o := range hostOptions {
		p := o.bind(&cfg)
		s := setting{Name: o.Name, Env: o.Env, Unit: o.Unit, Default: text(p), Source: "default", Doc: o.Doc}
		if n, ok := fromFile[o.Name]; ok {
			s.Source = fmt.Sprintf("file %s, line %d", file, n.Line)
			if err := set(p, n.Value); err != nil {
				errs = append(errs, fmt.Errorf("cannot use %s in %s, line %d: %q is not a %s", o.Name, file, n.Line, n.Value, o.Unit))
			}
			delete(fromFile, o.Name)
		}
		if e := getenv(o.Env); e != "" {
			s.Source = "environment " + o.Env
			if err := set(p, e); err != nil {
				errs = append(errs, fmt.Errorf("cannot use %s: %q is not a %s", o.Env, e, o.Unit))
			}
		}
		if f := flags.Lookup(o.Name); f != nil && f.Changed {
			s.Source = "flag --" + o.Name
			if err := set(p, f.Value.String()); err != nil {
				errs = append(errs, fmt.Errorf("cannot use --%s: %q is not a %s", o.Name, f.Value, o.Unit))
			}
		}
		s.Value = text(p)
		out = append(out, s)
	}
	for name, n := range fromFile {
		errs = append(errs, fmt.Errorf("cannot use %s in %s, line %d: there is no such setting", name, file, n.Line))
	}
	for name, d := range map[string]time.Duration{"pause-after": cfg.PauseAfter, "stop-after": cfg.StopAfter} {
		if d < 0 {
			errs = append(errs, fmt.Errorf("cannot use %s: %s is negative", name, d))
		}
	}
	if cfg.Probe < 50*time.Millisecond || cfg.Probe > time.Hour {
		errs = append(errs, fmt.Errorf("cannot use probe: %s is not between 50ms and 1h", cfg.Probe))
	}
	if cfg.WakeWait <= 0 || cfg.WakeWait > time.Hour {
		errs = append(errs, fmt.Errorf("cannot use wake-wait: %s is not above 0 and at most 1h", cfg.WakeWait))
	}
	if _, _, err := cfg.budget(); err != nil {
		errs = append(errs, fmt.Errorf("cannot use memory: %w", err))
	}
	if cfg.Machine != "q35" && cfg.Machine != "microvm" {
		errs = append(errs, fmt.Errorf("cannot use vm-machine: %q is neither q35 nor microvm", cfg.Machine))
	}
	if abs, err := filepath.Abs(cfg.Data); err == nil {
		cfg.Data = abs
	}
	return cfg, out, errors.Join(errs...)
}

// readConfigFile reads a flat YAML mapping with the line of each entry.
func readConfigFile(file string) (map[string]*yaml.Node, []error) {
	out := map[string]*yaml.Node{}
	if file == "" {
		return out, nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return out, []error{fmt.Errorf("cannot read the config file: %w", err)}
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(b, &doc); err != nil {
		return out, []error{fmt.Errorf("cannot read %s: %w", file, err)}
	}
	if len(doc.Content) == 0 {
		return out, nil
	}
	m := doc.Content[0]
	if m.Kind != yaml.MappingNode {
		return out, []error{fmt.Errorf("cannot read %s, line %d: want name: value", file, m.Line)}
	}
	var errs []error
	for i := 0; i+1 < len(m.Content); i += 2 {
		k, v := m.Content[i], m.Content[i+1]
		if v.Kind != yaml.ScalarNode {
			errs = append(errs, fmt.Errorf("cannot use %s in %s, line %d: want a single value", k.Value, file, v.Line))
			continue
		}
		out[k.Value] = v
	}
	return out, errs
}

// bindFlags declares the flags; their values are read by resolve.
func bindFlags(f *pflag.FlagSet, getenv func(string) string) {
	def := defaultHostConfig(getenv)
	for _, o := range hostOptions {
		p := o.bind(&def)
		if _, ok := p.(*bool); ok {
			f.Bool(o.Name, false, o.Doc)
			continue
		}
		f.String(o.Name, text(p), fmt.Sprintf("%s ($%s)", o.Doc, o.Env))
		if o.Name == "docker" {
			f.Lookup(o.Name).NoOptDefVal = dockerSocket
		}
	}
}

func (c *cli) configCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Print effective settings and where each came from", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	var file string
	host := &cobra.Command{Use: "host", Short: "Settings of lull host", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, l, err := resolve(c.getenv, file, cmd.Flags())
			if err != nil {
				return &usageError{err}
			}
			return c.print(l, func(w io.Writer) {
				t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
				fmt.Fprintln(t, "SETTING\tVALUE\tSOURCE\tVARIABLE\tMEANING")
				for _, s := range l {
					fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", s.Name, dash(s.Value), s.Source, s.Env, s.Doc)
				}
				t.Flush()
			})
		}}
	host.Flags().StringVar(&file, "config", "", "YAML file of settings")
	bindFlags(host.Flags(), c.getenv)
	cmd.AddCommand(host, c.agentConfigCommand(), c.configServer())
	return cmd
}

// hostSettingsPage is the generated reference of lull host's settings.
func hostSettingsPage() string {
	var b strings.Builder
	b.WriteString("# Settings of lull host\n\nGenerated from cmd/lull/hostconfig.go. Precedence: flag, environment, config file (`--config`), default.\n\n")
	b.WriteString("| setting | flag | environment | unit | default | meaning |\n|---|---|---|---|---|---|\n")
	def := defaultHostConfig(func(string) string { return "" })
	def.Socket = "/run/lull/host.sock (root), $XDG_RUNTIME_DIR/lull/host.sock"
	for _, o := range hostOptions {
		fmt.Fprintf(&b, "| %s | `--%s` | `%s` | %s | %s | %s |\n", o.Name, o.Name, o.Env, o.Unit, text(o.bind(&def)), o.Doc)
	}
	return b.String()
}
