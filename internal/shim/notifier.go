package shim

import (
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// seccompNotif is struct seccomp_notif of the kernel.
type seccompNotif struct {
	id    uint64
	pid   uint32 // the thread; 0 if it is not in our pid namespace
	flags uint32
	nr    int32
	arch  uint32
	ip    uint64
	args  [6]uint64
}

// seccompResponse is struct seccomp_notif_resp.
type seccompResponse struct {
	id    uint64
	val   int64
	err   int32
	flags uint32
}

// seccompAddFD is struct seccomp_notif_addfd.
type seccompAddFD struct {
	id         uint64
	flags      uint32
	srcfd      uint32
	newfd      uint32
	newfdFlags uint32
}

// ioctl requests for a filter's descriptor that package unix does not define.
const (
	notifIDValid = 0x40082102
	notifAddFD   = 0x40182103
)

// slot holds the report that is being answered, in memory backed by a file. The
// kernel delivers a report only once and writes it directly into the slot. If the
// shim is killed before it answers, the next shim finds the report there.
type slot struct {
	notif seccompNotif // id 0 means none
	run   uint64
	idLen uint32
	id    [128]byte
}

func (s *slot) owner() key { return key{string(s.id[:min(int(s.idLen), len(s.id))]), s.run} }

// notifier reads the reports of all filters.
type notifier struct {
	epfd int
	stop [2]int // a pipe; a byte in it makes the reader return
	slot *slot
	left slot       // holds a report that the previous shim read and did not answer
	mu   sync.Mutex // held while a report is answered
}

func newNotifier(path string) (*notifier, error) {
	n := &notifier{}
	var err error
	if n.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, err
	}
	if err := unix.Pipe2(n.stop[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, err
	}
	if err := n.watch(n.stop[0]); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size := os.Getpagesize()
	if err := f.Truncate(int64(size)); err != nil {
		return nil, err
	}
	b, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("cannot map %s: %w", path, err)
	}
	n.slot = (*slot)(unsafe.Pointer(&b[0]))
	n.left = *n.slot
	return n, nil
}

func (n *notifier) watch(fd int) error {
	return unix.EpollCtl(n.epfd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

func valid(fd int, id uint64) bool { return ioctl(fd, notifIDValid, unsafe.Pointer(&id)) == nil }

func ioctl(fd int, req uintptr, arg unsafe.Pointer) error {
	for {
		_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
		switch e {
		case 0:
			return nil
		case unix.EINTR:
			continue
		}
		return e
	}
}
