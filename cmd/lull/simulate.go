package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
	"lull/internal/core/savings"
	"lull/internal/protocol/control"
)

func (c *cli) simulateCommand() *cobra.Command {
	var name, from, hours string
	var more, sources, signals []string
	var limits map[string]string
	var ofAgents bool
	var snooze, warn *int
	var in control.Simulate
	cmd := &cobra.Command{Use: "simulate [--policy NAME]", Short: "Estimate a policy's effect from recorded activity", Args: args(cobra.NoArgs),
		Long: `Replay recorded activity under existing policies or a plain timeout, and show what each
would have done: pauses, hours avoided, money, and false stops, after which the user
came back within --window. For a pause that would have begun before --since, only its
hours count. The policy given with --policy can be varied: another schedule, warning,
protection or set of signals. Without --policy, all policies of the fleet that have a
timeout are compared. Nothing is changed. Periods without recorded data are listed and
ignored.

With --agents, machines are replayed from their agents' own readings, so --signals
and --threshold can be varied.`,
		Example: "  lull simulate --agents --policy 45m --threshold cpu=20 --compare 45m\n  lull simulate --policy balanced --compare aggressive --since 7d\n  lull simulate --policy 45m --since 14d\n  lull simulate --policy balanced --schedule office --compare balanced",
		RunE: func(cmd *cobra.Command, _ []string) error {
			at, err := when.Past(time.Now(), from)
			if err != nil {
				return &usageError{err}
			}
			in.From = at.UTC().Format(time.RFC3339Nano)
			if name == "" && (more != nil || snooze != nil || warn != nil || sources != nil || signals != nil || limits != nil || cmd.Flags().Changed("schedule")) {
				return &usageError{errors.New("nothing to vary or compare: give --policy, a name or a timeout like 45m")}
			}
			asked := append([]string{name}, more...)
			if name == "" {
				asked = nil // all named policies
			}
			for _, n := range asked {
				p := control.SimulatedPolicy{Name: n}
				if m, err := wholeMinutes(n); err == nil && m > 0 {
					p.TimeoutMinutes = m
				}
				in.Policies = append(in.Policies, p)
			}
			changed := &control.SimulatedPolicy{}
			if len(in.Policies) > 0 {
				changed = &in.Policies[0]
			}
			if changed.Thresholds, err = thresholds(limits); err != nil {
				return &usageError{err}
			}
			if in.Of = "workers"; ofAgents || changed.Thresholds != nil || signals != nil || in.Machines != nil {
				in.Of = "agents"
			}
			for name := range changed.Thresholds {
				if flows(name) {
					changed.Thresholds[name] /= 1000 // agents record KB/min
				}
			}
			changed.Signals = signals
			if changed.ActivitySources = sources; cmd.Flags().Changed("schedule") {
				changed.Schedule = &hours
			}
			changed.SnoozeMinutes, changed.WarnBeforeMinutes = snooze, warn
			if snooze != nil || warn != nil || sources != nil || signals != nil || changed.Thresholds != nil || changed.Schedule != nil {
				if changed.Name = name + ", changed"; changed.TimeoutMinutes == 0 {
					changed.Policy = name
				}
			}
			cl, err := c.control()
			if err != nil {
				return err
			}
			next := time.Now().Add(tellAfter)
			r, err := cl.Simulate(cmd.Context(), in, func(share float64) error {
				if time.Now().After(next) {
					next = time.Now().Add(tellAfter)
					fmt.Fprintf(c.err, "%s  %.0f %%\n", time.Now().Format(time.TimeOnly), share*100)
				}
				return nil
			})
			if err != nil {
				return err
			}
			return c.print(r, func(w io.Writer) { simulationText(w, r) })
		}}
	f := cmd.Flags()
	f.StringVar(&name, "policy", "", "name of a policy, or an idle timeout like 45m or 1d")
	f.StringSliceVar(&more, "compare", nil, "policy to compare with; repeatable")
	f.StringVar(&from, "since", "7d", "start of the period: "+when.PastForms)
	f.Var(minutesFlag{&snooze}, "snooze", "use this protection after a resume, such as 30m")
	f.Var(minutesFlag{&warn}, "warn", "use this warning time")
	f.StringSliceVar(&sources, "sources", nil, "only count these signals: cml, agent, cloudwatch")
	f.StringVar(&hours, "schedule", "", "use this schedule throughout; empty is none")
	f.BoolVar(&ofAgents, "agents", false, "replay machines from their agents' readings; implied by the next three flags")
	f.StringToStringVar(&limits, "threshold", nil, "with --agents: threshold at which a signal counts as active, such as "+thresholdForms)
	f.StringSliceVar(&signals, "signals", nil, "with --agents: signals that count, such as cpu,gpu,users")
	f.StringSliceVar(&in.Machines, "machine", nil, "with --agents: only these machines")
	f.StringVar(&in.Region, "region", "", "only workers of this AWS region")
	in.WindowMinutes = 15
	f.Var((*numberFlag)(&in.WindowMinutes), "window", "a return within this time makes a pause a false stop; a bare number is minutes")
	return cmd
}

