package instance

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/policy/when"
	"lull/internal/protocol/hostctl"
)

func (c verbs) instanceCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "instance", Short: "Start, stop, pause, resume, inspect and remove instances", Args: term.Args(cobra.NoArgs),
		Long: `Every verb of lull instance but clone and set is also a verb of lull itself:
lull stop web is lull instance stop web.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(c.powerCommands()...)
	cmd.AddCommand(c.cloneCommand(), c.rmCommand(), c.inspectCommand(), c.setCommand(), c.logsCommand(), c.execCommand())
	return cmd
}

// powerCommands returns the verbs start, restart, stop, pause and resume.
func (c verbs) powerCommands() (out []*cobra.Command) {
	for _, v := range []struct {
		name, short, long, flag, doc string
	}{
		{"start", "Start or resume instances", "", "", ""},
		{"restart", "Stop and start instances", restartHelp, "", ""},
		{"stop", "Stop instances", "Thaw an instance if it is paused, ask it to exit, and kill it after --stop-grace. A manual stop always works.", "disable", "and do not wake it until you start it"},
		{"pause", "Pause instances now", "Refused, with the reason, while a connection or lease holds the instance. With --force, connections stay open, data on one of them wakes the instance, and --stop-after does not stop it while they are open.", "force", "pause even if connections or leases hold it"},
		{"resume", "Resume paused instances", "", "", ""},
	} {
		var on bool
		sub := &cobra.Command{Use: v.name + " NAME...", Short: v.short, Args: term.Args(cobra.MinimumNArgs(1)), ValidArgsFunction: c.CompleteInstances,
			Long: v.long, Example: "  lull " + v.name + " web\n  lull " + v.name + " web db",
			RunE: func(cmd *cobra.Command, names []string) error {
				q := url.Values{}
				if on {
					q.Set(v.flag, "true")
				}
				return c.do(cmd, names, v.name, q)
			}}
		if v.flag != "" {
			sub.Flags().BoolVar(&on, v.flag, false, v.doc)
		}
		out = append(out, sub)
	}
	return out
}

const restartHelp = `Stop and start an instance. Connections to its exposed ports wait until it accepts
them; none is refused. A stopped instance is started.`

// do carries out a verb for each name, even after one fails. Ctrl-C does not cancel
// what the daemon has begun.
func (c verbs) do(cmd *cobra.Command, names []string, verb string, q url.Values) error {
	cl, err := c.HostClient()
	if err != nil {
		return err
	}
	var done []hostctl.Instance
	err = c.eachName(cmd, names, func(name string) error {
		return c.watched(cmd.Context(), cl, name, func() error {
			o, err := cl.Do(cmd.Context(), name, verb, q)
			if err == nil {
				done = append(done, o)
			}
			return err
		})
	}, func() {
		if !c.JSON {
			fmt.Fprintln(c.Out, doneText(verb, done[len(done)-1]))
		}
	})
	switch {
	case !c.JSON || len(names) == 1 && len(done) == 0:
		return err
	case len(names) == 1:
		return errors.Join(c.Print(done[0], nil), err)
	default:
		return errors.Join(c.Print(done, nil), err)
	}
}

// doneText returns the state of an instance after a verb, and how to reverse the
// verb.
func doneText(verb string, o hostctl.Instance) string {
	switch {
	case verb == "stop" && o.State == "stopped":
		return fmt.Sprintf("%s is stopped. Start it with: lull start %s", o.Name, o.Name)
	case verb == "pause" && o.State == "paused" && o.WakesOnConnection:
		return fmt.Sprintf("%s is paused. A connection wakes it, or: lull resume %s", o.Name, o.Name)
	case verb == "pause" && o.State == "paused":
		return fmt.Sprintf("%s is paused. Resume it with: lull resume %s", o.Name, o.Name)
	}
	return fmt.Sprintf("%s is %s.", o.Name, o.State)
}

// eachName calls do for each name and then succeeded unless do failed. With
// several names, each error is shown at once, and the result has the exit code of
// the first.
func (c verbs) eachName(cmd *cobra.Command, names []string, do func(name string) error, succeeded func()) error {
	var first error
	for _, name := range names {
		err := do(name)
		if err == nil {
			succeeded()
			continue
		}
		if len(names) == 1 || cmd.Context().Err() != nil {
			return err
		}
		c.Complain(err)
		if first == nil {
			first = term.Exit(term.ExitCode(err))
		}
	}
	return first
}

func (c verbs) cloneCommand() *cobra.Command {
	var expose []string
	var workspace bool
	cmd := &cobra.Command{Use: "clone SOURCE NEW", Short: "Clone an instance from a hibernated instance's snapshot", Args: term.Args(cobra.ExactArgs(2)), ValidArgsFunction: c.CompleteInstances,
		Long: `Clone an instance from a hibernated instance's snapshot. The clone starts asleep, with
