package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"lull/internal/core/idle"
	"lull/internal/platform/proc"
	"lull/internal/protocol/agentctl"
)

// round is one check of the machine: the cheap readings, and the slow ones as they
// arrive.
type round struct {
	at       time.Time
	readings []idle.Reading
	waiting  map[string]bool
	asked    map[string]bool
	done     []func() // called when the round has ended
	over     bool
}

// tick runs one turn of the loop.
func (a *Agent) tick() {
	a.counters.Ticks++
	a.watchClocks()
	now := a.now()
	if a.config.loaded && now.Sub(a.config.readAt) >= configEvery {
		a.config.readAt = now
		a.refresh(func(agentctl.Reload) {})
	}
	a.nextAt = now.Add(a.config.CheckInterval)
	a.endHalt(now)
	d := a.saver.hangs()
	a.alarmIf(d > 0, "disk_hangs", fmt.Sprintf("The agent's state could not be written for %s. No action begins until it is on disk.", idle.Human(d)))
	if at := a.acting; at != nil && at.out.Phase != phaseAccepted {
		// An action in progress makes its own readings. A check now would mistake the
		// hook's work for use, or shorten the interval that is read after the hook.
		a.report()
		return
	}
	ctx, s := a.span(a.ctx, "agent.tick")
	a.startRound(ctx, true, func() { a.conclude(ctx); s.End() })
}

// watchClocks detects a suspend and a jump of the wall clock. After either, all
// samples are invalid and idle time restarts.
func (a *Agent) watchClocks() {
	slept, jump := a.clock.read(a.o.Clocks())
	if jump != 0 {
		a.shift(jump)
		a.save(nil)       // a new agent knows only the stored times
		a.o.Cheap.Reset() // a rate over a period that the jump has stretched looks quiet
	}
	now := a.now()
	// A jump forward may be a suspend that the kernel does not report.
	resumed := slept > 0 || jump > stepLimit
	if !resumed && jump > -stepLimit {
		return
	}
	a.o.Cheap.Reset()
	a.machine.activity, a.machine.activityBy = now, ""
	a.state.WarnedAt = time.Time{}
	if !resumed {
		a.record(agentctl.Entry{Kind: "resume", Sentence: fmt.Sprintf("The clock was set back by %s; the idle clock starts again.", idle.Human(-jump))})
		return
	}
	a.counters.Resumes++
	a.state.ResumedAt = now
	sentence := fmt.Sprintf("The machine resumed after %s; the idle clock starts again.", idle.Human(max(slept, jump)))
	if slept == 0 {
		sentence = fmt.Sprintf("The clock was set forward by %s, which is taken for a resume; the idle clock starts again.", idle.Human(jump))
	}
	ctx := a.concludeDown(slept)
	_, s := a.span(ctx, "agent.resume")
	s.SetAttributes(attribute.Float64("lull.slept_seconds", slept.Seconds()))
	a.state.Vetoes = veto{}
	if p := &a.server; p.order != nil && p.done != nil && p.done.Done {
		a.state.Prepared = nil // the server's stop has happened
	}
	for _, reason := range []string{reasonTTL, reasonComplete} {
		delete(a.state.Warned, reason) // the warning was before the suspend, so users must be warned again
	}
	a.clearWarnings()
	a.record(agentctl.Entry{Kind: "resume", Sentence: sentence, Outcome: copyOf(a.state.Last), Slept: idle.Duration(max(slept, 0))})
	a.log.Info("resumed", "slept", slept.Round(time.Second).String(), "jump", jump.Round(time.Second).String())
	a.save(nil)
	a.refresh(func(agentctl.Reload) { s.End() })
}

// concludeDown ends the action that took the machine down, after the machine has
// resumed with its memory. It returns ctx with that action's span. If the call has
// not been answered, a suspend counts as its success, because a command that
// hibernates answers only after the resume.
func (a *Agent) concludeDown(slept time.Duration) context.Context {
	at, last := a.acting, a.state.Last
	if at == nil || last.EndedAt != nil || !at.sent || last.Phase != phaseAccepted && slept == 0 {
		return a.ctx
	}
	a.finish(phaseDone, "the machine was down and kept its memory (same boot id)")
	a.state.Prepared, a.state.Warned = nil, nil // the stop has happened
	a.tagged.final(last.Action)
	if done := a.state.Completed; done != nil && last.Reason == reasonComplete {
		// The completion was carried out, so it must not take the resumed machine
		// down again.
		a.state.Obeyed, a.state.Completed = done.FileAt, nil
	}
	return trace.ContextWithSpanContext(a.ctx, at.span.SpanContext())
}

