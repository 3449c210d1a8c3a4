package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/core/policy/when"
	"lull/internal/protocol/hostctl"
)

func (c *cli) whyCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "why NAME", Short: "Explain why an instance or worker runs or sleeps", Args: args(cobra.ExactArgs(1)), ValidArgsFunction: c.complete,
		Long: `Explain why an instance or worker runs, or why, when and by whom it was paused or
stopped: each signal with its value, threshold, window and age, every reason against a
pause, the next check and the earliest pause, and what would change them. NAME is an
instance of a host or a worker of a server.

The command asks the host, or the server if --server is given or only LULL_SERVER is
set. With both LULL_HOST and LULL_SERVER set, names unknown to the host are looked up
at the server.`,
		Example: "  lull why web\n  lull why web --at 03:30\n  lull why web --at 2h",
		RunE: func(cmd *cobra.Command, a []string) error {
			at, err := atTime(cmd)
			if err != nil {
				return err
			}
			cl, err := c.client()
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
			return c.print(y, func(w io.Writer) {
				c.tellHostHalt(w, st)
				whyText(w, y, at)
			})
		}}
	atFlag(cmd)
	return cmd
}

func whyText(w io.Writer, y hostctl.Why, at time.Time) {
	accountText(w, y.Account, at)
	if r := y.Relay; r != nil {
		fmt.Fprintf(w, "\nrelay: %d accepted, %d relayed, %d waiting, %d clients gone, %d refused, %d failed wakes\n",
			r.Accepted, r.Relayed, r.Waiting, r.ClientsGone, r.Refused, r.FailedWakes)
		for rule, n := range r.Ignored {
			fmt.Fprintf(w, "relay: %d ignored by %s\n", n, rule)
		}
	}
}

func eventText(w io.Writer, e hostctl.Event) {
	who := e.By
	if who != "" {
		who = " by " + who
	}
	fmt.Fprintf(w, "%s  %-16s %s -> %s%s  %s\n", e.Time.Local().Format("15:04:05.000"), e.Type, e.Instance, e.State, who, e.Reason)
}

func (c *cli) eventsCommand() *cobra.Command {
	var follow bool
	var since string
	cmd := &cobra.Command{Use: "events", Short: "Show events, and with -f follow them", Args: args(cobra.NoArgs),
		Long:    "Show events of instances or workers, oldest first. The command asks the host, or the\nserver if --server is given or only LULL_SERVER is set.",
		Example: "  lull events\n  lull events -f --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			seq, from, err := eventsFrom(time.Now(), since)
			if err != nil {
				return err
			}
			missing := func(why string) { fmt.Fprintf(c.err, "lull: %s; events may be missing here\n", why) }
			if follow {
				enc := json.NewEncoder(c.out)
				return cl.Follow(cmd.Context(), seq, missing, func(e hostctl.Event) error {
					if e.Time.Before(from) {
						return nil
					}
					if c.json {
						return enc.Encode(e)
					}
					eventText(c.out, e)
					return nil
				})
			}
			var l []hostctl.Event
			if err := cl.Kept(cmd.Context(), seq, missing, func(e hostctl.Event) error {
				if !e.Time.Before(from) {
					l = append(l, e)
				}
				return nil
			}); err != nil {
				return err
			}
			return c.print(l, func(w io.Writer) {
				for _, e := range l {
					eventText(w, e)
				}
			})
		}}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "keep printing new entries; --json prints one per line")
	cmd.Flags().StringVar(&since, "since", "", "start of the period: now, "+when.PastForms+"; for a host also a sequence number")
	return cmd
}

// eventsFrom is where a host's events begin: at a sequence number or now, which
// it knows, or at a time.
func eventsFrom(now time.Time, since string) (seq string, from time.Time, err error) {
	if _, err := strconv.ParseUint(since, 10, 64); err == nil || since == "now" {
		return since, from, nil
	}
	if from, err = pastMoment(now, since); err != nil {
		err = &usageError{err}
	}
	return "", from, err
}

func (c *cli) snoozeCommand() *cobra.Command {
	var e endFlags
	cmd := &cobra.Command{Use: "snooze NAME", Short: "Keep an instance or worker running until a time", Args: args(cobra.ExactArgs(1)), ValidArgsFunction: c.complete,
		Long: `Keep an instance or worker running until a time: it is not paused or stopped
automatically before then. Snoozes are for users; programs use leases. The command
applies to the host, or to the server if --server is given or only LULL_SERVER is set.
For a machine with an agent: lull agent snooze.`,
		Example: "  lull snooze web --until 18:00\n  lull snooze web --for 2h\n  lull snooze web --off",
		RunE: func(cmd *cobra.Command, a []string) error {
			t, err := e.end(time.Now())
			if err != nil {
				return err
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			o, err := cl.Snooze(cmd.Context(), a[0], t)
			if err != nil {
				return err
			}
			return c.print(o, func(w io.Writer) {
				if e.off {
					fmt.Fprintf(w, "snooze of %s ended\n", o.Name)
					return
				}
				fmt.Fprintf(w, "%s stays until %s\n", o.Name, t.Local().Format(time.DateTime))
			})
		}}
	e.bind(cmd.Flags(), "end the snooze")
	return c.orServer(cmd, func(cmd *cobra.Command, a []string) error { return c.protect(cmd, a[0], &e) })
}
