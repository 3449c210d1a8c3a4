package process

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/platform/proc"
	"lull/internal/platform/sockets"
)

// timeWait is the time for which the kernel keeps a closed connection.
const timeWait = 60 * time.Second

// sharedFor is the time for which one search of the machine serves all
// instances.
const sharedFor = 50 * time.Millisecond

// namespace answers what no descriptor of an instance can tell, for all
// instances of one network namespace.
type namespace struct {
	pid   int // a process in it; 0 is our own
	given *Fixture

	mu     sync.Mutex
	waited waited
}

// waited are the connections in TIME_WAIT.
type waited struct {
	from, to time.Time // when the list was read
	sockets  []sockets.Socket
}

// ended returns when a connection of the list ended, at the latest.
func (l *waited) ended(s *sockets.Socket) time.Time { return l.to.Add(s.Expires - timeWait) }

// closed lists connections that ended within the last minute. The kernel walks
// all connections of the machine for that, so only a probe that cannot learn
// otherwise whether a connection has come and gone calls it, and probes within
// sharedFor share the answer.
func (c *namespace) closed() (waited, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if from := time.Now(); from.Sub(c.waited.from) >= sharedFor {
		ls, err := c.dump(sockets.Query{States: []sockets.State{sockets.TimeWait}})
		if err != nil {
			return waited{}, err
		}
		c.waited = waited{from, time.Now(), ls}
	}
	return c.waited, nil
}

// opens returns sockets.PassiveOpens of the namespace.
func (c *namespace) opens() (uint64, error) {
	if c.given != nil {
		return 0, instance.ErrAbsent
	}
	return sockets.PassiveOpens(c.pid)
}

func (c *namespace) dump(q sockets.Query) ([]sockets.Socket, error) {
	if c.given != nil {
		return c.given.Sockets(q)
	}
	q.NetNSPID = c.pid
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	t, err := sockets.Dump(ctx, q)
	return t.Sockets, err
}

// netCount converts counters of sockets that come and go into one that only
// grows.
type netCount struct {
	gone uint64
	live map[uint64]uint64
}

func (n *netCount) add(now map[uint64]uint64) uint64 {
	total := uint64(0)
	for inode, last := range n.live {
		if now[inode] < last { // closed, or the inode now belongs to another socket
			n.gone += last
		}
	}
	for _, b := range now {
		total += b
	}
	n.live = now
	return n.gone + total
}

// Sample implements instance.Workload. Its cost depends on the instance alone:
// it reads the sockets of the tree. While the tree has used no CPU since the
// last sample, it can neither have opened a socket nor used a disk, so neither
// is searched for again. A frozen tree is always searched.
func (w *Work) Sample(ports []instance.Endpoint) instance.Sample {
	s := instance.Sample{At: time.Now()}
	w.mu.Lock()
	frozen, last := w.frozen, w.past
	w.mu.Unlock()
	var exact bool
	s.CPU, exact, s.CPUErr = w.cpu()
	now := past{at: s.At, cpu: s.CPU, exact: exact, closed: last.closed, opens: last.opens, counted: last.counted}
	ran := !exact || !last.exact || s.CPU != last.cpu
	if ran && !frozen {
		// Before the sockets, so that a connection that comes meanwhile is
		// either among them or counted at the next sample.
		n, err := w.net.opens()
		now.opens, now.counted = n, err == nil
	}
	h, err := w.read(s.CPU, exact, frozen)
	s.DiskBytes, s.DiskErr = h.disk, h.diskErr
	if err != nil {
		s.ConnErr, s.NetErr = err, err
		return s
	}
	if h.moved {
		now.closed = s.At
	}
	w.count(&s, h, exposed(ports), frozen, &now)
	if frozen {
		return s
	}
	if s.LastClosed, err = w.lastClosed(&s, h, exposed(ports), ran, last, &now); err != nil {
		s.ConnErr = err
		return s
	}
	w.mu.Lock()
	w.past = now
	w.mu.Unlock()
	if w.handoff {
		w.noteClosed(h.own)
	}
	return s
}

