package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"lull/internal/core/idle"
	"lull/internal/lib/delay"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
)

// Reporter reports the agent's state to a server and returns the server's
// requests.
type Reporter interface {
	Report(ctx context.Context, r control.AgentReport) (control.AgentAnswer, error)
}

// Timing of reports.
const (
	reportLimit  = 10 * time.Second // time limit of one report
	reportEvery  = 30 * time.Second // shortest interval of heartbeats
	reportSpace  = time.Second      // minimum interval between two reports
	orderedSpace = 2 * time.Second  // minimum interval between two checks that the server waits for
	reportRetry  = 5 * time.Second  // delay after a failure; doubles up to configEvery
	refusedHolds = 5 * time.Minute  // how long a refusal of an intent by the server stays in effect
	declareTries = 3
)

// serverSaid holds the server's last answer about this machine. It is stored on disk,
// so that losing the server does not change who decides.
type serverSaid struct {
	WorkerID string `json:"worker_id"`
	Holder   string `json:"pause_holder"`
	Halted   bool   `json:"halted,omitempty"` // no longer written; earlier versions stored the fleet's halt here

	TTLDeadline *time.Time `json:"ttl_deadline,omitempty"`
	TTLAction   string     `json:"ttl_action,omitempty"`
	TTLFromTag  bool       `json:"ttl_from_tag,omitempty"` // the server took the deadline from the machine's tag
}

func (s serverSaid) same(t serverSaid) bool {
	at := s.TTLDeadline == t.TTLDeadline || s.TTLDeadline != nil && t.TTLDeadline != nil && s.TTLDeadline.Equal(*t.TTLDeadline)
	s.TTLDeadline, t.TTLDeadline = nil, nil
	return at && s == t
}

// reporting is the state of the communication with the server. It is owned by
// the loop.
type reporting struct {
	sequence uint64
	busy     bool      // a report is in progress
	force    bool      // send the next report even if nothing has changed
	sentAt   time.Time // when the last report that arrived was sent
	tryAt    time.Time // earliest time of the next attempt
	said     string    // content of that report; only changes are sent until the next heartbeat
	failures int
	errored  string    // why the last report failed
	looking  bool      // a check that the server waits for is in progress
	haltAt   time.Time // when the fleet's halt was last learned

	peaks map[string]peak // of signals with a value, by signal

	order   *control.AgentOrder
	done    *control.AgentDone // the result of order, or of the order before
	refused string
	until   time.Time // until when refused applies
}

// peak is the highest value that has not been reported yet.
type peak struct {
	value float64
	at    time.Time
}

// notePeaks records the highest values of a round. Simulations of other thresholds
// need the values between two reports.
func (p *reporting) notePeaks(readings []idle.Reading) {
	if p.peaks == nil {
		p.peaks = map[string]peak{}
	}
	for _, x := range readings {
		if x.Unit == "" || x.State == idle.Unknown || x.State == idle.Absent {
			continue
		}
		if old, known := p.peaks[x.Signal]; !known || x.Value >= old.value {
			p.peaks[x.Signal] = peak{x.Value, x.At}
		}
	}
}

// told removes the peaks that were in a report that arrived.
func (p *reporting) told(r *control.AgentReport) {
	maps.DeleteFunc(p.peaks, func(_ string, x peak) bool { return !x.at.After(r.At) })
}

// judged returns everything but the readings that the verdict was based on.
func (a *Agent) judged(now time.Time) *control.AgentJudged {
	j := &control.AgentJudged{Policy: a.config.policy(), ResumedAt: a.state.ResumedAt, SnoozedUntil: a.state.SnoozedUntil, WarnedAt: a.state.WarnedAt,
		Leases: slices.Clone(a.state.Leases), Guards: a.guards(now, false), NotAsked: slices.Clone(a.machine.notAsked), Peaks: map[string]float64{}}
	for name, x := range a.server.peaks {
		j.Peaks[name] = x.value
	}
	j.Fit()
	return j
}

// reportInterval returns the maximum time until the next report, as promised to the
// server.
func (a *Agent) reportInterval() time.Duration {
	return min(max(a.config.CheckInterval, reportEvery), control.MaxInterval)
}

