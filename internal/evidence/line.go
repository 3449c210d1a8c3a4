package evidence

import (
	"log/slog"
	"strings"
	"time"
)

// lineEvery is the least time between two lines that differ in nothing but
// what holds an object.
const lineEvery = time.Minute

// Outcomes of a decision, as a log line names them.
const (
	OutcomePause = "pause" // nothing holds it
	OutcomeWarn  = "warn"  // the warning goes out
	OutcomeHold  = "hold"
)

// Line makes lines for a log of the decisions about one object: one for each
// that says something new, and at most one a minute while the outcome stays,
// so that a signal that comes and goes does not fill a disk. The zero Line has
// said nothing yet. Its owner is whoever decides about the object.
type Line struct {
	outcome, said string
	at            time.Time
}

// Take returns what a line about the decision says, and nil if there is
// nothing new: who is the attributes that name the object, guard what kept an
// automatic action from it beside its blocks.
func (l *Line) Take(d Decision, guard string, who ...slog.Attr) []slog.Attr {
	v := &d.Verdict
	outcome := OutcomeHold
	switch {
	case v.Eligible:
		outcome = OutcomePause
	case v.WarnDue:
		outcome = OutcomeWarn
	}
	var all strings.Builder
	for i, b := range v.Blocks {
		if i > 0 {
			all.WriteByte(' ')
		}
		all.WriteString(string(b.Code))
		if by := b.Signal + b.Holder; by != "" {
			all.WriteString("(" + by + ")")
		}
	}
	said := d.Policy.Name + " " + guard + " " + all.String()
	if outcome == l.outcome && (said == l.said || v.At.Sub(l.at) < lineEvery && !v.At.Before(l.at)) {
		return nil
	}
	l.outcome, l.said, l.at = outcome, said, v.At
	out := append(who, slog.String("outcome", outcome), slog.String("code", string(v.Reason)), slog.String("blocks", all.String()))
	if guard != "" {
		out = append(out, slog.String("guard", guard))
	}
	out = append(out, slog.String("policy", d.Policy.Name), slog.Float64("idle_minutes", float64(int64(v.IdleMinutes*10))/10))
	if t := v.TargetPauseAt; t != nil {
		out = append(out, slog.Time("target_pause_at", *t))
	}
	return append(out, slog.Time("next_check_at", v.NextIdleCheckAt))
}