// thresholdForms is how values of signals are given, for help texts: the same
// for a policy as for the trial of one.
const thresholdForms = "cpu=20 (percent) or network=20KB (a minute; a bare number of network and disk is bytes a minute)"

// thresholds reads values of signals as policies have them: percent, and bytes a
// minute.
func thresholds(given map[string]string) (map[string]float64, error) {
	if len(given) == 0 {
		return nil, nil
	}
	out := map[string]float64{}
	for name, text := range given {
		number, factor := text, 1.0
		if flows(name) {
			number = strings.ToLower(strings.TrimSuffix(text, "/min"))
			for unit, f := range map[string]float64{"kb": 1e3, "mb": 1e6, "gb": 1e9} {
				if rest, ok := strings.CutSuffix(number, unit); ok {
					number, factor = rest, f
					break
				}
			}
		}
		v, err := strconv.ParseFloat(number, 64)
		if v *= factor; err != nil || !(v > 0) || math.IsInf(v, 0) {
			return nil, fmt.Errorf("cannot use --threshold %s=%s: want a value above 0, such as %s", name, text, thresholdForms)
		}
		out[name] = v
	}
	return out, nil
}

// flows reports whether a signal is one of bytes a minute.
func flows(signal string) bool { return signal == "network" || signal == "disk" }

func simulationText(w io.Writer, r control.Simulation) {
	fmt.Fprintf(w, "%s to %s, as recorded\n\n", clockTime(r.From), clockTime(r.To))
	rows(w, "POLICY\tTIMEOUT\tPAUSES\tFALSE STOPS\tHOURS AVOIDED\tCOMPUTE\tSTORAGE PAID\tSAVED\tHOURS UNKNOWN", func(row func(string, ...any)) {
		for _, p := range r.Policies {
			row("%s\t%s\t%d\t%d\t%.1f\t%s\t%s\t%s\t%.1f", p.Name, idle.HumanMinutes(p.TimeoutMinutes), p.Pauses, p.FalseStops, p.AvoidedHours, spent(p.Sum, p.ComputeSaved), spent(p.Sum, p.StoragePaid), saved(p.Sum), p.UnknownHours)
		}
	})
	switch {
	case !slices.ContainsFunc(r.Policies, func(p control.SimulatedOutcome) bool { return p.RunningHours+p.AvoidedHours+p.OtherHours > 0 }):
		fmt.Fprintln(w, "\nno recorded data to replay")
	case r.Recommended != "":
		fmt.Fprintf(w, "\nmost saved without a false stop: %s\n", r.Recommended)
	default:
		fmt.Fprintln(w, "\nno policy would have avoided anything without a false stop")
	}
	for _, m := range r.Missing {
		fmt.Fprintf(w, "missing %s to %s: %s\n", clockTime(m.From), clockTime(m.To), strings.TrimSpace(m.Server+" "+m.Why))
	}
}

func money(usd *float64) string {
	if usd == nil {
		return "unknown"
	}
	return fmt.Sprintf("$%.2f", *usd)
}

