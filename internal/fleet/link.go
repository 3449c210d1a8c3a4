package fleet

import (
	"context"
	"crypto/hmac"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy/when"
	"lull/internal/core/power"
	"lull/internal/fleet/sealed"
)

// Answers to a warning, as named in its links.
const (
	AnswerExtend   = "extend"    // an hour more: of protection or, for a ttl_deadline, of life
	AnswerStop     = "stop"      // stop now
	AnswerNotToday = "not-today" // kept running until midnight in NOTIFY_TIME_ZONE, like an override that keeps it without an end
)

// Answers lists them in the order in which they are offered.
func Answers() []string { return []string{AnswerExtend, AnswerNotToday, AnswerStop} }

// Answer is the content of a link in a warning. It is valid while that warning
// is out. Every answer, activity and the pause itself end the warning and
// invalidate all its links.
type Answer struct {
	WorkerID string    `json:"w"`
	Verb     string    `json:"v"` // one of the Answer constants
	WarnedAt time.Time `json:"a"`
	PauseAt  time.Time `json:"p"`
	Channel  string    `json:"c,omitempty"` // the channel of the warning, for the record
}

// linkGrace is how long after the planned pause a link is still accepted.
const linkGrace = 15 * time.Minute

// Links returns the links of a warning x sent at warned, by verb; nil without
// NOTIFY_PUBLIC_URL or without a sealing key, which signs them.
func (f *Fleet) Links(worker, channel string, warned time.Time, x *Warning) map[string]string {
	base := f.Settings().NotifyPublicURL
	if base == "" || f.opts.Seal == nil {
		return nil
	}
	out := map[string]string{}
	for _, verb := range x.Answers() {
		token, err := Answer{WorkerID: worker, Verb: verb, WarnedAt: warned.UTC(), PauseAt: x.PauseAt.UTC(), Channel: channel}.token(f.opts.Seal)
		if err != nil {
			return nil
		}
		out[verb] = base + "/answer/" + token
	}
	return out
}

// PageOf returns the URL of a worker's page; empty without NOTIFY_PUBLIC_URL.
func (f *Fleet) PageOf(worker string) string {
	base := f.Settings().NotifyPublicURL
	if base == "" || worker == "" {
		return ""
	}
	return base + "/workers/" + url.PathEscape(worker)
}

// token returns the token of a: its fields and a signature over them.
func (a Answer) token(s *sealed.Sealer) (string, error) {
	body, err := json.Marshal(a)
	if err != nil {
		return "", fmt.Errorf("cannot sign a link: %w", err)
	}
	text := base64.RawURLEncoding.EncodeToString(body)
	return text + "." + base64.RawURLEncoding.EncodeToString(s.MAC(text)), nil
}

// ReadAnswer verifies the token of a link. A foreign, modified or expired one
// is a NotFound without further detail.
func (f *Fleet) ReadAnswer(now time.Time, token string) (Answer, error) {
	none := &failure.NotFound{Kind: "link", Name: token[:min(len(token), 8)] + "..."}
	text, sig, ok := strings.Cut(token, ".")
	if !ok || len(token) > 2048 || f.opts.Seal == nil {
		return Answer{}, none
	}
	given, err := base64.RawURLEncoding.DecodeString(sig)
	if err != nil || !hmac.Equal(given, f.opts.Seal.MAC(text)) {
		return Answer{}, none
	}
	body, err := base64.RawURLEncoding.DecodeString(text)
	var a Answer
	if err != nil || json.Unmarshal(body, &a) != nil || !slices.Contains(Answers(), a.Verb) {
		return Answer{}, none
	}
	if now.After(a.PauseAt.Add(linkGrace)) {
		return Answer{}, none
	}
	return a, nil
}

// Holds reports whether the warning that a answers is still out for w.
func (a Answer) Holds(w *Worker) bool {
	return w.WarningSentAt != nil && w.WarningSentAt.Sub(a.WarnedAt).Abs() < time.Millisecond && w.Intent == nil &&
		(w.Status == power.WorkerRunning || w.Status == power.WorkerStopped && w.WarningFor == ReasonTTL)
}

// Until returns how long a protects the worker; zero if it stops it.
func (a Answer) Until(now time.Time, zone *time.Location) time.Time {
	switch a.Verb {
	case AnswerExtend:
		if a.PauseAt.After(now) {
			now = a.PauseAt
		}
		return now.Add(time.Hour)
	case AnswerNotToday:
		return when.Midnight(now, zone)
	}
	return time.Time{}
}

// WarningOf returns the warning that a answers, from the audit log; nil if it
// is no longer there.
func (f *Fleet) WarningOf(ctx context.Context, a Answer) (*Warning, error) {
	page, err := f.NewestAudit(ctx, AuditQuery{WorkerID: a.WorkerID, Action: "pause_warning", From: a.WarnedAt.Add(-time.Second), Limit: 1})
	if err != nil || len(page.Entries) == 0 {
		return nil, err
	}
	return page.Entries[0].Warning, nil
}

// AnswerWarning carries out a link's answer, once: the same transaction ends
// the warning. Errors: NotFound, and Refused with "answered" if the warning is
// no longer out.
func (f *Fleet) AnswerWarning(ctx context.Context, a Answer) (Worker, error) {
	by := Actor{Name: "link in a warning", Kind: KindPerson}
	if a.Channel != "" {
		by.Name += " to " + a.Channel
	}
	return f.Change(ctx, a.WorkerID, Changing{By: by}, func(w *Worker, tx *Tx) error {
		if !a.Holds(w) {
			return &failure.Refused{Command: "answer the warning of", Name: w.Name, Reason: "answered",
				Detail: "the warning is no longer out: it was answered, or the worker was used or stopped meanwhile"}
		}
		switch {
		case a.Verb == AnswerExtend && w.WarningFor == ReasonTTL:
			w.extendLife(tx, a.Until(tx.Now, tx.Settings.Zone()))
			return nil
		case a.Verb == AnswerStop:
			return w.intendStop(tx, Pause{Reason: ReasonManual, Detail: "by a link in the warning"})
		}
		w.snooze(tx, a.Until(tx.Now, tx.Settings.Zone()))
		return nil
	})
}

// extendLife moves the ttl_deadline and ends its warning. If the deadline came
// from a tag, the record overrides it from then on.
func (w *Worker) extendLife(tx *Tx, until time.Time) {
	t := until.UTC().Round(0)
	w.TTLDeadline, w.TTLFromTag = &t, false
	w.WarningSentAt, w.WarningFor = nil, ""
	tx.Note(Entry{Action: "ttl_extended", Detail: "until " + t.Format(time.RFC3339)})
}
