//go:build linux && !portable

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"lull/internal/cli/term"
	"lull/internal/core/instance"
	"lull/internal/host"
	"lull/internal/lib/unixsock"
	"lull/internal/protocol/hostctl"
	"lull/internal/runtime/process"
)

// Help texts that differ between platforms.
const (
	intro = `To see it work, run lull demo. To run instances on this machine, start lull host, then
use lull run.`
	where      = "on this machine"
	agentShort = "Stop this machine when it is idle"
)

func (c *cli) hostCommand() *cobra.Command {
	var file string
	var open *bool
	cmd := &cobra.Command{
		Use:   "host",
		Short: "Run and manage instances on this machine", Example: "  lull host\n  lull host --pause-after 30s --stop-after 10m",
		Long: `Run instances on this machine: freeze them when idle, and wake them on the first
packet.

The host runs as root or as an ordinary user. When it exits, it thaws paused
instances and leaves running ones running. --stop-all stops them all.`,
		Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := resolve(c.Getenv, file, cmd.Flags())
			if err != nil {
				return term.Usage(err)
			}
			if *open && cfg.Listen == "" {
				cfg.Listen = openAddress
			}
			return c.runHost(cmd.Context(), cfg, *open)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "YAML config file")
	open = cmd.Flags().Bool("open", false, "serve the dashboard (on "+openAddress+" without --listen) and print a link that signs a browser in, once")
	bindFlags(cmd.Flags(), c.Getenv)
	return cmd
}

// runHost opens everything that a host daemon needs and runs the daemon until ctx
// ends.
func (c *cli) runHost(ctx context.Context, cfg hostConfig, open bool) error {
	debug.SetGCPercent(50) // the daemon keeps thousands of records and produces little garbage
	d := &hostDaemon{cli: c, openPage: open, cfg: cfg, getenv: c.Getenv, log: slog.New(slog.NewTextHandler(c.Err, nil)), faults: raiseFiles(uint64(cfg.Files)),
		runtimes: map[string]host.Runtime{}, missing: map[string]error{}}
	defer d.close()
	for _, open := range []func(context.Context) error{d.openRecords, d.openListeners, d.openProcesses, d.openSharedPort, d.openGuests, d.openDocker, d.openLogs, d.openRelay, d.openHost} {
		if err := open(ctx); err != nil {
			return err
		}
	}
	return d.run(ctx)
}

// hostMetrics returns a registry with the metrics of h and of this process.
func hostMetrics(h *host.Host) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(h.Collector(), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return reg
}

// identify returns the instance that a process belongs to, by asking every runtime.
func identify(runtimes map[string]host.Runtime, pid int) (string, error) {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(runtimes)) {
		if r, ok := runtimes[name].(instance.Identifier); ok {
			id, err := r.Identify(pid)
			if err == nil {
				return id, nil
			}
			errs = append(errs, err)
		}
	}
	return "", errors.Join(errs...)
}

// raiseFiles raises the limit of open files to the requested number, or as far
// as possible, and logs how many instances that allows.
func raiseFiles(want uint64) (faults []string) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return []string{"cannot read the limit of open files: " + err.Error()}
	}
	up := unix.Rlimit{Cur: max(l.Cur, want), Max: max(l.Max, want)}
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &up) == nil {
		return nil
	}
	up = unix.Rlimit{Cur: l.Max, Max: l.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &up); err != nil || l.Max < want {
		return []string{fmt.Sprintf("open files are limited to %d, %d were requested: at most about %d instances can be paused at once; raise it with ulimit -n or LimitNOFILE=", l.Max, want, l.Max/3)}
	}
	return nil
}

// hostSockets opens the API's socket with mode 0600 and, beside it, LULL_SOCKET. Any
// local user may connect to LULL_SOCKET, because the kernel identifies the caller.
func hostSockets(path string) (api, guests *unixsock.Listener, err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, nil, fmt.Errorf("cannot create the socket's directory: %w", err)
	}
	if api, err = unixsock.Listen(path, 0o600); err != nil {
		return nil, nil, err
	}
	if guests, err = unixsock.Listen(guestPath(path), 0o666); err != nil {
		return nil, nil, errors.Join(err, api.Close())
	}
	return api, guests, nil
}

// baseEnv returns the part of this process's environment that every instance
// gets.
func baseEnv(getenv func(string) string) []string {
	var env []string
	for _, k := range []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR"} {
		if v := getenv(k); v != "" {
			env = append(env, k+"="+v)
		}
	}
	return env
}

func hostStatus(h *host.Host, rt *process.Runtime, cfg hostConfig, started time.Time, faults []string) hostctl.Status {
	s := hostctl.Status{Version: version, PID: os.Getpid(), StartedAt: started, Halt: h.Halted(), DataDir: cfg.Data,
		Instances: map[string]int{}, Room: h.Capacity(), Freezer: rt.Freezer(), Shim: rt.Shim(), Goroutines: runtime.NumGoroutine(), Faults: append(append([]string{}, faults...), h.Misset()...), Missing: map[string]string{}}
	for name, why := range h.Missing() {
		s.Missing[name] = why.Error()
	}
	s.Halted = s.Halt != nil
	for _, o := range h.List(false) {
		s.Instances[o.State]++
	}
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil {
		s.FileLimit = l.Cur
	}
	if d, err := os.ReadDir("/proc/self/fd"); err == nil {
		s.OpenFiles = len(d)
	}
	return s
}
