package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"lull/internal/lib/delay"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/tags"
)

// Actions on the machine.
const (
	actionStop      = "stop"
	actionHibernate = "hibernate"
	actionTerminate = "terminate"
)

// Phases of an action, in order. The last three end it.
const (
	phaseIntent    = "intent"
	phaseHook      = "hook"
	phaseSettling  = "settling"
	phaseFence     = "fence"
	phaseCalling   = "calling"
	phaseAccepted  = "accepted"
	phaseDone      = "done"
	phaseCancelled = "cancelled"
	phaseFailed    = "failed"
)

// attempt is the action in progress. Only its own goroutine advances it, in steps
// that run in the loop.
type attempt struct {
	out    *agentctl.Outcome
	forced bool // a TTL or a completion, which use does not cancel
	sent   bool // the call was sent and cannot be canceled
	// cannotHibernate means that the instance was not launched for hibernation and is
	// stopped instead. It is set only before the action is announced.
	cannotHibernate bool
	announced       string // the action that the state tags announce
	cancel          context.CancelFunc
	span            trace.Span
}

// errCancelled ends an attempt that is no longer wanted. why is the reason.
type errCancelled struct{ why string }

func (e errCancelled) Error() string { return e.why }

// attempt starts an action. Its intent is durable before anything else happens.
func (a *Agent) attempt(ctx context.Context, action, reason string, inUse []string) {
	now := a.now()
	a.state.Generation++
	out := &agentctl.Outcome{Generation: a.state.Generation, Action: action, Reason: reason,
		Phase: phaseIntent, StartedAt: now, InUse: inUse}
	failures, hook := 0, (*agentctl.Hook)(nil)
	if last := a.state.Last; last != nil && last.Reason == reason && last.EndedAt != nil {
		failures = a.failures
		again := last.Phase == phaseFailed || last.Phase == phaseCancelled && now.Sub(*last.EndedAt) < hookHolds
		if again && a.state.Prepared != nil && last.Hook != nil && last.Hook.Answer == "proceed" && a.machine.activity.Before(last.StartedAt) {
			hook = last.Hook // a retry of the same stop does not run the hook again
			a.state.Prepared.Generation = out.Generation
		}
	}
	out.Hook = hook
	a.state.Last = out
	ctx, cancel := context.WithCancel(trace.ContextWithSpan(a.ctx, trace.SpanFromContext(ctx)))
	ctx, span := a.span(ctx, "agent.action", linked(a.warning)...)
	span.SetAttributes(attribute.String("lull.reason", reason), attribute.Int64("lull.generation", int64(out.Generation)))
	at := &attempt{out: out, forced: reason != reasonIdle, cancel: cancel, span: span}
	a.acting = at
	a.failures = failures
	a.counters.Actions++
	a.record(agentctl.Entry{Kind: "action", Sentence: fmt.Sprintf("Intent: %s because of %s.", action, reason), Outcome: copyOf(out)})
	a.log.Info("action", "action", action, "reason", reason, "generation", out.Generation)
	a.tasks.Go(func() {
		defer cancel()
		a.carryOut(ctx, at, hook != nil)
	})
}

func copyOf(o *agentctl.Outcome) *agentctl.Outcome {
	if o == nil {
		return nil
	}
	c := *o
	return &c
}

// carryOut performs the agent's stop in fenced steps: it records the intent, also
// with the server if there is one; runs the hook; asks the server again, because a
// hook may take long; reads every signal again; makes the call; and observes the
// effect.
func (a *Agent) carryOut(ctx context.Context, at *attempt, hookRan bool) {
	err := a.durable(ctx, func() error { return nil })
	if err != nil {
		err = fmt.Errorf("cannot record the intent: %w", err)
	}
	for _, step := range []struct {
		name string
		do   func(context.Context, *attempt) error
	}{{"declare", a.declare}, {"hook", a.runHook}, {"fence", a.fence}, {"call", a.call}, {"observe", a.observe}} {
		if step.name == "hook" && hookRan {
			continue
		}
		if err == nil {
			err = a.within(ctx, step.name, func(ctx context.Context) error { return step.do(ctx, at) })
		}
	}
	if a.ctx.Err() != nil {
		at.span.End()
		return // the machine or the agent is going down; the next start concludes the action
	}
	a.post(func() {
		if at.out.EndedAt != nil {
			return // concludeDown has ended it after a resume
		}
		if _, ok := errors.AsType[errCancelled](err); ok {
			a.counters.Cancelled++
			a.finish(phaseCancelled, err.Error())
		} else if err != nil {
			a.failures++
			a.counters.Failed++
			a.finish(phaseFailed, err.Error())
			a.alarm("action_failed", fmt.Sprintf("The machine could not be told to %s: %v.", at.out.Action, err))
		} else {
			a.finish(phaseDone, at.out.Detail)
		}
		a.unsay()
		a.nextAt = a.now()
	})
}