// shift moves every stored time by a jump of the wall clock, so that the durations
// between them stay the same.
func (a *Agent) shift(d time.Duration) {
	for _, t := range []*time.Time{&a.started, &a.booted, &a.machine.activity, &a.state.SnoozedUntil, &a.state.WarnedAt,
		&a.state.ResumedAt, &a.state.Vetoes.Since, &a.state.Vetoes.Until, &a.config.readAt, &a.nextAt,
		&a.server.sentAt, &a.server.tryAt, &a.server.until} {
		if !t.IsZero() {
			*t = t.Add(d)
		}
	}
	if last := a.state.Last; last != nil {
		last.StartedAt = last.StartedAt.Add(d)
		if last.EndedAt != nil {
			ended := last.EndedAt.Add(d)
			last.EndedAt = &ended
		}
	}
	if h := a.state.Halted; h != nil && h.Until != nil {
		end := h.Until.Add(d)
		h.Until = &end
	}
	for i := range a.state.Leases {
		a.state.Leases[i].ExpiresAt = a.state.Leases[i].ExpiresAt.Add(d)
	}
	a.machine.readings = slices.Clone(a.machine.readings) // others may have them
	for _, readings := range [][]idle.Reading{a.machine.readings, a.roundReadings()} {
		for i := range readings {
			for _, t := range []*time.Time{&readings[i].At, &readings[i].LastEvent, &readings[i].QuietSince} {
				if !t.IsZero() {
					*t = t.Add(d)
				}
			}
		}
	}
	for name, x := range a.server.peaks {
		a.server.peaks[name] = peak{x.value, x.at.Add(d)}
	}
	for _, times := range []map[string]time.Time{a.unknown, a.machine.sampled, a.machine.unseen} {
		for k, t := range times {
			times[k] = t.Add(d)
		}
	}
	for reason, x := range a.state.Warned {
		x.Sent = x.Sent.Add(d)
		if reason != reasonTTL { // a deadline is a time of the wall clock, and is not moved
			x.At = x.At.Add(d)
		}
	}
	if c := a.state.Completed; c != nil {
		c.At = c.At.Add(d)
	}
	if p := a.state.Prepared; p != nil {
		p.At, p.NotBefore = p.At.Add(d), p.NotBefore.Add(d)
	}
}

// roundReadings returns the readings of the round in progress so far.
func (a *Agent) roundReadings() []idle.Reading {
	if a.round == nil {
		return nil
	}
	return a.round.readings
}

// startRound starts a round, or joins the one in progress, and calls done in the loop
// when it has ended. With thrift set, slow signals are not read if a cheap one is
// active. Of ctx only the span is used.
func (a *Agent) startRound(ctx context.Context, thrift bool, done func()) {
	if a.round != nil {
		a.round.done = append(a.round.done, done)
		return
	}
	now := a.now()
	r := &round{at: now, waiting: map[string]bool{}, asked: map[string]bool{}, done: []func(){done}}
	a.round = r
	c := a.config.Config
	for _, x := range a.o.Cheap.Read(now, c.Limits, nil) {
		if c.counts(x.Signal) {
			r.add(x)
		}
	}
	busy := slices.ContainsFunc(r.readings, func(x idle.Reading) bool { return x.State == idle.Active })
	if thrift && busy {
		a.endRound(r)
		return
	}
	for _, s := range a.o.Slow {
		if !s.Wanted(c) || !c.counts(s.Signal()) {
			continue
		}
		r.asked[s.Signal()] = true
		a.askSlow(ctx, r, s, c)
	}
	if len(r.waiting) == 0 {
		a.endRound(r)
		return
	}
	a.beside(2*probeLimit, func(ctx context.Context) func() {
		select {
		case <-time.After(a.probeLimit(c)):
		case <-ctx.Done():
		}
		return func() { a.endRound(r) }
	})
}

// probeLimit returns the time limit for reading a slow signal. It is below the check
// interval, so that no tick waits for a reading.
func (a *Agent) probeLimit(c Config) time.Duration { return min(probeLimit, c.CheckInterval*3/4) }

// askSlow reads one slow signal outside the loop, unless its previous reading has not
// ended.
func (a *Agent) askSlow(ctx context.Context, r *round, s Slow, c Config) {
	name := s.Signal()
	if a.busy[name] {
		r.add(idle.NotKnown(name, r.at, "the previous reading is still in progress"))
		return
	}
	a.busy[name] = true
	r.waiting[name] = true
	limit := a.probeLimit(c)
	_, span := a.span(ctx, "signal."+name)
	a.beside(limit, func(ctx context.Context) func() {
		x := s.Read(ctx, r.at, c)
		traceReading(span, x)
		span.End()
		return func() {
			delete(a.busy, name)
			if r.over {
				return
			}
			delete(r.waiting, name)
			r.add(x)
			if len(r.waiting) == 0 {
				a.endRound(r)
			}
		}
	})
}

