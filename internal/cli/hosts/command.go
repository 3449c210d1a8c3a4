package hosts

import (
	"cmp"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/protocol/control"
)

// commands returns the verbs that act on an instance of a host through the
// server.
func (c verbs) commands() []*cobra.Command {
	verb := func(verb, short, past string) *cobra.Command {
		return &cobra.Command{Use: verb + " HOST INSTANCE", Short: short, Example: "  lull host " + verb + " desk web",
			RunE: func(cmd *cobra.Command, a []string) error { return c.command(cmd, a, verb, false, nil, past) }}
	}
	pause := verb(control.HostPause, "Pause an instance of a host", "is paused")
	force := pause.Flags().Bool("force", false, "even if connections or leases hold it")
	pause.RunE = func(cmd *cobra.Command, a []string) error {
		return c.command(cmd, a, control.HostPause, *force, nil, "is paused")
	}
	var e term.EndFlags
	snooze := &cobra.Command{Use: "snooze HOST INSTANCE", Short: "Protect an instance of a host from automatic pauses",
		Example: "  lull host snooze desk web --for 2h\n  lull host snooze desk web --off",
		RunE: func(cmd *cobra.Command, a []string) error {
			until, err := e.End(time.Now())
			if err != nil {
				return err
			}
			in, past := control.Snooze{}, "is no longer snoozed"
			if !until.IsZero() {
				in.Until, past = until.UTC().Format(time.RFC3339), "stays until "+term.Time(until)
			}
			return c.command(cmd, a, control.HostSnooze, false, in, past)
		}}
	e.Bind(snooze.Flags(), "end the snooze")
	all := []*cobra.Command{pause, verb(control.HostResume, "Resume a paused instance of a host", "is running"),
		verb(control.HostStart, "Start an instance of a host", "is running"), verb(control.HostStop, "Stop an instance of a host", "is stopped"), snooze, c.hostLogs()}
	for _, cmd := range all {
		cmd.Args, cmd.ValidArgsFunction = term.Args(cobra.ExactArgs(2)), c.completeHosts
		cmd.Long = cmd.Short + `, through the server that the host reports to. The host must
accept commands from its server (lull host --server-commands).`
	}
	return all
}

// command gives a command to an instance of a host and prints the outcome. An unknown
// outcome is an error.
func (c verbs) command(cmd *cobra.Command, a []string, verb string, force bool, in any, past string) error {
	cl, err := c.ServerClient()
	if err != nil {
		return err
	}
	o, err := cl.CommandHost(cmd.Context(), a[0], a[1], verb, force, in)
	if err != nil {
		return err
	}
	if err := c.Print(o, func(w io.Writer) {
		if o.Outcome == "done" {
			fmt.Fprintf(w, "%s on %s %s\n", a[1], a[0], past)
		}
	}); err != nil || o.Outcome == "done" {
		return err
	}
	return fmt.Errorf("unknown whether %s on %s was carried out: %s. Check with: lull host why %s %s", verb, a[0], cmp.Or(o.Detail, "the host has not answered"), a[0], a[1])
}

func (c verbs) hostLogs() *cobra.Command {
	cmd := &cobra.Command{Use: "logs HOST INSTANCE", Short: "Print the last lines of an instance of a host", Example: "  lull host logs desk web --tail 50"}
	lines := cmd.Flags().Int("tail", control.DefaultHostLines, fmt.Sprintf("lines from the end, at most %d and 64 KiB", control.MaxHostLogLines))
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		cl, err := c.ServerClient()
		if err != nil {
			return err
		}
		l, err := cl.HostLogs(cmd.Context(), a[0], a[1], *lines)
		if err != nil {
			return err
		}
		if l.Cut {
			fmt.Fprintln(c.Err, "Earlier lines are omitted: at most 64 KiB are shown.")
		}
		return c.Print(l, func(w io.Writer) { fmt.Fprint(w, l.Text) })
	}
	return cmd
}
