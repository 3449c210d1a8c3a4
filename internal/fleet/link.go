package fleet

import (
	"context"
	"net/url"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/warning"
	"lull/internal/fleet/worker"
)

// Links returns the links of the warning x that was sent at warned, by verb. It is
// nil without NOTIFY_PUBLIC_URL or without a sealing key to sign them.
func (f *Fleet) Links(worker, channel string, warned time.Time, x *warning.Warning) map[string]string {
	return x.Links(f.Settings().NotifyPublicURL, f.opts.Seal, warning.Answer{WorkerID: worker, WarnedAt: warned.UTC(), Channel: channel})
}

// PageOf returns the URL of a worker's page; empty without NOTIFY_PUBLIC_URL.
func (f *Fleet) PageOf(worker string) string {
	base := f.Settings().NotifyPublicURL
	if base == "" || worker == "" {
		return ""
	}
	return base + "/workers/" + url.PathEscape(worker)
}

// ReadAnswer verifies the token of a link. If the token is foreign, modified or
// expired, the error is NotFound without further detail.
func (f *Fleet) ReadAnswer(now time.Time, token string) (warning.Answer, error) {
	return warning.Read(f.opts.Seal, now, token)
}

// WarningOf returns the warning that a answers, from the audit log; nil if it
// is no longer there.
func (f *Fleet) WarningOf(ctx context.Context, a warning.Answer) (*warning.Warning, error) {
	page, err := f.NewestAudit(ctx, audit.Query{WorkerID: a.WorkerID, Action: "pause_warning", From: a.WarnedAt.Add(-time.Second), Limit: 1})
	if err != nil || len(page.Entries) == 0 {
		return nil, err
	}
	return page.Entries[0].Warning, nil
}

// AnswerWarning carries out the answer of a link and ends the warning in the same
// transaction, so that it takes effect once. Errors: NotFound, and Refused with
// "answered" if the warning has ended.
func (f *Fleet) AnswerWarning(ctx context.Context, a warning.Answer) (worker.Worker, error) {
	by := audit.Actor{Name: "link in a warning", Kind: audit.KindUser}
	if a.Channel != "" {
		by.Name += " to " + a.Channel
	}
	return f.Change(ctx, a.WorkerID, Changing{By: by}, func(w *worker.Worker, tx *worker.Tx) error {
		if !w.Awaits(a) {
			return &failure.Refused{Command: "answer the warning of", Name: w.Name, Reason: "answered",
				Detail: "the warning is no longer active: it was answered, or the worker was used or stopped meanwhile"}
		}
		switch {
		case a.Verb == warning.Extend && w.WarningFor == power.ReasonTTL:
			w.ExtendTTL(tx, a.Until(tx.Now, tx.Settings.Zone()))
			return nil
		case a.Verb == warning.Stop:
			return w.IntendStop(tx, worker.Pause{Reason: power.ReasonManual, Detail: "by a link in the warning"})
		}
		w.Snooze(tx, a.Until(tx.Now, tx.Settings.Zone()))
		return nil
	})
}
