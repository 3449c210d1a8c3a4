//go:build linux && !portable

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"lull/internal/cli/term"
	"lull/internal/lib/elfcheck"
	"lull/internal/platform/cgroup"
	"lull/internal/protocol/hostctl"
	"lull/internal/shim"
)

func (c *cli) doctorCommand() *cobra.Command {
	return &cobra.Command{Use: "doctor", Short: "Check this machine for missing prerequisites", Example: "  lull doctor", Args: term.Args(cobra.NoArgs),
		Long: `Check what lull host needs on this machine, for each runtime, and how to get what is
missing. Exit code 1 means that something is missing that every instance needs.
See also lull server doctor and lull agent doctor.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := resolve(c.Getenv, "", cmd.Flags())
			if err != nil {
				return term.Usage(err)
			}
			run, rerr := c.runningHost(cmd.Context())
			if rerr == nil {
				cfg.Data = run.DataDir
			}
			here := slices.Concat(hostFindings(cfg), containerFindings(cmd.Context(), cfg), machineFindings(cfg))
			if rerr == nil {
				here = append(here, runningFindings(run, here)...)
			}
			return c.ShowFindings(append(here, serverFinding(cfg, run, rerr)...))
		}}
}

// runningHost returns the status of this machine's running host.
func (c *cli) runningHost(ctx context.Context) (hostctl.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	cl, err := c.HostClient()
	if err != nil {
		return hostctl.Status{}, err
	}
	return cl.Status(ctx)
}

// runningFindings returns findings about the running host, from the host's own
// report. Its prerequisites may differ from those that this process found, which are
// in here.
func runningFindings(run hostctl.Status, here term.Findings) (l term.Findings) {
	l.Add("host", true, fmt.Sprintf("version %s runs as process %d since %s, with its data in %s", run.Version, run.PID, term.Time(run.StartedAt), run.DataDir), "")
	if len(run.Faults) > 0 { // each fault says what to do
		l.Hint(strings.Join(run.Faults, "; "))
	}
	for _, name := range slices.Sorted(maps.Keys(run.Missing)) {
		lacks := func(f term.Finding) bool { return !f.OK && strings.HasPrefix(f.What, name+": ") }
		if !slices.ContainsFunc(here, lacks) {
			l.Optional(name+": running host", errors.New("available here, but not to the host: "+run.Missing[name]), "", "restart the host with the same PATH and user; its instances continue to run")
		}
	}
	return l
}

func hostFindings(cfg hostConfig) (l term.Findings) {
	if p, err := cgroup.Find("doctor"); err == nil {
		l.Add("freezer", true, fmt.Sprintf("%s at %s", p.Kind, p.Dir), "")
	} else {
		l.Add("freezer", true, "signals: programs are stopped with SIGSTOP, which they can notice", "")
		l.Hint("to use the cgroup freezer, run as root or delegate a control group (systemd: Delegate=yes)")
	}
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err == nil {
		unix.Close(fd)
	}
	l.Add("pidfd", err == nil, "needed to watch the sockets of frozen programs (Linux 5.6)", "use a newer kernel; without it only the relay path can pause programs")
	yama := "not supported by this kernel"
	if b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil {
		yama = strings.TrimSpace(string(b))
	}
	l.Add("yama", yama != "3", "ptrace_scope "+yama, "ptrace_scope 3 forbids watching sockets: use the relay path (--expose LISTEN:TARGET)")
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		l.Add("open files", lim.Max >= 4096 || os.Geteuid() == 0, fmt.Sprintf("at most %d: enough for about %d paused instances", lim.Max, lim.Max/3), "raise it: ulimit -n, or LimitNOFILE= in the unit")
	}
	what, file, err := describeHelper(cfg.Shim, cfg.Data, shim.Name)
	if file != "" {
		err = elfcheck.Static(file)
	}
	if err != nil {
		what = err.Error()
	}
	l.Add("lull-shim", err == nil, what, "build it with make build, or set its path with --shim")
	swap := "none: reclaim frees only file-backed memory"
	if b, err := os.ReadFile("/proc/swaps"); err == nil && strings.Count(string(b), "\n") > 1 {
		swap = "present"
	}
	l.Add("swap", true, swap, "")
	return l
}
