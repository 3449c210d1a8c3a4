package relay

import (
	"sync"

	"golang.org/x/sys/unix"
)

// flow is one direction of a relayed connection. Small amounts of data are copied
// through the loop's buffer, with one read and one write. A read that fills the
// buffer indicates a bulk transfer: from then on data is spliced through a pipe,
// until little arrives.
type flow struct {
	readable bool // the source may have bytes or be at its end
	blocked  bool // the destination's buffer was full
	hup      bool // after its bytes, the source has an end or an error
	eof      bool // the source has ended
	reset    bool // the source has ended by a reset
	shut     bool // the end has been passed on; nothing more will be transferred

	rest   []byte // bytes read and not yet written; part of *buf
	buf    *[]byte
	bulk   bool
	pipe   *pipe
	piped  int
	copied bool // splice does not work for these sockets
}

func (f *flow) stuck() bool { return len(f.rest) > 0 || f.piped > 0 }

func (f *flow) free(lp *loop) {
	if f.buf != nil {
		restBuffers.Put(f.buf)
		f.buf, f.rest = nil, nil
	}
	if f.pipe != nil {
		lp.putPipe(f.pipe, f.piped == 0)
		f.pipe, f.piped = nil, 0
	}
}

var restBuffers = sync.Pool{New: func() any { b := make([]byte, copyBuffer); return &b }}

// relay starts to transfer bytes. It reads from the client before registering it
// with epoll, because its request has often arrived already. No event is lost:
// registering reports what is readable then.
func (c *conn) relay() {
	c.phase = phaseRelaying
	if !c.noise {
		c.in.stats.relayed.Add(1)
	}
	c.up.readable = true
	c.moveUp()
	if c.phase == phaseClosed || !c.watchClient() {
		return
	}
	if !c.bWatched {
		c.bWatched = true
		if err := c.loop.watch(c.bfd, c, edges); err != nil {
			c.unreachable(err)
			return
		}
	} else {
		c.down.readable = true
		c.pump()
	}
}

func (c *conn) relayEvent(fd int, events uint32) {
	in, out := &c.up, &c.down
	if fd == c.bfd {
		in, out = out, in
	}
	const ended = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR
	if events&(unix.EPOLLIN|ended) != 0 {
		in.readable = true
		in.hup = in.hup || events&ended != 0
	}
	if events&(unix.EPOLLOUT|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		out.blocked = false
	}
	c.pump()
}

func (c *conn) takeTurn() {
	c.queued = false
	if c.phase == phaseRelaying {
		c.pump()
	}
}

func (c *conn) pump() {
	c.moveUp()
	if c.phase != phaseClosed {
		c.moveDown()
	}
	if c.phase != phaseClosed && c.up.shut && c.down.shut {
		c.drop()
	}
}

func (f *flow) idle() bool {
	return f.shut || (!f.stuck() && !f.readable && !f.eof) || (f.stuck() && f.blocked)
}

// moveUp transfers bytes, or the end of the client's data, to the backend. If the
// backend is held or asleep, the bytes stay in the kernel, and a wake is requested.
func (c *conn) moveUp() {
	if c.parked || c.up.idle() {
		return
	}
	if c.noise {
		if c.in.gate.shut() {
			c.park()
			return
		}
	} else {
		if !c.in.gate.begin() {
			c.waiting = true
			c.park()
			return
		}
		c.moving = true
		c.w.rounds = 0
	}
	n, broken := c.move(&c.up, c.cfd, c.bfd)
	if c.moving {
		c.moving = false
		c.in.gate.end(n > 0, c.loop.now)
	}
	if n > 0 {
		c.last.Store(c.loop.now)
		c.owed.Store(true)
	}
	if broken {
		// The backend accepts no more bytes. What it has sent before is still
		// delivered, and its own end closes the connection.
		c.up.free(c.loop)
		c.up.shut = true
		c.down.readable, c.down.hup = true, true
	} else if c.up.reset && c.up.shut {
		c.abort(c.bfd)
	}
}

