package evidence_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
)

// TestLine checks that a decision without news has no line, that lines for an
// unchanged outcome are at least a minute apart, and that a pause is always
// logged.
func TestLine(t *testing.T) {
	begin := t0.UTC()
	p := idle.Policy{Name: "research", Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(5 * time.Minute), Detection: true, AutoPause: true}
	var l evidence.Line
	take := func(after time.Duration, e idle.Evidence, guard string) string {
		e.Status, e.Running, e.CreatedAt = "RUNNING", true, begin.Add(-time.Minute)
		line := ""
		for _, a := range l.Take(evidence.Decide(begin.Add(after), p, e), guard, slog.String("worker", "w-1")) {
			line += fmt.Sprintf("%s=%v ", a.Key, a.Value)
		}
		return line
	}
	unknown := idle.Evidence{Readings: []idle.Reading{idle.NotKnown("cml", begin, "throttled")}}
	for _, c := range []struct {
		after time.Duration
		e     idle.Evidence
		guard string
		want  []string // nil is no line
	}{
		{0, idle.Evidence{}, "", []string{"worker=w-1 outcome=hold code=not_idle_yet blocks=not_idle_yet policy=research", "target_pause_at=" + begin.Add(59*time.Minute).String()}},
		{5 * time.Minute, idle.Evidence{}, "", nil},
		{5*time.Minute + time.Second, idle.Evidence{}, "skipped_not_idle", []string{"guard=skipped_not_idle"}},
		{5*time.Minute + 30*time.Second, unknown, "", nil}, // a minute has not passed
		{6*time.Minute + 30*time.Second, unknown, "", []string{"signal_unknown(cml)"}},
		{7 * time.Minute, unknown, "", nil},
		{58*time.Minute + 59*time.Second, idle.Evidence{}, "", []string{"code=not_idle_yet"}},
		{59 * time.Minute, idle.Evidence{}, "", []string{"outcome=pause code=idle_timeout_exceeded"}}, // a pause is logged without waiting for the minute
		{60 * time.Minute, idle.Evidence{}, "", nil},
	} {
		got := take(c.after, c.e, c.guard)
		if (got == "") != (c.want == nil) {
			t.Errorf("after %s: %q, want %q", c.after, got, c.want)
		}
		for _, w := range c.want {
			if !strings.Contains(got, w) {
				t.Errorf("after %s: %q lacks %q", c.after, got, w)
			}
		}
	}
}
