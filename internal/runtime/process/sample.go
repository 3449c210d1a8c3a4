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

// timeWait is how long the kernel keeps a closed connection in TIME_WAIT.
const timeWait = 60 * time.Second

// sharedFor is how long the result of a search of the whole machine is used for all
// instances.
const sharedFor = 50 * time.Millisecond

// namespace is a network namespace. It lists connections that are no longer open,
// and so belong to no descriptor, for all instances in the namespace.
type namespace struct {
	pid   int // a process in the namespace; 0 for this process's own namespace
	given *Fixture

	mu     sync.Mutex
	waited waited
}

// waited is a list of connections in TIME_WAIT.
type waited struct {
	from, to time.Time // when the list was read
	sockets  []sockets.Socket
}

// ended returns the latest time at which a connection of the list can have ended.
func (l *waited) ended(s *sockets.Socket) time.Time { return l.to.Add(s.Expires - timeWait) }

// closed returns the connections in TIME_WAIT, which ended within the last minute.
// The list is read at since or later. It is expensive: the kernel walks all
// connections of the machine.
func (c *namespace) closed(since time.Time) (waited, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waited.from.Before(since) || c.waited.from.IsZero() {
		from := time.Now()
		ls, err := c.dump(sockets.Query{States: []sockets.State{sockets.TimeWait}})
		if err != nil {
			return waited{}, err
		}
		c.waited = waited{from, time.Now(), ls}
	}
	return c.waited, nil
}

// find returns those of conns that the kernel still knows, in any state. Each
// lookup costs the same, however many connections exist.
func (c *namespace) find(conns []sockets.Pair) (waited, error) {
	from := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	find := sockets.Lookup
	if c.given != nil {
		find = c.given.lookup
	}
	ls, err := find(ctx, c.pid, conns)
	return waited{from, time.Now(), ls}, err
}

// opens returns how many connections the namespace has accepted, see
// sockets.PassiveOpens.
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

// netCount turns the byte counters of sockets that come and go into one that only
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

