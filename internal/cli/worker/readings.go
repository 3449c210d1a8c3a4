package worker

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
	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
)

// reading returns a verb that prints one resource of a worker with show.
func reading[T any](c verbs, use, short, long, resource string, show func(out io.Writer, w worker.Worker, v T)) *cobra.Command {
	return &cobra.Command{Use: use + " WORKER", Short: short, Long: long, Example: "  lull worker " + use + " cml-1", Args: term.Args(cobra.ExactArgs(1)),
		ValidArgsFunction: c.CompleteWorkers,
		RunE: func(cmd *cobra.Command, a []string) error {
			cl, w, err := c.FindWorker(cmd.Context(), a[0])
			if err != nil {
				return err
			}
			v, err := control.Read[T](cmd.Context(), cl, "/workers/"+w.ID+"/"+resource)
			if err != nil {
				return err
			}
			return c.Print(v, func(out io.Writer) { show(out, w, v) })
		}}
}

func (c verbs) workerMetrics() *cobra.Command {
	return reading(c, "metrics", "Show a worker's CPU, memory, disk, labs and nodes", "", "metrics", metricsText)
}

func metricsText(out io.Writer, w worker.Worker, m control.Metrics) {
	if m.Readings == "unknown" {
		fmt.Fprintln(out, "Live readings are not available: the server that observes the worker did not answer.")
	}
	t := term.Table(out)
	for _, u := range []struct {
		name, key string
		value     *float64
	}{{"CPU", "cpu_utilization", m.CPUUtilization}, {"memory", "memory_utilization", m.MemoryUtilization}, {"disk", "disk_utilization", m.DiskUtilization}} {
		s := m.Samples[u.key]
		switch {
		case u.value != nil && s.At != nil:
			fmt.Fprintf(t, "%s\t%.1f %%\tat %s\n", u.name, *u.value, term.Time(*s.At))
		case u.value != nil:
			fmt.Fprintf(t, "%s\t%.1f %%\t\n", u.name, *u.value)
		default:
			fmt.Fprintf(t, "%s\tunknown\t%s\n", u.name, s.Error)
		}
	}
	for _, n := range []struct {
		name  string
		value *int
	}{{"labs", m.LabsCount}, {"nodes", m.NodesCount}} {
		if n.value != nil {
			fmt.Fprintf(t, "%s\t%d\t\n", n.name, *n.value)
		} else {
			fmt.Fprintf(t, "%s\tunknown\t%s\n", n.name, m.CMLError)
		}
	}
	fmt.Fprintf(t, "CML version\t%s\t\ncollected\t%s\t\n", term.Dash(m.CMLVersion), term.OptionalTime(m.CollectedAt))
	t.Flush()
}

func (c verbs) workerEC2State() *cobra.Command {
	return reading(c, "ec2-state", "Show what EC2 reports about a worker", "", "ec2-state", func(out io.Writer, w worker.Worker, v worker.EC2State) {
		t := term.Table(out)
		observed := "not since the server started; this is the recorded state"
		if v.ObservedAt != nil {
			observed = term.Time(*v.ObservedAt)
		}
		fmt.Fprintf(t, "instance\t%s in %s\nstate\t%s\nobserved\t%s\nlaunched\t%s\n", term.Dash(w.EC2InstanceID), w.AWSRegion, v.State, observed, term.OptionalTime(v.LaunchTime))
		for _, k := range slices.Sorted(maps.Keys(v.Tags)) {
			fmt.Fprintf(t, "tag %s\t%s\n", k, v.Tags[k])
		}
		t.Flush()
	})
}

func (c verbs) workerTelemetry() *cobra.Command {
	return reading(c, "telemetry", "Show the last CML events that count as activity", "Show the last CML events of a worker that count as activity, newest first.", "telemetry-events",
		func(out io.Writer, w worker.Worker, l []worker.Event) {
			if len(l) == 0 {
				fmt.Fprintf(out, "%s has no events that count as activity.\n", w.Name)
				return
			}
			eventTable(out, l)
		})
}

func eventTable(out io.Writer, l []worker.Event) {
	term.Rows(out, "TIME\tEVENT\t1:DETAILS", func(row func(string, ...any)) {
		for _, e := range l {
			row("%s\t%s\t%s", term.Time(e.Timestamp), e.Category, string(e.Data))
		}
	})
}

func (c verbs) workerAgent() *cobra.Command {
	return reading(c, "agent", "Show the last report of a worker's agent", "", "agent", func(out io.Writer, w worker.Worker, v control.AgentView) {
		r := v.Report
		stale := ""
		if v.Stale {
			stale = ", which is overdue"
		}
		fmt.Fprintf(out, "lull-agent %s on %s reported %s ago%s. Idle for %s; %s decides.\n\n", r.Version, w.Name, term.Span(time.Since(v.ReceivedAt)), stale, idle.HumanMinutes(r.Idle), r.Holder)
		var p idle.Policy
		if r.Judged != nil {
			p = r.Judged.Policy
		}
		explain.SignalTable(out, evidence.Signals(r.At, p, r.Readings))
		for _, b := range r.Holds {
			fmt.Fprintf(out, "  %-18s %s\n", b.Code, term.Localized(b.Sentence))
		}
		for _, a := range r.Alarms {
			fmt.Fprintf(out, "ALARM %s: %s\n", a.Code, term.Localized(a.Sentence))
		}
	})
}

// statusText returns a status in lower-case words, for use in a sentence.
func statusText[S ~string](s S) string {
	return strings.ToLower(strings.ReplaceAll(string(s), "_", " "))
}
