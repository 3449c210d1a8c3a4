package policy

import (
	"fmt"
	"io"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/policy"
	"lull/internal/core/policy/when"
	"lull/internal/protocol/control"
)

func (c verbs) scheduleCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "schedule", Aliases: []string{"schedules"}, Short: "Manage the hours during which workers run", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	ls := &cobra.Command{Use: "ls", Short: "List schedules", Example: "  lull schedule ls", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			l, err := cl.Schedules(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				term.Rows(w, "NAME\tZONE\tOPEN\t3:STARTS\t2:HOLIDAYS\t1:DESCRIPTION", func(row func(string, ...any)) {
					for _, s := range l {
						row("%s\t%s\t%s\t%t\t%d\t%s", s.Name, s.Zone, windowsText(s.Windows), s.Start, len(s.Holidays), s.Description)
					}
				})
			})
		}}
	get := &cobra.Command{Use: "get NAME", Short: "Show a schedule", Example: "  lull schedule get office", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeRules("schedules"),
		RunE: func(cmd *cobra.Command, a []string) error {
			return c.showRule(cmd, "/schedules/", a[0], policy.Schedule{})
		}}
	rm := &cobra.Command{Use: "rm NAME", Short: "Remove an unused schedule", Example: "  lull schedule rm office", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeRules("schedules"),
		RunE: func(cmd *cobra.Command, a []string) error { return c.removeRule(cmd, "/schedules/", a[0]) }}
	n := 0
	next := &cobra.Command{Use: "next NAME", Short: "Show when a schedule opens and closes next", Example: "  lull schedule next office", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeRules("schedules"),
		RunE: func(cmd *cobra.Command, a []string) error {
			if n < 1 || n > 200 {
				return term.Usage(fmt.Errorf("cannot use --lines %d: want 1 to 200", n))
			}
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			b, err := cl.Boundaries(cmd.Context(), a[0], n)
			if err != nil {
				return err
			}
			loc, err := when.Zone(b.Zone)
			if err != nil {
				return err
			}
			return c.Print(b, func(w io.Writer) {
				fmt.Fprintf(w, "%s is %s; times of %s\n", b.Schedule, map[bool]string{true: "open", false: "closed"}[b.Open], b.Zone)
				for _, at := range b.Items {
					fmt.Fprintf(w, "%s  %s\n", at.At.In(loc).Format("Mon 2006-01-02 15:04 -0700"), map[bool]string{true: "opens", false: "closes"}[at.Opens])
				}
			})
		}}
	next.Flags().IntVarP(&n, "lines", "n", 10, "number of boundaries to show, 1 to 200")
	cmd.AddCommand(ls, get, c.scheduleWrite("create"), c.scheduleWrite("edit"), rm, c.applyCommand("schedule", "schedules"), next)
	return cmd
}

func windowsText(l []policy.Window) string {
	var out []string
	for _, w := range l {
		text := w.String()
		if w.Hold {
			text += " (hold)"
		}
		out = append(out, text)
	}
	return strings.Join(out, "; ")
}

// scheduleWrite returns the verb create or edit. edit starts from the existing
// schedule.
func (c verbs) scheduleWrite(verb string) *cobra.Command {
	var in control.ScheduleBody
	var open, hold []string
	short := map[string]string{"create": "Create a schedule", "edit": "Change a schedule; values without a flag stay as they are"}[verb]
	cmd := &cobra.Command{Use: verb + " NAME", Short: short, Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeRules("schedules"),
		Example: "  lull schedule " + verb + ` office --zone Europe/Berlin --open "mon-fri 08:00-18:00" --holiday 12-25 --start` +
			"\n  lull schedule " + verb + ` office --hold "sun 02:00-04:00" --hold "2026-11-05 22:00-02:00"`,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			body := control.ScheduleBody{}
			if verb == "edit" {
				old, err := control.Read[policy.Schedule](cmd.Context(), cl, "/schedules/"+url.PathEscape(a[0]))
				if err != nil {
					return err
				}
				body = control.ScheduleBody{Description: old.Description, Zone: old.Zone, Windows: old.Windows, Holidays: old.Holidays, Start: old.Start, GraceMinutes: old.GraceMinutes}
			}
			changed := cmd.Flags().Changed
			if verb == "create" || changed("zone") {
				body.Zone = in.Zone
			}
			if changed("open") || changed("hold") || verb == "create" {
				if body.Windows, err = windowsOf(body.Windows, open, hold, changed("open"), changed("hold")); err != nil {
					return term.Usage(err)
				}
			}
			if changed("holiday") {
				body.Holidays = in.Holidays
			}
			if changed("start") {
				body.Start = in.Start
			}
			if changed("grace") {
				body.GraceMinutes = in.GraceMinutes
			}
			if changed("description") {
				body.Description = in.Description
			}
			out, err := putRule[policy.Schedule](cmd, cl, "/schedules/", a[0], body, verb == "create")
			if err != nil {
				return err
			}
			return c.Print(out, func(w io.Writer) {
				fmt.Fprintln(w, scheduleText(out))
				fmt.Fprintf(w, "Show all its settings with: lull schedule get %s\n", out.Name)
			})
		}}
	f := cmd.Flags()
	f.StringVar(&in.Zone, "zone", "", "IANA time zone, such as Europe/Berlin")
	f.StringArrayVar(&open, "open", nil, `hours during which workers run, such as "mon-fri 08:00-18:00"; repeatable`)
	f.StringArrayVar(&hold, "hold", nil, `maintenance hours: workers run and are not paused when idle, on holidays too; repeatable`)
	f.StringSliceVar(&in.Holidays, "holiday", nil, "days without opening hours: 2026-12-25, or 12-25 for every year")
	f.BoolVar(&in.Start, "start", false, "start workers when it opens; otherwise it only pauses them")
	f.Var(term.MinutesInto(&in.GraceMinutes), "grace", "idle timeout in closed hours (default 15m); a warning comes at most half of it before the pause")
	f.StringVar(&in.Description, "description", "", "description")
	return cmd
}

// windowsOf returns old with its windows of a kind replaced, if new ones of that kind
// are given.
func windowsOf(old []policy.Window, open, hold []string, newOpen, newHold bool) ([]policy.Window, error) {
	var out []policy.Window
	for _, w := range old {
		if w.Hold && !newHold || !w.Hold && !newOpen {
			out = append(out, w)
		}
	}
	for i, text := range append(append([]string{}, open...), hold...) {
		w, err := policy.ParseWindow(text)
		if err != nil {
			return nil, err
		}
		w.Hold = i >= len(open)
		w.OnHolidays = w.Hold
		out = append(out, w)
	}
	return out, nil
}

// scheduleText returns a schedule as text.
func scheduleText(x policy.Schedule) string {
	s := fmt.Sprintf("Schedule %s (%s) pauses workers that are quiet for %s outside its hours", x.Name, x.Zone, term.Span(x.Grace()))
	if x.Start {
		s += ", and starts them when it opens"
	}
	s += "."
	if x.GraceMinutes != nil {
		s += fmt.Sprintf(" A warning comes at most %s before a pause.", term.Span(x.Grace()/2))
	}
	return s
}
