package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/fleet"
	"lull/internal/policy/when"
)

// entryPrinter writes one entry per line: text, or JSON lines.
func (c *cli) entryPrinter() func(fleet.Entry) error {
	enc := json.NewEncoder(c.out)
	return func(e fleet.Entry) error {
		if c.json {
			return enc.Encode(e)
		}
		_, err := fmt.Fprintln(c.out, entryText(e))
		return err
	}
}

func entryText(e fleet.Entry) string { return strings.ReplaceAll(entryLine(e), "\t", "  ") }

// maxEntries is how many entries a verb shows at most.
const maxEntries = 1000

func (c *cli) auditCommand() *cobra.Command {
	var follow bool
	var worker, action, since, until string
	var limit int
	cmd := &cobra.Command{Use: "audit", Short: "Show who did what, when and why", Args: args(cobra.NoArgs),
		Example: "  lull audit --worker cml-1\n  lull audit --since 2h --action pause_intended\n  lull audit -f",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.control()
			if err != nil {
				return err
			}
			if limit < 1 || limit > maxEntries {
				return &usageError{fmt.Errorf("cannot show %d entries: want 1 to %d; lull audit export gives all", limit, maxEntries)}
			}
			if follow && until != "" {
				return &usageError{errors.New("cannot go on after --until: leave out one of --follow and --until")}
			}
			q, err := period(time.Now(), since, until, action)
			if err != nil {
				return err
			}
			if worker != "" {
				w, err := cl.Known(cmd.Context(), worker)
				if err != nil {
					return err
				}
				q.Set("worker_id", w.ID)
			}
			return c.entries(cmd.Context(), cl, q, limit, follow)
		}}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on as more happen; JSON then comes as lines")
	cmd.Flags().StringVar(&worker, "worker", "", "entries about this worker only")
	cmd.Flags().StringVar(&action, "action", "", "this action only")
	cmd.Flags().StringVar(&since, "since", "", "from this time on: "+when.PastForms)
	cmd.Flags().StringVar(&until, "until", "", "before this time, in the same form")
	cmd.Flags().IntVarP(&limit, "limit", "n", 100, "how many of the newest entries")
	cmd.AddCommand(c.auditExport())
	return cmd
}

func (c *cli) auditExport() *cobra.Command {
	var from, to, action string
	cmd := &cobra.Command{Use: "export", Short: "Write the audit log as JSON lines, oldest first", Args: args(cobra.NoArgs),
		Example: "  lull audit export --from 2026-11-01 --to 2026-12-01\n  lull audit export --action drained",
		RunE: func(cmd *cobra.Command, _ []string) error {
			q, err := period(time.Now(), from, to, action)
			if err != nil {
				return err
			}
			cl, err := c.control()
			if err != nil {
				return err
			}
			return cl.Export(cmd.Context(), q, c.out)
		}}
	cmd.Flags().StringVar(&from, "from", "", "from this time on: "+when.PastForms)
	cmd.Flags().StringVar(&to, "to", "", "before this time, in the same form")
	cmd.Flags().StringVar(&action, "action", "", "this action only")
	return cmd
}

// period is the part of a query that says of which time and action.
func period(now time.Time, from, to, action string) (url.Values, error) {
	q := url.Values{}
	for name, text := range map[string]string{"from": from, "to": to} {
		t, err := pastMoment(now, text)
		if err != nil {
			return nil, &usageError{err}
		}
		if !t.IsZero() {
			q.Set(name, t.Format(time.RFC3339Nano))
		}
	}
	if action != "" {
		q.Set("action", action)
	}
	return q, nil
}
