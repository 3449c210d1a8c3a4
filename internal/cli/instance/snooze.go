package instance

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
)

func (c verbs) snoozeCommand(protect Protect) *cobra.Command {
	var e term.EndFlags
	cmd := &cobra.Command{Use: "snooze NAME [DURATION]", Short: "Keep an instance or worker running until a time", Args: term.Args(cobra.RangeArgs(1, 2)), ValidArgsFunction: c.CompleteInstances,
		Long: `Keep an instance or worker running until a time: it is not paused or stopped
automatically before then. Snoozes are for users; programs use leases. The command
applies to the host, or to the server if --server is given or only LULL_SERVER is set.
For a machine with an agent: lull agent snooze.`,
		Example: "  lull snooze web --until 18:00\n  lull snooze web 2h\n  lull snooze web --off",
		RunE: func(cmd *cobra.Command, a []string) error {
			if err := e.Take(a); err != nil {
				return err
			}
			t, err := e.End(time.Now())
			if err != nil {
				return err
			}
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			o, err := cl.Snooze(cmd.Context(), a[0], t)
			if err != nil {
				return err
			}
			return c.Print(o, func(w io.Writer) {
				if e.Off {
					fmt.Fprintf(w, "snooze of %s ended\n", o.Name)
					return
				}
				fmt.Fprintf(w, "%s stays until %s\n", o.Name, term.Time(t))
			})
		}}
	e.Bind(cmd.Flags(), "end the snooze")
	return c.OrServer(cmd, func(cmd *cobra.Command, a []string) error {
		if err := e.Take(a); err != nil {
			return err
		}
		return protect(cmd, a[0], &e)
	})
}
