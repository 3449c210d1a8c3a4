package server

import (
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/fleet/worker"
)

// TestListedAsSeen checks that a running worker is listed with the owner's live times
// in place of the record's, and without any time of a pause or check if there are no
// live readings.
func TestListedAsSeen(t *testing.T) {
	at := func(h int) *time.Time { t := time.Date(2026, 3, 2, h, 0, 0, 0, time.UTC); return &t }
	w := worker.Worker{Status: power.WorkerRunning, TargetPauseAt: at(9), NextIdleCheckAt: at(8), LastActivityAt: at(7)}
	st := worker.IdleStatus{Verdict: idle.Verdict{TargetPauseAt: at(12), NextIdleCheckAt: *at(11), LastActivityAt: at(10)}}
	if g := asSeen(w, st, true); *g.TargetPauseAt != *at(12) || *g.NextIdleCheckAt != *at(11) || *g.LastActivityAt != *at(10) {
		t.Errorf("seen: %+v", g)
	}
	held := idle.Verdict{LastActivityAt: at(6)} // no known end
	if g := asSeen(w, worker.IdleStatus{Verdict: held}, true); g.TargetPauseAt != nil || *g.LastActivityAt != *at(7) {
		t.Errorf("held: %+v", g)
	}
	if g := asSeen(w, worker.IdleStatus{}, false); g.TargetPauseAt != nil || g.NextIdleCheckAt != nil || *g.LastActivityAt != *at(7) {
		t.Errorf("unseen: %+v", g)
	}
	w.Status = power.WorkerStopped
	if g := asSeen(w, st, true); *g.TargetPauseAt != *at(9) {
		t.Errorf("stopped: %+v", g)
	}
}

// TestStrongestBlock checks that why names the block that would remain if the others
// ended, not the first one in the list.
func TestStrongestBlock(t *testing.T) {
	now := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	soon, late := now.Add(time.Minute), now.Add(time.Hour)
	unknown := idle.Block{Code: idle.SignalUnknown, Sentence: "Not known: cml."}
	halted := idle.Block{Code: idle.Halted, Sentence: "Halted by ada."}
	notYet := idle.Block{Code: idle.NotIdleYet, Sentence: "Idle for 8m48s of 1h0m.", Until: &soon}
	snooze := idle.Block{Code: idle.InSnoozePeriod, Sentence: "Protected.", Until: &late}
	budget := idle.Block{Code: idle.Budget, Sentence: "Budget gently is used up.", Until: &late}
	shadow := idle.Block{Code: idle.Shadow, Sentence: "In dry-run mode."}
	for want, blocks := range map[string][]idle.Block{
		"Idle for 8m48s of 1h0m.":   {notYet},
		"Protected.":                {notYet, snooze},
		"Idle for 8m48s of 1h.":     {{Code: idle.NotIdleYet, Sentence: "Idle for 8m48s of 1h.", Until: &soon}, budget}, // in use
		"Budget gently is used up.": {budget},
		"In dry-run mode.":          {notYet, snooze, shadow},
		"Not known: cml.":           {notYet, shadow, unknown},
		"Halted by ada.":            {notYet, unknown, snooze, halted},
	} {
		if got := why.Strongest(blocks).Sentence; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	waits := worker.IdleStatus{Verdict: idle.Verdict{Blocks: []idle.Block{budget}, TargetPauseAt: &late}}
	running := func(st worker.IdleStatus) why.Account {
		return why.Account{Kind: why.KindWorker}.Running(st.Verdict, now)
	}
	if a := running(waits); len(a.Facts) != 2 || a.Facts[0].Code != idle.Budget || a.Facts[1].Code != why.NotBefore.Code || !a.Facts[1].At.Equal(late) {
		t.Errorf("with a used up budget: %+v", a.Facts)
	}
	if w := asSeen(worker.Worker{Status: power.WorkerRunning}, waits, true); !w.PauseNotBefore {
		t.Error("a list says that it is paused when others may be")
	}
	st := worker.IdleStatus{Verdict: idle.Verdict{Blocks: []idle.Block{notYet, unknown}, NextIdleCheckAt: soon}}
	if a := running(st); len(a.Facts) != 2 || a.Facts[0].Code != idle.SignalUnknown || a.Facts[1].Code != why.NextCheck.Code || !a.Facts[1].At.Equal(soon) {
		t.Errorf("with a plan: %+v", a.Facts)
	}
}
