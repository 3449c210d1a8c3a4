package server

import (
	"time"

	"lull/internal/core/why"
	"lull/internal/fleet/worker"
)

// outAfter is how long a worker must be in a transition before why names the way to
// remove its record by force.
const outAfter = 15 * time.Minute

// wayOut adds that remedy for a worker whose termination EC2 does not confirm.
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
