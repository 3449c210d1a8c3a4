package explain

import (
	"fmt"
	"io"
	"time"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/protocol/control"
)

// WarningText returns how long before a pause users are warned, and how much of that
// is effective if the timeout is shorter. of names the timeout.
func WarningText(asked, timeout time.Duration, of string) string {
	p := idle.Policy{Timeout: idle.Duration(timeout), WarnBefore: idle.Duration(asked)}
	if counts := p.WarnsBefore(); counts < asked {
		return fmt.Sprintf("%s, of which %s counts: at most half of the %s", term.Span(asked), term.Span(counts), of)
	}
	return term.Span(asked)
}

// RulesText prints the schedule, overrides and budgets of a worker as sentences.
func RulesText(w io.Writer, p control.WorkerPolicy) {
	var lines []string
	if p.ScheduleState != nil {
		lines = append(lines, p.ScheduleState.Describe())
		asked, grace := time.Duration(p.WarnBefore), time.Duration(p.ScheduleState.Grace*float64(time.Minute))
		if text := WarningText(asked, min(grace, time.Duration(p.Timeout)), "grace"); !p.ScheduleState.Force && grace < time.Duration(p.Timeout) && text != term.Span(asked) {
			lines = append(lines, "Warning before in closed hours: "+text+".")
		}
	}
	for _, o := range p.Overrides {
		lines = append(lines, o.Sentence())
	}
	for _, b := range p.Budgets {
		lines = append(lines, term.Localized(b.Sentence))
	}
	for i, l := range append(lines, p.Faults...) {
		if i == 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintln(w, l)
	}
}
