// Package agents converts agents' reports into evidence: each reported check is
// judged by the engine that the agent itself uses and is written to the journal that
// also holds the checks of workers. So why at a past time, the timeline and
// simulations read one history for both.
//
// The agent's clock may be wrong by any amount: its times count as ages relative to
// the report's own time. A report that says nothing new extends a run and adds no
// record. The amount recorded for one agent is bounded: an agent whose reports keep
// changing gets one record every 30 seconds. The time in between is unrecorded, which
// does not count as quiet.
//
// The caller decides who may report, what is answered, and where records are kept.
package agents

import (
	"math"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/protocol/control"
)

// Object returns the object ID under which the evidence of an agent's machine
// is stored. No worker has such an ID.
func Object(machine string) string { return prefix + machine }

const prefix = "agent/"

// Machine returns the machine whose evidence is stored under object; false if object
// is not a machine's.
func Machine(object string) (string, bool) { return strings.CutPrefix(object, prefix) }

// CodePolicyUntold is the guard in the records of an agent that does not report its
// policy.
const CodePolicyUntold idle.Code = "policy_untold"

// Limits on what is recorded for one agent. An honest report has about ten readings.
// Texts are shown to users.
const (
	maxEach    = 24  // readings, guards, leases and names of signals
	maxText    = 160 // bytes of a text
	spacing    = 5 * time.Second
	burst      = 120.0           // records that may be written in a burst
	refill     = 1.0 / 30        // records per second
	perRecord  = 512             // bytes of texts that cost as much as a record
	clockSlack = 2 * time.Second // differences in delivery time up to this are no change of the clock's offset
)

// Agents are the agents that report to one server. It is safe for concurrent
// use.
type Agents struct {
	keep func(evidence.Record) // nil keeps nothing

	mu     sync.Mutex
	byName map[string]*agent
}

// agent is the state kept for one agent.
type agent struct {
	boot     string
	started  time.Time
	sequence uint64
	offset   time.Duration // add to the agent's time to get ours

	seen    evidence.Record    // the last check
	taken   evidence.Record    // the last recorded check
	high    map[string]float64 // maximum values in the checks since taken
	quota   float64            // records that may be written
	quotaAt time.Time
}

// New returns Agents that pass the records of checks to keep; keep may be nil.
func New(keep func(evidence.Record)) *Agents {
	return &Agents{keep: keep, byName: map[string]*agent{}}
}

// Seen returns the last check of a machine's agent received by this server.
func (a *Agents) Seen(machine string) (evidence.Record, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	x := a.byName[machine]
	if x == nil {
		return evidence.Record{}, false
	}
	return x.seen, true
}

// Take processes a valid report. A report that is older than the previous one is
// ignored. The caller must bound the number of machines.
func (a *Agents) Take(machine string, r control.AgentReport, now time.Time) {
	now = now.UTC().Round(0)
	a.mu.Lock()
	defer a.mu.Unlock()
	x := a.byName[machine]
	if x == nil {
		x = &agent{quota: burst, quotaAt: now}
		a.byName[machine] = x
	}
	if x.boot == r.BootID && x.started.Equal(r.StartedAt) && r.Sequence <= x.sequence && x.sequence > 0 {
		return
	}
	x.boot, x.started, x.sequence = r.BootID, r.StartedAt, r.Sequence
	if d := now.Sub(r.At); (d - x.offset).Abs() > clockSlack {
		x.offset = d
	}
	rec, cost := x.record(machine, &r, now)
	x.seen = rec
	if a.keep == nil || !x.admits(&rec, cost, now) {
		return
	}
	x.taken = rec
	a.keep(rec)
}

// admits reports whether a check is recorded now. If not, its maximum values go into
// the next record. A check that continues the last recorded one costs no quota.
func (x *agent) admits(rec *evidence.Record, cost float64, now time.Time) bool {
	if x.taken.Object != "" && evidence.Continues(&x.taken, rec) {
		if now.Sub(x.taken.At) < spacing {
			return x.carry(rec)
		}
		x.high = nil
		return true
	}
	x.quota = min(burst, x.quota+now.Sub(x.quotaAt).Seconds()*refill)
	x.quotaAt = now
	if x.quota < cost {
		return x.carry(rec)
	}
	x.quota -= cost
	x.high = nil
	return true
}

// carry keeps the maximum values of an unrecorded check for the next record. It
// returns false, for admits.
func (x *agent) carry(rec *evidence.Record) bool {
	if rec.Levels == nil {
		return false
	}
	x.high = map[string]float64{}
	for name, high := range rec.Levels.High {
		x.high[name] = high[0]
	}
	return false
}

// when converts a time of the agent's clock to ours. The result is at most a century
// away from now.
func (x *agent) when(t, now time.Time) time.Time {
	const century = 100 * 365 * 24 * time.Hour
	if t.IsZero() {
		return time.Time{}
	}
	switch t = t.Add(x.offset).Round(0).UTC(); {
	case t.Before(now.Add(-century)):
		return now.Add(-century)
	case t.After(now.Add(century)):
		return now.Add(century)
	}
	return t
}

