package controller

import (
	"context"
	"time"

	"lull/internal/fleet"
	"lull/internal/idle"
)

// Times of CML's notices.
const (
	noticeCall  = 5 * time.Second // one call, so that a stop does not wait for longer
	noticeWait  = 30 * time.Second
	noticeWaits = 10 * time.Minute // at most, between two tries
	// noticeDoubt is how long it is tried to take away what nobody knows to be
	// there.
	noticeDoubt = time.Hour
)

// notice makes CML's own pages show the warning that is out, and nothing of
// one that is not. The record has said so before CML is asked, so a notice
// outlives no kill; a CML that does not answer delays nothing, and is asked
// again.
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
	err = j.write(ctx, func(w *fleet.Worker, _ *fleet.Tx) error {
		if w.CMLNotice.ID = id; id == "" {
			w.CMLNotice = nil
		}
		return nil
	})
	if err != nil {
		j.live.noticeAt = time.Now().Add(debounce) // on the newer record, which is on its way
	}
}

// show asks CML for a notice, and returns its id, or for it to be taken away.
// A console that has no notices shows none.
func (j *job) show(ctx context.Context, n *fleet.Notice, on bool) (id string, err error) {
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

// holds reports whether what n says is still to be expected: its warning is out,
// and nothing that has no end, or ends later than a pause for that warning may
// come, is between.
func (j *job) holds(n *fleet.Notice) bool {
	switch {
	case !n.Of(&j.w) || j.c.fleet.Halted().On || j.shadow():
		return false
	case n.Warning.Reason == fleet.ReasonTTL:
		return j.w.TTLDeadline != nil && !j.w.TTLDeadline.After(n.Warning.PauseAt)
	case !j.detects():
		return false
	}
	rules := j.rules()
	until := n.Warning.PauseAt.Add(max(time.Duration(rules.WarnBefore), 2*time.Duration(rules.CheckInterval)))
	v := j.live.verdict
	switch {
	case v == nil || v.At.Before(n.WarnedAt):
		return true // nobody has looked since
	case v.TargetPauseAt != nil:
		return !v.TargetPauseAt.After(until)
	case v.Has(idle.AutoPauseDisabled) || v.Has(idle.DetectionDisabled) || v.Has(idle.Halted):
		return false
	}
	return !j.now.After(until)
}
