package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/fleet/halt"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
	"lull/internal/protocol/hostctl"
)

// haltFlags are the flags of lull halt, whatever its target.
type haltFlags struct {
	off    bool
	reason string
	until  string
	dur    time.Duration
}

func (h *haltFlags) bind(f *pflag.FlagSet) {
	f.BoolVar(&h.off, "off", false, "lift the halt")
	f.StringVar(&h.reason, "reason", "", "reason, shown wherever the halt is shown")
	term.BindEnd(f, &h.until, &h.dur)
}

// end returns when the requested halt ends by itself; nil if it has no end.
func (h *haltFlags) end(now time.Time) (*time.Time, error) {
	ends := h.until != "" || h.dur != 0
	switch {
	case h.off && (ends || h.reason != ""):
		return nil, term.Usage(errors.New("cannot combine --off with --reason, --until or --for: --off lifts the halt now"))
	case len(h.reason) > idle.MaxHaltReason:
		return nil, term.Usage(fmt.Errorf("cannot use --reason: longer than %d bytes", idle.MaxHaltReason))
	case !ends:
		return nil, nil
	}
	t, err := term.End(now, h.until, h.dur)
	if err != nil {
		return nil, term.Usage(err)
	}
	return &t, nil
}

// endText formats an end for the APIs; empty for none.
func endText(t *time.Time) string {
	if t == nil {
		return ""
	}
	return t.Format(time.RFC3339Nano)
}

// haltLine returns the text after a halt was set or lifted: what that means, and how
// to undo it.
func (c verbs) haltLine(on bool, until *time.Time, means, verb string) string {
	switch {
	case !on:
		return "automatic actions resumed"
	case until != nil:
		return c.Red(fmt.Sprintf("HALTED: %s until %s; lift it earlier with: %s --off", means, term.Time(*until), verb))
	}
	return c.Red(fmt.Sprintf("HALTED: %s; lift it with: %s --off", means, verb))
}

func (c verbs) haltCommand() *cobra.Command {
	var h haltFlags
	cmd := &cobra.Command{Use: "halt", Short: "Stop all automatic actions of a host or fleet", Args: term.Args(cobra.NoArgs),
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
			if c.AsksServer() {
				return c.fleetHalt(cmd.Context(), h, until)
			}
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			s, err := cl.Halt(cmd.Context(), hostctl.Halting{On: !h.off, Reason: h.reason, Until: endText(until)})
			if err != nil {
				return err
			}
			return c.Print(s, func(w io.Writer) {
				if h.off && s.Halt != nil && s.Halt.Fleet {
					fmt.Fprintln(w, c.Red("The fleet is halted, not the host itself."))
					c.ShowHostHalt(w, s)
					return
				}
				fmt.Fprintln(w, c.haltLine(s.Halted, until, "nothing is paused or stopped automatically", "lull halt"))
			})
		}}
	h.bind(cmd.Flags())
	return cmd
}

// fleetHalt sets, lifts or shows the halt of a server's fleet.
func (c verbs) fleetHalt(ctx context.Context, h haltFlags, until *time.Time) error {
	cl, err := c.ServerClient()
	if err != nil {
		return err
	}
	is, err := control.Write[halt.Halt](ctx, cl, "POST", "/halt", control.Halting{On: !h.off, Reason: h.reason, Until: endText(until)})
	if err != nil {
		return err
	}
	return c.Print(is, func(w io.Writer) {
		fmt.Fprintln(w, c.haltLine(is.On, is.Until, "no worker is paused, stopped or started automatically", "lull halt"))
	})
}

func (c verbs) agentHalt() *cobra.Command {
	var h haltFlags
	cmd := c.OnAgent(&cobra.Command{Use: "halt", Short: "Stop all automatic actions on this machine", Args: term.Args(cobra.NoArgs),
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
			return c.Print(s, func(w io.Writer) {
				fmt.Fprintln(w, c.haltLine(s.Halted != nil, until, "this machine is not stopped automatically", "lull agent halt"))
			})
		})
	h.bind(cmd.Flags())
	return cmd
}
