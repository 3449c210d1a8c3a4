package worker_test

import (
	"testing"
	"time"

	"lull/internal/fleet/worker"
)

// TestIncompleteTelemetry checks that the events of a possibly incomplete reading do
// not replace the recorded ones, and that a newer activity among them still counts.
func TestIncompleteTelemetry(t *testing.T) {
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	w := worker.Worker{LastActivityAt: &at, RecentActivityEvents: []worker.Event{{Category: "start_lab", Timestamp: at}, {Category: "stop_lab", Timestamp: at.Add(-time.Hour)}}}
	u := worker.ActivityUpdate{Telemetry: worker.Telemetry{Newest: at, Recent: w.RecentActivityEvents[:1]}}
	if !u.Complete() || !u.Changes(&w) {
		t.Error("a complete reading with fewer events changes nothing")
	}
	u.Unknown = "truncated"
	if u.Complete() || u.Changes(&w) {
		t.Error("an incomplete reading replaces events")
	}
	if u.Newest = at.Add(time.Minute); !u.Changes(&w) || !u.Moves(&w) {
		t.Error("newer activity of an incomplete reading does not count")
	}
}