// unsay removes the announcement of an action that did not happen from the state
// tags.
func (a *Agent) unsay() {
	if a.o.Cloud == nil {
		return
	}
	if w := &a.tagged; w.have.Action == tags.ActionStopping || w.have.Action == tags.ActionHibernating {
		w.ended = tags.ActionNone
	}
	a.tagged.known = false
	a.tellTags(a.now())
}

// step sets the phase of at. It does so in the agent's loop.
func (a *Agent) step(ctx context.Context, at *attempt, phase string) error {
	return a.ask(ctx, func() { at.out.Phase = phase })
}

// finish ends the action in progress with its final phase.
func (a *Agent) finish(phase, detail string) {
	now := a.now()
	out := a.state.Last
	out.Phase, out.Detail, out.EndedAt = phase, detail, &now
	if at := a.acting; at != nil {
		at.cancel()
		at.span.SetAttributes(attribute.String("lull.action", out.Action), attribute.String("lull.outcome", phase), attribute.String("lull.why", detail))
		at.span.End()
		a.acting = nil
	}
	if phase != phaseFailed {
		a.failures = 0
		a.alarmIf(false, "action_failed", "")
	}
	a.record(agentctl.Entry{Kind: "action", Sentence: fmt.Sprintf("%s %s: %s.", out.Action, phase, detail), Outcome: copyOf(out)})
	a.log.Info("action ended", "action", out.Action, "phase", phase, "detail", detail)
	a.save(nil)
}

// retryAt returns when a failed action may be retried: after five minutes, then
// after twice as long each time, at most an hour.
func (a *Agent) retryAt() time.Time {
	last := a.state.Last
	if last == nil || last.Phase != phaseFailed || last.EndedAt == nil {
		return time.Time{}
	}
	return last.EndedAt.Add(min(retryAfter<<min(max(a.failures-1, 0), 6), time.Hour))
}

// Exit codes with which a pre-stop hook holds the action. Any other code, even of a
// failure, lets it proceed: the hook is there to clean up, not to give permission.
const (
	HookVeto  = 100 // refuse: wait for another idle timeout
	HookDefer = 101 // ask again in ten minutes
)

// hookHolds is how long the hook's work stays valid after its stop was canceled for a
// reason other than use. A retry within that time does not run the hook again.
const hookHolds = 15 * time.Minute

// vetoBound is the maximum time for which hooks may hold one stop in total.
const vetoBound = 4 * time.Hour

// hookAllowed reports whether the source of a hook's setting may set hooks.
func (a *Agent) hookAllowed(setting string) bool {
	return a.config.hookWhere[setting] == sourceFile || a.config.local.AllowTagHooks
}

// runHook runs the pre-stop hook and obeys its answer. For a TTL or a completion the
// hook runs too, but its answer is ignored.
func (a *Agent) runHook(ctx context.Context, at *attempt) error {
	var spec HookSpec
	var c Config
	err := a.ask(ctx, func() {
		c = a.config.Config
		if c.PreStop == "" || !a.hookAllowed("pre-stop") || a.o.Hooks == nil {
			return
		}
		spec = HookSpec{Command: c.PreStop, User: c.PreStopUser, Timeout: c.PreStopTimeout,
			Env: []string{"LULL_ACTION=" + at.out.Action, "LULL_REASON=" + at.out.Reason}}
		at.out.Phase = phaseHook
	})
	if err != nil || spec.Command == "" {
		return err
	}
	// Durable before the hook runs: even if this agent dies, post-cancel must run.
	if err := a.durable(ctx, func() error {
		a.busy[jobPreStop] = true
		a.state.Prepared = &prepared{Generation: at.out.Generation, Action: at.out.Action, Reason: at.out.Reason, At: a.now()}
		return nil
	}); err != nil {
		a.post(func() { delete(a.busy, jobPreStop) })
		return fmt.Errorf("cannot record that the pre-stop hook runs: %w", err)
	}
	result := a.o.Hooks.Run(ctx, spec)
	result.Command = tags.Program(result.Command)
	var answer error
	// The result must be recorded even if the stop has been canceled, because
	// post-cancel waits for it.
	err = a.ask(context.WithoutCancel(ctx), func() {
		delete(a.busy, jobPreStop)
		a.soon(a.now())
		at.out.Hook = &result
		answer = a.answerOf(at, &result, c)
		a.hookEnded("pre-stop", &result)
	})
	if err = errors.Join(err, answer); err != nil {
		return err
	}
	// The hook's own work must not count as use. So the samples start again, and the
	// readings cover a complete interval without the hook.
	if err := a.ask(ctx, func() { at.out.Phase = phaseSettling; a.o.Cheap.Reset(); a.machine.restarts = true }); err != nil {
		return err
	}
	if err := a.look1(ctx); err != nil {
		return err
	}
	if err := delay.For(ctx, c.CheckInterval); err != nil {
		return err
	}
	return a.look1(ctx)
}

