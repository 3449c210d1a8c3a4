package instance

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/policy/when"
)

func (c verbs) wakeAtCommand() *cobra.Command {
	var off bool
	cmd := &cobra.Command{Use: "wake-at NAME [TIME]", Short: "Wake an instance in time to run at a given time", ValidArgsFunction: c.CompleteInstances,
		Args: term.Args(cobra.RangeArgs(1, 2)),
		Long: `Wake an instance for a time at which it has to run: 2 s before if it sleeps, or start
it if lull had stopped it. It is not paused before that time, and then has its idle
timeout to begin. The time outlives restarts of the host and follows the clock when
that is set. Programs set theirs with next_due over LULL_SOCKET, and lull run
--wake-schedule sets times that come again.`,
		Example: "  lull wake-at report 07:30\n  lull wake-at report +2h\n  lull wake-at report --off"}
	cmd.Flags().BoolVar(&off, "off", false, "take the time back")
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		if off != (len(a) == 1) {
			return term.Usage(errors.New("give a time, or --off"))
		}
		var t time.Time
		if !off {
			var err error
			if t, err = when.Ahead(time.Now(), a[1]); err != nil {
				return term.Usage(err)
			}
		}
		cl, err := c.HostClient()
		if err != nil {
			return err
		}
		o, err := cl.WakeAt(cmd.Context(), a[0], t)
		if err != nil {
			return err
		}
		return c.Print(o, func(w io.Writer) {
			if o.WakeAt == nil {
				fmt.Fprintf(w, "%s has no wake time.\n", o.Name)
				return
			}
			fmt.Fprintf(w, "%s runs at %s, set by %s.\n", o.Name, term.Time(*o.WakeAt), o.WakeAtBy)
		})
	}
	return cmd
}
