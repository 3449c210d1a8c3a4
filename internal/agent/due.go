package agent

import (
	"context"
	"fmt"
	"slices"
	"time"

	"lull/internal/core/idle"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/tags"
)

// due is a TTL or a completion that is set. It takes effect whether or not the
// machine is in use.
type due struct {
	reason, action, sentence string
	id                       string    // the same for the same deadline or completion
	at                       time.Time // earliest time of the action
}

// dues returns the TTL and the completion, if set. Nothing delays a TTL. A manual
// snooze and leases delay a completion, even if they began after it.
func (a *Agent) dues() (out []due) {
	if t := a.config.TTLDeadline; !t.IsZero() {
		out = append(out, due{reasonTTL, a.config.TTLAction, "This machine expires at " + t.Format(time.RFC3339) + ".", t.Format(time.RFC3339Nano), t})
	}
	if done := a.state.Completed; done != nil && a.config.OnComplete != "none" {
		out = append(out, due{reasonComplete, a.config.OnComplete, fmt.Sprintf("The work on this machine was completed (%s).", done.Status),
			"", later(done.At, a.heldUntil())})
	}
	return out
}

// heldUntil returns the latest end of the manual snooze and the leases. It may
// be in the past, and is zero if there are none.
func (a *Agent) heldUntil() time.Time {
	end := a.state.SnoozedUntil
	for _, l := range a.state.Leases {
		end = later(end, l.ExpiresAt)
	}
	return end
}

// halted reports whether automatic actions are halted.
func (a *Agent) halted() bool {
	return a.state.Halted != nil || a.state.FleetHalt != nil
}

// actsAt returns when d acts: once its warning has been out for warn-before, and not
// within boot-grace.
func (a *Agent) actsAt(now time.Time, d due) time.Time {
	sent := later(now, d.at.Add(-a.config.WarnBefore))
	if x := a.state.Warned[d.reason]; x != nil && x.means(d) {
		sent = x.Sent
	}
	return later(d.at, sent.Add(a.config.WarnBefore), a.graceEnd())
}

// overdue warns of a TTL or a completion and, when due, starts its action. It reports
// whether it started one.
func (a *Agent) overdue(ctx context.Context, now time.Time) bool {
	if a.halted() || now.Before(a.retryAt()) || now.Before(a.server.until) {
		return false
	}
	for _, d := range a.dues() {
		at := a.actsAt(now, d)
		if x := a.state.Warned[d.reason]; x == nil || !x.means(d) {
			if warnAt := d.at.Add(-a.config.WarnBefore); now.Before(warnAt) {
				a.soon(warnAt)
				continue
			}
			a.warn(ctx, d.reason, d.id, Warning{Reason: d.reason, Action: d.action, At: at, Sentence: d.sentence})
		}
		if now.Before(at) {
			a.soon(at)
			continue
		}
		a.attempt(ctx, d.action, d.reason, a.inUse())
		return true
	}
	return false
}

// upcoming returns the automatic actions that will happen if nothing changes, soonest
// first. v is the current verdict.
func (a *Agent) upcoming(now time.Time, v idle.Verdict) []agentctl.Upcoming {
	out := []agentctl.Upcoming{}
	if at := a.acting; at != nil && (at.sent || at.out.Reason == reasonTTL || !a.heldUntil().After(now)) {
		return append(out, agentctl.Upcoming{Reason: at.out.Reason, Action: at.out.Action, At: now})
	}
	var halt time.Time // end of a halt, until which no warning is sent
	for _, h := range []*idle.HaltedBy{a.state.Halted, a.state.FleetHalt} {
		switch {
		case h == nil:
		case h.Until == nil:
			return out
		default:
			halt = later(halt, h.Until.Add(a.config.WarnBefore))
		}
	}
	for _, d := range a.dues() {
		at := later(a.actsAt(now, d), halt, a.retryAt(), a.server.until)
		warn := later(now, at.Add(-a.config.WarnBefore))
		if x := a.state.Warned[d.reason]; x != nil && x.means(d) {
			warn = x.Sent
		}
		out = append(out, agentctl.Upcoming{Reason: d.reason, Action: d.action, At: at, WarnAt: warn})
	}
	if t := a.serverTTL(); t != nil {
		out = append(out, agentctl.Upcoming{Reason: reasonTTL, Action: a.state.Server.TTLAction, At: later(*t, now)})
	}
	if v.Eligible {
		out = append(out, agentctl.Upcoming{Reason: reasonIdle, Action: v.Action, At: now})
	} else if t := v.TargetPauseAt; t != nil {
		out = append(out, agentctl.Upcoming{Reason: reasonIdle, Action: v.Action, At: *t})
	}
	slices.SortStableFunc(out, func(x, y agentctl.Upcoming) int { return x.At.Compare(y.At) })
	return out
}

