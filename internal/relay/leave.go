package relay

import (
	"io"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// If a connection with unread data is closed, the kernel resets it, and a client
// that has sent its request sees a network error instead of an end. The data of a
// client that gets no answer is therefore read first, within these limits.
const (
	leaveFor   = time.Second
	leaveBytes = 256 << 10
	maxLeaving = 256 // per loop; any more are closed immediately
)

// leaver is a connection that was shut down for writing, and whose client may still
// be sending.
type leaver struct{ fd, left int }

// turnAway ends a connection that gets no answer.
func (c *conn) turnAway() {
	fd := c.cfd
	c.cfd = -1
	if fd >= 0 {
		if c.watched {
			_ = unix.EpollCtl(c.loop.ep, unix.EPOLL_CTL_DEL, fd, nil)
		}
		c.loop.clear(fd)
		c.loop.leave(fd)
	}
	c.drop()
}

// leave shuts down fd for writing, and closes it once the client has closed its
// side or a limit is reached.
func (lp *loop) leave(fd int) {
	sysShutdownSend(fd)
	v := &leaver{fd: fd, left: leaveBytes}
	lp.leaving[v] = struct{}{}
	if lp.drain(v); v.fd < 0 {
		return
	}
	if len(lp.leaving) > maxLeaving || lp.register(fd, entry{gone: v}, edges) != nil {
		lp.gone(v)
		return
	}
	lp.at(lp.now+int64(leaveFor), func() { lp.gone(v) })
}

// drain reads and discards what has arrived, and closes the connection when the
// limit is reached.
func (lp *loop) drain(v *leaver) {
	for v.left > 0 {
		n, err := sysRead(v.fd, lp.buf)
		if err == unix.EAGAIN {
			return
		}
		if n == 0 || err != nil && err != unix.EINTR {
			break
		}
		v.left -= max(n, 0)
	}
	lp.gone(v)
}

func (lp *loop) gone(v *leaver) {
	if v.fd < 0 {
		return
	}
	lp.clear(v.fd)
	sysClose(v.fd)
	delete(lp.leaving, v)
	v.fd = -1
}

// turnAway is conn.turnAway for a stream.
func (s *stream) turnAway() {
	half, ok := s.client.(interface {
		net.Conn
		CloseWrite() error
	})
	if !ok || half.CloseWrite() != nil || half.SetReadDeadline(time.Now().Add(leaveFor)) != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, half, leaveBytes)
}
