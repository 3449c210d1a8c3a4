package main

import (
	"strings"
	"testing"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet"
)

// TestOvertaken checks the message to a user who waits for a worker whose
// desired state another user has changed.
func TestOvertaken(t *testing.T) {
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	for name, c := range map[string]struct {
		w    fleet.Worker
		to   power.Worker
		want []string
	}{
		"start canceled":  {fleet.Worker{DesiredStatus: power.WorkerStopped, StartWithdrawnAt: &at, StartWithdrawnBy: "bob", LastPausedBy: "ada"}, power.WorkerRunning, []string{"bob", "start", "2026-03-04T05:06:07Z"}},
		"stop requested":  {fleet.Worker{DesiredStatus: power.WorkerStopped, LastPausedBy: "ada", PauseReason: power.ReasonManual}, power.WorkerRunning, []string{"ada", "stop", "(manual)"}},
		"start requested": {fleet.Worker{DesiredStatus: power.WorkerRunning, StartBy: "eve"}, power.WorkerStopped, []string{"eve", "start"}},
		"to be ended":     {fleet.Worker{DesiredStatus: power.WorkerTerminated}, power.WorkerStopped, nil},
	} {
		got := overtaken(&c.w, c.to)
		if (got == "") != (c.want == nil) {
			t.Errorf("%s: %q", name, got)
		}
		for _, w := range c.want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: %q does not name %q", name, got, w)
			}
		}
	}
}

// TestEndOr holds ends that may be given as a length or as a moment, or not.
func TestEndOr(t *testing.T) {
	now := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	for _, c := range []struct {
		until string
		dur   time.Duration
		want  time.Duration // 0 is refused
	}{
		{"", 0, time.Minute},
		{"", 2 * time.Hour, 2 * time.Hour},
		{"05:16:00", 0, 10*time.Minute - 7*time.Second},
		{"05:16:61", 0, 0},
		{"05:16", 0, 10*time.Minute - 7*time.Second},
		{"2026-03-05", 0, 19*time.Hour - 6*time.Minute - 7*time.Second},
		{"2026-03-03", 0, 0},
		{"+1h", time.Hour, 0},
	} {
		got, err := endOr(now, c.until, c.dur, time.Minute)
		if got != c.want || (err != nil) != (c.want == 0) {
			t.Errorf("%q, %s: %s and %v, want %s", c.until, c.dur, got, err, c.want)
		}
	}
}
