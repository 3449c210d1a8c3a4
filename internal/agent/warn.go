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
	"lull/internal/protocol/agentctl"
)

// Warning is the message to users before an action.
type Warning struct {
	Reason   string    `json:"reason"` // idle_timeout, ttl, completion
	Action   string    `json:"action"`
	At       time.Time `json:"at"` // the earliest time of the action
	Sentence string    `json:"sentence"`
	URL      string    `json:"-"` // URL of the webhook; empty if there is none
}

// Text returns the warning for a terminal.
func (w Warning) Text() string {
	what := map[string]string{"stop": "stopped", "hibernate": "hibernated", "terminate": "terminated (its disks may be deleted)"}[w.Action]
	if what == "" {
		what = "ended"
	}
	s := fmt.Sprintf("%s It will be %s at %s.", w.Sentence, what, w.At.Format("15:04:05 MST"))
	switch w.Reason {
	case reasonIdle:
		s += "\nTo keep it: press a key in your session, or run: lull agent snooze 2h"
	case reasonTTL:
		s += "\nTo keep it: lull agent ttl extend 2h (a snooze does not prevent it)"
	case reasonComplete:
		s += "\nTo keep it: lull agent snooze 2h, or permanently: lull agent complete --undo"
	}
	return s
}

// Withdrawal is the message that a warning no longer applies. With a zero Warning,
// only the warning file is updated.
type Withdrawal struct {
	Warning Warning   // the warning that no longer applies
	Why     string    // completes a sentence, such as "snoozed until ..."
	Left    []Warning // warnings that still apply, soonest first
}

// Text returns the withdrawal for a terminal.
func (w Withdrawal) Text() string {
	return fmt.Sprintf("The %s announced for %s is canceled: %s.", w.Warning.Action, w.Warning.At.Format("15:04:05 MST"), w.Why)
}

// announced is a pending warning.
type announced struct {
	Warning
	ID   string    `json:"id,omitempty"` // ID of the due, or of the server's warning
	Sent time.Time `json:"sent"`
}

// serverWarning is the key of the warning that the server requested.
const serverWarning = "server"

// means reports whether the warning still applies to d. It does not if d was moved to
// later than announced.
func (x *announced) means(d due) bool {
	return x.ID == d.id && x.Action == d.action && !d.at.After(x.At)
}

// warn sends a warning outside the loop, and records it under key in place of an
// earlier one. ctx has the span of the decision.
func (a *Agent) warn(ctx context.Context, key, id string, w Warning) {
	_, s := a.span(ctx, "agent.warning")
	s.SetAttributes(attribute.String("lull.reason", w.Reason), attribute.String("lull.action", w.Action))
	a.warning = s.SpanContext()
	a.counters.Warnings++
	if a.state.Warned == nil {
		a.state.Warned = map[string]*announced{}
	}
	a.state.Warned[key] = &announced{Warning: w, ID: id, Sent: a.now()}
	a.record(agentctl.Entry{Kind: "warning", Sentence: w.Sentence + " " + w.Action + " from " + w.At.Format(time.RFC3339) + "."})
	a.log.Info("warning", "reason", w.Reason, "action", w.Action, "at", w.At)
	a.save(nil)
	w.URL = a.config.NotifyURL
	a.deliver(func(ctx context.Context) error {
		err := a.o.Warner.Warn(ctx, w)
		failedWith(s, err)
		return err
	}, func() { s.End() })
}

// deliver runs send outside the loop, after the previous delivery has ended, and then
// calls done in the loop.
func (a *Agent) deliver(send func(context.Context) error, done func()) {
	if a.o.Warner == nil {
		done()
		return
	}
	before := a.delivered
	delivered := make(chan struct{})
	a.delivered = delivered
	a.beside(2*warnLimit, func(ctx context.Context) func() {
		defer close(delivered)
		if before != nil {
			select {
			case <-before:
			case <-ctx.Done():
			}
		}
		ctx, cancel := context.WithTimeout(ctx, warnLimit)
		defer cancel()
		err := send(ctx)
		done()
		return func() {
			a.alarmIf(err != nil, "warning_undelivered", fmt.Sprintf("A warning did not reach all users: %v.", err))
			a.save(nil) // stores when lull itself wrote to terminals
		}
	})
}

