package instance

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/platform/systemd"
	"lull/internal/protocol/hostctl"
)

func (c verbs) adoptCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "adopt", Short: "Pause and wake programs that lull did not start", Args: term.Args(cobra.NoArgs),
		Long: `Pause and wake programs that lull did not start. They stay where they are: no process is
moved, and none is signaled to end. When one is idle, it is frozen; the next
connection to a port that it listens on wakes it.

An adopted program is an instance like any other for ps, why, top, pause, resume,
snooze, lease and events. lull cannot start it, so stop and restart are refused, and
rm releases it. It is released when it ends.

A systemd unit and a container can be stopped and started again, by systemd or Docker.
They stay adopted when they end or are started anew.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(c.adoptPID(), c.adoptCgroup(), c.adoptUnit(), c.adoptContainer(), c.adoptList(), c.adoptRelease())
	return cmd
}

// adoptFlags are the flags that all kinds of adopt share.
type adoptFlags struct {
	name      string
	pause     time.Duration
	probes    []string
	schedules []string
}

func (f *adoptFlags) bind(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.name, "name", "", "name of the instance (default: that of what is adopted)")
	term.BindSpan(cmd.Flags(), &f.pause, "pause-after", 0, "idle timeout until it is paused; 0 never pauses (default: 1m, or that of lull host --pause-after, if something can wake it)")
	bindSignals(cmd, &f.probes, &f.schedules)
}

// bindSignals adds the flags of probes and timers.
func bindSignals(cmd *cobra.Command, probes, schedules *[]string) {
	cmd.Flags().StringArrayVar(probes, "probe", nil, "activity probe, KIND[,SETTING=VALUE...]:TARGET; repeatable, see lull run")
	cmd.Flags().StringArrayVar(schedules, "wake-schedule", nil, "time at which it must run, as in a crontab (\"*/10 * * * *\", \"@every 10m\"): it is woken 2 s before; repeatable")
}

// parseProbes parses probes in their short form.
func parseProbes(texts []string) (probes []instance.Probe, err error) {
	for _, text := range texts {
		p, err := instance.ParseProbe(text)
		if err != nil {
			return nil, err
		}
		probes = append(probes, p)
	}
	instance.NameProbes(probes)
	return probes, nil
}

// adopt adopts a program and prints the new instance.
func (c verbs) adopt(cmd *cobra.Command, f adoptFlags, q hostctl.Adopt) error {
	q.Name, q.Caller = f.name, os.Getpid()
	if f.name != "" {
		if err := instance.ValidName(f.name); err != nil {
			return term.Usage(err)
		}
	}
	if cmd.Flags().Changed("pause-after") {
		d := idle.Duration(f.pause)
		q.PauseAfter = &d
	}
	probes, err := parseProbes(f.probes)
	if err != nil {
		return term.Usage(err)
	}
	q.Probes, q.WakeSchedule = probes, f.schedules
	cl, err := c.HostClient()
	if err != nil {
		return err
	}
	o, err := cl.Adopt(cmd.Context(), q)
	if err != nil {
		return err
	}
	return c.Print(o, func(w io.Writer) {
		fmt.Fprintf(w, "%s is adopted (%s)%s\n%s\n", o.Name, adoptedText(o), endpointsText(o), adoptedLadder(o, q.PauseAfter != nil))
		for _, b := range o.Blocks {
			if b.Code == "unwatchable_socket" {
				fmt.Fprintln(c.Err, "lull:", b.Sentence)
			}
		}
	})
}

// adoptedText returns what an adopted instance was made from.
func adoptedText(o hostctl.Instance) string {
	switch {
	case o.Runtime == instance.RuntimeDocker:
		return "container " + o.Image
	case o.Adopted == nil:
		return "-"
	case o.Adopted.Cgroup != "":
		return "control group " + o.Adopted.Cgroup
	case o.Adopted.IsUnit() && o.Adopted.Manager != "":
		return "unit " + o.Adopted.Unit + " of user " + o.Adopted.Manager
	case o.Adopted.IsUnit():
		return "unit " + o.Adopted.Unit
	}
	return fmt.Sprintf("process %d", o.Adopted.PID)
}

// adoptedLadder returns one line about when an adopted instance is paused and what
// wakes it. asked means that --pause-after was given.
func adoptedLadder(o hostctl.Instance, asked bool) string {
	switch {
	case o.PauseAfter == 0:
		return "never pauses automatically"
	case o.Runtime == instance.RuntimeDocker && o.StopAfter > 0:
		return "pauses after " + seconds(o.PauseAfter) + " idle, stops " + seconds(o.StopAfter) + " later, wakes on connect"
	case o.Runtime == instance.RuntimeDocker && o.WakesOnConnection:
		return "pauses after " + seconds(o.PauseAfter) + " idle, wakes on connect"
	case len(o.Endpoints) > 0:
		if o.Wakes {
			return fmt.Sprintf("pauses after %s idle, stops %s later, wakes on connect", seconds(o.PauseAfter), seconds(o.StopAfter))
		}
		return "pauses after " + seconds(o.PauseAfter) + " idle, wakes on connect"
	case asked:
		return fmt.Sprintf("pauses after %s idle; it listens on no port, so only lull resume %s is certain to wake it", seconds(o.PauseAfter), o.Name)
	}
	return "is not paused when idle unless something can wake it: it listens on no port; set --pause-after to pause it anyway"
}

func (c verbs) adoptPID() *cobra.Command {
	var f adoptFlags
	cmd := &cobra.Command{Use: "pid PID", Short: "Adopt a process and its descendants", Args: term.Args(cobra.ExactArgs(1)),
		Long: `Adopt a process and its descendants. They are frozen with SIGSTOP, which a shell that
