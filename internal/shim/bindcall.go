package shim

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"lull/internal/platform/proc"
)

// bindCall holds the arguments of a bind by the program.
type bindCall struct {
	pid  int // the process; its threads share their descriptors
	tid  int
	fd   int
	addr netip.AddrPort
	path string // path of a unix socket, in place of addr
}

// readCall reads the arguments of a reported bind. It returns false if the address
// is neither an IP address with a port nor the path of a unix socket.
func readCall(n *seccompNotif) (bindCall, bool, error) {
	c := bindCall{tid: int(n.pid)}
	if n.pid == 0 {
		return c, false, nil
	}
	fd, at, size := n.args[0], n.args[1], n.args[2]
	if n.arch == archI386 && n.nr == socketcall {
		var b [12]byte
		if err := readMemory(int(n.pid), n.args[1], b[:]); err != nil {
			return c, false, err
		}
		word := func(i int) uint64 { return uint64(binary.NativeEndian.Uint32(b[4*i:])) }
		fd, at, size = word(0), word(1), word(2)
	}
	if size < 4 {
		return c, false, nil
	}
	b := make([]byte, min(size, unix.SizeofSockaddrUnix))
	if err := readMemory(int(n.pid), at, b); err != nil {
		return c, false, err
	}
	port := binary.BigEndian.Uint16(b[2:])
	switch family := binary.NativeEndian.Uint16(b); {
	case family == unix.AF_UNIX:
		path, _, _ := bytes.Cut(b[2:], []byte{0})
		c.path, port = string(path), 1
		if c.path == "" { // an abstract address
			return c, false, nil
		}
	case family == unix.AF_INET && len(b) >= 8:
		c.addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), port)
	case family == unix.AF_INET6 && len(b) >= 24:
		c.addr = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])), port)
	default:
		return c, false, nil
	}
	if port == 0 {
		return c, false, nil
	}
	var err error
	c.fd = int(int32(uint32(fd)))
	c.pid, err = processOf(int(n.pid))
	return c, err == nil, err
}

func readMemory(tid int, at uint64, b []byte) error {
	local := []unix.Iovec{{Base: &b[0]}}
	local[0].SetLen(len(b))
	n, err := unix.ProcessVMReadv(tid, local, []unix.RemoteIovec{{Base: uintptr(at), Len: len(b)}}, 0)
	if err == nil && n < len(b) {
		err = unix.EFAULT
	}
	if err != nil {
		return fmt.Errorf("cannot read the address that thread %d passes: %w", tid, err)
	}
	return nil
}

// processOf returns the PID of the process to which a thread belongs.
func processOf(tid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "Tgid:"); ok {
			var pid int
			_, err := fmt.Sscan(v, &pid)
			return pid, err
		}
	}
	return 0, fmt.Errorf("cannot find the process of thread %d", tid)
}

// socketOf returns a duplicate of a process's descriptor.
func socketOf(pid, fd int) (int, error) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, fmt.Errorf("cannot open process %d: %w", pid, err)
	}
	defer unix.Close(pidfd)
	own, err := unix.PidfdGetfd(pidfd, fd, 0)
	if err != nil {
		return -1, fmt.Errorf("cannot duplicate descriptor %d of process %d: %w", fd, pid, err)
	}
	return own, nil
}

// inodeOf returns the inode number of a socket, or 0 if that cannot be read.
func inodeOf(fd int) uint64 {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return 0
	}
	return st.Ino
}

// replaceable reports whether own is a socket in the shim's network namespace that
// has not been used yet and that kept can replace.
func replaceable(own, kept int) bool {
	opt := func(fd, name int) int { v, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, name); return v }
	local := opt(kept, unix.SO_DOMAIN) == unix.AF_UNIX
	if opt(own, unix.SO_TYPE) != opt(kept, unix.SO_TYPE) || opt(own, unix.SO_ACCEPTCONN) != 0 || (opt(own, unix.SO_DOMAIN) == unix.AF_UNIX) != local {
		return false
	}
	if local { // let the kernel answer for a socket that is already bound
		sa, err := unix.Getsockname(own)
		u, ok := sa.(*unix.SockaddrUnix)
		return err == nil && ok && (u.Name == "" || u.Name == "@")
	}
	// A Multipath TCP socket can be replaced by a plain TCP one, to which it may
	// fall back anyway.
	if p := opt(own, unix.SO_PROTOCOL); p != opt(kept, unix.SO_PROTOCOL) && p != unix.IPPROTO_MPTCP {
		return false
	}
	if device, err := unix.GetsockoptString(own, unix.SOL_SOCKET, unix.SO_BINDTODEVICE); err == nil && device != "" {
		return false
	}
	cookie := func(fd int) uint64 {
		v, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		if err != nil {
			return 0 // before Linux 5.14
		}
		return v
	}
	return cookie(own) == cookie(kept)
}

