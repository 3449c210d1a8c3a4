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
		Long: `Wake an instance in time to run at a given time. lull resumes it 2 s earlier if it is
asleep, or starts it if lull had stopped it, and keeps it awake until that time. The
idle timeout then starts over. A wake time survives restarts of the host and
follows the clock when the clock is set. Programs set their own wake time with
next_due over LULL_SOCKET; lull run --wake-schedule sets recurring ones.`,
		Example: "  lull wake-at report 07:30\n  lull wake-at report +2h\n  lull wake-at report --off"}
	cmd.Flags().BoolVar(&off, "off", false, "clear the wake time")
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
