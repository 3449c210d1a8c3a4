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

	"lull/internal/core/instance"
	"lull/internal/platform/proc"
	"lull/internal/platform/sockets"
)

// timeWait is how long the kernel keeps a closed connection.
const timeWait = 60 * time.Second

// A listing of the machine's connections serves all instances probed within
// sharedFor; a frozen instance always gets a new one. Listening sockets are
// listed separately and less often, because thousands of sleeping instances
// have one each. If a listener is too new to be in the list, its connections
// look like outbound ones, which hold.
const (
	sharedFor    = 50 * time.Millisecond
	listeningFor = time.Second
)

// listing contains the relevant TCP sockets of this machine at one time.
type listing struct {
	at        time.Time
	open      []sockets.Socket // established, and closed by the client
	listening []sockets.Socket
}

// tableCache shares listings among probes at about the same time.
type tableCache struct {
	netns int // network namespace, as the PID of a process in it; 0 is our own
	given *Fixture

	mu          sync.Mutex
	last        *listing
	listening   []sockets.Socket
	listeningAt time.Time
	waited      []sockets.Socket // TIME_WAIT
	waitedAt    time.Time
	local       *unixList
	localAt     time.Time
}

// recent returns a listing that may be as old as sharedFor.
func (c *tableCache) recent() (*listing, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last != nil && time.Since(c.last.at) < sharedFor {
		return c.last, nil
	}
	l, err := c.listLocked()
	c.last = l
	return l, err
}

// fresh lists connections now.
func (c *tableCache) fresh() (*listing, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.listLocked()
}

func (c *tableCache) listLocked() (*listing, error) {
	if c.netns != 0 || time.Since(c.listeningAt) >= listeningFor { // another namespace contains only its own listeners
		at := time.Now()
		ls, err := c.listeners()
		if err != nil {
			return nil, err
		}
		c.listening, c.listeningAt = ls, at
	}
	l := &listing{at: time.Now(), listening: c.listening}
	var err error
	l.open, err = c.dump(sockets.Query{Info: true, States: []sockets.State{sockets.Established, sockets.CloseWait,
		sockets.SynRecv, sockets.NewSynRecv}})
	return l, err
}

// closed lists connections that ended within the last minute. A busy server has
// tens of thousands of them, so only a probe that found nothing open asks, and
// probes within sharedFor share the answer.
func (c *tableCache) closed() (at time.Time, l []sockets.Socket, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.waitedAt) >= sharedFor {
		at := time.Now()
		ls, err := c.dump(sockets.Query{States: []sockets.State{sockets.TimeWait}})
		if err != nil {
			return at, nil, err
		}
		c.waited, c.waitedAt = ls, at
	}
	return c.waitedAt, c.waited, nil
}

// listeners lists the listening sockets now.
func (c *tableCache) listeners() ([]sockets.Socket, error) {
	return c.dump(sockets.Query{States: []sockets.State{sockets.Listen}})
}

// unixList is the bound unix sockets of this machine at a moment.
type unixList struct {
	byInode map[uint64]sockets.UnixSocket
	pending map[string]int // connections that wait to be accepted, by path
}

// unix lists the bound unix sockets. The list may be up to a second old unless
// fresh is set.
func (c *tableCache) unix(fresh bool) (*unixList, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.local == nil || fresh || time.Since(c.localAt) >= listeningFor {
		at := time.Now()
		all, err := c.unixSockets()
		if err != nil {
			return nil, err
		}
		l := &unixList{byInode: make(map[uint64]sockets.UnixSocket, len(all)), pending: map[string]int{}}
		for _, u := range all {
			if u.Pending {
				l.pending[u.Path]++
			} else {
				l.byInode[u.Inode] = u
			}
		}
		c.local, c.localAt = l, at
	}
	return c.local, nil
}

// unconnected lists UDP sockets that any peer may send to.
func (c *tableCache) unconnected() ([]sockets.Socket, error) {
	return c.dump(sockets.Query{UDP: true, States: []sockets.State{sockets.Close}})
}

func (c *tableCache) unixSockets() ([]sockets.UnixSocket, error) {
	if c.given != nil {
		return nil, nil
	}
	return sockets.Unix(c.netns)
}

