package explain

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/protocol/hostctl"
)

// workerWhy explains the state of a worker.
func (c verbs) workerWhy(cmd *cobra.Command, a []string) error {
	at, err := AtTime(cmd)
	if err != nil {
		return err
	}
	cl, err := c.ServerClient()
	if err != nil {
		return err
	}
	w, err := cl.Known(cmd.Context(), a[0])
	if err != nil {
		return err
	}
	y, err := cl.Why(cmd.Context(), w.ID, at)
	if err != nil {
		return err
	}
	c.ShowHalt(cmd.Context())
	return c.Print(y, func(w io.Writer) {
		if at.IsZero() && y.Readings == "unknown" {
			fmt.Fprintln(w, "Live readings are not available: the server that observes the worker did not answer. The following is from the worker's record.")
		}
		AccountText(w, y.Account, at)
		now, then := y.Policy, y.PolicyThen
		if then != nil {
			fmt.Fprintf(w, "\npolicy then: %s\n", policyThen(then))
		} else if c := y.Checked; now == nil && c != nil {
			fmt.Fprintf(w, "\npolicy then: unknown, no check was recorded at that time; the last one was at %s\n", term.Time(c.At))
		} else if now == nil {
			fmt.Fprintln(w, "\npolicy then: unknown, no check was recorded at or before that time")
		}
		if now != nil {
			fmt.Fprintf(w, "\npolicy %s (%s)\n", now.Name, now.From["idle_timeout"])
			RulesText(w, *now)
			if y.ActivitySourcesReason != "" {
				fmt.Fprintf(w, "sources: %s\n", y.ActivitySourcesReason)
			}
		}
		if len(y.Last) > 0 {
			fmt.Fprintln(w)
			entryTable(w, y.Last)
		}
	})
}

// policyThen describes the policy of a recorded check.
func policyThen(p *idle.Policy) string {
	text := fmt.Sprintf("%s, idle after %s", term.Dash(p.Name), term.Span(time.Duration(p.Timeout)))
	if p.Action != "" {
		text += ", then " + p.Action
	}
	if b := p.WarnsBefore(); b > 0 {
		text += fmt.Sprintf("; warned %s before", term.Span(b))
	}
	if p.Snooze > 0 {
		text += fmt.Sprintf("; protected for %s after a resume", term.Span(time.Duration(p.Snooze)))
	}
	if !p.Detection || !p.AutoPause {
		text += "; pausing was disabled"
	}
	return text
}

func (c verbs) whyCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "why NAME", Short: "Explain why an instance or worker runs or sleeps", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteInstances,
		Long: `Explain why an instance or worker runs, or why, when and by whom it was paused or
stopped: each signal with its value, threshold, window and age, every reason against a
pause, the next check and the earliest pause, and what would change them. NAME is an
instance of a host or a worker of a server.

The command asks the host, or the server if --server is given or only LULL_SERVER is
set. With both LULL_HOST and LULL_SERVER set, names unknown to the host are looked up
at the server.`,
		Example: "  lull why web\n  lull why web --at 03:30\n  lull why web --at 2h",
		RunE: func(cmd *cobra.Command, a []string) error {
			at, err := AtTime(cmd)
			if err != nil {
				return err
			}
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			y, err := cl.Why(cmd.Context(), a[0], at)
			if err != nil {
				return err
			}
			st, err := cl.Status(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(y, func(w io.Writer) {
				c.ShowHostHalt(w, st)
				whyText(w, y, at)
			})
		}}
	AtFlag(cmd)
	return cmd
}

func whyText(w io.Writer, y hostctl.Why, at time.Time) {
	AccountText(w, y.Account, at)
	if r := y.Relay; r != nil {
		fmt.Fprintf(w, "\nrelay: %d accepted, %d relayed, %d waiting, %d clients gone, %d refused, %d failed wakes\n",
			r.Accepted, r.Relayed, r.Waiting, r.ClientsGone, r.Refused, r.FailedWakes)
		for rule, n := range r.Ignored {
			fmt.Fprintf(w, "relay: %d ignored by %s\n", n, rule)
		}
	}
}

func (c verbs) workerWhyCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "why WORKER", Short: "Explain why a worker runs or was stopped", Example: "  lull worker why cml-1\n  lull worker why cml-1 --at 03:30", Args: term.Args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.CompleteWorkers, RunE: c.workerWhy}
	AtFlag(cmd)
	return cmd
}
