package controller

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/fleet"
	"lull/internal/power"
)

// TestEndOfAStoppedWorker: one that is stopped when its life ends is terminated
// where ttl_action says so, after a warning of that, and kept by everything
// that keeps a worker that runs.
func TestEndOfAStoppedWorker(t *testing.T) {
	terminate, stop := "terminate", "stop"
	halt := func(r *rig, until *time.Time) {
		if _, err := r.fleet.SetHalt(r.t.Context(), person, fleet.HaltRequest{On: true, Until: until}); err != nil {
			r.t.Error(err)
		}
	}
	for name, c := range map[string]struct {
		action *string
		do     func(r *rig, id string, end time.Time) // between the warning and the end
		calls  bool
		status power.Worker // an hour after the end
	}{
		"terminate": {&terminate, nil, true, power.WorkerTerminated},
		"stop":      {&stop, nil, false, power.WorkerStopped},
		"moved": {&terminate, func(r *rig, id string, end time.Time) {
			later := end.Add(24 * time.Hour)
			r.profile(id, fleet.Profile{TTLDeadline: &later})
		}, false, power.WorkerStopped},
		"taken away": {&terminate, func(r *rig, id string, _ time.Time) {
			r.profile(id, fleet.Profile{TTLDeadline: &time.Time{}})
		}, false, power.WorkerStopped},
		"halted": {&terminate, func(r *rig, _ string, _ time.Time) { halt(r, nil) }, false, power.WorkerStopped},
		"halted for a while": {&terminate, func(r *rig, _ string, end time.Time) {
			until := end.Add(10 * time.Minute)
			halt(r, &until)
		}, true, power.WorkerTerminated},
		"protected": {&terminate, func(r *rig, _ string, _ time.Time) {
			r.world.mu.Lock()
			defer r.world.mu.Unlock()
			failing("terminate", Protected, false)(r.world)
		}, true, power.WorkerFailed},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, options{})
				defer func() { r.stop() }()
				id := r.create().ID
				r.await(id, power.WorkerRunning, 5*time.Minute)
				end := time.Now().Add(6 * time.Hour).UTC().Round(0)
				r.profile(id, fleet.Profile{TTLDeadline: &end, TTLAction: c.action})
				r.await(id, power.WorkerStopped, 4*time.Hour) // nobody uses it
				pauses := r.c.Stats().AutoPause
				time.Sleep(time.Until(end.Add(-time.Minute)))
				page, err := r.fleet.Audit(t.Context(), fleet.AuditQuery{Action: "pause_warning"})
				if err != nil || len(page.Entries) == 0 {
					t.Fatal(page.Entries, err)
				}
				x := page.Entries[len(page.Entries)-1].Warning
				if warned := x.Reason == fleet.ReasonTTL; warned != (*c.action == terminate) {
					t.Fatalf("a minute before the end the last warning is %+v", x)
				} else if warned && (x.Action != terminate || !x.PauseAt.Equal(end) || !strings.Contains(x.Sentence("x", time.UTC), "terminated")) {
					t.Errorf("the warning is %+v", x)
				}
				if s := r.worker(id).Status; s != power.WorkerStopped {
					t.Fatalf("before its end it is %s", s)
				}
				if c.do != nil {
					c.do(r, id, end)
				}
				time.Sleep(time.Hour)
				r.world.mu.Lock()
				calls := r.world.calls["terminate"]
				r.world.mu.Unlock()
				if w := r.worker(id); w.Status != c.status || c.calls != (calls > 0) {
					t.Errorf("an hour later it is %s (%s), after %d calls", w.Status, w.StatusReason, calls)
				}
				if n := r.c.Stats().AutoPause; n != pauses {
					t.Errorf("its end counts as %d pauses", n-pauses)
				}
			})
		})
	}
}

// profile changes what people set on a worker.
func (r *rig) profile(id string, p fleet.Profile) {
	r.t.Helper()
	if _, err := r.fleet.UpdateWorker(r.t.Context(), person, id, 0, p); err != nil {
		r.t.Fatal(err)
	}
}