func (c *cli) savingsCommand() *cobra.Command {
	var from, until, by, every, idleBy, zone string
	var table bool
	cmd := &cobra.Command{Use: "savings", Short: "Show hours and money saved, and idle time not used", Args: args(cobra.NoArgs),
		Long: `Show hours avoided and money saved by actual stops, less the storage cost meanwhile,
based on the server's price table. Amounts without a price are unknown, never zero.`,
		Example: "  lull savings --since 30d\n  lull savings --by tag:team --csv\n  lull savings --since 2026-10-01T00:00:00Z --until 2026-11-01T00:00:00Z --csv\n  lull savings --by policy --every week --time-zone Europe/Berlin\n  lull savings --idle-by region",
		RunE: func(cmd *cobra.Command, _ []string) error {
			at, err := when.Past(time.Now(), from)
			if err != nil {
				return &usageError{err}
			}
			cl, err := c.control()
			if err != nil {
				return err
			}
			q := url.Values{"from": {at.UTC().Format(time.RFC3339)}, "by": {by}, "time_zone": {zone}}
			if until != "" {
				end, err := when.Past(time.Now(), until)
				if err != nil {
					return &usageError{err}
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
				return savingsCSV(c.out, r)
			}
			return c.print(r, func(w io.Writer) { savingsText(w, r) })
		}}
	cmd.Flags().StringVar(&from, "since", "30d", "start of the period: "+when.PastForms)
	cmd.Flags().StringVar(&until, "until", "", "end of the period (default: now): "+when.PastForms)
	cmd.Flags().StringVar(&by, "by", "worker", "group by worker, region, policy, instance_type, or tag:NAME")
	cmd.Flags().StringVar(&every, "every", "", "also show totals per day, week or month")
	cmd.Flags().StringVar(&idleBy, "idle-by", "", "also show the hours of the week in which each worker, region, policy, instance_type or tag:NAME ran idle")
	cmd.Flags().StringVar(&zone, "time-zone", "UTC", "time zone of days and hours, such as Europe/Berlin")
	cmd.Flags().BoolVar(&table, "csv", false, "write the groups, or with --idle-by the hours, as CSV; an empty field is unknown")
	completeWords(cmd, "every", "day", "week", "month")
	for _, f := range []string{"by", "idle-by"} {
		completeWords(cmd, f, "worker", "region", "policy", "instance_type", "tag:")
	}
	return cmd
}

func savingsText(w io.Writer, r control.Savings) {
	fmt.Fprintf(w, "%s to %s\n\n", clockTime(r.From), clockTime(r.To))
	rows(w, strings.ToUpper(r.By)+savingsHead, func(row func(string, ...any)) {
		for _, g := range append(slices.Clone(r.Groups), r.Total) {
			savingsRow(row, "", g)
		}
	})
	if len(r.MissingPrices) > 0 {
		fmt.Fprintln(w, "\nThe price table has no price for:")
		rows(w, "KIND\tREGION\tNAME\tWORKERS\tAVOIDED", func(row func(string, ...any)) {
			for _, m := range r.MissingPrices {
				row("%s\t%s\t%s\t%d\t%.1fh", m.Kind, m.Region, m.Name, m.Workers, m.Hours)
			}
		})
		fmt.Fprintln(w, "Give the server a price table that has them: lull server --prices FILE\n(kind,region,name,usd,as_of). It replaces the built-in table.")
	}
	if r.Total.UnknownStorageHours > 0 {
		fmt.Fprintln(w, "\nstorage is unknown while EC2 has not reported a worker's volumes (ec2:DescribeVolumes), or their type has no price; those hours are in no total")
	}
	if r.By == "policy" {
		fmt.Fprintln(w, "\nstops are attributed to the policy in force when they were decided, where that is recorded; everything else to the present policy")
	}
	if len(r.Periods) > 0 {
		fmt.Fprintln(w)
		rows(w, "FROM\t"+strings.ToUpper(r.By)+savingsHead, func(row func(string, ...any)) {
			for _, p := range r.Periods {
				for _, g := range append(slices.Clone(p.Groups), p.Total) {
					savingsRow(row, clockTime(p.From)+"\t", g)
				}
			}
		})
	}
	if len(r.NotAvoided) > 0 {
		fmt.Fprintln(w)
		rows(w, "IDLE AND RAN ON\tHOURS", func(row func(string, ...any)) {
			for _, cause := range slices.Sorted(maps.Keys(r.NotAvoided)) {
				row("%s\t%.1f", cause, r.NotAvoided[cause])
			}
		})
	}
	if len(r.Idle) > 0 {
		fmt.Fprintln(w)
		rows(w, "IDLE HOURS\tDAY\t0\t1\t2\t3\t4\t5\t6\t7\t8\t9\t10\t11\t12\t13\t14\t15\t16\t17\t18\t19\t20\t21\t22\t23", func(row func(string, ...any)) {
			for _, p := range r.Idle {
				for day := range 7 {
					var cells []string
					for _, h := range p.Hours[day*24 : day*24+24] {
						cells = append(cells, strconv.FormatFloat(h, 'f', 1, 64))
					}
					row("%s\t%s\t%s", named(p.Key, p.Name), time.Weekday(day).String()[:3], strings.Join(cells, "\t"))
				}
			}
		})
	}
	for _, m := range r.Missing {
		fmt.Fprintf(w, "missing %s to %s: %s %s\n", clockTime(m.From), clockTime(m.To), m.Server, m.Why)
	}
}

const savingsHead = "\tRUNNING\tAVOIDED\tCOMPUTE\tSTORAGE PAID\tSAVED\tHOURS WITHOUT A PRICE\tHOURS OF UNKNOWN STORAGE"

// saved formats what was saved, or saved at least.
func saved(s savings.Sum) string {
	if s.Saved != nil && s.Partial() {
		return "at least " + money(s.Saved)
	}
	return spent(s, s.Saved)
}

// spent is a figure of a sum; of no avoided hours it is nothing, whatever an
// hour costs.
func spent(s savings.Sum, usd *float64) string {
	if usd == nil && s.AvoidedHours == 0 {
		usd = new(float64)
	}
	return money(usd)
}

func savingsRow(row func(string, ...any), before string, g savings.Sum) {
	row("%s%s\t%.1fh\t%.1fh\t%s\t%s\t%s\t%.1f\t%.1f", before, named(g.Key, g.Name), g.RunningHours, g.AvoidedHours, spent(g, g.ComputeSaved), spent(g, g.StoragePaid), saved(g), g.UnpricedHours, g.UnknownStorageHours)
}

// named formats the name of a group for users.
func named(key, name string) string {
	if name != "" {
		return name
	}
	return dash(key)
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
