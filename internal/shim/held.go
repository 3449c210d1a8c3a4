package shim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// held is a socket that outlives the programs that accept or receive on it.
type held struct {
	addr string // the requested address, in the form of shimctl.Addr
	as   form   // the bound address; a program may have bound more than is exposed
	fd   int
	file fileID // for a unix socket
}

// form is the address of a socket, with the families that it accepts.
type form struct {
	ip   netip.Addr // an IPv4 address, or an IPv6 address that may be a mapped IPv4 one
	port uint16
	dual bool   // [::] that also accepts IPv4
	udp  bool   // a UDP socket; otherwise it listens
	path string // path of a unix socket; the other fields are then zero
}

func (f form) v4() bool { return f.ip.Is4() }

// String returns f in the format that parseForm accepts.
func (f form) String() string {
	proto := ""
	switch {
	case f.path != "":
		return "unix:" + f.path
	case f.udp:
		proto = "udp:"
	}
	if f.dual {
		return fmt.Sprintf("%s:%d", proto, f.port)
	}
	return proto + netip.AddrPortFrom(f.ip, f.port).String()
}

func parseForm(addr string) (form, error) {
	if _, path, ok := shimctl.UnixAddr(addr); ok {
		return form{path: path}, nil
	}
	addr, udp := shimctl.UDPAddr(addr)
	ip, port, any6, err := parseAddr(addr)
	return form{ip: ip.WithZone(""), port: uint16(port), dual: any6, udp: udp}, err
}

// formOf reads the form of a socket.
func formOf(fd int) (form, error) {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return form{}, err
	}
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return form{}, err
	}
	udp := kind == unix.SOCK_DGRAM
	switch sa := sa.(type) {
	case *unix.SockaddrUnix:
		return form{path: sa.Name}, nil
	case *unix.SockaddrInet4:
		return form{ip: netip.AddrFrom4(sa.Addr), port: uint16(sa.Port), udp: udp}, nil
	case *unix.SockaddrInet6:
		f := form{ip: netip.AddrFrom16(sa.Addr), port: uint16(sa.Port), udp: udp}
		if f.ip.IsUnspecified() {
			only, err := unix.GetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
			if err != nil {
				return form{}, err
			}
			f.dual = only == 0
		}
		return f, nil
	}
	return form{}, unix.EAFNOSUPPORT
}

// hold returns the sockets for addrs: those that old has, and new ones for the
// others, which it binds. If as has an entry for an address, it binds that form
// instead. drop are the sockets of old that the caller must close. After an error
// nothing has changed.
func hold(old []held, addrs []string, as map[string]string) (now, drop []held, err error) {
	have := map[string]held{}
	for _, h := range old {
		have[h.addr] = h
	}
	var fresh []int
	seen := map[string]bool{}
	for _, a := range addrs {
		if seen[a] {
			err = shimctl.Errorf(shimctl.CodeInvalid, "cannot hold %s twice", a)
			break
		}
		seen[a] = true
		h, ok := have[a]
		if !ok && isSpare(a) {
			continue // a spare that has been lost is not replaced
		}
		if !ok {
			h = held{addr: a}
			if h.fd, err = listen(cmp.Or(as[a], a)); err != nil {
				break
			}
			fresh = append(fresh, h.fd)
			if h.as, err = formOf(h.fd); err != nil {
				break
			}
			h.identify()
		}
		now = append(now, h)
	}
	if err != nil {
		shimctl.CloseAll(fresh)
		return nil, nil, err
	}
	for _, h := range old {
		if !seen[h.addr] {
			drop = append(drop, h)
		}
	}
	return now, drop, nil
}

// backlog is the backlog that the shim requests. net.core.somaxconn limits it,
// usually to less.
const backlog = 4096