the memory, files and programs of the source, and shares with it what neither
changes. It has its own network, host name and random seed. The first client of one
of its ports wakes it.

A paused source is hibernated first. A source that runs, or has open connections, is
refused. The clone does not share the source's workspace unless --workspace is
given; without it, programs that use the workspace see I/O errors.`,
		Example: "  lull pause web\n  lull instance clone web web2 --expose 8081:80",
		RunE: func(cmd *cobra.Command, a []string) error {
			r := hostctl.Clone{Name: a[1], Workspace: workspace}
			if err := instance.ValidName(a[1]); err != nil {
				return term.Usage(err)
			}
			for _, e := range expose {
				ep, err := instance.ParseExpose(e, "")
				if err != nil {
					return term.Usage(err)
				}
				r.Expose = append(r.Expose, ep)
			}
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			var o hostctl.Instance
			if err := c.watched(cmd.Context(), cl, a[1], func() error { o, err = cl.Clone(cmd.Context(), a[0], r); return err }); err != nil {
				return err
			}
			return c.Print(o, func(w io.Writer) { fmt.Fprintf(w, "%s %s%s\n", o.Name, o.State, endpointsText(o)) })
		}}
	cmd.Flags().StringArrayVarP(&expose, "expose", "p", nil, "expose a port or unix socket: PORT, HOST:PORT, LISTEN:TARGET or HOST:LISTEN:HOST:TARGET, /udp behind it for UDP, or unix:PATH; repeatable")
	cmd.Flags().BoolVar(&workspace, "workspace", false, "share the source's workspace with the clone")
	return cmd
}

func (c verbs) rmCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "rm NAME...", Short: "Stop and remove instances", Example: "  lull rm web", Args: term.Args(cobra.MinimumNArgs(1)), ValidArgsFunction: c.CompleteInstances,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			var name string
			return c.eachName(cmd, a, func(n string) error { name = n; return cl.Remove(cmd.Context(), n) }, func() {
				if !c.JSON {
					fmt.Fprintln(c.Out, name, "is removed.")
				}
			})
		}}
	cmd.Flags().BoolP("force", "f", false, "accepted for compatibility with docker rm: lull rm always stops a running instance")
	cmd.Flags().Lookup("force").Hidden = true
	return cmd
}

func (c verbs) inspectCommand() *cobra.Command {
	var format string
	cmd := &cobra.Command{Use: "inspect NAME", Aliases: []string{"info"}, Short: "Show an instance in detail", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteInstances,
		Example: "  lull inspect web\n  lull inspect web --format '{{.pid}}'",
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			o, err := cl.Get(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			if format != "" {
				return term.Formatted(c.Out, format, o)
			}
			return c.Print(o, func(w io.Writer) { infoText(w, o) })
		}}
	cmd.Flags().StringVar(&format, "format", "", term.FormatHelp)
	term.Exclusive(cmd, "format", "json", "output")
	return cmd
}

func (c verbs) setCommand() *cobra.Command {
	var pause, reclaim, hibernate, stop, quiet, grace time.Duration
	var policy, restart string
	var wake bool
	cmd := &cobra.Command{Use: "set NAME", Short: "Change timers, wake and restart settings of an instance", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteInstances,
		Long: `Change timers, wake and restart settings of an instance. Changes apply at once, in
