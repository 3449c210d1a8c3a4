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

// UnderHalt makes a verb that lists or explains something about a fleet first print
// the halt in effect, if any, with who set it, since when, until when and why. JSON
// output is unchanged.
func (c *Session) UnderHalt(cmd *cobra.Command) *cobra.Command {
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		flagged := func(name string) bool { f := cmd.Flags().Lookup(name); return f != nil && f.Changed }
		if flagged("follow") { // the output does not end, so it cannot be buffered
			c.ShowHalt(cmd.Context())
			return run(cmd, a)
		}
		out, said := c.Out, new(bytes.Buffer)
		c.Out = said // buffered, so that nothing is requested if the flags are wrong
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

// ShowHalt prints the fleet's halt, if any. If the server cannot be asked it prints
// nothing, because the verb itself will report that.
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

// ShowHostHalt prints the halt that applies to a host, if any.
func (c *Session) ShowHostHalt(w io.Writer, s hostctl.Status) {
	if h := s.Halt; h != nil {
		fmt.Fprintln(w, c.Red("HALTED: "+term.Localized(h.Sentence("Automatic actions on this host are"))+" Lift it with: "+c.endOfHalt(h, "lull halt --off", s.Server)))
	}
}

// endOfHalt returns the command that lifts h: verb, or for a halt of the fleet the
// command for its server.
func (c *Session) endOfHalt(h *idle.HaltedBy, verb string, l *hostctl.ServerLink) string {
	switch {
	case !h.Fleet:
		return verb
	case l != nil && l.URL != "":
		return "lull halt --off --server " + l.URL
	}
	return "lull halt --off --server URL"
}
