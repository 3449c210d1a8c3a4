package shim

import (
	"context"
	"errors"
	"maps"
	"slices"

	"lull/internal/protocol/shimctl"
)

func (s *Shim) list(_ context.Context, q *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Listing
	if err := q.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	// Wait for starts in progress, so that the answer includes them.
	s.begin.Lock()
	//lint:ignore SA2001 passing through is the point
	s.begin.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	out := shimctl.List{Runs: []shimctl.Run{}}
	if m.ID != "" {
		out.Runs = append(out.Runs, s.ofID(m.ID)...)
		return shimctl.Answer{Body: out}, nil
	}
	ids := map[string]bool{}
	for id := range s.runs {
		ids[id] = true
	}
	for id := range s.exits {
		ids[id] = true
	}
	for _, id := range slices.Sorted(maps.Keys(ids)) {
		if id <= m.After {
			continue
		}
		if len(out.Runs) >= shimctl.MaxListed {
			out.More = true
			break
		}
		out.Runs = append(out.Runs, s.ofID(id)...)
	}
	return shimctl.Answer{Body: out}, nil
}

// ofID returns the runs of one ID. s.mu must be held.
func (s *Shim) ofID(id string) (out []shimctl.Run) {
	if r := s.runs[id]; r != nil && r.state == alive {
		out = append(out, r.Run)
	}
	for n, e := range s.exits[id] {
		one := shimctl.Run{ID: id, Run: n}
		if r := s.runs[id]; r != nil && r.Run.Run == n {
			one = r.Run
		}
		one.Exit = &e
		out = append(out, one)
	}
	return out
}

func (s *Shim) ackExit(_ context.Context, q *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Ended
	if err := q.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if err := validEnded(m); err != nil {
		return shimctl.Answer{}, err
	}
	s.mu.Lock()
	gone := s.dropExits(m.ID, func(run uint64) bool { return run == m.Run })
	r := s.runs[m.ID]
	drop := r != nil && r.Run.Run == m.Run && r.state == over
	if drop {
		delete(s.runs, m.ID)
		delete(s.dropped, m.ID)
	}
	s.mu.Unlock()
	s.note()
	// Remove the run's file first. If only the exit's file is left, the end is
	// merely reported once more. If only the run's file were left, a run that has
	// ended would be adopted.
	var err error
	if drop {
		err = remove(s.dir.runFile(m.ID))
	}
	return shimctl.Answer{}, errors.Join(err, s.removeExits(gone))
}

func (s *Shim) removeExits(gone []key) error {
	var errs []error
	for _, k := range gone {
		errs = append(errs, remove(s.dir.exitFile(k)))
	}
	return errors.Join(errs...)
}

func (s *Shim) ackThawed(context.Context, *shimctl.Request) (shimctl.Answer, error) {
	s.mu.Lock()
	s.thawed = nil
	s.mu.Unlock()
	return shimctl.Answer{}, remove(s.dir.path + "/thawed.json")
}

func (s *Shim) forget(ctx context.Context, q *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Name
	if err := q.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if err := validID(m.ID); err != nil {
		return shimctl.Answer{}, err
	}
	return shimctl.Answer{}, s.onceOver(ctx, m.ID, func() error {
		s.mu.Lock()
		r := s.runs[m.ID]
		if r != nil && r.state != over {
			s.mu.Unlock()
			return shimctl.Errorf(shimctl.CodeBusy, "cannot forget %s: run %d is still running as process %d", m.ID, r.Run.Run, r.PID)
		}
		delete(s.runs, m.ID)
		err := s.setHeldLocked(m.ID, nil)
		gone := s.dropExits(m.ID, func(uint64) bool { return true })
		s.mu.Unlock()
		return errors.Join(err, remove(s.dir.runFile(m.ID)), s.removeExits(gone))
	})
}

func (s *Shim) adopt(_ context.Context, q *shimctl.Request) (shimctl.Answer, error) {
	var r shimctl.Run
	if err := q.Into(&r); err != nil {
		return shimctl.Answer{}, err
	}
	if err := validRun(r); err != nil {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot adopt: %v", err)
	}
	if r.BootID != s.boot {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeGone, "cannot adopt %s: it ran before the machine was started", r.ID)
	}
	if err := s.takeUp(r); err != nil {
		return shimctl.Answer{}, err
	}
	r.Adopted = true
	return shimctl.Answer{}, save(s.dir.runFile(r.ID), r, false)
}
