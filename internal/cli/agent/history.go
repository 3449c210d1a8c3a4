package agent

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
	"lull/internal/protocol/agentctl"
)

func (c verbs) agentHistory() *cobra.Command {
	var since, until string
	var q agentctl.HistoryQuery
	cmd := c.OnAgent(&cobra.Command{Use: "history", Short: "Show when this machine was in use and what was decided", Example: "  lull agent history", Args: term.Args(cobra.NoArgs),
		Long: `Show when this machine was in use, and what was decided and done, and why. A chart
has one row per signal, with time from left to right (the last 24 hours unless
--since is given); the entries follow below. A blank means no data: the signal was
not read because a cheaper one was active, or no agent ran.`},
		func(cmd *cobra.Command, _ []string, cl *agentctl.Client) error {
			now := time.Now()
			var err1, err2 error
			q.Since, err1 = term.Past(now, since)
			q.Until, err2 = term.Past(now, until)
			if err := errors.Join(err1, err2); err != nil {
				return term.Usage(err)
			}
			if q.Limit < 0 {
				return term.Usage(fmt.Errorf("cannot show %d entries: want 0 or more", q.Limit))
			}
			l, err := cl.History(cmd.Context(), q)
			if err != nil {
				return err
			}
			if c.JSON {
				return c.Print(l, nil)
			}
			p, err := takePicture(cmd, cl, q.Since, q.Until, now)
			if err != nil {
				return err
			}
			p.draw(c.Out, time.Local)
			for _, e := range l {
				by := ""
				if e.By != "" {
					by = " (by " + e.By + ")"
				}
				fmt.Fprintf(c.Out, "%s  %-10s %s%s\n", term.Time(e.At), e.Kind, term.Localized(strings.TrimSpace(e.Sentence)), by)
				switch o := e.Outcome; {
				case o == nil:
				case e.Kind == "action" && o.EndedAt != nil:
					hookText(c.Out, strings.Repeat(" ", 21), "pre-stop", o.Hook)
				case e.Kind == "hook":
					hookText(c.Out, strings.Repeat(" ", 21), "post-cancel", o.PostCancel)
				}
			}
			return nil
		})
	cmd.Flags().StringVar(&since, "since", "", "start of the period: "+when.PastForms)
	cmd.Flags().StringVar(&until, "until", "", "end of the period, in the same form")
	cmd.Flags().IntVar(&q.Limit, "limit", 100, "maximum number of entries, newest first; 0 shows all")
	return cmd
}

// picture is the history of a period, in the form in which it is drawn.
type picture struct {
	from, to time.Time
	watched  []stretch
	entries  []agentctl.Entry // entries of that period
}

// stretch is a period during which no signal changed its state.
type stretch struct {
	from, to time.Time
	states   map[string]idle.State
}

// takePicture reads the history from since until until. A zero until means now. A
// zero since means 24 hours before until, or the first entry if that is later.
func takePicture(cmd *cobra.Command, cl *agentctl.Client, since, until, now time.Time) (picture, error) {
	p := picture{from: since, to: cmp.Or(until, now)}
	if since.IsZero() {
		p.from = p.to.Add(-24 * time.Hour)
	}
	// The state at the beginning is in an earlier entry.
	before, err := cl.History(cmd.Context(), agentctl.HistoryQuery{Until: p.from, Limit: 500})
	if err != nil {
		return p, err
	}
	// Entries after the end show whether the agent ran until then.
	list, err := cl.History(cmd.Context(), agentctl.HistoryQuery{Since: p.from})
	if err != nil {
		return p, err
	}
	if since.IsZero() && len(before) == 0 && len(list) > 0 && list[0].At.After(p.from) {
		p.from = list[0].At
	}
	p.take(append(before, list...), now)
	return p, nil
}

