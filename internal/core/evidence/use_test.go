package evidence_test

import (
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
)

// TestKeptUp checks that KeptUp is empty for an object in use, and otherwise
// names the most important block that does not end by itself.
func TestKeptUp(t *testing.T) {
	at := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	used := func(d time.Duration) *time.Time { x := at.Add(-d); return &x }
	wait, lease := idle.Block{Code: idle.NotIdleYet}, idle.Block{Code: idle.LeaseHeld}
	for want, v := range map[string]idle.Verdict{
		"":                       {LastActivityAt: used(9 * time.Minute), Blocks: []idle.Block{lease}},
		"not_idle_yet":           {LastActivityAt: used(10 * time.Minute), Blocks: []idle.Block{wait}},
		"lease_held":             {LastActivityAt: used(time.Hour), Blocks: []idle.Block{wait, lease}},
		evidence.AboutToBePaused: {},
	} {
		if got := evidence.KeptUp(&v, 5*time.Minute, at); got != want {
			t.Errorf("%+v is kept up by %q, want %q", v, got, want)
		}
	}
}
