package instance

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/protocol/hostctl"
)

func (c verbs) psCommand() *cobra.Command {
	var quiet, all bool
	var filters []string
	var format string
	cmd := &cobra.Command{
		Use: "ps", Aliases: []string{"ls"}, Short: "List instances with state, idle time and holds", Args: term.Args(cobra.NoArgs),
		Example: "  lull ps\n  lull ps --filter state=paused --json\n  lull ps --format '{{.name}} {{.state}}'\n  lull ps --watch",
		RunE: func(cmd *cobra.Command, _ []string) error {
			keep, err := parseFilters(filters)
			if err != nil {
				return term.Usage(err)
			}
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			l, err := matching(cmd.Context(), cl, keep)
			if err != nil {
				return err
			}
			if format != "" {
				return term.Formatted(c.Out, format, l)
			}
			st, err := cl.Status(cmd.Context())
			if err != nil {
				return err
			}
			return c.Print(l, func(w io.Writer) {
				if quiet {
					for _, o := range l {
						fmt.Fprintln(w, o.Name)
					}
					return
				}
				c.ShowHostHalt(w, st)
				table(w, l)
				for _, why := range st.LeftAlone {
					fmt.Fprintln(w, c.Red(why))
				}
			})
		},
	}
	cmd.Flags().BoolVarP(&all, "all", "a", true, "list stopped instances too, which lull always does")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print names only")
	cmd.Flags().StringVar(&format, "format", "", term.FormatHelp)
	cmd.Flags().StringArrayVarP(&filters, "filter", "f", nil, "list only instances with state=STATE, runtime=RUNTIME, name=PART or label=KEY[=VALUE]; repeatable: one of each key must match")
	term.Exclusive(cmd, "format", "quiet", "json", "output")
	return c.Watchable(cmd)
}

// matching returns the instances for which keep returns true, including their memory
// use.
func matching(ctx context.Context, cl *hostctl.Client, keep func(hostctl.Instance) bool) ([]hostctl.Instance, error) {
	all, err := cl.ListWithMemory(ctx)
	if err != nil {
		return nil, err
	}
	l := []hostctl.Instance{}
	for _, o := range all {
		if keep(o) {
			l = append(l, o)
		}
	}
	return l, nil
}

// parseFilters returns a function that accepts an instance if, for each key in
// filters, one of the values given for that key matches.
func parseFilters(filters []string) (keep func(hostctl.Instance) bool, err error) {
	of := map[string]func(hostctl.Instance, string) bool{
		"state":   func(o hostctl.Instance, v string) bool { return string(o.State) == v },
		"runtime": func(o hostctl.Instance, v string) bool { return o.Runtime == v },
		"name":    func(o hostctl.Instance, v string) bool { return strings.Contains(o.Name, v) },
		"label": func(o hostctl.Instance, v string) bool {
			key, value, exact := strings.Cut(v, "=")
			got, has := o.Labels[key]
			return has && (!exact || got == value)
		},
	}
	values := map[string][]string{}
	for _, f := range filters {
		key, value, ok := strings.Cut(f, "=")
		if !ok || of[key] == nil || value == "" {
			return nil, fmt.Errorf("--filter %q: want state=STATE, runtime=RUNTIME, name=PART or label=KEY[=VALUE]", f)
		}
		values[key] = append(values[key], value)
	}
	return func(o hostctl.Instance) bool {
		for key, any := range values {
			if !slices.ContainsFunc(any, func(v string) bool { return of[key](o, v) }) {
				return false
			}
		}
		return true
	}, nil
}

func table(w io.Writer, l []hostctl.Instance) {
	term.Rows(w, "NAME\tSTATE\t4:IDLE FOR\t5:NEXT\t3:HELD BY\t2:MEMORY\t1:FREED\t6:PORTS", func(row func(string, ...any)) {
		for _, o := range l {
			freed := "-"
			if o.ReclaimedBytes > 0 {
				freed = term.Size(o.ReclaimedBytes)
			}
			row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", o.Name, stateText(o), idleText(o), next(o), heldBy(o), memoryText(o), freed, ports(o))
		}
	})
}