func (c *conn) moveDown() {
	if c.down.idle() {
		return
	}
	n, broken := c.move(&c.down, c.bfd, c.cfd)
	if n > 0 {
		c.last.Store(c.loop.now)
		c.owed.Store(false)
		if !c.noise {
			c.in.gate.lastByte.Store(c.loop.now)
		}
	}
	switch {
	case broken:
		c.abort(c.bfd)
	case c.down.reset && c.down.shut:
		c.abort(c.cfd)
	}
}

// abort ends the connection, with a reset for fd.
func (c *conn) abort(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	c.drop()
}

func (c *conn) park() {
	c.parked = true
	if c.w.c == nil || c.w.arrival.Cause != CauseData {
		c.w = waiter{c: c, noise: c.noise, arrival: Arrival{
			Instance: c.in.name, Port: c.ln.port, Remote: remoteOf(c.cfd), Cause: CauseData,
		}}
	}
	if err := c.in.enqueue(&c.w); err != nil {
		c.drop()
		return
	}
	if c.noise && !c.in.gate.shut() {
		// The gate has opened between the check and the queueing. Nothing else
		// would resume this connection.
		if c.in.dequeue(&c.w) {
			c.loop.post(message{c: c})
		}
	}
}

func (c *conn) unpark() {
	c.parked = false
	if c.waiting {
		c.waiting = false
		c.in.gate.leaveWaiting()
	}
}

// move transfers the available bytes, at most one turn's. broken reports that the
// destination has failed. A failure of the source counts as its end.
func (c *conn) move(f *flow, src, dst int) (moved int, broken bool) {
	for {
		if f.stuck() {
			n, err := c.flush(f, dst)
			moved += n
			if err != nil {
				return moved, true
			}
			if f.stuck() {
				f.blocked = true
				c.wantWritable(dst)
				return moved, false
			}
		}
		if f.eof {
			c.passEnd(f, dst)
			return moved, false
		}
		if !f.readable {
			return moved, false
		}
		if moved >= turn {
			c.nextTurn()
			return moved, false
		}
		if f.bulk {
			c.fill(f, src)
			continue
		}
		n, err := c.copyOnce(f, src, dst)
		moved += n
		if err != nil {
			return moved, true
		}
	}
}

func (c *conn) nextTurn() {
	if !c.queued {
		c.queued = true
		c.loop.again = append(c.loop.again, c)
	}
}

// passEnd marks f as ended and shuts down the destination for writing. The latter
// is not needed if the other direction has ended too or the source was reset,
// because the connection is then closed at once.
func (c *conn) passEnd(f *flow, dst int) {
	other := &c.up
	if f == other {
		other = &c.down
	}
	f.shut = true
	f.free(c.loop)
	if !f.reset && !other.shut {
		sysShutdownSend(dst)
	}
}

// sourceSaid updates the flow after a read from the source.
func (f *flow) sourceSaid(n int, err error, full int) {
	switch {
	case err == unix.EAGAIN:
		f.readable = false
	case err == unix.EINTR:
	case err != nil:
		f.eof, f.reset = true, true
	case n == 0:
		f.eof = true
	case n < full && !f.hup:
		// Data that arrives later causes another edge.
		f.readable = false
	}
}

// copyOnce reads and writes once. It returns errors of the destination only.
func (c *conn) copyOnce(f *flow, src, dst int) (int, error) {
	buf := c.loop.buf
	n, err := sysRead(src, buf)
	f.sourceSaid(n, err, len(buf))
	if err != nil || n == 0 {
		return 0, nil
	}
	if n == len(buf) && !f.copied {
		f.bulk = true
	}
	m, err := sysWrite(dst, buf[:n])
	if err == unix.EAGAIN || err == unix.EINTR {
		m, err = 0, nil
	}
	if err != nil {
		return 0, err
	}
	if m < n {
		if f.buf == nil {
			f.buf = restBuffers.Get().(*[]byte)
		}
		f.rest = (*f.buf)[:copy(*f.buf, buf[m:n])]
		c.pending.Add(int32(n - m))
	}
	return m, nil
}

