package proc

import (
	"bytes"
	"errors"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// FD is a descriptor of a process that refers to a socket.
type FD struct {
	FD    int
	Inode uint64 // of the socket, as in sock_diag and /proc/net
}

// ErrThreads means that the main thread of a process has ended while others
// continue. The kernel then shows no file descriptors of the process.
var ErrThreads = errors.New("the main thread has ended and others still run")

// Sockets lists the sockets of the process by descriptor number. A zombie has
// none. Descriptors in a file table that a thread does not share with the process
// (CLONE_FILES unshared) are not seen.
//
// Errors: ErrGone, EACCES or EPERM (another user's process, or one that is not
// dumpable), ErrThreads.
func (f *FS) Sockets(pid int) ([]FD, error) {
	s := f.scratch().num(pid).str("/fd")
	defer s.free()
	var fds []int
	err := s.numbers(func(n int) bool { fds = append(fds, n); return true })
	if err != nil || len(fds) == 0 {
		return nil, f.ended(pid, s, err)
	}
	slices.Sort(fds)
	var sockets []FD
	base := len(s.path)
	for _, fd := range fds {
		s.path = s.path[:base]
		link, err := s.num(fd).readlink()
		if errors.Is(err, ErrGone) {
			continue // closed in the meantime
		}
		if err != nil {
			return nil, err
		}
		if inode, ok := parseSocketLink(link); ok {
			sockets = append(sockets, FD{FD: fd, Inode: inode})
		}
	}
	return sockets, nil
}

// ended returns nil if pid is a zombie, whose descriptors its own user cannot
// list because they belong to root. Otherwise it returns err.
func (f *FS) ended(pid int, s *scratch, err error) error {
	if errors.Is(err, ErrGone) {
		return err
	}
	st, statErr := f.Stat(pid)
	switch {
	case statErr != nil:
		return errors.Join(err, statErr)
	case !st.Ended():
		return err
	case st.Threads > 1:
		return s.fail(ErrThreads)
	}
	return nil
}

func (s *scratch) readlink() ([]byte, error) {
	s.path = append(s.path, 0)
	at := unix.AT_FDCWD
	n, _, errno := unix.Syscall6(unix.SYS_READLINKAT, uintptr(at), uintptr(unsafe.Pointer(&s.path[0])),
		uintptr(unsafe.Pointer(&s.buf[0])), uintptr(len(s.buf)), 0, 0)
	s.path = s.path[:len(s.path)-1]
	if errno != 0 {
		return nil, s.fail(errno)
	}
	return s.buf[:n], nil
}

// parseSocketLink parses the target of a link in /proc/PID/fd: socket:[INODE].
func parseSocketLink(b []byte) (inode uint64, ok bool) {
	b, ok = bytes.CutPrefix(b, []byte("socket:["))
	if !ok {
		return 0, false
	}
	inode, rest, ok := number(b)
	return inode, ok && len(rest) == 1 && rest[0] == ']'
}
