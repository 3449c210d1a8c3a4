//go:build linux

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"lull/internal/edge/cgroup"
)

func (c *cli) doctorCommand() *cobra.Command {
	return &cobra.Command{Use: "doctor", Short: "Say what this machine lacks for running instances, and what to do", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := resolve(c.getenv, "", cmd.Flags())
			if err != nil {
				return &usageError{err}
			}
			l := slices.Concat(hostFindings(), containerFindings(cmd.Context(), cfg), machineFindings(cfg), c.serverFinding(cmd.Context(), cfg))
			bad := 0
			for _, f := range l {
				if !f.OK && !f.Optional {
					bad++
				}
			}
			err = c.print(l, func(w io.Writer) {
				t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
				for _, f := range l {
					mark := "ok"
					switch {
					case !f.OK && f.Optional:
						mark = "not here"
					case !f.OK:
						mark = "MISSING"
					}
					fmt.Fprintf(t, "%s\t%s\t%s\n", mark, f.What, f.Found)
					if f.Do != "" {
						fmt.Fprintf(t, "\t\t-> %s\n", f.Do)
					}
				}
				t.Flush()
			})
			if err == nil && bad > 0 {
				err = &exitError{exitFailed}
			}
			return err
		}}
}

func hostFindings() []finding {
	var l []finding
	add := func(what string, ok bool, found, do string) {
		if ok {
			do = ""
		}
		l = append(l, finding{What: what, OK: ok, Found: found, Do: do})
	}
	if p, err := cgroup.Find("doctor"); err == nil {
		add("freezer", true, fmt.Sprintf("%s at %s", p.Kind, p.Dir), "")
	} else {
		add("freezer", true, "signals: programs are stopped with SIGSTOP, which they can notice", "")
		l[len(l)-1].Do = "for the cgroup freezer run as root, or delegate a control group (systemd: Delegate=yes)"
	}
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err == nil {
		unix.Close(fd)
	}
	add("pidfd", err == nil, "needed to watch the sockets of frozen programs (Linux 5.6)", "use a newer kernel; without it only the relay path pauses")
	yama := "not in this kernel"
	if b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil {
		yama = strings.TrimSpace(string(b))
	}
	add("yama", yama != "3", "ptrace_scope "+yama, "ptrace_scope 3 forbids watching sockets: use the relay path (--expose LISTEN:TARGET)")
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		add("open files", lim.Max >= 4096 || os.Geteuid() == 0, fmt.Sprintf("at most %d: about %d paused instances", lim.Max, lim.Max/3), "raise it: ulimit -n, or LimitNOFILE= in the unit")
	}
	self, err := os.Executable()
	shim := filepath.Join(filepath.Dir(self), "lull-shim")
	if err == nil {
		_, err = os.Stat(shim)
	}
	add("lull-shim", err == nil, shim, "build it with: make build")
	swap := "none: reclaim frees only file-backed memory"
	if b, err := os.ReadFile("/proc/swaps"); err == nil && strings.Count(string(b), "\n") > 1 {
		swap = "present"
	}
	add("swap", true, swap, "")
	return l
}