// flush writes the bytes that were read from the source and are not yet written.
func (c *conn) flush(f *flow, dst int) (int, error) {
	moved := 0
	for f.stuck() {
		var n int
		var err error
		if len(f.rest) > 0 {
			n, err = sysWrite(dst, f.rest)
		} else {
			n, err = sysSplice(f.pipe.r, dst, f.piped)
		}
		switch err {
		case nil:
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return moved, nil
		default:
			return moved, err
		}
		moved += n
		c.pending.Add(int32(-n))
		if len(f.rest) > 0 {
			f.rest = f.rest[n:]
		} else {
			f.piped -= n
		}
	}
	if f.buf != nil {
		restBuffers.Put(f.buf)
		f.buf, f.rest = nil, nil
	}
	if f.pipe != nil && !f.bulk {
		c.loop.putPipe(f.pipe, true)
		f.pipe = nil
	}
	return moved, nil
}

// fill splices from the source into the pipe, which must be empty. If little
// arrives, the flow returns to copying.
func (c *conn) fill(f *flow, src int) {
	if f.pipe == nil {
		if f.pipe = c.loop.getPipe(); f.pipe == nil {
			f.bulk, f.copied = false, true
			return
		}
	}
	n, err := sysSplice(src, f.pipe.w, f.pipe.size)
	n = max(n, 0)
	if err == unix.EINVAL || err == unix.ENOSYS {
		f.bulk, f.copied = false, true
		return
	}
	// A short splice does not mean that the source is empty, because a pipe holds a
	// limited number of buffers however small they are. Only EAGAIN means that.
	f.sourceSaid(n, err, 0)
	f.piped = n
	c.pending.Add(int32(n))
	if n < copyBuffer/4 {
		f.bulk = false
		if n == 0 {
			c.loop.putPipe(f.pipe, true)
			f.pipe = nil
		}
	}
}

// wantWritable registers dst for the edge that reports free space in its buffer.
func (c *conn) wantWritable(dst int) {
	out, watched := &c.cOut, c.watched
	if dst == c.bfd {
		out, watched = &c.bOut, c.bWatched
	}
	if !watched {
		// relay registers dst at its end, and registering reports free space too.
		if c.loop.watch(dst, c, edges|unix.EPOLLOUT) == nil {
			*out = true
			c.watched, c.bWatched = c.watched || dst == c.cfd, c.bWatched || dst == c.bfd
		}
		return
	}
	if !*out {
		*out = true
		c.loop.rewatch(dst, edges|unix.EPOLLOUT)
	}
}

// pipe carries spliced bytes.
type pipe struct{ r, w, size int }

const (
	pipeSize  = 256 << 10
	keepPipes = 32
)

func (lp *loop) getPipe() *pipe {
	if n := len(lp.pipes); n > 0 {
		p := lp.pipes[n-1]
		lp.pipes = lp.pipes[:n-1]
		return p
	}
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC) != nil {
		return nil
	}
	p := &pipe{r: fds[0], w: fds[1], size: copyBuffer}
	// A user has a limit for the memory of pipes. Beyond it, the default size must
	// do.
	if n, err := unix.FcntlInt(uintptr(p.w), unix.F_SETPIPE_SZ, pipeSize); err == nil {
		p.size = n
	}
	return p
}

// putPipe keeps a pipe for the next transfer if it is empty, and closes it
// otherwise.
func (lp *loop) putPipe(p *pipe, empty bool) {
	if !empty || len(lp.pipes) >= keepPipes {
		p.close()
		return
	}
	lp.pipes = append(lp.pipes, p)
}

func (p *pipe) close() {
	sysClose(p.r)
	sysClose(p.w)
}
