package notify_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/warning"
)

// TestWarningText checks that a warning's text has the time, the cause, and only
// links that can change something.
func TestWarningText(t *testing.T) {
	at := time.Date(2026, 11, 22, 16, 54, 43, 0, time.UTC)
	for name, c := range map[string]struct {
		warning warning.Warning
		want    string
		links   int
	}{
		"idle": {warning.Warning{PauseAt: at, Action: "stop", Reason: power.ReasonIdleTimeout}, "r1 will be paused at 16:54 UTC because it is not in use.", 3},
		"ttl": {warning.Warning{PauseAt: at, Action: "terminate", Reason: power.ReasonTTL, Cause: "ttl_deadline 2026-11-22T16:54:43Z", Forced: true, Use: "Active: cml."},
			"r1 will be terminated at 16:54 UTC by its ttl_deadline 2026-11-22T16:54:43Z, even if it is in use: Active: cml.", 2},
		"forced": {warning.Warning{PauseAt: at, Action: "stop", Reason: power.ReasonSchedule, Cause: "schedule office", Forced: true, Use: "Active: cml."},
			"r1 will be paused at 16:54 UTC by its schedule office, even if it is in use: Active: cml.", 3},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(ctx context.Context) error {
				text, err := said(ctx, audit.Entry{Action: "pause_warning", Events: []string{audit.EventPauseWarning}, WorkerID: "w1", WorkerName: "r1",
					Reason: string(c.warning.Reason), Detail: "of the log", Warning: &c.warning})
				if err != nil {
					return err
				}
				first, _, _ := strings.Cut(text, "\n")
				if first != c.want || strings.Count(text, "https://lull.example/answer/") != c.links || !strings.Contains(text, "|Stop now>") {
					return fmt.Errorf("it says %q, want %q and %d links", text, c.want, c.links)
				}
				return nil
			})
		})
	}
}

// TestPausedText checks that the text of a forced pause says what was in use, that of
// an idle pause for how long the worker was idle, and both how to start it again.
func TestPausedText(t *testing.T) {
	for want, e := range map[string]audit.Entry{
		"r1 is being paused by worker-controller: schedule: schedule office, forced: Active: cml, last event 20s ago.": {Reason: "schedule", Detail: "schedule office, forced: Active: cml, last event 20s ago."},
		"r1 is being paused by worker-controller: ttl: Active: cml, last event 20s ago.":                               {Reason: "ttl", Detail: "Active: cml, last event 20s ago."},
		"r1 is being paused by worker-controller: idle timeout.":                                                       {Reason: "idle_timeout", Detail: "idle_timeout_exceeded"},
		"r1 is being paused by worker-controller: idle timeout: idle for 1h2m of 1h.": {Reason: "idle_timeout", Detail: "idle_timeout_exceeded",
			Decision: &evidence.Decision{Policy: idle.Policy{Timeout: idle.Duration(time.Hour)}, Verdict: idle.Verdict{IdleMinutes: 62}}},
	} {
		bubble(t, func(ctx context.Context) error {
			e.Action, e.Events, e.By, e.WorkerID, e.WorkerName = "pause_intended", []string{audit.EventPaused}, audit.ByController, "w1", "r1"
			text, err := said(ctx, e)
			want := want + "\nStart it: `lull worker start r1` · <https://lull.example/workers/w1|See why, or start it>"
			if err == nil && text != want {
				err = fmt.Errorf("it says %q, want %q", text, want)
			}
			return err
		})
	}
}
