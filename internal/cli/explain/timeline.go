package explain

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
	"lull/internal/core/policy/when"
	"lull/internal/protocol/control"
)

// WorkerTimeline returns the verb lull worker timeline.
func WorkerTimeline(s *client.Session) *cobra.Command {
	cmd := timelineCommand(s, "timeline WORKER", "Show when a worker ran, slept and was idle", func(ctx context.Context, cl *control.Client, ref string) (string, error) {
		w, err := cl.Known(ctx, ref)
		return "/workers/" + w.ID, err
	})
	cmd.Example, cmd.ValidArgsFunction = "  lull worker timeline cml-1 --since 2d", s.CompleteWorkers
	return cmd
}

// AgentTimeline returns the verb lull agent timeline.
func AgentTimeline(s *client.Session) *cobra.Command {
	cmd := timelineCommand(s, "timeline MACHINE", "Show when an agent's machine was in use and idle", func(_ context.Context, _ *control.Client, machine string) (string, error) {
		return "/agents/" + url.PathEscape(machine), nil
	})
	cmd.Example = "  lull agent timeline ws-1 --since 2d"
	return cmd
}

// timelineCommand returns a verb that prints the timeline at the API path that path
// returns for the arguments.
func timelineCommand(s *client.Session, use, short string, path func(ctx context.Context, cl *control.Client, ref string) (string, error)) *cobra.Command {
	var from, to string
	cmd := &cobra.Command{Use: use, Short: short, Args: term.Args(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, a []string) error {
			start, end, err := period(time.Now(), from, to)
			if err != nil {
				return err
			}
			cl, err := s.ServerClient()
			if err != nil {
				return err
			}
			at, err := path(cmd.Context(), cl, a[0])
			if err != nil {
				return err
			}
			q := url.Values{}
			for name, t := range map[string]time.Time{"from": start, "to": end} {
				if !t.IsZero() {
					q.Set(name, t.Format(time.RFC3339Nano))
				}
			}
			v, err := control.Read[control.Timeline](cmd.Context(), cl, at+"/timeline?"+q.Encode())
			if err != nil {
				return err
			}
			return s.Print(v, func(w io.Writer) { timelineText(w, v) })
		}}
	cmd.Flags().StringVar(&from, "since", "", "start of the period: "+when.PastForms+" (default: a day ago)")
	cmd.Flags().StringVar(&to, "until", "", "end of the period, in the same forms (default: now)")
	return cmd
}

func timelineText(w io.Writer, v control.Timeline) {
	fmt.Fprintf(w, "%s to %s\n", term.Time(v.From), term.Time(v.To))
	if len(v.Power) > 0 {
		term.Rows(w, "FROM\tUNTIL\tSTATUS", func(row func(string, ...any)) {
			for _, p := range v.Power {
				row("%s\t%s\t%s", term.Time(p.From), term.Time(p.To), term.Dash(p.Status))
			}
		})
	}
	if len(v.Verdicts) == 0 {
		fmt.Fprintln(w, "No checks were recorded in this period.")
		return
	}
	fmt.Fprintln(w)
	term.Rows(w, "FROM\tUNTIL\tUSE\tREASON", func(row func(string, ...any)) {
		for _, d := range v.Verdicts {
			use := "active"
			if d.IsIdle {
				use = "idle"
			}
			row("%s\t%s\t%s\t%s", term.Time(d.From), term.Time(d.To), use, d.Reason)
		}
	})
	for _, m := range v.Missing {
		fmt.Fprintf(w, "missing %s to %s: %s %s\n", term.Time(m.From), term.Time(m.To), m.Server, m.Why)
	}
}
