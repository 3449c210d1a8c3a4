package worker

import (
	"fmt"
	"strings"
	"time"

	"lull/internal/core/power"
)

// LastPause describes a worker's last pause.
type LastPause struct {
	At     *time.Time   `json:"at,omitempty"` // nil if there was none
	By     string       `json:"by,omitempty"`
	Reason power.Reason `json:"reason,omitempty"`
	Policy string       `json:"policy,omitempty"`
}

// CalledOff is a requested stop that did not happen.
type CalledOff struct {
	At      time.Time    `json:"at"`
	Why     string       `json:"why"`
	AskedAt time.Time    `json:"asked_at"`
	By      string       `json:"by"` // who requested it
	Reason  power.Reason `json:"reason"`
	Policy  string       `json:"policy,omitempty"`
	Drain   bool         `json:"drain,omitempty"`
}

// Sentence returns what was requested and why it did not happen.
func (c *CalledOff) Sentence() string {
	what := "stop"
	if c.Drain {
		what = "drain"
	}
	return fmt.Sprintf("A %s requested at %s by %s (%s) was canceled at %s: %s.", what, c.AskedAt.UTC().Format(time.RFC3339), c.By, c.Reason,
		c.At.UTC().Format(time.RFC3339), strings.TrimSuffix(c.Why, "."))
}

func (w *Worker) lastPause() *LastPause {
	return &LastPause{At: w.LastPausedAt, By: w.LastPausedBy, Reason: w.PauseReason, Policy: w.PausePolicy}
}

// beforeStop returns the last pause before the current stop intent; without an
// intent, the last pause. A stop that replaces another one has the same predecessor.
func (w *Worker) beforeStop() *LastPause {
	if w.Intent != nil {
		return w.Intent.Before
	}
	return w.lastPause()
}

// unpause removes the intended stop as the last pause, because it will not happen:
// the pause before it is the last one again. The stop is kept in StopCalledOff and
// stays counted.
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

// Refused records that the last stop failed and was not withdrawn by a user. The
// record stays until something else happens.
func (w *Worker) Refused(why string) { w.StatusReason = "the stop was canceled: " + why }

// StopRefused reports whether the last stop of a running worker failed.
func (w *Worker) StopRefused() bool {
	return w.Status == power.WorkerRunning && w.StopCalledOff != nil && w.StatusReason != ""
}

// TookEffect makes the canceled stop the last pause again, because it happened after
// all.
func (w *Worker) TookEffect() {
	c := w.StopCalledOff
	if c == nil {
		return
	}
	at := c.AskedAt
	w.LastPausedAt, w.LastPausedBy, w.PauseReason, w.PausePolicy, w.StopCalledOff = &at, c.By, c.Reason, c.Policy, nil
}
