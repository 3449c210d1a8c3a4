package controller

import (
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/fleet/worker"
)

// TestChecking checks that a worker that still waits for its first reading is shown
// differently from one that cannot be read.
func TestChecking(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	at := func(d time.Duration) *time.Time { t := ago(d); return &t }
	verdict := &idle.Verdict{}
	for name, c := range map[string]struct {
		w     worker.Worker
		v     live
		taken time.Time
		want  bool
	}{
		"just imported":            {worker.Worker{CreatedAt: ago(time.Second)}, live{}, ago(time.Hour), true},
		"just taken":               {worker.Worker{CreatedAt: ago(time.Hour)}, live{}, ago(time.Second), true},
		"its first check is ahead": {worker.Worker{CreatedAt: ago(time.Hour)}, live{nextCheck: now.Add(time.Minute)}, ago(time.Hour), true},
		"its check is overdue":     {worker.Worker{CreatedAt: ago(time.Hour)}, live{nextCheck: ago(firstCheckWithin)}, ago(time.Hour), false},
		"checked, unreadable":      {worker.Worker{CreatedAt: ago(time.Second)}, live{verdict: verdict}, ago(time.Second), false},
		"CML boots":                {worker.Worker{CreatedAt: ago(time.Hour), LastResumedAt: at(time.Minute)}, live{verdict: verdict}, ago(time.Hour), true},
		"CML boots for too long":   {worker.Worker{CreatedAt: ago(time.Hour), LastResumedAt: at(bootWithin)}, live{verdict: verdict}, ago(time.Hour), false},
		"CML is ready":             {worker.Worker{CreatedAt: ago(time.Hour), LastResumedAt: at(time.Minute), CMLReady: true}, live{verdict: verdict}, ago(time.Hour), false},
	} {
		if got := checking(&c.w, c.v, c.taken, now); got != c.want {
			t.Errorf("%s: checking is %v", name, got)
		}
	}
}