// answerOf returns nil if the hook's exit code permits the action. Otherwise it
// records the veto and returns an errCancelled.
func (a *Agent) answerOf(at *attempt, h *agentctl.Hook, c Config) error {
	h.Answer = "proceed"
	var wait time.Duration
	switch {
	case h.TimedOut:
	case h.ExitCode == HookVeto:
		h.Answer, wait = "veto", c.IdleTimeout
	case h.ExitCode == HookDefer:
		h.Answer, wait = "defer", 10*time.Minute
	}
	if wait == 0 || at.forced {
		return nil
	}
	now := a.now()
	v := &a.state.Vetoes
	if v.Since.IsZero() || a.machine.activity.After(v.Since) {
		*v = veto{Since: now}
	}
	end := v.Since.Add(vetoBound)
	if !now.Before(end) {
		h.Answer += " overruled"
		return nil
	}
	v.Until, v.Kind = now.Add(wait), h.Answer
	if v.Until.After(end) {
		v.Until = end
	}
	return errCancelled{fmt.Sprintf("the pre-stop hook answered %s, until %s", h.Answer, v.Until.Format(time.RFC3339))}
}

// look1 makes one complete round of readings, including the slow signals.
func (a *Agent) look1(ctx context.Context) error {
	done := make(chan struct{})
	if err := a.ask(ctx, func() { a.startRound(ctx, false, func() { close(done) }) }); err != nil {
		return err
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-a.ended:
		return errors.New("cannot read the signals: the agent is shutting down")
	}
}

// fence reads the tags and every signal again, and returns an error if the action is
// no longer right. Everything that can take time comes before the last reading: the
// tags, the state tags, the disk and the server's permission. When fence returns nil,
// the readings are at most freshLimit old and the call comes next.
func (a *Agent) fence(ctx context.Context, at *attempt) error {
	if err := a.step(ctx, at, phaseFence); err != nil {
		return err
	}
	if err := a.within(ctx, "read_tags", a.reread); err != nil {
		return err
	}
	var still error
	if err := a.ask(ctx, func() { still = a.stillRight(at) }); err != nil || still != nil {
		return errors.Join(err, still)
	}
	a.preflight(ctx, at)
	a.announce(ctx, at)
	// Phase calling is durable before the call, so that the next agent knows that the
	// call may have stopped the machine.
	if err := a.durable(ctx, func() error { at.out.Phase = phaseCalling; return nil }); err != nil {
		return fmt.Errorf("cannot record the call: %w", err)
	}
	if err := a.declare(ctx, at); err != nil {
		return err
	}
	return a.within(ctx, "last_look", func(ctx context.Context) error { return a.finalCheck(ctx, at) })
}

