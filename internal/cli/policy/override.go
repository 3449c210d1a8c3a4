package policy

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/policy"
	"lull/internal/core/policy/when"
	"lull/internal/protocol/control"
)

func (c verbs) overrideCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "override", Aliases: []string{"overrides"}, Short: "Manage temporary exceptions from policies and schedules", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	var ended bool
	ls := &cobra.Command{Use: "ls", Short: "List overrides that have not ended", Example: "  lull override ls", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			l, err := control.Read[control.List[control.Exception]](cmd.Context(), cl, fmt.Sprintf("/overrides?ended=%t", ended))
			if err != nil {
				return err
			}
			return c.Print(l.Items, func(w io.Writer) {
				term.Rows(w, "ID\tKIND\tWORKERS\t1:FROM\tUNTIL\t2:BY\t3:REASON", func(row func(string, ...any)) {
					for _, o := range l.Items {
						kind := o.Kind
						if o.Policy != "" {
							kind += " " + o.Policy
						}
						row("%s\t%s\t%s\t%s\t%s\t%s\t%s", o.ID, kind, o.Whom(), term.OptionalTime(&o.From), term.OptionalTime(&o.Until), o.By, term.Dash(o.Reason))
					}
				})
			})
		}}
	ls.Flags().BoolVar(&ended, "ended", false, "also list overrides that ended in the last 60 days")
	end := &cobra.Command{Use: "end ID", Short: "End an override now", Example: "  lull override end o-0123456789ab", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeOverrides,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			o, err := control.Write[control.Exception](cmd.Context(), cl, "DELETE", "/overrides/"+a[0], nil)
			if err != nil {
				return err
			}
			return c.Print(o, func(w io.Writer) { fmt.Fprintf(w, "%s ended\n", a[0]) })
		}}
	cmd.AddCommand(ls, end,
		c.overrideVerb(policy.Keep, "[WORKER...]", "Keep workers running until a time",
			"Keep workers running until a time, by default until the end of today. If a schedule has\nclosed by then, it pauses them."),
		c.overrideVerb(policy.Skip, "[WORKER...]", "Skip the schedule until a time",
			"Skip the schedule until a time, by default until the end of today. What the schedule would\nhave done meanwhile is not caught up on."),
		c.overrideVerb(policy.Freeze, "[WORKER...]", "Suspend automatic pauses and starts until a time",
			"Suspend automatic pauses and starts until a time. A ttl_deadline still applies."),
		c.overrideVerb(policy.Use, "POLICY [WORKER...]", "Use another policy until a time",
			"Use another policy until a time. It takes precedence over every other assignment."))
	return cmd
}

func (c verbs) overrideVerb(kind, takes, short, long string) *cobra.Command {
	var which choice
	var from, until, reason string
	var dur time.Duration
	least := 0
	if kind == policy.Use {
		least = 1
	}
	example := map[string]string{policy.Keep: "cml-1 --until 22:00", policy.Skip: "cml-1", policy.Freeze: "--all --until \"mon 08:00\" --reason \"release\"", policy.Use: "conservative --tag team=ml --for 2d"}[kind]
	cmd := &cobra.Command{Use: kind + " " + takes, Short: short, Long: long, Args: term.Args(cobra.MinimumNArgs(least)), Example: "  lull override " + kind + " " + example,
		ValidArgsFunction: func(cmd *cobra.Command, a []string, to string) ([]string, cobra.ShellCompDirective) {
			if len(a) < least {
				return c.completeRules("policies")(cmd, a, to)
			}
			return c.CompleteWorkers(cmd, nil, to)
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			now := time.Now()
			in := control.NewOverride{Kind: kind, All: which.all, Reason: reason}
			if kind == policy.Use {
				in.Policy, a = a[0], a[1:]
			}
			start := now
			if from != "" {
				t, err := when.Moment(now, from)
				if err != nil {
					return term.Usage(err)
				}
				start, in.From = t, t.Format(time.RFC3339)
			}
			// The server determines the end of the fleet's day.
			if today := until == "" && dur == 0 && (kind == policy.Keep || kind == policy.Skip); !today {
				if until != "" {
					start = now
				}
				t, err := term.End(start, until, dur)
				if err != nil {
					return term.Usage(err)
				}
				in.Until = t.Format(time.RFC3339)
			}
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			if in.Selector, err = which.scope(cmd, cl, a); err != nil {
				return err
			}
			o, err := control.Write[control.Exception](cmd.Context(), cl, "POST", "/overrides", in)
			if err != nil {
				return err
			}
			return c.Print(o, func(w io.Writer) {
				fmt.Fprintf(w, "%s until %s for %s; end it with: lull override end %s\n", kind, term.OptionalTime(&o.Until), o.Whom(), o.ID)
			})
		}}
	which.bind(cmd)
	term.BindEnd(cmd.Flags(), &until, &dur)
	cmd.Flags().StringVar(&from, "from", "", "start (default: now): "+when.Forms)
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the record")
	return cmd
}

