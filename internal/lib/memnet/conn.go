package memnet

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// Conn is one end of a connection: a net.Conn that can also be half-closed and
// aborted. All methods are safe for concurrent use.
type Conn struct {
	network       *Network // nil for a Pipe
	local, remote string
	in, out       *stream
	pair          *stream // the dialer's out, in both ends
	reading       deadline
	writing       deadline
	turn          chan struct{} // taken during a Write, so that concurrent writes do not mix

	closing sync.Once
	closed  chan struct{}
}

var _ net.Conn = (*Conn)(nil)

// Pipe returns a connection that belongs to no network.
func Pipe() (*Conn, *Conn) { return pipe(nil, "pipe:1", "pipe:2") }

func pipe(n *Network, local, remote string) (*Conn, *Conn) {
	there, back := &stream{}, &stream{}
	end := func(local, remote string, in, out *stream) *Conn {
		c := &Conn{network: n, local: local, remote: remote, in: in, out: out, pair: there,
			turn: make(chan struct{}, 1), closed: make(chan struct{})}
		c.reading.init()
		c.writing.init()
		return c
	}
	return end(local, remote, back, there), end(remote, local, there, back)
}

func (c *Conn) touches(host string) bool {
	return hostOf(c.local) == host || hostOf(c.remote) == host
}

// LocalAddr returns the address of this end.
func (c *Conn) LocalAddr() net.Addr { return address(c.local) }

// RemoteAddr returns the address of the other end.
func (c *Conn) RemoteAddr() net.Addr { return address(c.remote) }

// Unread returns the number of bytes that have arrived and were not read.
func (c *Conn) Unread() int {
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	return c.in.arrived(time.Now())
}

// Read reads bytes that have arrived, waiting for the first. It returns io.EOF
// after the other end's Close or CloseWrite, ECONNRESET after an abort,
// os.ErrDeadlineExceeded after the read deadline and net.ErrClosed after Close.
func (c *Conn) Read(p []byte) (int, error) {
	for {
		if err := c.usable(&c.reading); err != nil {
			return 0, c.fail("read", err)
		}
		if len(p) == 0 {
			return 0, nil
		}
		if healed := c.network.cutBetween(hostOf(c.local), hostOf(c.remote)); healed != nil {
			c.await(&c.reading, healed, time.Time{})
			continue
		}
		n, err, wait, at := c.in.take(p, time.Now())
		if err == io.EOF {
			return 0, io.EOF
		}
		if n > 0 || err != nil {
			return n, c.fail("read", err)
		}
		c.await(&c.reading, wait, at)
	}
}

// Write sends p, waiting while the buffer is full. It returns EPIPE if the other
// end has stopped reading.
func (c *Conn) Write(p []byte) (int, error) {
	if err := c.usable(&c.writing); err != nil {
		return 0, c.fail("write", err)
	}
	select {
	case c.turn <- struct{}{}:
	case <-c.closed:
		return 0, c.fail("write", net.ErrClosed)
	case <-c.writing.passed():
		return 0, c.fail("write", os.ErrDeadlineExceeded)
	}
	defer func() { <-c.turn }()
	sent := 0
	for {
		if err := c.usable(&c.writing); err != nil {
			return sent, c.fail("write", err)
		}
		n, err, wait := c.out.put(p[sent:], c.arrival())
		sent += n
		if err != nil || sent == len(p) {
			return sent, c.fail("write", err)
		}
		if n == 0 {
			c.await(&c.writing, wait, time.Time{})
		}
	}
}

// arrival returns when something sent now reaches the other end; the zero time
// means at once.
func (c *Conn) arrival() time.Time {
	d := c.network.delay(hostOf(c.local), hostOf(c.remote))
	if d == 0 {
		return time.Time{}
	}
	return time.Now().Add(d)
}

// open returns an error if this end was closed.
func (c *Conn) open() error {
	select {
	case <-c.closed:
		return net.ErrClosed
	default:
		return nil
	}
}

// usable returns the error for the use of one direction of the connection, or nil
// if it can be used.
func (c *Conn) usable(d *deadline) error {
	if err := c.open(); err != nil {
		return err
	}
	select {
	case <-d.passed():
		return os.ErrDeadlineExceeded
	default:
		return nil
	}
}

// await waits for a change, for the time at (unless zero), for the deadline, or
// for Close.
func (c *Conn) await(d *deadline, change <-chan struct{}, at time.Time) {
	var due <-chan time.Time
	if !at.IsZero() {
		t := time.NewTimer(time.Until(at))
		defer t.Stop()
		due = t.C
	}
	select {
	case <-change:
	case <-due:
	case <-d.passed():
	case <-c.closed:
	}
}

func (c *Conn) fail(op string, err error) error {
	if err == nil {
		return nil
	}
	return &net.OpError{Op: op, Net: "mem", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// Close ends both directions. Bytes written before still arrive. A second Close
// returns net.ErrClosed.
func (c *Conn) Close() error {
	err := c.fail("close", net.ErrClosed)
	c.closing.Do(func() {
		err = nil
		close(c.closed)
		c.out.finish(c.arrival())
		c.in.abandon()
		c.reading.set(time.Time{})
		c.writing.set(time.Time{})
		c.network.forget(c)
	})
	return err
}

// CloseWrite ends this end's direction; reading continues.
func (c *Conn) CloseWrite() error {
	if err := c.open(); err != nil {
		return c.fail("close", err)
	}
	c.out.finish(c.arrival())
	return nil
}

// CloseRead makes later writes of the other end fail.
func (c *Conn) CloseRead() error {
	if err := c.open(); err != nil {
		return c.fail("close", err)
	}
	c.in.finish(time.Time{})
	c.in.abandon()
	return nil
}

// Abort closes the connection like a reset: data in flight is lost, and the other
// end can read only what has arrived, and then gets ECONNRESET. After Close it
// does nothing.
func (c *Conn) Abort() {
	now := time.Now()
	if c.open() != nil {
		return
	}
	c.out.reset(now)
	c.in.reset(now)
	c.Close()
}

// SetDeadline sets the read and write deadlines; zero means none.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// SetReadDeadline bounds current and future reads; zero means no bound.
func (c *Conn) SetReadDeadline(t time.Time) error {
	if err := c.open(); err != nil {
		return c.fail("set", err)
	}
	c.reading.set(t)
	return nil
}

// SetWriteDeadline bounds current and future writes; zero means no bound.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	if err := c.open(); err != nil {
		return c.fail("set", err)
	}
	c.writing.set(t)
	return nil
}

// errReset is the error of an aborted connection.
var errReset = os.NewSyscallError("read", syscall.ECONNRESET)

// errPipe is the error of a write to a peer that no longer reads.
var errPipe = os.NewSyscallError("write", syscall.EPIPE)