// inUse reports whether a process of the run has a socket open. A process that
// cannot be searched does not count.
func (s *Shim) inUse(f *filter, inode uint64) bool {
	used, err := s.findSocket(f, inode)
	if err != nil {
		s.log.Warn("some processes of an instance could not be searched for a socket", "instance", f.id, "err", err)
	}
	return used
}

// findSocket reports whether a process of the run has a socket open. If it returns
// false and an error, some processes could not be searched.
func (s *Shim) findSocket(f *filter, inode uint64) (bool, error) {
	pids, ok, err := s.pidsOf(f.id)
	if !ok {
		s.mu.Lock()
		r := s.runs[f.id]
		s.mu.Unlock()
		if r == nil || r.Run.Run != f.run {
			return false, nil
		}
		pids, err = s.proc.Tree(r.PID, Mark(r.ID), []int{os.Getpid(), 1})
	}
	errs := []error{err}
	for _, pid := range pids {
		fds, err := s.proc.Sockets(pid)
		if err != nil && !errors.Is(err, proc.ErrGone) {
			errs = append(errs, err)
		}
		for _, fd := range fds {
			if fd.Inode == inode {
				return true, nil
			}
		}
	}
	return false, errors.Join(errs...)
}

// closesOnExec reports whether a process's descriptor is close-on-exec. The
// descriptor that replaces it must be too, because a program that executes itself
// again relies on that.
func closesOnExec(pid, fd int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, fd))
	if err != nil {
		return true
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "flags:"); ok {
			var flags int
			if _, err := fmt.Sscanf(strings.TrimSpace(v), "%o", &flags); err == nil {
				return flags&unix.O_CLOEXEC != 0
			}
		}
	}
	return true
}

// carried lists the socket options that programs set before they bind.
var carried = []struct{ level, name int }{
	{unix.SOL_SOCKET, unix.SO_REUSEADDR}, {unix.SOL_SOCKET, unix.SO_REUSEPORT}, {unix.SOL_SOCKET, unix.SO_KEEPALIVE},
	{unix.SOL_SOCKET, unix.SO_BROADCAST}, {unix.SOL_SOCKET, unix.SO_PASSCRED}, {unix.SOL_SOCKET, unix.SO_TIMESTAMP},
	{unix.IPPROTO_IP, unix.IP_PKTINFO}, {unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO},
	{unix.SOL_SOCKET, unix.SO_OOBINLINE}, {unix.SOL_SOCKET, unix.SO_MARK}, {unix.SOL_SOCKET, unix.SO_PRIORITY},
	{unix.IPPROTO_TCP, unix.TCP_NODELAY}, {unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT}, {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE},
	{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL}, {unix.IPPROTO_TCP, unix.TCP_KEEPCNT}, {unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT},
	{unix.IPPROTO_TCP, unix.TCP_SYNCNT}, {unix.IPPROTO_TCP, unix.TCP_FASTOPEN},
}

// carryOptions copies the options of the program's own socket to kept, which may
// still have those of an earlier run.
func carryOptions(own, kept int) {
	for _, o := range carried {
		want, err := unix.GetsockoptInt(own, o.level, o.name)
		if err != nil {
			continue // sockets of this kind do not have the option
		}
		if has, err := unix.GetsockoptInt(kept, o.level, o.name); err == nil && has != want {
			_ = unix.SetsockoptInt(kept, o.level, o.name, want) // the program works without it
		}
	}
	for _, name := range []int{unix.SO_RCVBUF, unix.SO_SNDBUF} {
		want, err := unix.GetsockoptInt(own, unix.SOL_SOCKET, name)
		if has, herr := unix.GetsockoptInt(kept, unix.SOL_SOCKET, name); err == nil && herr == nil && has != want {
			_ = unix.SetsockoptInt(kept, unix.SOL_SOCKET, name, want/2) // the kernel doubles the value
		}
	}
	flags, err := unix.FcntlInt(uintptr(own), unix.F_GETFL, 0)
	if err == nil {
		_ = unix.SetNonblock(kept, flags&unix.O_NONBLOCK != 0)
	}
}