// review withdraws the warnings that no longer apply.
func (a *Agent) review(now time.Time) {
	if a.acting != nil {
		return
	}
	for _, key := range slices.Sorted(maps.Keys(a.state.Warned)) {
		x := a.state.Warned[key]
		if why := a.lifted(now, key, x); why != "" {
			a.withdraw(key, why)
		}
	}
}

// lifted returns why what x announced will not happen; empty if it still will.
func (a *Agent) lifted(now time.Time, key string, x *announced) string {
	switch {
	case key == serverWarning:
		return "" // the server will withdraw it itself
	case a.halted():
		return "automatic actions are halted"
	case key == reasonIdle:
		return a.liftedIdle(now, x)
	}
	for _, d := range a.dues() {
		switch {
		case d.reason != key:
		case !d.at.After(x.At):
			return "" // users are warned of the other action separately
		case key == reasonTTL:
			return "the TTL was moved to " + d.at.Format(time.RFC3339)
		default:
			return "held until " + d.at.Format(time.RFC3339) + " by a snooze or a lease"
		}
	}
	if key == reasonTTL {
		return "the TTL was removed"
	}
	return "the completion was withdrawn"
}

// liftedIdle is lifted for the warning of an idle action. Until the announced time
// has passed, a verdict that is unknown for a moment does not withdraw the warning.
func (a *Agent) liftedIdle(now time.Time, x *announced) string {
	v := a.machine.verdict
	grace := x.At.Add(max(a.config.policy().WarnsBefore(), 2*a.config.CheckInterval))
	switch {
	case a.machine.activity.After(x.Sent) && a.machine.activity.Equal(a.started):
		return "the agent was restarted, and the idle clock starts again"
	case a.machine.activity.After(x.Sent) && a.state.ResumedAt.Equal(a.machine.activity):
		return "the machine was resumed, and the idle clock starts again"
	case a.machine.activity.After(x.Sent):
		return "the machine is in use again"
	case v.Eligible || v.TargetPauseAt != nil && !v.TargetPauseAt.After(grace):
		return ""
	case v.TargetPauseAt == nil && now.Before(grace) && !slices.ContainsFunc(v.Blocks, func(b idle.Block) bool { return b.Until == nil && b.Code != idle.SignalUnknown }):
		return ""
	}
	for _, b := range v.Blocks {
		if b.Code != idle.WarningPending && b.Code != idle.NotIdleYet && b.Code != idle.RecentActivity {
			return strings.TrimSuffix(b.Sentence, ".")
		}
	}
	return "it is no longer idle"
}

// withdraw withdraws the warning under key wherever it was delivered. why is for
// users.
func (a *Agent) withdraw(key, why string) {
	x := a.state.Warned[key]
	if x == nil {
		return
	}
	delete(a.state.Warned, key)
	if key == reasonIdle {
		a.state.WarnedAt = time.Time{} // the next stop needs a warning of its own
	}
	out := Withdrawal{Warning: x.Warning, Why: why, Left: a.warnings()}
	out.Warning.URL = a.config.NotifyURL
	a.record(agentctl.Entry{Kind: "withdrawal", Sentence: fmt.Sprintf("The %s announced for %s is canceled: %s.", x.Action, x.At.Format(time.RFC3339), why)})
	a.log.Info("warning withdrawn", "reason", x.Reason, "action", x.Action, "why", why)
	a.save(nil)
	a.deliver(func(ctx context.Context) error { return a.o.Warner.Withdraw(ctx, out) }, func() {})
}

// warnings returns the pending warnings, soonest first.
func (a *Agent) warnings() (out []Warning) {
	for _, x := range a.state.Warned {
		out = append(out, x.Warning)
	}
	slices.SortFunc(out, func(x, y Warning) int { return x.At.Compare(y.At) })
	return out
}

// clearWarnings updates the warning file without notifying users.
func (a *Agent) clearWarnings() {
	left := a.warnings()
	a.deliver(func(ctx context.Context) error { return a.o.Warner.Withdraw(ctx, Withdrawal{Left: left}) }, func() {})
}
