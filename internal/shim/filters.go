package shim

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// filter holds the descriptor on which the binds of one run are reported.
type filter struct {
	key
	fd     int
	handed map[uint64]bool // inodes of sockets that were handed to this run
	// removed lists the held unix sockets whose files the program believes to have
	// removed. It may therefore bind their paths again.
	removed map[string]bool
}

// addFilter registers the descriptor on which the binds of a run are reported, and
// takes ownership of it.
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

// filterOf returns the filter of a run, or nil. s.mu must be held.
func (s *Shim) filterOf(k key) *filter {
	for _, f := range s.filters {
		if f.key == k {
			return f
		}
	}
	return nil
}

// dropFilter closes a filter's descriptor, all of whose processes have ended.
func (s *Shim) dropFilter(fd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.filters[fd]
	if f == nil {
		return
	}
	delete(s.filters, fd)
	defer s.mirrorLocked(f.id)
	// The daemon may have a duplicate. Without this, epoll would continue to report
	// its end under a number that another filter may have by then.
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

// dupFilter duplicates the descriptor on which the binds of a run are reported.
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

// takeFilter registers the descriptor in the exec stage's report. If the stage has
// installed no filter, it returns an error that names the failed step.
func (s *Shim) takeFilter(k key, w stageReport) error {
	if w.fd < 0 {
		return &shimctl.Error{Code: shimctl.CodeStage, Step: shimctl.StepHandoff, Message: "cannot hand sockets over: " + w.why}
	}
	return s.addFilter(k, w.fd)
}
