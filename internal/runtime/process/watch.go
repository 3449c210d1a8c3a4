package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/fdstore"
	"lull/internal/platform/sockets"
	"lull/internal/protocol/shimctl"
)

// dupLimit bounds a duplication through the shim.
const dupLimit = 2 * time.Second

// duplicate duplicates descriptors of a process, if necessary through the shim. As
// an ancestor of the process, the shim may do so even if Yama forbids it to others.
func (r *Runtime) duplicate(pid int, fds []int) ([]int, error) {
	got, err := sockets.Duplicate(pid, fds)
	if !errors.Is(err, sockets.ErrNotPermitted) {
		return got, err
	}
	if got, serr := r.dupByShim(pid, fds); serr == nil {
		return got, nil
	}
	return nil, err
}

// Guard implements instance.Workload. It duplicates every socket of the tree, and
// closes at once the duplicates that no event from outside can affect.
func (w *Work) Guard(ports []instance.Endpoint, outbound bool, wake func(string)) (instance.Guard, error) {
	own, err := w.sockets()
	if err != nil {
		return nil, err
	}
	byPID := map[int][]int{}
	for _, at := range own {
		byPID[at.pid] = append(byPID[at.pid], at.fd)
	}
	var found []taken
	give := func() {
		for _, t := range found {
			unix.Close(t.fd)
		}
	}
	for pid, fds := range byPID {
		slices.Sort(fds)
		dups, err := w.r.duplicate(pid, fds)
		if err != nil {
			give()
			return nil, w.unwatchable(err, own)
		}
		for n, fd := range dups {
			in, err := sockets.Inspect(fd)
			if err != nil {
				shimctl.CloseAll(dups[n:])
				give()
				return nil, fmt.Errorf("cannot inspect socket %d of process %d: %w", fds[n], pid, err)
			}
			found = append(found, taken{fd, nameOf(in, pid, fds[n]), in})
		}
	}
	w.mu.Lock()
	closing := w.closing
	w.mu.Unlock()
	dups := choose(found, exposed(ports), outbound, closing)
	g, err := w.r.poller.Guard(dups, func(reason string) {
		w.waitedFor.Store(true)
		defer w.waitedFor.Store(false)
		wake(reason)
	}) // takes ownership of the duplicates, also on an error
	if err != nil {
		return nil, err
	}
	return g, nil
}

// Waiting returns the addresses of clients whose connections no process has
// accepted yet. The run must have a network namespace of its own.
func (w *Work) Waiting() (peers []netip.AddrPort, err error) {
	all, err := w.net.dump(sockets.Query{States: []sockets.State{sockets.Established, sockets.CloseWait}})
	for _, s := range all {
		if s.Inode == 0 {
			peers = append(peers, s.Remote)
		}
	}
	return peers, err
}

// UnwatchableError names a socket of an instance that cannot be watched, because of
// which the instance must not be frozen.
type UnwatchableError struct {
	Socket string
	Err    error
}

func (e *UnwatchableError) Error() string {
	return fmt.Sprintf("cannot watch the socket %s: %v", e.Socket, e.Err)
}

// Unwrap returns the cause.
func (e *UnwatchableError) Unwrap() error { return e.Err }

// unwatchable returns an UnwatchableError that names the socket that could not be
// duplicated.
func (w *Work) unwatchable(err error, own map[uint64]place) error {
	var dup *sockets.DupError
	if !errors.As(err, &dup) || dup.FD < 0 {
		return &UnwatchableError{fmt.Sprintf("of %s", w.id), err}
	}
	name := fmt.Sprintf("descriptor %d of process %d", dup.FD, dup.PID)
	if all, lerr := w.net.dump(sockets.Query{States: []sockets.State{sockets.Listen, sockets.Established, sockets.CloseWait}}); lerr == nil { // only to name it
		for _, s := range all {
			if at, ok := own[s.Inode]; ok && at.pid == dup.PID && at.fd == dup.FD {
				name = "tcp " + s.Local.String()
			}
		}
	}
	return &UnwatchableError{name, err}
}

// taken is a duplicate of a socket, with its description.
type taken struct {
	fd   int
	name string
	in   sockets.Info
}

// nameOf describes a socket for users.
func nameOf(in sockets.Info, pid, fd int) string {
	network := "tcp"
	if in.Type == unix.SOCK_DGRAM {
		network = "udp"
	}
	switch {
	case in.Local.IsValid() && in.Peer.IsValid():
		return fmt.Sprintf("%s %s from %s", network, in.Local, in.Peer)
	case in.Local.IsValid():
		return network + " " + in.Local.String()
	case in.Path != "":
		return "unix " + in.Path
	}
	return fmt.Sprintf("descriptor %d of process %d", fd, pid)
}

