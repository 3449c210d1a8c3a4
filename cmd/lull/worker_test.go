package main

import (
	"testing"
	"time"

	"lull/internal/fleet"
	"lull/internal/power"
)

// TestOvertaken holds what is said to whoever waits for a worker that somebody
// else wants otherwise.
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
