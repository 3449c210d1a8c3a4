package host

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
)

// Default thresholds of the heartbeat. CPU counts from 1 % of the window, but
// never for less than a few scheduler ticks; net from 512 bytes per 5 s.
const (
	cpuPercent   = 1.0
	cpuTicks     = 20 * time.Millisecond
	netBytes     = 512.0
	netWindow    = 5 * time.Second
	diskBytes    = 8192.0 // two pages per 5 s: a program that syncs a record every other second
	diskPage     = 4096.0 // the least that a disk transfers
	byIdle       = "idle_timeout"
	ByManual     = "manual"
	byConnection = "connection"
	byRestart    = "restart"
	stopAfter    = "stop_after"
	besideSignal = "exec" // of the block by a command that runs inside an instance
)

// probeEvery returns the probe interval of a running instance. It is shorter
// than the default only if the instance would be paused sooner than that.
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

// policy returns the engine's policy for this instance.
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
	}
	return p
}

// look samples the workload and turns it into evidence. Deltas are measured
// from the base sample, which only advance moves.
func (i *inst) look(w Workload) idle.Evidence {
	i.mu.Lock()
	ports, quiet := i.rec.Endpoints, time.Duration(i.spec().QuietConnectionAfter)
	i.mu.Unlock()
	s := w.Sample(ports)
	if quiet > 0 && toils(w, s, quiet) {
		quiet = 0
	}
	now := i.h.Now()
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.base.At.IsZero() {
		i.base = s
	}
	i.last = s
	i.unheard = s.ConnErr == nil && !s.Listens && !(i.spec().WakeOnOutbound && s.Outbound > 0)
	i.readings = i.h.cfg.readings(i.base, s, i.called(s), now)
	e := i.evidenceLocked(now)
	e.Connections, e.LastActivityAt = i.connections(s, now, e.LastActivityAt, quiet)
	i.conns = e.Connections
	unknownConnections(&e)
	return e
}

// evidenceLocked returns the evidence that needs no sample of the workload.
func (i *inst) evidenceLocked(now time.Time) idle.Evidence {
	r := &i.rec
	e := idle.Evidence{Status: string(r.State), Running: r.State == power.Running || r.State == power.Pausing,
		LastActivityAt: r.LastActivityAt, LastResumedAt: r.LastResumedAt, CreatedAt: r.CreatedAt,
		SnoozedUntil: r.SnoozedUntil, Readings: i.readings, Connections: i.conns, Leases: r.Leases}
	for _, x := range i.h.halts.InEffect() {
		e.Guards = append(e.Guards, x.Block(haltedHere))
	}
	if i.missing != nil {
		e.Guards = append(e.Guards, idle.Block{Code: idle.SignalUnknown, Signal: "run",
			Sentence: fmt.Sprintf("Not known: its run, %v; an unknown signal never counts as quiet.", i.missing)})
	}
	if i.block != nil {
		e.Guards = append(e.Guards, *i.block)
	}
	if why := i.h.unwritable(); why != "" {
		e.Guards = append(e.Guards, idle.Block{Code: DiskUnwritable, Sentence: upperFirst(why) + ". Nothing is paused automatically until it can; a pause or stop by a user works."})
	}
	if b := i.nothingWakesLocked(now); b != nil {
		e.Guards = append(e.Guards, *b)
	}
	if i.busy > 0 {
		e.Guards = append(e.Guards, idle.Block{Code: idle.RecentActivity, Signal: "workload", Sentence: "The program says that it is busy."})
	}
	if s := i.besideLocked(); s != "" {
		e.Guards = append(e.Guards, idle.Block{Code: idle.RecentActivity, Signal: besideSignal, Sentence: s})
	}
	if d := i.nextDue; d.After(now) && d.Sub(now) < i.pauseAfter() {
		e.Guards = append(e.Guards, idle.Block{Code: idle.Schedule, Sentence: "The program is due to work soon.", Until: &d})
	}
	return e
}

