package sockets

import (
	"fmt"
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Info describes a socket.
type Info struct {
	Family    int // unix.AF_INET, AF_INET6, AF_UNIX and others
	Type      int // unix.SOCK_STREAM, SOCK_DGRAM and others
	Protocol  int // unix.IPPROTO_TCP, unix.IPPROTO_MPTCP (what Go programs listen with) and others
	Inode     uint64
	Listening bool
	V6Only    bool           // an AF_INET6 socket that accepts no IPv4
	State     State          // for TCP and Multipath TCP, otherwise zero
	Local     netip.AddrPort // invalid for other families than IPv4 and IPv6; IPv4 in IPv6 is unmapped
	Peer      netip.AddrPort // invalid while not connected
	Path      string         // for a unix socket, the path it is bound to; abstract names start with @
	PeerPath  string         // for a unix socket, the path that the other end is bound to
	Connected bool

	// Waiting is, for a listener, the number of complete connections that are not
	// accepted yet. It is at most 1 for a unix socket, and for Multipath TCP
	// before Linux 5.16.
	Waiting uint32

	// Unread and Unsent are, for a connected stream socket, the numbers of bytes
	// that the program has not read and that its peer has not acknowledged. An
	// unknown Unread is 1. Unsent is 0 if unknown and for unix sockets.
	Unread, Unsent uint32
	UnreadEnd      bool // the peer has finished sending, and the program has not read the end

	Traffic  Traffic // for a TCP connection
	InfoSize int     // bytes of tcp_info that the kernel returned; 0 means that Traffic is unknown

	lingers bool // closing its last descriptor may block
}

// Socket returns the description of a TCP socket in the form that Dump returns.
func (in *Info) Socket() Socket {
	s := Socket{Family: uint8(in.Family), State: in.State, Local: in.Local, Remote: in.Peer, Inode: in.Inode,
		RQueue: in.Unread, WQueue: in.Unsent, Traffic: in.Traffic, InfoSize: in.InfoSize}
	switch {
	case in.Listening:
		s.RQueue = in.Waiting
	case in.UnreadEnd:
		s.RQueue++ // the kernel counts the end as one byte
	}
	return s
}

// Inspect describes the socket fd without changing it.
func Inspect(fd int) (Info, error) {
	var in Info
	for _, o := range []struct {
		name string
		opt  int
		into *int
	}{
		{"family", unix.SO_DOMAIN, &in.Family},
		{"type", unix.SO_TYPE, &in.Type},
		{"protocol", unix.SO_PROTOCOL, &in.Protocol},
	} {
		n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, o.opt)
		if err != nil {
			return Info{}, fmt.Errorf("cannot read the %s of socket %d: %w", o.name, fd, err)
		}
		*o.into = n
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return Info{}, fmt.Errorf("cannot read the inode of socket %d: %w", fd, err)
	}
	in.Inode = st.Ino
	// Sockets of families without listeners return an error here, so they do not
	// listen.
	if n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err == nil {
		in.Listening = n != 0
	}
	switch in.Family {
	case unix.AF_INET, unix.AF_INET6, unix.AF_UNIX:
	default:
		return in, nil
	}
	if l, err := unix.GetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER); err != nil || l.Onoff != 0 {
		in.lingers = true
	}
	if in.Family == unix.AF_INET6 {
		n, err := unix.GetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
		if err != nil {
			return Info{}, fmt.Errorf("cannot read IPV6_V6ONLY of socket %d: %w", fd, err)
		}
		in.V6Only = n != 0
	}
	if err := in.readTCP(fd); err != nil {
		return Info{}, err
	}
	local, err := unix.Getsockname(fd)
	if err != nil {
		return Info{}, fmt.Errorf("cannot read the address of socket %d: %w", fd, err)
	}
	in.Local, in.Path = address(local)
	peer, err := unix.Getpeername(fd)
	switch err {
	case nil:
		in.Connected = true
		in.Peer, in.PeerPath = address(peer)
	case unix.ENOTCONN, unix.EINVAL, unix.EOPNOTSUPP:
		// EINVAL is returned for a TCP socket that both ends have closed or that
		// is shut down.
	default:
		return Info{}, fmt.Errorf("cannot read the peer of socket %d: %w", fd, err)
	}
	return in, in.readQueues(fd)
}

// readTCP reads the state and the traffic of a TCP socket. A Multipath TCP
// connection has the state of its first path, and its traffic is unknown.
func (in *Info) readTCP(fd int) error {
	if in.Protocol != unix.IPPROTO_TCP && in.Protocol != unix.IPPROTO_MPTCP {
		return nil
	}
	var block [infoBlock]byte
	size := uint32(len(block))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(&block[0])), uintptr(unsafe.Pointer(&size)), 0)
	return in.parseTCP(fd, block[:min(int(size), len(block))], errno)
}

// infoBlock is more than any kernel's tcp_info, in bytes.
const infoBlock = 512

// parseTCP sets in from the tcp_info that the kernel returned for fd, or from
// errno if it returned none.
func (in *Info) parseTCP(fd int, b []byte, errno unix.Errno) error {
	switch {
	case errno != 0 && in.Protocol == unix.IPPROTO_MPTCP:
		return nil // supported since Linux 5.16
	case errno != 0:
		return fmt.Errorf("cannot read the TCP state of socket %d: %w", fd, errno)
	case len(b) <= infoUnacked+4:
		return fmt.Errorf("cannot read the TCP state of socket %d: %w", fd, errTruncated)
	}
	in.State = State(b[0])
	switch {
	case in.Listening:
		in.Waiting = native.Uint32(b[infoUnacked:]) // of a listener, the length of its queue
	case in.Protocol == unix.IPPROTO_TCP:
		in.Traffic, in.InfoSize = parseInfo(b), len(b)
	}
	return nil
}

// readQueues sets Unread and Unsent of a stream socket. Where the kernel does not
// report the queue, as for Multipath TCP before Linux 5.18, Unread is 1.
func (in *Info) readQueues(fd int) error {
	switch {
	case in.Listening:
		if in.Family != unix.AF_UNIX && in.State == Listen {
			return nil // tcp_info contained it
		}
		set := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(set, 0)
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("cannot read the queue of socket %d: %w", fd, err)
		}
		if err != nil || n > 0 {
			in.Waiting = 1
		}
		return nil
	case in.Type != unix.SOCK_STREAM || !in.Connected:
		return nil
	}
	in.Unread, in.Unsent, in.UnreadEnd = 1, 0, in.State == CloseWait && holdsPackets(fd)
	if n, err := unix.IoctlGetInt(fd, unix.TIOCINQ); err == nil {
		in.Unread = uint32(max(n, 0))
	}
	if in.Family == unix.AF_UNIX {
		return nil
	}
	if n, err := unix.IoctlGetInt(fd, unix.TIOCOUTQ); err == nil {
		in.Unsent = uint32(max(n, 0))
	}
	return nil
}

// holdsPackets reports whether packets wait in a socket, or may wait because the
// kernel does not report it (before Linux 4.12). A packet that only ends the
// connection has no bytes.
func holdsPackets(fd int) bool {
	var info [16]uint32 // the first is the memory of received packets
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	return errno != 0 || info[0] > 0
}

func address(sa unix.Sockaddr) (ap netip.AddrPort, path string) {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)), ""
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port)), ""
	case *unix.SockaddrUnix:
		return netip.AddrPort{}, sa.Name
	}
	return netip.AddrPort{}, ""
}

// failure returns an error that names the failed system call.
func failure(call string, err error) error { return os.NewSyscallError(call, err) }
