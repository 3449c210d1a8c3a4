package server

import (
	"time"

	"lull/internal/core/why"
	"lull/internal/fleet/worker"
)

// outAfter is the time in a transition after which the answer names the way to
// remove a worker's record by force.
const outAfter = 15 * time.Minute

// wayOut adds the remedy for a worker whose termination EC2 does not confirm.
func wayOut(a *why.Account, w *worker.Worker, u *worker.Unread, now time.Time) {
	if !w.Forgettable() || u == nil && now.Sub(w.StatusSince) < outAfter {
		return
	}
	left := w.LeftBehind()
	if left != "" {
		left = " (" + left + ")"
	}
	a.Advise(why.Forget, w.Name, left)
}
