package host

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/probe"
	"lull/internal/relay"
)

// Actors in records and events.
const (
	byIdle       = "idle_timeout"
	ByManual     = "manual"
	byConnection = "connection"
	byRestart    = "restart"
	stopAfter    = "stop_after"
	besideSignal = "exec" // signal of the block while a command runs inside the instance
)

// probeEvery returns the probe interval of a running instance. It is shorter than
// the default only if the instance could be paused sooner than that.
func (i *inst) probeEvery() time.Duration {
	d := i.h.cfg.Probe
	if p := i.pauseAfter(); p > 0 {
		d = min(d, max(p/2, 50*time.Millisecond))
	}
	return d + time.Duration((rand.Float64()-0.5)*0.2*float64(d))
}

func (i *inst) pauseAfter() time.Duration {
	if p := i.spec().PauseAfter; p != nil {
		return time.Duration(*p)
	}
	return i.h.cfg.PauseAfter
}

func (i *inst) stopAfter() time.Duration {
	if p := i.spec().StopAfter; p != nil {
		return time.Duration(*p)
	}
	return i.h.cfg.StopAfter
}

// policy returns the idle policy of this instance for the engine.
func (i *inst) policy() idle.Policy {
	p := idle.Policy{Name: i.spec().IdlePolicy, Timeout: idle.Duration(i.pauseAfter()),
		CheckInterval: idle.Duration(i.h.cfg.Probe), Detection: true, AutoPause: true, Action: "pause"}
	if p.Name == "" {
		p.Name = instance.PolicyDefault
	}
	if p.Timeout == 0 {
		p.Detection, p.Timeout = false, idle.Duration(instance.MaxDeadline)
	}
	if p.Name == instance.PolicyLeasesOnly {
		p.Signals = []string{}
		for n := range i.spec().Probes {
			p.Signals = append(p.Signals, i.spec().Probes[n].Signal())
		}
	}
	return p
}

// decide samples the workload and returns two verdicts: v counts connections that
// may have come and gone between two samples as activity, and sure does not.
//
// Finding out whether there were such connections is expensive. decide does that
// only if nothing else prevents a pause, or if the kernel would forget them before
// the next check. Then both verdicts are the same.
func (i *inst) decide(w Workload) (v, sure idle.Verdict) {
	e, unseen := i.sample(w)
	until := time.Time{}
	if unseen != nil && unseen.Until.After(e.LastActivityAt) {
		sure = idle.Decide(i.h.Now(), i.policy(), e)
		last := !unseen.Forgotten.IsZero() && !i.h.Now().Add(i.h.cfg.Probe*5/4).Before(unseen.Forgotten) // the interval of checks varies
		if sure.Eligible || last {
			i.recall(&e, unseen)
			unseen = nil
		} else {
			until, e.LastActivityAt = unseen.Until, unseen.Until
		}
	}
	i.mu.Lock()
	i.seen.unseen = until
	i.mu.Unlock()
	v = i.judge(e)
	if until.IsZero() {
		sure = v
	}
	return v, sure
}

// recall adds to e when the newest connection ended that no sample has seen.
func (i *inst) recall(e *idle.Evidence, unseen *instance.Unseen) {
	i.mu.Lock()
	own := slices.Clone(i.custom.own)
	i.mu.Unlock()
	at, err := unseen.Newest(func(t time.Time) bool { return within(own, t) })
	switch {
	case err != nil:
		e.Readings = append(e.Readings, idle.NotKnown("connections", i.h.Now(), err.Error()))
		probe.BlockUnknownConnections(e)
	case at.After(e.LastActivityAt):
		e.LastActivityAt = at
	}
}

