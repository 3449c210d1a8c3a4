package shim

import (
	"context"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// keep keeps a descriptor open under an ID across a restart of the daemon,
// replacing an earlier one. Without a descriptor it only closes the earlier one.
// The shim does not know what the descriptor is. The kernel keeps some things only
// as long as they are open, such as the rules that make clients of a port wait.
func (s *Shim) keep(_ context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Name
	if err := r.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if err := validID(m.ID); err != nil || len(r.FDs) > 1 {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot keep %d descriptors for %q: want an id and at most one", len(r.FDs), m.ID)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.kept[m.ID]; ok {
		unix.Close(old)
		delete(s.kept, m.ID)
	}
	if len(r.FDs) == 1 {
		s.kept[m.ID], r.FDs[0] = r.FDs[0], -1
	}
	return shimctl.Answer{}, nil
}

// dropKept closes the kept descriptors of a daemon that has not come back.
func (s *Shim) dropKept() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, fd := range s.kept {
		unix.Close(fd)
		delete(s.kept, id)
	}
}
