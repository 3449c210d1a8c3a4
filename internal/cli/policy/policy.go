package policy

import (
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/explain"
	"lull/internal/cli/term"
	"lull/internal/core/policy"
	"lull/internal/protocol/control"
)

func (c verbs) policyCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "policy", Aliases: []string{"policies"}, Short: "Manage idle policies and their assignments", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	ls := &cobra.Command{Use: "ls", Short: "List policies", Example: "  lull policy ls", Args: term.Args(cobra.NoArgs), RunE: c.policyLs}
	get := &cobra.Command{Use: "get NAME", Short: "Show a policy", Example: "  lull policy get balanced", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeRules("policies"),
		RunE: func(cmd *cobra.Command, a []string) error { return c.showRule(cmd, "/policies/", a[0], policy.Named{}) }}
	rm := &cobra.Command{Use: "rm NAME", Short: "Remove an unused policy or reset a built-in one", Example: "  lull policy rm nights", Args: term.Args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.completeRules("policies"),
		RunE:              func(cmd *cobra.Command, a []string) error { return c.removeRule(cmd, "/policies/", a[0]) }}
	resolve := &cobra.Command{Use: "resolve WORKER", Short: "Show a worker's effective policy and its sources", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.CompleteWorkers,
		Long: `Show a worker's effective policy and the source of each value. The first of these that
sets a value wins: an override, the worker's own field, its own policy, a group by tag
or region, the template, the policy for all workers, the settings.`,
		Example: "  lull policy resolve cml-1",
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			p, err := cl.WorkerPolicy(cmd.Context(), w.ID)
			if err != nil {
				return err
			}
			return c.Print(p, func(out io.Writer) { resolvedText(out, p) })
		}}
	groups := &cobra.Command{Use: "groups", Short: "List group assignments of policies, weakest first", Example: "  lull policy groups", Args: term.Args(cobra.NoArgs), RunE: c.policyGroups}
	cmd.AddCommand(ls, get, c.policyWrite("create"), c.policyWrite("edit"), rm, c.applyCommand("policy", "policies"), resolve, groups)
	return cmd
}

func (c verbs) policyLs(cmd *cobra.Command, _ []string) error {
	cl, err := c.ServerClient()
	if err != nil {
		return err
	}
	l, err := cl.Policies(cmd.Context())
	if err != nil {
		return err
	}
	return c.Print(l, func(w io.Writer) {
		term.Rows(w, "NAME\tTIMEOUT\tACTION\t2:SCHEDULE\t3:MODE\t1:DESCRIPTION", func(row func(string, ...any)) {
			for _, p := range l {
				mode := "armed"
				if p.Shadow != nil && *p.Shadow {
					mode = "shadow"
				}
				row("%s\t%s\t%s\t%s\t%s\t%s", p.Name, minutesText(p.IdleTimeoutMinutes), term.Dash(value(p.PauseAction)), term.Dash(value(p.Schedule)), mode, p.Description)
			}
		})
	})
}

func (c verbs) policyGroups(cmd *cobra.Command, _ []string) error {
	cl, err := c.ServerClient()
	if err != nil {
		return err
	}
	l, err := control.Read[control.List[policy.Group]](cmd.Context(), cl, "/policy-groups")
	if err != nil {
		return err
	}
	return c.Print(l.Items, func(w io.Writer) {
		term.Rows(w, "WORKERS\tPOLICY\tSCHEDULE\t3:PRIORITY\t1:BY\t2:ID", func(row func(string, ...any)) {
			for _, g := range l.Items {
				row("%s\t%s\t%s\t%d\t%s\t%s", g.Selector, term.Dash(g.Policy), term.Dash(value(g.Schedule)), g.Priority, term.Dash(g.UpdatedBy), g.ID)
			}
		})
	})
}

