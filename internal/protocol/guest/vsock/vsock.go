// Package vsock connects a guest agent and its host over AF_VSOCK. The host
// listens for one connection of one guest, sends that guest the port over another
// channel, and stops listening once it is connected.
//
// A connection is trusted only after both ends have sent their half of a key that
// was exchanged over the other channel: any program in the guest could connect
// first, and any program on the host could listen on a port that was freed. The
// kernel reports from which guest a connection comes; connections of other guests
// are closed unread.
package vsock

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/guest"
)

// Well-known context IDs. Each guest has another one.
const (
	Host  = unix.VMADDR_CID_HOST  // the host, seen from a guest
	Local = unix.VMADDR_CID_LOCAL // loopback, if the kernel supports it
)

// Modules lists the kernel modules a guest needs, in load order.
var Modules = []string{"vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"}

// Key authenticates both ends: the guest sends the first half, the host the
// second.
type Key [2 * half]byte

const half = 16

// helloLimit is how long a side may take to send its half of the key.
const helloLimit = 30 * time.Second

// Listener waits for a connection of one guest.
type Listener struct {
	Port uint32 // assigned by the kernel
	f    *os.File
}

// Listen listens on a free port of address at, which is Host to reach guests of
// this machine. It returns an error if this machine does not have the address or
// does not support vsock.
func Listen(at uint32) (*Listener, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("cannot make a vsock socket: %w", err)
	}
	l := &Listener{f: os.NewFile(uintptr(fd), "vsock")}
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrVM{CID: at, Port: unix.VMADDR_PORT_ANY}), unix.Listen(fd, 4)); err != nil {
		l.Close()
		return nil, fmt.Errorf("cannot listen on vsock: %w", err)
	}
	got, err := unix.Getsockname(fd)
	addr, ok := got.(*unix.SockaddrVM)
	if err != nil || !ok {
		l.Close()
		return nil, fmt.Errorf("cannot send the vsock port: %v, %w", got, err)
	}
	l.Port = addr.Port
	return l, nil
}

// Close stops listening.
func (l *Listener) Close() error { return l.f.Close() }

// Accept waits until ctx ends for a connection from the guest with context ID cid
// that sends its half of the key. Other connections are closed.
func (l *Listener) Accept(ctx context.Context, cid uint32, k Key) (*os.File, error) {
	defer context.AfterFunc(ctx, func() { l.f.SetReadDeadline(time.Unix(1, 0)) })()
	for {
		c, from, err := l.accept()
		if ctx.Err() != nil { // canceled
			err = context.Cause(ctx)
		}
		if err != nil {
			if c != nil {
				c.Close()
			}
			return nil, fmt.Errorf("cannot accept on vsock: %w", err)
		}
		if from == cid && met(ctx, c, k.expect, k.say) == nil {
			return c, nil
		}
		c.Close()
	}
}

// Meet asks the guest on p to connect, and waits for the connection. For a frozen
// guest it waits as long as p exists.
func (l *Listener) Meet(ctx context.Context, p *guest.Peer, cid uint32) (*os.File, error) {
	var k Key
	rand.Read(k[:])
	ctx, cancel := context.WithCancelCause(ctx)
	asked := make(chan struct{})
	defer func() { cancel(nil); <-asked }()
	go func() {
		defer close(asked)
		if err := p.Call(ctx, guest.Vsock, guest.VsockCall{Port: l.Port, Key: k[:]}, nil); err != nil {
			cancel(err)
			return
		}
		select {
		case <-time.After(helloLimit):
			cancel(errors.New("the guest reports a connection that does not exist"))
		case <-ctx.Done():
		}
	}()
	return l.Accept(ctx, cid, k)
}

// accept accepts the next connection and returns its context id.
func (l *Listener) accept() (c *os.File, from uint32, err error) {
	raw, err := l.f.SyscallConn()
	if err != nil {
		return nil, 0, err
	}
	var fd int
	var sa unix.Sockaddr
	rerr := raw.Read(func(s uintptr) bool {
		for {
			fd, sa, err = unix.Accept4(int(s), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			if err != unix.EINTR && err != unix.ECONNABORTED {
				return err != unix.EAGAIN
			}
		}
	})
	if rerr != nil {
		return nil, 0, rerr
	}
	if err != nil {
		return nil, 0, err
	}
	if vm, ok := sa.(*unix.SockaddrVM); ok {
		from = vm.CID
	}
	return os.NewFile(uintptr(fd), "vsock"), from, nil
}

// Dial connects to a port of address to, which is Host in a guest. ctx limits it;
// the kernel gives up after two seconds.
func Dial(ctx context.Context, to, port uint32, k Key) (*os.File, error) {
	c, err := connect(ctx, &unix.SockaddrVM{CID: to, Port: port})
	if err != nil {
		return nil, fmt.Errorf("cannot connect to the host by vsock: %w", err)
	}
	if err := met(ctx, c, k.ask, k.check); err != nil {
		c.Close()
		return nil, fmt.Errorf("cannot connect to the host by vsock: %w", err)
	}
	return c, nil
}

func connect(ctx context.Context, to unix.Sockaddr) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	c := os.NewFile(uintptr(fd), "vsock")
	if err = unix.Connect(fd, to); err == unix.EINPROGRESS {
		err = connected(ctx, c)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// connected waits until a connect in progress has succeeded or failed.
func connected(ctx context.Context, c *os.File) error {
	defer context.AfterFunc(ctx, func() { c.SetWriteDeadline(time.Unix(1, 0)) })()
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	werr := raw.Write(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if n, perr := unix.Poll(poll, 0); perr != nil || n == 0 {
			return false
		}
		var code int
		if code, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err == nil && code != 0 {
			err = unix.Errno(code)
		}
		return true
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.Join(werr, err)
}

// met runs steps, which exchange the halves of the key, within helloLimit. If ctx
// ends first, it returns the context's cause. The caller closes c after an error.
func met(ctx context.Context, c *os.File, steps ...func(io.ReadWriter) error) error {
	if err := c.SetDeadline(time.Now().Add(helloLimit)); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	for _, step := range steps {
		if err := step(c); err != nil {
			if !stop() {
				return context.Cause(ctx)
			}
			return err
		}
	}
	if !stop() {
		return context.Cause(ctx)
	}
	return c.SetDeadline(time.Time{})
}

func (k Key) ask(c io.ReadWriter) error    { return say(c, k[:half]) }
func (k Key) expect(c io.ReadWriter) error { return expect(c, k[:half]) }
func (k Key) say(c io.ReadWriter) error    { return say(c, k[half:]) }
func (k Key) check(c io.ReadWriter) error {
	return expect(c, k[half:])
}

func say(c io.Writer, b []byte) error {
	_, err := c.Write(b)
	return err
}

func expect(c io.Reader, want []byte) error {
	var b [half]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return err
	}
	if subtle.ConstantTimeCompare(b[:], want) == 0 {
		return errors.New("the other end has another key")
	}
	return nil
}
