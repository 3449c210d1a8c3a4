package relay

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

type phase uint8

const (
	phaseSilent   phase = iota // has not sent a byte yet, and a noise rule waits for one
	phaseWaiting               // queued for the gate or for a wake
	phaseDialling              // counted inside, no backend connection yet
	phaseRelaying
	phaseClosed
)

// conn is one TCP connection of the event loops. Only its loop touches it.
type conn struct {
	track
	loop *loop
	in   *Instance
	ln   *Listener
	w    waiter

	phase   phase
	inside  bool // counted in the gate as inside; for noise, as ignored
	waiting bool // counted as waiting
	moving  bool // between gate.begin and gate.end
	parked  bool // relaying, but its bytes wait for a wake
	queued  bool // in loop.again
	watched bool // the client is registered with epoll
	counted bool // included in the listener's open count

	cfd, bfd  int
	bWatched  bool
	cOut      bool // also registered for writability
	bOut      bool
	backend   netip.AddrPort
	dialStart int64
	attempt   int
	up, down  flow // client to backend, and backend to client
}

// arrive handles a newly accepted descriptor.
func (lp *loop) arrive(l *Listener, fd int) {
	in := l.in
	c := &conn{loop: lp, in: in, ln: l, cfd: fd, bfd: -1, counted: true}
	defer lp.rescue(c)
	c.owner = c
	c.last.Store(lp.now)
	in.stats.accepted.Add(1)
	over := l.open.Add(1) > int64(in.opt.MaxOpen)
	if len(in.opt.Noise.Sources) > 0 {
		remote := remoteOf(fd)
		if rule := in.opt.Noise.source(remote.Addr()); rule != "" {
			c.noise = true
			in.stats.ignore(rule, remote)
		}
	}
	in.link(&c.track)
	switch {
	case over:
		in.stats.refused.Add(1)
		c.drop()
	case in.opt.Noise.SilentFor > 0 && !c.noise:
		c.awaitFirstByte()
	default:
		c.admit()
	}
}

// awaitFirstByte waits until the client sends a byte, which it leaves in the
// kernel. Until then the connection is not counted.
func (c *conn) awaitFirstByte() {
	c.phase = phaseSilent
	if !c.watchClient() {
		return
	}
	c.loop.at(c.loop.now+int64(c.in.opt.Noise.SilentFor), func() {
		if c.phase == phaseSilent {
			c.dropSilent()
		}
	})
}

func (c *conn) dropSilent() {
	c.in.stats.ignore(c.in.opt.Noise.silentRule(), remoteOf(c.cfd))
	c.drop()
}

// admit counts the connection, and connects it to the backend or queues it.
func (c *conn) admit() {
	in := c.in
	if c.noise {
		in.gate.ignored.Add(1)
		c.inside = true
		b, ok := in.waker.Ready(c.ln.port)
		if !ok || in.gate.shut() {
			c.drop()
			return
		}
		c.dial(b)
		return
	}
	in.gate.lastArrival.Store(c.loop.now)
	if !in.gate.enter() {
		c.waiting = true
		c.wait()
		return
	}
	c.inside = true
	c.askReady()
}

func (c *conn) askReady() {
	b, ok := c.in.waker.Ready(c.ln.port)
	if ok {
		c.dial(b)
		return
	}
	c.in.gate.insideToWaiting()
	c.inside, c.waiting = false, true
	c.wait()
}

// wait queues a connection that is already counted as waiting.
func (c *conn) wait() {
	c.phase = phaseWaiting
	if !c.watchClient() {
		return
	}
	if c.w.c == nil {
		c.w = waiter{c: c, arrival: Arrival{
			Instance: c.in.name, Port: c.ln.port, Remote: remoteOf(c.cfd), Cause: CauseConnect, At: time.Unix(0, c.loop.now),
		}}
	}
	err := c.in.enqueue(&c.w)
	switch {
	case err == nil:
		return
	case err == ErrQueueFull:
		c.in.stats.refused.Add(1)
	case err != ErrClosed:
		c.in.stats.unreachable.Add(1)
		c.in.stats.note(err)
	}
	c.turnAway()
}

