package control

import (
	"context"
	"errors"
	"net/http"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/delay"
	"lull/internal/lib/httpx"
)

// HaltTurn requests the fleet's halt. The server answers at once if the halt
// differs from the one that the machine knows, otherwise as soon as it changes.
type HaltTurn struct {
	Known string  `json:"known,omitempty" maxLength:"128" doc:"mark of the previous answer; empty requests an immediate answer"`
	Wait  float64 `json:"wait_seconds,omitempty" minimum:"0" maximum:"60" doc:"How long to wait for a change"`
}

// HaltAnswer is the fleet's halt as sent to a reporting machine.
type HaltAnswer struct {
	Mark string `json:"mark" doc:"Send it back as known with the next request"`
	// Halt is nil while the fleet is not halted.
	Halt *idle.HaltedBy `json:"halt,omitempty" doc:"Who halted the fleet, since when, until when and why; absent while it is not halted"`
	// Left is the remaining time of the halt in seconds, so that the machine's
	// clock does not matter. It is 0 if the halt has no end.
	Left float64 `json:"left_seconds,omitempty" doc:"Remaining time of the halt; absent if it has no end"`
	// Again is the delay before the next request. A server that has too many
	// waiting requests sets it and answers immediately.
	Again float64 `json:"again_after_seconds,omitempty" doc:"Pause before the next request, in seconds"`
}

// Machine converts the answer to a halt by a machine's clock, which shows now. It
// returns nil if there is no halt.
func (a HaltAnswer) Machine(now time.Time) *idle.HaltedBy {
	if a.Halt == nil {
		return nil
	}
	h := *a.Halt
	h.Fleet = true
	if h.Until != nil {
		until := now.Add(time.Duration(a.Left * float64(time.Second)))
		h.Until = &until
	}
	return &h
}

// Machine converts the halt in the answer to one by a machine's clock, which
// shows now. It returns nil if there is no halt.
func (a AgentAnswer) Machine(now time.Time) *idle.HaltedBy {
	switch {
	case !a.Halted:
		return nil
	case a.HaltedBy == nil: // an older server
		return &idle.HaltedBy{Fleet: true, Since: now}
	}
	return HaltAnswer{Halt: a.HaltedBy, Left: a.HaltLeft}.Machine(now)
}

// AwaitAgentHalt requests the fleet's halt on behalf of an agent.
func (c *Client) AwaitAgentHalt(ctx context.Context, machine string, t HaltTurn) (HaltAnswer, error) {
	return tell[HaltAnswer](ctx, c, agentPath(machine, "halt"), t)
}

// AwaitHostHalt requests the fleet's halt on behalf of a host.
func (c *Client) AwaitHostHalt(ctx context.Context, host string, t HaltTurn) (HaltAnswer, error) {
	return tell[HaltAnswer](ctx, c, hostPath(host, "halt"), t)
}

// Limits for following the halt. When a server becomes reachable again, it is
// asked within haltMost, so that a halt set in the meantime reaches the machine
// within 5 s.
const (
	haltWait    = 40 * time.Second
	haltLimit   = haltWait + 10*time.Second
	haltRetry   = 500 * time.Millisecond
	haltMost    = 3 * time.Second
	haltRefused = time.Minute // the server is too old, or refuses the token
	haltSpace   = 200 * time.Millisecond
)

// FollowHalt requests the fleet's halt until ctx ends. It calls heard with every
// answer and the time of its request. Failures are retried without a call of
// heard, so the last known halt stays in effect.
func FollowHalt(ctx context.Context, ask func(context.Context, HaltTurn) (HaltAnswer, error), heard func(a HaltAnswer, asked time.Time)) {
	turn, failures := HaltTurn{Wait: haltWait.Seconds()}, 0
	for ctx.Err() == nil {
		asked := time.Now()
		within, cancel := context.WithTimeout(ctx, haltLimit)
		a, err := ask(within, turn)
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			most := haltMost
			if p, refused := errors.AsType[*httpx.Problem](err); refused && p.Status < http.StatusInternalServerError {
				most = haltRefused
			}
			_ = delay.For(ctx, delay.Backoff(failures, haltRetry, most))
			failures++
			continue
		}
		failures, turn.Known = 0, a.Mark
		heard(a, asked)
		pause := time.Duration(min(max(a.Again, 0), 60) * float64(time.Second))
		_ = delay.For(ctx, max(pause, haltSpace-time.Since(asked)))
	}
}