func (c *tableCache) dump(q sockets.Query) ([]sockets.Socket, error) {
	if c.given != nil {
		return c.given.Sockets(q)
	}
	q.NetNSPID = c.netns
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

// Sample implements instance.Workload.
func (w *Work) Sample(ports []instance.Endpoint) instance.Sample {
	s := instance.Sample{At: time.Now()}
	s.CPU, s.CPUErr = w.cpu()
	s.DiskBytes, s.DiskErr = w.disk()
	w.mu.Lock()
	frozen := w.frozen
	w.mu.Unlock()
	look := w.table.recent
	if frozen {
		look = w.table.fresh
	}
	t, err := look()
	var own map[uint64]place
	if err == nil {
		own, err = w.sockets()
	}
	if err != nil {
		s.ConnErr, s.NetErr = err, err
		return s
	}
	w.count(&s, t, own, exposed(ports), frozen)
	if w.handoff && !frozen {
		w.noteClosed(own)
	}
	return s
}

func (w *Work) cpu() (time.Duration, error) {
	if w.group != nil {
		if d, err := w.group.CPU(); err == nil {
			return d, nil
		}
	}
	pids, err := w.pids(false)
	if err != nil && !errors.Is(err, proc.ErrUnsettled) {
		return 0, fmt.Errorf("cannot list the processes of %s: %w", w.id, err)
	}
	return w.r.fs.TreeCPU(pids)
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

// disk returns the bytes that the tree has read from and written to disks.
func (w *Work) disk() (uint64, error) {
	pids, err := w.pids(false)
	if err != nil && !errors.Is(err, proc.ErrUnsettled) {
		return 0, fmt.Errorf("cannot list the processes of %s: %w", w.id, err)
	}
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
		now[pid] = io.Read + io.Written
	}
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

// count finds the sockets of the tree in a listing.
func (w *Work) count(s *instance.Sample, t *listing, own map[uint64]place, ports map[uint16]bool, frozen bool) {
	listens, at, local := map[uint16]bool{}, map[netip.AddrPort]bool{}, map[netip.AddrPort]bool{}
	for _, l := range t.listening {
		if _, ok := own[l.Inode]; ok {
			listens[l.Local.Port()], at[l.Local] = true, true
		}
	}
	s.Listens = len(at) > 0
	w.countUnix(s, own, frozen)
	for _, o := range t.open {
		if _, ok := own[o.Inode]; ok {
			local[o.Local] = true
		}
	}
	// A connection from the tree to itself, such as a container's health check,
	// is not use.
	private := sync.OnceValue(w.private)
	moved, closing := map[uint64]uint64{}, map[uint64]bool{}
	w.mu.Lock()
	talked := w.turns
	w.mu.Unlock()
	talks := turns{}
	turn := func(o sockets.Socket) instance.Turn {
		if o.Inode == 0 {
			return instance.TurnNone // not accepted yet, so it holds anyway
		}
		turn, t := talked[o.Inode].next(o)
		talks[o.Inode] = t
		return turn
	}
	for _, o := range t.open {
		_, mine := own[o.Inode]
		loopback := o.Remote.Addr().IsLoopback()
		if mine && !loopback && o.HasBytes() {
			moved[o.Inode] = o.Traffic.BytesAcked + o.Traffic.BytesReceived
		}
		if mine && o.State == sockets.CloseWait {
			closing[o.Inode] = true
		}
		switch port := o.Local.Port(); {
		case mine && (ports[port] || listens[port]), o.Inode == 0 && (ports[port] || waitsFor(at, o.Local)):
			if local[o.Remote] && mine || toItself(o) && private() {
				continue // between two processes of the tree, one of which may have ended
			}
			s.Inbound = append(s.Inbound, instance.Conn{Local: o.Local.String(), Remote: o.Remote.String(), QuietFor: quietFor(o), Turn: turn(o),
				Unread: o.RQueue, Accepted: mine, Loopback: loopback, HalfClose: o.State == sockets.CloseWait})
		case mine && o.State == sockets.Established && !listens[port] && !local[o.Remote]:
			if !loopback {
				s.Outbound++
			}
			s.Calls = append(s.Calls, instance.Conn{Local: o.Local.String(), Remote: o.Remote.String(), QuietFor: quietFor(o),
				Turn: turn(o), Unread: o.RQueue, Accepted: true, Loopback: loopback})
		}
	}
	if len(s.Inbound) == 0 && len(at)+len(ports) > 0 && !frozen {
		w.lastClosed(s, at, ports, private)
	}
	w.mu.Lock()
	s.NetBytes = w.net.add(moved)
	w.turns = talks
	if !frozen {
		w.closing = closing
	}
	w.mu.Unlock()
}

// countUnix adds the unix sockets of the tree: whether it listens on one, and
// its clients there. How long a client has been quiet is unknown, so each
// counts as active now. If sockets cannot be listed, the connections are
// unknown.
func (w *Work) countUnix(s *instance.Sample, own map[uint64]place, frozen bool) {
	if len(own) == 0 {
		return
	}
	all, err := w.table.unix(frozen)
	if err != nil {
		s.ConnErr = err
		return
	}
	paths := map[string]bool{}
	for inode := range own {
		if u := all.byInode[inode]; u.Listening {
			s.Listens, paths[u.Path] = true, true
		}
	}
	if len(paths) == 0 {
		return
	}
	for path := range paths {
		for range all.pending[path] {
			s.Inbound = append(s.Inbound, instance.Conn{Local: "unix " + path, Loopback: true})
		}
	}
	peers := sync.OnceValue(func() map[uint64]uint64 {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		p, _ := sockets.UnixPeers(ctx, w.table.netns) // unknown peers count as clients
		return p
	})
	for inode := range own {
		u := all.byInode[inode]
		if !u.Connected || !paths[u.Path] {
			continue
		}
		if _, itself := own[peers()[inode]]; itself {
			continue // between two processes of the tree
		}
		s.Inbound = append(s.Inbound, instance.Conn{Local: "unix " + u.Path, Accepted: true, Loopback: true})
	}
}

// lastClosed finds when the newest closed connection ended.
func (w *Work) lastClosed(s *instance.Sample, at map[netip.AddrPort]bool, ports map[uint16]bool, private func() bool) {
	then, waited, err := w.table.closed()
	if err != nil {
		s.ConnErr = err
		return
	}
	ours := func(a netip.AddrPort) bool { return ports[a.Port()] || waitsFor(at, a) }
	for _, tw := range waited {
		if toItself(tw) && private() {
			continue
		}
		if ours(tw.Local) || tw.Remote.Addr().IsLoopback() && ours(tw.Remote) {
			if t := then.Add(tw.Expires - timeWait); t.After(s.LastClosed) {
				s.LastClosed = t
			}
		}
	}
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

// quietFor returns how long no byte was transferred, according to the kernel.
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