// resumed is called by the queue with the result of the wake.
func (c *conn) resumed(err error) {
	switch {
	case c.phase == phaseClosed:
	case err != nil && c.phase == phaseRelaying: // the backend's answer may be incomplete
		c.drop()
	case err != nil:
		c.turnAway()
	case c.phase == phaseWaiting:
		if !c.in.gate.reenter() {
			c.wait()
			return
		}
		c.inside, c.waiting = true, false
		c.askReady()
	case c.parked:
		c.unpark()
		c.pump()
	}
}

// watchClient registers the client with epoll, if it is not registered yet. It
// returns false if the connection has been dropped.
func (c *conn) watchClient() bool {
	if c.watched {
		return true
	}
	c.watched = true
	if err := c.loop.watch(c.cfd, c, edges); err != nil {
		c.in.stats.note(err)
		c.drop()
		return false
	}
	return true
}

func (c *conn) event(fd int, events uint32) {
	if fd == c.cfd && events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		// The kernel reports this edge only once, and relaying may start much
		// later.
		c.up.hup = true
	}
	switch {
	case c.phase == phaseRelaying:
		c.relayEvent(fd, events)
	case c.phase == phaseDialling && fd == c.bfd:
		c.finishDial(connectRaw(c.bfd, c.backend))
	case c.phase == phaseSilent:
		c.firstByte(events)
	case fd == c.cfd && c.clientGone(events):
		c.in.stats.gone.Add(1)
		c.drop()
	}
}

// clientGone reports whether the client has gone, without consuming data. A client
// that sent data and then a FIN still expects an answer; one that sent only a FIN
// counts as gone.
func (c *conn) clientGone(events uint32) bool {
	if events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		return true
	}
	if events&unix.EPOLLRDHUP == 0 {
		return false
	}
	n, err := c.peek()
	return err == nil && n == 0
}

