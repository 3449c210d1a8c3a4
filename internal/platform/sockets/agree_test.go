package sockets

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"

	"golang.org/x/sys/unix"
)

// TestInspectAgreesWithDump checks that inspecting a descriptor gives the same
// description as the kernel's list, for random sockets in random states.
func TestInspectAgreesWithDump(t *testing.T) {
	r := scaletest.Random(t)
	for range scaletest.Count(t, "worlds", 30) {
		w := newWorld(t, r)
		waittest.NoError(t, "both agree", w.differs) // agrees once the last acknowledgment has arrived
		w.end()
	}
}

// world is a random set of sockets of this process.
type world struct {
	t       *testing.T
	all     []syscall.Conn
	closers []io.Closer
	servers []syscall.Conn // listeners and accepted connections
	clients []*net.TCPConn
	ls      []*net.TCPListener
}

func newWorld(t *testing.T, r *rand.Rand) *world {
	w := &world{t: t}
	var ls []net.Listener
	for range 1 + r.IntN(3) {
		var c net.ListenConfig
		c.SetMultipathTCP(r.IntN(2) == 0)
		kind := []string{"tcp4 127.0.0.1:0", "tcp4 0.0.0.0:0", "tcp [::]:0", "tcp6 [::1]:0"}[r.IntN(4)]
		var network, addr string
		_, _ = fmt.Sscan(kind, &network, &addr)
		l, err := c.Listen(context.Background(), network, addr)
		if err != nil {
			t.Logf("not tried: %v", err) // this machine has no IPv6
			continue
		}
		w.add(l.(*net.TCPListener))
		ls = append(ls, l)
		w.ls, w.servers = append(w.ls, l.(*net.TCPListener)), append(w.servers, l.(*net.TCPListener))
	}
	for range r.IntN(8) {
		if len(ls) > 0 {
			w.connect(r, ls[r.IntN(len(ls))].(*net.TCPListener))
		}
	}
	return w
}

func (w *world) add(c interface {
	syscall.Conn
	io.Closer
}) {
	w.all, w.closers = append(w.all, c), append(w.closers, c)
}

func (w *world) end() {
	for _, c := range w.closers {
		_ = c.Close()
	}
}