func upperFirst(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// NothingWakes is the code of the block of an instance that would sleep until a
// user resumes it.
const NothingWakes idle.Code = "nothing_wakes"

// nothingWakesLocked blocks the idle pause of an instance that nothing could
// wake: it has no exposed port, no socket that accepts clients, and nothing
// due. An explicit pause-after overrides the block. i.mu is held.
func (i *inst) nothingWakesLocked(now time.Time) *idle.Block {
	s := i.spec()
	if !i.unheard || len(s.Expose) > 0 || s.PauseAfter != nil || i.nextDue.After(now) || i.pauseAfter() == 0 {
		return nil
	}
	return &idle.Block{Code: NothingWakes, Sentence: "Nothing could wake it once it is paused: it exposes no port, listens on no socket and has nothing due."}
}

// toils reports whether the workload is working although a client has been
// quiet for long enough to stop holding. A server that gets no processor time
// or waits for its disk moves no bytes either, and if it were frozen it would
// never answer. An unknown reading counts as working.
func toils(w Workload, s instance.Sample, quiet time.Duration) bool {
	t, ok := w.(instance.Toiler)
	if !ok || !slices.ContainsFunc(s.Inbound, func(c instance.Conn) bool { return c.QuietFor >= quiet }) {
		return false
	}
	if still, err := w.Still(); err == nil && still {
		return false // its work before the freeze was checked then
	}
	busy, err := t.AtWork()
	return busy || err != nil
}

// connections counts the connections that hold and updates the time of the last
// activity. The relay's count includes clients whose backend connection is not
// established yet. With quiet above 0, a connection that moved no byte for that
// long does not count.
func (i *inst) connections(s instance.Sample, now, last time.Time, quiet time.Duration) (int, time.Time) {
	n, owed := 0, false
	for _, c := range s.Inbound {
		moved := now.Add(-c.QuietFor)
		if moved.After(last) {
			last = moved
		}
		waits := !c.Accepted || c.Unread > 0 || owes(c, i.rec.Endpoints)
		if quiet == 0 || c.QuietFor < quiet || waits {
			n++
		}
		owed = owed || waits
	}
	if s.LastClosed.After(last) {
		last = s.LastClosed
	}
	if i.gate != nil {
		a := i.gate.Activity()
		if a.LastArrival.After(last) {
			last = a.LastArrival
		}
		if a.LastByte.After(last) {
			last = a.LastByte
		}
		if quiet == 0 {
			n = max(n, a.Open)
		} else {
			relayed := i.gate.Owed()
			n, owed = max(n, relayed), owed || relayed > 0
		}
		n += a.Waiting
	}
	if n > 0 && quiet == 0 || owed {
		last = now // idle time begins when the last connection closes, or the last request is answered or given up
	}
	if last.After(now) {
		last = now
	}
	return n, last
}

// owes reports whether the client of an inbound connection waits for an answer.
// On the relay path the relay knows which side sent last; the kernel's clock is
// too coarse for that.
func owes(c instance.Conn, ports []instance.Endpoint) bool {
	if c.Turn == instance.TurnUnclear {
		for _, e := range ports {
			if e.Path == instance.PathRelay && samePort(e.Target, c.Local) {
				return false
			}
		}
	}
	return c.Owes()
}

func samePort(a, b string) bool {
	_, x, err1 := net.SplitHostPort(a)
	_, y, err2 := net.SplitHostPort(b)
	return err1 == nil && err2 == nil && x == y
}

// calls counts the outbound connections of an instance that keep it running.
// open are those to other machines, without the ones that
// quiet-connection-after allows to ignore. waiting are those with an unanswered
// request, including those to this machine.
type calls struct{ open, waiting int }

// called counts the connections that the workload opened. i.mu is held.
func (i *inst) called(s instance.Sample) (c calls) {
	quiet := time.Duration(i.spec().QuietConnectionAfter)
	c.open = s.Outbound
	for _, o := range s.Calls {
		if o.Awaits() {
			c.waiting++
		}
		if quiet > 0 && !o.Loopback && o.QuietFor >= quiet && !o.Awaits() && o.Unread == 0 {
			c.open--
		}
	}
	c.open = max(c.open, 0)
	return c
}

// readings returns the heartbeat readings of the workload's tree between two
// samples.
func (c Config) readings(base, s instance.Sample, called calls, now time.Time) []idle.Reading {
	window := s.At.Sub(base.At)
	first := window <= 0
	out := make([]idle.Reading, 0, 4)
	switch {
	case s.CPUErr != nil:
		out = append(out, idle.NotKnown("cpu", now, s.CPUErr.Error()))
	case first || base.CPUErr != nil:
		out = append(out, idle.NotKnown("cpu", now, "this is the first look, a rate needs two"))
	default:
		threshold := max(c.CPUPercent, cpuTicks.Seconds()/window.Seconds()*100)
		out = append(out, idle.Judge("cpu", round(max(s.CPU-base.CPU, 0).Seconds()/window.Seconds()*100),
			round(threshold), "%", window, now))
	}
	switch {
	case s.NetErr != nil:
		out = append(out, idle.NotKnown("net", now, s.NetErr.Error()))
	case first || base.NetErr != nil:
		out = append(out, idle.NotKnown("net", now, "this is the first look, a rate needs two"))
	default:
		moved := float64(s.NetBytes) - float64(base.NetBytes)
		threshold := c.NetBytes * max(1, window.Seconds()/netWindow.Seconds())
		out = append(out, idle.Judge("net", max(moved, 0), round(threshold), "bytes", window, now))
	}
	out = append(out, c.diskReading(base, s, now))
	if s.ConnErr != nil {
		out = append(out, idle.NotKnown("tcp", now, s.ConnErr.Error()), idle.NotKnown("connections", now, s.ConnErr.Error()))
	} else {
		tcp := idle.Judge("tcp", float64(max(called.open, called.waiting)), 1, "outbound connections", 0, now)
		if called.waiting > 0 {
			tcp.Detail = fmt.Sprintf("requests without an answer: %d", called.waiting)
		}
		out = append(out, tcp)
	}
	return out
}

// diskReading judges the bytes that the workload read and wrote between two
// samples. The threshold shrinks with the window, down to one page, so a
// program that keeps writing and syncing is seen however short the window is.
func (c Config) diskReading(base, s instance.Sample, now time.Time) idle.Reading {
	window := s.At.Sub(base.At)
	switch {
	case errors.Is(s.DiskErr, instance.ErrAbsent):
		return idle.Reading{Signal: "disk", State: idle.Absent, At: now, Detail: s.DiskErr.Error()}
	case s.DiskErr != nil:
		return idle.NotKnown("disk", now, s.DiskErr.Error())
	case window <= 0 || base.DiskErr != nil:
		return idle.NotKnown("disk", now, "this is the first sample, a rate needs two")
	}
	threshold := max(diskPage, c.DiskBytes*window.Seconds()/netWindow.Seconds())
	moved := max(float64(s.DiskBytes)-float64(base.DiskBytes), 0)
	return idle.Judge("disk", moved, round(threshold), "bytes", window, now)
}

func round(f float64) float64 { return float64(int64(f*100+0.5)) / 100 }

// judge asks the engine for a verdict and keeps it.
func (i *inst) judge(e idle.Evidence) idle.Verdict {
	d := evidence.Decide(i.h.Now(), i.policy(), e)
	i.mu.Lock()
	i.verdict = d.Verdict
	attrs := i.line.Take(d, "", slog.String("instance", i.spec().Name))
	i.mu.Unlock()
	if attrs != nil {
		i.h.log.LogAttrs(i.h.ctx, slog.LevelInfo, "decision", attrs...)
	}
	if j := i.h.cfg.Evidence; j != nil {
		j.Take(evidence.Record{At: d.Verdict.At, Object: i.id, Next: d.Verdict.At.Add(2 * i.h.cfg.Probe), Decision: d})
	}
	return d.Verdict
}

// unknownConnections makes connections a signal of leases_only too. An open
// connection holds under every policy, so an unknown count blocks under every
// policy.
func unknownConnections(e *idle.Evidence) {
	for n := range e.Readings {
		r := &e.Readings[n]
		if r.Signal == "connections" && r.State == idle.Unknown {
			e.Guards = append(e.Guards, idle.Block{Code: idle.SignalUnknown, Signal: r.Signal,
				Sentence: fmt.Sprintf("Not known: connections, %s; an unknown signal never counts as quiet.", r.Detail)})
		}
	}
}

// check handles a deadline: it probes, decides, acts, and sets the next
// deadline.
func (h *Host) check(i *inst) {
	if !i.tryAcquire() {
		h.due.set(i, h.Now().Add(20*time.Millisecond))
		return
	}
	defer i.release()
	i.serve()
	switch i.state() {
	case power.Running:
		i.checkRunning()
	case power.Paused, power.Reclaimed, power.Hibernated:
		i.checkAsleep()
	case power.Stopped:
		i.checkStopped()
	default:
		i.repair()
	}
}

func (i *inst) checkRunning() {
	w := i.workload()
	if w == nil {
		return
	}
	ctx, span := i.span(i.h.ctx, "instance.detect")
	defer span.End()
	e := i.look(w)
	i.noteTrouble(w)
	v := i.judge(e)
	traceVerdict(span, &v)
	now := i.h.Now()
	if v.LastActivityAt != nil {
		i.mu.Lock()
		if v.LastActivityAt.After(i.rec.LastActivityAt) {
			i.rec.LastActivityAt = *v.LastActivityAt // written with the next real change
		}
		i.mu.Unlock()
	}
	if v.Eligible {
		err := i.pause(ctx, byIdle, "idle for "+idle.HumanMinutes(v.IdleMinutes), false)
		if err == nil {
			return
		}
		now = i.h.Now()
	}
	i.advance()
	next := now.Add(i.probeEvery())
	if t := v.TargetPauseAt; t != nil && t.After(now) && t.Before(next) {
		next = *t
	}
	i.h.due.set(i, next)
}

// noteTrouble publishes when something begins or ceases to keep a workload from
// working.
func (i *inst) noteTrouble(w Workload) {
	t, ok := w.(instance.Troubled)
	if !ok {
		return
	}
	now := t.Trouble()
	i.mu.Lock()
	was := i.trouble
	i.trouble = now
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

// advance starts the next window when the present one is long enough.
func (i *inst) advance() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.last.At.Sub(i.base.At) >= min(i.h.cfg.Probe, i.pauseAfter())*8/10 {
		i.base = i.last
	}
}

func (i *inst) workload() Workload {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.work
}

// setBusy sets the number of the workload's connections that report work in
// progress. A message read after the freeze was sent before it, so it wakes.
func (i *inst) setBusy(n int) {
	i.mu.Lock()
	i.busy += n
	i.rec.LastActivityAt = i.h.Now()
	i.mu.Unlock()
	if n > 0 && !i.up.Load() {
		i.wantWake("the program says that it is busy")
	}
}

// setNextDue sets when the workload wants to run again. It is not paused
// shortly before, and is woken then.
func (i *inst) setNextDue(at time.Time) {
	i.mu.Lock()
	i.nextDue = at
	i.mu.Unlock()
	if i.state().Asleep() {
		i.scheduleAsleep(i.h.Now())
	}
}