// past is the part of a sample of the running tree that the next one is
// compared with.
type past struct {
	at      time.Time
	cpu     time.Duration
	exact   bool            // cpu counts every moment that the tree ran
	opens   uint64          // of sockets.PassiveOpens
	counted bool            // opens is known
	inbound map[uint64]bool // accepted connections by inode; true for unix sockets
	closed  time.Time       // when the newest inbound connection ended; zero if none is known
	unknown time.Time       // until when a connection may have ended; zero if there is nothing to find out
	thawed  bool            // it was frozen since
}

// cpu returns the CPU time of the tree. exact reports whether it counts every
// moment, so that a tree with the same time has not run.
func (w *Work) cpu() (d time.Duration, exact bool, err error) {
	if w.group != nil {
		if d, err := w.group.CPU(); err == nil {
			return d, w.net.given == nil, nil
		}
	}
	pids, err := w.pids(false)
	if err != nil && !errors.Is(err, proc.ErrUnsettled) {
		return 0, false, fmt.Errorf("cannot list the processes of %s: %w", w.id, err)
	}
	d, err = w.r.fs.TreeCPU(pids)
	return d, false, err
}

// MainCPU returns the CPU time of the main process and its descendants. In a
// container this excludes commands that the engine runs beside it. It may
// decrease when a child ends that no parent waits for.
func (w *Work) MainCPU() (time.Duration, error) {
	pids, err := w.r.fs.Tree(w.ident.PID, "", nil)
	if err != nil && !errors.Is(err, proc.ErrUnsettled) {
		return 0, fmt.Errorf("cannot list the processes of %s: %w", w.id, err)
	}
	return w.r.fs.TreeCPU(pids)
}

// disk returns the bytes that the processes of the tree have read from and
// written to disks.
func (w *Work) disk(pids []int) (uint64, error) {
	now := make(map[int]uint64, len(pids))
	for _, pid := range pids {
		io, err := w.r.fs.IO(pid)
		switch {
		case errors.Is(err, proc.ErrGone):
			continue
		case errors.Is(err, proc.ErrNoIO):
			return 0, fmt.Errorf("%w: %w", instance.ErrAbsent, err)
		case err != nil:
			return 0, err
		}
		now[pid] = io.Read + io.Written - w.jvms.upkeep(w.r.fs, pid, io)
	}
	w.jvms.keep(now)
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.io.Add(now), nil
}

// AtWork implements instance.Toiler.
func (w *Work) AtWork() (bool, error) {
	pids, err := w.pids(false)
	if err != nil && !errors.Is(err, proc.ErrUnsettled) {
		return false, fmt.Errorf("cannot list the processes of %s: %w", w.id, err)
	}
	for _, pid := range pids {
		tasks, err := w.r.fs.Tasks(pid)
		if errors.Is(err, proc.ErrGone) {
			continue
		}
		if err != nil {
			return false, err
		}
		if slices.ContainsFunc(tasks, proc.Task.Busy) {
			return true, nil
		}
	}
	return false, nil
}

// isOpen reports whether a socket is a TCP connection over which data may
// still pass.
func isOpen(in *sockets.Info) bool {
	if in.Protocol != unix.IPPROTO_TCP && in.Protocol != unix.IPPROTO_MPTCP || !in.Connected {
		return false
	}
	switch in.State {
	case sockets.Established, sockets.CloseWait, sockets.SynRecv, 0: // 0: Multipath TCP of an old kernel
		return true
	}
	return false
}

