package microvm

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// portGate blocks the traffic on a machine's ports while the machine is being
// saved. QEMU delivers pending output of a port even if the guest is stopped. If
// such output were read after the state was saved, the restored guest would send it
// a second time.
type portGate struct {
	mu   sync.RWMutex
	held chan struct{} // nil while the gate is open; closed when it is reopened
}

// hold closes the gate. When it returns, no transfer is in progress.
func (g *portGate) hold() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = make(chan struct{})
}

func (g *portGate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.held)
	g.held = nil
}

// through returns a connection that transfers data on c only while the gate is
// open.
func (g *portGate) through(c *net.UnixConn) (*gatedConn, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	first, said := context.WithCancel(ctx)
	return &gatedConn{Conn: c, portGate: g, raw: raw, over: ctx.Done(), end: cancel, heard: first.Done(), hear: said}, nil
}

// gatedConn is a connection to a port. While the gate is closed, its deadlines have
// no effect.
type gatedConn struct {
	net.Conn
	portGate *portGate
	raw      syscall.RawConn
	over     <-chan struct{} // closed when the connection is closed
	end      func()
	heard    <-chan struct{} // closed when something has been read or the connection is closed
	hear     func()
	said     atomic.Bool // something has been read
}

// SyscallConn implements syscall.Conn. It is used to read the number of unread
// bytes.
func (c *gatedConn) SyscallConn() (syscall.RawConn, error) { return c.raw, nil }

func (c *gatedConn) Close() error {
	c.end()
	return c.Conn.Close()
}

func (c *gatedConn) Read(p []byte) (n int, err error) {
	err = c.pass(c.raw.Read, func(fd int) (err error) {
		n, err = unix.Read(fd, p)
		return err
	})
	if err != nil {
		return 0, err
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	if n > 0 && !c.said.Swap(true) {
		c.hear()
	}
	return n, nil
}

func (c *gatedConn) Write(p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		err = c.pass(c.raw.Write, func(fd int) error {
			m, err := unix.Write(fd, p[n:])
			n += max(m, 0)
			return err
		})
	}
	return n, err
}

// pass calls do once the connection is ready and the gate is open.
func (c *gatedConn) pass(ready func(func(uintptr) bool) error, do func(fd int) error) error {
	for {
		var held chan struct{}
		var failed error
		if err := ready(func(fd uintptr) bool {
			c.portGate.mu.RLock()
			defer c.portGate.mu.RUnlock()
			if held = c.portGate.held; held != nil {
				return true
			}
			for failed = do(int(fd)); failed == unix.EINTR; {
				failed = do(int(fd))
			}
			return failed != unix.EAGAIN
		}); err != nil {
			return err
		}
		if held == nil {
			return os.NewSyscallError("port", failed)
		}
		select {
		case <-held:
		case <-c.over:
			return net.ErrClosed
		}
	}
}
