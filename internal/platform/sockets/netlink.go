package sockets

import (
	"errors"
	"fmt"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// netlink is an AF_NETLINK socket of the sock_diag protocol.
type netlink int

var _ conn = netlink(0)

func openDiag() (conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	// A dump is produced while it is read, so reads do not block. The timeout is
	// for a kernel that does not answer at all: the caller gets EAGAIN instead of
	// hanging.
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
		return nil, errors.Join(fmt.Errorf("netlink socket: %w", err), unix.Close(fd))
	}
	return netlink(fd), nil
}

func (n netlink) send(b []byte) error {
	return unix.Sendto(int(n), b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

func (n netlink) receive(b []byte) (int, error) {
	for {
		size, from, err := unix.Recvfrom(int(n), b, unix.MSG_TRUNC)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return 0, err
		case size > len(b):
			return 0, errTruncated
		}
		// Ignore messages of other processes, which may write to this socket.
		// Only the kernel has port 0.
		if sa, ok := from.(*unix.SockaddrNetlink); ok && sa.Pid == 0 {
			return size, nil
		}
	}
}

func (n netlink) close() error { return unix.Close(int(n)) }

// inNamespace runs look in the network namespace that q names. Entering a
// namespace affects a single thread, so look runs locked to its thread, which
// returns to its own namespace afterwards. If it cannot return, the thread stays
// locked and ends with its goroutine. That would not work for the process's main
// thread, which cannot end and which /proc/self/net follows, so returning is
// tried first.
func inNamespace(q Query, look func() (Table, error)) (Table, error) {
	if q.NetNSFD == 0 && q.NetNSPID == 0 {
		return look()
	}
	var t Table
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		var back bool
		if t, back, err = visit(q, look); back {
			runtime.UnlockOSThread()
		}
	}()
	<-done
	return t, err
}

// visit runs look in the namespace of q. back reports whether the thread has
// returned to its own.
func visit(q Query, look func() (Table, error)) (t Table, back bool, err error) {
	home, err := openNamespace("thread-self")
	if err != nil {
		return Table{}, true, err
	}
	defer unix.Close(home)
	if err := enter(q); err != nil {
		return Table{}, true, err
	}
	t, err = look()
	return t, unix.Setns(home, unix.CLONE_NEWNET) == nil, err
}

func openNamespace(process string) (int, error) {
	path := "/proc/" + process + "/ns/net"
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", path, err)
	}
	return fd, nil
}

func enter(q Query) error {
	fd := q.NetNSFD
	if q.NetNSPID != 0 {
		if fd != 0 {
			return errors.New("a query names a network namespace by descriptor or by process, not both")
		}
		var err error
		if fd, err = openNamespace(strconv.Itoa(q.NetNSPID)); err != nil {
			return err
		}
		defer unix.Close(fd)
	}
	if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter the network namespace: %w", err)
	}
	return nil
}
