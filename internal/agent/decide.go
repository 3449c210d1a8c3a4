package agent

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/why"
	"lull/internal/platform/proc"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/tags"
)

// Codes of guards that only the agent has.
const (
	codeBootGrace  idle.Code = "boot_grace"
	codeConfig     idle.Code = "config_unreadable"
	codeNoPolicy   idle.Code = "no_policy"
	codeHolder     idle.Code = "pause_holder"
	codeActing     idle.Code = "action_under_way"
	reasonIdle               = "idle_timeout"
	reasonTTL                = "ttl"
	reasonComplete           = "completion"
)

// judge lets internal/core/idle judge the last round. fence is set for the final
// check before an action: it ignores that a warning is pending and that the action is
// in progress.
func (a *Agent) judge(now time.Time, fence bool) evidence.Decision {
	p := a.config.policy()
	e := idle.Evidence{
		Status: "running", Running: true,
		LastActivityAt: a.machine.activity, LastActivityBy: a.machine.activityBy, LastResumedAt: a.state.ResumedAt, CreatedAt: a.started,
		SnoozedUntil: a.state.SnoozedUntil, WarningSentAt: a.state.WarnedAt,
		Readings: a.machine.readings, Leases: a.state.Leases, Guards: a.guards(now, fence),
	}
	if fence {
		p.WarnBefore = 0
	}
	return evidence.Decide(now, p, e)
}

// keepEvidence writes a check and its verdict to the evidence. next is the time of
// the next check.
func (a *Agent) keepEvidence(d evidence.Decision, next time.Time) {
	if a.o.Evidence != nil {
		a.o.Evidence.Take(evidence.Record{At: d.Verdict.At, Object: why.KindAgent, Next: next.Round(0).UTC(), Decision: d})
	}
}

// guards returns the agent's own reasons not to act. fence is as for judge.
func (a *Agent) guards(now time.Time, fence bool) []idle.Block {
	var out []idle.Block
	add := func(code idle.Code, until time.Time, format string, args ...any) {
		b := idle.Block{Code: code, Sentence: fmt.Sprintf(format, args...)}
		if !until.IsZero() {
			b.Until = &until
		}
		out = append(out, b)
	}
	if h := a.state.Halted; h != nil {
		out = append(out, h.Block(haltedHere))
	}
	c := &a.config
	switch {
	case !c.loaded:
		add(codeConfig, time.Time{}, "The configuration has not been read yet.")
	case c.unread != "":
		add(codeConfig, time.Time{}, "The configuration cannot be read and nothing is cached: %s.", c.unread)
	case c.silent:
		add(codeNoPolicy, time.Time{}, "Neither the tags nor the local file contain settings, so the agent only watches.")
	case c.IdleTimeout == 0:
		add(codeNoPolicy, time.Time{}, "No idle-timeout is set, so the agent takes no action when the machine is idle.")
	}
	if end := a.graceEnd(); now.Before(end) {
		add(codeBootGrace, end, "The machine booted less than %s ago.", idle.Human(c.BootGrace))
	}
	switch h := a.holder(); h {
	case holderAgent:
	case "unknown":
		add(codeHolder, time.Time{}, "The server has not said yet whether the agent or the server pauses this machine. Until then the agent only reports.")
	default:
		add(codeHolder, time.Time{}, "The %s decides about this machine; the agent only reports.", h)
	}
	if h := a.state.FleetHalt; h != nil {
		out = append(out, h.Block(haltedHere))
	}
	if now.Before(a.server.until) {
		add(idle.Cooldown, a.server.until, "The server refused the action: %s.", a.server.refused)
	}
	if v := a.state.Vetoes; now.Before(v.Until) {
		add(idle.HookVeto, v.Until, "The pre-stop hook asked to %s.", v.Kind)
	}
	if end := a.retryAt(); now.Before(end) {
		add(idle.Cooldown, end, "The last attempt failed: %s.", a.state.Last.Detail)
	}
	if a.acting != nil && !fence {
		add(codeActing, time.Time{}, "A %s is in progress.", a.acting.out.Action)
	}
	if a.busy[jobPostCancel] {
		add(codeActing, time.Time{}, "The post-cancel hook is running.")
	}
	return out
}

func (a *Agent) graceEnd() time.Time { return a.booted.Add(a.config.BootGrace) }

// conclude judges the finished round and acts on the verdict: it warns, starts an
// action, updates the tags, records the check, and schedules the next one.
func (a *Agent) conclude(ctx context.Context) {
	a.watchClocks() // the machine may have slept while a signal was read
	now := a.now()
	m := &a.machine
	d := a.judge(now, false)
	m.policy, m.verdict = d.Policy, d.Verdict
	m.stage, m.stages = a.stages()
	a.traceVerdict(trace.SpanFromContext(ctx), &m.verdict)
	a.nextAt = m.verdict.NextIdleCheckAt
	if !a.nextAt.After(now) {
		a.nextAt = now.Add(a.config.CheckInterval)
	}
	a.keepEvidence(d, a.nextAt)
	if attrs := m.line.Take(d, "", slog.Int("stage", m.stage)); attrs != nil {
		a.log.LogAttrs(context.Background(), slog.LevelInfo, "decision", attrs...)
	}
	a.expireLeases(now)
	a.recordVerdict()
	a.tellTags(now)
	a.collect(now)
	a.identify()
	a.review(now)
	a.undoPrepared(now)
	if a.acting != nil || a.hooking() {
		return
	}
	if a.overdue(ctx, now) {
		return
	}
	switch {
	case m.verdict.Eligible:
		action := actionStop
		if a.config.Hibernate {
			action = actionHibernate
		}
		a.attempt(ctx, action, reasonIdle, nil)
	case m.verdict.WarnDue:
		a.state.WarnedAt = now
		at := *m.verdict.TargetPauseAt // a warning that is due always has a target
		a.warn(ctx, reasonIdle, "", Warning{Reason: reasonIdle, Action: m.policy.Action, At: at,
			Sentence: fmt.Sprintf("This machine has been idle for %s.", idle.HumanMinutes(m.verdict.IdleMinutes))})
		a.soon(at)
	}
}