started them in the foreground reports. A process that leaves the tree (a daemon of a
daemon) before lull has seen it is not part of it: adopt its control group instead.`,
		Example:           "  lull adopt pid 4711\n  lull adopt pid \"$(pgrep -o nginx)\" --name web --pause-after 10m",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, a []string) error {
			pid, err := strconv.Atoi(a[0])
			if err != nil || pid < 1 {
				return term.Usage(fmt.Errorf("cannot use %q as a process ID: want a positive number", a[0]))
			}
			return c.adopt(cmd, f, hostctl.Adopt{PID: pid})
		}}
	f.bind(cmd)
	return cmd
}

func (c verbs) adoptCgroup() *cobra.Command {
	var f adoptFlags
	cmd := &cobra.Command{Use: "cgroup PATH", Short: "Adopt the processes of a control group", Args: term.Args(cobra.ExactArgs(1)),
		Long: `Adopt the processes of a control group and of the groups below it. They are frozen
with the group's own freezer (cgroup.freeze, or freezer.state of version 1), so
processes that join it later are frozen too.

PATH is its directory, or its path as in /proc/PID/cgroup.`,
		Example: "  lull adopt cgroup /sys/fs/cgroup/apps/web\n  lull adopt cgroup /apps/web --name web --pause-after 10m",
		RunE: func(cmd *cobra.Command, a []string) error {
			path := a[0]
			if !filepath.IsAbs(path) {
				wd, err := os.Getwd()
				if err != nil {
					return fmt.Errorf("cannot find the working directory: %w", err)
				}
				path = filepath.Join(wd, path)
			}
			return c.adopt(cmd, f, hostctl.Adopt{Cgroup: path})
		}}
	f.bind(cmd)
	return cmd
}

func (c verbs) adoptContainer() *cobra.Command {
	var f adoptFlags
	var stop time.Duration
	cmd := &cobra.Command{Use: "container NAME", Short: "Adopt a container of Docker's", Args: term.Args(cobra.ExactArgs(1)),
		Long: `Adopt a container of Docker's, by its name or ID. It is paused with docker pause, and a
