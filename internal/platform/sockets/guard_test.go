package sockets

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

func TestGuardWakesAFrozenProgram(t *testing.T) {
	p := newProgram(t)
	p.freeze()
	g, woken := guard(t, newPoller(t), p.dups())
	if got := g.Pending(); got != "" {
		t.Fatalf("Pending = %q before anybody came", got)
	}
	c := p.dial() // succeeds: the kernel completes the handshake
	say(t, c, "hello")
	awaken(t, woken, "connection waiting on tcp "+p.addr)
	if got := g.Pending(); !strings.HasPrefix(got, "connection waiting on tcp "+p.addr) {
		t.Errorf("Pending = %q", got)
	}
	g.Close()
	p.thaw()
	expect(t, c, "hello")
}

func TestGuardFiresForWhatWaitedBefore(t *testing.T) {
	p := newProgram(t)
	p.freeze()
	dups := p.dups()
	c := p.dial()
	say(t, c, "early")
	g, woken := guard(t, newPoller(t), dups)
	awaken(t, woken, "connection waiting on")
	g.Close()
	p.thaw()
	expect(t, c, "early")
}

func TestGuardOfEstablishedConnections(t *testing.T) {
	for name, tc := range map[string]struct {
		act    func(t *testing.T, c net.Conn)
		reason string
	}{
		"data":  {func(t *testing.T, c net.Conn) { say(t, c, "x") }, "data on tcp"},
		"close": {func(t *testing.T, c net.Conn) { _ = c.Close() }, "closed by the client: tcp"},
		"half":  {func(t *testing.T, c net.Conn) { _ = c.(*net.TCPConn).CloseWrite() }, "closed by the client: tcp"},
		"asked": {func(t *testing.T, c net.Conn) { say(t, c, "x"); _ = c.(*net.TCPConn).CloseWrite() }, "data on tcp"},
		"reset": {func(t *testing.T, c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0); _ = c.Close() }, "error on tcp"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProgram(t)
			c := p.connect()
			p.freeze()
			g, woken := guard(t, newPoller(t), p.dups())
			if got := g.Pending(); got != "" {
				t.Fatalf("Pending = %q", got)
			}
			tc.act(t, c)
			awaken(t, woken, tc.reason)
			if got, want := Ended(g.Pending()), tc.reason != "data on tcp"; got != want {
				t.Errorf("%q is an end: %t", g.Pending(), got)
			}
		})
	}
}

func TestGuardOfAHalfClosedConnection(t *testing.T) {
	p := newProgram(t)
	c := p.connect()
	p.freeze()
	errtest.None(t, c.(*net.TCPConn).CloseWrite())
	var dups []Dup
	for _, d := range p.dups() {
		if d.Kind == Stream {
			d.Kind = HalfClosed
		}
		dups = append(dups, d)
	}
	g, woken := guard(t, newPoller(t), dups)
	if got := g.Pending(); got != "" {
		t.Errorf("Pending = %q for a close that was seen", got)
	}
	_ = c.(*net.TCPConn).SetLinger(0)
	_ = c.Close()
	awaken(t, woken, "error on tcp")
}

func TestGuardOfUDP(t *testing.T) {
	u, err := net.ListenPacket("udp4", "127.0.0.1:0")
	errtest.None(t, err)
	defer u.Close()
	g, woken := guard(t, newPoller(t), []Dup{{FD: dupOf(t, u.(*net.UDPConn)), Kind: Datagram, Name: "udp x"}})
	c, err := net.Dial("udp4", u.LocalAddr().String())
	errtest.None(t, err)
	defer c.Close()
	say(t, c, "x")
	awaken(t, woken, "datagram on udp x")
	if got := g.Pending(); got != "datagram on udp x" {
		t.Errorf("Pending = %q", got)
	}
}

