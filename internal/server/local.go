package server

import (
	"context"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
	"lull/internal/fleet/halt"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

// Local configures a server as the dashboard of one host in its own process. Such a
// server has no routes about workers, and its halt is the host's.
type Local struct {
	Host string // name of the host
	// Halted returns the host's halt; nil for none.
	Halted func() *idle.HaltedBy
	// Halt halts the host; nil lifts the halt.
	Halt func(h *idle.HaltedBy, by string) error
}

func (s *Server) localRoutes() {
	s.hostRoutes()
	s.eventRoutes()
	s.sessionRoute()
	s.peopleRoutes()
	s.signInRoutes()
	s.healthRoutes()
	register(s, route{id: "get-halt", method: "GET", path: base + "/halt", role: access.Viewer, doc: "Whether the host's automatic actions are stopped"},
		func(context.Context, *struct{}) (*answer[halt.Halt], error) { return ok(s.localHalt(), nil) })
	register(s, route{id: "halt", method: "POST", path: base + "/halt", role: access.Operator, doc: "Stop the host's automatic actions, permanently or until a time, or resume them"},
		func(ctx context.Context, in *struct{ Body control.Halting }) (*answer[halt.Halt], error) {
			by := actor(ctx).Name
			if !in.Body.On {
				if in.Body.Until != "" {
					return nil, problem(invalid("until", "only a halt has an end"))
				}
				err := s.local.Halt(nil, by)
				return ok(s.localHalt(), err)
			}
			x := idle.HaltedBy{By: by, Since: time.Now().UTC().Round(0), Reason: in.Body.Reason}
			if in.Body.Until != "" {
				t, err := when.Ahead(time.Now().UTC(), in.Body.Until)
				if err != nil {
					return nil, problem(invalid("until", err.Error()))
				}
				x.Until = &t
			}
			err := s.local.Halt(&x, by)
			return ok(s.localHalt(), err)
		})
}

func (s *Server) localHalt() halt.Halt {
	x := s.local.Halted()
	if x == nil {
		return halt.Halt{}
	}
	return halt.Halt{On: true, By: x.By, At: x.Since, Reason: x.Reason, Until: x.Until}
}

// halted reports whether automatic actions are stopped.
func (s *Server) halted() bool {
	if s.local != nil {
		return s.local.Halted() != nil
	}
	return s.fleet.Halted().On
}

// ReportHost accepts a report of a host in this process.
func (s *Server) ReportHost(ctx context.Context, r control.HostReport) (control.HostAnswer, error) {
	return s.hostReport(ctx, r)
}

// HostTurn takes answers of the host in this process and returns questions and
// commands for it.
func (s *Server) HostTurn(ctx context.Context, name string, t control.HostTurn) (control.HostQuestions, error) {
	return s.hosts.Turn(ctx, name, t.Answers, time.Duration(t.Wait*float64(time.Second))), ctx.Err()
}

// AwaitHalt never returns a halt, because the host in this process has its own.
func (s *Server) AwaitHalt(ctx context.Context, _ string, _ control.HaltTurn) (control.HaltAnswer, error) {
	<-ctx.Done()
	return control.HaltAnswer{}, ctx.Err()
}