// take divides history entries, which must reach up to now, into watched stretches
// and events.
func (p *picture) take(list []agentctl.Entry, now time.Time) {
	var open *stretch
	var last time.Time
	end := func(at time.Time) {
		if open != nil && at.After(open.from) {
			open.to = at
			p.watched = append(p.watched, *open)
		}
		open = nil
	}
	for _, e := range list {
		switch slept := time.Duration(e.Slept); {
		case e.Kind == "start":
			end(last) // when the previous agent ended is unknown
		case e.Kind == "end":
			end(e.At)
		case e.Kind == "resume" && slept > 0:
			end(slices.MaxFunc([]time.Time{last, e.At.Add(-slept)}, time.Time.Compare))
		case e.Kind == "verdict":
			end(e.At)
			open = &stretch{from: e.At, states: map[string]idle.State{}}
			for _, r := range e.Readings {
				open.states[r.Signal] = r.State
			}
		}
		last = e.At
		if !e.At.Before(p.from) && e.At.Before(p.to) {
			p.entries = append(p.entries, e)
		}
	}
	end(now)
}

// pictureWidth is the maximum number of columns. With the names of signals, the
// picture fits 80 characters.
const pictureWidth = 60

// pictureSteps are the lengths of time that a column can cover.
var pictureSteps = []time.Duration{5 * time.Second, 10 * time.Second, 30 * time.Second, time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute,
	15 * time.Minute, 30 * time.Minute, time.Hour, 2 * time.Hour, 3 * time.Hour, 6 * time.Hour, 12 * time.Hour, 24 * time.Hour, 7 * 24 * time.Hour, 31 * 24 * time.Hour, 366 * 24 * time.Hour}

// columns returns the start times of the columns and the length of each.
func (p *picture) columns() (at []time.Time, step time.Duration) {
	step = pictureSteps[len(pictureSteps)-1]
	for _, s := range pictureSteps {
		if p.to.Sub(p.from.Truncate(s)) <= pictureWidth*s {
			step = s
			break
		}
	}
	for t := p.from.Truncate(step); t.Before(p.to) && len(at) < pictureWidth; t = t.Add(step) {
		at = append(at, t)
	}
	return at, step
}

// marks are the marks for the states of a signal. A column shows the first one that
// occurs in it.
var marks = []struct {
	state idle.State
	mark  rune
	name  string
}{{idle.Active, '█', "active"}, {idle.Unknown, '?', "unknown"}, {idle.Quiet, '·', "quiet"}, {idle.Absent, '-', "absent"}}

// happenings are the marks for events. A column shows the first one that occurs in
// it.
var happenings = []struct {
	mark rune
	name string
	is   func(e agentctl.Entry) bool
}{
	{'T', "terminated", accepted("terminate")},
	{'S', "stopped", accepted("stop")},
	{'H', "hibernated", accepted("hibernate")},
	{'f', "an action failed", phase("failed")},
	{'R', "resumed", kind("resume")},
	{'B', "agent or machine started", kind("start")},
	{'w', "warned", kind("warning")},
	{'u', "a warning was withdrawn", kind("withdrawal")},
	{'h', "halt set or lifted", kind("halt")},
	{'!', "alarm", kind("alarm")},
	{'d', "work completed", kind("completion")},
	{'z', "snoozed", kind("snooze")},
	{'l', "lease", kind("lease")},
	{'t', "TTL extended", kind("ttl")},
	{'c', "an action was canceled", phase("cancelled")},
}

func kind(k string) func(agentctl.Entry) bool {
	return func(e agentctl.Entry) bool { return e.Kind == k }
}

func phase(ph string) func(agentctl.Entry) bool {
	return func(e agentctl.Entry) bool { return e.Kind == "action" && e.Outcome != nil && e.Outcome.Phase == ph }
}

func accepted(action string) func(agentctl.Entry) bool {
	return func(e agentctl.Entry) bool { return phase("accepted")(e) && e.Outcome.Action == action }
}

