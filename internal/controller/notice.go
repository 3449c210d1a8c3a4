package controller

import (
	"context"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/worker"
)

// Timing of the notices in CML.
const (
	noticeCall  = 5 * time.Second // limit of one call, and so of how long a stop waits for it
	noticeWait  = 30 * time.Second
	noticeWaits = 10 * time.Minute // maximum interval between two attempts
	// noticeDoubt is for how long lull tries to remove a notice of unknown ID, which
	// may not exist.
	noticeDoubt = time.Hour
)

// notice makes CML's own pages show the pending warning, and no other. The record is
// written before CML is asked, so lull always knows of a notice even after a crash. A
// CML that does not answer delays nothing and is asked again later.
func (j *job) notice(ctx context.Context) {
	n := j.w.CMLNotice
	if n == nil || ctx.Err() != nil || j.now.Before(j.live.noticeAt) {
		return
	}
	holds := j.holds(n)
	if holds && n.ID != "" {
		return
	}
	id, err := j.show(ctx, n, holds)
	if err != nil && (n.ID != "" || j.now.Sub(n.WarnedAt) < noticeDoubt) {
		if j.live.noticeWait == 0 {
			j.c.log.Warn("cannot change the notice in a worker's CML", "worker", j.w.ID, "shown", holds, "err", err)
		}
		j.live.noticeWait = min(max(noticeWait, 2*j.live.noticeWait), noticeWaits)
		j.live.noticeAt = time.Now().Add(j.live.noticeWait)
		return
	}
	j.live.noticeAt, j.live.noticeWait = time.Time{}, 0
	err = j.write(ctx, func(w *worker.Worker, _ *worker.Tx) error {
		if w.CMLNotice.ID = id; id == "" {
			w.CMLNotice = nil
		}
		return nil
	})
	if err != nil {
		j.live.noticeAt = time.Now().Add(debounce) // by then the watch has delivered the newer record
	}
}

// show asks CML to show notice n and returns its ID, or to remove it if on is false.
// If the console cannot show notices, it does nothing.
func (j *job) show(ctx context.Context, n *worker.Notice, on bool) (id string, err error) {
	console, err := j.c.cfg.Consoles(j.w)
	if err != nil {
		return "", err
	}
	w, ok := console.(Warner)
	if !ok {
		return "", nil
	}
	call, cancel := context.WithTimeout(ctx, noticeCall)
	defer cancel()
	if on {
		return w.Warn(call, n.Warning)
	}
	return "", w.Withdraw(call, n.ID)
}

// holds reports whether the pause announced by n is still to be expected: the warning
// is current, and no block delays the pause beyond the earliest time at which that
// warning allows it.
func (j *job) holds(n *worker.Notice) bool {
	switch {
	case !n.Of(&j.w) || j.c.fleet.Halted().On || j.shadow():
		return false
	case n.Warning.Reason == power.ReasonTTL:
		return j.w.TTLDeadline != nil && !j.w.TTLDeadline.After(n.Warning.PauseAt)
	case !j.detects():
		return false
	}
	rules := j.rules()
	until := n.Warning.PauseAt.Add(max(time.Duration(rules.WarnBefore), 2*time.Duration(rules.CheckInterval)))
	v := j.live.verdict
	switch {
	case v == nil || v.At.Before(n.WarnedAt):
		return true // no check since
	case v.TargetPauseAt != nil:
		return !v.TargetPauseAt.After(until)
	case v.Has(idle.AutoPauseDisabled) || v.Has(idle.DetectionDisabled) || v.Has(idle.Halted):
		return false
	}
	return !j.now.After(until)
}
