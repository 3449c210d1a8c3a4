package evidence

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"sync"
	"time"

	"lull/internal/core/idle"
)

// Record is one journal entry: a check of an object, or a change of its power
// state.
type Record struct {
	At     time.Time
	Object string
	Region string // workers only
	// Next is when the next check is planned. If the next record is much later
	// than that, the time in between is unknown.
	Next time.Time
	// Since is the time of the first check in this record's run; zero if the run
	// begins here. Checks is the number of checks since the previous record,
	// including this one, all with the same result.
	Since  time.Time
	Checks int
	// Activity lists the times of use that became known since the previous
	// record, oldest first. The newest one is omitted, because it is in the
	// evidence.
	Activity []time.Time
	// Levels are the values of the signals since the previous record; nil if no
	// other thresholds need to be simulated.
	Levels *Levels
	// Unasked lists signals that count but were not read, because others had
	// already decided the result.
	Unasked []string
	// Paused is the last pause before this record, as the object reports it.
	Paused *Turn
	// Change is set in the record of a change, which has no decision.
	Change *Change
	Decision
	// Differs is set if this engine's verdict on the evidence differs from the
	// recorded one. Verdict is then the new verdict, Was the recorded outcome.
	Differs bool
	Was     Outcome
}

// Change is a change of power state: who made it, and why.
type Change struct {
	From   string `json:"from,omitempty"`
	To     string `json:"to"`
	By     string `json:"by,omitempty"`
	Reason string `json:"reason,omitempty"`
	Policy string `json:"policy,omitempty"` // the policy that decided the pause, if recorded
}

// Outcome is the part of a verdict that a journal keeps: its result and a
// checksum. Everything else can be computed from the evidence.
type Outcome struct {
	Eligible bool        `json:"y,omitempty"`
	IsIdle   bool        `json:"i,omitempty"`
	Blocks   []idle.Code `json:"b,omitempty"`
	Sum      uint64      `json:"s"`
}

func outcomeOf(v idle.Verdict) (Outcome, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return Outcome{}, err
	}
	h := fnv.New64a()
	h.Write(b)
	o := Outcome{Eligible: v.Eligible, IsIdle: v.IsIdle, Sum: h.Sum64() >> 11} // 53 bits fit a JSON number
	for _, b := range v.Blocks {
		o.Blocks = append(o.Blocks, b.Code)
	}
	return o, nil
}

// line is the packed form of a Record, after the object's name.
type line struct {
	At       time.Time      `json:"t"`
	Region   string         `json:"r,omitempty"`
	Next     time.Time      `json:"n,omitzero"`
	Since    time.Time      `json:"f,omitzero"`
	Checks   int            `json:"k,omitempty"`
	Activity []time.Time    `json:"a,omitempty"`
	Levels   *levelLine     `json:"l,omitempty"`
	Unasked  []string       `json:"u,omitempty"`
	Paused   *Turn          `json:"d,omitempty"`
	Change   *Change        `json:"c,omitempty"`
	Policy   *idle.Policy   `json:"p,omitempty"`
	Evidence *idle.Evidence `json:"e,omitempty"`
	Outcome  *Outcome       `json:"v,omitempty"`
}

// MaxRecord limits one unpacked record, maxName the object's name, in bytes.
const (
	MaxRecord = 256 << 10
	maxName   = 200
)

// packed is the first byte of a packed record: the version of its format,
// including the dictionary.
const packed = 1

// dictionary holds typical record content. It belongs to version 1 and must not
// change.
const dictionary = `"detail":"it was not read yet""unit":"bytes""unit":"%","status":"DRAINING","status":"running","running":true,` +
	`"created_at":"2026-01-01T00:00:00Z","snoozed_until":"2026-01-01T00:00:00Z","warning_sent_at":"2026-01-01T00:00:00Z",` +
	`"connections":1,"leases":[{"holder":"default","reason":"","expires_at":"2026-01-01T00:00:00Z"}],` +
	`"guards":[{"code":"shadow","sentence":"It is in shadow: everything is decided and nothing is done."}]` +
	`{"code":"halted","sentence":"All automatic actions are halted."}{"code":"pause_holder","sentence":"","until":"2026-01-01T00:00:00Z"` +
	`["in_snooze_period","not_idle_yet","signal_unknown","lease_held","connection_open","warning_pending","auto_pause_disabled","min_workers"]` +
	`{"signal":"tcp","state":"quiet","value":0,"threshold":1,"unit":"outbound connections","at":"2026-01-01T00:00:00Z"}` +
	`{"signal":"users","state":"absent","value":0,"threshold":0,{"signal":"terminals","state":"quiet",{"signal":"recent","state":"quiet",` +
	`{"signal":"disk","state":"quiet","value":0,"threshold":100,"unit":"KB/min","window_seconds":60,` +
	`{"signal":"network","state":"active","value":0,"threshold":10,"unit":"KB/min","window_seconds":60,` +
	`{"signal":"gpu","state":"absent","value":0,"threshold":5,"unit":"%",{"signal":"net","state":"quiet","value":0,"threshold":512,"unit":"bytes","window_seconds":5.` +
	`{"signal":"cloudwatch","state":"quiet","value":0,"threshold":5,"unit":"%","window_seconds":300,"at":"2026-01-01T00:00:00Z","max_age_seconds":900},` +
	`{"signal":"cpu","state":"quiet","value":0,"threshold":1,"unit":"%","window_seconds":5,"at":"2026-01-01T00:00:00Z"},` +
	`{"signal":"agent","state":"unknown","value":0,"threshold":0,` +
	`{"t":"2026-01-01T00:00:00Z","r":"us-east-1","n":"2026-01-01T00:00:00Z","f":"2026-01-01T00:00:00Z","k":1,"a":["2026-01-01T00:00:00Z"],` +
	`"c":{"from":"running","to":"paused","by":"idle_timeout","reason":"idle for 1m0s"},` +
	`"p":{"name":"default","timeout_seconds":60,"snooze_seconds":0,"warn_before_seconds":0,"check_interval_seconds":5,"detection":true,"auto_pause":true,"signals":null,"action":"pause"},` +
	`"p":{"name":"global","timeout_seconds":3600,"snooze_seconds":3600,"warn_before_seconds":300,"check_interval_seconds":300,"detection":true,"auto_pause":true,"signals":["cml"],"action":"stop"},` +
	`"e":{"status":"RUNNING","running":true,"last_activity_at":"2026-01-01T00:00:00Z","last_resumed_at":"2026-01-01T00:00:00Z","created_at":"2026-01-01T00:00:00Z",` +
	`"readings":[{"signal":"cml","state":"active","value":0,"threshold":0,"at":"2026-01-01T00:00:00Z","last_event":"2026-01-01T00:00:00Z","max_age_seconds":600}]},` +
	`"v":{"y":true,"i":true,"b":["recent_activity"],"s":`