func value(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func minutesText(m *int) string {
	if m == nil {
		return "-"
	}
	return term.Span(term.Minutes(m))
}

// policyWrite returns the verb create or edit. edit starts from the existing policy.
func (c verbs) policyWrite(verb string) *cobra.Command {
	var in control.PolicyBody
	var action, schedule, description string
	var shadow, force, enabled bool
	var limits map[string]string
	short := map[string]string{"create": "Create a policy", "edit": "Change a policy; values without a flag stay as they are"}[verb]
	cmd := &cobra.Command{Use: verb + " NAME", Short: short, Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeRules("policies"),
		Example: "  lull policy " + verb + " nights --idle-timeout 20m --action hibernate --schedule office",
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			body := control.PolicyBody{}
			if verb == "edit" {
				old, err := control.Read[policy.Named](cmd.Context(), cl, "/policies/"+url.PathEscape(a[0]))
				if err != nil {
					return err
				}
				body = control.PolicyBody{Description: old.Description, Values: old.Values}
			}
			set := func(name string, do func()) {
				if cmd.Flags().Changed(name) {
					do()
				}
			}
			set("idle-timeout", func() { body.IdleTimeoutMinutes = in.IdleTimeoutMinutes })
			set("warn-before", func() { body.WarnBeforeMinutes = in.WarnBeforeMinutes })
			set("check-interval", func() { body.CheckIntervalMinutes = in.CheckIntervalMinutes })
			set("snooze", func() { body.SnoozeMinutes = in.SnoozeMinutes })
			set("action", func() { body.PauseAction = &action })
			set("schedule", func() { body.Schedule = &schedule })
			set("source", func() { body.ActivitySources = in.ActivitySources })
			set("signal", func() { body.Signals = in.Signals })
			set("accept", func() { body.AcceptedRisks = in.AcceptedRisks })
			set("shadow", func() { body.Shadow = &shadow })
			set("force", func() { body.Force = &force })
			set("enabled", func() { body.Enabled = &enabled })
			set("description", func() { body.Description = description })
			given, err := Thresholds(limits)
			if err != nil {
				return term.Usage(err)
			}
			for k, v := range given {
				if body.Thresholds == nil {
					body.Thresholds = map[string]float64{}
				}
				body.Thresholds[k] = v
			}
			out, err := putRule[policy.Named](cmd, cl, "/policies/", a[0], body, verb == "create")
			if err != nil {
				return err
			}
			return c.Print(out, func(w io.Writer) {
				fmt.Fprintln(w, policyText(out))
				fmt.Fprintf(w, "Show all its settings with: lull policy get %s\n", out.Name)
				if out.IdleTimeoutMinutes != nil && out.WarnBeforeMinutes != nil {
					given, timeout := term.Minutes(out.WarnBeforeMinutes), term.Minutes(out.IdleTimeoutMinutes)
					if text := explain.WarningText(given, timeout, "timeout"); text != term.Span(given) {
						fmt.Fprintln(w, "Warning before:", text)
					}
				}
			})
		}}
	f := cmd.Flags()
	f.Var(term.MinutesInto(&in.IdleTimeoutMinutes), "idle-timeout", "idle timeout")
	f.Var(term.MinutesInto(&in.WarnBeforeMinutes), "warn-before", "time from the warning to the pause, at most half of the idle timeout; 0 disables the warning")
	f.Var(term.MinutesInto(&in.CheckIntervalMinutes), "check-interval", "minimum time between two checks")
	f.Var(term.MinutesInto(&in.SnoozeMinutes), "snooze", "protection from automatic pauses after a resume; 0 disables it")
	f.StringVar(&action, "action", "", "pause action: stop, hibernate or auto")
	f.StringVar(&schedule, "schedule", "", "schedule to follow; empty removes it")
	f.StringSliceVar(&in.ActivitySources, "source", nil, "activity sources: cml, agent, cloudwatch")
	f.StringSliceVar(&in.Signals, "signal", nil, "agent signals that count: cpu, network, disk, gpu, terminals, users, recent")
	f.StringToStringVar(&limits, "threshold", nil, "threshold at which a signal counts as active, such as "+ThresholdForms)
	f.StringSliceVar(&in.AcceptedRisks, "accept", nil, "stop risks to accept: instance_store, no_elastic_ip, asg_member, spot, stop_protected")
	f.BoolVar(&shadow, "shadow", false, "dry run: decide and record, but take no action")
	f.BoolVar(&force, "force", false, "let the schedule pause active workers, after the warning")
	f.BoolVar(&enabled, "enabled", true, "whether idle workers are paused")
	f.StringVar(&description, "description", "", "description")
	c.completeFlag(cmd, "schedule", "schedules")
	term.CompleteWords(cmd, "action", "stop", "hibernate", "auto")
	return cmd
}

