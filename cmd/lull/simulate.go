package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/link/control"
	"lull/internal/savings"
)

// since reads how far back to look: 7d, 36h, or a past time as of --at.
func since(now time.Time, text string) (time.Time, error) {
	if days, ok := strings.CutSuffix(text, "d"); ok {
		if n, err := strconv.Atoi(days); err == nil && n > 0 {
			return now.AddDate(0, 0, -n), nil
		}
	}
	t, err := pastMoment(now, text)
	if err != nil || text == "" {
		return t, fmt.Errorf("cannot use --since %q: want 7d, 36h, 15:04, 2006-01-02 15:04 or RFC 3339", text)
	}
	return t, nil
}

func (c *cli) simulateCommand() *cobra.Command {
	var name, from string
	var more []string
	var in control.Simulate
	cmd := &cobra.Command{Use: "simulate --policy NAME", Short: "Say what a policy would have done in a recorded time: pauses, hours, money and false stops", Args: args(cobra.NoArgs),
		Example: "  lull simulate --policy balanced --compare aggressive --since 7d\n  lull simulate --policy 45m --since 14d",
		RunE: func(cmd *cobra.Command, _ []string) error {
			at, err := since(time.Now(), from)
			if err != nil {
				return &usageError{err}
			}
			in.From = &at
			if name == "" {
				return &usageError{errors.New("cannot simulate nothing: give --policy, a name or a timeout like 45m")}
			}
			for _, n := range append([]string{name}, more...) {
				p := control.SimulatedPolicy{Name: n}
				if d, err := time.ParseDuration(n); err == nil {
					p.TimeoutMinutes = int(d.Minutes())
				}
				in.Policies = append(in.Policies, p)
			}
			cl, err := c.control()
			if err != nil {
				return err
			}
			r, err := control.Write[control.Simulation](cmd.Context(), cl, "POST", "/simulate", in)
			if err != nil {
				return err
			}
			return c.print(r, func(w io.Writer) { simulationText(w, r) })
		}}
	f := cmd.Flags()
	f.StringVar(&name, "policy", "", "name of a policy, or an idle timeout like 45m")
	f.StringSliceVar(&more, "compare", nil, "another to compare it with, repeatable")
	f.StringVar(&from, "since", "7d", "how far back: 7d, 36h, or a past time")
	f.StringVar(&in.Region, "region", "", "workers of this AWS region only")
	f.IntVar(&in.WindowMinutes, "window", 15, "minutes within which somebody who comes back makes it a false stop")
	return cmd
}

func simulationText(w io.Writer, r control.Simulation) {
	fmt.Fprintf(w, "%s to %s, as it was recorded\n\n", clockTime(r.From), clockTime(r.To))
	rows(w, "POLICY\tTIMEOUT\tPAUSES\tFALSE STOPS\tHOURS AVOIDED\tCOMPUTE\tSTORAGE PAID\tSAVED\tHOURS UNKNOWN", func(row func(string, ...any)) {
		for _, p := range r.Policies {
			row("%s\t%gm\t%d\t%d\t%.1f\t%s\t%s\t%s\t%.1f", p.Name, p.TimeoutMinutes, p.Pauses, p.FalseStops, p.AvoidedHours, money(p.ComputeSaved), money(p.StoragePaid), money(p.Sum.Saved), p.UnknownHours)
		}
	})
	switch {
	case r.Recommended != "":
		fmt.Fprintf(w, "\nmost avoided at no false stop: %s\n", r.Recommended)
	default:
		fmt.Fprintln(w, "\nno policy would have avoided anything without a false stop")
	}
	for _, m := range r.Missing {
		fmt.Fprintf(w, "missing %s to %s: %s %s\n", clockTime(m.From), clockTime(m.To), m.Server, m.Why)
	}
}

func money(usd *float64) string {
	if usd == nil {
		return "unknown"
	}
	return fmt.Sprintf("$%.2f", *usd)
}

