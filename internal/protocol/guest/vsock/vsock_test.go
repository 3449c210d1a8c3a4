package vsock_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/guestagent"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/guest"
	"lull/internal/protocol/guest/vsock"
)

// waitLimit bounds every wait in these tests.
const waitLimit = waittest.Timeout

// other is an unused context ID.
const other = 4711

// need skips the test unless LULL_VSOCK_LOOPBACK lists the kernel modules of
// vsock with a loopback, and loads them. Package microvm's tests run this test
// program in such a guest. On the machine itself the tests do not run, because a
// hypervisor may listen on its vsock.
func need(t *testing.T) {
	t.Helper()
	list := os.Getenv("LULL_VSOCK_LOOPBACK")
	if list == "" {
		t.Skip("package microvm runs it in a guest, with the kernel's modules in LULL_VSOCK_LOOPBACK")
	}
	for _, name := range filepath.SplitList(list) {
		f, err := os.Open(name)
		errtest.None(t, err)
		if err := errors.Join(unix.FinitModule(int(f.Fd()), "", 0), f.Close()); err != nil && !errors.Is(err, unix.EEXIST) {
			t.Fatalf("%s: %v", name, err)
		}
	}
}

func listen(t *testing.T) *vsock.Listener {
	t.Helper()
	l, err := vsock.Listen(vsock.Local)
	errtest.None(t, err)
	t.Cleanup(func() { l.Close() })
	return l
}

type met struct {
	c   *os.File
	err error
}

// accept calls l.Accept in a goroutine and returns a channel for its result.
func accept(ctx context.Context, l *vsock.Listener, cid uint32, k vsock.Key) <-chan met {
	out := make(chan met, 1)
	go func() {
		c, err := l.Accept(ctx, cid, k)
		out <- met{c, err}
	}()
	return out
}

func wait[T any](t *testing.T, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(waitLimit):
		t.Fatalf("not within %s: %s", waitLimit, what)
		panic("unreachable")
	}
}

// raw connects to port without sending a key, as any program could.
func raw(t *testing.T, port uint32) *os.File {
	t.Helper()
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	errtest.None(t, err)
	errtest.None(t, unix.Connect(fd, &unix.SockaddrVM{CID: vsock.Local, Port: port}))
	errtest.None(t, unix.SetNonblock(fd, true))
	c := os.NewFile(uintptr(fd), "raw")
	t.Cleanup(func() { c.Close() })
	errtest.None(t, c.SetDeadline(time.Now().Add(waitLimit)))
	return c
}

// TestConnect checks that a connection is accepted only from a peer that knows
// the key and is in the right guest, whatever was sent before.
func TestConnect(t *testing.T) {
	need(t)
	k := vsock.Key{0: 1, 16: 2}
	t.Run("both know the key", func(t *testing.T) {
		l := listen(t)
		there := accept(t.Context(), l, vsock.Local, k)
		c, err := vsock.Dial(t.Context(), vsock.Local, l.Port, k)
		errtest.None(t, err)
		defer c.Close()
		m := wait(t, "it is accepted", there)
		if m.err != nil {
			t.Fatal(m.err)
		}
		errtest.Get(m.c.Write([]byte("across")))(t)
		m.c.Close()
		if b, err := io.ReadAll(c); err != nil || string(b) != "across" {
			t.Errorf("read %q, %v", b, err)
		}
	})
	t.Run("another guest", func(t *testing.T) {
		l := listen(t)
		ctx, cancel := context.WithCancel(t.Context())
		there := accept(ctx, l, other, k)
		c := raw(t, l.Port)
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("a connection of another guest was kept: %d, %v", n, err)
		}
		if c, err := vsock.Dial(t.Context(), vsock.Local, l.Port, k); err == nil {
			t.Error("another guest was accepted because it knows the key")
			c.Close()
		}
		cancel()
		if m := wait(t, "it ends", there); !errors.Is(m.err, context.Canceled) {
			t.Errorf("ended with %v", m.err)
		}
	})
	t.Run("a program of the guest comes first", func(t *testing.T) {
		l := listen(t)
		there := accept(t.Context(), l, vsock.Local, k)
		c := raw(t, l.Port)
		errtest.Get(c.Write(make([]byte, 64)))(t)
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("who does not know the key was told something: %d, %v", n, err)
		}
		d, err := vsock.Dial(t.Context(), vsock.Local, l.Port, k)
		errtest.None(t, err)
		defer d.Close()
		m := wait(t, "the right one is accepted", there)
		if m.err != nil {
			t.Fatal(m.err)
		}
		m.c.Close()
	})
	t.Run("a program of the host listens", func(t *testing.T) {
		l := listen(t)
		wrong := k
		wrong[31]++
		there := accept(t.Context(), l, vsock.Local, wrong)
		if c, err := vsock.Dial(t.Context(), vsock.Local, l.Port, k); err == nil || !strings.Contains(err.Error(), "key") {
			t.Errorf("a guest took it for its host: %v", err)
			if err == nil {
				c.Close()
			}
		}
		if m := wait(t, "it is accepted", there); m.c != nil {
			m.c.Close()
		}
	})
	t.Run("nothing listens", func(t *testing.T) {
		l := listen(t)
		l.Close()
		if c, err := vsock.Dial(t.Context(), vsock.Local, l.Port, k); err == nil {
			t.Error("connected to nothing")
			c.Close()
		}
		if c, err := vsock.Dial(t.Context(), vsock.Host, l.Port, k); err == nil {
			t.Error("connected to a host that is not there")
			c.Close()
		}
	})
	t.Run("it takes too long", func(t *testing.T) {
		l := listen(t)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if c, err := vsock.Dial(ctx, vsock.Local, l.Port, k); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("connected to who says nothing: %v", err)
			if err == nil {
				c.Close()
			}
		}
	})
}

