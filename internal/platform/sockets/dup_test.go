package sockets

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
)

func TestDuplicate(t *testing.T) {
	p := newProgram(t)
	p.connect()
	p.freeze()
	dups := p.dups()
	defer closeAll(dups)
	if len(dups) != 2 {
		t.Fatalf("%d sockets, want a listener and a connection", len(dups))
	}
	for _, d := range dups {
		if flags, err := unix.FcntlInt(uintptr(d.FD), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("descriptor %d is not close-on-exec (%v)", d.FD, err)
		}
		// The duplicate shares the program's flags, and Go makes its sockets
		// non-blocking.
		if flags, err := unix.FcntlInt(uintptr(d.FD), unix.F_GETFL, 0); err != nil || flags&unix.O_NONBLOCK == 0 {
			t.Errorf("descriptor %d lost O_NONBLOCK (%v)", d.FD, err)
		}
	}
}

func TestDuplicateClosesWhatItGotBeforeAFailure(t *testing.T) {
	p := newProgram(t)
	before := openFDs(t)
	_, err := Duplicate(p.pid(), []int{0, 1, 2, 4000})
	var dup *DupError
	if !errors.As(err, &dup) || dup.PID != p.pid() || dup.FD != 4000 || !errors.Is(err, ErrGone) {
		t.Errorf("err = %v, want ErrGone for descriptor 4000", err)
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors are open, %d were before", after, before)
	}
}

func TestDuplicateOfNoProcess(t *testing.T) {
	_, err := Duplicate(1<<22+1, []int{0})
	if err == nil || !strings.HasPrefix(err.Error(), "cannot open process 4194305") {
		t.Errorf("err = %v", err)
	}
	p := newProgram(t)
	p.kill()
	if _, err := Duplicate(p.pid(), []int{0}); !errors.Is(err, ErrGone) {
		t.Errorf("err = %v, want ErrGone", err)
	}
}

func TestDuplicateOfAStranger(t *testing.T) {
	if os.Getuid() == 0 {
		t.Skip("root may take everything; TestAsOrdinaryUser runs this")
	}
	_, err := Duplicate(1, []int{0})
	no, ok := errors.AsType[*DupError](err)
	if !errors.Is(err, ErrNotPermitted) || !ok || no.PID != 1 || no.FD != 0 {
		t.Errorf("err = %v, want ErrNotPermitted naming process and descriptor", err)
	}
}

func inspect(t *testing.T, c syscall.Conn) Info {
	t.Helper()
	raw, err := c.SyscallConn()
	errtest.None(t, err)
	var in Info
	var inspectErr error
	if err := raw.Control(func(fd uintptr) { in, inspectErr = Inspect(int(fd)) }); err != nil || inspectErr != nil {
		t.Fatal(err, inspectErr)
	}
	return in
}

func TestInspect(t *testing.T) {
	var plain net.ListenConfig
	plain.SetMultipathTCP(false)
	multi, err := net.Listen("tcp4", "127.0.0.1:0")
	errtest.None(t, err)
	defer multi.Close()
	if in := inspect(t, multi.(*net.TCPListener)); !in.Listening || in.State != Listen || in.Local.String() != multi.Addr().String() {
		t.Errorf("multipath listener: %+v", in)
	}
	l4, err := plain.Listen(context.Background(), "tcp4", "127.0.0.1:0")
	errtest.None(t, err)
	defer l4.Close()
	in := inspect(t, l4.(*net.TCPListener))
	if in.Family != unix.AF_INET || in.Type != unix.SOCK_STREAM || in.Protocol != unix.IPPROTO_TCP || !in.Listening ||
		in.State != Listen || in.Local.String() != l4.Addr().String() || in.Peer.IsValid() || in.Connected || in.Inode == 0 {
		t.Errorf("listener: %+v", in)
	}
	c, err := net.Dial("tcp4", l4.Addr().String())
	errtest.None(t, err)
	defer c.Close()
	in = inspect(t, c.(*net.TCPConn))
	if in.Listening || in.State != Established || !in.Connected || in.Peer.String() != l4.Addr().String() || in.Local.String() != c.LocalAddr().String() {
		t.Errorf("connection: %+v", in)
	}
	u, err := net.ListenPacket("udp4", "127.0.0.1:0")
	errtest.None(t, err)
	defer u.Close()
	in = inspect(t, u.(*net.UDPConn))
	if in.Type != unix.SOCK_DGRAM || in.Protocol != unix.IPPROTO_UDP || in.Listening || in.Connected || in.Local.String() != u.LocalAddr().String() {
		t.Errorf("udp: %+v", in)
	}
	for _, name := range []string{filepath.Join(t.TempDir(), "s"), "@lull-" + filepath.Base(t.TempDir()) + t.Name()} {
		lu, err := net.Listen("unix", name)
		errtest.None(t, err)
		in = inspect(t, lu.(*net.UnixListener))
		if in.Family != unix.AF_UNIX || !in.Listening || in.Path != name || in.Local.IsValid() {
			t.Errorf("unix: %+v, want %s", in, name)
		}
		cu, err := net.Dial("unix", name)
		errtest.None(t, err)
		if in = inspect(t, cu.(*net.UnixConn)); in.Listening || !in.Connected || in.PeerPath != name {
			t.Errorf("unix connection: %+v, want %s", in, name)
		}
		_ = cu.Close()
		_ = lu.Close()
	}
	if _, err := Inspect(1 << 20); err == nil || !strings.HasPrefix(err.Error(), "cannot read the family of socket") {
		t.Errorf("err = %v", err)
	}
}

func TestInspectIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::]:0")
	if err != nil {
		t.Skipf("no IPv6 on this machine: %v", err)
	}
	defer l.Close()
	if in := inspect(t, l.(*net.TCPListener)); in.Family != unix.AF_INET6 || in.V6Only || !in.Listening {
		t.Errorf("dual stack: %+v", in)
	}
	only, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skipf("no IPv6 loopback on this machine: %v", err)
	}
	defer only.Close()
	if in := inspect(t, only.(*net.TCPListener)); !in.V6Only || in.Local.String() != only.Addr().String() {
		t.Errorf("IPv6 only: %+v", in)
	}
}
