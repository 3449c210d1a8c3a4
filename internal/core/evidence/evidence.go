// Package evidence records what a decision about idleness was based on, in a form
// that can be stored and replayed.
//
// A Decision contains the policy and evidence given to the engine, and its
// verdict. Replay evaluates them again, so that every entry of an audit log or
// journal can be verified. Simulate evaluates them under another policy.
//
// A Recorder turns the checks of many objects into run-length encoded Records,
// which contain changes and activity times but not every sample. Package
// platform/journal stores them, and Follow, Recall and Trial read them back.
//
// A Decision that went through the codec replays to the same verdict, and a
// period without checks is never reported as known. The package does not know
// what the objects are.
package evidence

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"lull/internal/core/idle"
)

// Decision is one input of the engine and its verdict.
type Decision struct {
	Policy   idle.Policy   `json:"policy"`
	Evidence idle.Evidence `json:"evidence"`
	Verdict  idle.Verdict  `json:"verdict"`
}

// Decide runs the engine and keeps its input. The times in e are normalized to
// what the codec preserves: UTC, without a monotonic reading.
func Decide(now time.Time, p idle.Policy, e idle.Evidence) Decision {
	now = plain(now)
	for _, t := range []*time.Time{&e.LastActivityAt, &e.LastResumedAt, &e.RunningSince, &e.CreatedAt, &e.SnoozedUntil, &e.WarningSentAt} {
		*t = plain(*t)
	}
	e.Readings = slices.Clone(e.Readings)
	for i := range e.Readings {
		r := &e.Readings[i]
		r.At, r.LastEvent, r.QuietSince = plain(r.At), plain(r.LastEvent), plain(r.QuietSince)
	}
	e.Leases = slices.Clone(e.Leases)
	for i := range e.Leases {
		e.Leases[i].ExpiresAt = plain(e.Leases[i].ExpiresAt)
	}
	return Decision{Policy: p, Evidence: e, Verdict: idle.Decide(now, p, e)}
}

func plain(t time.Time) time.Time {
	if t.IsZero() {
		return time.Time{}
	}
	return t.Round(0).UTC()
}

// Replay evaluates the same input again and returns an error with both verdicts
// if they differ.
func (d Decision) Replay() error {
	again := idle.Decide(d.Verdict.At, d.Policy, d.Evidence)
	was, err := json.Marshal(d.Verdict)
	if err != nil {
		return fmt.Errorf("cannot replay a decision: %w", err)
	}
	is, err := json.Marshal(again)
	if err != nil {
		return fmt.Errorf("cannot replay a decision: %w", err)
	}
	if !bytes.Equal(was, is) {
		return fmt.Errorf("cannot replay a decision: it was %s and is %s", was, is)
	}
	return nil
}

// Simulate returns the verdict under another policy. The set of signals that
// count stays as recorded, because only those were read.
func (d Decision) Simulate(p idle.Policy) idle.Verdict {
	p.Signals = d.Policy.Signals
	return idle.Decide(d.Verdict.At, p, d.Evidence)
}
