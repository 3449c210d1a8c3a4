package server

import (
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/board"
)

// TestUnreadRegionIsTold checks that an unreadable EC2 region is shown by why and,
// once per region, by the overview, and that a worker that waits for EC2 is shown
// with the way to end it.
func TestUnreadRegionIsTold(t *testing.T) {
	at := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	u := &worker.Unread{Region: "eu-west-9", Since: at, Error: "AuthFailure: no such region"}
	const said = "EC2 has not answered about eu-west-9 since 2026-03-02T12:00:00Z: AuthFailure: no such region"
	for name, c := range map[string]struct {
		w        worker.Worker
		after    time.Duration
		standing control.Standing
		row, out bool
	}{
		"imported":           {worker.Worker{Status: power.WorkerUnknown, Imported: true, StatusReason: said}, time.Minute, control.StandingUnknown, true, true},
		"told to end":        {worker.Worker{Status: power.WorkerTerminating, Imported: true}, 3 * time.Minute, control.StandingUnknown, true, true},
		"only just":          {worker.Worker{Status: power.WorkerTerminating, Imported: true}, time.Minute, control.StandingEnded, false, true},
		"stopped":            {worker.Worker{Status: power.WorkerStopped}, time.Hour, control.StandingPaused, true, false},
		"running":            {worker.Worker{Status: power.WorkerRunning}, time.Hour, control.StandingIdle, true, false},
		"gone":               {worker.Worker{Status: power.WorkerTerminated}, time.Hour, control.StandingEnded, false, false},
		"not known any more": {worker.Worker{Status: power.WorkerUnknown, EC2State: "running"}, time.Hour, control.StandingUnknown, true, false},
	} {
		c.w.Name, c.w.AWSRegion, c.w.EC2InstanceID, c.w.Armed, c.w.StatusSince = "lost", "eu-west-9", "i-0123456789abcdef0", true, at
		st := worker.IdleStatus{CloudUnread: u, TimeoutMinutes: 60, Verdict: idle.Verdict{IdleMinutes: 30, Blocks: []idle.Block{{Code: idle.NotIdleYet, Sentence: "Not idle yet."}}}}
		a := about(&c.w)
		explain(&a, &c.w, st, at.Add(c.after))
		if strings.Count(a.Answer, said) != 1 && c.w.Status != power.WorkerTerminated {
			t.Errorf("%s: %s", name, a.Answer)
		}
		row := board.Row(&c.w, &st, at.Add(c.after))
		if told := strings.HasPrefix(row.Sentence, said); told != c.row || row.Standing != c.standing || c.row && !row.Attention {
			t.Errorf("%s: the overview has %s: %s", name, row.Standing, row.Sentence)
		}
		out := why.Account{}
		wayOut(&out, &c.w, u, at.Add(c.after))
		if f := out.Fact(why.Forget.Code); (f != nil) != c.out || c.out && !strings.Contains(f.Sentence, c.w.EC2InstanceID) {
			t.Errorf("%s: %+v", name, out.Remedies)
		}
		out = why.Account{}
		if wayOut(&out, &c.w, nil, at.Add(time.Minute)); out.Remedies != nil {
			t.Errorf("%s: before anything is wrong: %+v", name, out.Remedies)
		}
	}
}
