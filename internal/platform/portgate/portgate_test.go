package portgate

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"lull/internal/lib/waittest"
)

// inside returns a function that runs others in a network namespace of the test's
// own, in which loopback is up.
func inside(t *testing.T) func(func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a network namespace needs root")
	}
	// Package microvm runs these tests in a guest, where this lists the kernel
	// modules to load.
	for _, name := range filepath.SplitList(os.Getenv("LULL_PORTGATE_MODULES")) {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(unix.FinitModule(int(f.Fd()), "", 0), f.Close()); err != nil && !errors.Is(err, unix.EEXIST) {
			t.Fatalf("%s: %v", name, err)
		}
	}
	work, ready := make(chan func()), make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = up("lo")
		}
		ready <- err
		for f := range work {
			f()
		}
	}()
	if err := <-ready; err != nil {
		close(work)
		t.Skipf("no network namespace: %v", err)
	}
	t.Cleanup(func() { close(work) })
	return func(f func()) {
		done := make(chan struct{})
		work <- func() { defer close(done); f() }
		<-done
	}
}

// up brings up a network interface.
func up(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r)
}

// client starts a connection to an address and returns its socket.
func client(t *testing.T, to netip.AddrPort) int {
	t.Helper()
	family, sa := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()})
	if to.Addr().Is4() {
		family, sa = unix.AF_INET, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Connect(fd, sa); err != nil && !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatal(err)
	}
	return fd
}

// outcome returns the state of a client's connection: waits, connected or
// refused.
func outcome(fd int) string {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 0)
	if err != nil || n == 0 {
		return "waits"
	}
	if _, err := unix.Getpeername(fd); err != nil {
		return "refused"
	}
	return "connected"
}

// tables lists lull's tables in the firewall of the namespace.
func tables(t *testing.T, in func(func())) (names []string) {
	t.Helper()
	in(func() {
		c, err := nftables.New()
		if err != nil {
			t.Fatal(err)
		}
		all, err := c.ListTables()
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range all {
			if strings.HasPrefix(a.Name, "lull") {
				names = append(names, a.Name)
			}
		}
	})
	return names
}

// TestGate connects clients to open and shut ports, for every family and form of
// address. Clients of a shut port must wait until it is opened, and then reach
// the program that listens by then. All other clients are refused at once,
// because nothing listens yet.
func TestGate(t *testing.T) {
	in := inside(t)
	var g *Gate
	var err error
	in(func() { g, err = New(slog.New(slog.NewTextHandler(io.Discard, nil))) })
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddrPort
	var mu sync.Mutex
	came := map[string]netip.AddrPort{}
	shut := func(id string, ports ...netip.AddrPort) {
		t.Helper()
		var all []Port
		for _, p := range ports {
			all = append(all, Port{Addr: p.Addr(), Port: p.Port()})
		}
		if err := g.Shut(id, all, func(from netip.AddrPort) { mu.Lock(); came[id] = from; mu.Unlock() }); err != nil {
			t.Fatal(err)
		}
	}
	if got := tables(t, in); len(got) > 0 {
		t.Errorf("tables without a port: %v", got)
	}
	shut("a", addr("127.0.0.1:1001"))
	shut("b", addr("0.0.0.0:1002"), addr("[::]:1003"))
	fds := map[string]int{}
	connect := func(to string) { in(func() { fds[to] = client(t, addr(to)) }) }
	want := func(outcomes map[string]string) {
		t.Helper()
		for to, want := range outcomes {
			waittest.NoError(t, to+" is "+want, func() error {
				if got := outcome(fds[to]); got != want {
					return errors.New(got)
				}
				return nil
			})
		}
	}
	for _, to := range []string{"127.0.0.1:1001", "127.0.0.2:1001", "127.0.0.3:1002", "[::1]:1002", "[::1]:1003", "127.0.0.1:1003", "127.0.0.1:1004"} {
		connect(to)
	}
	want(map[string]string{"127.0.0.2:1001": "refused", "[::1]:1002": "refused", "127.0.0.1:1003": "refused", "127.0.0.1:1004": "refused"})
	waittest.Until(t, "the first client of each is known", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return came["a"].Addr() == addr("127.0.0.1:1").Addr() && came["b"].IsValid()
	})
	waittest.Until(t, "every client waits", func() bool {
		return len(g.Waiting("b")) == 2 && g.Waiting("b")[Port{Addr: netip.IPv6Unspecified(), Port: 1003}]
	})
	if got := tables(t, in); len(got) != 1 {
		t.Errorf("tables: %v", got)
	}

	// If a port is shut again, the new function is called for clients that
	// already wait.
	mu.Lock()
	clear(came)
	mu.Unlock()
	shut("b", addr("0.0.0.0:1002"), addr("[::]:1003"))
	waittest.Until(t, "it is called again", func() bool { mu.Lock(); defer mu.Unlock(); return came["b"].IsValid() })

	in(func() {
		for _, at := range []string{"127.0.0.3:1002", "[::]:1003"} {
			l, err := net.Listen("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
		}
	})
	g.Open("b")
	want(map[string]string{"127.0.0.3:1002": "connected", "[::1]:1003": "connected", "127.0.0.1:1001": "waits"})
	connect("127.0.0.3:1002")
	want(map[string]string{"127.0.0.3:1002": "connected"})
	g.Close()
	want(map[string]string{"127.0.0.1:1001": "refused"})
	if got := tables(t, in); len(got) > 0 {
		t.Errorf("tables are left: %v", got)
	}
}

