// Package fdstore keeps open files that are rarely needed without using a
// descriptor of the process for each. The files wait in the queues of socket
// pairs, as descriptors in messages, and each queue has room for many.
package fdstore

import (
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Store keeps files. The zero value is empty and ready for use. It is safe for
// concurrent use.
type Store struct {
	mu     sync.Mutex
	drawer *drawer // receives the next file; nil for none
}

// File is one kept file.
type File struct {
	s *Store

	// Guarded by s.mu.
	fd     int     // descriptor if the file is in no drawer; otherwise -1
	in     *drawer // nil for none
	closed bool
}

// drawer is a socket pair and the files in its queue, in order.
type drawer struct {
	in, out int
	files   []*File
}

// most bounds the files of one drawer, and with them the cost of closing one. A
// message takes less than 1 KiB of the queue, which has at least 200 KiB.
const most = 32

// Put takes ownership of fd and keeps its file. A unix socket stays an open
// descriptor, because the kernel searches queues with unix sockets for cycles. So
// does a file for which the kernel has no room, which does not happen to root.
func (s *Store) Put(fd int) *File {
	f := &File{s: s, fd: -1}
	s.mu.Lock()
	defer s.mu.Unlock()
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err == nil && domain == unix.AF_UNIX || s.putLocked(f, fd) != nil {
		f.fd = fd
	} else {
		_ = unix.Close(fd)
	}
	return f
}

// putLocked puts a duplicate of fd into a drawer for f. The caller holds s.mu and
// still owns fd.
func (s *Store) putLocked(f *File, fd int) error {
	d := s.drawer
	if d == nil {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		d = &drawer{in: pair[0], out: pair[1]}
	}
	if err := d.put(f, fd); err != nil {
		s.endLocked(d)
		return err
	}
	if s.drawer = d; len(d.files) >= most {
		s.drawer = nil
	}
	return nil
}

func (d *drawer) put(f *File, fd int) error {
	if err := unix.Sendmsg(d.in, []byte{0}, unix.UnixRights(fd), nil, 0); err != nil {
		return err
	}
	d.files = append(d.files, f)
	f.in = d
	return nil
}

// endLocked closes d if it is empty. The caller holds s.mu.
func (s *Store) endLocked(d *drawer) {
	if len(d.files) > 0 {
		return
	}
	if s.drawer == d {
		s.drawer = nil
	}
	_, _ = unix.Close(d.in), unix.Close(d.out)
}

// Open returns a new descriptor of the file, close-on-exec. The caller closes it.
func (f *File) Open() (int, error) {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	switch {
	case f.closed:
		return -1, os.ErrClosed
	case f.in != nil:
		return f.in.open(slices.Index(f.in.files, f))
	}
	fd, err := unix.FcntlInt(uintptr(f.fd), unix.F_DUPFD_CLOEXEC, 3)
	return fd, os.NewSyscallError("fcntl", err)
}

// open returns a new descriptor of the file at index n. Peeking at the message
// makes the kernel duplicate the descriptor.
func (d *drawer) open(n int) (int, error) {
	if err := unix.SetsockoptInt(d.out, unix.SOL_SOCKET, unix.SO_PEEK_OFF, n); err != nil {
		return -1, os.NewSyscallError("setsockopt", err)
	}
	var b [1]byte
	oob := make([]byte, unix.CmsgSpace(4))
	_, size, _, _, err := unix.Recvmsg(d.out, b[:], oob, unix.MSG_PEEK|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("recvmsg", err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:size])
	if err != nil {
		return -1, os.NewSyscallError("recvmsg", err)
	}
	for _, m := range msgs {
		if fds, err := unix.ParseUnixRights(&m); err == nil && len(fds) == 1 {
			return fds[0], nil
		}
	}
	return -1, os.NewSyscallError("recvmsg", unix.EMFILE) // the kernel omits descriptors for which the process has no room
}

// Close closes the file. If this process has no free descriptor, the file may
// stay open until a later Close.
func (f *File) Close() {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	if f.closed {
		return
	}
	f.closed = true
	if d := f.in; d != nil {
		d.sweep()
		f.s.endLocked(d)
		return
	}
	_ = unix.Close(f.fd)
}

// sweep removes the closed files from the queue. Files before them move to its
// end.
func (d *drawer) sweep() {
	for {
		at := slices.IndexFunc(d.files, func(f *File) bool { return f.closed })
		if at < 0 {
			return
		}
		for range at {
			fd, err := d.open(0)
			if err != nil {
				return
			}
			f := d.discard()
			if d.put(f, fd) == nil {
				_ = unix.Close(fd)
			} else {
				f.fd, f.in = fd, nil
			}
		}
		d.discard()
	}
}

// discard removes the first file from the queue.
func (d *drawer) discard() *File {
	var b [1]byte
	_, _ = unix.Read(d.out, b[:]) // does not block: the message is there
	f := d.files[0]
	d.files = slices.Delete(d.files, 0, 1)
	return f
}
