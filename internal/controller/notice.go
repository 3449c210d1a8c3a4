package controller

import (
	"context"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/worker"
)

// Times of CML's notices.
const (
	noticeCall  = 5 * time.Second // one call, so that a stop waits no longer
	noticeWait  = 30 * time.Second
	noticeWaits = 10 * time.Minute // maximum interval between two attempts
	// noticeDoubt is for how long lull tries to remove a notice that may not
	// exist.
	noticeDoubt = time.Hour
)

// notice makes CML's own pages show the pending warning, and no other. The
// record is written before CML is asked, so a notice never survives a crash
// unnoticed. A CML that does not answer delays nothing and is asked again.
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
		j.live.noticeAt = time.Now().Add(debounce) // on the newer record, which will arrive
	}
}

// show asks CML to show a notice, and returns its ID, or to remove it. A
// console without notices shows none.
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

// holds reports whether the pause announced by n is still to be expected: its
// warning is out, and no block prevents it that has no end or that ends after
// the earliest pause for that warning.
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
