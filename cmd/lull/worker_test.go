package main

import (
	"testing"
	"time"

	"lull/internal/fleet"
	"lull/internal/power"
)

// TestOvertaken checks the message to a user who waits for a worker whose
// desired state another user has changed.
func TestOvertaken(t *testing.T) {
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	for want, c := range map[string]struct {
		w  fleet.Worker
		to power.Worker
	}{
		": bob took the start back at 2026-03-04T05:06:07Z": {fleet.Worker{DesiredStatus: power.WorkerStopped, StartWithdrawnAt: &at, StartWithdrawnBy: "bob", LastPausedBy: "ada"}, power.WorkerRunning},
		": ada asked for a stop (manual)":                   {fleet.Worker{DesiredStatus: power.WorkerStopped, LastPausedBy: "ada", PauseReason: fleet.ReasonManual}, power.WorkerRunning},
		": eve asked for a start":                           {fleet.Worker{DesiredStatus: power.WorkerRunning, StartBy: "eve"}, power.WorkerStopped},
		"":                                                  {fleet.Worker{DesiredStatus: power.WorkerTerminated}, power.WorkerStopped},
	} {
		if got := overtaken(&c.w, c.to); got != want {
			t.Errorf("%q, want %q", got, want)
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