// completeFlag makes a flag complete the names of rules of a kind.
func (c verbs) completeFlag(cmd *cobra.Command, flag, kind string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, to string) ([]string, cobra.ShellCompDirective) {
		return c.completeRules(kind)(cmd, nil, to) // the flag was defined by the caller
	})
}

// completeRules returns a completion function for the names of policies, schedules or
// budgets.
func (c verbs) completeRules(kind string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(a) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		cl, err := c.ServerClient()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		type rule struct{ Name, Description string }
		l, err := control.Read[control.List[rule]](cmd.Context(), cl, "/"+kind)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		var out []string
		for _, r := range l.Items {
			out = append(out, r.Name+"\t"+r.Description)
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}

// putRule writes a rule. If create is set, the rule must not exist yet.
func putRule[T any](cmd *cobra.Command, cl *control.Client, path, name string, body any, create bool) (T, error) {
	query := ""
	if create {
		query = "?create=true"
	}
	return control.Write[T](cmd.Context(), cl, "PUT", path+url.PathEscape(name)+query, body)
}

// policyText returns a policy's values as text.
func policyText(p policy.Named) string {
	s := "Policy " + p.Name + " pauses idle workers"
	if p.Enabled != nil && !*p.Enabled {
		s = "Policy " + p.Name + " does not pause idle workers"
	} else {
		if p.PauseAction != nil {
			s += " (" + *p.PauseAction + ")"
		}
		if p.IdleTimeoutMinutes != nil {
			s += " after " + term.Span(term.Minutes(p.IdleTimeoutMinutes))
		} else {
			s += " after the inherited timeout"
		}
		switch {
		case p.WarnBeforeMinutes == nil:
		case *p.WarnBeforeMinutes == 0:
			s += ", without a warning"
		default:
			s += ", with a warning " + term.Span(term.Minutes(p.WarnBeforeMinutes)) + " before"
		}
	}
	s += "."
	if p.Schedule != nil && *p.Schedule != "" {
		s += " It keeps the hours of schedule " + *p.Schedule + "."
	}
	if p.Shadow != nil && *p.Shadow {
		s += " It is in dry-run mode: it decides and records, and takes no action."
	}
	return s
}

// showRule prints one rule as YAML. like is a pointer to a value of its type.
func (c verbs) showRule(cmd *cobra.Command, path, name string, like any) error {
	cl, err := c.ServerClient()
	if err != nil {
		return err
	}
	full := path + url.PathEscape(name)
	switch like.(type) {
	case policy.Named:
		return show[policy.Named](c, cmd, cl, full)
	default:
		return show[policy.Schedule](c, cmd, cl, full)
	}
}

func show[T any](c verbs, cmd *cobra.Command, cl *control.Client, path string) error {
	v, err := control.Read[T](cmd.Context(), cl, path)
	if err != nil {
		return err
	}
	return c.Print(v, func(w io.Writer) { term.YamlText(w, v) })
}

func (c verbs) removeRule(cmd *cobra.Command, path, name string) error {
	cl, err := c.ServerClient()
	if err != nil {
		return err
	}
	_, err = cl.Call(cmd.Context(), "DELETE", "/api/v1"+path+url.PathEscape(name), nil, nil)
	if err == nil && !c.JSON {
		fmt.Fprintln(c.Out, name, "removed")
	}
	return err
}

// choice selects workers by names and by common properties, from flags.
type choice struct {
	tags   []string
	region string
	all    bool
}

func (s *choice) bind(cmd *cobra.Command) {
	cmd.Flags().StringSliceVar(&s.tags, "tag", nil, "workers with this tag, present and future: name or name=value, repeatable")
	cmd.Flags().StringVar(&s.region, "region", "", "all workers in this AWS region")
	cmd.Flags().BoolVar(&s.all, "all", false, "all workers")
}

// scope returns the selector for the workers given by ID or name, and by the flags of
// s.
func (s *choice) scope(cmd *cobra.Command, cl *control.Client, workers []string) (policy.Scope, error) {
	out := policy.Scope{Region: s.region}
	for _, kv := range s.tags {
		k, v, _ := strings.Cut(kv, "=")
		if out.Tags == nil {
			out.Tags = map[string]string{}
		}
		out.Tags[k] = v
	}
	selected := !out.All() || s.all
	if selected == (len(workers) > 0) || s.all && !out.All() {
		return out, term.Usage(fmt.Errorf("no workers selected: name them, or use --tag, --region or --all"))
	}
	for _, ref := range workers {
		w, err := cl.Worker(cmd.Context(), ref)
		if err != nil {
			return out, err
		}
		out.Workers = append(out.Workers, w.ID)
	}
	return out, nil
}

// applyCommand returns the verb that assigns a policy or a schedule to workers.
func (c verbs) applyCommand(kind, path string) *cobra.Command {
	var which choice
	var priority int
	var remove bool
	cmd := &cobra.Command{Use: "apply NAME [WORKER...]", Short: "Assign a " + kind + " to workers or groups of workers", Args: term.Args(cobra.MinimumNArgs(1)),
		Long: `Assign a ` + kind + ` to workers by name, or to all workers, present and future, with a tag or in
a region. If several groups of a worker have one, the highest --priority wins.`,
		Example: "  lull " + kind + " apply NAME cml-1 cml-2\n  lull " + kind + " apply NAME --tag team=ml\n  lull " + kind + " apply NAME --all",
		ValidArgsFunction: func(cmd *cobra.Command, a []string, to string) ([]string, cobra.ShellCompDirective) {
			if len(a) == 0 {
				return c.completeRules(path)(cmd, a, to)
			}
			return c.CompleteWorkers(cmd, nil, to)
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			sel, err := which.scope(cmd, cl, a[1:])
			if err != nil {
				return err
			}
			in := control.Apply{Scope: sel, All: which.all, Remove: remove}
			if cmd.Flags().Changed("priority") {
				in.Priority = &priority
			}
			out, err := control.Write[control.Applied](cmd.Context(), cl, "POST", "/"+path+"/"+url.PathEscape(a[0])+"/apply", in)
			if err != nil {
				return err
			}
			return c.Print(out, func(w io.Writer) {
				verb := "has " + kind + " " + a[0]
				if remove {
					verb = "has no " + kind + " of its own"
				}
				for _, v := range out.Workers {
					fmt.Fprintln(w, v.Name, verb)
				}
				if out.Group != nil {
					fmt.Fprintln(w, out.Group.Selector, verb)
				}
			})
		}}
	which.bind(cmd)
	cmd.Flags().IntVar(&priority, "priority", 0, "priority among the groups of a worker; the highest wins")
	cmd.Flags().BoolVar(&remove, "remove", false, "remove the assignment; refused if a different one is in place")
	return cmd
}

// resolvedText prints a worker's effective policy.
func resolvedText(w io.Writer, p control.WorkerPolicy) {
	fmt.Fprintf(w, "%s has policy %s\n\n", p.WorkerName, p.Name)
	term.Rows(w, "VALUE\t\tFROM", func(row func(string, ...any)) {
		from := func(field string) string { return p.From[field].String() }
		row("idle timeout\t%s\t%s", term.Span(time.Duration(p.Timeout)), from("idle_timeout"))
		row("warning before\t%s\t%s", explain.WarningText(time.Duration(p.WarnBefore), time.Duration(p.Timeout), "timeout"), from("warn_before"))
		row("check interval\t%s\t%s", term.Span(time.Duration(p.CheckInterval)), from("check_interval"))
		row("snooze\t%s\t%s", term.Span(time.Duration(p.Snooze)), from("snooze"))
		row("action\t%s\t%s", p.PauseAction, from("pause_action"))
		row("enabled\t%t\t%s", p.Enabled, from("enabled"))
		row("sources\t%s\t%s", strings.Join(p.ActivitySources, ","), from("activity_sources"))
		if p.Signals != nil {
			row("signals\t%s\t%s", strings.Join(p.Signals, ","), from("signals"))
		}
		for _, k := range slices.Sorted(maps.Keys(p.Thresholds)) {
			row("threshold %s\t%g\t%s", k, p.Thresholds[k], from("thresholds"))
		}
		row("accepted risks\t%s\t%s", term.Dash(strings.Join(p.AcceptedRisks, ",")), from("accepted_risks"))
		row("shadow\t%t\t%s", p.Shadow, from("shadow"))
		row("schedule\t%s\t%s", term.Dash(p.Schedule), from("schedule"))
		row("force\t%t\t%s", p.Force, from("force"))
	})
	explain.RulesText(w, p)
}