every state, and are permanent. Settings that are not given stay as they are. For a
sleeping instance the timers count from when it was paused, so a step that is
already due is taken immediately.`,
		Example: "  lull instance set web --pause-after 10m\n  lull instance set vm --hibernate-after 30m --stop-after 1d",
		RunE: func(cmd *cobra.Command, a []string) error {
			var in hostctl.Change
			n := 0
			set := func(flag string, put func()) {
				if cmd.Flags().Changed(flag) {
					n++
					put()
				}
			}
			length := func(to **idle.Duration, d time.Duration) func() {
				return func() { v := idle.Duration(d); *to = &v }
			}
			set("pause-after", length(&in.PauseAfter, pause))
			set("reclaim-after", length(&in.ReclaimAfter, reclaim))
			set("hibernate-after", length(&in.HibernateAfter, hibernate))
			set("stop-after", length(&in.StopAfter, stop))
			set("quiet-connection-after", length(&in.QuietConnectionAfter, quiet))
			set("stop-grace", length(&in.StopGrace, grace))
			set("idle-policy", func() { in.IdlePolicy = &policy })
			set("wake-from-stopped", func() { in.WakeFromStopped = &wake })
			set("restart", func() { in.Restart = (*instance.Restart)(&restart) })
			if n == 0 {
				return term.Usage(errors.New("nothing to change: give at least one setting, such as --pause-after 10m"))
			}
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			o, err := cl.Change(cmd.Context(), a[0], in)
			if err != nil {
				return err
			}
			return c.Print(o, func(w io.Writer) { infoText(w, o) })
		}}
	f := cmd.Flags()
	term.BindSpan(f, &pause, "pause-after", 0, "idle timeout until it is paused; 0 never pauses")
	term.BindSpan(f, &reclaim, "reclaim-after", 0, "time in paused until its memory is paged out; 0 disables it")
	term.BindSpan(f, &hibernate, "hibernate-after", 0, "time in paused until it is hibernated to disk; 0 disables it")
	term.BindSpan(f, &stop, "stop-after", 0, "time in paused until it is stopped; 0 never stops")
	term.BindSpan(f, &quiet, "quiet-connection-after", 0, "ignore connections, inbound and outbound, without traffic for this long, unless a request is unanswered (the last bytes came from the side that asks); 0 disables it")
	term.BindSpan(f, &grace, "stop-grace", 0, "time between the request to exit and the kill; 0 means 10s")
	f.StringVar(&policy, "idle-policy", "", "default, or leases_only to ignore its own activity")
	f.BoolVar(&wake, "wake-from-stopped", true, "start it on a connection after lull stopped it; if set to true explicitly, also after it exited by itself")
	f.StringVar(&restart, "restart", "", "no, on-failure or always")
	term.CompleteWords(cmd, "idle-policy", instance.PolicyDefault, instance.PolicyLeasesOnly)
	term.CompleteWords(cmd, "restart", string(instance.RestartNo), string(instance.RestartOnFailure), string(instance.RestartAlways))
	return cmd
}

// timersText returns when an unused instance is paused, paged out, hibernated and
// stopped.
func timersText(o hostctl.Instance) string {
	span := func(seconds float64) string { return idle.Human(time.Duration(seconds * float64(time.Second))) }
	if o.PauseAfter == 0 {
		return "never paused automatically"
	}
	var later []string
	for _, s := range []struct {
		name  string
		after float64
	}{{"reclaimed", o.ReclaimAfter}, {"hibernated", o.HibernateAfter}, {"stopped", o.StopAfter}} {
		if s.after > 0 {
			later = append(later, s.name+" after "+span(s.after))
		}
	}
	text := "paused after " + span(o.PauseAfter)
	if len(later) > 0 {
		text += ", and from then on " + strings.Join(later, ", ")
	}
	return text
}

func infoText(w io.Writer, o hostctl.Instance) {
	t := term.Table(w)
	row := func(k, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", k, fmt.Sprintf(format, args...)) }
	at := func(p *time.Time) string {
		if p == nil {
			return "never"
		}
		return term.Time(*p)
	}
	row("name", "%s (%s)", o.Name, o.ID)
	row("state", "%s since %s: %s", stateText(o), at(o.StateSince), term.Localized(o.StatusReason))
	row("next", "%s", next(o))
	row("command", "%q", o.Command)
	row("process", "%d, runtime %s, %s resident", o.PID, o.Runtime, term.Size(o.MemoryBytes))
	if o.Adopted != nil {
		row("adopted", "%s; lull did not start it", adoptedText(o))
	}
	if o.Workspace != "" {
		row("workspace", "%s", o.Workspace)
	}
	if o.Image != "" {
		row("image", "%s, memory limit %s, net %s", o.Image, term.Dash(limit(o.MemoryLimit)), term.Dash(o.Net))
	}
	if o.Unavailable != "" {
		row("unknown", "%s", o.Unavailable)
	}
	row("timers", "%s", timersText(o))
	if o.Misset != "" {
		row("settings", "%s; change them with: lull instance set %s", o.Misset, o.Name)
	}
	if o.Trouble != "" {
		row("trouble", "%s", o.Trouble)
	}
	if o.SavedBytes > 0 {
		row("on disk", "%s", term.Size(o.SavedBytes))
	}
	if o.BootedAnew != "" {
		row("cold-booted", "%s", o.BootedAnew)
	}
	row("last activity", "%s", at(o.LastActivityAt))
	row("last paused", "%s by %s, %s", at(o.LastPausedAt), term.Dash(o.LastPausedBy), term.Count(o.PauseCount, "pause"))
	row("last resumed", "%s by %s, %s", at(o.LastResumedAt), term.Dash(o.LastResumedBy), term.Count(o.WakeCount, "wake"))
	row("restarts", "%d", o.RestartCount)
	row("policy", "%s, pauses after %s idle%s, stops %s after the pause", o.IdlePolicy, seconds(o.PauseAfter), deeper(o), seconds(o.StopAfter))
	for _, e := range o.Endpoints {
		row("port", "%s to %s, %s path: %s", e.Listen, e.Target, e.Path, e.Why)
	}
	for _, l := range o.Leases {
		row("lease", "%s until %s: %s", l.Holder, term.Time(l.ExpiresAt), term.Dash(l.Reason))
	}
	readings(t, o)
	t.Flush()
}

func readings(w io.Writer, o hostctl.Instance) {
	for _, r := range o.Activity {
		s := fmt.Sprintf("%s, %s, counts from %s", r.State, idle.Amount(r.Value, r.Unit), idle.Amount(r.Threshold, r.Unit))
		if r.State.String() == "unknown" {
			s = "unknown: " + r.Detail
		}
		fmt.Fprintf(w, "signal %s\t%s\n", r.Signal, s)
	}
}

// deeper returns the steps between the pause and the stop of an instance.
func deeper(o hostctl.Instance) (s string) {
	if o.ReclaimAfter > 0 {
		s += ", gives memory back " + seconds(o.ReclaimAfter) + " after the pause"
	}
	if o.HibernateAfter > 0 {
		s += ", goes to disk " + seconds(o.HibernateAfter) + " after the pause"
	}
	return s
}

func limit(n int64) string {
	if n == 0 {
		return ""
	}
	return term.Size(n)
}

func seconds(f float64) string {
	if f == 0 {
		return "never"
	}
	return term.Span(time.Duration(f * float64(time.Second)))
}

func (c verbs) logsCommand() *cobra.Command {
	var l hostctl.Logs
	var since, until string
	cmd := &cobra.Command{Use: "logs NAME", Short: "Show the output of an instance", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteInstances,
		Long: `Show the output of an instance. --console shows the kernel console of a microVM