// Sample implements instance.Workload. Its cost depends only on the instance,
// because it reads the sockets of the tree. It searches the tree for sockets and
// disk traffic only if the tree has used CPU time since the last sample, or is
// frozen.
func (w *Work) Sample(endpoints []instance.Endpoint) instance.Sample {
	w.reading.Lock()
	defer w.reading.Unlock()
	s := instance.Sample{At: time.Now()}
	ports := w.exposed.of(endpoints)
	w.mu.Lock()
	frozen, last := w.frozen, w.past
	w.mu.Unlock()
	var exact bool
	s.CPU, exact, s.CPUErr = w.cpu()
	now := past{at: s.At, cpu: s.CPU, exact: exact, closed: last.closed, unseen: last.unseen, since: last.since, opens: last.opens, counted: last.counted}
	ran := !exact || !last.exact || s.CPU != last.cpu
	if ran && !frozen {
		// This is read before the sockets. A connection that comes in between is
		// then either among the sockets or counted at the next sample.
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
	w.count(&s, h, ports, frozen, &now)
	if frozen {
		w.known, w.spare, w.exposed = holdings{}, spare{}, exposedPorts{} // frees memory, because thousands of trees may be frozen
		return s
	}
	w.findClosed(&s, ran, last, &now)
	if s.LastClosed = now.closed; !now.unseen.IsZero() {
		at, unseen := listensAt(h), now.unseen
		s.Unseen = &instance.Unseen{Until: unseen, Forgotten: now.since.Add(timeWait), Newest: func(ignore func(time.Time) bool) (time.Time, error) {
			return w.newestClosed(at, ports, unseen, ignore)
		}}
	}
	w.mu.Lock()
	w.past = now
	w.mu.Unlock()
	if w.handoff {
		w.noteClosed(h.own)
	}
	return s
}

// past is the part of a sample of the running tree that the next one is compared with.
type past struct {
	at      time.Time
	cpu     time.Duration
	exact   bool                    // cpu includes every moment in which the tree ran
	opens   uint64                  // value of namespace.opens
	counted bool                    // opens could be read
	inbound map[uint64]sockets.Pair // accepted connections by inode; unix sockets have a zero Pair
	closed  time.Time               // when the newest inbound connection ended; zero if unknown
	unseen  time.Time               // a connection may have come and ended unseen until this time; zero if none can have
	since   time.Time               // and not before this time
	thawed  bool                    // the tree was frozen since this sample
}

// cpu returns the CPU time of the tree. exact reports whether it includes every
// moment, so that a tree whose CPU time is unchanged has not run.
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
// container, this excludes the commands that Docker runs beside the program. It may
// decrease when a child exits and its parent does not wait for it.
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

// isOpen reports whether a socket is a TCP connection that can still carry data.
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

// spare holds the maps of the last sample, for reuse by the next.
type spare struct {
	listens map[uint16]bool
	local   map[netip.AddrPort]bool
	moved   map[uint64]uint64
	talks   turns
	inbound map[uint64]sockets.Pair
}

// emptied clears m and returns it, or returns a new map if m is nil.
func emptied[M ~map[K]V, K comparable, V any](m M) M {
	if m == nil {
		return M{}
	}
	clear(m)
	return m
}

// count fills in what the sockets of the tree show. w.reading must be held.
func (w *Work) count(s *instance.Sample, h *holdings, ports map[uint16]bool, frozen bool, now *past) {
	listens, local, paths := emptied(w.spare.listens), emptied(w.spare.local), map[string]bool(nil)
	for n := range h.sockets {
		switch in := &h.sockets[n]; {
		case in.Listening && in.Path != "":
			if paths == nil {
				paths = map[string]bool{}
			}
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
	now.inbound = emptied(w.spare.inbound)
	w.countUnix(s, h, paths, now)
	// A connection from the tree to itself, such as a container's health check, is
	// not use.
	private := sync.OnceValue(w.private)
	moved, talks := emptied(w.spare.moved), emptied(w.spare.talks)
	var closing map[uint64]bool
	s.Inbound = slices.Grow(s.Inbound, len(local))
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
			if closing == nil {
				closing = map[uint64]bool{}
			}
			closing[o.Inode] = true
		}
		port := o.Local.Port()
		inbound := ports[port] || listens[port]
		if local[o.Remote] || inbound && toItself(o) && private() || !inbound && o.State != sockets.Established {
			continue // between two processes of the tree, one of which may have ended; or an outbound connection that has ended
		}
		turn, t := w.turns[o.Inode].next(o, inbound)
		talks[o.Inode] = t
		ends := h.named(n)
		c := instance.Conn{Local: ends.local, Remote: ends.remote, QuietFor: quietFor(o), Turn: turn,
			Unread: o.RQueue, Accepted: true, Loopback: loopback, HalfClose: o.State == sockets.CloseWait}
		if inbound {
			s.Inbound = append(s.Inbound, c)
			now.inbound[o.Inode] = sockets.Pair{Local: o.Local, Remote: o.Remote}
			continue
		}
		s.Calls = append(s.Calls, c)
		if !loopback {
			s.Outbound++
		}
	}
	last := w.bytes.live
	s.NetBytes = w.bytes.add(moved)
	w.spare = spare{listens: listens, local: local, moved: last, talks: w.turns}
	w.turns = talks
	w.mu.Lock()
	defer w.mu.Unlock()
	if !frozen {
		w.closing = closing
		w.spare.inbound = w.past.inbound
	}
}

// named returns the addresses of the nth socket as text.
func (h *holdings) named(n int) names {
	if h.names == nil {
		h.names = make([]names, len(h.sockets))
	}
	if in := &h.sockets[n]; h.names[n].local == "" {
		h.names[n] = names{in.Local.String(), in.Peer.String()}
	}
	return h.names[n]
}

// waiting returns the connections in a listener's accept queue.
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

// countUnix adds the clients of the tree's unix sockets. How long such a client has
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
	peers, _ := sockets.UnixPeers(ctx, w.net.pid, inodes) // an unknown peer counts as a client
	for _, in := range clients {
		if _, itself := h.own[peers[in.Inode]]; itself {
			continue // between two processes of the tree
		}
		s.Inbound = append(s.Inbound, instance.Conn{Local: "unix " + in.Path, Unread: in.Unread, Accepted: true, Loopback: true})
		now.inbound[in.Inode] = sockets.Pair{}
	}
}

// lookups is how many connections a sample looks up at most.
const lookups = 16

// findClosed determines when inbound connections have ended since the last sample.
//
// A connection that the last sample saw is looked up by its addresses. It is in
// TIME_WAIT unless it was reset, or its client is on another machine and closed it
// first; then it counts as if it ended now.
//
// A connection that came and ended between the samples was never seen, so its
// addresses are unknown. There can be none if the tree did not run, or if its
// network namespace accepted no connection. After a thaw there is probably one,
// because the first connection wakes a frozen tree, so one counts as if it ended
// now. Otherwise now.unseen is set, and newestClosed can tell.
func (w *Work) findClosed(s *instance.Sample, ran bool, last past, now *past) {
	var gone []sockets.Pair
	for inode, pair := range last.inbound {
		if _, open := now.inbound[inode]; open {
			continue
		}
		if !pair.Local.IsValid() { // a unix socket, of which the kernel keeps no trace
			now.closed = s.At
		}
		gone = append(gone, pair)
	}
	same := !ran || last.counted && now.counted && last.opens == now.opens // no connection can have come
	switch {
	case last.thawed && now.counted && !same:
		now.closed = s.At
	case !same:
		if now.unseen.IsZero() {
			now.since = last.at
		}
		if now.unseen = s.At; now.since.IsZero() { // the first sample
			now.since = s.At
		}
	}
	if len(gone) > 0 && now.closed.Before(s.At) {
		if end := w.endOf(gone, s.At); end.After(now.closed) {
			now.closed = end
		}
	}
	if !now.unseen.After(now.closed) {
		now.unseen = time.Time{}
	}
}

