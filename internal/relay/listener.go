package relay

import (
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

type openCount struct{ atomic.Int64 }

// A client that has disappeared without a FIN or RST must not keep an instance
// awake forever. TCP keepalive therefore probes a client after a minute of silence.
const (
	keepAliveIdle     = 60 // seconds
	keepAliveInterval = 15 // seconds
	keepAliveCount    = 4
)

// onLoops registers the socket with all event loops. It sets the options that Linux
// copies from a listening socket to accepted ones.
func (l *Listener) onLoops(t *net.TCPListener) error {
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	if err := raw.Control(func(fd uintptr) { l.fd = int(fd) }); err != nil {
		return err
	}
	for _, o := range [...][3]int{
		{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepAliveIdle},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, keepAliveInterval},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, keepAliveCount},
	} {
		if err := unix.SetsockoptInt(l.fd, o[0], o[1], o[2]); err != nil {
			return err
		}
	}
	for i, lp := range l.in.r.loops {
		if err := lp.listen(l); err != nil {
			for _, done := range l.in.r.loops[:i] {
				done.unlisten(l.fd)
			}
			return err
		}
	}
	return nil
}

// close stops accepting. It takes the lock so that the descriptor's number cannot
// be reused while a loop is about to accept on it.
func (l *Listener) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.closed = true
	if l.fd >= 0 {
		for _, lp := range l.in.r.loops {
			lp.unlisten(l.fd)
		}
	}
	if err := l.ln.Close(); err != nil {
		l.in.log.Warn("cannot close listener", "instance", l.in.name, "err", err)
	}
}

const acceptBatch = 16

// accept takes connections from the backlog, but only some at a time, so that open
// connections are served in between. epoll then reports the listener again, because
// it is registered level-triggered.
func (lp *loop) accept(l *Listener) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for range acceptBatch {
		if l.closed {
			return
		}
		n, _, errno := syscall.RawSyscall6(unix.SYS_ACCEPT4, uintptr(l.fd), 0, 0,
			unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
		switch errno {
		case 0:
			lp.arrive(l, int(n))
		case unix.EINTR, unix.ECONNABORTED:
		case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM:
			// The client stays in the backlog. Accepting again at once would use up
			// the CPU.
			lp.pauseAccept(l, errno)
			return
		default:
			return
		}
	}
}

func (lp *loop) pauseAccept(l *Listener, errno syscall.Errno) {
	l.in.log.Warn("cannot accept for now", "instance", l.in.name, "err", errno)
	l.in.stats.note(errno)
	lp.unlisten(l.fd)
	lp.at(time.Now().Add(50*time.Millisecond).UnixNano(), func() {
		l.mu.RLock()
		defer l.mu.RUnlock()
		if l.closed {
			return
		}
		if err := lp.listen(l); err != nil {
			l.in.log.Error("cannot accept connections", "instance", l.in.name, "err", err)
		}
	})
}

// remoteOf returns the peer's address. It costs a system call, so only slow paths
// use it.
func remoteOf(fd int) netip.AddrPort {
	sa, err := unix.Getpeername(fd)
	if err != nil {
		return netip.AddrPort{}
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// connectRaw starts to connect fd, without allocating memory.
func connectRaw(fd int, to netip.AddrPort) syscall.Errno {
	port := to.Port()
	if a := to.Addr().Unmap(); a.Is4() {
		sa := unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: a.As4()}
		*(*[2]byte)(unsafe.Pointer(&sa.Port)) = [2]byte{byte(port >> 8), byte(port)}
		_, _, e := syscall.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&sa)), unsafe.Sizeof(sa))
		return e
	}
	sa := unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: to.Addr().As16()}
	*(*[2]byte)(unsafe.Pointer(&sa.Port)) = [2]byte{byte(port >> 8), byte(port)}
	_, _, e := syscall.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&sa)), unsafe.Sizeof(sa))
	return e
}