// connect makes a connection to l, sends and reads at random on both ends, and
// closes some of them.
func (w *world) connect(r *rand.Rand, l *net.TCPListener) {
	w.t.Helper()
	check := func(err error) {
		w.t.Helper()
		if err != nil {
			w.t.Fatal(err)
		}
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	host := "127.0.0.1"
	if l.Addr().(*net.TCPAddr).IP.Equal(net.IPv6loopback) {
		host = "::1"
	}
	d, err := net.Dial("tcp", net.JoinHostPort(host, port))
	check(err)
	client := d.(*net.TCPConn)
	some := func() []byte { return make([]byte, 1+r.IntN(20_000)) }
	sent := some()
	if r.IntN(2) == 0 {
		_, err = client.Write(sent)
		check(err)
	} else {
		sent = nil
	}
	ends := []*net.TCPConn{client}
	if r.IntN(3) > 0 { // otherwise leave a connection in the queue
		server, err := l.AcceptTCP()
		check(err)
		ends = append(ends, server)
		w.servers = append(w.servers, server)
		if r.IntN(2) == 0 {
			_, err = server.Write(some())
			check(err)
		}
		// AcceptTCP may have returned an earlier connection, without data.
		if in := inspect(w.t, server); in.Unread > 1 && r.IntN(2) == 0 {
			_, err = io.ReadFull(server, make([]byte, 1+r.IntN(int(in.Unread)-1)))
			check(err)
		}
	}
	switch r.IntN(4) {
	case 0:
		check(client.CloseWrite())
	case 1:
		check(client.Close())
		ends = ends[1:]
	default:
		w.clients = append(w.clients, client)
	}
	for _, c := range ends {
		w.add(c)
	}
}

// differs returns an error if the descriptions of a socket differ.
func (w *world) differs() error {
	dumped := list(w.t, Query{Info: true})
	began := time.Now()
	byInode := map[uint64]Socket{}
	for _, s := range dumped {
		if s.Inode != 0 {
			byInode[s.Inode] = s
		}
	}
	for _, c := range w.all {
		in := inspect(w.t, c)
		got, want := in.Socket(), byInode[in.Inode]
		if want.Family == 0 && got.State == Close {
			continue // reset by the other end, and no longer listed
		}
		spent := time.Since(began) + 20*time.Millisecond // the kernel's clock has a coarser resolution
		queue := uint32(0)
		for _, s := range dumped {
			if s.Waiting() && s.Local.Port() == in.Local.Port() {
				queue++
			}
		}
		old := func(got, want time.Duration) bool { return got >= want && got <= want+spent }
		switch {
		case in.Listening:
			if got.State != Listen || got.Local != want.Local || got.RQueue != want.RQueue || in.Waiting != queue {
				return fmt.Errorf("listener %+v, listed %+v with %d in its queue", in, want, queue)
			}
		case got.State != want.State || got.Local != want.Local || got.Remote != want.Remote && in.Connected || got.Family != want.Family ||
			got.RQueue != want.RQueue && in.Connected || got.WQueue != want.WQueue && in.Connected:
			return fmt.Errorf("%+v, listed %+v", got, want)
		case in.Protocol != unix.IPPROTO_TCP:
		case got.InfoSize != want.InfoSize || got.Traffic.BytesAcked != want.Traffic.BytesAcked || got.Traffic.BytesReceived != want.Traffic.BytesReceived ||
			got.Traffic.SegsOut != want.Traffic.SegsOut || got.Traffic.SegsIn != want.Traffic.SegsIn ||
			got.Traffic.DataSegsIn != want.Traffic.DataSegsIn || got.Traffic.DataSegsOut != want.Traffic.DataSegsOut:
			return fmt.Errorf("traffic %+v, listed %+v", got, want)
		case !old(got.Traffic.LastSent, want.Traffic.LastSent) || !old(got.Traffic.LastReceived, want.Traffic.LastReceived):
			return fmt.Errorf("ages %+v, %s later than %+v", got.Traffic, spent, want.Traffic)
		}
	}
	return nil
}

// TestRefreshAgreesWithInspect lets clients act at random. Refreshing a server's
// sockets must give what inspecting them gives, or ErrChanged. ErrChanged is
// allowed only if the state of a socket has changed.
func TestRefreshAgreesWithInspect(t *testing.T) {
	r := scaletest.Random(t)
	refused := 0
	worlds := scaletest.Count(t, "worlds", 30)
	for range worlds {
		w := newWorld(t, r)
		var before []Info
		var fds []int
		for _, c := range w.servers {
			before = append(before, inspect(t, c))
			raw, err := c.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			if err := raw.Control(func(fd uintptr) { fds = append(fds, int(fd)) }); err != nil {
				t.Fatal(err)
			}
		}
		for _, c := range w.clients {
			switch r.IntN(8) {
			case 0:
				_ = c.Close()
			case 1, 2, 3:
				_, _ = c.Write(make([]byte, 1+r.IntN(5000)))
			case 4:
				_ = c.SetReadDeadline(time.Now().Add(time.Millisecond)) // there may be nothing to read
				_, _ = c.Read(make([]byte, 1))
			}
		}
		for range r.IntN(3) {
			if len(w.ls) > 0 {
				w.connect(r, w.ls[r.IntN(len(w.ls))])
			}
		}
		now := append([]Info(nil), before...)
		err := Refresh(os.Getpid(), fds, now)
		var after []Info
		changed := false
		for n, c := range w.servers[:len(fds)] {
			after = append(after, inspect(t, c))
			changed = changed || after[n].State != before[n].State || after[n].UnreadEnd
		}
		if err != nil {
			if refused++; !changed {
				t.Errorf("not refreshed: %v\nbefore %+v\nafter %+v", err, before, after)
			}
		} else {
			waittest.NoError(t, "both agree", func() error { // once the last acknowledgment has arrived
				again := append([]Info(nil), before...)
				if err := Refresh(os.Getpid(), fds, again); err != nil {
					for n, c := range w.servers[:len(fds)] {
						if now := inspect(t, c); now.State != before[n].State || now.UnreadEnd {
							return nil // the client's end has closed since
						}
					}
					return err
				}
				for n, c := range w.servers[:len(fds)] {
					got, want := again[n], inspect(t, c)
					got.Traffic, want.Traffic = got.Traffic.counters(), want.Traffic.counters()
					if got != want {
						return fmt.Errorf("refreshed %+v, inspected %+v", got, want)
					}
				}
				return nil
			})
		}
		w.end()
	}
	if refused == worlds {
		t.Error("every refresh was refused")
	}
}

// TestLookupAgreesWithDump looks up connections in all states by their addresses,
// and compares the result with the kernel's list.
func TestLookupAgreesWithDump(t *testing.T) {
	r := scaletest.Random(t)
	states := map[State]int{}
	worlds := scaletest.Count(t, "worlds", 10)
	for range worlds {
		w := newWorld(t, r)
		for _, c := range w.clients {
			if r.IntN(2) == 0 {
				_ = c.Close()
			}
		}
		for _, c := range w.servers[len(w.ls):] {
			if r.IntN(2) == 0 {
				_ = c.(*net.TCPConn).Close()
			}
		}
		own, err := net.Listen("tcp", "[::]:0") // IPv4 in IPv6
		if err != nil {
			own, err = net.Listen("tcp", "127.0.0.1:0")
		}
		if err != nil {
			t.Fatal(err)
		}
		port := own.Addr().(*net.TCPAddr).Port
		if err := leave(own, fmt.Sprint("127.0.0.1:", port)); err != nil {
			t.Fatal(err)
		}
		waittest.NoError(t, "both agree", func() error {
			q := Query{LocalPorts: []uint16{uint16(port)}}
			for _, l := range w.ls {
				q.LocalPorts = append(q.LocalPorts, uint16(l.Addr().(*net.TCPAddr).Port))
			}
			var pairs []Pair
			want := map[Pair]Socket{}
			for _, s := range list(t, q) {
				if s.State != Listen {
					p := Pair{s.Local, s.Remote}
					pairs, want[p] = append(pairs, p), s
				}
			}
			missing := Pair{netip.MustParseAddrPort("127.0.0.1:9"), netip.MustParseAddrPort("127.0.0.1:9")}
			found, err := Lookup(t.Context(), 0, append(pairs, missing))
			if err != nil {
				return err
			}
			for _, s := range found {
				p := Pair{s.Local, s.Remote}
				if o := want[p]; s.State != o.State || s.Inode != o.Inode || s.Expires > o.Expires {
					return fmt.Errorf("found %+v, listed %+v", s, o)
				}
				states[s.State]++
				delete(want, p)
			}
			if len(want) > 0 {
				return fmt.Errorf("not found: %v", want)
			}
			return nil
		})
		_ = own.Close()
		w.end()
	}
	if worlds >= 10 && (states[TimeWait] == 0 || states[Established] == 0) { // one may have neither
		t.Errorf("only %v", states)
	}
}

// leave makes a connection to l that its server closes first, so that TIME_WAIT
// is on the server's side.
func leave(l net.Listener, addr string) error {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		return err
	}
	if err := s.Close(); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, c)
	return err
}

