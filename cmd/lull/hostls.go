package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/core/idle"
	"lull/internal/protocol/control"
)

// hostLs lists the hosts of a fleet.
func (c *cli) hostLs() *cobra.Command {
	return &cobra.Command{Use: "ls", Short: "List hosts that report to the fleet", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.control()
			if err != nil {
				return err
			}
			l, err := cl.Hosts(cmd.Context())
			if err != nil {
				return err
			}
			return c.print(l, func(w io.Writer) {
				rows(w, "HOST\tHEARD\tINSTANCES\tSTATES\tMEMORY\tVERSION\tSERVER", func(row func(string, ...any)) {
					for _, h := range l {
						row("%s\t%s\t%d\t%s\t%s\t%s\t%s", h.Name, hostHeard(h), h.Total, hostStates(h), hostMemory(h), hostVersion(h), dash(h.Server))
					}
				})
			})
		}}
}

// hostGet shows one host with its instances.
func (c *cli) hostGet() *cobra.Command {
	return &cobra.Command{Use: "get HOST", Short: "Show a host with its instances", Args: args(cobra.ExactArgs(1)), ValidArgsFunction: c.completeHosts,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, err := c.control()
			if err != nil {
				return err
			}
			v, err := cl.Host(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			return c.print(v, func(w io.Writer) { c.hostText(w, v) })
		}}
}

func (c *cli) hostText(w io.Writer, v control.HostView) {
	fmt.Fprintf(w, "%s, lull %s, last report %s, by %s\n", v.Name, hostVersion(v.HostSummary), hostHeard(v.HostSummary), dash(v.Server))
	if !v.Heard {
		fmt.Fprintln(w, v.Unheard)
	}
	if v.Halted {
		h := idle.HaltedBy{}
		if v.Halt != nil {
			h = *v.Halt // earlier versions say no more than that it is
		}
		fmt.Fprintln(w, c.red("HALTED: "+h.Sentence("Automatic actions on it are")))
	}
	for _, f := range v.Faults {
		fmt.Fprintln(w, f)
	}
	if v.LeftOut > 0 {
		fmt.Fprintf(w, "%d more instances are not listed in its reports.\n", v.LeftOut)
	}
	rows(w, "NAME\tSTATE\tIDLE FOR\tPAUSES\tHELD BY\tMEMORY\tPORTS", func(row func(string, ...any)) {
		for _, i := range v.Instances {
			idle, pauses, held, memory := "-", "-", []string{}, "-"
			if i.State == "running" {
				idle = span(time.Duration(i.IdleFor * float64(time.Second)))
				if i.PauseAt != nil {
					pauses = "in " + span(max(time.Until(*i.PauseAt), 0))
				}
				for _, b := range i.Blocks {
					held = append(held, string(b.Code))
				}
			}
			if i.Memory > 0 {
				memory = size(i.Memory)
			}
			state := i.State
			if i.LastState != "" {
				state += " (was " + i.LastState + ")"
			}
			var ports []string
			for _, e := range i.Endpoints {
				ports = append(ports, e.Listen)
			}
			row("%s\t%s\t%s\t%s\t%s\t%s\t%s", i.Name, state, idle, pauses, dash(strings.Join(held, ", ")), memory, dash(strings.Join(ports, ", ")))
		}
	})
}

// hostWhy says why an instance of a host elsewhere is as it is.
func (c *cli) hostWhy() *cobra.Command {
	cmd := &cobra.Command{Use: "why HOST INSTANCE", Short: "Explain why an instance of a host runs or sleeps",
		Args: args(cobra.ExactArgs(2)), ValidArgsFunction: c.completeHosts, Example: "  lull host why desk web\n  lull host why desk web --at 2h",
		RunE: func(cmd *cobra.Command, a []string) error {
			at, err := atTime(cmd)
			if err != nil {
				return err
			}
			cl, err := c.control()
			if err != nil {
				return err
			}
			y, err := cl.HostWhy(cmd.Context(), a[0], a[1], at)
			if err != nil {
				return err
			}
			return c.print(y, func(w io.Writer) {
				accountText(w, y.Account, at)
				if y.Readings == "unknown" {
					fmt.Fprintln(w, "\nreadings: unknown. "+y.Unheard)
				}
			})
		}}
	atFlag(cmd)
	return cmd
}

// completeHosts offers the names of hosts and then, where a verb takes one,
// those of their instances.
func (c *cli) completeHosts(cmd *cobra.Command, a []string, _ string) (names []string, _ cobra.ShellCompDirective) {
	cl, err := c.control()
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
	case len(a) == 1 && cmd.Name() == "why":
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
		return "not since " + clockTime(*h.HeardAt)
	}
	return span(time.Duration(h.AgeSeconds*float64(time.Second))) + " ago"
}

// hostStates counts a host's instances by what they do.
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
	return dash(strings.Join(parts, ", "))
}

func hostMemory(h control.HostSummary) string {
	switch {
	case !h.Heard || h.Held == 0:
		return "-"
	case h.Memory.Limit > 0:
		return size(h.Held) + " of " + size(h.Memory.Limit)
	}
	return size(h.Held)
}

func hostVersion(h control.HostSummary) string {
	if h.Outdated {
		return h.Version + " (outdated)"
	}
	return dash(h.Version)
}
