package sockets

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"

	"golang.org/x/sys/unix"
)

// Inspecting a descriptor gives the same answer as the kernel's own listing,
// for random sockets in random states.
func TestInspectAgreesWithDump(t *testing.T) {
	r := scaletest.Random(t)
	for range scaletest.Count(t, "worlds", 30) {
		w := newWorld(t, r)
		waittest.NoError(t, "both agree", w.differs) // once the last acknowledgment has arrived
		w.end()
	}
}

// world is a random set of sockets of this process.
type world struct {
	t       *testing.T
	all     []syscall.Conn
	closers []io.Closer
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
			t.Logf("not tried: %v", err) // a machine without IPv6
			continue
		}
		w.add(l.(*net.TCPListener))
		ls = append(ls, l)
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

// connect makes a random connection to l.
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
	if r.IntN(3) > 0 { // otherwise some connection is left in the queue
		server, err := l.AcceptTCP()
		check(err)
		ends = append(ends, server)
		if r.IntN(2) == 0 {
			_, err = server.Write(some())
			check(err)
		}
		// The accepted connection may be one of before, so it may have nothing.
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
		spent := time.Since(began) + 20*time.Millisecond // and the kernel's clock
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

// Inspecting a unix socket shows if a client waits, and the number of unread
// bytes.
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

// The count of connections grows by those that come, and by nothing else that
// this process does.
func TestPassiveOpens(t *testing.T) {
	count := func() uint64 {
		n, err := PassiveOpens(0)
		errtest.None(t, err)
		return n
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	defer l.Close()
	before := count() // others use this machine, too
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