// sample samples the workload and returns the evidence. Connections that it may
// have missed are returned separately. Deltas are measured from the base sample,
// which only advance replaces.
func (i *inst) sample(w Workload) (idle.Evidence, *instance.Unseen) {
	i.mu.Lock()
	ports, quiet := i.rec.Endpoints, time.Duration(i.spec().QuietConnectionAfter)
	i.mu.Unlock()
	s := w.Sample(ports)
	i.noteDue(w)
	if quiet > 0 && probe.Working(w, s, quiet) {
		quiet = 0
	}
	now, needed, grouped := i.h.Now(), i.neededBlock(), i.groupBlock()
	i.mu.Lock()
	defer i.mu.Unlock()
	i.seen.needed, i.seen.grouped = needed, grouped
	var relayed *relay.Activity
	if i.gate != nil {
		relayed = new(i.gate.Activity())
	}
	i.discountLocked(&s, relayed)
	unseen, span := s.Unseen, i.seen.windowLocked()
	s.Unseen = nil // not kept, because it applies to this sample only
	if span.base.At.IsZero() {
		span.base = s
	}
	span.last = s
	i.seen.unheard = s.ConnErr == nil && !s.Listens && !(i.spec().WakeOnOutbound && s.Outbound > 0)
	i.seen.readings = i.h.cfg.Thresholds.Readings(span.base, s, time.Duration(i.spec().QuietConnectionAfter), now)
	e := i.evidenceLocked(now)
	c := probe.Connections{Endpoints: i.rec.Endpoints, Quiet: quiet, Relay: relayed}
	if i.gate != nil {
		c.RelayOwes = i.gate.Owed()
	}
	e.Connections, e.LastActivityAt = c.Count(s, now, e.LastActivityAt)
	i.seen.conns = e.Connections
	probe.BlockUnknownConnections(&e)
	return e, unseen
}

// evidenceLocked returns the evidence that does not depend on a sample. i.mu must
// be held.
func (i *inst) evidenceLocked(now time.Time) idle.Evidence {
	r := &i.rec
	e := idle.Evidence{Status: string(r.State), Running: r.State == power.Running || r.State == power.Pausing,
		LastActivityAt: r.LastActivityAt, LastResumedAt: r.LastResumedAt, CreatedAt: r.CreatedAt,
		SnoozedUntil: r.SnoozedUntil, Readings: slices.Concat(i.seen.readings, i.probeReadingsLocked(now)), Connections: i.seen.conns, Leases: r.Leases}
	for _, x := range i.h.halts.InEffect() {
		e.Guards = append(e.Guards, x.Block(haltedHere))
	}
	if i.proc.missing != nil {
		e.Guards = append(e.Guards, idle.Block{Code: idle.SignalUnknown, Signal: "run",
			Sentence: fmt.Sprintf("Unknown: whether it runs, %v. An unknown signal never counts as quiet.", i.proc.missing)})
	}
	if i.seen.needed != nil {
		e.Guards = append(e.Guards, *i.seen.needed)
	}
	if i.seen.grouped != nil {
		e.Guards = append(e.Guards, *i.seen.grouped)
	}
	if i.seen.block != nil {
		e.Guards = append(e.Guards, *i.seen.block)
	}
	if why := i.h.unwritable(); why != "" {
		e.Guards = append(e.Guards, idle.Block{Code: DiskUnwritable, Sentence: upperFirst(why) + ". Nothing is paused automatically until it can; a pause or stop by a user works."})
	}
	if b := i.nothingWakesLocked(); b != nil {
		e.Guards = append(e.Guards, *b)
	}
	if i.says.busy > 0 {
		e.Guards = append(e.Guards, idle.Block{Code: idle.RecentActivity, Signal: "workload", Sentence: "The program says that it is busy."})
	}
	if s := i.besideLocked(); s != "" {
		e.Guards = append(e.Guards, idle.Block{Code: idle.RecentActivity, Signal: besideSignal, Sentence: s})
	}
	for _, b := range []*idle.Block{i.timerBlockLocked(now), i.jobsBlockLocked()} {
		if b != nil {
			e.Guards = append(e.Guards, *b)
		}
	}
	return e
}

