package agent

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
	"lull/internal/protocol/agentctl"
)

// shortTime formats t, without the date if it is on the same day as now.
func shortTime(now, t time.Time) string {
	now, t = now.Local(), t.Local()
	if now.YearDay() == t.YearDay() && now.Year() == t.Year() {
		return t.Format("15:04")
	}
	return t.Format("2006-01-02 15:04")
}

// upcomingText returns a clause about an upcoming automatic action.
func upcomingText(now time.Time, u agentctl.Upcoming) string {
	does := map[string]string{"stop": "stops", "hibernate": "hibernates", "terminate": "terminates"}[u.Action]
	done := map[string]string{"stop": "stopped", "hibernate": "hibernated", "terminate": "terminated"}[u.Action]
	at := "at " + shortTime(now, u.At)
	if !u.At.After(now) {
		at = "now"
	}
	switch u.Reason {
	case "ttl":
		return "the TTL " + does + " this machine " + at
	case "completion":
		return "the completion " + does + " this machine " + at
	}
	return "this machine is " + done + " " + at + " if it stays idle"
}

// remedy returns how to delay what u announces. until is the end of the
// requested hold; zero for none.
func remedy(u agentctl.Upcoming, until time.Time) string {
	switch u.Reason {
	case "ttl":
		return "Extend it with: lull agent ttl extend " + idle.Human(extendBy(until.Sub(u.At)))
	case "completion":
		return "Undo the completion with: lull agent complete --undo"
	}
	return ""
}

// extendBy returns how much to extend a TTL to cover a gap, rounded up to what a user
// would type.
func extendBy(gap time.Duration) time.Duration {
	step := time.Hour
	switch {
	case gap <= 0:
		return 2 * time.Hour
	case gap < 2*time.Hour:
		step = 15 * time.Minute
	}
	return (gap + step - 1).Truncate(step)
}

// holdText confirms that held, a snooze or lease, lasts until end. It adds the action
// that the hold does not prevent, or the next one after it.
func holdText(now time.Time, held string, end time.Time, s agentctl.Status) string {
	text := held + " until " + shortTime(now, end)
	if len(s.Upcoming) > 0 {
		switch u := s.Upcoming[0]; {
		case u.At.Before(end):
			return text + ", but " + sentences(upcomingText(now, u), remedy(u, end))
		case u.Reason == "idle_timeout":
			return text + ". " + sentences("Then "+upcomingText(now, u))
		default:
			return text + ". " + sentences("Then "+upcomingText(now, u), remedy(u, time.Time{}))
		}
	}
	if l := s.Server; l != nil && l.Holder != "agent" {
		if l.Error != "" {
			return text + fmt.Sprintf(", but the %s decides about this machine and has not been notified yet: %s.", l.Holder, l.Error)
		}
		return text + fmt.Sprintf(". The %s decides about this machine and is notified.", l.Holder)
	}
	return text + ". " + nothingText(s)
}

// nextText returns a sentence about the next automatic action on the machine.
func nextText(now time.Time, s agentctl.Status) string {
	if len(s.Upcoming) == 0 {
		return nothingText(s)
	}
	u := s.Upcoming[0]
	parts := []string{upcomingText(now, u), remedy(u, time.Time{})}
	if u.Reason == "idle_timeout" && len(s.Upcoming) > 1 {
		parts = append(parts, upcomingText(now, s.Upcoming[1])+" in any case")
	}
	return sentences(parts...)
}

// nothingText returns a sentence about why no automatic action is to be expected.
func nothingText(s agentctl.Status) string {
	const nothing = "No stop is pending"
	switch l := s.Server; {
	case s.Halted != nil:
		return nothing + ": automatic actions are halted."
	case l != nil && l.Halted:
		return nothing + ": the server halted automatic actions."
	}
	// Something without a known end keeps the machine running.
	i := slices.IndexFunc(s.Verdict.Blocks, func(b idle.Block) bool { return b.Until == nil })
	if i < 0 {
		return nothing + " at a known time."
	}
	return nothing + " for now: " + lowerFirst(term.Localized(s.Verdict.Blocks[i].Sentence))
}

func lowerFirst(s string) string {
	if len(s) > 1 && s[1] >= 'a' && s[1] <= 'z' {
		return strings.ToLower(s[:1]) + s[1:]
	}
	return s
}

// sentences joins parts to sentences: each but the first begins with a capital, and
// each ends with a full stop unless it ends with a command. Empty parts are left out.
func sentences(parts ...string) string {
	var out []string
	for i, p := range parts {
		if p == "" {
			continue
		}
		if i > 0 {
			p = strings.ToUpper(p[:1]) + p[1:]
		}
		if !strings.Contains(p, ": lull ") && !strings.HasSuffix(p, ".") {
			p += "."
		}
		out = append(out, p)
	}
	return strings.Join(out, " ")
}

// hookText writes how a hook ended, and its last output.
func hookText(w io.Writer, indent, name string, h *agentctl.Hook) {
	if h == nil {
		return
	}
	fmt.Fprintf(w, "%s%s %s\n", indent, name, h.Outcome())
	lines := strings.Split(strings.TrimRight(h.Output, "\n"), "\n")
	if h.Output == "" {
		return
	}
	const most = 10
	if n := len(lines) - most; n > 0 {
		fmt.Fprintf(w, "%s  (%d lines before)\n", indent, n)
		lines = lines[n:]
	}
	for _, l := range lines {
		fmt.Fprintf(w, "%s  | %s\n", indent, printable(l))
	}
}

// printable returns a line of a program's output without characters that a terminal
// might interpret.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\t' || r == 0x7f || r == 0xfffd || r >= 0x80 && r < 0xa0 {
			return '.'
		}
		return r
	}, s)
}

func (c verbs) agentTTL() *cobra.Command {
	cmd := &cobra.Command{Use: "ttl", Short: "Manage this machine's TTL", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(c.OnAgent(&cobra.Command{Use: "extend DURATION", Short: "Extend this machine's TTL", Args: term.Args(cobra.ExactArgs(1)),
		Long: `Extend this machine's TTL by DURATION from its deadline, or from now if the deadline
has passed. A TTL is a hard limit: no snooze or lease delays it. If a tag sets the
deadline, the tag is updated too. If a server's record sets it, the record is
updated, as by lull worker ttl.`,
		Example: "  lull agent ttl extend 2h"},
		func(cmd *cobra.Command, a []string, cl *agentctl.Client) error {
			d, err := when.Length(a[0])
			if err != nil {
				return term.Usage(fmt.Errorf("cannot extend by %q: want one duration such as 2h", a[0]))
			}
			s, err := cl.ExtendTTL(cmd.Context(), agentctl.ExtendRequest{For: idle.Duration(d)})
			if err != nil {
				return err
			}
			return c.Print(s, func(w io.Writer) {
				now := time.Now()
				if s.TTL != nil {
					fmt.Fprintf(w, "TTL extended until %s. ", shortTime(now, *s.TTL))
				}
				fmt.Fprintln(w, "Next: "+lowerFirst(nextText(now, s)))
			})
		}))
	return cmd
}
