package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/fleet/halt"
	"lull/internal/protocol/control"
	"lull/internal/protocol/hostctl"
)

// UnderHalt makes a verb that lists or explains first print the halt in effect,
// if any: on a fleet by whom, since when, until when and why. JSON output has
// it in the objects with a field for it.
func (c *Session) UnderHalt(cmd *cobra.Command) *cobra.Command {
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		flagged := func(name string) bool { f := cmd.Flags().Lookup(name); return f != nil && f.Changed }
		if flagged("follow") { // it continues, so its output cannot be buffered
			c.ShowHalt(cmd.Context())
			return run(cmd, a)
		}
		out, said := c.Out, new(bytes.Buffer)
		c.Out = said // faults in its flags come before any request
		err := run(cmd, a)
		c.Out = out
		if said.Len() > 0 && !flagged("csv") {
			c.ShowHalt(cmd.Context())
		}
		_, werr := said.WriteTo(out)
		return errors.Join(err, werr)
	}
	return cmd
}

// ShowHalt is silent about a fleet that cannot be asked: the verb says that.
func (c *Session) ShowHalt(ctx context.Context) {
	if c.JSON {
		return
	}
	cl, err := c.ServerClient()
	if err != nil {
		return
	}
	h, err := control.Read[halt.Halt](ctx, cl, "/halt")
	if err == nil && h.On {
		fmt.Fprintln(c.Out, c.Red("HALTED: "+term.Localized(h.Sentence())+" No worker is paused, stopped or started automatically. Lift it with: lull halt --off"))
	}
}

// ShowHostHalt is tellHalt of a host.
func (c *Session) ShowHostHalt(w io.Writer, s hostctl.Status) {
	if h := s.Halt; h != nil {
		fmt.Fprintln(w, c.Red("HALTED: "+term.Localized(h.Sentence("Automatic actions on this host are"))+" Lift it with: "+c.endOfHalt(h, "lull halt --off", s.Server)))
	}
}

// endOfHalt is the command that ends h: verb, or the fleet's with its server.
func (c *Session) endOfHalt(h *idle.HaltedBy, verb string, l *hostctl.ServerLink) string {
	switch {
	case !h.Fleet:
		return verb
	case l != nil && l.URL != "":
		return "lull halt --off --server " + l.URL
	}
	return "lull halt --off --server URL"
}