// reread reads the configuration anew. It does not join a reading in progress, which
// may have missed the last change.
func (a *Agent) reread(ctx context.Context) error {
	for joined := true; joined; {
		read := make(chan struct{})
		if err := a.ask(ctx, func() {
			joined = len(a.config.reading) > 0
			a.refresh(func(agentctl.Reload) { close(read) })
		}); err != nil {
			return err
		}
		select {
		case <-read:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// preflight checks whether the instance can hibernate, if the action is to hibernate.
// If that is unknown, EC2's answer to the call decides.
func (a *Agent) preflight(ctx context.Context, at *attempt) {
	hibernates := false
	if a.ask(ctx, func() { hibernates = at.out.Action == actionHibernate }) != nil || !hibernates || a.o.Cloud == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, sourceLimit)
	defer cancel()
	i, err := a.o.Cloud.Describe(ctx)
	if err != nil || i.HibernationConfigured {
		return
	}
	_ = a.ask(ctx, func() { // if the agent ends, so does the action
		at.cannotHibernate = true
		at.become(actionHibernate)
	})
}

// finalCheck reads every signal and decides again. In the same turn of the loop it
// marks the call as sent, after which nothing cancels it.
func (a *Agent) finalCheck(ctx context.Context, at *attempt) error {
	for range 3 {
		if err := a.look1(ctx); err != nil {
			return err
		}
		var still error
		var fresh bool
		err := a.ask(ctx, func() {
			fresh = a.now().Sub(a.readAt()) <= freshLimit
			if still = a.stillRight(at); still == nil && at.announced != "" && at.announced != at.out.Action {
				still = errCancelled{"the action was changed at the last moment"}
			}
			at.sent = still == nil && fresh
		})
		if err = errors.Join(err, still); err != nil || fresh {
			return err
		}
	}
	return errCancelled{"reading all signals takes longer than a reading may be old"}
}

// readAt returns the time of the oldest reading of the last round.
func (a *Agent) readAt() time.Time {
	var t time.Time
	for _, r := range a.machine.readings {
		if t.IsZero() || r.At.Before(t) {
			t = r.At
		}
	}
	return t
}

// stillRight decides about the action again, on current data. It returns nil if the
// action is still right.
func (a *Agent) stillRight(at *attempt) error {
	a.watchClocks() // a machine that has just woken up counts as in use
	now := a.now()
	if a.halted() {
		return errCancelled{"automatic actions were halted"}
	}
	c := a.config.Config
	if at.forced && a.state.Warned[at.out.Reason] == nil {
		return errCancelled{"the machine was resumed, and its users are warned again"}
	}
	switch at.out.Reason {
	case reasonTTL:
		if c.TTLDeadline.IsZero() || now.Before(c.TTLDeadline) {
			return errCancelled{"the deadline was moved"}
		}
		return at.change(c.TTLAction, a.inUse())
	case reasonComplete:
		if a.state.Completed == nil || c.OnComplete == "none" {
			return errCancelled{"the completion was withdrawn"}
		}
		if end := a.heldUntil(); end.After(now) {
			return errCancelled{"held until " + end.Format(time.RFC3339) + " by a snooze or a lease"}
		}
		return at.change(c.OnComplete, a.inUse())
	}
	if a.machine.activity.After(at.out.StartedAt) {
		return errCancelled{"the machine was used meanwhile"}
	}
	d := a.judge(now, true)
	a.keepEvidence(d, now.Add(a.config.CheckInterval))
	if v := d.Verdict; !v.Eligible {
		return errCancelled{"it is no longer idle: " + v.Blocks[0].Sentence}
	}
	at.become(actionStop)
	if c.Hibernate {
		at.become(actionHibernate)
	}
	return nil
}

// become changes the action of at to wanted; if wanted is a hibernation and the
// instance cannot hibernate, to a stop.
func (at *attempt) become(wanted string) {
	if wanted == actionHibernate && at.cannotHibernate {
		wanted, at.out.Detail = actionStop, "The instance was not launched for hibernation and is stopped instead."
	}
	at.out.Action = wanted
}

// change applies a change of policy to the action. If users were warned of a stop and
// the policy now terminates, it returns an error, because users must be warned of
// that first.
func (at *attempt) change(action string, inUse []string) error {
	if action == actionTerminate && at.out.Action != actionTerminate {
		return errCancelled{"it is due for termination, but users were warned of a " + at.out.Action}
	}
	at.become(action)
	at.out.InUse = inUse
	return nil
}

// announce writes the tag that announces the action. It comes before the call,
// because there may be no time afterwards.
func (a *Agent) announce(ctx context.Context, at *attempt) {
	var want tags.State
	var form string
	if a.o.Cloud == nil || a.ask(ctx, func() {
		form = map[string]string{actionStop: tags.ActionStopping, actionHibernate: tags.ActionHibernating}[at.out.Action]
		at.announced = at.out.Action
		want = tags.State{Status: tags.StatusIdle, Since: a.machine.activity, Action: form}
		if at.forced && len(at.out.InUse) > 0 {
			want.Status, want.Since = tags.StatusActive, time.Time{}
		}
		a.tagged.writing = form != ""
	}) != nil || form == "" {
		return
	}
	wctx, cancel := context.WithTimeout(ctx, tagLimit)
	err := a.o.Cloud.WriteTags(wctx, want.Encode(a.o.Prefix))
	cancel()
	a.post(func() {
		a.tagged.writing = false
		a.alarmIf(err != nil, "tags_unwritten", fmt.Sprintf("The state tags cannot be written: %v.", err))
		if err == nil {
			a.merged(want)
		}
		if at.out.EndedAt != nil {
			a.unsay() // canceled meanwhile
		}
	})
}
