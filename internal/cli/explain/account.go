package explain

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
	"lull/internal/core/why"
)

// AccountText prints an explanation. A zero at means now. A past at is printed with
// its offset from UTC, because the local time given with --at may be ambiguous when
// daylight saving time ends.
func AccountText(w io.Writer, a why.Account, at time.Time) {
	when := ""
	if !at.IsZero() {
		when = "At " + at.Local().Format("2006-01-02 15:04:05 -07:00") + ": "
	}
	fmt.Fprintf(w, "%s: %s?\n", a.Name, a.Question)
	term.Wrapped(w, "", when+term.Localized(a.Answer))
	if c := a.Checked; c != nil {
		same := ""
		if c.At.After(c.Since) {
			same = "; unchanged since the check at " + term.Time(c.Since)
		}
		if c.Until.After(c.At) {
			same += "; unchanged until the check at " + term.Time(c.Until)
		}
		fmt.Fprintf(w, "From the check at %s%s.\n", term.Time(c.At), same)
		if c.Differs {
			fmt.Fprintf(w, "This version of lull judges these readings differently than was recorded: %v", c.Was)
		}
	}
	if len(a.Signals) > 0 {
		fmt.Fprintln(w)
		SignalTable(w, a.Signals)
	}
	if v := a.Verdict; v != nil {
		fmt.Fprintln(w)
		VerdictText(w, *v, a.Expiry)
	}
	if len(a.Leases) > 0 {
		fmt.Fprintln(w)
		Leases(w, a.Leases)
	}
	turn := func(what string, t *evidence.Turn) {
		if t == nil {
			return
		}
		why := ""
		if t.Reason != "" {
			why = " (" + t.Reason + ")"
		}
		fmt.Fprintf(w, "last %s %s by %s%s\n", what, term.Time(t.At), term.Dash(t.By), why)
	}
	turn("paused", a.Paused)
	turn("resumed", a.Resumed)
	for n, s := range a.Change {
		if n == 0 {
			fmt.Fprintln(w, "\nTo change that:")
		}
		term.Wrapped(w, "  ", term.Localized(s))
	}
	for _, m := range a.Missing {
		fmt.Fprintf(w, "missing %s to %s: %s %s\n", term.Time(m.From), term.Time(m.To), m.Server, m.Why)
	}
}

// SignalTable prints readings with everything that they are judged by.
func SignalTable(w io.Writer, l []evidence.Signal) {
	term.Rows(w, "SIGNAL\tVERDICT\tVALUE\t4:COUNTS FROM\t2:WINDOW\t1:READ\t3:LAST EVENT\t5:DETAIL", func(row func(string, ...any)) {
		for _, s := range l {
			value, from, read, last := "-", "-", "-", "-"
			if s.Value != nil && s.Unit != "" {
				value, from = idle.Amount(*s.Value, s.Unit), idle.Amount(s.Threshold, s.Unit)
			}
			if s.Age != nil {
				read = term.Span(time.Duration(*s.Age*float64(time.Second))) + " ago"
				if s.LastEvent != nil {
					last = term.Time(*s.LastEvent)
				}
			}
			detail := s.Detail
			if !s.Counts {
				detail = "does not count under this policy"
			}
			row("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", s.Signal, s.Verdict, value, from, term.Lasting(time.Duration(s.Window)), read, last, detail)
		}
	})
}

// VerdictText prints a verdict with every block. Of the pause and the expiry x, it
// prints the one that comes first.
func VerdictText(w io.Writer, v idle.Verdict, x *why.Expiry) {
	fmt.Fprintf(w, "idle for %s at %s\n", idle.HumanMinutes(v.IdleMinutes), term.Time(v.At))
	for _, b := range v.Blocks {
		term.Wrapped(w, fmt.Sprintf("  %-18s ", b.Code), term.Localized(b.Sentence))
	}
	action := pauseWord(v.Action)
	if x.Before(v.TargetPauseAt) {
		v.TargetPauseAt, v.WarnAt, action = &x.At, &x.WarnAt, x.Action+" (ttl)"
	}
	if v.NextIdleCheckAt.IsZero() && v.TargetPauseAt == nil && v.WarnAt == nil {
		return // the verdict is about a worker that has been stopped
	}
	term.Wrapped(w, "", fmt.Sprintf("next check %s, earliest %s %s, warning %s", term.OptionalTime(&v.NextIdleCheckAt), action, term.OptionalTime(v.TargetPauseAt), term.OptionalTime(v.WarnAt)))
}

func pauseWord(action string) string {
	if action == "" {
		return "pause"
	}
	return action
}

// AtFlag adds the flag --at of the verbs named why.
func AtFlag(cmd *cobra.Command) {
	cmd.Flags().String("at", "", "a past time: "+when.PastForms)
}

// AtTime returns the value of --at; zero for now.
func AtTime(cmd *cobra.Command) (time.Time, error) {
	text, err := cmd.Flags().GetString("at")
	if err != nil {
		return time.Time{}, err
	}
	t, err := term.Past(time.Now(), text)
	if err != nil {
		return t, term.Usage(err)
	}
	return t, nil
}

// Leases prints the leases of an instance or agent.
func Leases(w io.Writer, l []idle.Lease) {
	if len(l) == 0 {
		fmt.Fprintln(w, "no leases")
		return
	}
	term.Rows(w, "HOLDER\tFOR ANOTHER\tREASON", func(row func(string, ...any)) {
		for _, x := range l {
			row("%s\t%s\t%s", x.Holder, term.Span(max(time.Until(x.ExpiresAt), 0)), term.Dash(x.Reason))
		}
	})
}
