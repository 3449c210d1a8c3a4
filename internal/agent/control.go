package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/why"
	"lull/internal/protocol/agentctl"
)

var _ agentctl.Agent = (*Agent)(nil)

// maxLease is the maximum duration of a lease.
const maxLease = 24 * time.Hour

func bad(format string, args ...any) error {
	return agentctl.Refusal(agentctl.CodeBadRequest, format, args...)
}

func refused(format string, args ...any) error {
	return agentctl.Refusal(agentctl.CodeRefused, format, args...)
}

// Status implements agentctl.Agent.
func (a *Agent) Status(ctx context.Context) (s agentctl.Status, err error) {
	err = a.ask(ctx, func() { s = a.status() })
	return s, err
}

// status returns a status that shares nothing with the loop.
func (a *Agent) status() agentctl.Status {
	now := a.now()
	m := &a.machine
	s := agentctl.Status{
		Version: a.o.Version, BuildDate: a.o.BuildDate, InstanceID: a.self.Load().instanceID, Region: a.self.Load().region, BootID: a.o.BootID,
		StartedAt: a.started, BootedAt: a.booted, ResumedAt: timeOrNil(a.state.ResumedAt),
		Stage: m.stage, Stages: slices.Clone(m.stages), Readings: slices.Clone(m.readings), NotAsked: slices.Clone(m.notAsked),
		Memory: m.memory, NextTimers: m.timers, Leases: append([]idle.Lease{}, a.state.Leases...),
		Settings: slices.Clone(a.config.settings), Config: slices.Clone(a.config.report),
		WarnedAt: timeOrNil(a.state.WarnedAt), TTL: timeOrNil(a.config.TTLDeadline),
		Last: copyOf(a.state.Last), Counters: a.counters, Alarms: []agentctl.Alarm{}, Server: a.serverLink(),
	}
	d := a.judge(now, false)
	s.Policy, s.Verdict = d.Policy, d.Verdict
	if h := a.state.Halted; h != nil {
		c := *h
		s.Halted = &c
	}
	if c := a.state.Completed; c != nil {
		s.Completion = c.Status
	}
	s.Upcoming = a.upcoming(now, d.Verdict)
	s.Cloud = "none"
	if a.o.Cloud != nil {
		s.Cloud = "ec2"
	}
	if err := a.self.Load().err; err != nil {
		s.CloudError = err.Error()
	}
	for _, al := range a.alarms {
		s.Alarms = append(s.Alarms, al)
	}
	slices.SortFunc(s.Alarms, func(x, y agentctl.Alarm) int { return cmp.Compare(x.Code, y.Code) })
	return s
}

func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// Why implements agentctl.Agent.
func (a *Agent) Why(ctx context.Context, at time.Time) (w agentctl.Why, err error) {
	if !at.IsZero() {
		return a.whyThen(ctx, at.UTC())
	}
	var d evidence.Decision
	var s agentctl.Status
	if err := a.ask(ctx, func() { s, d = a.status(), a.judge(a.now(), false) }); err != nil {
		return w, err
	}
	about := a.about()
	about.Expiry = expiryOf(s)
	w = agentctl.Why{Account: why.Explain(about, d), Readings: s.Readings, Last: s.Last, Upcoming: s.Upcoming}
	w.Resumed = turnOf(s.ResumedAt)
	for _, u := range s.Upcoming {
		if u.Reason == reasonComplete {
			w.Add(why.Completion, u.At, "", s.Completion, u.Action)
		}
	}
	if l := s.Last; l != nil {
		w.Add(why.LastAction, l.StartedAt, "", l.Action, l.Reason, l.Phase, l.Detail)
	}
	w.Sentence = w.Answer
	return w, nil
}

// expiryOf returns the first TTL among the announced actions as an expiry; nil if
// there is none.
func expiryOf(s agentctl.Status) *why.Expiry {
	for _, u := range s.Upcoming {
		if u.Reason == reasonTTL && s.TTL != nil {
			return &why.Expiry{At: u.At, Action: u.Action, Deadline: *s.TTL, WarnAt: u.WarnAt, Warned: !u.WarnAt.After(time.Now())}
		}
	}
	return nil
}

func (a *Agent) about() why.Account {
	id := a.self.Load().instanceID
	return why.Account{Object: cmp.Or(id, why.KindAgent), Name: cmp.Or(id, "this machine"), Kind: why.KindAgent, State: "running", Prolong: "lull agent ttl extend 2h"}
}

func turnOf(t *time.Time) *evidence.Turn {
	if t == nil {
		return nil
	}
	return &evidence.Turn{At: *t, By: "the machine"}
}

// skew is how far a caller's clock may be ahead. A time at most that far in the
// future counts as now.
const skew = 5 * time.Second

