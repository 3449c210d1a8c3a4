// Package evidence is what a decision about idleness was made from, in a form
// that outlives it: record, codec and replay.
//
// A Decision holds the policy and the evidence as the engine got them and the
// verdict it gave. Replay gives both to the engine again, so that everything
// in an audit log or a journal can be proved, and Simulate asks what another
// policy would have said.
//
// It guarantees that a Decision that went through the codec replays to the
// same verdict. It leaves out where records are kept (package base/segment)
// and what they are about.
package evidence

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

// Record is one entry of a journal: a decision about an object.
type Record struct {
	At     time.Time `json:"at"`
	Object string    `json:"object"`
	Region string    `json:"region,omitempty"`
	Decision
}

// MaxRecord bounds one record, in bytes.
const MaxRecord = 256 << 10

// Encode writes a record as one line of JSON.
func (r Record) Encode() ([]byte, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("cannot encode evidence of %q: %w", r.Object, err)
	}
	if len(b) > MaxRecord {
		return nil, fmt.Errorf("cannot encode evidence of %q: it has %d bytes, the limit is %d", r.Object, len(b), MaxRecord)
	}
	return append(b, '\n'), nil
}

// Decode reads one record.
func Decode(line []byte) (Record, error) {
	var r Record
	if len(line) > MaxRecord {
		return r, fmt.Errorf("cannot read evidence: a record of %d bytes, the limit is %d", len(line), MaxRecord)
	}
	dec := json.NewDecoder(bytes.NewReader(line))
	if err := dec.Decode(&r); err != nil {
		return Record{}, fmt.Errorf("cannot read evidence: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Record{}, errors.New("cannot read evidence: data after the record")
	}
	if r.Object == "" || r.At.IsZero() {
		return Record{}, errors.New("cannot read evidence: object or at is missing")
	}
	return r, nil
}

// Same tells whether b says nothing that a has not said: the same blocks,
// signal states and activity, whatever the time. A journal leaves it out.
func Same(a, b Decision) bool {
	va, vb := a.Verdict, b.Verdict
	if va.IsIdle != vb.IsIdle || va.Eligible != vb.Eligible || va.InSnoozePeriod != vb.InSnoozePeriod || len(va.Blocks) != len(vb.Blocks) {
		return false
	}
	for i := range va.Blocks {
		x, y := va.Blocks[i], vb.Blocks[i]
		if x.Code != y.Code || x.Signal != y.Signal || x.Holder != y.Holder {
			return false
		}
	}
	if !a.Evidence.LastActivityAt.Equal(b.Evidence.LastActivityAt) || len(a.Evidence.Readings) != len(b.Evidence.Readings) {
		return false
	}
	for i := range a.Evidence.Readings {
		x, y := &a.Evidence.Readings[i], &b.Evidence.Readings[i]
		if x.Signal != y.Signal || x.State != y.State || !x.LastEvent.Equal(y.LastEvent) {
			return false
		}
	}
	return true
}
