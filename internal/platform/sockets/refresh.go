package sockets

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrChanged means that sockets cannot be refreshed and must be inspected again.
var ErrChanged = errors.New("the sockets cannot be refreshed")

// Refresh updates all, the last descriptions of the sockets that process pid has
// at descriptors fds, in the same order. The process must not have run since they
// were taken: it could have reconnected a socket or read from it. After an error,
// which is always ErrChanged, all is not valid.
//
// A TCP listener or an open TCP connection costs four system calls, and two more
// if something arrived or was acknowledged. The calls do not block, and they
// bypass the Go runtime, for the reason given at Poller.Run.
func Refresh(pid int, fds []int, all []Info) error {
	pidfd, _, errno := unix.RawSyscall(unix.SYS_PIDFD_OPEN, uintptr(pid), 0, 0)
	if errno != 0 {
		return ErrChanged
	}
	defer rawClose(int(pidfd))
	for n := range all {
		fd, _, errno := unix.RawSyscall(unix.SYS_PIDFD_GETFD, pidfd, uintptr(fds[n]), 0)
		if errno != 0 {
			return ErrChanged
		}
		closing := rawClose
		if all[n].closeBlocks() {
			closing = func(fd int) { _ = unix.Close(fd) }
		}
		err := all[n].refresh(int(fd))
		closing(int(fd))
		if err != nil {
			return err
		}
	}
	return nil
}

// closeBlocks reports whether closing a duplicate may block if the process has
// closed the socket in the meantime.
func (in *Info) closeBlocks() bool {
	switch in.Family {
	case unix.AF_INET, unix.AF_INET6, unix.AF_UNIX:
		return in.lingers
	}
	return true
}

func (in *Info) refresh(fd int) error {
	var st unix.Stat_t
	if errno := rawFstat(fd, &st); errno != 0 || st.Ino != in.Inode {
		return ErrChanged
	}
	tcp := in.Protocol == unix.IPPROTO_TCP || in.Protocol == unix.IPPROTO_MPTCP
	switch {
	case in.Family == unix.AF_UNIX && in.Listening:
		set := unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
		n, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&set)), 1, uintptr(unsafe.Pointer(&unix.Timespec{})), 0, 0, 0)
		if in.Waiting = 0; errno != 0 || n > 0 {
			in.Waiting = 1
		}
		return nil
	case in.Family == unix.AF_UNIX && in.Type == unix.SOCK_STREAM && in.Connected:
		return in.rawQueues(fd)
	case in.Type == unix.SOCK_DGRAM:
		return nil // its description does not change by itself
	case tcp && in.Listening && in.State == Listen, in.Protocol == unix.IPPROTO_TCP && in.Connected && (in.State == Established || in.State == CloseWait):
		return in.refreshTCP(fd)
	}
	fresh, err := Inspect(fd)
	if err != nil {
		return ErrChanged
	}
	*in = fresh
	return nil
}

// refreshTCP updates the description of a TCP listener or an open TCP connection.
func (in *Info) refreshTCP(fd int) error {
	var block [infoBlock]byte
	size := uint32(len(block))
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(&block[0])), uintptr(unsafe.Pointer(&size)), 0)
	state, before := in.State, in.Traffic
	if errno != 0 || in.parseTCP(fd, block[:min(int(size), len(block))], 0) != nil || in.State != state {
		return ErrChanged
	}
	if in.Listening || in.HasSegments() && in.Traffic.counters() == before.counters() {
		// The kernel counts a segment before it changes a queue, and the process
		// has neither read nor written. Without a new segment, the queues are
		// therefore unchanged.
		return nil
	}
	return in.rawQueues(fd)
}

// rawQueues is readQueues for a connected stream socket, with raw system calls.
func (in *Info) rawQueues(fd int) error {
	if in.UnreadEnd {
		return ErrChanged
	}
	unread, unsent := rawQueue(fd, unix.TIOCINQ), 0
	if in.Family != unix.AF_UNIX {
		unsent = rawQueue(fd, unix.TIOCOUTQ)
	}
	if unread < 0 || unsent < 0 {
		return ErrChanged
	}
	in.Unread, in.Unsent = uint32(unread), uint32(unsent)
	return nil
}

// HasSegments reports whether the kernel counts segments.
func (in *Info) HasSegments() bool { return in.InfoSize >= infoDataSegsOut+4 }

// counters returns t without the times since the last events, which change by
// themselves.
func (t Traffic) counters() Traffic {
	t.LastSent, t.LastReceived, t.LastAck = 0, 0, 0
	return t
}