// whyThen explains the state at a past time from the evidence, and adds the last
// action from the history.
func (a *Agent) whyThen(ctx context.Context, at time.Time) (w agentctl.Why, err error) {
	switch {
	case a.o.Evidence == nil:
		return w, refused("cannot explain a past time: this agent stores no evidence")
	case at.After(time.Now().Add(skew)):
		return w, bad("cannot explain %s: the time is in the future", at.Format(time.RFC3339))
	}
	var c evidence.Recall
	c.Missing, err = a.o.Evidence.Read(ctx, evidence.Query{Object: why.KindAgent, From: at, To: at}, func(r evidence.Record) error { c.Add(at, &r); return nil })
	if err != nil {
		return w, err
	}
	about := a.about()
	about.At = at
	w.Account = why.Past(about, c)
	if c.Before == nil || !c.Held(at) {
		w.State = "" // the machine may have been down
	}
	if c.Before != nil {
		w.Readings = c.Before.Evidence.Readings
		if t := c.Before.Evidence.LastResumedAt; !t.IsZero() {
			w.Resumed = turnOf(&t)
		}
	}
	w.Sentence = w.Answer
	list, err := a.o.Journal.Entries(agentctl.HistoryQuery{Until: at.Add(time.Nanosecond)})
	for _, e := range slices.Backward(list) {
		if e.Outcome != nil {
			w.Last = e.Outcome
			break
		}
	}
	return w, err
}

// Reload implements agentctl.Agent.
func (a *Agent) Reload(ctx context.Context) (r agentctl.Reload, err error) {
	done := make(chan agentctl.Reload, 1)
	if err := a.ask(ctx, func() {
		a.refresh(func(r agentctl.Reload) { a.nextAt = a.now(); done <- r })
	}); err != nil {
		return r, err
	}
	select {
	case r = <-done:
		return r, nil
	case <-ctx.Done():
		return r, context.Cause(ctx)
	case <-a.ended:
		return r, errors.New("cannot reload: the agent is shutting down")
	}
}

// Snooze implements agentctl.Agent. It is refused once the call that stops the
// machine has been sent.
func (a *Agent) Snooze(ctx context.Context, r agentctl.SnoozeRequest) (agentctl.Status, error) {
	by := agentctl.Caller(ctx)
	err := a.durable(ctx, func() error {
		now := a.now()
		until := r.Until
		switch {
		case r.For != 0 && !r.Until.IsZero():
			return bad("cannot snooze: give a duration or a time, not both")
		case r.For < 0 || time.Duration(r.For) > 30*24*time.Hour:
			return bad("cannot snooze for %s: want between 0 and 30 days", idle.Human(time.Duration(r.For)))
		case r.For > 0:
			until = now.Add(time.Duration(r.For))
		case !r.Until.IsZero() && (!r.Until.After(now) || r.Until.After(now.Add(30*24*time.Hour))):
			return bad("cannot snooze until %s: want a time in the next 30 days", r.Until.Format(time.RFC3339))
		}
		if at := a.acting; at != nil && at.sent {
			return refused("cannot snooze: the %s is already in progress", at.out.Action)
		}
		a.state.SnoozedUntil, a.state.SnoozedBy = until, by
		sentence := "Snoozed until " + until.Format(time.RFC3339) + "."
		if until.IsZero() {
			sentence = "The snooze was ended."
		}
		a.record(agentctl.Entry{Kind: "snooze", By: by, Sentence: sentence})
		a.nextAt = now
		return nil
	})
	if err != nil {
		return agentctl.Status{}, err
	}
	return a.Status(ctx)
}

// Complete implements agentctl.Agent.
func (a *Agent) Complete(ctx context.Context, r agentctl.CompleteRequest) (agentctl.Status, error) {
	by := agentctl.Caller(ctx)
	if r.Status == "" {
		r.Status = "success"
	}
	if r.Undo {
		return a.undoCompletion(ctx, by)
	}
	if len(r.Status) > 64 || len(r.Message) > 1024 {
		return agentctl.Status{}, bad("cannot complete: the status must have at most 64 bytes and the message at most 1024")
	}
	err := a.durable(ctx, func() error {
		a.completed(completion{BootID: a.o.BootID, At: a.now(), By: by, Status: r.Status, Message: r.Message})
		return nil
	})
	if err != nil {
		return agentctl.Status{}, err
	}
	return a.Status(ctx)
}

// completed records a completion. Only the first one of a boot counts.
func (a *Agent) completed(c completion) {
	if a.state.Completed != nil {
		return
	}
	a.state.Completed = &c
	sentence := fmt.Sprintf("The work was completed with status %s. %s", c.Status, c.Message)
	if a.config.OnComplete == "none" {
		sentence += " No on-complete action is set."
	}
	a.record(agentctl.Entry{Kind: "completion", By: c.By, Sentence: strings.TrimSpace(sentence)})
	a.nextAt = a.now()
}

