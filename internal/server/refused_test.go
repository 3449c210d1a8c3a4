package server

import (
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet/worker"
	"lull/internal/server/board"
)

// TestRefusedStopIsTold checks that a stop refused by EC2 is shown by why and the
// overview until something else happens, and that a stop canceled by a user is shown
// by why for a day.
func TestRefusedStopIsTold(t *testing.T) {
	at := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	st := worker.IdleStatus{TimeoutMinutes: 60, Verdict: idle.Verdict{At: at, Blocks: []idle.Block{{Code: idle.NotIdleYet, Sentence: "Not idle yet."}}}}
	for _, c := range []struct {
		reason string
		after  time.Duration
		told   bool
	}{{"the stop was canceled: EC2 refused the stop: not allowed.", 100 * time.Hour, true}, {"", time.Hour, true}, {"", 100 * time.Hour, false}} {
		w := &worker.Worker{ID: "w-1", Name: "a6", Status: power.WorkerRunning, Armed: true, StatusReason: c.reason, StopCalledOff: &worker.CalledOff{At: at,
			Why: "EC2 refused the stop: not allowed.", AskedAt: at.Add(-time.Minute), By: "ada", Reason: power.ReasonManual}}
		a := about(w)
		explain(&a, w, st, at.Add(c.after))
		if f := a.Fact(why.CalledOff.Code); (f != nil) != c.told || f != nil && (f.Sentence != w.StopCalledOff.Sentence() || f.By != "ada" || !f.At.Equal(at)) {
			t.Errorf("after %s, with reason %q: %+v", c.after, c.reason, a.Facts)
		}
		row := board.Row(w, &st, at.Add(c.after))
		if refused := row.Sentence == "The stop was canceled: EC2 refused the stop: not allowed."; refused != (c.reason != "") || row.Attention != refused {
			t.Errorf("after %s, with reason %q: the overview has %s", c.after, c.reason, row.Sentence)
		}
	}
}