// serverTTL returns the deadline in the server's record of this machine; nil if there
// is none or the agent's own configuration has the same.
func (a *Agent) serverTTL() *time.Time {
	s := a.state.Server
	if s == nil || s.TTLDeadline == nil || s.TTLDeadline.Equal(a.config.TTLDeadline) {
		return nil
	}
	return s.TTLDeadline
}

// extension is a TTL that a user has moved. It applies while the configuration still
// has the deadline From: a deadline that is set later overrides it.
type extension struct {
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
}

// extend returns the deadline after a user's extension. said is the deadline in the
// sources; readable means that all sources could be read.
func (a *Agent) extend(said time.Time, readable bool) time.Time {
	e := a.state.Extended
	switch {
	case e == nil:
	case said.Equal(e.From):
		return e.To
	case readable && !said.Equal(e.To):
		a.state.Extended = nil
	}
	return said
}

// maxExtend is the maximum length of one extension of a TTL.
const maxExtend = 30 * 24 * time.Hour

// ExtendTTL implements agentctl.Agent. If the deadline came from a tag, the tag is
// changed first, because a server reads it too.
func (a *Agent) ExtendTTL(ctx context.Context, r agentctl.ExtendRequest) (agentctl.Status, error) {
	by := agentctl.Caller(ctx)
	if d := time.Duration(r.For); d <= 0 || d > maxExtend {
		return agentctl.Status{}, bad("cannot extend the TTL by %s: want more than 0 and at most 30 days", idle.Human(d))
	}
	var from, to time.Time
	var tagged bool
	var no error
	may := func() error {
		switch at := a.acting; {
		case at != nil && at.sent:
			return refused("cannot extend the TTL: the %s is already in progress", at.out.Action)
		case a.state.Server != nil && a.state.Server.TTLDeadline != nil && !a.state.Server.TTLFromTag:
			return refused("cannot extend the TTL here: it is set at the server. Extend it with: lull worker ttl %s --for %s", a.state.Server.WorkerID, idle.Human(time.Duration(r.For)))
		case a.config.TTLDeadline.IsZero():
			return refused("cannot extend the TTL: this machine has none")
		}
		return nil
	}
	if err := a.ask(ctx, func() {
		if no = may(); no != nil {
			return
		}
		from = a.config.TTLDeadline
		to = later(from, a.now()).Add(time.Duration(r.For)).UTC().Truncate(time.Second)
		_, local := a.config.local.Settings.Get("ttl-deadline")
		tagged = a.o.Cloud != nil && !local
	}); err != nil || no != nil {
		return agentctl.Status{}, cmpErr(err, no)
	}
	if tagged {
		wctx, cancel := context.WithTimeout(ctx, tagLimit)
		err := a.o.Cloud.WriteTags(wctx, tags.Settings{TTLDeadline: &to}.Encode(a.o.Prefix))
		cancel()
		if err != nil {
			return agentctl.Status{}, fmt.Errorf("cannot extend the TTL: cannot write the tag %sttl-deadline, which a server acts on: %w", a.o.Prefix, err)
		}
	}
	err := a.durable(ctx, func() error {
		if err := may(); err != nil {
			return err
		}
		if e := a.state.Extended; e != nil && e.To.Equal(from) {
			from = e.From // the sources may still have this value
		}
		a.state.Extended = &extension{From: from, To: to}
		a.config.TTLDeadline = to
		a.record(agentctl.Entry{Kind: "ttl", By: by, Sentence: "The TTL was extended until " + to.Format(time.RFC3339) + "."})
		a.nextAt = a.now()
		return nil
	})
	if err != nil {
		return agentctl.Status{}, err
	}
	return a.Status(ctx)
}

func cmpErr(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// undoCompletion withdraws a completion whose action has not been sent. The
// completion file as it is now does not signal a completion again.
func (a *Agent) undoCompletion(ctx context.Context, by string) (agentctl.Status, error) {
	var path string
	if err := a.ask(ctx, func() { path = a.config.CompletionFile }); err != nil {
		return agentctl.Status{}, err
	}
	written, _ := a.o.Disk.Completed(path) // an untrusted file has no effect, so it needs no undoing
	err := a.durable(ctx, func() error {
		at := a.acting
		switch {
		case a.state.Completed == nil:
			return refused("cannot undo: no completion is pending")
		case at != nil && at.out.Reason == reasonComplete && at.sent:
			return refused("cannot undo: the %s is already in progress", at.out.Action)
		}
		a.state.Completed = nil
		if !written.IsZero() {
			a.state.Obeyed = written
		}
		a.record(agentctl.Entry{Kind: "completion", By: by, Sentence: "The completion was withdrawn."})
		a.nextAt = a.now()
		return nil
	})
	if err != nil {
		return agentctl.Status{}, err
	}
	return a.Status(ctx)
}