func (c *conn) peek() (int, error) {
	var b [1]byte
	n, _, err := unix.Recvfrom(c.cfd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return n, err
}

func (c *conn) firstByte(events uint32) {
	n, err := c.peek()
	switch {
	case err == nil && n > 0:
		c.admit()
	case err == nil || err != unix.EAGAIN:
		c.dropSilent()
	}
}

// dial connects to the backend. Between sockets of this machine, connect returns
// EINPROGRESS although the connection is already established. A second call
// confirms that and saves a turn of the loop.
func (c *conn) dial(b Backend) {
	c.phase = phaseDialling
	if c.dialStart == 0 {
		c.dialStart = c.loop.now
	}
	if b.Dial != nil {
		c.handOver(b)
		return
	}
	if !b.Addr.IsValid() {
		c.unreachable(fmt.Errorf("backend address %v", b.Addr))
		return
	}
	family := unix.AF_INET
	if !b.Addr.Addr().Unmap().Is4() {
		family = unix.AF_INET6
	}
	fd, errno := sysSocket(family)
	if errno != 0 {
		c.unreachable(errno)
		return
	}
	c.bfd = fd
	c.backend = b.Addr
	sysNoDelay(fd)
	errno = connectRaw(fd, b.Addr)
	if errno == unix.EINPROGRESS {
		errno = connectRaw(fd, b.Addr)
	}
	if errno != unix.EALREADY && errno != unix.EINPROGRESS {
		c.finishDial(errno)
		return
	}
	if !c.watchClient() {
		return
	}
	if err := c.loop.watch(fd, c, edges|unix.EPOLLOUT); err != nil {
		c.unreachable(err)
		return
	}
	c.bWatched = true
	attempt := c.attempt
	c.loop.at(c.dialStart+int64(c.in.opt.DialTimeout), func() {
		if c.phase == phaseDialling && c.attempt == attempt {
			c.unreachable(unix.ETIMEDOUT)
		}
	})
}

func (c *conn) finishDial(errno syscall.Errno) {
	switch errno {
	case 0, unix.EISCONN:
		c.relay()
	case unix.EALREADY, unix.EINPROGRESS, unix.EINTR:
	case unix.ECONNREFUSED, unix.ECONNRESET, unix.ECONNABORTED, unix.EADDRNOTAVAIL, unix.EAGAIN,
		unix.EHOSTUNREACH, unix.ENETUNREACH, unix.ETIMEDOUT:
		c.redial(errno)
	default:
		c.unreachable(errno)
	}
}

// redial tries again after a short wait, because an application that is ready may
// not listen for a moment. It then asks the waker again, because the application
// may have ended meanwhile.
func (c *conn) redial(errno syscall.Errno) {
	c.closeBackend()
	wait := int64(min(time.Millisecond<<min(c.attempt, 6), 50*time.Millisecond))
	c.attempt++
	if c.loop.now+wait > c.dialStart+int64(c.in.opt.DialTimeout) {
		c.unreachable(errno)
		return
	}
	if !c.watchClient() {
		return
	}
	attempt := c.attempt
	c.loop.at(c.loop.now+wait, func() {
		if c.phase != phaseDialling || c.attempt != attempt {
			return
		}
		if c.noise {
			c.in.gate.ignored.Add(-1)
			c.inside = false
			c.admit()
			return
		}
		c.in.gate.insideToWaiting()
		c.inside, c.waiting = false, true
		c.phase = phaseWaiting
		if !c.in.gate.reenter() {
			c.wait()
			return
		}
		c.inside, c.waiting = true, false
		c.askReady()
	})
}

func (c *conn) unreachable(err error) {
	c.in.stats.unreachable.Add(1)
	c.in.stats.note(fmt.Errorf("cannot connect to %s port %d: %w", c.in.name, c.ln.port, err))
	c.turnAway()
}

// handOver passes the client, with its counts, to goroutines. It is used if the
// backend is reached through Dial.
func (c *conn) handOver(b Backend) {
	if c.watched {
		_ = unix.EpollCtl(c.loop.ep, unix.EPOLL_CTL_DEL, c.cfd, nil)
		c.loop.clear(c.cfd)
	}
	f := os.NewFile(uintptr(c.cfd), "client")
	nc, err := net.FileConn(f)
	_ = f.Close()
	c.cfd = -1
	if err != nil {
		c.unreachable(err)
		return
	}
	in, ln := c.in, c.ln
	s := &stream{in: in, ln: ln, client: nc, inside: true}
	s.owner, s.noise = s, c.noise
	s.last.Store(c.loop.now)
	in.link(&s.track)
	c.inside, c.counted = false, false
	c.drop()
	in.streams.Go(func() { s.serve(b, true) })
}

func (c *conn) askCut() { c.loop.post(message{fn: c.drop}) }

func (c *conn) closeBackend() {
	if c.bfd >= 0 {
		c.loop.clear(c.bfd)
		sysClose(c.bfd)
		c.bfd, c.bWatched = -1, false
	}
}

// drop ends the connection and removes it from every count. It closes the backend's
// socket before it reduces the backend's count.
func (c *conn) drop() {
	if c.phase == phaseClosed {
		return
	}
	c.phase = phaseClosed
	c.closeBackend()
	if c.cfd >= 0 {
		c.loop.clear(c.cfd)
		sysClose(c.cfd)
		c.cfd = -1
	}
	c.up.free(c.loop)
	c.down.free(c.loop)
	if c.moving {
		c.in.gate.end(false, 0)
	}
	if c.w.c != nil {
		c.in.dequeue(&c.w)
	}
	if c.waiting {
		c.in.gate.leaveWaiting()
	}
	switch {
	case c.inside && c.noise:
		c.in.gate.ignored.Add(-1)
	case c.inside:
		c.in.gate.leaveInside()
	}
	if c.counted {
		c.ln.open.Add(-1)
	}
	c.in.unlink(&c.track)
}
