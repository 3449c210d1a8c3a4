package evidence

import (
	"slices"
	"time"

	"lull/internal/idle"
)

// FalseStop is how soon after a pause use shows that it was a false one, where
// nobody asks for another time.
const FalseStop = 15 * time.Minute

// AboutToBePaused is the KeptUp of what nothing keeps up.
const AboutToBePaused = "about_to_be_paused"

// KeptUp is what kept an object up that nobody used at a time from the check
// with verdict v on: the code of the block that weighs most, or
// AboutToBePaused. It is empty if the object was in use, that is, if its last
// activity is less than two check intervals old.
func KeptUp(v *idle.Verdict, every time.Duration, at time.Time) string {
	if last := v.LastActivityAt; last != nil && at.Sub(*last) < 2*every {
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
