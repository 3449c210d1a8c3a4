package savings

import (
	"encoding/csv"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/policy/when"
	"lull/internal/core/savings"
	"lull/internal/protocol/control"
)

func money(usd *float64) string {
	if usd == nil {
		return "unknown"
	}
	return fmt.Sprintf("$%.2f", *usd)
}

func (c verbs) savingsCommand() *cobra.Command {
	var from, until, by, every, idleBy, zone string
	var table bool
	cmd := &cobra.Command{Use: "savings", Short: "Show hours and money saved, and idle time not used", Args: term.Args(cobra.NoArgs),
		Long: `Show hours avoided and money saved by actual stops, less the storage cost meanwhile,
based on the server's price table. Amounts without a price are unknown, never zero.`,
		Example: "  lull savings --since 30d\n  lull savings --by tag:team --csv\n  lull savings --since 2026-10-01T00:00:00Z --until 2026-11-01T00:00:00Z --csv\n  lull savings --by policy --every week --time-zone Europe/Berlin\n  lull savings --idle-by region",
		RunE: func(cmd *cobra.Command, _ []string) error {
			at, err := when.Past(time.Now(), from)
			if err != nil {
				return term.Usage(err)
			}
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			q := url.Values{"from": {at.UTC().Format(time.RFC3339)}, "by": {by}, "time_zone": {zone}}
			if until != "" {
				end, err := when.Past(time.Now(), until)
				if err != nil {
					return term.Usage(err)
				}
				q.Set("to", end.UTC().Format(time.RFC3339))
			}
			if every != "" {
				q.Set("every", every)
			}
			if idleBy != "" {
				q.Set("idle_by", idleBy)
			}
			r, err := control.Read[control.Savings](cmd.Context(), cl, "/savings?"+q.Encode())
			if err != nil {
				return err
			}
			if table {
				return savingsCSV(c.Out, r)
			}
			return c.Print(r, func(w io.Writer) { savingsText(w, r) })
		}}
	cmd.Flags().StringVar(&from, "since", "30d", "start of the period: "+when.PastForms)
	cmd.Flags().StringVar(&until, "until", "", "end of the period (default: now): "+when.PastForms)
	cmd.Flags().StringVar(&by, "by", "worker", "group by worker, region, policy, instance_type, or tag:NAME")
	cmd.Flags().StringVar(&every, "every", "", "also show totals per day, week or month")
	cmd.Flags().StringVar(&idleBy, "idle-by", "", "also show the hours of the week in which each worker, region, policy, instance_type or tag:NAME ran idle")
	cmd.Flags().StringVar(&zone, "time-zone", "UTC", "time zone of days and hours, such as Europe/Berlin")
	cmd.Flags().BoolVar(&table, "csv", false, "write the groups, or with --idle-by the hours, as CSV; an empty field is unknown")
	term.CompleteWords(cmd, "every", "day", "week", "month")
	for _, f := range []string{"by", "idle-by"} {
		term.CompleteWords(cmd, f, "worker", "region", "policy", "instance_type", "tag:")
	}
	cmd.AddCommand(c.pricesCommand())
	return cmd
}

func savingsText(w io.Writer, r control.Savings) {
	fmt.Fprintf(w, "%s to %s\n\n", term.Time(r.From), term.Time(r.To))
	term.Rows(w, strings.ToUpper(r.By)+savingsHead, func(row func(string, ...any)) {
		for _, g := range append(slices.Clone(r.Groups), r.Total) {
			savingsRow(row, "", g)
		}
	})
	if len(r.MissingPrices) > 0 {
		fmt.Fprintln(w, "\nThe price table has no price for:")
		term.Rows(w, "KIND\tREGION\tNAME\tWORKERS\tAVOIDED", func(row func(string, ...any)) {
			for _, m := range r.MissingPrices {
				row("%s\t%s\t%s\t%d\t%.1fh", m.Kind, m.Region, m.Name, m.Workers, m.Hours)
			}
		})
		fmt.Fprintln(w, "Fetch what AWS lists: lull savings prices refresh. Or give the server a table: lull server --prices FILE\n(kind,region,name,usd,as_of), which replaces the built-in one.")
	}
	if r.Total.UnknownStorageHours > 0 {
		fmt.Fprintln(w, "\nstorage is unknown while EC2 has not reported a worker's volumes (ec2:DescribeVolumes), or their type has no price; those hours are left out of all totals")
	}
	if r.By == "policy" {
		fmt.Fprintln(w, "\nstops are attributed to the policy in force when they were decided, where that is recorded; everything else to the present policy")
	}
	if len(r.Periods) > 0 {
		fmt.Fprintln(w)
		term.Rows(w, "FROM\t"+strings.ToUpper(r.By)+savingsHead, func(row func(string, ...any)) {
			for _, p := range r.Periods {
				for _, g := range append(slices.Clone(p.Groups), p.Total) {
					savingsRow(row, term.Time(p.From)+"\t", g)
				}
			}
		})
	}
	if len(r.NotAvoided) > 0 {
		fmt.Fprintln(w)
		term.Rows(w, "IDLE AND RAN ON\tHOURS", func(row func(string, ...any)) {
			for _, cause := range slices.Sorted(maps.Keys(r.NotAvoided)) {
				row("%s\t%.1f", cause, r.NotAvoided[cause])
			}
		})
	}
	if len(r.Idle) > 0 {
		fmt.Fprintln(w)
		idleHours(w, r.Idle)
	}
	for _, m := range r.Missing {
		fmt.Fprintf(w, "missing %s to %s: %s %s\n", term.Time(m.From), term.Time(m.To), m.Server, m.Why)
	}
}