// exposed returns the ports of the targets of ports, on which the program listens.
func exposed(ports []instance.Endpoint) map[uint16]bool {
	out := map[uint16]bool{}
	for _, e := range ports {
		if ap, err := netip.ParseAddrPort(numeric(e.Target)); err == nil {
			out[ap.Port()] = true
		}
	}
	return out
}

// exposedPorts caches the last result of exposed.
type exposedPorts struct {
	asked []instance.Endpoint
	ports map[uint16]bool
}

// of returns exposed(ports). The result must not be modified.
func (x *exposedPorts) of(ports []instance.Endpoint) map[uint16]bool {
	if x.ports == nil || !slices.Equal(x.asked, ports) {
		x.asked, x.ports = slices.Clone(ports), exposed(ports)
	}
	return x.ports
}

// choose returns the sockets that a client can affect, and closes the others. It
// keeps listeners, connections that came to one of the tree's listening ports or
// paths, and UDP sockets on ports. With outbound it also keeps connections that the
// tree opened. It closes connections between two processes of the tree, which
// cannot change while both are frozen.
func choose(found []taken, ports map[uint16]bool, outbound bool, closing map[uint64]bool) (dups []sockets.Dup) {
	listens, local, paths := map[uint16]bool{}, map[netip.AddrPort]bool{}, map[string]bool{}
	for p := range ports {
		listens[p] = true
	}
	for _, t := range found {
		switch {
		case t.in.Listening && t.in.Path != "":
			paths[t.in.Path] = true
		case t.in.Listening && t.in.Local.IsValid():
			listens[t.in.Local.Port()] = true
		case t.in.Connected && t.in.Local.IsValid():
			local[t.in.Local] = true
		}
	}
	for _, t := range found {
		kind, keep := sockets.Stream, false
		switch in := t.in; {
		case in.Listening:
			kind, keep = sockets.Listener, true
		case in.Type == unix.SOCK_DGRAM && in.Local.IsValid() && !in.Connected && ports[in.Local.Port()]:
			kind, keep = sockets.Datagram, true
		case in.Type == unix.SOCK_STREAM && in.Connected && paths[in.Path]:
			// An accepted unix connection has the path of its listener.
			kind, keep = sockets.Stream, true
		case in.Type == unix.SOCK_STREAM && in.Connected && in.Local.IsValid() && !local[in.Peer]:
			keep = outbound || listens[in.Local.Port()]
			if in.State == sockets.CloseWait && closing[in.Inode] && in.Unread == 0 {
				kind = sockets.HalfClosed // the program has known of the end since before the freeze
			}
		}
		if keep {
			dups = append(dups, sockets.Dup{FD: t.fd, Kind: kind, Name: t.name})
		} else {
			unix.Close(t.fd)
		}
	}
	slices.SortFunc(dups, func(a, b sockets.Dup) int { return cmp.Compare(a.FD, b.FD) })
	return dups
}

// Hold makes the shim keep sockets of an instance open, whatever the instance's
// state. addrs are in the form of shimctl.Addr.
func (r *Runtime) Hold(ctx context.Context, id string, addrs []string) error {
	return r.untilAnswered(ctx, func(c *shimctl.Client) error {
		if err := c.Hold(ctx, id, addrs); err != nil {
			return err
		}
		got, fds, err := c.Listeners(ctx, id)
		if err == nil {
			r.setHeld(id, got, fds)
		}
		return err
	})
}

// setHeld keeps duplicates of what the shim holds, replacing earlier ones. With the
// duplicates, a port and its backlog outlive the shim.
func (r *Runtime) setHeld(id string, addrs []string, fds []int) {
	r.mu.Lock()
	old := r.held[id]
	if len(fds) == 0 || r.held == nil {
		delete(r.held, id)
		shimctl.CloseAll(fds)
	} else {
		k := kept{addrs, make([]*fdstore.File, len(fds)), make([]uint64, len(fds))}
		for n, fd := range fds {
			var st unix.Stat_t
			if unix.Fstat(fd, &st) == nil {
				k.inodes[n] = st.Ino
			}
			k.files[n] = r.store.Put(fd)
		}
		r.held[id] = k
	}
	r.mu.Unlock()
	old.close()
}

// keptPaths returns the exposed path of each unix socket that is held under id, by
// the socket's inode.
func (r *Runtime) keptPaths(id string) map[uint64]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := map[uint64]string{}
	for n, addr := range r.held[id].addrs {
		if _, path, ok := shimctl.UnixAddr(addr); ok {
			out[r.held[id].inodes[n]] = path
		}
	}
	return out
}

