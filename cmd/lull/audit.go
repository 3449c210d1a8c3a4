package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/core/policy/when"
	"lull/internal/fleet/audit"
	"lull/internal/protocol/control"
)

// entryPrinter writes one entry per line: text, or JSON lines.
func (c *cli) entryPrinter() func(audit.Entry) error {
	enc := json.NewEncoder(c.out)
	return func(e audit.Entry) error {
		if c.json {
			return enc.Encode(e)
		}
		_, err := fmt.Fprintln(c.out, entryText(e))
		return err
	}
}

func entryText(e audit.Entry) string { return strings.ReplaceAll(entryLine(e), "\t", "  ") }

// maxEntries is how many entries a verb shows at most.
const maxEntries = 1000

// auditFlags say which entries of the audit log are meant.
type auditFlags struct {
	worker, from, to string
	q                audit.Query
}

func (a *auditFlags) bind(c *cli, cmd *cobra.Command, from, to string) {
	f := cmd.Flags()
	f.StringVar(&a.worker, "worker", "", "only entries about this worker")
	f.StringVar(&a.q.Action, "action", "", "only this action")
	f.StringVar(&a.q.By, "by", "", "only actors whose name contains this, ignoring case")
	f.StringVar(&a.q.Kind, "kind", "", "only this kind of actor: person, controller, agent, wake, schedule or cloud")
	f.StringVar(&a.from, from, "", "start of the period: "+when.PastForms)
	f.StringVar(&a.to, to, "", "end of the period, in the same form")
	completeWords(cmd, "kind", audit.KindPerson, audit.KindController, audit.KindAgent, audit.KindWake, audit.KindSchedule, audit.KindCloud)
	_ = cmd.RegisterFlagCompletionFunc("worker", func(cmd *cobra.Command, _ []string, to string) ([]string, cobra.ShellCompDirective) {
		return c.completeWorkers(cmd, nil, to)
	}) // the flag is there: it was just made
}

// query returns the audit query selected by the flags.
func (a *auditFlags) query(ctx context.Context, cl *control.Client) (q audit.Query, err error) {
	q = a.q
	if q.From, q.To, err = period(time.Now(), a.from, a.to); err != nil || a.worker == "" {
		return q, err
	}
	w, err := cl.Known(ctx, a.worker)
	q.WorkerID = w.ID
	return q, err
}

func (c *cli) auditCommand() *cobra.Command {
	var follow bool
	var which auditFlags
	var limit int
	cmd := &cobra.Command{Use: "audit", Short: "Show who did what, when and why", Args: args(cobra.NoArgs),
		Example: "  lull audit --worker cml-1\n  lull audit --since 2h --action pause_intended\n  lull audit --by ada --kind person\n  lull audit -f",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.control()
			if err != nil {
				return err
			}
			if limit < 1 || limit > maxEntries {
				return &usageError{fmt.Errorf("cannot show %d entries: want 1 to %d; lull audit export gives all", limit, maxEntries)}
			}
			if follow && which.to != "" {
				return &usageError{errors.New("cannot use --follow with --until: leave one of them out")}
			}
			q, err := which.query(cmd.Context(), cl)
			if err != nil {
				return err
			}
			return c.entries(cmd.Context(), cl, q, limit, follow)
		}}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "keep printing new entries; --json prints one per line")
	which.bind(c, cmd, "since", "until")
	cmd.Flags().IntVarP(&limit, "limit", "n", 100, "maximum number of entries, newest first")
	cmd.AddCommand(c.auditExport())
	return cmd
}

func (c *cli) auditExport() *cobra.Command {
	var which auditFlags
	var table bool
	cmd := &cobra.Command{Use: "export", Short: "Export the audit log as JSON lines or CSV, oldest first", Args: args(cobra.NoArgs),
		Example: "  lull audit export --from 2026-11-01 --to 2026-12-01\n  lull audit export --action drained --csv",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.control()
			if err != nil {
				return err
			}
			q, err := which.query(cmd.Context(), cl)
			if err != nil {
				return err
			}
			return cl.Export(cmd.Context(), q, map[bool]string{false: "jsonl", true: "csv"}[table], c.out)
		}}
	which.bind(c, cmd, "from", "to")
	cmd.Flags().BoolVar(&table, "csv", false, "write CSV without the evidence of decisions, for spreadsheets")
	return cmd
}

// period reads two times of which each may be left out.
func period(now time.Time, from, to string) (start, end time.Time, err error) {
	if start, err = pastMoment(now, from); err == nil {
		end, err = pastMoment(now, to)
	}
	if err != nil {
		err = &usageError{err}
	}
	return start, end, err
}
