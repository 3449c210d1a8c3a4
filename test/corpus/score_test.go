package corpus

import (
	"fmt"
	"slices"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/why"
	"lull/internal/host"
	"lull/internal/sim/truth"
)

// tally sums the results of a rule over some days.
type tally struct {
	days, pauses, wrong   int           // wrong is the number of pauses that began inside use
	used, lost            time.Duration // use during which it slept, including use that nothing woke it for
	idle, findable, slept time.Duration // idle time beyond the timeout, and the part of it that was found
	held, heldSlept       time.Duration
	verdicts, right       int
	faults                []string // descriptions of faults on single days
}

func (x *tally) add(y tally) {
	x.days, x.pauses, x.wrong = x.days+y.days, x.pauses+y.pauses, x.wrong+y.wrong
	x.used, x.lost, x.idle, x.findable, x.slept = x.used+y.used, x.lost+y.lost, x.idle+y.idle, x.findable+y.findable, x.slept+y.slept
	x.held, x.heldSlept = x.held+y.held, x.heldSlept+y.heldSlept
	x.verdicts, x.right = x.verdicts+y.verdicts, x.right+y.right
	x.faults = append(x.faults, y.faults...)
}

// settled is how close to a change of label a sleep may begin or end without
// counting as false or lost. It is the resolution of the readers.
const settled = time.Second

// weigh scores periods of sleep against the labels of a day.
func weigh(d *trace, slept truth.Use, timeout time.Duration) tally {
	used, kept, free := d.spans(use), d.spans(held), d.spans(idleLabel)
	x := tally{days: 1, used: length(used), idle: length(free), held: length(kept)}
	for _, s := range slept.Spans() {
		x.pauses++
		if used.At(s.From) && used.At(s.From.Add(settled)) && used.At(s.From.Add(-settled)) {
			x.wrong++
			x.faults = append(x.faults, fmt.Sprintf("%s: paused in use at %s", d.name, s.From.Sub(at0)))
		}
	}
	for _, s := range free.Spans() {
		x.findable += max(0, s.To.Sub(s.From)-timeout)
	}
	// Idle time counts from the end of use. Sleep before the timeout counts as
	// found, but no more than there is idle time.
	x.slept, x.heldSlept, x.lost = both(slept, free), both(slept, kept), both(slept, used)
	return x
}

// judged scores the answers of why by comparing them with the script.
func (x *tally) judged(d *trace, r replayed) {
	for i := range r.verdicts {
		v := &r.verdicts[i]
		if v.Verdict.At.Before(at0) {
			continue
		}
		x.verdicts++
		if fault := r.cause(d, v); fault != "" {
			if len(x.faults) < 200 {
				x.faults = append(x.faults, fmt.Sprintf("%s at %s: %s", d.name, v.Verdict.At.Sub(at0).Truncate(time.Second), fault))
			}
			continue
		}
		x.right++
	}
}

// cause returns what is wrong with why's answer to a verdict. It returns "" if
// the answer names the script's action.
func (r *replayed) cause(d *trace, v *evidence.Decision) string {
	a := why.Explain(why.Account{Kind: r.kind, Name: "a", State: "running"}, *v)
	at := v.Verdict.At.Sub(at0)
	now := d.shown(at-r.window, at)
	lately := d.shown(at-r.timeout-r.window, at)
	for _, s := range r.slept.Spans() { // a start or wake resets the idle time
		if w := s.To.Sub(at0); w <= at && at-w <= r.timeout+r.window {
			lately = append(lately, "")
		}
	}
	if at <= r.timeout+r.window {
		lately = append(lately, "")
	}
	if len(a.Verdict.Blocks) == 0 {
		if len(d.inUse(at, at+time.Nanosecond)) > 0 {
			return "idle, in use"
		}
		return ""
	}
	named := false
	for _, b := range a.Verdict.Blocks {
		if a.Fact(b.Code) == nil && a.Kind != why.KindWorker {
			return "unsaid: " + string(b.Code)
		}
		ok := r.right(d, b, at, now, lately)
		if !ok {
			return fmt.Sprintf("%s %s, but there was %v", b.Code, b.Signal, now)
		}
		named = named || b.Code == idle.NotIdleYet || b.Code == idle.RecentActivity || b.Code == idle.ConnectionOpen || b.Code == idle.SignalActive || b.Code == idle.InSnoozePeriod
	}
	if working := d.inUse(at-r.window, at); len(working) > 0 && !named && !slices.Contains(lately, "") {
		return fmt.Sprintf("names no use, but there was %v", working)
	}
	return ""
}

// right reports whether a block is true at a time.
func (r *replayed) right(d *trace, b idle.Block, at time.Duration, now, lately []string) bool {
	switch b.Code {
	case idle.ConnectionOpen:
		return slices.Contains(now, "connections")
	case idle.SignalActive:
		return slices.Contains(now, b.Signal)
	case idle.RecentActivity, idle.NotIdleYet:
		return len(lately) > 0 && (b.Signal == "" || slices.Contains(lately, b.Signal))
	case idle.SignalUnknown, idle.SignalIncomplete:
		return r.fresh(at)
	case host.NothingWakes:
		return !d.port
	}
	return r.guarded != nil && r.guarded(b, at)
}

// fresh reports whether the object was started, woken or first checked so
// recently that no verdict is possible yet.
func (r *replayed) fresh(at time.Duration) bool {
	if at <= 2*r.window {
		return true
	}
	return slices.ContainsFunc(r.slept.Spans(), func(s truth.Span) bool {
		w := s.To.Sub(at0)
		return w <= at && at-w <= 2*r.window
	})
}

// shown returns the signals that can show the script's actions between two times.
func (t *trace) shown(from, to time.Duration) (out []string) {
	for _, a := range t.acts {
		if a.from <= to && from <= a.to {
			out = append(out, a.shows...)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// inUse returns the signals that can show the uses that span a period.
func (t *trace) inUse(from, to time.Duration) (out []string) {
	for _, a := range t.acts {
		if a.label == use && a.from <= from && to <= a.to {
			out = append(out, a.shows...)
		}
	}
	return out
}
