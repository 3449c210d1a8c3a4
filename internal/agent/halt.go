package agent

import (
	"context"
	"time"

	"lull/internal/core/idle"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
)

// haltedHere begins sentences about a halt of the agent.
const haltedHere = "Automatic actions on this machine are"

// HaltFollower is a Reporter that learns of a change of the fleet's halt at
// once. With any other Reporter, the halt comes with the answers to reports.
type HaltFollower interface {
	AwaitHalt(ctx context.Context, t control.HaltTurn) (control.HaltAnswer, error)
}

// followHalt keeps the fleet's halt as reported by the server. It runs outside
// the loop until ctx ends.
func (a *Agent) followHalt(ctx context.Context, f HaltFollower) {
	control.FollowHalt(ctx, f.AwaitHalt, func(x control.HaltAnswer, asked time.Time) {
		waited := time.Since(asked)
		a.post(func() {
			now := a.now()
			a.heardHalt(x.Machine(now), now.Add(-waited))
		})
	})
}

// heardHalt applies the fleet's halt, nil for none, from an answer to a request
// sent at asked by this agent's clock. An answer to a request sent before the
// halt was learned does not end the halt, because it may be older.
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

// haltSlack is how far the end of a halt may move because clocks differ.
const haltSlack = 5 * time.Second

// haltActing cancels an action that has not been sent.
func (a *Agent) haltActing() {
	if at := a.acting; at != nil && !at.sent {
		a.counters.Cancelled++
		a.finish(phaseCancelled, "it was halted")
		a.unsay()
	}
}

// endHalt ends a halt that has expired.
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
