package hosts

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/explain"
	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/protocol/control"
)

// hostLs returns the verb that lists the hosts of a fleet.
func (c verbs) hostLs() *cobra.Command {
	return &cobra.Command{Use: "ls", Short: "List hosts that report to the fleet", Example: "  lull host ls", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			l, err := cl.Hosts(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				term.Rows(w, "HOST\tHEARD\tINSTANCES\t3:STATES\t4:MEMORY\t2:VERSION\t1:SERVER", func(row func(string, ...any)) {
					for _, h := range l {
						row("%s\t%s\t%d\t%s\t%s\t%s\t%s", h.Name, hostHeard(h), h.Total, hostStates(h), hostMemory(h), hostVersion(h), term.Dash(h.Server))
					}
				})
			})
		}}
}

// hostGet returns the verb that shows one host with its instances.
func (c verbs) hostGet() *cobra.Command {
	return &cobra.Command{Use: "get HOST", Short: "Show a host with its instances", Example: "  lull host get desk", Args: term.Args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeHosts,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			v, err := cl.Host(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			return c.Print(v, func(w io.Writer) { c.hostText(w, v) })
		}}
}

func (c verbs) hostText(w io.Writer, v control.HostView) {
	fmt.Fprintf(w, "%s, lull %s, last report %s, by %s\n", v.Name, hostVersion(v.HostSummary), hostHeard(v.HostSummary), term.Dash(v.Server))
	if !v.Heard {
		fmt.Fprintln(w, v.Unheard)
	}
	if v.Halted {
		h := idle.HaltedBy{}
		if v.Halt != nil {
			h = *v.Halt // earlier versions report only that there is a halt
		}
		fmt.Fprintln(w, c.Red("HALTED: "+term.Localized(h.Sentence("Automatic actions on this host are"))))
	}
	for _, f := range v.Faults {
		fmt.Fprintln(w, f)
	}
	if v.LeftOut > 0 {
		fmt.Fprintf(w, "%d more instances are not listed in the host's reports.\n", v.LeftOut)
	}
	term.Rows(w, "NAME\tSTATE\t2:IDLE FOR\t4:PAUSES\t3:HELD BY\t1:MEMORY\t5:PORTS", func(row func(string, ...any)) {
		for _, i := range v.Instances {
			idle, pauses, held, memory := "-", "-", []string{}, "-"
			if i.State == "running" {
				idle = term.Span(time.Duration(i.IdleFor * float64(time.Second)))
				if i.PauseAt != nil {
					pauses = "in " + term.Span(max(time.Until(*i.PauseAt), 0))
				}
				for _, b := range i.Blocks {
					held = append(held, string(b.Code))
				}
			}
			if i.Memory > 0 {
				memory = term.Size(i.Memory)
			}
			state := i.State
			if i.LastState != "" {
				state += " (was " + i.LastState + ")"
			}
			var ports []string
			for _, e := range i.Endpoints {
				ports = append(ports, e.Listen)
			}
			row("%s\t%s\t%s\t%s\t%s\t%s\t%s", i.Name, state, idle, pauses, term.Dash(strings.Join(held, ", ")), memory, term.Dash(strings.Join(ports, ", ")))
		}
	})
}

// hostWhy returns the verb that explains the state of an instance of a host.
func (c verbs) hostWhy() *cobra.Command {
	cmd := &cobra.Command{Use: "why HOST INSTANCE", Short: "Explain why an instance of a host runs or sleeps",
		Args: term.Args(cobra.ExactArgs(2)), ValidArgsFunction: c.completeHosts, Example: "  lull host why desk web\n  lull host why desk web --at 2h",
		RunE: func(cmd *cobra.Command, a []string) error {
			at, err := explain.AtTime(cmd)
			if err != nil {
				return err
			}
			cl, err := c.ServerClient()
			if err != nil {
				return err
			}
			y, err := cl.HostWhy(cmd.Context(), a[0], a[1], at)
			if err != nil {
				return err
			}
			return c.Print(y, func(w io.Writer) {
				explain.AccountText(w, y.Account, at)
				if y.Readings == "unknown" {
					fmt.Fprintln(w, "\nreadings: unknown. "+y.Unheard)
				}
			})
		}}
	explain.AtFlag(cmd)
	return cmd
}

// completeHosts completes the name of a host and then, for a verb with a second
// argument, that of an instance.
func (c verbs) completeHosts(cmd *cobra.Command, a []string, _ string) (names []string, _ cobra.ShellCompDirective) {
	cl, err := c.ServerClient()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	switch {
	case len(a) == 0:
		l, err := cl.Hosts(cmd.Context())
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		for _, h := range l {
			names = append(names, h.Name+"\t"+hostHeard(h))
		}
	case len(a) == 1 && cmd.Name() != "get":
		v, err := cl.Host(cmd.Context(), a[0])
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		for _, i := range v.Instances {
			names = append(names, i.Name+"\t"+i.State)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

func hostHeard(h control.HostSummary) string {
	switch {
	case h.HeardAt == nil:
		return "never"
	case !h.Heard:
		return "not since " + term.Time(*h.HeardAt)
	}
	return term.Span(time.Duration(h.AgeSeconds*float64(time.Second))) + " ago"
}

// hostStates formats the number of a host's instances in each state.
func hostStates(h control.HostSummary) string {
	if !h.Heard {
		return "unknown"
	}
	var parts []string
	for _, state := range slices.Sorted(maps.Keys(h.Counts)) {
		parts = append(parts, fmt.Sprintf("%d %s", h.Counts[state], state))
	}
	if h.Halted {
		parts = append(parts, "HALTED")
	}
	return term.Dash(strings.Join(parts, ", "))
}

func hostMemory(h control.HostSummary) string {
	switch {
	case !h.Heard || h.Held == 0:
		return "-"
	case h.Memory.Limit > 0:
		return term.Size(h.Held) + " of " + term.Size(h.Memory.Limit)
	}
	return term.Size(h.Held)
}

func hostVersion(h control.HostSummary) string {
	if h.Outdated {
		return h.Version + " (outdated)"
	}
	return term.Dash(h.Version)
}
