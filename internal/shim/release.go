package shim

import (
	"context"
	"slices"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// release stops listening on held sockets that the program has got and has closed,
// although it continues to run. Clients are then refused, as they would be without
// lull. The sockets stay bound, and listen again once the program binds the address
// again or ends. The answer lists the released sockets.
func (s *Shim) release(_ context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Hold
	if err := r.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if err := validID(m.ID); err != nil {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot release sockets: %v", err)
	}
	s.notes.mu.Lock() // no socket may be handed over meanwhile
	defer s.notes.mu.Unlock()
	out := shimctl.Hold{ID: m.ID}
	s.mu.Lock()
	var f *filter
	if run := s.runs[m.ID]; run != nil && run.state == alive {
		f = s.filterOf(run.key())
	}
	hs := slices.Clone(s.held[m.ID])
	s.mu.Unlock()
	if f == nil {
		return shimctl.Answer{Body: out}, nil
	}
	for _, h := range hs {
		inode := inodeOf(h.fd)
		if !slices.Contains(m.Addrs, h.addr) || !f.handed[inode] || !listening(h.fd) {
			continue
		}
		if used, err := s.findSocket(f, inode); used || err != nil {
			continue // an unreadable process may have the socket open
		}
		if h.as.path != "" {
			s.mu.Lock()
			_, err := s.renewLocked(m.ID, h, false)
			s.mu.Unlock()
			if err != nil {
				return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeFailed, "cannot release %s: %w", h.addr, err)
			}
		} else if err := unix.Shutdown(h.fd, unix.SHUT_RD); err != nil {
			return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeFailed, "cannot release %s: %w", h.addr, err)
		}
		out.Addrs = append(out.Addrs, h.addr)
	}
	return shimctl.Answer{Body: out}, nil
}
