// Package evidence is what a decision about idleness was made from, in a form
// that outlives it: record, codec and replay.
//
// A Decision holds the policy and the evidence as the engine got them and the
// verdict it gave. Replay gives both to the engine again, so that everything
// in an audit log or a journal can be proved, and Simulate asks what another
// policy would have said.
//
// A Recorder makes Records of the checks of many objects, run-length: changes
// and activity times, not every sample. Timeline puts them together again.
//
// It guarantees that a Decision that went through the codec replays to the
// same verdict, and that time nobody looked at is never passed off as known.
// It leaves out where records are kept (package edge/journal) and what they
// are about.
package evidence

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"lull/internal/idle"
)

// Decision is one question to the engine and its answer.
type Decision struct {
	Policy   idle.Policy   `json:"policy"`
	Evidence idle.Evidence `json:"evidence"`
	Verdict  idle.Verdict  `json:"verdict"`
}

// Decide asks the engine and keeps what it was asked. The times of e are
// brought to a form that the codec keeps: UTC, without a monotonic part.
func Decide(now time.Time, p idle.Policy, e idle.Evidence) Decision {
	now = plain(now)
	for _, t := range []*time.Time{&e.LastActivityAt, &e.LastResumedAt, &e.CreatedAt, &e.SnoozedUntil, &e.WarningSentAt} {
		*t = plain(*t)
	}
	e.Readings = slices.Clone(e.Readings)
	for i := range e.Readings {
		e.Readings[i].At, e.Readings[i].LastEvent = plain(e.Readings[i].At), plain(e.Readings[i].LastEvent)
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

// Replay judges again with the same inputs and returns an error that shows
// both verdicts if they differ.
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

// Simulate is the verdict another policy would have given. Which signals
// count stays as recorded, since only those were read.
func (d Decision) Simulate(p idle.Policy) idle.Verdict {
	p.Signals = d.Policy.Signals
	return idle.Decide(d.Verdict.At, p, d.Evidence)
}
