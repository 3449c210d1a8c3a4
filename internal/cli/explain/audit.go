package explain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/policy/when"
	"lull/internal/fleet/audit"
	"lull/internal/protocol/control"
)

// entryPrinter returns a function that prints an audit entry as a line of text or of
// JSON.
func (c verbs) entryPrinter() func(audit.Entry) error {
	enc := json.NewEncoder(c.Out)
	return func(e audit.Entry) error {
		if c.JSON {
			return enc.Encode(e)
		}
		_, err := fmt.Fprintln(c.Out, entryText(e))
		return err
	}
}

func entryText(e audit.Entry) string { return strings.ReplaceAll(entryLine(e), "\t", "  ") }

// maxEntries is the maximum number of entries that a verb prints.
const maxEntries = 1000

// auditFlags select entries of the audit log.
type auditFlags struct {
	worker, from, to string
	q                audit.Query
}

func (a *auditFlags) bind(c verbs, cmd *cobra.Command, from, to string) {
	f := cmd.Flags()
	f.StringVar(&a.worker, "worker", "", "only entries about this worker")
	f.StringVar(&a.q.Action, "action", "", "only this action")
	f.StringVar(&a.q.By, "by", "", "only actors whose name contains this, ignoring case")
	f.StringVar(&a.q.Kind, "kind", "", "only this kind of actor: person, controller, agent, wake, schedule or cloud")
	f.StringVar(&a.from, from, "", "start of the period: "+when.PastForms)
	f.StringVar(&a.to, to, "", "end of the period, in the same form")
	term.CompleteWords(cmd, "kind", audit.KindUser, audit.KindController, audit.KindAgent, audit.KindWake, audit.KindSchedule, audit.KindCloud)
	_ = cmd.RegisterFlagCompletionFunc("worker", func(cmd *cobra.Command, _ []string, to string) ([]string, cobra.ShellCompDirective) {
		return c.CompleteWorkers(cmd, nil, to)
	}) // the flag was defined above
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

func (c verbs) auditCommand() *cobra.Command {
	var follow bool
	var which auditFlags
	var limit int
	cmd := &cobra.Command{Use: "audit", Short: "Show who did what, when and why", Args: term.Args(cobra.NoArgs),
		Example: "  lull audit --worker cml-1\n  lull audit --since 2h --action pause_intended\n  lull audit --by ada --kind person\n  lull audit -f",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			if limit < 1 || limit > maxEntries {
				return term.Usage(fmt.Errorf("cannot show %d entries: want 1 to %d; lull audit export gives all", limit, maxEntries))
			}
			if follow && which.to != "" {
				return term.Usage(errors.New("cannot use --follow with --until: leave one of them out"))
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

func (c verbs) auditExport() *cobra.Command {
	var which auditFlags
	var table bool
	cmd := &cobra.Command{Use: "export", Short: "Export the audit log as JSON lines or CSV, oldest first", Args: term.Args(cobra.NoArgs),
		Example: "  lull audit export --from 2026-11-01 --to 2026-12-01\n  lull audit export --action drained --csv",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			q, err := which.query(cmd.Context(), cl)
			if err != nil {
				return err
			}
			return cl.Export(cmd.Context(), q, map[bool]string{false: "jsonl", true: "csv"}[table], c.Out)
		}}
	which.bind(c, cmd, "from", "to")
	cmd.Flags().BoolVar(&table, "csv", false, "write CSV without the evidence of decisions, for spreadsheets")
	return cmd
}

// period parses the two ends of a period; either may be empty.
func period(now time.Time, from, to string) (start, end time.Time, err error) {
	if start, err = term.Past(now, from); err == nil {
		end, err = term.Past(now, to)
	}
	if err != nil {
		err = term.Usage(err)
	}
	return start, end, err
}

func entryTable(w io.Writer, l []audit.Entry) {
	term.Rows(w, "TIME\tACTION\t1:WORKER\t2:BY\tREASON", func(row func(string, ...any)) {
		for _, e := range l {
			row("%s", entryLine(e))
		}
	})
}

func entryLine(e audit.Entry) string {
	what := e.Action
	if e.To != "" && e.From != e.To {
		what += " " + string(e.From) + ">" + string(e.To)
	}
	why := strings.TrimSpace(e.Reason + " " + e.Detail)
	return fmt.Sprintf("%s\t%s\t%s\t%s\t%s", term.Time(e.At), what, term.Dash(e.WorkerName), e.By.Name, why)
}

// entries prints the newest n audit entries that which selects and, with follow, each
// new one.
func (c verbs) entries(ctx context.Context, cl *control.Client, which audit.Query, n int, follow bool) error {
	q := control.AuditValues(which)
	q.Set("newest", "true")
	past := func() ([]audit.Entry, error) {
		out := []audit.Entry{}
		for {
			// If few entries are selected, a page is short and has a Next.
			q.Set("limit", strconv.Itoa(n-len(out)))
			l, err := control.Read[control.List[audit.Entry]](ctx, cl, "/audit?"+q.Encode())
			if err != nil {
				return nil, err
			}
			out = append(out, l.Items...)
			if q.Set("after", l.Next); l.Next == "" || len(out) >= n {
				slices.Reverse(out)
				return out, nil
			}
		}
	}
	if !follow {
		l, err := past()
		if err != nil {
			return err
		}
		if len(l) == 0 && !c.JSON {
			fmt.Fprintln(c.Err, "no entries")
		}
		return c.Print(l, func(w io.Writer) {
			for _, e := range l {
				fmt.Fprintln(w, entryText(e))
			}
		})
	}
	show := c.entryPrinter()
	seen, shown := int64(0), false
	var broken error
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	err := cl.Follow(ctx, control.Events{WorkerID: which.WorkerID,
		// Start the stream before reading the past, so that no entry is missed. An
		// entry that is in both is printed once.
		Started: func() {
			if !shown {
				shown = true
				var l []audit.Entry
				l, broken = past()
				for _, e := range l {
					seen = max(seen, e.ID)
					broken = errors.Join(broken, show(e))
				}
				if broken != nil {
					cancel()
				}
			}
		},
		Each: func(e audit.Entry) error {
			if e.ID <= seen || !which.Takes(&e) {
				return nil
			}
			return show(e)
		},
		Reset: func(why string) error {
			fmt.Fprintln(c.Err, "lull: events may be missing here:", why)
			return nil
		}})
	return errors.Join(broken, err)
}