// draw writes the picture with times in the zone place. Where nothing is recorded it
// leaves the columns blank.
func (p *picture) draw(w io.Writer, place *time.Location) {
	columns, step := p.columns()
	signals := p.signals()
	if len(signals) == 0 || len(columns) == 0 {
		return
	}
	width := len("events")
	for _, s := range signals {
		width = max(width, utf8.RuneCountInString(s))
	}
	fmt.Fprintf(w, "%-*s  %s\n", width, "", axis(columns, step, place))
	used := map[rune]bool{}
	print := func(name string, row []rune) {
		for _, m := range row {
			used[m] = true
		}
		fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("%-*s  %s", width, name, string(row)), " "))
	}
	for _, s := range signals {
		row := make([]rune, len(columns))
		for i, at := range columns {
			row[i] = ' '
			for _, m := range marks {
				if p.says(s, m.state, at, at.Add(step)) {
					row[i] = m.mark
					break
				}
			}
		}
		print(s, row)
	}
	row := make([]rune, len(columns))
	for i, at := range columns {
		row[i] = ' '
		for _, h := range slices.Backward(happenings) {
			if slices.ContainsFunc(p.entries, func(e agentctl.Entry) bool { return !e.At.Before(at) && e.At.Before(at.Add(step)) && h.is(e) }) {
				row[i] = h.mark
			}
		}
	}
	print("events", row)
	legend := []string{"one column is " + term.Span(step)}
	for _, m := range marks {
		if used[m.mark] {
			legend = append(legend, string(m.mark)+" "+m.name)
		}
	}
	for _, h := range happenings {
		if used[h.mark] {
			legend = append(legend, string(h.mark)+" "+h.name)
		}
	}
	fmt.Fprintf(w, "\n%s\n%s\n\n", strings.Join(legend, ", "), p.summary(place))
}

// axis returns a line with the time of every tenth column.
func axis(columns []time.Time, step time.Duration, place *time.Location) string {
	form := "15:04"
	switch {
	case step >= time.Hour:
		form = "Jan 2"
	case step < time.Minute:
		form = "15:04:05"
	}
	var b strings.Builder
	for i := 0; i < len(columns); i += 10 {
		fmt.Fprintf(&b, "%-10s", columns[i].In(place).Format(form))
	}
	return strings.TrimRight(b.String(), " ")
}

// says reports whether a signal was in the given state at any time between from and
// to.
func (p *picture) says(signal string, state idle.State, from, to time.Time) bool {
	return slices.ContainsFunc(p.watched, func(x stretch) bool {
		s, ok := x.states[signal]
		return ok && s == state && x.from.Before(to) && x.to.After(from) && x.from.Before(p.to) && x.to.After(p.from)
	})
}

// signals returns the names of the signals in the picture, those about users first.
func (p *picture) signals() []string {
	order := []string{"users", "terminals", "recent", "cpu", "gpu", "disk", "network"}
	var out []string
	for _, x := range p.watched {
		for s := range x.states {
			if !slices.Contains(out, s) && x.to.After(p.from) && x.from.Before(p.to) {
				out = append(out, s)
			}
		}
	}
	rank := func(s string) int {
		if i := slices.Index(order, s); i >= 0 {
			return i
		}
		return len(order)
	}
	slices.SortFunc(out, func(a, b string) int { return cmp.Or(rank(a)-rank(b), strings.Compare(a, b)) })
	return out
}

// summary returns how long the machine was in use, quiet, unknown and not watched,
// and the numbers of important events.
func (p *picture) summary(place *time.Location) string {
	var sums [4]time.Duration // by index of marks
	whole := p.to.Sub(p.from)
	rest := whole
	for _, x := range p.watched {
		from, to := x.from, x.to
		if from.Before(p.from) {
			from = p.from
		}
		if to.After(p.to) {
			to = p.to
		}
		if d := to.Sub(from); d > 0 {
			rest -= d
			sums[x.weight()] += d
		}
	}
	said := []string{}
	for _, s := range []struct {
		name string
		d    time.Duration
	}{{"in use", sums[0]}, {"quiet", sums[2] + sums[3]}, {"unknown", sums[1]}, {"not watched", rest}} {
		if s.d >= time.Second {
			said = append(said, fmt.Sprintf("%s %s (%.0f %%)", s.name, term.Span(s.d), 100*s.d.Seconds()/whole.Seconds()))
		}
	}
	for _, h := range happenings {
		n := 0
		for _, e := range p.entries {
			if h.is(e) {
				n++
			}
		}
		if n > 0 && strings.ContainsRune("TSHRwf", h.mark) {
			said = append(said, fmt.Sprintf("%s: %d", h.name, n))
		}
	}
	return fmt.Sprintf("%s to %s: %s", p.from.In(place).Format(time.DateTime), p.to.In(place).Format(time.DateTime), strings.Join(said, ", "))
}

// weight returns the index in marks of the most important state in a stretch.
func (x stretch) weight() int {
	for i, m := range marks {
		for _, s := range x.states {
			if s == m.state {
				return i
			}
		}
	}
	return 1 // no signal was read
}
