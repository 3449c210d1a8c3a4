package controller

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
)

// TestRefusedStopIsNoPause checks that a stop that EC2 refuses counts as a requested
// pause but not as the last pause, and that the record shows the refusal until
// something else happens.
func TestRefusedStopIsNoPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, options{})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		set := func(fault func(call string) (time.Duration, error, bool)) {
			r.world.mu.Lock()
			r.world.fault = fault
			r.world.mu.Unlock()
		}
		refuse := func(call string) (time.Duration, error, bool) {
			if call == "stop" {
				return 0, callErr(Unauthorized), false
			}
			return 0, nil, false
		}
		stop := func() {
			t.Helper()
			errtest.Get(r.fleet.StopWorker(t.Context(), operator, id))(t)
		}
		refused := func(stops int64) worker.Worker {
			t.Helper()
			set(refuse)
			stop()
			time.Sleep(time.Minute)
			w := r.await(id, power.WorkerRunning, time.Minute)
			if c := w.StopCalledOff; c == nil || c.Why == "" || !strings.Contains(w.StatusReason, c.Why) || c.By != operator.Name {
				t.Errorf("its record says %q of %+v", w.StatusReason, c)
			}
			if w.DesiredStatus != power.WorkerRunning || w.Intent != nil || w.ManualPauseCount != stops || !w.StopRefused() {
				t.Errorf("wanted %s, intent %v, %d stops by users", w.DesiredStatus, w.Intent, w.ManualPauseCount)
			}
			return w
		}
		if w := refused(1); w.LastPausedAt != nil || w.LastPausedBy != "" || w.PauseReason != "" {
			t.Errorf("last paused at %v by %s (%s), and never was", w.LastPausedAt, w.LastPausedBy, w.PauseReason)
		}
		set(nil)
		stop()
		if w := r.await(id, power.WorkerStopped, 5*time.Minute); w.LastPausedAt == nil || w.StopCalledOff != nil || w.StatusReason != "" {
			t.Errorf("last paused at %v; %q, %+v", w.LastPausedAt, w.StatusReason, w.StopCalledOff)
		}
		paused := *r.worker(id).LastPausedAt
		errtest.Get(r.fleet.StartWorker(t.Context(), operator, id))(t)
		r.await(id, power.WorkerRunning, 5*time.Minute)
		if w := refused(3); w.LastPausedAt == nil || !w.LastPausedAt.Equal(paused) {
			t.Errorf("last paused at %v, want %v", w.LastPausedAt, paused)
		}
	})
}
