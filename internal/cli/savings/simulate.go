package savings

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/policy"
	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
	"lull/internal/protocol/control"
)

func (c verbs) simulateCommand() *cobra.Command {
	var name, from, hours string
	var more, sources, signals []string
	var limits map[string]string
	var ofAgents bool
	var snooze, warn *int
	var in control.Simulate
	cmd := &cobra.Command{Use: "simulate [--policy NAME]", Short: "Estimate a policy's effect from recorded activity", Args: term.Args(cobra.NoArgs),
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
				return term.Usage(err)
			}
			in.From = at.UTC().Format(time.RFC3339Nano)
			if name == "" && (more != nil || snooze != nil || warn != nil || sources != nil || signals != nil || limits != nil || cmd.Flags().Changed("schedule")) {
				return term.Usage(errors.New("nothing to vary or compare: give --policy, a name or a timeout like 45m"))
			}
			asked := append([]string{name}, more...)
			if name == "" {
				asked = nil // all named policies
			}
			for _, n := range asked {
				p := control.SimulatedPolicy{Name: n}
				if m, err := term.WholeMinutes(n); err == nil && m > 0 {
					p.TimeoutMinutes = m
				}
				in.Policies = append(in.Policies, p)
			}
			changed := &control.SimulatedPolicy{}
			if len(in.Policies) > 0 {
				changed = &in.Policies[0]
			}
			if changed.Thresholds, err = policy.Thresholds(limits); err != nil {
				return term.Usage(err)
			}
			if in.Of = "workers"; ofAgents || changed.Thresholds != nil || signals != nil || in.Machines != nil {
				in.Of = "agents"
			}
			for name := range changed.Thresholds {
				if policy.Flows(name) {
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
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			next := time.Now().Add(term.SlowAfter)
			r, err := cl.Simulate(cmd.Context(), in, func(share float64) error {
				if time.Now().After(next) {
					next = time.Now().Add(term.SlowAfter)
					fmt.Fprintf(c.Err, "%s  %.0f %%\n", time.Now().Format(time.TimeOnly), share*100)
				}
				return nil
			})
			if err != nil {
				return err
			}
			return c.Print(r, func(w io.Writer) { simulationText(w, r) })
		}}
	f := cmd.Flags()
	f.StringVar(&name, "policy", "", "name of a policy, or an idle timeout like 45m or 1d")
	f.StringSliceVar(&more, "compare", nil, "policy to compare with; repeatable")
	f.StringVar(&from, "since", "7d", "start of the period: "+when.PastForms)
	f.Var(term.MinutesInto(&snooze), "snooze", "use this protection after a resume, such as 30m")
	f.Var(term.MinutesInto(&warn), "warn", "use this warning time")
	f.StringSliceVar(&sources, "sources", nil, "only count these signals: cml, agent, cloudwatch")
	f.StringVar(&hours, "schedule", "", "use this schedule throughout; empty is none")
	f.BoolVar(&ofAgents, "agents", false, "replay machines from their agents' readings; implied by the next three flags")
	f.StringToStringVar(&limits, "threshold", nil, "with --agents: threshold at which a signal counts as active, such as "+policy.ThresholdForms)
	f.StringSliceVar(&signals, "signals", nil, "with --agents: signals that count, such as cpu,gpu,users")
	f.StringSliceVar(&in.Machines, "machine", nil, "with --agents: only these machines")
	f.StringVar(&in.Region, "region", "", "only workers of this AWS region")
	in.WindowMinutes = 15
	f.Var((*term.NumberFlag)(&in.WindowMinutes), "window", "a return within this time makes a pause a false stop; a bare number is minutes")
	return cmd
}

func simulationText(w io.Writer, r control.Simulation) {
	fmt.Fprintf(w, "%s to %s, as recorded\n\n", term.Time(r.From), term.Time(r.To))
	term.Rows(w, "POLICY\tTIMEOUT\tPAUSES\tFALSE STOPS\t4:HOURS AVOIDED\t3:COMPUTE\t2:STORAGE PAID\tSAVED\t1:HOURS UNKNOWN", func(row func(string, ...any)) {
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
		fmt.Fprintf(w, "missing %s to %s: %s\n", term.Time(m.From), term.Time(m.To), strings.TrimSpace(m.Server+" "+m.Why))
	}
}
