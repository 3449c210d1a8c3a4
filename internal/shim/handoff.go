package shim

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bind handoff: the shim holds a listening socket at an exposed address whether or
// not the program runs. When the program binds that address, the shim replaces the
// program's own socket with the held one. Clients that came earlier are in its
// backlog, and the program accepts them itself. A UDP socket is held in the same
// way, and datagrams wait in it.
//
// The program runs under a seccomp filter that reports bind(2) on a descriptor. The
// shim answers the reports. The daemon and the watchdog hold duplicates of the
// descriptor, because binds fail with ENOSYS once nothing holds it. One goroutine
// serves the descriptors of all programs.

// readBinds answers reports until ctx ends.
func (s *Shim) readBinds(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _, _ = unix.Write(s.notes.stop[1], []byte{0}) })
	defer stop()
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(s.notes.epfd, events, -1)
		if ctx.Err() != nil {
			return nil
		}
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("cannot wait for binds: %w", err)
		}
		for _, e := range events[:n] {
			fd := int(e.Fd)
			switch {
			case fd == s.notes.stop[0]:
			case e.Events&unix.EPOLLIN != 0:
				s.readBind(fd)
			default: // every process under the filter has ended
				s.dropFilter(fd)
			}
		}
	}
}

func (s *Shim) readBind(fd int) {
	s.mu.Lock()
	f := s.filters[fd]
	s.mu.Unlock()
	if f == nil {
		return
	}
	s.notes.mu.Lock()
	defer s.notes.mu.Unlock()
	slot := s.notes.slot
	slot.notif = seccompNotif{}
	slot.run, slot.idLen = f.run, uint32(copy(slot.id[:], f.id))
	err := ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&slot.notif))
	if err == nil {
		s.answerBind(f, slot.notif)
	} else if err != unix.ENOENT && err != unix.EINTR { // an interrupted thread repeats the call
		s.log.Error("cannot read a bind", "instance", f.id, "err", err)
	}
	slot.notif.id = 0
}

// resumeBind answers the report of f that an earlier shim has read and not
// answered, if there is one.
func (s *Shim) resumeBind(f *filter) {
	s.notes.mu.Lock()
	defer s.notes.mu.Unlock()
	n := s.notes.left.notif
	if n.id == 0 || s.notes.left.owner() != f.key {
		return
	}
	s.notes.left.notif.id = 0
	if valid(f.fd, n.id) {
		s.log.Warn("answering a bind that the previous shim had read", "instance", f.id)
		s.answerBind(f, n)
	}
}

// resumeTaken calls resumeBind for the run whose report was not answered, if the
// watchdog has kept the descriptor on which its binds are reported.
func (s *Shim) resumeTaken() {
	s.mu.Lock()
	f := s.filterOf(s.notes.left.owner())
	s.mu.Unlock()
	if f != nil {
		s.resumeBind(f)
	}
}

// answerBind answers a report: it hands over the held socket, ignores the removal
// of a held socket's file, or lets the kernel execute the call.
func (s *Shim) answerBind(f *filter, n seccompNotif) {
	answer := s.handOver
	if _, ok := trappedUnlinks[trapped{n.arch, uint32(n.nr)}]; ok {
		answer = s.keepFile
	}
	handed, err := answer(f, &n)
	if err != nil {
		s.log.Warn("a socket was not handed over", "instance", f.id, "err", err)
	}
	r := seccompResponse{id: n.id}
	if !handed {
		r.flags = unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE
	}
	if err := ioctl(f.fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&r)); err != nil && err != unix.ENOENT {
		s.log.Error("cannot answer a bind", "instance", f.id, "err", err)
	}
}

