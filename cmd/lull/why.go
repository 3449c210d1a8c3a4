package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/link/hostctl"
)

func (c *cli) whyCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "why NAME", Short: "Say why an instance runs, or why it was paused or stopped; now or at a past time", Args: args(cobra.ExactArgs(1)), ValidArgsFunction: c.complete,
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
			return c.print(y, func(w io.Writer) { whyText(w, y) })
		}}
	atFlag(cmd)
	return cmd
}

func whyText(w io.Writer, y hostctl.Why) {
	accountText(w, y.Account)
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
