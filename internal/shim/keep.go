package shim

import (
	"context"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// keep keeps a descriptor open across a restart of the daemon, or closes the one that
// is kept under an id. What it is the shim does not know: the kernel keeps something
// as long as it is open, such as the rules that make clients of a port wait.
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

// dropKept closes what is kept for a daemon that is gone.
func (s *Shim) dropKept() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, fd := range s.kept {
		unix.Close(fd)
		delete(s.kept, id)
	}
}