func upperFirst(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// NothingWakes is the code of the block on an instance that only a user could
// resume.
const NothingWakes idle.Code = "nothing_wakes"

// nothingWakesLocked returns a block of the idle pause if nothing could wake the
// instance: it has no exposed port, no socket that accepts clients, and no timer.
// An explicit pause-after overrides that. i.mu must be held.
func (i *inst) nothingWakesLocked() *idle.Block {
	s := i.spec()
	timer, _ := i.nextTimerLocked()
	if !i.seen.unheard || len(s.Expose) > 0 || s.PauseAfter != nil || !timer.IsZero() || i.pauseAfter() == 0 {
		return nil
	}
	return &idle.Block{Code: NothingWakes, Sentence: "Nothing could wake it once it is paused: it exposes no port, listens on no socket and has nothing due."}
}

// judge asks the engine for a verdict on e and stores it.
func (i *inst) judge(e idle.Evidence) idle.Verdict {
	d := evidence.Decide(i.h.Now(), i.policy(), e)
	i.mu.Lock()
	i.seen.verdict = d.Verdict
	attrs := i.seen.line.Take(d, "", slog.String("instance", i.spec().Name))
	i.mu.Unlock()
	if attrs != nil {
		i.h.log.LogAttrs(i.h.ctx, slog.LevelInfo, "decision", attrs...)
	}
	if j := i.h.cfg.Evidence; j != nil {
		j.Take(evidence.Record{At: d.Verdict.At, Object: i.id, Next: d.Verdict.At.Add(2 * i.h.cfg.Probe), Decision: d})
	}
	return d.Verdict
}

// check handles an instance's deadline: it samples the instance, decides, acts, and
// sets the next deadline. It calls yield before anything that may take long.
func (h *Host) check(i *inst, yield func()) {
	if !i.tryAcquire() {
		h.due.Set(i.due, h.Now().Add(20*time.Millisecond))
		return
	}
	defer i.release()
	if i.state() != power.Running || i.rt.Capabilities().Network { // a guest may take long to answer
		yield()
	}
	i.serve()
	switch i.state() {
	case power.Running:
		i.checkRunning(yield)
	case power.Paused, power.Reclaimed, power.Hibernated:
		i.checkAsleep()
	case power.Stopped:
		i.checkStopped()
	default:
		i.repair()
	}
}

func (i *inst) checkRunning(yield func()) {
	w := i.workload()
	if w == nil || i.probing() { // the end of the round causes another check
		return
	}
	i.passTimers()
	i.refreshTimers(w)
	ctx, span := i.span(i.h.ctx, "instance.detect")
	defer span.End()
	if i.spec().Adopted.IsUnit() && !i.listens() {
		i.showListeners(w) // a service is often active before it listens
	}
	v, sure := i.decide(w)
	i.noteTrouble(w)
	if v.Eligible && i.readTimers(w) {
		v, sure = i.decide(w)
	}
	traceVerdict(span, &v)
	now := i.h.Now()
	if sure.LastActivityAt != nil {
		i.mu.Lock()
		if sure.LastActivityAt.After(i.rec.LastActivityAt) {
			i.rec.LastActivityAt = *sure.LastActivityAt // written to disk with the next other change
		}
		i.mu.Unlock()
	}
	if v.Eligible {
		if !i.confirmed(now) {
			return
		}
		yield()
		err := i.pause(ctx, byIdle, "idle for "+idle.HumanMinutes(v.IdleMinutes), false)
		if err == nil {
			return
		}
		now = i.h.Now()
	} else {
		i.unconfirmed()
	}
	i.advance()
	next := now.Add(i.probeEvery())
	switch due, begun := i.probeDue(now); {
	case begun:
		return
	case !due.IsZero() && due.Before(next):
		next = due
	}
	if t := sure.TargetPauseAt; t != nil && t.After(now) && t.Before(next) {
		next = *t
	}
	i.h.due.Set(i.due, next)
}

// noteTrouble publishes when a fault begins or ends that keeps a workload from
// working.
func (i *inst) noteTrouble(w Workload) {
	t, ok := w.(instance.Troubled)
	if !ok {
		return
	}
	now := t.Trouble()
	i.mu.Lock()
	was := i.seen.trouble
	i.seen.trouble = now
	i.mu.Unlock()
	switch {
	case was == "" && now != "":
		i.h.log.Warn("in trouble", "instance", i.name(), "reason", now)
		i.emit("trouble", "", now)
	case was != "" && now == "":
		i.h.log.Info("out of trouble", "instance", i.name(), "was", was)
		i.emit("trouble_over", "", was)
	}
}

// advance makes the last sample the base if the window has become long enough.
func (i *inst) advance() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if w := i.seen.windowLocked(); w.last.At.Sub(w.base.At) >= min(i.h.cfg.Probe, i.pauseAfter())*8/10 {
		w.base = w.last
	}
}

func (i *inst) workload() Workload {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.proc.work
}

// setBusy sets the number of connections on which the workload reports work in
// progress. If the instance is paused, it is woken, because the message was sent
// before the freeze.
func (i *inst) setBusy(n int) {
	i.mu.Lock()
	i.says.busy += n
	i.rec.LastActivityAt = i.h.Now()
	i.mu.Unlock()
	if n > 0 && !i.ports.up.Load() {
		i.wantWake("the program says that it is busy")
	}
}