// TestChannel moves the channel of a real guest agent to vsock and back, by
// several events on its connections. It checks that the guest agent stays
// reachable over the serial port and that replaced connections are dropped.
func TestChannel(t *testing.T) {
	need(t)
	port, far := pair(t)
	h, err := guestagent.New(guestagent.Config{Channel: far, Root: t.TempDir(), Beat: time.Hour,
		SetClock: func(time.Time) error { return nil }, Seed: func([]byte) error { return nil }, PowerOff: func() error { return nil },
		DialHost: func(ctx context.Context, port uint32, k vsock.Key) (io.ReadWriteCloser, error) {
			return vsock.Dial(ctx, vsock.Local, port, k)
		}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	defer func() {
		cancel()
		if err := wait(t, "the harness ends", ended); err != nil {
			t.Error(err)
		}
	}()
	serial := speak(port)
	hello(t, serial)

	for n := range 3 {
		l := listen(t)
		c, err := l.Meet(t.Context(), serial, vsock.Local)
		errtest.None(t, err)
		l.Close()
		fast := speak(c)
		hello(t, fast)
		hello(t, serial)
		switch n {
		case 0: // the daemon ends
			c.Close()
		case 1: // a guest that wakes gets the time over the serial port
			errtest.None(t, serial.Call(t.Context(), guest.SetClock, guest.ClockCall{UnixNano: 1, Seed: make([]byte, 16)}, nil))
			if err := fast.Call(t.Context(), guest.Hello, nil, nil); err == nil {
				t.Error("a connection that the host has no more was kept")
			}
		case 2: // another connection replaces it
			l := listen(t)
			next, err := l.Meet(t.Context(), serial, vsock.Local)
			errtest.None(t, err)
			hello(t, speak(next))
			if err := fast.Call(t.Context(), guest.Hello, nil, nil); err == nil {
				t.Error("two connections are kept")
			}
			next.Close()
		}
		hello(t, serial)
	}

	l := listen(t)
	short, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer stop()
	if c, err := l.Meet(short, serial, other); err == nil {
		t.Error("another guest's connection was taken")
		c.Close()
	}
	hello(t, serial)
}

// pair returns both ends of a serial port, for the host and the guest agent.
func pair(t *testing.T) (near, far net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	errtest.None(t, err)
	var ends [2]net.Conn
	for n, fd := range fds {
		f := os.NewFile(uintptr(fd), "port")
		if ends[n], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
		t.Cleanup(func() { ends[n].Close() })
	}
	return ends[0], ends[1]
}

// speak returns a peer that calls the guest agent on c and discards its messages.
func speak(c io.ReadWriter) *guest.Peer {
	p := guest.NewPeer(c)
	go func() { _ = p.Run(nil, func(guest.Request) (any, error) { return nil, nil }) }()
	return p
}

func hello(t *testing.T, p *guest.Peer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	var a guest.HelloAnswer
	if err := p.Call(ctx, guest.Hello, nil, &a); err != nil || a.Version != guest.Version {
		t.Fatalf("hello: %+v, %v", a, err)
	}
}