func dupOf(t testing.TB, c syscall.Conn) int {
	t.Helper()
	raw, err := c.SyscallConn()
	errtest.None(t, err)
	dup := -1
	if cerr := raw.Control(func(fd uintptr) { dup, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	return dup
}

// pair returns a socketpair. The first end is the one to guard.
func pair(t testing.TB) (guarded, other int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	errtest.None(t, err)
	return fds[0], fds[1]
}

func poke(t testing.TB, fd int) {
	t.Helper()
	errtest.Get(unix.Write(fd, []byte{1}))(t)
}

func TestABusySocketFiresOnceUntilRearmed(t *testing.T) {
	p := newPoller(t)
	a, b := pair(t)
	defer unix.Close(b)
	g, woken := guard(t, p, []Dup{{FD: a, Kind: Stream, Name: "a"}})
	flush := func() { // delivers an event after all earlier ones
		c, d := pair(t)
		defer unix.Close(d)
		poke(t, d)
		other, end := guard(t, p, []Dup{{FD: c, Kind: Stream, Name: "c"}})
		awaken(t, end, "data on c")
		other.Close()
	}
	for range 10 {
		poke(t, b)
		flush()
	}
	if n := len(woken); n != 1 {
		t.Fatalf("woken %d times, want once", n)
	}
	awaken(t, woken, "data on a")
	errtest.None(t, g.Rearm())
	awaken(t, woken, "data on a") // at once: the data is still there
	errtest.None(t, g.Rearm())
	awaken(t, woken, "data on a")
}

func TestGuardCloseTwiceAndFromWake(t *testing.T) {
	p := newPoller(t)
	before := openFDs(t)
	a, b := pair(t)
	var g *Guard
	var ready sync.WaitGroup
	ready.Add(1)
	closed := make(chan bool)
	g, err := p.Guard([]Dup{{FD: a, Kind: Stream, Name: "a"}}, func(string) {
		ready.Wait()
		g.Close()
		g.Close()
		close(closed)
	})
	if err != nil {
		t.Fatal(err)
	}
	ready.Done()
	poke(t, b)
	<-closed
	g.Close()
	if g.Pending() != "" || g.Rearm() != nil {
		t.Error("a closed guard is not quiet")
	}
	_ = unix.Close(b)
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors are open, %d were before", after, before)
	}
}

// TestGuardOfAListenerClosedFromWake checks that a guard that is closed from
// within wake closes connections at once, and listeners when wake returns.
func TestGuardOfAListenerClosedFromWake(t *testing.T) {
	p := newPoller(t)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	before := openFDs(t)
	a, b := pair(t)
	var g *Guard
	var ready sync.WaitGroup
	ready.Add(1)
	during := make(chan int)
	g, err = p.Guard([]Dup{{FD: dupOf(t, l.(*net.TCPListener)), Kind: Listener, Name: "l"}, {FD: a, Kind: Stream, Name: "a"}}, func(string) {
		ready.Wait()
		g.Close()
		g.Close()
		during <- openFDs(t)
	})
	if err != nil {
		t.Fatal(err)
	}
	ready.Done()
	_ = unix.Close(b) // wakes
	if n := <-during; n != before+1 {
		t.Errorf("%d descriptors during the wake, %d before: want one more", n, before)
	}
	waittest.Until(t, "the listener is closed", func() bool { return openFDs(t) == before })
	if p.Len() != 0 {
		t.Errorf("%d guards", p.Len())
	}
}

func TestGuardThatCannotBeMadeClosesItsSockets(t *testing.T) {
	p := newPoller(t)
	before := openFDs(t)
	for name, dups := range map[string]func() []Dup{
		"twice the same": func() []Dup {
			a, b := pair(t)
			_ = unix.Close(b)
			return []Dup{{FD: a, Kind: Stream, Name: "a"}, {FD: a, Kind: Stream, Name: "again"}}
		},
		"not a socket": func() []Dup {
			a, b := pair(t)
			_ = unix.Close(b)
			fd, err := unix.Open("/proc/self/stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			errtest.None(t, err)
			return []Dup{{FD: a, Kind: Stream, Name: "a"}, {FD: fd, Kind: Stream, Name: "file"}}
		},
		"no kind": func() []Dup {
			a, b := pair(t)
			_ = unix.Close(b)
			return []Dup{{FD: a, Name: "a"}}
		},
	} {
		g, err := p.Guard(dups(), func(string) {})
		if err == nil || g != nil || !strings.HasPrefix(err.Error(), "cannot guard socket") {
			t.Errorf("%s: %v", name, err)
		}
		if after := openFDs(t); after != before {
			t.Errorf("%s: %d descriptors are open, %d were before", name, after, before)
		}
	}
	if p.Len() != 0 {
		t.Errorf("%d guards are left", p.Len())
	}
}

func TestAStaleEventFindsNobody(t *testing.T) {
	p := newPoller(t)
	a, b := pair(t)
	first, _ := guard(t, p, []Dup{{FD: a, Kind: Stream, Name: "first"}})
	stale := first.id << placeBits // the key of an event that epoll returned before the guard was closed
	first.Close()
	_ = unix.Close(b)
	c, d := pair(t)
	defer unix.Close(d)
	if c != a && d != a {
		t.Fatalf("descriptor %d was not used again: %d, %d", a, c, d)
	}
	_, woken := guard(t, p, []Dup{{FD: c, Kind: Stream, Name: "second"}})
	p.deliver(stale, unix.EPOLLIN)
	if len(woken) != 0 {
		t.Errorf("the second guard was woken by %q", <-woken)
	}
}

// TestReusedDescriptorsNeverWakeAQuietGuard opens and closes noisy and quiet
// guards concurrently, so that descriptor numbers are constantly reused. No quiet
// guard may be woken.
func TestReusedDescriptorsNeverWakeAQuietGuard(t *testing.T) {
	p := newPoller(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var loud, wrong atomic.Int64
	var wg sync.WaitGroup
	for worker := range uint64(4) {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, worker))
			for range 2000 {
				a, b := pair(t)
				noisy := rnd.IntN(2) == 0
				g, err := p.Guard([]Dup{{FD: a, Kind: Stream, Name: "a"}}, func(string) {
					if noisy {
						loud.Add(1)
					} else {
						wrong.Add(1)
					}
				})
				if err != nil {
					t.Error(err)
					return
				}
				if noisy {
					poke(t, b)
				}
				g.Close()
				_ = unix.Close(b)
			}
		})
	}
	wg.Wait()
	if wrong.Load() != 0 {
		t.Errorf("%d quiet guards were woken", wrong.Load())
	}
	t.Logf("%d wakes", loud.Load())
}

