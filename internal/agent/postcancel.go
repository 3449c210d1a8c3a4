package agent

import (
	"fmt"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/tags"
)

// prepared is a stop whose pre-stop hook has begun to run. It is stored across
// restarts of the agent, until the machine goes down or post-cancel has run.
type prepared struct {
	Generation uint64    `json:"generation"`
	Action     string    `json:"action"`
	Reason     string    `json:"reason"`
	At         time.Time `json:"at"`
	NotBefore  time.Time `json:"not_before,omitzero"` // until then, the stop may still happen
}

// Names of running hooks in busy.
const (
	jobPreStop    = "job pre-stop"
	jobPostCancel = "job post-cancel"
)

// hooking reports whether a hook is running. Only one hook runs at a time.
func (a *Agent) hooking() bool { return a.busy[jobPreStop] || a.busy[jobPostCancel] }

// hookEnded raises the alarm of a hook that failed, and clears it otherwise.
func (a *Agent) hookEnded(name string, h *agentctl.Hook) {
	code := strings.ReplaceAll(name, "-", "_") + "_failed"
	if name == "pre-stop" {
		code = "hook_failed"
	}
	sentence := fmt.Sprintf("The %s hook %s.", name, h.Outcome())
	if last := h.LastLine(); last != "" {
		sentence += " Its output ended with: " + last
	}
	asked := name == "pre-stop" && (h.ExitCode == HookVeto || h.ExitCode == HookDefer) // these exit codes are answers, not failures
	a.alarmIf(h.Error != "" || h.TimedOut || h.ExitCode != 0 && !asked, code, sentence)
}

// undoPrepared runs the post-cancel hook if a prepared stop will not happen. A stop
// that failed and will be retried is not canceled.
func (a *Agent) undoPrepared(now time.Time) {
	p := a.state.Prepared
	if p == nil || a.acting != nil || a.hooking() || now.Before(p.NotBefore) || !a.config.loaded || a.stillMeant(p) {
		return
	}
	c := a.config.Config
	if c.PostCancel == "" || !a.hookAllowed("post-cancel") || a.o.Hooks == nil {
		// Before that, a retry of the same stop would not run pre-stop again.
		if now.Sub(p.At) > hookHolds {
			a.state.Prepared = nil
		}
		return
	}
	why := ""
	if last := a.state.Last; last != nil && last.Generation == p.Generation {
		why = last.Detail
	}
	spec := HookSpec{Command: c.PostCancel, User: c.PreStopUser, Timeout: c.PreStopTimeout,
		Env: []string{"LULL_ACTION=" + p.Action, "LULL_REASON=" + p.Reason, "LULL_CANCELED=" + why}}
	a.busy[jobPostCancel] = true
	a.tasks.Go(func() {
		h := a.o.Hooks.Run(a.ctx, spec) // Run enforces the timeout itself
		h.Command = tags.Program(h.Command)
		if a.ctx.Err() != nil {
			return // the next agent will run it
		}
		a.post(func() {
			delete(a.busy, jobPostCancel)
			a.state.Prepared = nil
			if last := a.state.Last; last != nil && last.Generation == p.Generation {
				last.PostCancel = &h
			}
			a.hookEnded("post-cancel", &h)
			a.record(agentctl.Entry{Kind: "hook", Sentence: "The post-cancel hook " + h.Outcome() + ".", Outcome: copyOf(a.state.Last)})
			a.save(nil)
			a.soon(a.now())
		})
	})
}

// stillMeant reports whether the stop that p prepared may still come: its call failed
// and will be retried, or the server has not sent it yet.
func (a *Agent) stillMeant(p *prepared) bool {
	if a.server.order != nil {
		return true
	}
	last := a.state.Last
	if last == nil || last.Generation != p.Generation || last.Phase != phaseFailed || a.halted() {
		return false
	}
	if p.Reason != reasonIdle {
		for _, d := range a.dues() {
			if d.reason == p.Reason {
				return !d.at.After(a.now())
			}
		}
		return false
	}
	for _, b := range a.machine.verdict.Blocks {
		if b.Code != idle.Cooldown && b.Code != idle.WarningPending {
			return false
		}
	}
	return true
}