// endOf returns when the last of the connections gone, which are no longer open,
// ended. If that is unknown, it returns at, the time of the sample.
func (w *Work) endOf(gone []sockets.Pair, at time.Time) (newest time.Time) {
	if len(gone) > lookups {
		return at
	}
	for _, pair := range gone {
		ends := []sockets.Pair{pair}
		if onThisMachine(pair) {
			ends = append(ends, sockets.Pair{Local: pair.Remote, Remote: pair.Local})
		}
		found, err := w.net.find(ends)
		if err != nil {
			return at
		}
		known := false
		for n := range found.sockets {
			if tw := &found.sockets[n]; tw.State == sockets.TimeWait {
				known = true
				if t := found.ended(tw); t.After(newest) {
					newest = t
				}
			}
		}
		if !known {
			return at
		}
	}
	return newest
}

// listensAt returns the TCP addresses at which the tree listens.
func listensAt(h *holdings) map[netip.AddrPort]bool {
	at := map[netip.AddrPort]bool{}
	for n := range h.sockets {
		if in := &h.sockets[n]; in.Listening && in.Local.IsValid() {
			at[in.Local] = true
		}
	}
	return at
}

// newestClosed returns when the newest connection ended that the kernel still knows
// and that came to a listener at one of at or to one of ports. It skips ends for
// which ignore returns true. unseen is past.unseen of the sample for which it is
// called.
//
// It is expensive, because the kernel must list all connections in TIME_WAIT. Only
// that list shows to whom a connection belonged that came and ended between two
// samples: a listener does not count connections, and the namespace's counter
// includes other programs. It is therefore called only if nothing else prevents a
// pause, or just before the kernel forgets the connection.
func (w *Work) newestClosed(at map[netip.AddrPort]bool, ports map[uint16]bool, unseen time.Time, ignore func(time.Time) bool) (newest time.Time, err error) {
	var l waited
	if len(at)+len(ports) > 0 {
		if l, err = w.net.closed(unseen); err != nil {
			return newest, err
		}
	}
	private := sync.OnceValue(w.private)
	ours := func(a netip.AddrPort) bool { return ports[a.Port()] || waitsFor(at, a) }
	for n := range l.sockets {
		tw := &l.sockets[n]
		if toItself(*tw) && private() {
			continue
		}
		if ours(tw.Local) || tw.Remote.Addr().IsLoopback() && ours(tw.Remote) {
			if t := l.ended(tw); t.After(newest) && !ignore(t) {
				newest = t
			}
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.past.unseen.After(unseen) {
		w.past.unseen = time.Time{}
	}
	if newest.After(w.past.closed) {
		w.past.closed = newest
	}
	return newest, nil
}

// toItself reports whether both ends of a connection are on one machine or in one
// network namespace.
func toItself(s sockets.Socket) bool {
	return onThisMachine(sockets.Pair{Local: s.Local, Remote: s.Remote})
}

func onThisMachine(p sockets.Pair) bool {
	return p.Remote.Addr().IsLoopback() || p.Remote.Addr() == p.Local.Addr()
}

// private reports whether the workload is alone in its network namespace, so that a
// connection from within the namespace is its own. It returns false if that is
// unknown.
func (w *Work) private() bool { return w.alone != nil && w.alone() }

// waitsFor reports whether a listener at one of at accepts connections to addr.
func waitsFor(at map[netip.AddrPort]bool, addr netip.AddrPort) bool {
	port := addr.Port()
	return at[addr] || at[netip.AddrPortFrom(netip.IPv6Unspecified(), port)] ||
		addr.Addr().Is4() && at[netip.AddrPortFrom(netip.IPv4Unspecified(), port)]
}

// quietFor returns how long a connection has transferred no byte, according to the
// kernel.
func quietFor(o sockets.Socket) time.Duration {
	if o.InfoSize == 0 {
		return 0 // unknown counts as active now
	}
	return min(o.Traffic.LastSent, o.Traffic.LastReceived)
}

// numeric returns addr with the name localhost replaced by an address.
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
