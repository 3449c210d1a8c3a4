package controller

import (
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet"
)

// TestLoadHoldsForTheTimeout checks that a worker judged by its load alone is
// idle only a complete timeout after the load fell, not at once.
func TestLoadHoldsForTheTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(1)
		w.cpu = new(90.0)
		r := newRig(t, options{world: w, settings: map[string]any{"worker_auto_pause_snooze_minutes": 0}})
		defer r.stop()
		id := r.create().ID
		if _, err := r.fleet.UpdateWorker(t.Context(), person, id, 0, fleet.Profile{ActivitySources: []string{fleet.SourceCloudWatch}}); err != nil {
			t.Fatal(err)
		}
		r.await(id, power.WorkerRunning, 5*time.Minute)
		time.Sleep(5 * time.Hour)
		w.mu.Lock()
		*w.cpu = 1
		w.mu.Unlock()
		fell := time.Now()
		r.await(id, power.WorkerStopped, 2*time.Hour)
		is, err := r.fleet.Worker(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		if after := is.LastPausedAt.Sub(fell); after < 50*time.Minute || after > 80*time.Minute {
			t.Errorf("paused %s after its load fell, with a timeout of an hour", after)
		}
	})
}
