package sockets

import (
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Info describes a socket.
type Info struct {
	Family    int // unix.AF_INET, AF_INET6, AF_UNIX and others
	Type      int // unix.SOCK_STREAM, SOCK_DGRAM and others
	Protocol  int // unix.IPPROTO_TCP, unix.IPPROTO_MPTCP (what Go programs listen with) and others
	Inode     uint64
	Listening bool
	V6Only    bool           // an AF_INET6 socket that does not accept IPv4
	State     State          // for TCP and Multipath TCP, otherwise zero
	Local     netip.AddrPort // invalid for other families than IPv4 and IPv6; IPv4 in IPv6 is unmapped
	Peer      netip.AddrPort // invalid while not connected
	Path      string         // for a unix socket, the path it is bound to; abstract names start with @
	PeerPath  string         // for a unix socket, the path that the other end is bound to
	Connected bool
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
	// Families without listeners return an error; such sockets do not listen.
	if n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err == nil {
		in.Listening = n != 0
	}
	switch in.Family {
	case unix.AF_INET, unix.AF_INET6, unix.AF_UNIX:
	default:
		return in, nil
	}
	if in.Family == unix.AF_INET6 {
		n, err := unix.GetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
		if err != nil {
			return Info{}, fmt.Errorf("cannot read IPV6_V6ONLY of socket %d: %w", fd, err)
		}
		in.V6Only = n != 0
	}
	if in.Protocol == unix.IPPROTO_TCP || in.Protocol == unix.IPPROTO_MPTCP {
		ti, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil && in.Protocol == unix.IPPROTO_TCP { // Multipath TCP supports it since Linux 5.16
			return Info{}, fmt.Errorf("cannot read the TCP state of socket %d: %w", fd, err)
		}
		if err == nil {
			in.State = State(ti.State)
		}
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
	return in, nil
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
