package fleet_test

import (
	"context"
	"testing"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/worker"
)

// TestTakenBackIsNoPause checks that a withdrawn stop or drain leaves the last pause
// unchanged, even if another user requested one in between, and that one that takes
// effect after all becomes the last pause.
func TestTakenBackIsNoPause(t *testing.T) {
	for name, c := range map[string]struct {
		stops []worker.Pause
		off   func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error)
	}{
		"a drain": {[]worker.Pause{{Drain: true}}, func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.CancelDrain(ctx, ada, id)
		}},
		"a stop": {[]worker.Pause{{}}, func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.ResumeWorker(ctx, ada, id)
		}},
		"a stop in place of theirs": {[]worker.Pause{{Reason: power.ReasonTTL}, {}}, func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.ResumeWorker(ctx, ada, id)
		}},
	} {
		bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
			id, before := create(t, fl).ID, time.Now().UTC()
			put(t, fl, id, power.WorkerRunning)
			change(t, fl, id, func(w *worker.Worker) {
				w.LastPausedAt, w.LastPausedBy, w.PauseReason = &before, "eve", power.ReasonSchedule
			})
			for _, p := range c.stops {
				passMinute()
				w, err := fl.PauseWorker(t.Context(), ada, id, p)
				if err != nil {
					t.Fatal(name, err)
				}
				if w.LastPausedAt.Equal(before) || w.LastPausedBy != ada.Name {
					t.Errorf("%s: asked for, and last paused at %v by %s", name, w.LastPausedAt, w.LastPausedBy)
				}
			}
			w, err := c.off(t.Context(), fl, id)
			if err != nil {
				t.Fatal(name, err)
			}
			if w.LastPausedAt == nil || !w.LastPausedAt.Equal(before) || w.LastPausedBy != "eve" || w.PauseReason != power.ReasonSchedule {
				t.Errorf("%s: last paused at %v by %s (%s)", name, w.LastPausedAt, w.LastPausedBy, w.PauseReason)
			}
			off := w.StopCalledOff
			if off == nil || off.By != ada.Name || off.Drain != c.stops[0].Drain || w.ManualPauseCount != 1 || w.StatusReason != "" {
				t.Fatalf("%s: called off %+v, %d by users, %q", name, off, w.ManualPauseCount, w.StatusReason)
			}
			if w.TookEffect(); w.LastPausedBy != ada.Name || w.PauseReason != power.ReasonManual || !w.LastPausedAt.Equal(off.AskedAt) {
				t.Errorf("%s: it happened, and was last paused at %v by %s (%s)", name, w.LastPausedAt, w.LastPausedBy, w.PauseReason)
			}
		})
	}
}