func idleText(o hostctl.Instance) string {
	if o.LastActivityAt == nil || o.State == "stopped" || o.Unavailable != "" {
		return "-"
	}
	return term.Span(time.Duration(o.IdleFor * float64(time.Second)))
}

func memoryText(o hostctl.Instance) string {
	switch {
	case o.State == "hibernated":
		return "on disk"
	case o.MemoryBytes > 0:
		return term.Size(o.MemoryBytes)
	}
	return "-"
}

func stateText(o hostctl.Instance) string {
	switch {
	case o.Waiting != nil:
		return fmt.Sprintf("%s (queued, position %d)", o.State, o.Waiting.Place)
	case o.CrashLooping:
		return o.State + " (crash loop)"
	case !o.Enabled:
		return o.State + " (disabled)"
	case o.State == "stopped" && o.ExitCode != nil:
		return fmt.Sprintf("stopped (exit %d)", *o.ExitCode)
	}
	return o.State
}

// next returns the next automatic action on an instance, and when it is due.
func next(o hostctl.Instance) string {
	switch {
	case o.Unavailable != "":
		return "unknown, see lull why"
	case o.Waiting != nil:
		return fmt.Sprintf("gives up in %s: %s", term.Span(max(time.Until(o.Waiting.Until), 0)), o.Waiting.Reason)
	case o.Unwritable != "" && o.State != "running" && o.State != "stopped":
		return "waits: the host cannot record changes"
	case o.State == "running" && o.PauseAt != nil:
		return "pauses in " + term.Span(max(time.Until(*o.PauseAt), 0))
	case o.State == "running":
		return "stays"
	case o.State == "paused" && o.LastPausedBy == "external":
		return "until resumed"
	case o.NextStepAt != nil:
		verb := map[string]string{"reclaimed": "pages memory out", "hibernated": "hibernates", "stopped": "stops"}[o.NextStep]
		return verb + " in " + term.Span(max(time.Until(*o.NextStepAt), 0))
	case !o.WakesOnConnection && (o.State == "paused" || o.State == "reclaimed" || o.State == "hibernated"):
		return "until resumed"
	case o.State == "paused" || o.State == "reclaimed" || o.State == "hibernated":
		if o.Connections > 0 && o.StopAfter > 0 {
			return fmt.Sprintf("not stopped, connections open: %d", o.Connections)
		}
		return "wakes on connection"
	case o.RestartAt != nil:
		return "restarts in " + term.Span(max(time.Until(*o.RestartAt), 0))
	}
	return "-"
}

// heldBy returns what keeps an instance running, apart from the idle timeout.
func heldBy(o hostctl.Instance) string {
	var parts []string
	if o.State != "running" && len(o.Leases) == 0 {
		return "-"
	}
	for _, b := range o.Blocks {
		if o.State != "running" && b.Code != "lease_held" {
			continue
		}
		switch b.Code {
		case "not_idle_yet", "status_not_running":
		case "recent_activity", "signal_active":
			if !slices.Contains(parts, b.Signal) {
				parts = append(parts, b.Signal)
			}
		case "connection_open":
			parts = append(parts, fmt.Sprintf("%d connections", o.Connections))
		case "lease_held":
			parts = append(parts, "lease "+b.Holder)
		case "signal_unknown":
			parts = append(parts, "unknown "+b.Signal)
		default:
			parts = append(parts, string(b.Code))
		}
	}
	if len(parts) == 0 || o.State == "stopped" {
		return "-"
	}
	return strings.Join(parts, ", ")
}

func ports(o hostctl.Instance) string {
	var parts []string
	for _, e := range o.Endpoints {
		s := e.Listen
		if e.Target != e.Listen {
			s += ">" + e.Target
		}
		if e.Status != "" {
			s += " " + e.Status
		}
		parts = append(parts, s+" "+string(e.Path))
	}
	if len(parts) == 0 {
		return "-"
	}
	return strings.Join(parts, ", ")
}