// HoldLease implements agentctl.Agent.
func (a *Agent) HoldLease(ctx context.Context, r agentctl.LeaseRequest) (l idle.Lease, err error) {
	if r.Holder == "" {
		r.Holder = "default"
	}
	if ttl := time.Duration(r.TTL); ttl <= 0 || ttl > maxLease {
		return l, bad("cannot hold a lease for %s: want more than 0 and at most 24h", ttl)
	}
	if len(r.Holder) > 128 || len(r.Reason) > 512 {
		return l, bad("cannot hold a lease: the holder must have at most 128 bytes and the reason at most 512")
	}
	by := agentctl.Caller(ctx)
	err = a.durable(ctx, func() error {
		if at := a.acting; at != nil && at.sent {
			return refused("cannot hold a lease: the %s is already in progress", at.out.Action)
		}
		l = idle.Lease{Holder: r.Holder, Reason: r.Reason, ExpiresAt: a.now().Add(time.Duration(r.TTL))}
		i := slices.IndexFunc(a.state.Leases, func(o idle.Lease) bool { return o.Holder == r.Holder })
		switch {
		case i >= 0:
			a.state.Leases[i] = l
		case len(a.state.Leases) >= 1000:
			return refused("cannot hold a lease: the limit is 1000 leases")
		default:
			a.state.Leases = append(a.state.Leases, l)
		}
		a.record(agentctl.Entry{Kind: "lease", By: by, Sentence: fmt.Sprintf("%s holds a lease until %s. %s", l.Holder, l.ExpiresAt.Format(time.RFC3339), l.Reason)})
		a.nextAt = a.now()
		return nil
	})
	return l, err
}

// ReleaseLease implements agentctl.Agent. Only the holder's own lease is released.
func (a *Agent) ReleaseLease(ctx context.Context, holder string) error {
	return a.durable(ctx, func() error {
		i := slices.IndexFunc(a.state.Leases, func(l idle.Lease) bool { return l.Holder == holder })
		if i < 0 {
			return agentctl.Refusal(agentctl.CodeNotFound, "cannot release a lease: %q has none", holder)
		}
		a.state.Leases = slices.Delete(a.state.Leases, i, i+1)
		a.record(agentctl.Entry{Kind: "lease", By: agentctl.Caller(ctx), Sentence: holder + " released its lease."})
		a.nextAt = a.now()
		return nil
	})
}

// Leases implements agentctl.Agent.
func (a *Agent) Leases(ctx context.Context) (l []idle.Lease, err error) {
	err = a.ask(ctx, func() { l = append([]idle.Lease{}, a.state.Leases...) })
	return l, err
}

// History implements agentctl.Agent. It reads outside the loop.
func (a *Agent) History(_ context.Context, q agentctl.HistoryQuery) ([]agentctl.Entry, error) {
	list, err := a.o.Journal.Entries(q)
	if list == nil {
		list = []agentctl.Entry{}
	}
	return list, err
}

// Halt implements agentctl.Agent. It cancels an action that has not been sent.
func (a *Agent) Halt(ctx context.Context, r agentctl.HaltRequest) (agentctl.Status, error) {
	by := agentctl.Caller(ctx)
	err := a.durable(ctx, func() error {
		now := a.now()
		h := idle.HaltedBy{Since: now, By: by, Reason: r.Reason, Until: r.Until}
		if err := h.Check(now); err != nil && r.On {
			return bad("%s", err)
		}
		if !r.On {
			a.state.Halted = nil
			a.alarmIf(false, "state_unreadable", "")
			a.record(agentctl.Entry{Kind: "halt", By: by, Sentence: "The halt was ended."})
			a.nextAt = now
			return nil
		}
		a.state.Halted = &h
		a.record(agentctl.Entry{Kind: "halt", By: by, Sentence: h.Sentence(haltedHere)})
		a.haltActing()
		a.nextAt = now
		return nil
	})
	if err != nil {
		return agentctl.Status{}, err
	}
	return a.Status(ctx)
}

// record queues an entry for the journal.
func (a *Agent) record(e agentctl.Entry) {
	e.At = a.now()
	select {
	case a.lines <- e:
	default:
		a.alarm("history_unwritten", "The history cannot be written: the disk does not keep up.")
	}
}

// keep writes queued entries to the journal, outside the loop, so that a hanging disk
// blocks nothing. Entries that are queued when ctx ends are still written.
func (a *Agent) keep(ctx context.Context) {
	write := func(e agentctl.Entry) {
		err := a.o.Journal.Append(e)
		if ctx.Err() == nil {
			a.post(func() {
				a.alarmIf(err != nil, "history_unwritten", fmt.Sprintf("The history cannot be written: %v.", err))
			})
		}
	}
	for {
		select {
		case e := <-a.lines:
			write(e)
		case <-ctx.Done():
			for {
				select {
				case e := <-a.lines:
					write(e)
				default:
					return
				}
			}
		}
	}
}

// alarm raises an alarm unless it is raised already.
func (a *Agent) alarm(code, sentence string) {
	if old, ok := a.alarms[code]; ok {
		old.Sentence = sentence
		a.alarms[code] = old
		return
	}
	a.alarms[code] = agentctl.Alarm{Code: code, Sentence: sentence, Since: a.now()}
	a.log.Error("alarm", "code", code, "sentence", sentence)
	if code != "history_unwritten" {
		a.record(agentctl.Entry{Kind: "alarm", Sentence: sentence})
	}
}

// alarmIf raises an alarm if on is set, and clears it otherwise.
func (a *Agent) alarmIf(on bool, code, sentence string) {
	if on {
		a.alarm(code, sentence)
		return
	}
	delete(a.alarms, code)
}