connection to one of its ports wakes it.

It needs no label, and stays adopted when it is created again: a container of a
Compose project by its project, service and number, any other by its name. The host
must follow Docker: lull host --docker.`,
		Example:           "  lull adopt container web --pause-after 10m\n  lull adopt container shop-db-1 --name db --pause-after 10m --stop-after 2h",
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, a []string) error {
			q := hostctl.Adopt{Container: a[0]}
			if cmd.Flags().Changed("stop-after") {
				d := idle.Duration(stop)
				q.StopAfter = &d
			}
			return c.adopt(cmd, f, q)
		}}
	f.bind(cmd)
	term.BindSpan(cmd.Flags(), &stop, "stop-after", 0, "time from the pause until it is stopped; 0 never stops (default: 0)")
	return cmd
}

func (c verbs) adoptUnit() *cobra.Command {
	var f adoptFlags
	var stopAfter time.Duration
	var stop, dropIn, yes, dry bool
	var user string
	cmd := &cobra.Command{Use: "unit NAME", Short: "Adopt a systemd service", Args: term.Args(cobra.ExactArgs(1)),
		Long: `Adopt a systemd service. systemd freezes and thaws it, so systemctl shows its state.
What systemctl does is followed: a unit that is stopped there stays stopped, one that
is restarted stays adopted, and a frozen one is thawed first.

With --stop, a unit that was paused for a while is stopped, and started when a client
connects to one of its TCP ports. Clients that connect before it listens are held, and
relayed by lull. A host that does not run as root can hold only the first of them.