func TestGuardsCostNoGoroutine(t *testing.T) {
	p := newPoller(t)
	x, y := pair(t)
	defer unix.Close(x)
	defer unix.Close(y)
	before := runtime.NumGoroutine()
	for range 500 {
		fd, err := unix.FcntlInt(uintptr(x), unix.F_DUPFD_CLOEXEC, 0)
		errtest.None(t, err)
		guard(t, p, []Dup{{FD: fd, Kind: Stream, Name: "x"}})
	}
	if now := runtime.NumGoroutine(); now > before || p.Len() != 500 {
		t.Errorf("%d goroutines with %d guards, %d before", now, p.Len(), before)
	}
}

func TestPollerClose(t *testing.T) {
	before := openFDs(t)
	p, err := NewPoller()
	errtest.None(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- p.Run(ctx) }()
	a, b := pair(t)
	defer unix.Close(b)
	g, woken := guard(t, p, []Dup{{FD: a, Kind: Stream, Name: "a"}})
	poke(t, b)
	awaken(t, woken, "data on a")
	cancel()
	if err := <-ran; err != nil {
		t.Errorf("Run = %v", err)
	}
	if err := errors.Join(p.Close(), p.Close()); err != nil {
		t.Error(err)
	}
	if g.Pending() != "" {
		t.Error("the guard is still open")
	}
	if err := p.Run(context.Background()); !errors.Is(err, ErrClosed) {
		t.Errorf("Run = %v, want ErrClosed", err)
	}
	c, d := pair(t)
	_ = unix.Close(d)
	if _, err := p.Guard([]Dup{{FD: c, Kind: Stream, Name: "c"}}, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Guard = %v, want ErrClosed", err)
	}
	if after := openFDs(t); after != before+1 { // b
		t.Errorf("%d descriptors are open, %d were before", after, before)
	}
}

// The following tests show what a duplicate that is held too long does, and that
// closing the guard ends it.

func TestTrapHeldConnectionSwallowsTheFIN(t *testing.T) {
	p := newProgram(t)
	c := p.connect()
	p.freeze()
	g, _ := guard(t, newPoller(t), p.dups())
	p.thaw() // too early: the guard is still open
	say(t, c, "close")
	if got := p.line(); got != "closed" {
		t.Fatal(got)
	}
	client := c.LocalAddr().String()
	if s := stateOf(t, client, p.addr); s != Established {
		t.Errorf("the client's end is %v although the duplicate is held; the trap is gone?", s)
	}
	g.Close()
	if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("Read = %d, %v, want the end", n, err)
	}
}

func stateOf(t *testing.T, local, remote string) State {
	t.Helper()
	table, err := Dump(context.Background(), Query{LocalPorts: []uint16{port(t, local)}})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range table.Sockets {
		if s.Local.String() == local && s.Remote.String() == remote {
			return s.State
		}
	}
	return 0
}

func TestTrapEndedProgramAccepts(t *testing.T) {
	p := newProgram(t)
	p.freeze()
	g, _ := guard(t, newPoller(t), p.dups())
	p.kill()
	c, err := net.DialTimeout("tcp", p.addr, 2*time.Minute)
	if err != nil {
		t.Fatalf("the backlog of the ended program is closed although the duplicate is held; the trap is gone? %v", err)
	}
	_ = c.Close()
	g.Close()
	if c, err := net.DialTimeout("tcp", p.addr, 2*time.Minute); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("Dial = %v, %v, want a refusal", c, err)
	}
}

func TestTrapRestartFindsTheAddressInUse(t *testing.T) {
	p := newProgram(t)
	p.freeze()
	g, _ := guard(t, newPoller(t), p.dups())
	p.kill()
	if l, err := net.Listen("tcp", p.addr); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("Listen = %v, %v although the duplicate is held; the trap is gone?", l, err)
	}
	g.Close()
	again := startPart(t, "server", p.addr, nil)
	c := again.connect()
	say(t, c, "back")
	expect(t, c, "back")
}
