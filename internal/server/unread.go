package server

import (
	"time"

	"lull/internal/core/why"
	"lull/internal/fleet/worker"
)

// outAfter is how long a worker may be in a transition before the way to remove
// it from the record by force is named.
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