// report sends changes, or a heartbeat, outside the loop. Only one report is in
// progress at a time. If the server does not answer, it is retried with backoff.
func (a *Agent) report() {
	p := &a.server
	if a.o.Reporter == nil || !a.config.loaded || p.busy {
		return
	}
	now := a.now()
	beat := p.sentAt.Add(a.reportInterval() * 3 / 4)
	r := a.reportNow(now)
	if key := keyOf(r); !p.force && key == p.said && now.Before(beat) {
		a.soon(beat)
		return
	}
	if now.Before(p.tryAt) {
		a.soon(p.tryAt)
		return
	}
	p.busy, p.force = true, false
	a.beside(reportLimit, func(ctx context.Context) func() {
		ans, err := a.o.Reporter.Report(ctx, r)
		return func() {
			p.busy = false
			a.heard(r, ans, err)
		}
	})
}

// heard processes the server's answer to a report, or the error of a report.
func (a *Agent) heard(r control.AgentReport, ans control.AgentAnswer, err error) {
	p, now := &a.server, a.now()
	a.alarmIf(err != nil, "server_unreachable", fmt.Sprintf("The server does not take reports: %v.", err))
	if err != nil {
		p.tryAt, p.errored = now.Add(delay.Backoff(p.failures, reportRetry, configEvery)), err.Error()
		p.failures++
		a.soon(p.tryAt)
		return
	}
	self := a.self.Load()
	a.alarmIf(ans.WorkerID == "" && a.o.Cloud == nil && self.instanceID != "", "no_worker",
		fmt.Sprintf("The server knows no worker whose instance is %s (region %q): set --region, or import it with lull worker import.", self.instanceID, self.region))
	p.told(&r)
	p.failures, p.sentAt, p.tryAt, p.said = 0, now, now.Add(reportSpace), keyOf(r)
	a.heardHalt(ans.Machine(now), r.At)
	said := serverSaid{WorkerID: ans.WorkerID, Holder: ans.Holder, TTLDeadline: ans.TTLDeadline, TTLAction: ans.TTLAction, TTLFromTag: ans.TTLFromTag}
	if a.state.Server == nil || !a.state.Server.same(said) {
		a.state.Server = &said
		a.record(agentctl.Entry{Kind: "server", Sentence: said.sentence()})
		a.save(nil)
		a.soon(now)
	}
	if w := ans.Warning; w != nil && w.ID != a.state.ServerWarned {
		a.state.ServerWarned = w.ID
		a.save(nil)
		a.warn(a.ctx, serverWarning, w.ID, Warning{Reason: reasonIdle, Action: w.Action, At: now.Add(time.Duration(w.Seconds * float64(time.Second))),
			Sentence: "The server found this machine idle."})
	}
	if ans.AllClear {
		a.withdraw(serverWarning, "canceled by the server")
	}
	a.obey(ans.Order)
	if p.force {
		a.report() // requested while this report was in progress
	}
}

func (s serverSaid) sentence() string {
	out := "The server knows no worker that is this machine."
	if s.WorkerID != "" {
		out = fmt.Sprintf("The server knows this machine as worker %s; the %s decides about it.", s.WorkerID, s.Holder)
	}
	return out
}

// reportNow returns a report of the current state.
func (a *Agent) reportNow(now time.Time) control.AgentReport {
	p, m := &a.server, &a.machine
	p.sequence++
	r := control.AgentReport{At: now, Sequence: p.sequence, StartedAt: a.started, BootID: a.o.BootID, InstanceID: a.self.Load().instanceID, Region: a.self.Load().region,
		Version: a.o.Version, BuildDate: a.o.BuildDate, Interval: idle.Duration(a.reportInterval()), LastUse: m.activity, LastUseBy: m.activityBy,
		Idle: now.Sub(m.activity).Minutes(), Holder: a.holder(), Readings: []idle.Reading{}, Holds: a.holds(now), Ordered: p.done, Judged: a.judged(now)}
	for _, x := range m.readings[:min(len(m.readings), 64)] {
		x.Detail = cut(x.Detail)
		r.Readings = append(r.Readings, x)
	}
	for _, code := range slices.Sorted(maps.Keys(a.alarms)) {
		r.Alarms = append(r.Alarms, control.AgentAlarm{Code: code, Sentence: cut(a.alarms[code].Sentence)})
	}
	if a.config.PreStop != "" && a.hookAllowed("pre-stop") {
		r.HookSeconds = a.config.PreStopTimeout.Seconds()
	}
	if l := a.state.Last; l != nil && l.Phase != phaseIntent {
		r.Action = &control.AgentAction{Generation: l.Generation, Action: l.Action, Reason: l.Reason, Phase: l.Phase, Detail: cut(l.Detail), At: l.StartedAt}
	}
	return r
}