func (c verbs) completeOverrides(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
	cl, err := c.ServerClient()
	if err != nil || len(a) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	l, err := control.Read[control.List[control.Exception]](cmd.Context(), cl, "/overrides")
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var out []string
	for _, o := range l.Items {
		out = append(out, o.ID+"\t"+o.Whom()+": "+o.Sentence())
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

func (c verbs) budgetCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "budget", Aliases: []string{"budgets"}, Short: "Limit automatic stops and starts per time window", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	ls := &cobra.Command{Use: "ls", Short: "List budgets and their current use", Example: "  lull budget ls", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			l, err := control.Read[control.List[control.BudgetState]](cmd.Context(), cl, "/budgets")
			if err != nil {
				return err
			}
			return c.Print(l.Items, func(w io.Writer) {
				term.Rows(w, "NAME\tRULE\t3:WORKERS\t1:REASONS\t2:DURING\tCOUNT\t4:ROOM AGAIN", func(row func(string, ...any)) {
					for _, b := range l.Items {
						room := "now"
						if !b.State.Free {
							room = term.OptionalTime(b.State.FreeAt)
						}
						row("%s\t%s\t%s\t%s\t%s\t%d\t%s", b.Name, b.Describe(), b.Selector, term.Dash(strings.Join(b.Reasons, ",")), term.Dash(b.During), b.State.Count, room)
					}
				})
			})
		}}
	rm := &cobra.Command{Use: "rm NAME", Short: "Remove a budget or reset a built-in one", Example: "  lull budget rm nights", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeRules("budgets"),
		RunE: func(cmd *cobra.Command, a []string) error { return c.removeRule(cmd, "/budgets/", a[0]) }}
	cmd.AddCommand(ls, c.budgetSet(), rm)
	return cmd
}

func (c verbs) budgetSet() *cobra.Command {
	var in control.BudgetBody
	var which choice
	var most string
	var per time.Duration
	cmd := &cobra.Command{Use: "set NAME", Short: "Create or replace a budget", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeRules("budgets"),
		Example: "  lull budget set gently --of stop --max 10% --per 1h\n  lull budget set no-stops --of stop --max 0 --per 1h --during release-week",
		RunE: func(cmd *cobra.Command, a []string) error {
			n, percent := strings.CutSuffix(most, "%")
			v, err := strconv.ParseFloat(n, 64)
			if err != nil || !percent && (v != math.Trunc(v) || math.Abs(v) > 1e6) {
				return term.Usage(fmt.Errorf("cannot read --max %q: want a number such as 5 or 10%%", most))
			}
			if percent {
				in.MaxPercent = &v
			} else {
				in.MaxActions = new(int(v))
			}
			if per%time.Minute != 0 {
				return term.Usage(fmt.Errorf("cannot use --per %s: want whole minutes", per))
			}
			in.PerMinutes = int(per / time.Minute)
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			if len(which.tags) > 0 || which.region != "" {
				if in.Selector, err = which.scope(cmd, cl, nil); err != nil {
					return err
				}
			}
			b, err := putRule[policy.Budget](cmd, cl, "/budgets/", a[0], in, false)
			if err != nil {
				return err
			}
			return c.Print(b, func(w io.Writer) { fmt.Fprintf(w, "%s: %s of %s\n", b.Name, b.Describe(), b.Selector) })
		}}
	f := cmd.Flags()
	f.StringVar(&in.For, "of", "stop", "what it limits: stop or start")
	f.StringVar(&most, "max", "", "maximum per time window: 5, or 10% of the workers")
	f.Var((*term.LengthFlag)(&per), "per", "length of the time window")
	f.StringSliceVar(&in.Reasons, "reason", nil, "only for these reasons: idle_timeout, scale_down, schedule; for starts: schedule, wake, repair")
	f.StringVar(&in.During, "during", "", "only while this schedule is open")
	f.StringVar(&in.Description, "description", "", "description")
	which.bind(cmd)
	term.CompleteWords(cmd, "of", policy.Stops, policy.Starts)
	c.completeFlag(cmd, "during", "schedules")
	return cmd
}