// handOver replaces the socket that the program binds in n with the held one, if
// there is one for its address. It reports whether the bind is thereby complete.
func (s *Shim) handOver(f *filter, n *seccompNotif) (bool, error) {
	if !s.holds(f.id) {
		return false, nil
	}
	c, ok, err := readCall(n)
	if err != nil || !ok || !s.belongs(f.id, c.pid) {
		return false, err
	}
	if _, ok := s.heldFor(f.id, c, false); !ok {
		if _, ok = s.heldFor(f.id, c, true); !ok {
			return false, nil
		}
	}
	own, err := socketOf(c.pid, c.fd)
	if err != nil {
		return false, err
	}
	defer unix.Close(own)
	kind, err := unix.GetsockoptInt(own, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return false, nil // the descriptor is not a socket
	}
	h, ok := s.heldFor(f.id, c, kind == unix.SOCK_DGRAM)
	if !ok {
		return false, nil
	}
	// The arguments read belong to this call only if it is still pending. This is
	// not a security check: the program could have bound the socket itself.
	if !valid(f.fd, n.id) {
		return false, nil
	}
	inode := inodeOf(h.fd)
	if inode != 0 && inodeOf(own) == inode { // the socket was handed over, but the answer was lost
		return true, nil
	}
	if !replaceable(own, h.fd) {
		return false, nil
	}
	if on, _ := unix.GetsockoptInt(own, unix.SOL_SOCKET, unix.SO_REUSEPORT); (on == 0 || h.as.path != "") && f.handed[inode] && !f.removed[h.addr] && s.inUse(f, inode) {
		return false, nil // the program's bind fails because the address is in use, as without a handoff
	}
	want := form{ip: c.addr.Addr(), port: c.addr.Port(), udp: h.as.udp}
	if h.as.path != "" {
		want = h.as
		if h, err = s.bindUnix(f, h, c, own); err != nil {
			return false, err
		}
		want, inode = h.as, inodeOf(h.fd)
	}
	if want.ip.Is6() && want.ip.IsUnspecified() {
		only, err := unix.GetsockoptInt(own, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
		want.dual = err == nil && only == 0
	}
	if want != h.as {
		if h, err = s.reform(f, h, want, own); err != nil {
			return false, err
		}
		inode = inodeOf(h.fd)
	}
	carryOptions(own, h.fd)
	add := seccompAddFD{id: n.id, flags: unix.SECCOMP_ADDFD_FLAG_SETFD, srcfd: uint32(h.fd), newfd: uint32(c.fd)}
	if closesOnExec(c.pid, c.fd) {
		add.newfdFlags = unix.O_CLOEXEC
	}
	if err := ioctl(f.fd, notifAddFD, unsafe.Pointer(&add)); err != nil {
		return false, fmt.Errorf("cannot put the socket of %s into process %d: %w", h.as, c.pid, err)
	}
	s.mu.Lock()
	f.handed[inode] = true
	delete(f.removed, h.addr)
	s.mirrorLocked(f.id)
	s.mu.Unlock()
	return true, nil
}

func (s *Shim) holds(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.held[id]) > 0
}

// heldFor returns the held socket for a bind of the address that it is bound to, or of
// its exposed path or address, or of the unspecified address with its port.
func (s *Shim) heldFor(id string, c bindCall, udp bool) (held, bool) {
	s.mu.Lock()
	hs := slices.Clone(s.held[id])
	s.mu.Unlock()
	for _, h := range hs {
		if h.as.path == "" && c.path == "" && h.as.udp == udp && h.as.port == c.addr.Port() && h.as.ip == c.addr.Addr() {
			return h, true
		}
	}
	for _, h := range hs {
		f, err := parseForm(h.addr)
		switch {
		case err != nil: // a spare, which no bind refers to
		case f.path != "" || c.path != "":
			if f.path != "" && !udp && sameFile(c.tid, unix.AT_FDCWD, c.path, f.path) {
				return h, true
			}
		case f.udp == udp && f.port == c.addr.Port() && meant(h.addr, f, c.addr.Addr()):
			return h, true
		}
	}
	return held{}, false
}

func meant(text string, exposed form, bound netip.Addr) bool {
	switch {
	case bound.IsUnspecified():
		return bound.Is6() || exposed.ip.Unmap().Is4() || exposed.dual
	case exposed.ip.IsUnspecified():
		return false
	case strings.HasPrefix(strings.TrimPrefix(text, "udp:"), "localhost:"):
		return bound.Unmap().IsLoopback()
	}
	return bound.Unmap() == exposed.ip.Unmap()
}
