package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/server/history"
	"lull/internal/server/preview"
)

func (s *Server) simulateRoutes() {
	register(s, route{id: "simulate", method: "POST", path: base + "/simulate", role: access.Viewer, status: 200,
		doc: "What policies would have done in a recorded time: pauses, hours, money and false stops"},
		func(ctx context.Context, in *struct{ Body control.Simulate }) (*answer[control.Simulation], error) {
			return ok(s.simulate(ctx, in.Body, func(float64) error { return nil }))
		})
	told := route{id: "simulate-told", method: "POST", path: base + "/simulate/progress", role: access.Viewer, status: 200,
		doc: "The same with a stream of progress; the simulation ends when the client disconnects"}
	register(s, told, func(_ context.Context, in *struct{ Body control.Simulate }) (*huma.StreamResponse, error) {
		return &huma.StreamResponse{Body: func(hc huma.Context) { s.simulateTold(hc, in.Body) }}, nil
	})
	describe(s, told, "application/jsonl", "One line for each step; the last has the result or the error")
}

// simulate answers a simulation of policies.
func (s *Server) simulate(ctx context.Context, in control.Simulate, progress func(share float64) error) (control.Simulation, error) {
	from, err := bound("from", in.From)
	if err != nil {
		return control.Simulation{}, err
	}
	to, err := bound("to", in.To)
	if err != nil {
		return control.Simulation{}, err
	}
	if from, to, err = history.Period(from, to, time.Now(), preview.Usual, preview.Longest); err != nil {
		return control.Simulation{}, err
	}
	table, err := s.prices.Prices(ctx)
	if err != nil {
		return control.Simulation{}, err
	}
	p := preview.Preview{Records: s.past, Rules: s.fleet.Rules(), Prices: table}
	return p.Run(ctx, in, from, to, progress)
}

// tellEvery is the minimum interval between two progress messages of a
// simulation.
const tellEvery = 100 * time.Millisecond

// simulateTold answers a simulation as a stream of progress messages. An error before
// the first message is answered as a problem document.
func (s *Server) simulateTold(hc huma.Context, in control.Simulate) {
	_, w := humago.Unwrap(hc)
	answer, begun := http.NewResponseController(w), false
	line := func(step control.SimulateStep) error {
		if !begun {
			begun = true
			hc.SetHeader("Content-Type", "application/jsonl")
			hc.SetStatus(http.StatusOK)
		}
		// Responses stored for an idempotency key are buffered and have no write
		// deadline.
		if err := answer.SetWriteDeadline(time.Now().Add(sendWithin)); err != nil && !errors.Is(err, http.ErrNotSupported) {
			return fmt.Errorf("cannot set the write deadline of the answer: %w", err)
		}
		if err := json.NewEncoder(w).Encode(step); err != nil {
			return fmt.Errorf("cannot report the progress of the simulation: %w", err)
		}
		if err := answer.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
			return fmt.Errorf("cannot report the progress of the simulation: %w", err)
		}
		return nil
	}
	var last time.Time
	out, err := s.simulate(hc.Context(), in, func(share float64) error {
		if time.Since(last) < tellEvery {
			return nil
		}
		last = time.Now()
		return line(control.SimulateStep{Share: share})
	})
	switch {
	case err == nil:
		err = line(control.SimulateStep{Share: 1, Simulation: &out})
	case !begun:
		refuse(hc, problem(err))
		return
	default:
		err = errors.Join(err, line(control.SimulateStep{Fault: err.Error()}))
	}
	if err != nil {
		s.log.Debug("cannot send the rest of a simulation", "err", err)
	}
}
