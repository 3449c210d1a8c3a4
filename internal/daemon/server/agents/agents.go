// Package agents makes evidence of what agents report to a server: what each
// saw, judged by the engine as the agent itself judges, for the same journal
// that the checks of workers go to. So why at a past time, the timeline and
// the preview have one past for both.
//
// Guarantees. The agent's clock may be wrong by any amount: its times count as
// ages against the report's own. A report that says nothing new becomes part
// of a run and costs no record of its own. What an agent says is bounded in
// what it may have written: one that says something else all the time gets a
// record each half minute, and its other reports leave a time of which nothing
// is recorded, which is not quiet.
//
// It leaves out who may report, what is answered, and where records are kept.
package agents

import (
	"math"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"lull/internal/evidence"
	"lull/internal/idle"
	"lull/internal/link/control"
)

// Object is what the evidence of an agent's machine is filed under. No worker
// has such an id.
func Object(machine string) string { return prefix + machine }

const prefix = "agent/"

// Machine is the one whose evidence is filed under object; false if it is of
// something else.
func Machine(object string) (string, bool) { return strings.CutPrefix(object, prefix) }

// CodePolicyUntold is the guard of an agent that does not say what it judges by.
const CodePolicyUntold idle.Code = "policy_untold"

// Bounds of what is recorded of one agent. An honest report has about ten
// readings; texts are for people.
const (
	maxEach    = 24  // readings, guards, leases and names of signals
	maxText    = 160 // bytes of a text
	spacing    = 5 * time.Second
	burst      = 120.0           // records that may be written at once
	refill     = 1.0 / 30        // records a second
	perRecord  = 512             // bytes of texts that cost as much as a record
	clockSlack = 2 * time.Second // jitter of a report's way that is not the clock
)

// Agents are those that report to one server. It is safe for concurrent use.
type Agents struct {
	keep func(evidence.Record) // nil keeps nothing

	mu     sync.Mutex
	byName map[string]*agent
}

// agent is what is remembered of one.
type agent struct {
	boot     string
	started  time.Time
	sequence uint64
	offset   time.Duration // from its clock to ours

	seen   evidence.Record    // the last one
	taken  evidence.Record    // the last one that was handed on
	high   map[string]float64 // of those that were not, since
	room   float64            // records that may be written
	roomAt time.Time
}

// New makes Agents that hand what is to be recorded to keep; nil keeps nothing.
func New(keep func(evidence.Record)) *Agents {
	return &Agents{keep: keep, byName: map[string]*agent{}}
}

// Seen is the last check of a machine's agent that this server heard of.
func (a *Agents) Seen(machine string) (evidence.Record, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	x := a.byName[machine]
	if x == nil {
		return evidence.Record{}, false
	}
	return x.seen, true
}

// Take takes a report in that has been checked. One that is older than the one
// before is passed over. How many machines there are is for the caller to bound.
func (a *Agents) Take(machine string, r control.AgentReport, now time.Time) {
	now = now.UTC().Round(0)
	a.mu.Lock()
	defer a.mu.Unlock()
	x := a.byName[machine]
	if x == nil {
		x = &agent{room: burst, roomAt: now}
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

// admits reports whether a check is to be recorded now. One that continues as
// before costs nothing, and may as well be told with the next.
func (x *agent) admits(rec *evidence.Record, cost float64, now time.Time) bool {
	if x.taken.Object != "" && evidence.Continues(&x.taken, rec) {
		if now.Sub(x.taken.At) < spacing {
			return x.later(rec)
		}
		x.high = nil
		return true
	}
	x.room = min(burst, x.room+now.Sub(x.roomAt).Seconds()*refill)
	x.roomAt = now
	if x.room < cost {
		return x.later(rec)
	}
	x.room -= cost
	x.high = nil
	return true
}

// later keeps the values of a check that is not recorded for the next one.
func (x *agent) later(rec *evidence.Record) bool {
	if rec.Levels == nil {
		return false
	}
	x.high = map[string]float64{}
	for name, high := range rec.Levels.High {
		x.high[name] = high[0]
	}
	return false
}

// when is a time of the agent's clock by ours, within a century.
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

// past is when of something that has happened.
func (x *agent) past(t, now time.Time) time.Time {
	if t = x.when(t, now); t.After(now) {
		return now
	}
	return t
}

// record makes the evidence of a report, and says how many records it weighs.
func (x *agent) record(machine string, r *control.AgentReport, now time.Time) (evidence.Record, float64) {
	b := &body{x: x, now: now}
	e := idle.Evidence{Status: "running", Running: true, LastActivityAt: x.past(r.LastUse, now), CreatedAt: x.past(r.StartedAt, now)}
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
		// What the server sees of it comes with the reports.
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
		e.Guards = append(b.blocks(r.Holds), idle.Block{Code: CodePolicyUntold, Sentence: "Its agent is of a version that does not tell what it judges by."})
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

// paused is the last time that the agent took its machine down.
func (x *agent) paused(r *control.AgentReport, b *body) *evidence.Turn {
	if a := r.Action; a != nil && a.Phase == "done" && !a.At.IsZero() {
		return &evidence.Turn{At: x.past(a.At, b.now), By: "its agent", Reason: b.text(a.Reason)}
	}
	return x.seen.Paused
}

// body holds what is recorded of a report to its bounds, and weighs it.
type body struct {
	x     *agent
	now   time.Time
	bytes int
}

func cut[T any](l []T) []T { return l[:min(len(l), maxEach)] }

// text cuts a text at a whole character, and makes it fit for a terminal.
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
		out = []string{} // none is not the same as all
	}
	for _, s := range cut(l) {
		out = append(out, b.text(s))
	}
	return out
}

func (b *body) reading(r idle.Reading) idle.Reading {
	r.Signal, r.Unit, r.Detail = b.text(r.Signal), b.text(r.Unit), b.text(r.Detail)
	r.At, r.LastEvent = b.x.past(r.At, b.now), b.x.past(r.LastEvent, b.now)
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