// cut truncates a sentence to the length that a report allows.
func cut(s string) string { return s[:min(len(s), 300)] }

// keyOf returns the part of a report whose changes are sent before the next
// heartbeat: verdicts and decisions, but not every value.
func keyOf(r control.AgentReport) string {
	var b strings.Builder
	for _, x := range r.Readings {
		fmt.Fprintf(&b, "%s=%s;", x.Signal, x.State)
	}
	for _, h := range r.Holds {
		fmt.Fprintf(&b, "%s %s %v;", h.Code, h.Holder, h.Until)
	}
	for _, al := range r.Alarms {
		b.WriteString(al.Code + ";")
	}
	fmt.Fprintf(&b, "%s %v", r.Holder, r.HookSeconds)
	if x := r.Action; x != nil {
		fmt.Fprintf(&b, "%d %s", x.Generation, x.Phase)
	}
	if d := r.Ordered; d != nil {
		fmt.Fprintf(&b, "%d %t", d.Generation, d.Done)
	}
	return b.String()
}

// holds returns the agent's blocks that users or hooks have caused. They also hold
// the controller's stops.
func (a *Agent) holds(now time.Time) []idle.Block {
	out := []idle.Block{}
	until := func(t time.Time) *time.Time { return &t }
	for _, l := range a.state.Leases[:min(len(a.state.Leases), 60)] {
		out = append(out, idle.Block{Code: idle.LeaseHeld, Holder: l.Holder, Until: until(l.ExpiresAt), Sentence: cut(fmt.Sprintf("%s holds a lease: %s", l.Holder, l.Reason))})
	}
	if t := a.state.SnoozedUntil; t.After(now) {
		out = append(out, idle.Block{Code: idle.InSnoozePeriod, Until: until(t), Sentence: "Snoozed on the machine by " + a.state.SnoozedBy + "."})
	}
	if v := a.state.Vetoes; v.Until.After(now) {
		out = append(out, idle.Block{Code: idle.HookVeto, Until: until(v.Until), Sentence: "The pre-stop hook asked to " + v.Kind + "."})
	}
	if h := a.state.Halted; h != nil {
		b := h.Block(haltedHere)
		b.Sentence = cut(b.Sentence)
		out = append(out, b)
	}
	return out
}

// holder returns who decides about this machine: the agent, the controller, or
// unknown. With a server, its record determines that. While the server cannot be
// reached, its last answer applies. An agent that has never got an answer does not
// act.
func (a *Agent) holder() string {
	own, s := a.config.PauseHolder, a.state.Server
	switch {
	case a.o.Reporter == nil || own != holderAgent:
		return own
	case s == nil:
		return "unknown"
	case s.WorkerID == "":
		return own
	}
	return s.Holder
}

// serverLink returns the state of the server connection for display; nil
// without a server.
func (a *Agent) serverLink() *agentctl.ServerLink {
	if a.o.Reporter == nil {
		return nil
	}
	p := &a.server
	l := &agentctl.ServerLink{Holder: a.holder(), ReportedAt: timeOrNil(p.sentAt)}
	if s := a.state.Server; s != nil {
		l.WorkerID = s.WorkerID
	}
	if h := a.state.FleetHalt; h != nil {
		l.Halted, l.Halt = true, h.Sentence(haltedHere)
	}
	if p.failures > 0 {
		l.Error = p.errored
	}
	return l
}

// holderAgent is the value of holder if the agent decides.
const holderAgent = "agent"

