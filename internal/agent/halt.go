package agent

import (
	"context"
	"time"

	"lull/internal/core/idle"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
)

// haltedHere is the beginning of sentences about a halt of this agent.
const haltedHere = "Automatic actions on this machine are"

// HaltFollower is a Reporter that returns a change of the fleet's halt at once. With
// any other Reporter, the agent learns the halt from the answers to its reports.
type HaltFollower interface {
	AwaitHalt(ctx context.Context, t control.HaltTurn) (control.HaltAnswer, error)
}

// followHalt keeps the agent's copy of the fleet's halt current. It must run outside
// the loop, until ctx ends.
func (a *Agent) followHalt(ctx context.Context, f HaltFollower) {
	control.FollowHalt(ctx, f.AwaitHalt, func(x control.HaltAnswer, asked time.Time) {
		waited := time.Since(asked)
		a.post(func() {
			now := a.now()
			a.heardHalt(x.Machine(now), now.Add(-waited))
		})
	})
}

// heardHalt applies the fleet's halt x from an answer; nil means none. asked is when
// the request was sent, by this agent's clock. If that was before the known halt was
// learned, the answer may be older than the halt and does not end it.
func (a *Agent) heardHalt(x *idle.HaltedBy, asked time.Time) {
	old, now := a.state.FleetHalt, a.now()
	if old.Same(x) || old.MovedBy(x) < haltSlack || x == nil && !asked.After(a.server.haltAt) {
		return
	}
	a.state.FleetHalt = x
	if x != nil {
		if old == nil {
			a.server.haltAt = now
		}
		a.record(agentctl.Entry{Kind: "halt", By: x.By, Sentence: x.Sentence(haltedHere)})
		a.haltActing()
	} else {
		a.record(agentctl.Entry{Kind: "halt", By: "server", Sentence: "The fleet is no longer halted."})
	}
	a.save(nil)
	a.soon(now)
}

// haltSlack is how much the reported end of the same halt may differ because of the
// clocks.
const haltSlack = 5 * time.Second

// haltActing cancels an action that has not been sent.
func (a *Agent) haltActing() {
	if at := a.acting; at != nil && !at.sent {
		a.counters.Cancelled++
		a.finish(phaseCancelled, "automatic actions were halted")
		a.unsay()
	}
}

// endHalt removes a halt that has expired.
func (a *Agent) endHalt(now time.Time) {
	end := func(h **idle.HaltedBy, whose string) {
		x := *h
		if x == nil || x.Until == nil {
			return
		}
		if !x.Over(now) {
			a.soon(*x.Until)
			return
		}
		*h = nil
		a.record(agentctl.Entry{Kind: "halt", By: "agent", Sentence: whose + " by " + x.By + " expired."})
		a.save(nil)
	}
	end(&a.state.Halted, "The halt")
	end(&a.state.FleetHalt, "The fleet halt")
}