// parseAddr parses host:port. An empty host means every address of both families,
// and sets any6; localhost means 127.0.0.1.
func parseAddr(addr string) (ip netip.Addr, port int, any6 bool, err error) {
	host, p, err := net.SplitHostPort(addr)
	if err != nil {
		return ip, 0, false, shimctl.Errorf(shimctl.CodeInvalid, "cannot hold %q: want host:port", addr)
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return ip, 0, false, shimctl.Errorf(shimctl.CodeInvalid, "cannot hold %q: port %q", addr, p)
	}
	switch host {
	case "":
		return netip.IPv6Unspecified(), int(n), true, nil
	case "localhost":
		host = "127.0.0.1"
	}
	if ip, err = netip.ParseAddr(host); err != nil {
		return ip, 0, false, shimctl.Errorf(shimctl.CodeInvalid, "cannot hold %q: %q is not an address", addr, host)
	}
	return ip, int(n), false, nil
}

// listen returns a socket bound to addr. Unless it is a UDP socket, it listens.
func listen(addr string) (int, error) {
	if user, path, ok := shimctl.UnixAddr(addr); ok {
		return listenUnix(user, path)
	}
	hostport, udp := shimctl.UDPAddr(addr)
	ip, port, any6, err := parseAddr(hostport)
	if err != nil {
		return -1, err
	}
	fd, err := bind(ip, port, any6, udp)
	if any6 && err == unix.EAFNOSUPPORT {
		fd, err = bind(netip.IPv4Unspecified(), port, false, udp)
	}
	if err != nil {
		return -1, shimctl.Errorf(shimctl.CodeFailed, "cannot hold %s: %w", addr, err)
	}
	return fd, nil
}