// Listen holds listening sockets like Hold, and returns a listener for each of
// addrs, in order. The caller must close the listeners. The sockets and the
// connections in their backlogs outlive the listeners and this process, until
// Unhold.
func (r *Runtime) Listen(ctx context.Context, id string, addrs []string) (ls []net.Listener, err error) {
	if err := r.Hold(ctx, id, addrs); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range addrs {
		n := slices.Index(r.held[id].addrs, a)
		if n < 0 {
			err = fmt.Errorf("listen on %s: the supervisor does not hold the socket", a)
			break
		}
		var l net.Listener
		if err = r.held[id].with(n, func(fd int) (err error) { l, err = listener(fd); return err }); err != nil {
			err = fmt.Errorf("listen on %s: %w", a, err)
			break
		}
		ls = append(ls, l)
	}
	if err != nil {
		for _, l := range ls {
			l.Close()
		}
		return nil, err
	}
	return ls, nil
}

// listener makes a listener of a duplicate of fd.
func listener(fd int) (net.Listener, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(dup), "listener")
	defer f.Close()
	return net.FileListener(f)
}

// UnholdOthers closes the sockets held under IDs for which ours returns false:
// their owners were removed while no daemon ran.
func (r *Runtime) UnholdOthers(ctx context.Context, ours func(id string) bool) error {
	ids, err := r.shim().Holds(ctx)
	if err != nil {
		return fmt.Errorf("cannot ask the supervisor which sockets it holds: %w", err)
	}
	var errs []error
	for _, id := range ids {
		if ours(id) {
			continue
		}
		r.cfg.Log.Info("closing the sockets of removed instances", "id", id)
		errs = append(errs, r.Unhold(ctx, id))
	}
	return errors.Join(errs...)
}

// Unhold closes the sockets held under id.
func (r *Runtime) Unhold(ctx context.Context, id string) error {
	r.setHeld(id, nil, nil)
	return r.untilAnswered(ctx, func(c *shimctl.Client) error { return c.Unhold(ctx, id) })
}

// Watch calls wake when a client connects or sends to a held socket of an
// instance that has no process.
func (r *Runtime) Watch(id string, wake func(string)) (instance.Guard, error) {
	ctx, cancel := context.WithTimeout(context.Background(), handoffLimit)
	defer cancel()
	var addrs []string
	var fds []int
	err := r.untilAnswered(ctx, func(c *shimctl.Client) (err error) {
		addrs, fds, err = c.Listeners(ctx, id)
		return err
	})
	if err != nil {
		return nil, err
	}
	dups := make([]sockets.Dup, len(fds))
	for n, fd := range fds {
		dups[n] = sockets.Dup{FD: fd, Kind: sockets.Listener, Name: addrs[n]}
		if _, udp := shimctl.UDPAddr(addrs[n]); udp {
			dups[n].Kind = sockets.Datagram
		}
	}
	g, err := r.poller.Guard(dups, wake)
	if err != nil {
		return nil, err
	}
	return g, nil
}