func (r *round) add(x idle.Reading) { r.readings = append(r.readings, x) }

// endRound ends a round with the readings that have arrived. The other signals are
// unknown.
func (a *Agent) endRound(r *round) {
	if r.over {
		return
	}
	r.over = true
	for name := range r.waiting {
		r.add(idle.NotKnown(name, r.at, "it did not answer in time"))
	}
	order := []string{proc.SignalUsers, proc.SignalTerminals, proc.SignalRecent, proc.SignalCPU, proc.SignalGPU, proc.SignalDisk, proc.SignalNetwork}
	rank := func(x idle.Reading) int {
		if i := slices.Index(order, x.Signal); i >= 0 {
			return i
		}
		return len(order)
	}
	slices.SortFunc(r.readings, func(x, y idle.Reading) int {
		if d := rank(x) - rank(y); d != 0 {
			return d
		}
		return strings.Compare(x.Signal, y.Signal)
	})
	a.round = nil
	a.note(r)
	for _, f := range r.done {
		f()
	}
}

// rates are the signals that are measured over a window. The other signals report the
// time of the last use, or stay active as long as the use lasts.
var rates = []string{proc.SignalCPU, proc.SignalNetwork, proc.SignalDisk}

// quietSince returns since when the windows of a quiet rate are contiguous; zero if
// there has been no gap since the agent started. A reading proves quiet only for its
// own window, so idle time restarts after a gap, such as after a jump of the clock.
// If restarts is set, the gap does not count, because it contains only the work of
// lull's own hook.
func (m *machineView) quietSince(x *idle.Reading, restarts bool) time.Time {
	if m.sampled == nil {
		m.sampled, m.unseen = map[string]time.Time{}, map[string]time.Time{}
	}
	if x.State == idle.Unknown {
		if restarts || m.sampled[x.Signal].IsZero() { // the first window may begin here
			m.sampled[x.Signal] = x.At
		}
		return time.Time{}
	}
	begin := x.At.Add(-time.Duration(x.Window))
	if last := m.sampled[x.Signal]; !last.IsZero() && begin.Sub(last) > time.Second {
		m.unseen[x.Signal] = begin
	}
	m.sampled[x.Signal] = x.At
	if x.State != idle.Quiet {
		return time.Time{}
	}
	return m.unseen[x.Signal]
}

// note makes the readings of a finished round the current ones.
func (a *Agent) note(r *round) {
	m := &a.machine
	m.readings, m.notAsked = r.readings, nil
	a.server.notePeaks(r.readings)
	for _, s := range a.o.Slow {
		if s.Wanted(a.config.Config) && a.config.counts(s.Signal()) && !r.asked[s.Signal()] {
			m.notAsked = append(m.notAsked, s.Signal())
		}
	}
	restarts := m.restarts
	m.restarts = false
	seen := map[string]bool{}
	for i, x := range r.readings {
		if slices.Contains(rates, x.Signal) {
			r.readings[i].QuietSince = m.quietSince(&x, restarts)
		}
		if t := useOf(x); t.After(m.activity) {
			m.activity, m.activityBy = t, x.Signal
		}
		if x.State != idle.Unknown {
			continue
		}
		a.counters.Unknown++
		seen[x.Signal] = true
		if a.unknown[x.Signal].IsZero() {
			a.unknown[x.Signal] = r.at
		}
		if r.at.Sub(a.unknown[x.Signal]) >= alarmAfter {
			a.alarm("unknown_"+x.Signal, fmt.Sprintf("The signal %s has been unknown since %s: %s.", x.Signal, a.unknown[x.Signal].Format(time.RFC3339), x.Detail))
		}
	}
	for s := range a.unknown {
		if !seen[s] {
			delete(a.unknown, s)
			a.alarmIf(false, "unknown_"+s, "")
		}
	}
	if a.o.Memory != nil {
		if mem, err := a.o.Memory(); err == nil {
			m.memory = &mem
		}
	}
}

// useOf returns the time of the newest use that a reading proves; zero if it proves
// none.
func useOf(x idle.Reading) time.Time {
	if x.State == idle.Active && x.LastEvent.IsZero() {
		return x.At
	}
	return x.LastEvent
}