// declare announces the intent of at to the server and asks for permission, so that
// the intent is in the server's record before anything happens. If the server cannot
// be reached, an idle action is held, because the record may contain a halt or a
// snooze. A deadline and a completion proceed without permission.
func (a *Agent) declare(ctx context.Context, at *attempt) error {
	var r control.AgentReport
	needed := false
	if err := a.ask(ctx, func() {
		s := a.state.Server
		needed = a.o.Reporter != nil && s != nil && s.WorkerID != ""
		r = a.reportNow(a.now())
		if at.out.Action == actionTerminate {
			return // the record has no intent for such an action, but it may contain a halt
		}
		r.Action = &control.AgentAction{Generation: at.out.Generation, Action: at.out.Action, Reason: at.out.Reason, Phase: phaseIntent}
	}); err != nil || !needed {
		return err
	}
	var ans control.AgentAnswer
	var err error
	for try := range declareTries {
		if try > 0 {
			if err := delay.For(ctx, reportRetry); err != nil {
				return err
			}
		}
		// The report needs a new time and sequence number for each attempt.
		if err := a.ask(ctx, func() { r.At = a.now(); a.server.sequence++; r.Sequence = a.server.sequence }); err != nil {
			return err
		}
		tctx, cancel := context.WithTimeout(ctx, reportLimit)
		ans, err = a.o.Reporter.Report(tctx, r)
		cancel()
		if err == nil {
			break
		}
	}
	var refused error
	if aerr := a.ask(ctx, func() {
		a.heard(r, ans, err)
		if err == nil && ans.Refused != "" {
			a.server.refused, a.server.until = ans.Refused, a.now().Add(refusedHolds)
			refused = errCancelled{"the server refuses it: " + ans.Refused}
		}
	}); aerr != nil {
		return aerr
	}
	switch {
	case refused != nil:
		return refused
	case err != nil && !at.forced:
		return fmt.Errorf("cannot announce the action to the server first: %w", err)
	}
	return nil
}

// obey carries out an order of the server: the hook once, then a check of all signals
// at each request until the order is withdrawn.
func (a *Agent) obey(o *control.AgentOrder) {
	p := &a.server
	switch {
	case o == nil:
		if p.order != nil && p.done != nil && p.done.Done {
			a.unsay() // the stop was canceled
			a.soon(a.now())
		}
		p.order = nil
	case o.Sent:
		// The server has sent the stop, so there is nothing to do or undo.
	case p.order != nil && p.order.Generation == o.Generation:
		if p.looking || p.done == nil || p.done.Generation != o.Generation || !p.done.Done {
			return
		}
		p.looking = true
		a.beside(2*orderedSpace, func(ctx context.Context) func() {
			_ = delay.For(ctx, orderedSpace)
			return func() {
				a.startRound(a.ctx, false, func() {
					p.looking, p.force = false, true
					a.report()
				})
			}
		})
	case a.halted() && !o.Forced:
		p.order, p.done, p.force = o, &control.AgentDone{Generation: o.Generation, Done: true, Answer: "veto"}, true
	case a.acting == nil && !a.hooking(): // otherwise wait for the server's next request
		p.order, p.done = o, &control.AgentDone{Generation: o.Generation}
		a.makeReady(*o)
	}
}

// makeReady prepares a stop that the controller will send: it runs the hook, reads
// all signals again and reports them.
func (a *Agent) makeReady(o control.AgentOrder) {
	a.state.Generation++
	out := &agentctl.Outcome{Generation: a.state.Generation, Action: o.Action, Reason: o.Reason, Phase: phaseHook, StartedAt: a.now(), Detail: "requested by the server"}
	a.state.Last = out
	ctx, cancel := context.WithCancel(a.ctx)
	ctx, span := a.span(ctx, "agent.order")
	span.SetAttributes(attribute.String("lull.action", o.Action), attribute.String("lull.reason", o.Reason))
	at := &attempt{out: out, forced: o.Forced, cancel: cancel, span: span}
	a.acting = at
	a.record(agentctl.Entry{Kind: "action", Sentence: fmt.Sprintf("The server is about to %s this machine because of %s.", o.Action, o.Reason), Outcome: copyOf(out)})
	a.save(nil)
	a.tasks.Go(func() {
		defer cancel()
		defer span.End()
		err := a.runHook(ctx, at)
		if err == nil {
			a.preflight(ctx, at)
			a.announce(ctx, at)
			err = a.look1(ctx)
		}
		a.post(func() { a.madeReady(at, o, err) })
	})
}

func (a *Agent) madeReady(at *attempt, o control.AgentOrder, err error) {
	p := &a.server
	d := &control.AgentDone{Generation: o.Generation, Done: true, Answer: "proceed"}
	if h := at.out.Hook; h != nil {
		d.ExitCode, d.TimedOut, d.Answer, d.Error = h.ExitCode, h.TimedOut, h.Answer, cut(h.Error)
	}
	if at.out.EndedAt == nil {
		phase, detail := phaseDone, "ready for the stop that the server sends"
		if err != nil {
			phase, detail = phaseCancelled, err.Error()
		}
		a.finish(phase, detail)
	} else if p.order != nil {
		d.Answer = "veto" // a halt or a resume arrived meanwhile
	}
	p.done, p.force = d, true
	a.report()
}