// count fills in the data that the sockets of the tree show.
func (w *Work) count(s *instance.Sample, h *holdings, ports map[uint16]bool, frozen bool, now *past) {
	listens, paths, local := map[uint16]bool{}, map[string]bool{}, map[netip.AddrPort]bool{}
	for n := range h.sockets {
		switch in := &h.sockets[n]; {
		case in.Listening && in.Path != "":
			paths[in.Path] = true
			s.Inbound = append(s.Inbound, waiting(in)...)
		case in.Listening && in.Local.IsValid():
			listens[in.Local.Port()] = true
			s.Inbound = append(s.Inbound, waiting(in)...)
		case isOpen(in):
			local[in.Local] = true
		}
	}
	s.Listens = len(listens)+len(paths) > 0
	s.Inbound = append(s.Inbound, w.r.waitingFor(w.id, h.own)...)
	now.inbound = map[uint64]bool{}
	w.countUnix(s, h, paths, now)
	// A connection from the tree to itself, such as a container's health check,
	// is not use.
	private := sync.OnceValue(w.private)
	moved, closing := map[uint64]uint64{}, map[uint64]bool{}
	w.mu.Lock()
	talked := w.turns
	w.mu.Unlock()
	talks := turns{}
	for n := range h.sockets {
		in := &h.sockets[n]
		if !isOpen(in) {
			continue
		}
		o := in.Socket()
		loopback := o.Remote.Addr().IsLoopback()
		if !loopback && o.HasBytes() {
			moved[o.Inode] = o.Traffic.BytesAcked + o.Traffic.BytesReceived
		}
		if o.State == sockets.CloseWait {
			closing[o.Inode] = true
		}
		port := o.Local.Port()
		inbound := ports[port] || listens[port]
		if local[o.Remote] || inbound && toItself(o) && private() || !inbound && o.State != sockets.Established {
			continue // between two processes of the tree, one of which may have ended, or a call that is over
		}
		turn, t := talked[o.Inode].next(o, inbound)
		talks[o.Inode] = t
		c := instance.Conn{Local: o.Local.String(), Remote: o.Remote.String(), QuietFor: quietFor(o), Turn: turn,
			Unread: o.RQueue, Accepted: true, Loopback: loopback, HalfClose: o.State == sockets.CloseWait}
		if inbound {
			s.Inbound = append(s.Inbound, c)
			now.inbound[o.Inode] = false
			continue
		}
		s.Calls = append(s.Calls, c)
		if !loopback {
			s.Outbound++
		}
	}
	w.mu.Lock()
	s.NetBytes = w.bytes.add(moved)
	w.turns = talks
	if !frozen {
		w.closing = closing
	}
	w.mu.Unlock()
}

// waiting returns the connections in a listener's queue.
func waiting(in *sockets.Info) []instance.Conn {
	name := in.Local.String()
	if in.Family == unix.AF_UNIX {
		name = "unix " + in.Path
	}
	out := make([]instance.Conn, in.Waiting)
	for n := range out {
		out[n] = instance.Conn{Local: name, Loopback: in.Family == unix.AF_UNIX}
	}
	return out
}

// countUnix adds the clients of the tree's unix sockets. How long a client has
// been quiet is unknown, so each counts as active now.
func (w *Work) countUnix(s *instance.Sample, h *holdings, paths map[string]bool, now *past) {
	var clients []*sockets.Info
	var inodes []uint64
	for n := range h.sockets {
		in := &h.sockets[n]
		// An accepted connection has the path of its listener.
		if in.Family == unix.AF_UNIX && !in.Listening && in.Connected && in.Path != "" && paths[in.Path] {
			clients, inodes = append(clients, in), append(inodes, in.Inode)
		}
	}
	if len(clients) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	peers, _ := sockets.UnixPeers(ctx, w.net.pid, inodes) // unknown peers count as clients
	for _, in := range clients {
		if _, itself := h.own[peers[in.Inode]]; itself {
			continue // between two processes of the tree
		}
		s.Inbound = append(s.Inbound, instance.Conn{Local: "unix " + in.Path, Unread: in.Unread, Accepted: true, Loopback: true})
		now.inbound[in.Inode] = true
	}
}

