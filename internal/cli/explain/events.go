package explain

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/policy/when"
	"lull/internal/fleet/audit"
	"lull/internal/protocol/hostctl"
)

// fleetEvents prints the events of a server.
func (c verbs) fleetEvents(cmd *cobra.Command, _ []string) error {
	follow, err := cmd.Flags().GetBool("follow")
	if err != nil {
		return fmt.Errorf("cannot determine whether to follow: %w", err)
	}
	since, err := cmd.Flags().GetString("since")
	if err != nil {
		return fmt.Errorf("cannot determine the start: %w", err)
	}
	q, most := audit.Query{}, 50
	if since != "" {
		if q.From, _, err = period(time.Now(), since, ""); err != nil {
			return err
		}
		most = maxEntries
	}
	cl, err := c.ServerClient()
	if err != nil {
		return err
	}
	return c.entries(cmd.Context(), cl, q, most, follow)
}

func eventText(w io.Writer, e hostctl.Event) {
	who := e.By
	if who != "" {
		who = " by " + who
	}
	fmt.Fprintf(w, "%s  %-16s %s -> %s%s  %s\n", e.Time.Local().Format("15:04:05.000"), e.Type, e.Instance, e.State, who, e.Reason)
}

func (c verbs) eventsCommand() *cobra.Command {
	var follow bool
	var since string
	cmd := &cobra.Command{Use: "events", Short: "Show events, and with -f follow them", Args: term.Args(cobra.NoArgs),
		Long:    "Show events of instances or workers, oldest first. The command asks the host, or the\nserver if --server is given or only LULL_SERVER is set.",
		Example: "  lull events\n  lull events -f --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			seq, from, err := eventsFrom(time.Now(), since)
			if err != nil {
				return err
			}
			missing := func(why string) { fmt.Fprintf(c.Err, "lull: %s; events may be missing here\n", why) }
			if follow {
				enc := json.NewEncoder(c.Out)
				return cl.Follow(cmd.Context(), seq, missing, func(e hostctl.Event) error {
					if e.Time.Before(from) {
						return nil
					}
					if c.JSON {
						return enc.Encode(e)
					}
					eventText(c.Out, e)
					return nil
				})
			}
			var l []hostctl.Event
			if err := cl.Kept(cmd.Context(), seq, missing, func(e hostctl.Event) error {
				if !e.Time.Before(from) {
					l = append(l, e)
				}
				return nil
			}); err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				for _, e := range l {
					eventText(w, e)
				}
			})
		}}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "keep printing new entries; --json prints one per line")
	cmd.Flags().StringVar(&since, "since", "", "start of the period: now, "+when.PastForms+"; for a host also a sequence number")
	return cmd
}

// eventsFrom parses where a host's events begin. A sequence number or "now" is
// returned as seq, for the host to interpret; anything else is parsed as a time.
func eventsFrom(now time.Time, since string) (seq string, from time.Time, err error) {
	if _, err := strconv.ParseUint(since, 10, 64); err == nil || since == "now" {
		return since, from, nil
	}
	if from, err = term.Past(now, since); err != nil {
		err = term.Usage(err)
	}
	return "", from, err
}
