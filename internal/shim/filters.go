package shim

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// filter is the descriptor that reports the binds of one run.
type filter struct {
	key
	fd     int
	handed map[uint64]bool // inodes of sockets that this run was given
	// removed are held unix sockets whose file the program believes that it has
	// removed, so that it may bind the path again.
	removed map[string]bool
}

// addFilter takes ownership of fd, which reports the binds of a run.
func (s *Shim) addFilter(k key, fd int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.filterOf(k) != nil {
		unix.Close(fd)
		return nil
	}
	f := &filter{key: k, fd: fd, handed: map[uint64]bool{}, removed: map[string]bool{}}
	s.filters[fd] = f
	if err := s.notes.watch(fd); err != nil {
		delete(s.filters, fd)
		unix.Close(fd)
		return fmt.Errorf("cannot watch the binds of %s: %w", k.id, err)
	}
	s.mirrorLocked(k.id)
	return nil
}

// filterOf finds the filter of a run; the caller holds mu.
func (s *Shim) filterOf(k key) *filter {
	for _, f := range s.filters {
		if f.key == k {
			return f
		}
	}
	return nil
}

// dropFilter closes a descriptor that no longer reports anything.
func (s *Shim) dropFilter(fd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.filters[fd]
	if f == nil {
		return
	}
	delete(s.filters, fd)
	defer s.mirrorLocked(f.id)
	// The daemon may have a duplicate, through which epoll would keep reporting
	// the end under a number that another filter has by then.
	if err := unix.EpollCtl(s.notes.epfd, unix.EPOLL_CTL_DEL, fd, nil); err != nil {
		s.log.Error("cannot stop watching binds", "err", err)
	}
	unix.Close(fd)
}

// filter handles the request of the same name.
func (s *Shim) filter(_ context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Filter
	if err := r.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if err := validID(m.ID); err != nil || len(r.FDs) > 1 {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot use the filter of %q with %d descriptors: want an id and at most one", m.ID, len(r.FDs))
	}
	k := key{m.ID, m.Run}
	if len(r.FDs) == 1 {
		fd := r.FDs[0]
		r.FDs[0] = -1
		if err := s.addFilter(k, fd); err != nil {
			return shimctl.Answer{}, err
		}
		s.mu.Lock()
		f := s.filterOf(k)
		s.mu.Unlock()
		if f != nil {
			s.resumeBind(f)
		}
		return shimctl.Answer{}, nil
	}
	fd, err := s.dupFilter(k)
	if err != nil {
		return shimctl.Answer{}, err
	}
	return shimctl.Answer{FDs: []int{fd}, Close: true}, nil
}

// dupFilter duplicates the descriptor that reports the binds of a run.
func (s *Shim) dupFilter(k key) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.filterOf(k)
	if f == nil {
		return -1, shimctl.Errorf(shimctl.CodeNotFound, "cannot send the bind filter of %s: it has none", k.id)
	}
	fd, err := unix.FcntlInt(uintptr(f.fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return -1, shimctl.Errorf(shimctl.CodeFailed, "cannot duplicate the bind filter of %s: %w", k.id, err)
	}
	return fd, nil
}

// takeFilter takes the descriptor from the exec stage's report. Without a
// filter it returns an error that names the failed step.
func (s *Shim) takeFilter(k key, w stageReport) error {
	if w.fd < 0 {
		return &shimctl.Error{Code: shimctl.CodeStage, Step: shimctl.StepHandoff, Message: "cannot hand sockets over: " + w.why}
	}
	return s.addFilter(k, w.fd)
}
