package main

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/fleet"
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

func (c *cli) auditCommand() *cobra.Command {
	var follow bool
	var worker string
	var limit int
	cmd := &cobra.Command{Use: "audit", Short: "Show who did what, when and why", Args: args(cobra.NoArgs),
		Example: "  lull audit --worker cml-1\n  lull audit -f",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.control()
			if err != nil {
				return err
			}
			if limit < 1 || limit > 1000 {
				return &usageError{fmt.Errorf("cannot show %d entries: want 1 to 1000; lull audit export gives all", limit)}
			}
			id := ""
			if worker != "" {
				w, err := cl.Worker(cmd.Context(), worker)
				if err != nil {
					return err
				}
				id = w.ID
			}
			return c.entries(cmd.Context(), cl, id, limit, follow)
		}}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on as more happen; JSON then comes as lines")
	cmd.Flags().StringVar(&worker, "worker", "", "entries about this worker only")
	cmd.Flags().IntVarP(&limit, "limit", "n", 100, "how many of the newest entries")
	cmd.AddCommand(c.auditExport())
	return cmd
}

func (c *cli) auditExport() *cobra.Command {
	var from, to, action string
	cmd := &cobra.Command{Use: "export", Short: "Write the audit log as JSON lines, oldest first", Args: args(cobra.NoArgs),
		Example: "  lull audit export --from 2026-11-01T00:00:00Z --to 2026-12-01T00:00:00Z\n  lull audit export --action drained",
		RunE: func(cmd *cobra.Command, _ []string) error {
			q := url.Values{}
			for name, v := range map[string]string{"from": from, "to": to} {
				if v == "" {
					continue
				}
				if _, err := time.Parse(time.RFC3339, v); err != nil {
					return &usageError{fmt.Errorf("cannot use --%s %q: want RFC 3339, 2006-01-02T15:04:05Z", name, v)}
				}
				q.Set(name, v)
			}
			if action != "" {
				q.Set("action", action)
			}
			cl, err := c.control()
			if err != nil {
				return err
			}
			return cl.Export(cmd.Context(), q, c.out)
		}}
	cmd.Flags().StringVar(&from, "from", "", "from this time on (RFC 3339)")
	cmd.Flags().StringVar(&to, "to", "", "before this time (RFC 3339)")
	cmd.Flags().StringVar(&action, "action", "", "this action only")
	return cmd
}
