package term

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

// watchInterval is the interval at which a watched listing is redrawn.
const watchInterval = time.Second

// Watchable adds the flag --watch to a listing.
func (c *Term) Watchable(cmd *cobra.Command) *cobra.Command {
	watch := cmd.Flags().Bool("watch", false, "repeat the list every second until Ctrl-C")
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		if !*watch {
			return run(cmd, a)
		}
		if c.JSON {
			return Usage(errors.New("--watch prints a table: leave out --json and --output, or follow lull events --json"))
		}
		return c.Repeat(cmd, watchInterval, func() error { return run(cmd, a) })
	}
	return cmd
}

// Repeat calls page every interval and shows its output in place of the last one,
// until the command is interrupted or page fails.
func (c *Term) Repeat(cmd *cobra.Command, every time.Duration, page func() error) error {
	out := c.Out
	defer func() { c.Out = out }()
	for {
		var b bytes.Buffer
		c.Out = &b
		if err := page(); err != nil {
			if cmd.Context().Err() != nil {
				return nil
			}
			return err
		}
		if _, err := fmt.Fprintf(out, "\x1b[H\x1b[J%s", b.Bytes()); err != nil {
			return fmt.Errorf("cannot print: %w", err)
		}
		select {
		case <-time.After(every):
		case <-cmd.Context().Done():
			return nil
		}
	}
}
