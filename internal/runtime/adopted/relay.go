package adopted

import (
	"context"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"lull/internal/core/instance"
	"lull/internal/platform/sockets"
)

// When a stopped unit starts, it binds its address itself, so the address must be
// free. lull therefore accepts the clients that waited on the kept socket and
// closes the socket. Until the unit listens, new clients are steered to a lobby.
// lull relays all of these clients to the unit. Later clients reach the unit
// directly.

// lobby accepts clients that connect to addresses at which nothing listens.
type lobby struct {
	steering *sockets.Steering
	conns    chan net.Conn // closed once no more clients are accepted
	cancel   func()        // stops accepting
	opened   chan struct{} // closed once clients are no longer steered; until then a connection of lull's would be steered too
}

// lobbyRest is how long a lobby still accepts after steering has ended, because the
// TCP handshake of the last client may not be complete.
const lobbyRest = time.Second

// openLobby creates a lobby and steers the clients of addrs to it. It fails without
// root privileges and on old kernels.
func openLobby(addrs []string) (_ *lobby, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	var listeners []net.Listener
	defer func() {
		if err != nil {
			cancel()
			for _, l := range listeners {
				l.Close()
			}
		}
	}()
	doors := map[bool]int{} // descriptors owned by listeners; the key is true for IPv4
	var at []netip.AddrPort
	var fds []int
	add := func(a netip.AddrPort) error {
		v4 := a.Addr().Unmap().Is4()
		if _, ok := doors[v4]; !ok {
			network, local := "tcp6", "[::1]:0"
			if v4 {
				network, local = "tcp4", "127.0.0.1:0"
			}
			var cfg net.ListenConfig
			cfg.SetMultipathTCP(false)
			l, err := cfg.Listen(ctx, network, local)
			if err != nil {
				return err
			}
			listeners = append(listeners, l)
			raw, err := l.(*net.TCPListener).SyscallConn()
			if err == nil {
				err = raw.Control(func(fd uintptr) { doors[v4] = int(fd) })
			}
			if err != nil {
				return err
			}
		}
		at, fds = append(at, a), append(fds, doors[v4])
		return nil
	}
	for _, text := range addrs {
		a, err := netip.ParseAddrPort(text)
		if err == nil {
			err = add(a)
		}
		if both := netip.AddrPortFrom(netip.IPv4Unspecified(), a.Port()); err == nil && a.Addr() == netip.IPv6Unspecified() && !slices.Contains(addrs, both.String()) {
			err = add(both)
		}
		if err != nil {
			return nil, err
		}
	}
	s, err := sockets.Steer(at, fds)
	if err != nil {
		return nil, err
	}
	b := &lobby{steering: s, conns: make(chan net.Conn), cancel: cancel, opened: make(chan struct{})}
	var accepting sync.WaitGroup
	for _, l := range listeners {
		context.AfterFunc(ctx, func() { l.Close() })
		accepting.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				select {
				case b.conns <- c:
				case <-ctx.Done():
					c.Close()
				}
			}
		})
	}
	go func() { accepting.Wait(); close(b.conns) }()
	return b, nil
}

// open stops the steering, so that new clients reach the unit itself. It must be
// called at most once.
func (b *lobby) open() {
	b.steering.Close()
	close(b.opened)
	time.AfterFunc(lobbyRest, b.cancel)
}

// close disconnects every waiting client.
func (b *lobby) close() {
	b.steering.Close()
	b.cancel()
}

// relay connects clients, and those that come to the lobby, to the listeners of the
// run at the addresses to which they connected. A client is closed if the run does
// not listen at its address in time. b may be nil.
func (w *Work) relay(clients []net.Conn, b *lobby) {
	ctx, cancel := context.WithTimeout(w.ctx, listenWait)
	defer cancel()
	var wg sync.WaitGroup
	one := func(c net.Conn) {
		defer c.Close()
		if b != nil {
			select {
			case <-b.opened:
			case <-ctx.Done():
				return
			}
		}
		to, err := w.dial(ctx, c.LocalAddr().String())
		if err != nil {
			w.r.cfg.Log.Warn("a client that waited for a unit is turned away", "unit", w.unit.name, "client", c.RemoteAddr(), "err", err)
			return
		}
		defer to.Close()
		defer context.AfterFunc(w.ctx, func() { c.Close(); to.Close() })()
		pipe(c, to)
	}
	for _, c := range clients {
		wg.Go(func() { one(c) })
	}
	if b != nil {
		defer context.AfterFunc(ctx, b.close)()
		for c := range b.conns {
			wg.Go(func() { one(c) })
		}
	}
	wg.Wait()
}

// dial waits until the run itself listens at addr, the client's original
// destination, and connects to it.
func (w *Work) dial(ctx context.Context, addr string) (net.Conn, error) {
	want, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	for {
		if ls, err := w.Listeners(); err == nil && serves(ls, want) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		}
		select {
		case <-time.After(listenPoll):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// serves reports whether one of the listeners accepts connections to an address.
func serves(ls []instance.Listener, want netip.AddrPort) bool {
	for _, l := range ls {
		has, err := netip.ParseAddrPort(l.Addr)
		if err == nil && l.Network == "tcp" && has.Port() == want.Port() &&
			(has.Addr().IsUnspecified() || has.Addr().Unmap() == want.Addr().Unmap()) {
			return true
		}
	}
	return false
}

// pipe copies in both directions until both ends have finished sending.
func pipe(a, b net.Conn) {
	var wg sync.WaitGroup
	for _, d := range [][2]net.Conn{{a, b}, {b, a}} {
		wg.Go(func() {
			if _, err := io.Copy(d[0], d[1]); err != nil {
				a.Close()
				b.Close()
				return
			}
			if c, ok := d[0].(interface{ CloseWrite() error }); ok {
				_ = c.CloseWrite() // an error means that the other end has disconnected
			}
		})
	}
	wg.Wait()
}