// TestInspectUnixQueues checks that inspecting a unix socket shows whether a
// client waits, and the number of unread bytes.
func TestInspectUnixQueues(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	errtest.None(t, err)
	defer l.Close()
	if in := inspect(t, l.(*net.UnixListener)); in.Waiting != 0 {
		t.Errorf("before: %+v", in)
	}
	c, err := net.Dial("unix", l.Addr().String())
	errtest.None(t, err)
	defer c.Close()
	errtest.Get(c.Write(make([]byte, 5)))(t)
	if in := inspect(t, l.(*net.UnixListener)); in.Waiting != 1 {
		t.Errorf("one waits: %+v", in)
	}
	s, err := l.Accept()
	errtest.None(t, err)
	defer s.Close()
	if in := inspect(t, l.(*net.UnixListener)); in.Waiting != 0 {
		t.Errorf("after: %+v", in)
	}
	if in := inspect(t, s.(*net.UnixConn)); in.Unread != 5 {
		t.Errorf("%d of 5 bytes were not read", in.Unread)
	}
}

// TestPassiveOpens checks that every new connection is counted.
func TestPassiveOpens(t *testing.T) {
	count := func() uint64 {
		n, err := PassiveOpens(0)
		errtest.None(t, err)
		return n
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	defer l.Close()
	before := count() // other programs may add to it
	for range 10 {
		c, err := net.Dial("tcp", l.Addr().String())
		errtest.None(t, err)
		defer c.Close()
	}
	waittest.Until(t, "ten connections are counted", func() bool { return count() >= before+10 })
	for _, bad := range []string{"", "Tcp: A B\nTcp: 1 2\n", "Tcp: PassiveOpens\nTcp: x\n", "Tcp: A PassiveOpens\nTcp: 1\n", "Udp: PassiveOpens\nUdp: 1\n"} {
		if n, err := parsePassiveOpens([]byte(bad)); err == nil {
			t.Errorf("%q has %d", bad, n)
		}
	}
	if n, err := parsePassiveOpens([]byte("Ip: X\nIp: 9\nTcp: A PassiveOpens C\nTcp: 1 2 3\n")); n != 2 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}
