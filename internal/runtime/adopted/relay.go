package adopted

import (
	"context"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"lull/internal/core/instance"
)

// A stopped unit cannot get its socket back without help, so lull accepts the
// clients that waited on it, and relays them once the unit listens again. Later
// clients reach the unit itself.

// relay connects clients to the listeners of the run at which they arrived. A
// client is closed if the run does not listen there in time.
func (w *Work) relay(clients []net.Conn) {
	ctx, cancel := context.WithTimeout(w.ctx, listenWait)
	defer cancel()
	var wg sync.WaitGroup
	for _, c := range clients {
		wg.Go(func() {
			defer c.Close()
			to, err := w.dial(ctx, c.LocalAddr().String())
			if err != nil {
				w.r.cfg.Log.Warn("a client that waited for a unit is turned away", "unit", w.unit.name, "client", c.RemoteAddr(), "err", err)
				return
			}
			defer to.Close()
			defer context.AfterFunc(w.ctx, func() { c.Close(); to.Close() })()
			pipe(c, to)
		})
	}
	wg.Wait()
}

// dial connects to where the client wanted to, once the run itself listens there.
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
				_ = c.CloseWrite() // the other end may be gone
			}
		})
	}
	wg.Wait()
}