// HoldOwn has the sockets that the run listens on in the given networks ("tcp", "udp",
// "unix") held under its id, whose backlogs then outlive it. TakeHeld, Unhold or LetGo
// end that. Those of UDP ports and unix sockets are left out that could not be handed
// to the next run. It returns their addresses, in the form of shimctl.Addr; none if
// there are no such sockets.
func (w *Work) HoldOwn(ctx context.Context, networks ...string) (addrs []string, err error) {
	if w.net != &w.r.net {
		return nil, errors.New("it has a network of its own, in which lull cannot listen")
	}
	own, err := w.sockets()
	if err != nil {
		return nil, err
	}
	var fds []int
	defer func() { shimctl.CloseAll(fds) }()
	err = w.r.duplicates(own, func(_ uint64, at place, fd int, err error) error {
		var in sockets.Info
		if err == nil {
			in, err = sockets.Inspect(fd)
		}
		if err != nil {
			return fmt.Errorf("cannot keep descriptor %d of process %d: %w", at.fd, at.pid, err)
		}
		l, ok := listenerOf(&in, at, nil)
		addr := l.Addr
		if ok = ok && slices.Contains(networks, l.Network); ok && l.Network != "tcp" {
			addr, ok = handoffAddr(l)
		}
		if !ok || slices.Contains(addrs, addr) {
			return nil
		}
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return err
		}
		addrs, fds = append(addrs, addr), append(fds, dup)
		return nil
	})
	if err != nil || len(fds) == 0 {
		return nil, err
	}
	err = w.r.untilAnswered(ctx, func(c *shimctl.Client) error {
		if err := c.Keep(ctx, w.id, addrs, fds); err != nil {
			return err
		}
		got, dups, err := c.Listeners(ctx, w.id)
		if err == nil {
			w.r.setHeld(w.id, got, dups)
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(err, w.r.Unhold(ctx, w.id))
	}
	return addrs, nil
}

// handoffAddr returns the address under which a unix socket or a UDP port is held for
// a handoff. ok is false for a UDP port that the kernel has chosen, and for a unix
// socket whose file others do not see at its path.
func handoffAddr(l instance.Listener) (addr string, ok bool) {
	if l.Network == "udp" {
		at, err := netip.ParseAddrPort(l.Addr)
		low, high := sockets.EphemeralPorts()
		return "udp:" + l.Addr, err == nil && (at.Port() < low || at.Port() > high)
	}
	var theirs, ours, process unix.Stat_t
	root := fmt.Sprintf("/proc/%d/root", l.PID)
	if unix.Stat(root+l.Addr, &theirs) != nil || unix.Stat(l.Addr, &ours) != nil || theirs.Dev != ours.Dev || theirs.Ino != ours.Ino {
		return "", false
	}
	user := ""
	if unix.Stat(fmt.Sprintf("/proc/%d", l.PID), &process) == nil && int(process.Uid) != os.Geteuid() {
		user = fmt.Sprintf("%d:%d", process.Uid, process.Gid)
	}
	return shimctl.Addr(instance.Endpoint{Proto: instance.ProtoUnix, Target: l.Addr}, user), true
}

// Unit registers a systemd unit with the supervisor, or asks for its state.
func (r *Runtime) Unit(ctx context.Context, u shimctl.Unit) (s shimctl.UnitState, err error) {
	err = r.untilAnswered(ctx, func(c *shimctl.Client) (err error) { s, err = c.Unit(ctx, u); return err })
	return s, err
}

// UnitSocket returns the address at which the supervisor receives the binds of units.
func (r *Runtime) UnitSocket() (string, error) { return shimctl.UnitSocket(r.cfg.Dir) }

// Supervisor returns the path of the supervisor's program.
func (r *Runtime) Supervisor() string { return r.cfg.Shim }

// LetGo ends the holding of sockets that the program itself now listens on.
func (r *Runtime) LetGo(ctx context.Context, id string) error {
	r.setHeld(id, nil, nil)
	return r.untilAnswered(ctx, func(c *shimctl.Client) error { return c.LetGo(ctx, id) })
}

// DropSpares closes the sockets that a program which has ended listened on while its
// new clients were made to wait elsewhere (Shut).
func (r *Runtime) DropSpares(ctx context.Context, id string) error {
	all, err := r.HeldAddrs(ctx, id)
	if err != nil {
		return err
	}
	addrs := slices.DeleteFunc(slices.Clone(all), func(a string) bool { return strings.HasPrefix(a, "spare:") })
	if len(addrs) == len(all) {
		return nil
	}
	return r.Hold(ctx, id, addrs)
}

// HeldAddrs returns the addresses of the sockets held under id. Having none is not
// an error.
func (r *Runtime) HeldAddrs(ctx context.Context, id string) (addrs []string, err error) {
	err = r.untilAnswered(ctx, func(c *shimctl.Client) error {
		got, fds, err := c.Listeners(ctx, id)
		if err == nil {
			r.setHeld(id, got, fds)
		}
		addrs = got
		return err
	})
	var said *shimctl.Error
	if errors.As(err, &said) && said.Code == shimctl.CodeNotFound {
		return nil, nil
	}
	return addrs, err
}

// TakeHeld closes the sockets held under id, so that their addresses can be bound
// again, and returns the connections that waited on them. The shim closes its
// sockets first, so that hardly a client can arrive, and be lost, between the last
// accept and the close.
func (r *Runtime) TakeHeld(ctx context.Context, id string) (conns []net.Conn, err error) {
	if _, err := r.HeldAddrs(ctx, id); err != nil {
		return nil, err
	}
	r.mu.Lock()
	mine := r.held[id]
	delete(r.held, id)
	r.mu.Unlock()
	err = r.untilAnswered(ctx, func(c *shimctl.Client) error { return c.Unhold(ctx, id) })
	for n, f := range mine.files {
		aerr := mine.with(n, func(fd int) error {
			got, err := acceptAll(fd)
			conns = append(conns, got...)
			return err
		})
		err = errors.Join(err, aerr)
		f.Close()
	}
	return conns, err
}

// acceptAll accepts the connections that wait on a listening socket.
func acceptAll(fd int) (conns []net.Conn, err error) {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return conns, err
		}
		one, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		switch err {
		case nil:
		case unix.EINTR, unix.ECONNABORTED:
			continue
		case unix.EAGAIN:
			return conns, nil
		default:
			return conns, fmt.Errorf("accept a client that waits: %w", err)
		}
		f := os.NewFile(uintptr(one), "client")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			return conns, err
		}
		conns = append(conns, c)
	}
}