func bind(ip netip.Addr, port int, dual, udp bool) (int, error) {
	family, kind := unix.AF_INET, unix.SOCK_STREAM
	if udp {
		kind = unix.SOCK_DGRAM
	}
	var sa unix.Sockaddr = &unix.SockaddrInet4{Port: port, Addr: [4]byte{}}
	if ip.Is4() {
		sa = &unix.SockaddrInet4{Port: port, Addr: ip.As4()}
	} else {
		family = unix.AF_INET6
		in6 := &unix.SockaddrInet6{Port: port, Addr: ip.As16()}
		if zone := ip.Zone(); zone != "" {
			iface, err := net.InterfaceByName(zone)
			if err != nil {
				return -1, err
			}
			in6.ZoneId = uint32(iface.Index)
		}
		sa = in6
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if !udp { // for UDP, this option would let others share the port
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if err == nil && family == unix.AF_INET6 {
		only := 1
		if dual || ip.Is4In6() {
			only = 0
		}
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only)
	}
	if err == nil {
		err = unix.Bind(fd, sa)
	}
	if err == nil && !udp {
		err = unix.Listen(fd, backlog)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (s *Shim) hold(_ context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Hold
	if err := r.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if err := validID(m.ID); err != nil {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "%v", err)
	}
	if len(m.Addrs) > shimctl.MaxFDs || len(r.FDs) > 0 && len(r.FDs) != len(m.Addrs) {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot hold %d addresses for %s with %d descriptors", len(m.Addrs), m.ID, len(r.FDs))
	}
	s.mu.Lock()
	for i, fd := range r.FDs { // the daemon kept these while the shim was replaced
		has := slices.ContainsFunc(s.held[m.ID], func(h held) bool { return h.addr == m.Addrs[i] })
		if has {
			continue
		}
		// A socket without an address cannot be held; a released one has an address
		// but does not listen.
		if f, err := formOf(fd); err == nil && (f.port != 0 || f.path != "") {
			h := held{addr: m.Addrs[i], as: f, fd: fd}
			h.identify()
			s.held[m.ID] = append(s.held[m.ID], h)
			r.FDs[i] = -1
			if s.units[m.ID] != nil && !f.udp {
				_ = unix.Listen(fd, backlog) // many clients may come before the unit runs again
			}
		}
	}
	s.mu.Unlock()
	return shimctl.Answer{}, s.setHeld(m.ID, m.Addrs)
}

func listening(fd int) bool {
	on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	return err == nil && on == 1
}

// setHeld makes exactly the sockets for addrs held under id, and records that for a
// later shim.
func (s *Shim) setHeld(id string, addrs []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.setHeldLocked(id, addrs)
}

func (s *Shim) setHeldLocked(id string, addrs []string) error {
	now, drop, err := hold(s.held[id], addrs, nil)
	if err != nil {
		return err
	}
	defer s.mirrorLocked(id)
	s.dropLocked(id, now, drop)
	if len(now) == 0 {
		delete(s.held, id)
		return remove(s.dir.heldFile(id))
	}
	s.held[id] = now
	for _, h := range now {
		if err := s.reachLocked(id, h); err != nil {
			return err
		}
	}
	return s.saveHeldLocked(id)
}

// saveHeldLocked records for a later shim what is held under id. s.mu must be held.
func (s *Shim) saveHeldLocked(id string) error {
	return save(s.dir.heldFile(id), holdOf(id, s.held[id]), false)
}

func holdOf(id string, hs []held) shimctl.Hold {
	m := shimctl.Hold{ID: id}
	for _, h := range hs {
		m.Addrs, m.As = append(m.Addrs, h.addr), append(m.As, h.as.String())
	}
	return m
}

// keepHeld also holds those of addrs that are not yet held under id.
func (s *Shim) keepHeld(id string, addrs []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := slices.Clone(addrs)
	for _, h := range s.held[id] {
		if !slices.Contains(all, h.addr) {
			all = append(all, h.addr)
		}
	}
	return s.setHeldLocked(id, all)
}

// loadHeld holds again what an earlier shim held. It duplicates the sockets of
// programs that run, and binds the others anew. It reports those that fail; the
// daemon may have kept them.
func (s *Shim) loadHeld() error {
	all, err := loadAll(s.dir.path+"/held", func(h shimctl.Hold) error { return validID(h.ID) })
	errs := []error{err}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.held { // released just before the earlier shim ended
		if !slices.ContainsFunc(all, func(h shimctl.Hold) bool { return h.ID == id }) && err == nil {
			closeHeld(s.held[id])
			delete(s.held, id)
		}
	}
	for _, h := range all {
		as := map[string]string{}
		if len(h.As) == len(h.Addrs) {
			for n, a := range h.Addrs {
				as[a] = h.As[n]
			}
		}
		if r := s.runs[h.ID]; r != nil && r.state == alive && len(s.held[h.ID]) == 0 {
			s.held[h.ID] = s.fromProgram(r.PID, h.Addrs, as)
		}
		now, drop, err := hold(s.held[h.ID], h.Addrs, as)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.dropLocked(h.ID, now, drop)
		s.held[h.ID] = now
		s.mirrorLocked(h.ID)
	}
	return errors.Join(errs...)
}

// fromProgram duplicates the listening sockets that a program got from an earlier
// shim. It recognizes a socket by its address in addrs, or by the bound address
// that as has for it.
func (s *Shim) fromProgram(pid int, addrs []string, as map[string]string) (found []held) {
	fds, err := s.proc.Sockets(pid)
	if err != nil {
		return nil
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(pidfd)
	for _, f := range fds {
		fd, err := unix.PidfdGetfd(pidfd, f.FD, 0)
		if err != nil {
			continue
		}
		i := -1
		if in, err := formOf(fd); err == nil && (listening(fd) || in.udp) {
			i = slices.IndexFunc(addrs, func(a string) bool {
				return boundTo(fd, cmp.Or(as[a], a)) && !slices.ContainsFunc(found, func(h held) bool { return h.addr == a })
			})
		}
		if i < 0 {
			unix.Close(fd)
			continue
		}
		f, err := formOf(fd)
		if err != nil {
			unix.Close(fd)
			continue
		}
		h := held{addr: addrs[i], as: f, fd: fd}
		h.identify()
		found = append(found, h)
	}
	return found
}

// boundTo reports whether a socket is bound to addr.
func boundTo(fd int, addr string) bool {
	want, err := parseForm(addr)
	if err != nil {
		return false
	}
	is, err := formOf(fd)
	return err == nil && is == want
}

func closeHeld(hs []held) {
	for _, h := range hs {
		unix.Close(h.fd)
	}
}

func (s *Shim) unhold(_ context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Unhold
	if err := r.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if !m.Leave {
		return shimctl.Answer{}, s.setHeld(m.ID, nil)
	}
	s.notes.mu.Lock() // no socket may be handed over in the meantime
	defer s.notes.mu.Unlock()
	s.mu.Lock()
	hs := slices.Clone(s.held[m.ID])
	s.mu.Unlock()
	used := map[string]bool{}
	for _, h := range hs {
		if h.as.path != "" {
			in, err := s.findSocket(&filter{key: key{id: m.ID}}, inodeOf(h.fd))
			used[h.addr] = in || err != nil // unknown does not mean closed
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[m.ID] = slices.DeleteFunc(s.held[m.ID], func(h held) bool {
		if used[h.addr] {
			unix.Close(h.fd)
		}
		return used[h.addr]
	})
	return shimctl.Answer{}, s.setHeldLocked(m.ID, nil)
}

func (s *Shim) listeners(_ context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Name
	if err := r.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	hs := s.held[m.ID]
	if len(hs) == 0 {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeNotFound, "cannot send the sockets of %s: none is held", m.ID)
	}
	a := shimctl.Answer{Close: true}
	for _, h := range hs {
		fd, err := unix.FcntlInt(uintptr(h.fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			shimctl.CloseAll(a.FDs)
			return shimctl.Answer{}, fmt.Errorf("cannot give the socket %s: %w", h.addr, err)
		}
		a.FDs = append(a.FDs, fd)
	}
	a.Body = holdOf(m.ID, hs)
	return a, nil
}

// listHeld lists the IDs under which sockets are held.
func (s *Shim) listHeld(_ context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Listing
	if err := r.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := shimctl.Holds{IDs: []string{}}
	for _, id := range slices.Sorted(maps.Keys(s.held)) {
		if id <= m.After || id == tryID {
			continue
		}
		if len(out.IDs) >= shimctl.MaxListed {
			out.More = true
			break
		}
		out.IDs = append(out.IDs, id)
	}
	return shimctl.Answer{Body: out}, nil
}

// dup duplicates descriptors of a process below the shim. With Yama at level 1 only
// an ancestor may do that, so the daemon asks the shim.
func (s *Shim) dup(_ context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Dup
	if err := r.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if len(m.FDs) > shimctl.MaxFDs {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot duplicate %d descriptors at once, at most %d", len(m.FDs), shimctl.MaxFDs)
	}
	pidfd, err := unix.PidfdOpen(m.PID, 0)
	if err != nil {
		return shimctl.Answer{}, dupError(m.PID, -1, err)
	}
	defer unix.Close(pidfd)
	a := shimctl.Answer{Close: true}
	for _, fd := range m.FDs {
		got, err := unix.PidfdGetfd(pidfd, fd, 0)
		if err != nil {
			shimctl.CloseAll(a.FDs)
			return shimctl.Answer{}, dupError(m.PID, fd, err)
		}
		a.FDs = append(a.FDs, got)
	}
	return a, nil
}

func dupError(pid, fd int, err error) error {
	code := shimctl.CodeFailed
	if err == unix.ESRCH || err == unix.EBADF {
		code = shimctl.CodeGone
	}
	if fd < 0 {
		return shimctl.Errorf(code, "cannot open process %d: %w", pid, err)
	}
	return shimctl.Errorf(code, "cannot duplicate descriptor %d of process %d: %w", fd, pid, err)
}