func (c *cli) savingsCommand() *cobra.Command {
	var from, by string
	var table bool
	cmd := &cobra.Command{Use: "savings", Short: "Show hours avoided and money saved by real stops, and what was idle and ran on", Args: args(cobra.NoArgs),
		Example: "  lull savings --since 30d\n  lull savings --by tag:team --csv",
		RunE: func(cmd *cobra.Command, _ []string) error {
			at, err := since(time.Now(), from)
			if err != nil {
				return &usageError{err}
			}
			cl, err := c.control()
			if err != nil {
				return err
			}
			q := url.Values{"from": {at.UTC().Format(time.RFC3339)}, "by": {by}}
			r, err := control.Read[control.Savings](cmd.Context(), cl, "/savings?"+q.Encode())
			if err != nil {
				return err
			}
			if table {
				return savingsCSV(c.out, r)
			}
			return c.print(r, func(w io.Writer) { savingsText(w, r) })
		}}
	cmd.Flags().StringVar(&from, "since", "30d", "how far back: 7d, 36h, or a past time")
	cmd.Flags().StringVar(&by, "by", "worker", "worker, region, policy, instance_type, or tag:NAME")
	cmd.Flags().BoolVar(&table, "csv", false, "write the groups as CSV; an empty field is unknown")
	return cmd
}

func savingsText(w io.Writer, r control.Savings) {
	fmt.Fprintf(w, "%s to %s\n\n", clockTime(r.From), clockTime(r.To))
	rows(w, strings.ToUpper(r.By)+"\tRUNNING\tAVOIDED\tCOMPUTE\tSTORAGE PAID\tSAVED\tHOURS WITHOUT A PRICE", func(row func(string, ...any)) {
		for _, g := range append(slices.Clone(r.Groups), r.Total) {
			key := dash(g.Key)
			if g.Name != "" {
				key = g.Name
			}
			row("%s\t%.1fh\t%.1fh\t%s\t%s\t%s\t%.1f", key, g.RunningHours, g.AvoidedHours, money(g.ComputeSaved), money(g.StoragePaid), money(g.Saved), g.UnpricedHours)
		}
	})
	if len(r.NotAvoided) > 0 {
		fmt.Fprintln(w)
		rows(w, "IDLE AND RAN ON\tHOURS", func(row func(string, ...any)) {
			causes := make([]string, 0, len(r.NotAvoided))
			for cause := range r.NotAvoided {
				causes = append(causes, cause)
			}
			slices.SortFunc(causes, func(a, b string) int { return compare(a, b) })
			for _, cause := range causes {
				row("%s\t%.1f", cause, r.NotAvoided[cause])
			}
		})
	}
	for _, m := range r.Missing {
		fmt.Fprintf(w, "missing %s to %s: %s %s\n", clockTime(m.From), clockTime(m.To), m.Server, m.Why)
	}
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
	rows := [][]string{{"from", "to", r.By, "name", "workers", "running_hours", "avoided_hours", "other_stopped_hours", "compute_saved_usd", "unpriced_hours", "storage_paid_usd", "unknown_storage_hours", "saved_usd"}}
	for _, g := range r.Groups {
		rows = append(rows, []string{r.From.Format(time.RFC3339), r.To.Format(time.RFC3339), g.Key, g.Name, strconv.Itoa(g.Workers), num(g.RunningHours), num(g.AvoidedHours), num(g.OtherHours),
			opt(g.ComputeSaved), num(g.UnpricedHours), opt(g.StoragePaid), num(g.UnknownStorageHours), opt(g.Saved)})
	}
	if err := out.WriteAll(rows); err != nil {
		return fmt.Errorf("cannot write the savings: %w", err)
	}
	return nil
}

// prices is the table that replaces the published one; nil without a file.
func (cfg *serverConfig) prices() (savings.Prices, error) {
	if cfg.Prices == "" {
		return nil, nil
	}
	f, err := os.Open(cfg.Prices)
	if err != nil {
		return nil, fmt.Errorf("cannot read the prices: %w", err)
	}
	defer f.Close()
	p, err := savings.Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", cfg.Prices, err)
	}
	return p, nil
}
