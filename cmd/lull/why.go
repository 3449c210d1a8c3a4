package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/link/hostctl"
)

func (c *cli) whyCommand() *cobra.Command {
	return &cobra.Command{Use: "why NAME", Short: "Say why an instance runs, or why it was paused or stopped", Args: args(cobra.ExactArgs(1)), ValidArgsFunction: c.complete,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			y, err := cl.Why(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			return c.print(y, func(w io.Writer) { whyText(w, y) })
		}}
}

func whyText(w io.Writer, y hostctl.Why) {
	fmt.Fprintf(w, "%s: %s?\n%s\n", y.Instance.Name, y.Question, y.Answer)
	if y.Instance.State == "running" && len(y.Instance.Activity) > 0 {
		fmt.Fprintln(w)
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "SIGNAL\tVERDICT\tVALUE\tCOUNTS FROM\tWINDOW\tREAD")
		for _, r := range y.Instance.Activity {
			value := fmt.Sprintf("%g %s", r.Value, r.Unit)
			if r.State.String() == "unknown" {
				value = r.Detail
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%g\t%s\t%s ago\n", r.Signal, r.State, value, r.Threshold, span(time.Duration(r.Window)), span(max(time.Since(r.At), 0)))
		}
		t.Flush()
	}
	if len(y.Verdict.Blocks) > 0 && y.Instance.State == "running" {
		fmt.Fprintln(w)
		for _, b := range y.Verdict.Blocks {
			fmt.Fprintf(w, "  %-18s %s\n", b.Code, b.Sentence)
		}
	}
	for n, s := range y.Change {
		if n == 0 {
			fmt.Fprintln(w, "\nTo change that:")
		}
		fmt.Fprintln(w, "  "+s)
	}
	if r := y.Relay; r != nil {
		fmt.Fprintf(w, "\nrelay: %d accepted, %d relayed, %d waiting, %d clients gone, %d refused, %d failed wakes\n",
			r.Accepted, r.Relayed, r.Waiting, r.ClientsGone, r.Refused, r.FailedWakes)
		for rule, n := range r.Ignored {
			fmt.Fprintf(w, "relay: %d ignored by %s\n", n, rule)
		}
	}
}

func (c *cli) eventsCommand() *cobra.Command {
	var follow bool
	var since string
	cmd := &cobra.Command{Use: "events", Short: "Show what happened, and with -f what happens", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithCancel(cmd.Context())
			defer cancel()
			if !follow {
				// What is kept comes at once; a pause in it is the end.
				t := time.AfterFunc(time.Second, cancel)
				defer t.Stop()
			}
			enc := json.NewEncoder(c.out)
			return cl.Events(ctx, since, func(e hostctl.Event) error {
				if c.json {
					return enc.Encode(e)
				}
				who := e.By
				if who != "" {
					who = " by " + who
				}
				_, err := fmt.Fprintf(c.out, "%s  %-16s %s -> %s%s  %s\n", e.Time.Local().Format("15:04:05.000"), e.Type, e.Instance, e.State, who, e.Reason)
				return err
			})
		}}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on as more happen")
	cmd.Flags().StringVar(&since, "since", "", "a sequence number, or now")
	return cmd
}

func (c *cli) snoozeCommand() *cobra.Command {
	var until string
	var dur time.Duration
	cmd := &cobra.Command{Use: "snooze NAME", Short: "Keep an instance running until a time", Args: args(cobra.ExactArgs(1)), ValidArgsFunction: c.complete,
		Example: "  lull snooze web --until 18:00\n  lull snooze web --for 2h",
		RunE: func(cmd *cobra.Command, a []string) error {
			t, err := moment(time.Now(), until, dur)
			if err != nil {
				return &usageError{err}
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			o, err := cl.Snooze(cmd.Context(), a[0], t)
			if err != nil {
				return err
			}
			return c.print(o, func(w io.Writer) { fmt.Fprintf(w, "%s stays until %s\n", o.Name, t.Local().Format(time.DateTime)) })
		}}
	bindEnd(cmd.Flags(), &until, &dur)
	return cmd
}

func (c *cli) haltCommand() *cobra.Command {
	var off bool
	cmd := &cobra.Command{Use: "halt", Short: "Stop all automatic actions of the host; --off lets them go on", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.client()
			if err != nil {
				return err
			}
			s, err := cl.Halt(cmd.Context(), !off)
			if err != nil {
				return err
			}
			return c.print(s, func(w io.Writer) {
				if s.Halted {
					fmt.Fprintln(w, c.red("HALTED: nothing is paused or stopped automatically; end it with: lull halt --off"))
				} else {
					fmt.Fprintln(w, "automatic actions go on")
				}
			})
		}}
	cmd.Flags().BoolVar(&off, "off", false, "let automatic actions go on")
	return cmd
}
