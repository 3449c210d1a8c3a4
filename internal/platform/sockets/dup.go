package sockets

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Errors of Duplicate, for errors.Is.
var (
	ErrNotPermitted = errors.New("not permitted")                         // Yama, another user's process, or one that is not dumpable
	ErrGone         = errors.New("the process or its descriptor is gone") // ended, or the descriptor was closed
	ErrUnsupported  = errors.New("not supported by this kernel")          // before Linux 5.6
)

// DupError names the socket that could not be duplicated.
type DupError struct {
	PID int
	FD  int // -1 if the process itself could not be opened
	Err error
}

func (e *DupError) Error() string {
	if e.FD < 0 {
		return fmt.Sprintf("cannot open process %d: %v", e.PID, e.Err)
	}
	return fmt.Sprintf("cannot duplicate descriptor %d of process %d: %v", e.FD, e.PID, e.Err)
}

// Unwrap returns the cause, a unix.Errno.
func (e *DupError) Unwrap() error { return e.Err }

// Is reports whether target is the error of this package that stands for the
// cause.
func (e *DupError) Is(target error) bool {
	switch target {
	case ErrNotPermitted:
		return e.Err == unix.EPERM || e.Err == unix.EACCES
	case ErrGone:
		return e.Err == unix.ESRCH || e.Err == unix.EBADF
	case ErrUnsupported:
		return e.Err == unix.ENOSYS
	}
	return false
}

// Process is a handle of a process. Its PID is not reused while the handle is
// open.
type Process struct {
	pid, pidfd int
}

// OpenProcess opens a process. The caller closes it.
func OpenProcess(pid int) (Process, error) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return Process{}, &DupError{PID: pid, FD: -1, Err: err}
	}
	return Process{pid, pidfd}, nil
}

// Close closes the handle. The duplicates stay open.
func (p Process) Close() { _ = unix.Close(p.pidfd) }

// Duplicate duplicates a descriptor of the process, close-on-exec. The caller
// closes the duplicate. The error is a *DupError.
//
// It requires the right to trace the process: to run as the same user and, with
// Yama at level 1, to be its ancestor; or CAP_SYS_PTRACE.
func (p Process) Duplicate(fd int) (int, error) {
	dup, err := unix.PidfdGetfd(p.pidfd, fd, 0)
	if err != nil {
		return -1, &DupError{PID: p.pid, FD: fd, Err: err}
	}
	return dup, nil
}

// Duplicate duplicates each of fds of process pid, in order, as Process does.
// The caller owns and closes the duplicates. If one fails, those already made
// are closed and the error is a *DupError.
func Duplicate(pid int, fds []int) ([]int, error) {
	p, err := OpenProcess(pid)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	dups := make([]int, 0, len(fds))
	for _, fd := range fds {
		dup, err := p.Duplicate(fd)
		if err != nil {
			for _, dup := range dups {
				_ = unix.Close(dup)
			}
			return nil, err
		}
		dups = append(dups, dup)
	}
	return dups, nil
}
