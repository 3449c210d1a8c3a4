package server

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"lull/internal/fleet/halt"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

// Reporting machines hold a request open to learn of a halt at once. Above
// maxHaltWaits a request is answered immediately, and the machine asks again after
// haltAgain; it then still halts within 5 s.
const (
	maxHaltWaits = 20_000
	haltAgain    = 4 * time.Second
)

func (s *Server) haltRoutes() {
	for _, kind := range []string{"agent", "host"} {
		register(s, route{id: "await-halt-" + kind, method: "POST", path: base + "/" + kind + "s/{name}/halt", role: access.Admin, machine: true, status: http.StatusOK,
			doc: "Wait for a change of the fleet's halt, in the name of the " + kind + " of the token"},
			func(ctx context.Context, in *struct {
				Named
				Body control.HaltTurn
			}) (*answer[control.HaltAnswer], error) {
				return ok(s.awaitHalt(ctx, in.Body), nil)
			})
	}
}

// awaitHalt waits until the fleet's halt differs from the one that the caller knows,
// until the requested wait has passed, or until ctx ends. It returns the current
// halt.
func (s *Server) awaitHalt(ctx context.Context, t control.HaltTurn) control.HaltAnswer {
	if n := s.haltWaits.Add(1); n > maxHaltWaits {
		s.haltWaits.Add(-1)
		a := haltAnswer(s.fleet.Halted(), time.Now())
		a.Again = haltAgain.Seconds()
		return a
	}
	defer s.haltWaits.Add(-1)
	end := time.NewTimer(time.Duration(t.Wait * float64(time.Second)))
	defer end.Stop()
	for waiting := true; ; {
		changed := s.fleet.HaltRead()
		h := s.fleet.Halted()
		if a := haltAnswer(h, time.Now()); !waiting || a.Mark != t.Known {
			return a
		}
		var over <-chan time.Time
		if h.On && h.Until != nil {
			over = time.After(max(time.Until(*h.Until), time.Millisecond))
		}
		select {
		case <-changed:
		case <-over:
		case <-end.C:
			waiting = false
		case <-ctx.Done():
			waiting = false
		}
	}
}

func haltAnswer(h halt.Halt, now time.Time) control.HaltAnswer {
	a := control.HaltAnswer{Mark: "off", Halt: h.HaltedBy()}
	if a.Halt != nil {
		a.Mark = fmt.Sprintf("on-%d", h.At.UnixNano())
		if h.Until != nil {
			a.Left = max(h.Until.Sub(now).Seconds(), 0)
			a.Mark += fmt.Sprintf("-%d", h.Until.UnixNano())
		}
	}
	return a
}
