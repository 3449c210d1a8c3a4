package instance

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
)

// openCommand returns the verb lull open.
func (c verbs) openCommand() *cobra.Command {
	return &cobra.Command{Use: "open", Short: "Print a link that opens the host's dashboard", Args: term.Args(cobra.NoArgs), Example: "  lull open",
		Long: `Print a link that signs a browser in to the dashboard of the host on this machine.
The link works once, within 5 minutes. The session lasts until the host restarts, at
most 12 hours. The host must serve its dashboard: lull host --listen 127.0.0.1:7071.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			l, err := cl.Open(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) { fmt.Fprintln(w, l.URL) })
		}}
}