const savingsHead = "\t5:RUNNING\tAVOIDED\t4:COMPUTE\t3:STORAGE PAID\tSAVED\t2:HOURS WITHOUT A PRICE\t1:HOURS OF UNKNOWN STORAGE"

// widestWeek is the minimum width at which each hour of the day has its own column.
const widestWeek = 180

// idleHours prints the idle hours of a week, by hour of the day. On a narrower
// terminal, three hours share a column.
func idleHours(w io.Writer, l []control.IdlePattern) {
	each := 1
	if n := term.Width(w); n > 0 && n < widestWeek {
		each = 3
	}
	head := "IDLE HOURS\tDAY"
	for h := 0; h < 24; h += each {
		if head += "\t" + strconv.Itoa(h); each > 1 {
			head += "-" + strconv.Itoa(h+each)
		}
	}
	term.Rows(w, head, func(row func(string, ...any)) {
		for _, p := range l {
			for day := range 7 {
				var cells []string
				for hours := range slices.Chunk(p.Hours[day*24:day*24+24], each) {
					sum := 0.0
					for _, h := range hours {
						sum += h
					}
					cells = append(cells, strconv.FormatFloat(sum, 'f', 1, 64))
				}
				row("%s\t%s\t%s", named(p.Key, p.Name), time.Weekday(day).String()[:3], strings.Join(cells, "\t"))
			}
		}
	})
}

// saved formats the amount saved, as a minimum if a part is unknown.
func saved(s savings.Sum) string {
	if s.Saved != nil && s.Partial() {
		return "at least " + money(s.Saved)
	}
	return spent(s, s.Saved)
}

// spent returns a figure of a sum; zero if there are no avoided hours, even if the
// price is unknown.
func spent(s savings.Sum, usd *float64) string {
	if usd == nil && s.AvoidedHours == 0 {
		usd = new(float64)
	}
	return money(usd)
}

func savingsRow(row func(string, ...any), before string, g savings.Sum) {
	row("%s%s\t%.1fh\t%.1fh\t%s\t%s\t%s\t%.1f\t%.1f", before, named(g.Key, g.Name), g.RunningHours, g.AvoidedHours, spent(g, g.ComputeSaved), spent(g, g.StoragePaid), saved(g), g.UnpricedHours, g.UnknownStorageHours)
}

// named returns the name of a group, for users.
func named(key, name string) string {
	if name != "" {
		return name
	}
	return term.Dash(key)
}

func savingsCSV(w io.Writer, r control.Savings) error {
	out := csv.NewWriter(w)
	num := func(f float64) string { return strconv.FormatFloat(f, 'f', 4, 64) }
	opt := func(f *float64) string {
		if f == nil {
			return ""
		}
		return num(*f)
	}
	var rows [][]string
	if len(r.Idle) > 0 {
		rows = append(rows, []string{"from", "to", "key", "name", "weekday", "hour", "idle_hours"})
		for _, p := range r.Idle {
			for i, h := range p.Hours {
				rows = append(rows, []string{r.From.Format(time.RFC3339), r.To.Format(time.RFC3339), p.Key, p.Name, time.Weekday(i / 24).String(), strconv.Itoa(i % 24), num(h)})
			}
		}
	} else {
		rows = append(rows, []string{"from", "to", r.By, "name", "workers", "running_hours", "avoided_hours", "other_stopped_hours", "compute_saved_usd", "unpriced_hours", "storage_paid_usd", "unknown_storage_hours", "saved_usd"})
		periods := r.Periods
		if len(periods) == 0 {
			periods = []control.SavingsPeriod{{From: r.From, To: r.To, Groups: r.Groups}}
		}
		for _, p := range periods {
			for _, g := range p.Groups {
				rows = append(rows, []string{p.From.Format(time.RFC3339), p.To.Format(time.RFC3339), g.Key, g.Name, strconv.Itoa(g.Workers), num(g.RunningHours), num(g.AvoidedHours), num(g.OtherHours),
					opt(g.ComputeSaved), num(g.UnpricedHours), opt(g.StoragePaid), num(g.UnknownStorageHours), opt(g.Saved)})
			}
		}
	}
	if err := out.WriteAll(rows); err != nil {
		return fmt.Errorf("cannot write the savings: %w", err)
	}
	return nil
}