var (
	writers = sync.Pool{New: func() any {
		w, err := flate.NewWriterDict(io.Discard, flate.DefaultCompression, []byte(dictionary))
		if err != nil {
			panic("cannot make a compressor: " + err.Error()) // the level is constant
		}
		return w
	}}
	readers = sync.Pool{New: func() any { return flate.NewReaderDict(bytes.NewReader(nil), []byte(dictionary)) }}
)

// Pack encodes r for a journal.
func (r Record) Pack() ([]byte, error) {
	fail := func(err error) ([]byte, error) {
		return nil, fmt.Errorf("cannot pack evidence of %q: %w", r.Object, err)
	}
	if r.Object == "" || len(r.Object) > maxName {
		return fail(fmt.Errorf("the object's name is not 1 to %d bytes", maxName))
	}
	l := line{At: r.At, Region: r.Region, Next: r.Next, Since: r.Since, Checks: r.Checks, Activity: r.Activity, Levels: r.Levels.line(r.At), Unasked: r.Unasked, Paused: r.Paused, Change: r.Change}
	if r.Change == nil {
		o := r.Was
		if !r.Differs {
			var err error
			if o, err = outcomeOf(r.Verdict); err != nil {
				return fail(err)
			}
		}
		l.Policy, l.Evidence, l.Outcome = &r.Policy, &r.Evidence, &o
	}
	b, err := json.Marshal(l)
	if err != nil {
		return fail(err)
	}
	if len(b) > MaxRecord {
		return fail(fmt.Errorf("%d bytes exceed the limit of %d", len(b), MaxRecord))
	}
	var buf bytes.Buffer
	buf.WriteByte(packed)
	buf.Write(binary.AppendUvarint(nil, uint64(len(r.Object))))
	buf.WriteString(r.Object)
	w := writers.Get().(*flate.Writer)
	defer writers.Put(w)
	w.Reset(&buf)
	if _, err = w.Write(b); err == nil {
		err = w.Close()
	}
	if err != nil {
		return fail(err)
	}
	return buf.Bytes(), nil
}

// ObjectOf returns the object's name in a packed record and the offset of the
// rest. It does not unpack the rest.
func ObjectOf(b []byte) (object []byte, rest int, err error) {
	if len(b) == 0 || b[0] != packed {
		return nil, 0, errors.New("cannot read evidence: unknown format version")
	}
	n, size := binary.Uvarint(b[1:])
	if size <= 0 || n == 0 || n > maxName || uint64(len(b)-1-size) < n {
		return nil, 0, errors.New("cannot read evidence: the object's name is cut short")
	}
	rest = 1 + size + int(n)
	return b[1+size : rest], rest, nil
}

// Unpack decodes a record that Pack encoded, and evaluates its evidence again.
func Unpack(b []byte) (Record, error) {
	name, rest, err := ObjectOf(b)
	if err != nil {
		return Record{}, err
	}
	fail := func(err error) (Record, error) {
		return Record{}, fmt.Errorf("cannot read evidence of %q: %w", name, err)
	}
	in := readers.Get().(io.ReadCloser)
	defer readers.Put(in)
	if err := in.(flate.Resetter).Reset(bytes.NewReader(b[rest:]), []byte(dictionary)); err != nil {
		return fail(err)
	}
	text, err := io.ReadAll(io.LimitReader(in, MaxRecord+1))
	if err == nil && len(text) > MaxRecord {
		err = fmt.Errorf("more than %d bytes", MaxRecord)
	}
	var l line
	if err == nil {
		err = json.Unmarshal(text, &l)
	}
	if err != nil {
		return fail(err)
	}
	if l.At.IsZero() || l.Change == nil && (l.Policy == nil || l.Evidence == nil || l.Outcome == nil) {
		return fail(errors.New("truncated"))
	}
	r := Record{At: l.At, Object: string(name), Region: l.Region, Next: l.Next, Since: l.Since, Checks: l.Checks, Activity: l.Activity, Unasked: l.Unasked, Paused: l.Paused, Change: l.Change}
	if r.Levels, err = l.Levels.levels(l.At); err != nil {
		return fail(err)
	}
	if l.Change == nil {
		r.Policy, r.Evidence, r.Was = *l.Policy, *l.Evidence, *l.Outcome
		r.Verdict = idle.Decide(l.At, r.Policy, r.Evidence)
		now, err := outcomeOf(r.Verdict)
		if err != nil {
			return fail(err)
		}
		r.Differs = now.Sum != r.Was.Sum
	}
	return r, nil
}
