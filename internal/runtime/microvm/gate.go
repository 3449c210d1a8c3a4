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

// portGate blocks traffic on a machine's ports while the machine is saved. QEMU
// delivers pending output of a port even while the guest is stopped. If that
// output were read between saving the state and the end of QEMU, the restored
// guest would send it again.
type portGate struct {
	mu   sync.RWMutex
	held chan struct{} // nil while open; closed on reopening
}

// hold closes the gate. Transfers in progress have completed when it returns.
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

// through wraps c so that it respects the gate.
func (g *portGate) through(c *net.UnixConn) (*gatedConn, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	first, said := context.WithCancel(ctx)
	return &gatedConn{Conn: c, portGate: g, raw: raw, over: ctx.Done(), end: cancel, heard: first.Done(), hear: said}, nil
}

// gatedConn is a connection to a port. Deadlines do not apply while the gate is
// held.
type gatedConn struct {
	net.Conn
	portGate *portGate
	raw      syscall.RawConn
	over     <-chan struct{} // closed with the connection
	end      func()
	heard    <-chan struct{} // closed when something was read or the connection closed
	hear     func()
	said     atomic.Bool // set once something was read
}

// SyscallConn gives access to the number of unread bytes.
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
