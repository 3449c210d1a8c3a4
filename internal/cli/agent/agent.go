package agent

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/explain"
	"lull/internal/cli/term"
	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
)

func (c verbs) agentStatus() *cobra.Command {
	return c.OnAgent(&cobra.Command{Use: "status", Short: "Show signals, stages, policy and the next action", Args: term.Args(cobra.NoArgs),
		Example: "  lull agent status\n  lull agent status --json"},
		func(cmd *cobra.Command, _ []string, cl *agentctl.Client) error {
			s, err := cl.Status(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(s, func(w io.Writer) { c.agentStatusText(w, s) })
		})
}

func (c verbs) agentStatusText(w io.Writer, s agentctl.Status) {
	if h := s.Halted; h != nil {
		fmt.Fprintln(w, c.Red("HALTED: "+term.Localized(h.Sentence("Automatic actions on this machine are"))+" End it with: lull agent halt --off"))
	}
	if l := s.Server; l != nil && l.Halted {
		fmt.Fprintln(w, c.Red("HALTED: "+l.Halt+" End it with: lull halt --off --server URL"))
	}
	for _, a := range s.Alarms {
		fmt.Fprintln(w, c.Red(fmt.Sprintf("ALARM %s since %s: %s", a.Code, term.Time(a.Since), term.Localized(a.Sentence))))
	}
	where := "no cloud"
	switch {
	case s.InstanceID != "":
		where = s.InstanceID + " in " + s.Region
	case s.Cloud != "" && s.Cloud != "none":
		where = s.Cloud + ", instance not yet known"
	}
	fmt.Fprintf(w, "lull agent %s (built %s), %s, watching since %s\n\n", s.Version, term.Dash(s.BuildDate), where, term.Time(s.StartedAt))
	for _, g := range s.Stages {
		mark := " "
		if g.Number == s.Stage {
			mark = ">"
		}
		fmt.Fprintf(w, "%s stage %d, %s: %s. %s\n", mark, g.Number, g.Name, strings.ReplaceAll(g.Answer, "_", " "), term.Localized(g.Sentence))
	}
	fmt.Fprintln(w)
	explain.SignalTable(w, evidence.Signals(s.Verdict.At, s.Policy, s.Readings))
	for _, name := range s.NotAsked {
		fmt.Fprintf(w, "%s: not read, because another signal is active\n", name)
	}
	fmt.Fprintln(w)
	explain.VerdictText(w, s.Verdict, nil)
	if l := s.Server; l != nil {
		what := "the server has not answered yet"
		switch {
		case l.WorkerID != "":
			what = fmt.Sprintf("the server knows it as worker %s; decides: %s", l.WorkerID, l.Holder)
		case l.ReportedAt != nil:
			what = "the server has no worker for this machine"
		}
		if l.Error != "" {
			what += " (not reached: " + l.Error + ")"
		}
		fmt.Fprintln(w, what)
	}
	if s.WarnedAt != nil {
		fmt.Fprintf(w, "warned at %s\n", term.Time(*s.WarnedAt))
	}
	if s.TTL != nil {
		fmt.Fprintf(w, "TTL: %s\n", term.Time(*s.TTL))
	}
	if s.Completion != "" {
		fmt.Fprintf(w, "completed with status %s\n", s.Completion)
	}
	fmt.Fprintf(w, "next: %s\n", lowerFirst(nextText(time.Now(), s)))
	if s.Last != nil {
		fmt.Fprintf(w, "last action: %s\n", outcomeText(s.Last))
		hookText(w, "  ", "pre-stop", s.Last.Hook)
		hookText(w, "  ", "post-cancel", s.Last.PostCancel)
	}
	fmt.Fprintln(w, "\npolicy:")
	t := term.Table(w)
	for _, v := range s.Settings {
		if v.Source != "default" {
			fmt.Fprintf(t, "  %s\t%s\t(%s)\n", v.Name, v.Value, v.Source)
		}
	}
	t.Flush()
	for _, g := range s.Config {
		fmt.Fprintf(w, "  %s: %s %s\n", g.Source, g.State, g.Detail)
		for _, f := range g.Faults {
			fmt.Fprintf(w, "    %s\n", f.Error())
		}
	}
	if len(s.Leases) > 0 {
		fmt.Fprintln(w)
		explain.Leases(w, s.Leases)
	}
}

func outcomeText(o *agentctl.Outcome) string {
	s := fmt.Sprintf("%s because of %s at %s: %s", o.Action, o.Reason, term.Time(o.StartedAt), o.Phase)
	if o.Detail != "" {
		s += " (" + o.Detail + ")"
	}
	return s
}

func (c verbs) agentWhy() *cobra.Command {
	cmd := c.OnAgent(&cobra.Command{Use: "why [MACHINE]", Short: "Explain why this machine runs or was stopped", Args: term.Args(cobra.MaximumNArgs(1)), ValidArgsFunction: c.completeAgents,
		Long: `Explain why a machine with an agent runs, or why, when and by whom it was stopped:
each signal with its value, threshold, window and age, every reason against a stop,
and what would change the outcome. Without MACHINE, ask the agent of this machine;
with MACHINE, ask the server, which answers from that agent's reports.`,
		Example: "  lull agent why\n  lull agent why --at 03:30\n  lull agent why i-0123456789abcdef0 --at 2h"},
		func(cmd *cobra.Command, a []string, cl *agentctl.Client) error {
			t, err := explain.AtTime(cmd)
			if err != nil {
				return err
			}
			if len(a) == 1 {
				return c.agentWhyThere(cmd.Context(), a[0], t)
			}
			y, err := cl.Why(cmd.Context(), t)
			if err != nil {
				return err
			}
			return c.Print(y, func(w io.Writer) {
				explain.AccountText(w, y.Account, t)
				if y.Last != nil {
					fmt.Fprintf(w, "last action: %s\n", outcomeText(y.Last))
					hookText(w, "  ", "pre-stop", y.Last.Hook)
					hookText(w, "  ", "post-cancel", y.Last.PostCancel)
				}
			})
		})
	explain.AtFlag(cmd)
	return cmd
}

// agentWhyThere explains why a machine is running, from what its agent reported to a
// server.
func (c verbs) agentWhyThere(ctx context.Context, machine string, at time.Time) error {
	c.ShowHalt(ctx)
	cl, err := c.ServerClient()
	if err != nil {
		return err
	}
	y, err := cl.AgentWhy(ctx, machine, at)
	if err != nil {
		return err
	}
	return c.Print(y, func(w io.Writer) {
		explain.AccountText(w, y.Account, at)
		if y.Readings == "unknown" {
			fmt.Fprintln(w, "\nreadings: unknown. "+y.Unheard)
		}
	})
}

// completeAgents completes the names of machines with agents that report to the
// server.
func (c verbs) completeAgents(cmd *cobra.Command, a []string, _ string) (names []string, _ cobra.ShellCompDirective) {
	if len(a) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	cl, err := c.ServerClient()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	l, err := control.All[control.Machine](cmd.Context(), cl, "/api/v1/agents", nil)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	for _, m := range l {
		names = append(names, m.Name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

func (c verbs) agentReload() *cobra.Command {
	return c.OnAgent(&cobra.Command{Use: "reload", Short: "Re-read tags and local policy, and show what changed", Example: "  lull agent reload", Args: term.Args(cobra.NoArgs),
		Long: `Have the running agent re-read its tags and its local policy file, and show what
changed. Faults are listed and make the exit code 1; settings that cannot be read
keep their last good values.`},
		func(cmd *cobra.Command, _ []string, cl *agentctl.Client) error {
			r, err := cl.Reload(cmd.Context())
			if err != nil {
				return err
			}
			if err := c.Print(r, func(w io.Writer) {
				if len(r.Changed) == 0 {
					fmt.Fprintln(w, "nothing changed")
				} else {
					fmt.Fprintln(w, "changed: "+strings.Join(r.Changed, ", "))
				}
				for _, g := range r.Config {
					fmt.Fprintf(w, "%s: %s %s\n", g.Source, g.State, g.Detail)
				}
			}); err != nil {
				return err
			}
			for _, f := range r.Faults {
				fmt.Fprintln(c.Err, "lull: "+f.Error())
			}
			bad := slices.ContainsFunc(r.Config, func(g agentctl.Config) bool { return g.State == "unreadable" || g.State == "cached" })
			if bad || len(r.Faults) > 0 {
				return term.Exit(term.ExitFailed)
			}
			return nil
		})
}

func (c verbs) agentSnooze() *cobra.Command {
	var e term.EndFlags
	cmd := c.OnAgent(&cobra.Command{Use: "snooze [DURATION]", Short: "Keep this machine running for a while", Args: term.Args(cobra.MaximumNArgs(1)),
		Long: `Keep this machine running for a while. A snooze delays a stop for idleness or a
completion, even if the work was completed first. It does not delay a TTL, which only
lull agent ttl extend moves.`,
		Example: "  lull agent snooze 2h\n  lull agent snooze --until 22:00\n  lull agent snooze --off"},
		func(cmd *cobra.Command, a []string, cl *agentctl.Client) error {
			if len(a) == 1 {
				d, err := when.Length(a[0])
				if err != nil || e.Dur != 0 {
					return term.Usage(fmt.Errorf("cannot snooze for %q: want one duration such as 2h", a[0]))
				}
				e.Dur = d
			}
			end, err := e.End(time.Now())
			if err != nil {
				return err
			}
			var r agentctl.SnoozeRequest
			if e.Dur > 0 {
				r.For = idle.Duration(e.Dur)
			} else {
				r.Until = end
			}
			s, err := cl.Snooze(cmd.Context(), r)
			if err != nil {
				return err
			}
			return c.Print(s, func(w io.Writer) {
				now := time.Now()
				if e.Off {
					fmt.Fprintln(w, sentences("Snooze ended", nextText(now, s)))
					return
				}
				fmt.Fprintln(w, holdText(now, "Snoozed", end, s))
			})
		})
	e.Bind(cmd.Flags(), "end the snooze")
	return cmd
}

func (c verbs) agentComplete() *cobra.Command {
	var r agentctl.CompleteRequest
	cmd := c.OnAgent(&cobra.Command{Use: "complete", Short: "Mark this machine's work as done", Args: term.Args(cobra.NoArgs),
		Long: `Mark the work of this machine as done. After the warning, the agent takes the
action that the setting on-complete names: stop, hibernate, terminate, or none,
which only records the completion. A snooze or lease delays the action. --undo
withdraws the completion, as long as the action has not started.`,
		Example: "  lull agent complete\n  lull agent complete --undo\n  lull agent complete --status failed --message \"out of memory at epoch 7\""},
		func(cmd *cobra.Command, _ []string, cl *agentctl.Client) error {
			s, err := cl.Complete(cmd.Context(), r)
			if err != nil {
				return err
			}
			return c.Print(s, func(w io.Writer) {
				now := time.Now()
				if r.Undo {
					fmt.Fprintln(w, sentences("Completion withdrawn", nextText(now, s)))
					return
				}
				text := "Completed with status " + s.Completion
				i := slices.IndexFunc(s.Upcoming, func(u agentctl.Upcoming) bool { return u.Reason == "completion" })
				switch {
				case i < 0 && onComplete(s) == "none":
					text = sentences(text, "no action follows, because on-complete is none")
				case i == 0:
					text = sentences(text, nextText(now, s))
				case i > 0:
					text = sentences(text, upcomingText(now, s.Upcoming[i]), "before that, "+lowerFirst(nextText(now, s)))
				default:
					text = sentences(text, nothingText(s))
				}
				fmt.Fprintln(w, text)
			})
		})
	cmd.Flags().StringVar(&r.Status, "status", "success", "outcome of the work")
	cmd.Flags().StringVar(&r.Message, "message", "", "message for the record")
	cmd.Flags().BoolVar(&r.Undo, "undo", false, "withdraw the completion")
	cmd.MarkFlagsMutuallyExclusive("undo", "status")
	cmd.MarkFlagsMutuallyExclusive("undo", "message")
	return cmd
}

// onComplete returns the action that a completion would cause under the effective
// policy.
func onComplete(s agentctl.Status) string {
	for _, v := range s.Settings {
		if v.Name == "on-complete" {
			return v.Value
		}
	}
	return "none"
}
