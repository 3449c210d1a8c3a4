package worker

import (
	"strings"
	"testing"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/worker"
)

// TestReachSaysWhyNot checks that a user who waits for a stop that is canceled sees
// why.
func TestReachSaysWhyNot(t *testing.T) {
	w := worker.Worker{Name: "cml-3", Status: power.WorkerRunning, DesiredStatus: power.WorkerRunning,
		StopCalledOff: &worker.CalledOff{Why: "EC2 refused the stop: UnauthorizedOperation"}}
	_, err := reach(power.WorkerStopped).met(w)
	if err == nil || !strings.Contains(err.Error(), w.StopCalledOff.Why) {
		t.Error(err)
	}
}

// TestOvertaken checks the message if another user has changed the desired status of
// a worker that a verb waits for.
func TestOvertaken(t *testing.T) {
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	for name, c := range map[string]struct {
		w    worker.Worker
		to   power.Worker
		want []string
	}{
		"start canceled":  {worker.Worker{DesiredStatus: power.WorkerStopped, StartWithdrawnAt: &at, StartWithdrawnBy: "bob", LastPausedBy: "ada"}, power.WorkerRunning, []string{"bob", "start", "2026-03-04T05:06:07Z"}},
		"stop requested":  {worker.Worker{DesiredStatus: power.WorkerStopped, LastPausedBy: "ada", PauseReason: power.ReasonManual}, power.WorkerRunning, []string{"ada", "stop", "(manual)"}},
		"start requested": {worker.Worker{DesiredStatus: power.WorkerRunning, StartBy: "eve"}, power.WorkerStopped, []string{"eve", "start"}},
		"to be ended":     {worker.Worker{DesiredStatus: power.WorkerTerminated}, power.WorkerStopped, nil},
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
