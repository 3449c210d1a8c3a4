package evidence

import (
	"slices"
	"time"

	"lull/internal/core/idle"
)

// FalseStop is the default of how soon after a pause use must resume for the
// pause to count as a false stop.
const FalseStop = 15 * time.Minute

// AboutToBePaused is the result of KeptUp for an object that nothing keeps
// running.
const AboutToBePaused = "about_to_be_paused"

// KeptUp returns what kept an unused object running after the check at that time
// with verdict v: the code of the most significant block, or AboutToBePaused. It
// returns "" if the object was in use, that is, if its last activity was less
// than two check intervals old.
func KeptUp(v *idle.Verdict, every time.Duration, at time.Time) string {
	if last := v.LastActivityAt; last != nil && at.Sub(*last) < 2*every || v.Has(idle.SignalActive) {
		return ""
	}
	if len(v.Blocks) == 0 {
		return AboutToBePaused
	}
	strongest := slices.IndexFunc(v.Blocks, func(b idle.Block) bool {
		return b.Code != idle.NotIdleYet && b.Code != idle.RecentActivity && b.Code != idle.WarningPending
	})
	return string(v.Blocks[max(strongest, 0)].Code)
}