// soon schedules the next check at t, unless it is due earlier.
func (a *Agent) soon(t time.Time) {
	if t.Before(a.nextAt) {
		a.nextAt = t
	}
}

func later(times ...time.Time) time.Time {
	return slices.MaxFunc(times, time.Time.Compare)
}

// inUse returns the signals that are active or unknown, for the record of a forced
// action.
func (a *Agent) inUse() []string {
	out := []string{}
	for _, r := range a.machine.readings {
		if r.State == idle.Active || r.State == idle.Unknown {
			out = append(out, strings.TrimSpace(fmt.Sprintf("%s is %s %s", r.Signal, r.State, r.Detail)))
		}
	}
	for _, l := range a.state.Leases {
		out = append(out, "lease of "+l.Holder)
	}
	return out
}

// stages returns the verdict in the three stages that why shows.
func (a *Agent) stages() (answered int, out []agentctl.Stage) {
	byUsers := []string{proc.SignalUsers, proc.SignalTerminals, proc.SignalRecent}
	stage := func(number int, name string, of func(string) bool, none string) agentctl.Stage {
		s := agentctl.Stage{Number: number, Name: name, Answer: "idle", Sentence: none}
		var active, unknown []string
		for _, r := range a.machine.readings {
			if !of(r.Signal) {
				continue
			}
			switch r.State {
			case idle.Active:
				active = append(active, strings.TrimSpace(r.Signal+" "+r.Detail))
			case idle.Unknown:
				unknown = append(unknown, r.Signal)
			}
		}
		switch {
		case len(active) > 0:
			s.Answer, s.Sentence = "not_idle", "Active: "+strings.Join(active, ", ")+"."
		case len(unknown) > 0:
			s.Answer, s.Sentence = "unknown", "Unknown: "+strings.Join(unknown, ", ")+"."
		}
		return s
	}
	one := stage(1, "user activity", func(s string) bool { return slices.Contains(byUsers, s) }, "No user is active.")
	two := stage(2, "work in the background", func(s string) bool { return !slices.Contains(byUsers, s) }, "No work is in progress.")
	if m := a.machine.memory; m != nil && m.TotalBytes > 0 {
		two.Sentence += fmt.Sprintf(" Memory in use: %d %%.", 100-100*m.AvailableBytes/m.TotalBytes)
	}
	v := a.machine.verdict
	three := agentctl.Stage{Number: 3, Name: "sustained quiet", Answer: "not_idle", Sentence: "The machine is idle."}
	if v.Eligible {
		three.Answer = "idle"
	} else if len(v.Blocks) > 0 {
		three.Sentence = v.Blocks[0].Sentence
	}
	switch {
	case one.Answer == "not_idle":
		two.Answer, three.Answer = "not_asked", "not_asked"
		if slices.ContainsFunc(a.machine.readings, func(r idle.Reading) bool {
			return r.State == idle.Active && !slices.Contains(byUsers, r.Signal)
		}) {
			two.Answer = "not_idle"
		}
		answered = 1
	case two.Answer == "not_idle":
		three.Answer = "not_asked"
		answered = 2
	default:
		answered = 3
	}
	return answered, []agentctl.Stage{one, two, three}
}

func (a *Agent) expireLeases(now time.Time) {
	n := len(a.state.Leases)
	a.state.Leases = slices.DeleteFunc(a.state.Leases, func(l idle.Lease) bool { return !l.ExpiresAt.After(now) })
	if len(a.state.Leases) != n {
		a.record(agentctl.Entry{Kind: "lease", Sentence: fmt.Sprintf("%d leases expired.", n-len(a.state.Leases))})
		a.save(nil)
	}
}

// recordVerdict writes a verdict to the history if the codes of its blocks or the
// states of its signals have changed. Changed values alone do not count.
func (a *Agent) recordVerdict() {
	m := &a.machine
	var key strings.Builder
	for _, b := range m.verdict.Blocks {
		fmt.Fprintf(&key, "%s %s;", b.Code, b.Signal+b.Holder)
	}
	for _, r := range m.readings {
		fmt.Fprintf(&key, "%s=%s;", r.Signal, r.State)
	}
	if key.String() == m.recorded {
		return
	}
	m.recorded = key.String()
	sentence := "The machine is idle."
	if len(m.verdict.Blocks) > 0 {
		sentence = m.verdict.Blocks[0].Sentence
	}
	v := m.verdict
	a.record(agentctl.Entry{Kind: "verdict", Sentence: sentence, Verdict: &v, Readings: m.readings})
}

// idleTagAfter returns how long the machine must be quiet before its tag says idle.
// If the tag followed every pause in typing, each would cost a call.
func (c Config) idleTagAfter() time.Duration {
	if c.IdleTimeout > 0 {
		return min(5*time.Minute, c.IdleTimeout/2)
	}
	return 5 * time.Minute
}

// tellTags updates the state tags if the state has changed.
func (a *Agent) tellTags(now time.Time) {
	if a.o.Cloud == nil || !a.config.loaded {
		return
	}
	want := tags.State{Status: tags.StatusActive}
	quiet := now.Sub(a.machine.activity) >= a.config.idleTagAfter()
	if quiet && !a.machine.verdict.Has(idle.SignalUnknown) {
		want = tags.State{Status: tags.StatusIdle, Since: a.machine.activity}
	}
	a.writeTags(want)
}
