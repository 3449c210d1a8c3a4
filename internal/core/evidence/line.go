package evidence

import (
	"log/slog"
	"strings"
	"time"
)

// lineEvery is the minimum time between two lines that differ only in their
// blocks.
const lineEvery = time.Minute

// The outcomes of a decision in log lines.
const (
	OutcomePause = "pause" // no block is left
	OutcomeWarn  = "warn"  // the warning is due
	OutcomeHold  = "hold"
)

// Line produces log lines for the decisions about one object: one for each new
// outcome and otherwise at most one per minute, so that a flapping signal does
// not flood the log. The zero value is ready for use. It is not safe for
// concurrent use.
type Line struct {
	outcome, said string
	at            time.Time
}

// Take returns the attributes of the log line for a decision, or nil if there is
// nothing new to log. who identifies the object; guard names what, besides the
// blocks, prevented the action.
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
