package power

import (
	"fmt"
	"strings"
)

// Mermaid returns the table as a Mermaid state diagram.
func (t *Table[S]) Mermaid() string {
	var b strings.Builder
	b.WriteString("stateDiagram-v2\n")
	for _, s := range t.Initial {
		fmt.Fprintf(&b, "    [*] --> %s\n", s)
	}
	for _, tr := range t.Transitions {
		fmt.Fprintf(&b, "    %s --> %s: %s\n", tr.From, tr.To, joinCauses(tr.Causes))
	}
	for _, s := range t.States {
		if s.Kind == Final {
			fmt.Fprintf(&b, "    %s --> [*]\n", s.Name)
		}
	}
	b.WriteString("    classDef passing fill:#f5b942,color:#000\n")
	for _, s := range t.States {
		if s.Kind == Transitional {
			fmt.Fprintf(&b, "    class %s passing\n", s.Name)
		}
	}
	return b.String()
}

// Markdown returns the reference section of the table: its diagram, states,
// deadlines and transitions.
func (t *Table[S]) Markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "```mermaid\n%s```\n\n", t.Mermaid())
	b.WriteString("| state | kind | meaning |\n|---|---|---|\n")
	for _, s := range t.States {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", s.Name, s.Kind, s.Doc)
	}
	b.WriteString("\n| state | deadline | owner | repair | leads to |\n|---|---|---|---|---|\n")
	for _, s := range t.States {
		if d := s.Deadline; s.Kind == Transitional {
			fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s | %s |\n", s.Name, d.Name, d.Owner, d.Repair, codes(d.To))
		}
	}
	b.WriteString("\n| from | to | by | when |\n|---|---|---|---|\n")
	for _, tr := range t.Transitions {
		fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s |\n", tr.From, tr.To, joinCauses(tr.Causes), tr.Note)
	}
	return b.String()
}

// Reference returns the content of docs/reference/states.md.
func Reference() string {
	var b strings.Builder
	b.WriteString("# Power states\n\nGenerated from the tables of `internal/core/power` by `go test ./internal/core/power -update`; do not edit.\n" +
		"Yellow states are transitional: each has a deadline, an owner and a repair.\n" +
		"Any transition not listed here is rejected.\n\n## Instances of a host\n\n")
	b.WriteString(InstanceTable.Markdown())
	b.WriteString("\n## Workers of a fleet\n\n")
	b.WriteString(WorkerTable.Markdown())
	b.WriteString("\n### How observed EC2 states change a status\n\nAn empty cell means that the status does not change. " +
		"\"No such instance\" is ignored until it is confirmed.\n\n| status |")
	states := []EC2{EC2Pending, EC2Running, EC2Stopping, EC2Stopped, EC2ShuttingDown, EC2Terminated, "other"}
	for _, s := range states {
		fmt.Fprintf(&b, " `%s` |", s)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(states)) + "\n")
	for _, w := range WorkerTable.All() {
		fmt.Fprintf(&b, "| `%s` |", w)
		for _, s := range states {
			cell := ""
			if to := Observe(w, Observation{State: s, Changed: true, Addressed: true}); to != w {
				cell = string(to)
			}
			fmt.Fprintf(&b, " %s |", cell)
		}
		b.WriteString("\n")
	}
	b.WriteString("\n`FAILED` changes only when the EC2 state differs from the one last recorded, and so does `STARTING` to `STOPPED`.\n")
	return b.String()
}

func codes[S ~string](states []S) string {
	names := make([]string, len(states))
	for i, s := range states {
		names[i] = "`" + string(s) + "`"
	}
	return strings.Join(names, ", ")
}
