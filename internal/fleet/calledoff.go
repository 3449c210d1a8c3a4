package fleet

import (
	"fmt"
	"strings"
	"time"

	"lull/internal/power"
)

// LastPause is what the activity group of a worker says of its last pause.
type LastPause struct {
	At     *time.Time `json:"at,omitempty"` // nil for none
	By     string     `json:"by,omitempty"`
	Reason Reason     `json:"reason,omitempty"`
	Policy string     `json:"policy,omitempty"`
}

// CalledOff is a stop that was asked for and did not happen.
type CalledOff struct {
	At      time.Time `json:"at"`
	Why     string    `json:"why"`
	AskedAt time.Time `json:"asked_at"`
	By      string    `json:"by"` // who asked for it
	Reason  Reason    `json:"reason"`
	Policy  string    `json:"policy,omitempty"`
	Drain   bool      `json:"drain,omitempty"`
}

// Sentence says what was asked for and what came of it.
func (c *CalledOff) Sentence() string {
	what := "stop"
	if c.Drain {
		what = "drain"
	}
	return fmt.Sprintf("A %s was asked for at %s by %s (%s) and was called off at %s: %s.", what, c.AskedAt.UTC().Format(time.RFC3339), c.By, c.Reason,
		c.At.UTC().Format(time.RFC3339), strings.TrimSuffix(c.Why, "."))
}

func (w *Worker) lastPause() *LastPause {
	return &LastPause{At: w.LastPausedAt, By: w.LastPausedBy, Reason: w.PauseReason, Policy: w.PausePolicy}
}

// beforeStop is the last pause before the stop that is intended now, if one
// is: a stop in place of another has the same one before it.
func (w *Worker) beforeStop() *LastPause {
	if w.Intent != nil {
		return w.Intent.Before
	}
	return w.lastPause()
}

// unpause gives the activity group back the last pause that happened, as the
// stop that is intended does not, and keeps what is known of that one. It stays
// counted.
func (w *Worker) unpause(now time.Time, why string) {
	in := w.Intent
	if in == nil {
		return
	}
	w.StopCalledOff = &CalledOff{At: now, Why: why, AskedAt: in.At, By: in.By, Reason: in.Reason, Policy: w.PausePolicy, Drain: in.Drain}
	if b := in.Before; b != nil {
		w.LastPausedAt, w.LastPausedBy, w.PauseReason, w.PausePolicy = b.At, b.By, b.Reason, b.Policy
	}
}

// Refused says, for as long as nothing else happens, that the stop that was
// called off last failed: nobody took it back.
func (w *Worker) Refused(why string) { w.StatusReason = "the stop was called off: " + why }

// StopRefused reports whether the last stop of a worker that runs failed.
func (w *Worker) StopRefused() bool {
	return w.Status == power.WorkerRunning && w.StopCalledOff != nil && w.StatusReason != ""
}

// TookEffect makes a stop that was called off the last pause: it happened all
// the same.
func (w *Worker) TookEffect() {
	c := w.StopCalledOff
	if c == nil {
		return
	}
	at := c.AskedAt
	w.LastPausedAt, w.LastPausedBy, w.PauseReason, w.PausePolicy, w.StopCalledOff = &at, c.By, c.Reason, c.Policy, nil
}