// past is like when, but never later than now.
func (x *agent) past(t, now time.Time) time.Time {
	if t = x.when(t, now); t.After(now) {
		return now
	}
	return t
}

// record returns the evidence of a report, and its cost in units of records.
func (x *agent) record(machine string, r *control.AgentReport, now time.Time) (evidence.Record, float64) {
	b := &body{x: x, now: now}
	e := idle.Evidence{Status: "running", Running: true, LastActivityAt: x.past(r.LastUse, now), LastActivityBy: b.text(r.LastUseBy), CreatedAt: x.past(r.StartedAt, now)}
	p := idle.Policy{Name: "agent", CheckInterval: r.Interval, Detection: true, AutoPause: true}
	values := map[string]float64{}
	for _, s := range cut(r.Readings) {
		s = b.reading(s)
		e.Readings = append(e.Readings, s)
		if s.Unit != "" && (s.State == idle.Active || s.State == idle.Quiet) {
			values[s.Signal] = max(s.Value, x.highOf(s.Signal))
		}
	}
	rec := evidence.Record{At: now, Object: Object(machine), Region: b.text(r.Region), Next: now.Add(time.Duration(r.Interval))}
	if j := r.Judged; j != nil {
		p = j.Policy
		p.Name, p.Action, p.Signals = b.text(p.Name), b.text(p.Action), b.names(p.Signals)
		// The server sees changes only when a report arrives.
		p.CheckInterval = max(p.CheckInterval, r.Interval)
		e.LastResumedAt, e.WarningSentAt, e.SnoozedUntil = x.past(j.ResumedAt, now), x.past(j.WarnedAt, now), x.when(j.SnoozedUntil, now)
		for _, l := range cut(j.Leases) {
			e.Leases = append(e.Leases, idle.Lease{Holder: b.text(l.Holder), Reason: b.text(l.Reason), ExpiresAt: x.when(l.ExpiresAt, now)})
		}
		e.Guards, rec.Unasked = b.blocks(j.Guards), b.names(j.NotAsked)
		for name, v := range j.Peaks {
			if _, known := values[name]; known {
				values[name] = max(values[name], v)
			}
		}
	} else {
		e.Guards = append(b.blocks(r.Holds), idle.Block{Code: CodePolicyUntold, Sentence: "Its agent's version does not report the policy that it applies."})
	}
	rec.Levels, rec.Paused = evidence.LevelsAt(now, values), x.paused(r, b)
	rec.Decision = evidence.Decide(now, p, e)
	return rec, 1 + float64(b.bytes)/perRecord
}

func (x *agent) highOf(signal string) float64 {
	if v, known := x.high[signal]; known {
		return v
	}
	return math.Inf(-1)
}

// paused returns when and why the agent last paused its machine; nil for never.
func (x *agent) paused(r *control.AgentReport, b *body) *evidence.Turn {
	if a := r.Action; a != nil && a.Phase == "done" && !a.At.IsZero() {
		return &evidence.Turn{At: x.past(a.At, b.now), By: "its agent", Reason: b.text(a.Reason)}
	}
	return x.seen.Paused
}

// body truncates the content of a report to what is recorded, and sums up its cost.
type body struct {
	x     *agent
	now   time.Time
	bytes int
}

func cut[T any](l []T) []T { return l[:min(len(l), maxEach)] }

// text truncates s at a character boundary and removes what a terminal might
// interpret.
func (b *body) text(s string) string {
	for n := range s {
		if n > maxText {
			s = s[:n]
			break
		}
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl) {
		s = strings.Map(func(r rune) rune {
			if unicode.IsControl(r) {
				return ' '
			}
			return r
		}, strings.ToValidUTF8(s, "\uFFFD"))
	}
	b.bytes += len(s)
	return s
}

func (b *body) names(l []string) (out []string) {
	if l != nil {
		out = []string{} // an empty list differs from nil, which means all
	}
	for _, s := range cut(l) {
		out = append(out, b.text(s))
	}
	return out
}

func (b *body) reading(r idle.Reading) idle.Reading {
	r.Signal, r.Unit, r.Detail = b.text(r.Signal), b.text(r.Unit), b.text(r.Detail)
	r.At, r.LastEvent, r.QuietSince = b.x.past(r.At, b.now), b.x.past(r.LastEvent, b.now), b.x.past(r.QuietSince, b.now)
	return r
}

func (b *body) blocks(l []idle.Block) (out []idle.Block) {
	for _, g := range cut(l) {
		g.Code, g.Sentence, g.Signal, g.Holder = idle.Code(b.text(string(g.Code))), b.text(g.Sentence), b.text(g.Signal), b.text(g.Holder)
		if g.Until != nil {
			t := b.x.when(*g.Until, b.now)
			g.Until = &t
		}
		out = append(out, g)
	}
	return out
}