// TestGateOfUDP checks that the datagrams to a shut port wait, and arrive in
// order once it is opened.
func TestGateOfUDP(t *testing.T) {
	in := inside(t)
	in(func() {
		g, err := New(slog.New(slog.NewTextHandler(io.Discard, nil)))
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		p := Port{UDP: true, Addr: netip.MustParseAddr("127.0.0.1"), Port: 1053}
		came := make(chan netip.AddrPort, 1)
		if err := g.Shut("dns", []Port{p}, func(from netip.AddrPort) { came <- from }); err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("udp", "127.0.0.1:1053")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for n := range 3 {
			if _, err := fmt.Fprint(c, n); err != nil {
				t.Fatal(err)
			}
		}
		if from := <-came; from.String() != c.LocalAddr().String() {
			t.Errorf("%s came", from)
		}
		waittest.Until(t, "they wait", func() bool { return g.Waiting("dns")[p] })
		l, err := net.ListenPacket("udp", "127.0.0.1:1053")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		g.Open("dns")
		if err := l.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 10)
		for n := range 3 {
			if m, _, err := l.ReadFrom(b); err != nil || string(b[:m]) != fmt.Sprint(n) {
				t.Errorf("datagram %d is %q, %v", n, b[:m], err)
			}
		}
	})
}

// TestGateOfTheDead checks that the kernel removes the rules when the last
// descriptor of the owner's socket is closed, and not before.
func TestGateOfTheDead(t *testing.T) {
	in := inside(t)
	var g *Gate
	var err error
	in(func() { g, err = New(slog.New(slog.NewTextHandler(io.Discard, nil))) })
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Shut("a", []Port{{Addr: netip.MustParseAddr("127.0.0.1"), Port: 1001}}, nil); err != nil {
		t.Fatal(err)
	}
	kept, err := unix.Dup(g.Owner())
	if err != nil {
		t.Fatal(err)
	}
	g.end() // closes the gate's descriptors, as if the process had been killed
	<-g.done
	if got := tables(t, in); len(got) != 1 {
		t.Errorf("with a descriptor left: %v", got)
	}
	var fd int
	in(func() { fd = client(t, netip.MustParseAddrPort("127.0.0.1:1001")) })
	if got := outcome(fd); got != "waits" {
		t.Errorf("a client of the dead: %s", got)
	}
	unix.Close(kept)
	waittest.Until(t, "the rules are gone", func() bool { return len(tables(t, in)) == 0 })
	waittest.Until(t, "the client's next packet is refused", func() bool { return outcome(fd) == "refused" })
}

// FuzzPacket parses random packets. It must not panic.
func FuzzPacket(f *testing.F) {
	f.Add([]byte("\x45\x00\x00\x2c\x00\x00\x00\x00\x40\x06\x00\x00\x7f\x00\x00\x01\x7f\x00\x00\x02\x80\x00\x03\xe9"))
	f.Add([]byte{0x60})
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, ok := headers(b); ok && (!p.from.Addr().IsValid() || !p.to.Addr().IsValid()) {
			t.Errorf("%+v", p)
		}
		parse(b)
	})
}
