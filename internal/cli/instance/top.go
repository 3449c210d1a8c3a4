package instance

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/protocol/hostctl"
)

// topInterval is the interval at which lull top redraws.
const topInterval = 2 * time.Second

// Control sequences that switch to a terminal's alternate screen, and back.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
)

func (c verbs) topCommand() *cobra.Command {
	return &cobra.Command{Use: "top", Short: "Show instances by CPU use, live on a terminal", Args: term.Args(cobra.NoArgs),
		Long: `Show instances by CPU use, with memory, traffic and what each does next. On a terminal
the page is repeated every two seconds until Ctrl-C; elsewhere, and with --json, it is
printed once. The readings are those of the host's last probe.`,
		Example: "  lull top\n  lull top --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := c.HostClient()
			if err != nil {
				return err
			}
			page := func() error { return c.topPage(cmd.Context(), cl) }
			if c.JSON || !term.IsTerminal(c.Out) {
				return page()
			}
			out := c.Out
			fmt.Fprint(out, enterScreen)
			defer func() { fmt.Fprint(out, leaveScreen) }()
			return c.Repeat(cmd, topInterval, page)
		}}
}

func (c verbs) topPage(ctx context.Context, cl *hostctl.Client) error {
	l, err := cl.ListWithMemory(ctx)
	if err != nil {
		return err
	}
	slices.SortStableFunc(l, func(a, b hostctl.Instance) int {
		x, _ := value(a, "cpu")
		y, _ := value(b, "cpu")
		return cmp.Or(cmp.Compare(y.Value, x.Value), cmp.Compare(b.MemoryBytes, a.MemoryBytes), cmp.Compare(a.Name, b.Name))
	})
	return c.Print(l, func(w io.Writer) { topText(w, l) })
}

func topText(w io.Writer, l []hostctl.Instance) {
	awake, resident, freed := 0, int64(0), int64(0)
	for _, o := range l {
		if o.State == "running" {
			awake++
		}
		resident += o.MemoryBytes
		freed += o.ReclaimedBytes
	}
	fmt.Fprintf(w, "%s  %s, %d running, %s resident, %s freed\n\n", time.Now().Format(time.TimeOnly), term.Count(uint64(len(l)), "instance"), awake, term.Size(resident), term.Size(freed))
	term.Rows(w, "NAME\tSTATE\tCPU\tMEMORY\t2:NETWORK\t1:DISK\t3:IDLE FOR\tNEXT", func(row func(string, ...any)) {
		for _, o := range l {
			row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", o.Name, stateText(o), readingText(o, "cpu"), memoryText(o), readingText(o, "net"), readingText(o, "disk"), idleText(o), next(o))
		}
	})
}

// value returns the last reading of a signal. known is false if there is no value.
func value(o hostctl.Instance, signal string) (r idle.Reading, known bool) {
	for _, r := range o.Activity {
		if r.Signal == signal {
			return r, r.State == idle.Quiet || r.State == idle.Active
		}
	}
	return idle.Reading{}, false
}

// readingText formats a signal's last value with its unit. It returns "-" for an
// instance that does not run.
func readingText(o hostctl.Instance, signal string) string {
	r, known := value(o, signal)
	switch {
	case o.State != "running":
		return "-"
	case r.State == idle.Absent:
		return "-"
	case !known:
		return "unknown"
	case r.Unit == "bytes" && r.Window > 0:
		return term.Size(int64(r.Value/time.Duration(r.Window).Seconds())) + "/s"
	}
	return fmt.Sprintf("%.4g %s", r.Value, r.Unit)
}
