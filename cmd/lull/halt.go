package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/core/idle"
	"lull/internal/fleet"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
	"lull/internal/protocol/hostctl"
)

// haltFlags are those of a halt, wherever it is.
type haltFlags struct {
	off    bool
	reason string
	until  string
	dur    time.Duration
}

func (h *haltFlags) bind(f *pflag.FlagSet) {
	f.BoolVar(&h.off, "off", false, "lift the halt")
	f.StringVar(&h.reason, "reason", "", "reason, shown wherever the halt is shown")
	bindEnd(f, &h.until, &h.dur)
}

// end is when the halt ends by itself; nil for never.
func (h *haltFlags) end(now time.Time) (*time.Time, error) {
	ends := h.until != "" || h.dur != 0
	switch {
	case h.off && (ends || h.reason != ""):
		return nil, &usageError{errors.New("cannot combine --off with a reason or an end: it lifts the halt now")}
	case len(h.reason) > idle.MaxHaltReason:
		return nil, &usageError{fmt.Errorf("cannot use --reason: longer than %d bytes", idle.MaxHaltReason)}
	case !ends:
		return nil, nil
	}
	t, err := moment(now, h.until, h.dur)
	if err != nil {
		return nil, &usageError{err}
	}
	return &t, nil
}

// endText is an end as every API takes it; empty for none.
func endText(t *time.Time) string {
	if t == nil {
		return ""
	}
	return t.Format(time.RFC3339Nano)
}

// haltLine is the answer to a halt that just began or ended: what it means, and
// how it ends.
func (c *cli) haltLine(on bool, until *time.Time, means, verb string) string {
	switch {
	case !on:
		return "automatic actions resumed"
	case until != nil:
		return c.red(fmt.Sprintf("HALTED: %s until %s; lift it earlier with: %s --off", means, clockTime(*until), verb))
	}
	return c.red(fmt.Sprintf("HALTED: %s; lift it with: %s --off", means, verb))
}

func (c *cli) haltCommand() *cobra.Command {
	var h haltFlags
	cmd := &cobra.Command{Use: "halt", Short: "Stop all automatic actions of a host or fleet", Args: args(cobra.NoArgs),
		Long: `Stop all automatic actions within five seconds. Nothing is paused, stopped, drained
or started unless a user asks for it; clients still wake sleeping instances. A halt
survives restarts and is shown in red everywhere, with its author, time and reason,
until --off or its end.

The command applies to the host, or to the server if --server is given or only
LULL_SERVER is set. For a machine with an agent: lull agent halt.`,
		Example: "  lull halt --reason \"network is down\" --for 2h\n  lull halt --until tomorrow\n  lull halt --off\n  lull halt --server https://lull.example.com:7070",
		RunE: func(cmd *cobra.Command, _ []string) error {
			until, err := h.end(time.Now())
			if err != nil {
				return err
			}
			if c.asksServer() {
				return c.fleetHalt(cmd.Context(), h, until)
			}
			cl, err := c.client()
			if err != nil {
				return err
			}
			s, err := cl.Halt(cmd.Context(), hostctl.Halting{On: !h.off, Reason: h.reason, Until: endText(until)})
			if err != nil {
				return err
			}
			return c.print(s, func(w io.Writer) {
				if h.off && s.Halt != nil && s.Halt.Fleet {
					fmt.Fprintln(w, c.red("The fleet is halted, not the host itself."))
					c.tellHostHalt(w, s)
					return
				}
				fmt.Fprintln(w, c.haltLine(s.Halted, until, "nothing is paused or stopped automatically", "lull halt"))
			})
		}}
	h.bind(cmd.Flags())
	return cmd
}

// fleetHalt is lull halt for a server.
func (c *cli) fleetHalt(ctx context.Context, h haltFlags, until *time.Time) error {
	cl, err := c.control()
	if err != nil {
		return err
	}
	is, err := control.Write[fleet.Halt](ctx, cl, "POST", "/halt", control.Halting{On: !h.off, Reason: h.reason, Until: endText(until)})
	if err != nil {
		return err
	}
	return c.print(is, func(w io.Writer) {
		fmt.Fprintln(w, c.haltLine(is.On, is.Until, "no worker is paused, stopped or started automatically", "lull halt"))
	})
}

func (c *cli) agentHalt() *cobra.Command {
	var h haltFlags
	cmd := c.onAgent(&cobra.Command{Use: "halt", Short: "Stop all automatic actions on this machine", Args: args(cobra.NoArgs),
		Long: `Stop all automatic actions of the agent, deadlines and completions included. A halt
survives restarts and lasts until --off or its end.`,
		Example: "  lull agent halt --reason \"demo today\" --until 18:00\n  lull agent halt --off"},
		func(cmd *cobra.Command, _ []string, cl *agentctl.Client) error {
			until, err := h.end(time.Now())
			if err != nil {
				return err
			}
			s, err := cl.Halt(cmd.Context(), agentctl.HaltRequest{On: !h.off, Reason: h.reason, Until: until})
			if err != nil {
				return err
			}
			return c.print(s, func(w io.Writer) {
				fmt.Fprintln(w, c.haltLine(s.Halted != nil, until, "this machine is not stopped automatically", "lull agent halt"))
			})
		})
	h.bind(cmd.Flags())
	return cmd
}

// underHalt makes a verb that lists or explains say first that everything
// automatic is halted, where it is: on a fleet by whom, since when, until when
// and why. JSON has it in the objects that have a place for it.
func (c *cli) underHalt(cmd *cobra.Command) *cobra.Command {
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		flagged := func(name string) bool { f := cmd.Flags().Lookup(name); return f != nil && f.Changed }
		if flagged("follow") { // it continues, so its output cannot be buffered
			c.tellHalt(cmd.Context())
			return run(cmd, a)
		}
		out, said := c.out, new(bytes.Buffer)
		c.out = said // what is wrong with its flags is told before anybody is asked
		err := run(cmd, a)
		c.out = out
		if said.Len() > 0 && !flagged("csv") {
			c.tellHalt(cmd.Context())
		}
		_, werr := said.WriteTo(out)
		return errors.Join(err, werr)
	}
	return cmd
}

// tellHalt is silent about a fleet that cannot be asked: the verb says that.
func (c *cli) tellHalt(ctx context.Context) {
	if c.json {
		return
	}
	cl, err := c.control()
	if err != nil {
		return
	}
	h, err := control.Read[fleet.Halt](ctx, cl, "/halt")
	if err == nil && h.On {
		fmt.Fprintln(c.out, c.red("HALTED: "+h.Sentence()+" No worker is paused, stopped or started automatically. Lift it with: lull halt --off"))
	}
}

// tellHostHalt is tellHalt of a host.
func (c *cli) tellHostHalt(w io.Writer, s hostctl.Status) {
	if h := s.Halt; h != nil {
		fmt.Fprintln(w, c.red("HALTED: "+h.Sentence("Automatic actions on this host are")+" Lift it with: "+c.endOfHalt(h, "lull halt --off", s.Server)))
	}
}

// endOfHalt is the command that ends h: verb, or the fleet's with its server.
func (c *cli) endOfHalt(h *idle.HaltedBy, verb string, l *hostctl.ServerLink) string {
	switch {
	case !h.Fleet:
		return verb
	case l != nil && l.URL != "":
		return "lull halt --off --server " + l.URL
	}
	return "lull halt --off --server URL"
}