// lastClosed returns when the newest inbound connection that has ended did so.
// No connection can have ended since the last sample unless one was seen there,
// or the tree ran and its network namespace got a connection. Only then is the
// kernel asked, and not if the answer is not needed: if open connections show
// use, or if a connection came to the tree after it was frozen, which then
// counts as its end.
func (w *Work) lastClosed(s *instance.Sample, h *holdings, ports map[uint16]bool, ran bool, last past, now *past) (time.Time, error) {
	unknown := last.unknown // until when it is unknown whether one ended
	if ran && !(last.counted && now.counted && last.opens == now.opens) {
		unknown = s.At
	}
	for inode, local := range last.inbound {
		if _, open := now.inbound[inode]; open {
			continue
		}
		if unknown = s.At; local { // the kernel keeps no trace of it
			now.closed = s.At
		}
	}
	inUse := slices.ContainsFunc(s.Inbound, func(c instance.Conn) bool { return c.QuietFor < s.At.Sub(last.at) })
	switch {
	case unknown.IsZero() || inUse || now.closed.Equal(s.At):
	case last.thawed && now.counted:
		now.closed = s.At
	default:
		at, from, err := w.closedIn(h, ports)
		if err != nil {
			return time.Time{}, err
		}
		if at.After(now.closed) {
			now.closed = at
		}
		if from.Before(unknown) { // the shared list is too old; the next sample reads it again
			now.unknown = unknown
		}
	}
	return now.closed, nil
}

// closedIn returns when the newest connection to the tree ended that the kernel
// still knows, as of from.
func (w *Work) closedIn(h *holdings, ports map[uint16]bool) (newest, from time.Time, err error) {
	at := map[netip.AddrPort]bool{}
	for n := range h.sockets {
		if in := &h.sockets[n]; in.Listening && in.Local.IsValid() {
			at[in.Local] = true
		}
	}
	if len(at)+len(ports) == 0 {
		return newest, time.Now(), nil
	}
	l, err := w.net.closed()
	if err != nil {
		return newest, from, err
	}
	private := sync.OnceValue(w.private)
	ours := func(a netip.AddrPort) bool { return ports[a.Port()] || waitsFor(at, a) }
	for n := range l.sockets {
		tw := &l.sockets[n]
		if toItself(*tw) && private() {
			continue
		}
		if ours(tw.Local) || tw.Remote.Addr().IsLoopback() && ours(tw.Remote) {
			if t := l.ended(tw); t.After(newest) {
				newest = t
			}
		}
	}
	return newest, l.from, nil
}

// toItself reports whether both ends of a connection are on one machine, or in
// one network namespace.
func toItself(s sockets.Socket) bool {
	return s.Remote.Addr().IsLoopback() || s.Remote.Addr() == s.Local.Addr()
}

// private reports whether the workload is alone in its network namespace, so
// that a connection from within comes from itself. If unknown it returns false.
func (w *Work) private() bool { return w.alone != nil && w.alone() }

// waitsFor reports whether a listener among at accepts connections to addr. A
// connection that is not accepted yet has no other owner.
func waitsFor(at map[netip.AddrPort]bool, addr netip.AddrPort) bool {
	port := addr.Port()
	return at[addr] || at[netip.AddrPortFrom(netip.IPv6Unspecified(), port)] ||
		addr.Addr().Is4() && at[netip.AddrPortFrom(netip.IPv4Unspecified(), port)]
}

// quietFor returns for how long no byte was transferred, according to the
// kernel.
func quietFor(o sockets.Socket) time.Duration {
	if o.InfoSize == 0 {
		return 0 // unknown: as if data had just been transferred
	}
	return min(o.Traffic.LastSent, o.Traffic.LastReceived)
}

// numeric returns an address without names.
func numeric(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	if host == "" || host == "localhost" {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}