With --drop-in too, nothing is relayed, unix sockets and UDP ports start the unit too,
and no client is refused: lull keeps the unit's sockets while it is stopped, and hands
them back when its program binds. The drop-in has systemd execute lull-shim, which
becomes the program. It is shown and confirmed before it is written, is removed by lull
adopt release, and applies from the next start of the unit.`,
		Example:           "  lull adopt unit nginx --pause-after 5m\n  lull adopt unit redis-server --stop --stop-after 1h\n  lull adopt unit nginx --stop --drop-in --dry-run\n  lull adopt unit --user jupyter.service",
		ValidArgsFunction: c.completeUnits,
		RunE: func(cmd *cobra.Command, a []string) error {
			q := hostctl.Adopt{Unit: a[0], Stop: stop}
			if q.Manager = uidOf(user); user != "" && q.Manager == "" {
				return term.Usage(fmt.Errorf("cannot use --user=%s: want a user ID", user))
			}
			if cmd.Flags().Changed("stop-after") {
				if !stop {
					return term.Usage(errors.New("--stop-after needs --stop"))
				}
				d := idle.Duration(stopAfter)
				q.StopAfter = &d
			}
			if q.DropIn = dropIn; dropIn {
				if !stop {
					return term.Usage(errors.New("--drop-in needs --stop"))
				}
				if ok, err := c.confirmDropIn(cmd, q, yes, dry); err != nil || !ok {
					return err
				}
			} else if yes || dry {
				return term.Usage(errors.New("--yes and --dry-run need --drop-in"))
			}
			return c.adopt(cmd, f, q)
		}}
	f.bind(cmd)
	cmd.Flags().BoolVar(&dropIn, "drop-in", false, "with --stop: hand the unit its sockets with a drop-in, instead of relaying connections")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "with --drop-in: do not ask for confirmation")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "with --drop-in: show the drop-in and change nothing")
	cmd.Flags().BoolVar(&stop, "stop", false, "stop the unit once it has been paused for --stop-after, and start it on the next connection")
	term.BindSpan(cmd.Flags(), &stopAfter, "stop-after", 0, "with --stop: time from pause to stop (default: 5m, or that of lull host --stop-after)")
	cmd.Flags().StringVar(&user, "user", "", "the unit belongs to a user's systemd: your own, or with --user=UID another user's")
	cmd.Flags().Lookup("user").NoOptDefVal = self
	return cmd
}

// confirmDropIn shows the drop-in of a unit and asks whether to write it. ok is false
// for a dry run.
func (c verbs) confirmDropIn(cmd *cobra.Command, q hostctl.Adopt, yes, dry bool) (ok bool, err error) {
	q.Caller = os.Getpid()
	cl, err := c.HostClient()
	if err != nil {
		return false, err
	}
	d, err := cl.DropIn(cmd.Context(), q)
	if err != nil {
		return false, err
	}
	show := func(w io.Writer) {
		fmt.Fprintf(w, "%s:\n\n%s\n", d.Path, d.Text)
		for _, n := range d.Notes {
			fmt.Fprintln(w, n)
		}
	}
	if dry {
		return false, c.Print(d, show)
	}
	show(c.Err)
	switch {
	case yes:
		return true, nil
	case !term.IsTerminal(c.In):
		return false, term.Usage(errors.New("cannot write the drop-in without confirmation: no terminal; pass --yes"))
	}
	fmt.Fprint(c.Err, "Write it and reload systemd? [y/N] ")
	line, err := bufio.NewReader(io.LimitReader(c.In, 1024)).ReadString('\n')
	if err != nil && line == "" {
		return false, fmt.Errorf("cannot read the confirmation: %w", err)
	}
	if a := strings.ToLower(strings.TrimSpace(line)); a != "y" && a != "yes" {
		return false, errors.New("nothing was changed: the drop-in was not confirmed")
	}
	return true, nil
}

// self is the value of --user if it is given without one.
const self = "self"

// uidOf returns the user ID for a value of --user; "" if there is none.
func uidOf(user string) string {
	if user == self {
		return strconv.Itoa(os.Getuid())
	}
	if _, err := strconv.ParseUint(user, 10, 31); err != nil {
		return ""
	}
	return user
}

// completeUnits completes arguments with the names of running services.
func (c verbs) completeUnits(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(a) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	socket := systemd.SystemSocket
	if user, err := cmd.Flags().GetString("user"); err == nil && uidOf(user) != "" {
		socket = systemd.UserSocket(uidOf(user))
	}
	m := systemd.New(socket)
	defer m.Close()
	names, err := m.Names(cmd.Context(), ".service")
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

func (c verbs) adoptList() *cobra.Command {
	cmd := &cobra.Command{Use: "ls", Short: "List adopted programs", Args: term.Args(cobra.NoArgs),
		Example: "  lull adopt ls\n  lull adopt ls --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			l, err := cl.Adopted(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				term.Rows(w, "NAME\tSTATE\t3:IDLE FOR\t4:NEXT\t1:ADOPTED\t2:PORTS", func(row func(string, ...any)) {
					for _, o := range l {
						row("%s\t%s\t%s\t%s\t%s\t%s", o.Name, stateText(o), idleText(o), next(o), adoptedText(o), ports(o))
					}
				})
			})
		}}
	return c.Watchable(cmd)
}

func (c verbs) adoptRelease() *cobra.Command {
	return &cobra.Command{Use: "release NAME...", Short: "Thaw adopted programs and forget them", Args: term.Args(cobra.MinimumNArgs(1)),
		Long:              "Thaw adopted programs and forget them. They run on, as they did before lull adopted them.",
		Example:           "  lull adopt release web",
		ValidArgsFunction: c.completeAdopted,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			var name string
			return c.eachName(cmd, a, func(n string) error { name = n; return cl.ReleaseAdopted(cmd.Context(), n) }, func() {
				if !c.JSON {
					fmt.Fprintln(c.Out, name, "is released.")
				}
			})
		}}
}

// completeAdopted completes arguments with the names of adopted programs.
func (c verbs) completeAdopted(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
	cl, err := c.HostClient()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	l, err := cl.Adopted(cmd.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []string
	for _, o := range l {
		names = append(names, o.Name+"\t"+o.State)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
