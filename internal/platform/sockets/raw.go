package sockets

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The system calls of a refresh and on the way to a wake, none of which blocks.
// They bypass the Go runtime, for the reason given at Poller.Run.

// rawEpollWait returns the events that an epoll instance has now. It does not
// block.
func rawEpollWait(epfd int, events []unix.EpollEvent) (int, error) {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// rawEpollDelete removes a descriptor from an epoll instance.
func rawEpollDelete(epfd, fd int) error {
	if _, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(epfd), unix.EPOLL_CTL_DEL, uintptr(fd), 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// rawClose closes a duplicate and ignores the result. The program has the socket
// open too, so closing the duplicate tears nothing down.
func rawClose(fd int) { _, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

// rawFstat calls fstat.
func rawFstat(fd int, st *unix.Stat_t) unix.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_FSTAT, uintptr(fd), uintptr(unsafe.Pointer(st)), 0)
	return errno
}

// rawQueue returns the length of a socket's queue, or -1 if the kernel does not
// report it.
func rawQueue(fd int, which uint) int {
	var n int32
	if _, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), uintptr(which), uintptr(unsafe.Pointer(&n))); errno != 0 {
		return -1
	}
	return int(n)
}
