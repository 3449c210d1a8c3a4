package server

import (
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/worker"
)

// notAsked says that EC2 cannot be read in a worker's region, unless its status
// reason does.
func notAsked(w *worker.Worker, u *worker.Unread) string {
	if u == nil || w.Status == power.WorkerTerminated || u.SaidOf(w) {
		return ""
	}
	return " " + u.Sentence() + "."
}

// outAfter is how long a worker may be in a transition before the way to remove
// it from the record by force is named.
const outAfter = 15 * time.Minute

// wayOut names the ways to end a worker whose end EC2 does not confirm.
func wayOut(w *worker.Worker, u *worker.Unread, now time.Time) []string {
	if !w.Forgettable() || u == nil && now.Sub(w.StatusSince) < outAfter {
		return nil
	}
	out := []string{"lull forgets it without EC2's word with: lull worker forget " + w.Name + " --force"}
	if left := w.LeftBehind(); left != "" {
		out[0] += " (" + left + ")"
	}
	return out
}
