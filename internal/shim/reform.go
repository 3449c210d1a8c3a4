package shim

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/platform/sockets"
	"lull/internal/protocol/shimctl"
)

// A program may bind another form of the exposed address than the held socket has:
// the unspecified address, or the same address as IPv6. The shim then creates a
// socket of that form beside the held one, hands it over, and holds it from then on
// instead. The shim itself connects the clients of the former socket to the
// program.

// reform replaces h with a socket of the form want and returns that. own is the
// program's socket. On an error the shim stops holding h, so that the program can
// bind the address itself.
func (s *Shim) reform(f *filter, h held, want form, own int) (held, error) {
	next, err := s.beside(h, want, own)
	if err != nil {
		s.giveUp(f, h, err)
		return h, err
	}
	s.mu.Lock()
	for n := range s.held[f.id] {
		if s.held[f.id][n].fd == h.fd {
			s.held[f.id][n] = next
		}
	}
	serr := s.saveHeldLocked(f.id)
	s.mirrorLocked(f.id)
	s.mu.Unlock()
	if serr != nil {
		s.log.Warn("cannot record the new address of a held socket", "instance", f.id, "err", serr)
	}
	s.log.Info("a held socket was replaced to match the program's address", "instance", f.id, "from", h.as.String(), "to", want.String())
	s.srv.Send(shimctl.VerbHeld, shimctl.HeldChanged{ID: f.id})
	if want.udp { // datagrams cannot be forwarded under their senders' addresses
		unix.Close(h.fd)
		return next, nil
	}
	program, err := unix.FcntlInt(uintptr(next.fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		program = -1
	}
	go s.empty(f.id, h, want, program)
	return next, nil
}

// beside returns a listening socket of the form want while h still listens.
func (s *Shim) beside(h held, want form, own int) (held, error) {
	fail := func(err error) (held, error) {
		return h, fmt.Errorf("cannot listen on %s beside %s: %w", want, h.as, err)
	}
	family := unix.AF_INET
	if !want.v4() {
		family = unix.AF_INET6
	}
	kind := unix.SOCK_STREAM
	if want.udp {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fail(err)
	}
	// Both sockets share the port for this moment. Then the program's own setting
	// is restored.
	set := func(fd, level, name, v int) {
		if err == nil {
			err = unix.SetsockoptInt(fd, level, name, v)
		}
	}
	set(h.fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	set(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	set(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	var sa unix.Sockaddr = &unix.SockaddrInet4{Port: int(want.port)}
	if want.v4() {
		sa = &unix.SockaddrInet4{Port: int(want.port), Addr: want.ip.As4()}
	} else {
		only, oerr := unix.GetsockoptInt(own, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
		if oerr != nil {
			only = 0
		}
		set(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only)
		sa = &unix.SockaddrInet6{Port: int(want.port), Addr: want.ip.As16()}
	}
	if err == nil {
		err = unix.Bind(fd, sa)
	}
	if err == nil && !want.udp {
		err = unix.Listen(fd, backlog)
	}
	if err != nil {
		unix.Close(fd)
		return fail(err)
	}
	return held{addr: h.addr, as: want, fd: fd}, nil
}

// giveUp closes a held socket and its duplicates, so that the program can bind the
// address itself.
func (s *Shim) giveUp(f *filter, h held, cause error) {
	_ = unix.SetsockoptInt(h.fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 0)
	_ = unix.Shutdown(h.fd, unix.SHUT_RD) // stops listening, also through duplicates
	s.mu.Lock()
	var left []held
	for _, o := range s.held[f.id] {
		if o.fd != h.fd {
			left = append(left, o)
		}
	}
	s.held[f.id] = left
	if len(left) == 0 {
		delete(s.held, f.id)
	}
	err := remove(s.dir.heldFile(f.id))
	if len(left) > 0 {
		err = s.saveHeldLocked(f.id)
	}
	s.mirrorLocked(f.id)
	s.mu.Unlock()
	unix.Close(h.fd)
	if err != nil {
		s.log.Warn("cannot record which sockets are held", "instance", f.id, "err", err)
	}
	s.srv.Send(shimctl.VerbHeld, shimctl.HeldChanged{ID: f.id, Why: cause.Error()})
}

// Limits for emptying a backlog.
const (
	handshakes      = 20 * time.Millisecond // between two checks for handshakes in progress
	handshakesLimit = 2 * time.Second       // for handshakes that had begun when the socket was shut
	dialLimit       = time.Minute
)

// handshaking reports whether a TCP handshake on a port of this machine is in
// progress. It also returns true if the kernel cannot list them. On a busy machine
// a handshake may take long.
func handshaking(port uint16) bool {
	ctx, cancel := context.WithTimeout(context.Background(), handshakesLimit)
	defer cancel()
	t, err := sockets.Dump(ctx, sockets.Query{States: []sockets.State{sockets.SynRecv, sockets.NewSynRecv}})
	return err != nil || slices.ContainsFunc(t.Sockets, func(o sockets.Socket) bool { return o.Local.Port() == port })
}

// empty closes h and forwards its clients. The program already listens, so no
// client is refused: h ignores new connections, and a client whose first packet was
// ignored repeats it after a second and reaches the program. program is a duplicate
// of the program's socket, which empty closes.
func (s *Shim) empty(id string, h held, now form, program int) {
	defer shimctl.CloseAll([]int{program})
	if err := sockets.Shut(h.fd); err != nil {
		s.log.Warn("clients may be refused for a moment", "instance", id, "err", err)
	}
	target := now
	if now.ip.IsUnspecified() {
		if f, err := parseForm(h.addr); err == nil {
			target.ip = f.ip
		}
		if target.ip.IsUnspecified() {
			target.ip = netip.AddrFrom4([4]byte{127, 0, 0, 1})
			if !now.v4() && !now.dual {
				target.ip = netip.IPv6Loopback()
			}
		}
	}
	addr := netip.AddrPortFrom(target.ip.Unmap(), target.port).String()
	var clients []int
	if err := unix.SetNonblock(h.fd, true); err == nil {
		// Connections that began before the socket was shut are either in the
		// backlog or in a handshake. So the backlog is emptied once more after the
		// last handshake.
		end := time.Now().Add(handshakesLimit)
		for over := false; !over; {
			time.Sleep(handshakes)
			over = !handshaking(h.as.port) || time.Now().After(end)
			clients = append(clients, acceptAll(h.fd)...)
		}
	}
	_ = unix.Shutdown(h.fd, unix.SHUT_RD) // needed because the daemon keeps a duplicate for a moment
	unix.Close(h.fd)
	for _, fd := range clients {
		awaitBacklog(program)
		s.pass(id, fd, func() (net.Conn, error) { return net.DialTimeout("tcp", addr, dialLimit) })
	}
}

// acceptAll returns the clients in the backlog of a non-blocking listener.
func acceptAll(listener int) (clients []int) {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		switch err {
		case nil:
			clients = append(clients, fd)
		case unix.EINTR, unix.ECONNABORTED:
		default:
			return clients
		}
	}
}

// awaitBacklog waits until at most half of a listener's backlog is in use: a
// connection to a full backlog is established only at the client's end.
func awaitBacklog(listener int) {
	for end := time.Now().Add(dialLimit); time.Now().Before(end); time.Sleep(time.Millisecond) {
		// For a listener, these fields are the length and the limit of its backlog.
		info, err := unix.GetsockoptTCPInfo(listener, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil || info.Unacked <= info.Sacked/2 {
			return
		}
	}
}

// pass connects one client to the program. It returns once the connection is
// established.
func (s *Shim) pass(id string, fd int, dial func() (net.Conn, error)) {
	file := os.NewFile(uintptr(fd), "client")
	client, err := net.FileConn(file)
	file.Close()
	if err != nil {
		return
	}
	program, err := dial()
	if err != nil {
		s.log.Warn("cannot forward a client to the program", "instance", id, "err", err)
		client.Close()
		return
	}
	var wg sync.WaitGroup
	copying := func(to, from net.Conn) {
		wg.Go(func() {
			_, _ = io.Copy(to, from) // an error ends the direction like EOF
			if c, ok := to.(interface{ CloseWrite() error }); ok {
				_ = c.CloseWrite()
			}
		})
	}
	copying(program, client)
	copying(client, program)
	go func() {
		wg.Wait()
		client.Close()
		program.Close()
	}()
}