instead, of this run and earlier ones, even if it did not boot.

lull stores the time of each line beside the log, accurate to 0.1 s. The times of a
Docker container's lines are Docker's. Lines logged by a version without times are
marked with - and selected by --since if they can be recent enough.`,
		Example: "  lull logs web\n  lull logs -f -n 20 web\n  lull logs -t --since 10m web",
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			now := time.Now()
			if l.Since, err = term.Past(now, since); err != nil {
				return term.Usage(fmt.Errorf("--since: %w", err))
			}
			if l.Until, err = term.Past(now, until); err != nil {
				return term.Usage(fmt.Errorf("--until: %w", err))
			}
			if !c.JSON {
				return cl.Logs(cmd.Context(), a[0], l, c.Out)
			}
			l.Times = true
			return c.logsJSON(l.Follow, func(w io.Writer) error { return cl.Logs(cmd.Context(), a[0], l, w) })
		}}
	cmd.Flags().BoolVarP(&l.Follow, "follow", "f", false, "keep printing new output; --json prints one line per object")
	cmd.Flags().BoolVarP(&l.Times, "timestamps", "t", false, "prefix each line with its time")
	cmd.Flags().StringVar(&since, "since", "", "first time to show: "+when.PastForms)
	cmd.Flags().StringVar(&until, "until", "", "last time to show: "+when.PastForms)
	term.Exclusive(cmd, "follow", "until")
	cmd.Flags().IntVarP(&l.Tail, "tail", "n", -1, "number of lines from the end; -1 shows all that is stored")
	cmd.Flags().BoolVar(&l.Console, "console", false, "show the kernel console instead of the output (microVMs only)")
	return cmd
}

// logLine is one line of output in JSON. Time is null if unknown.
type logLine struct {
	Time *time.Time `json:"time"`
	Line string     `json:"line"`
}

// logsJSON prints lines of output as JSON. read writes the lines, each beginning with
// its time. With follow it prints one object per line, otherwise an array.
func (c verbs) logsJSON(follow bool, read func(io.Writer) error) error {
	r, w := io.Pipe()
	go func() { w.CloseWithError(read(w)) }()
	defer r.Close()
	in := bufio.NewReader(r)
	all, enc := []logLine{}, json.NewEncoder(c.Out)
	for {
		text, err := in.ReadString('\n')
		if text != "" {
			var l logLine
			stamp, rest, _ := strings.Cut(text, " ")
			if t, err := time.Parse(time.RFC3339Nano, stamp); err == nil {
				l.Time = &t
			}
			l.Line = strings.TrimSuffix(rest, "\n")
			if !follow {
				all = append(all, l)
			} else if err := enc.Encode(l); err != nil {
				return err
			}
		}
		switch {
		case err == io.EOF && !follow:
			return c.Print(all, nil)
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}
