//go:build linux && !portable

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host"
	"lull/internal/protocol/hostctl"
	"lull/internal/relay"
)

// portKeeper keeps listening sockets in another process, so that clients queue while
// the daemon is restarted.
type portKeeper interface {
	Listen(ctx context.Context, id string, addrs []string) ([]net.Listener, error)
	Unhold(ctx context.Context, id string) error
}

// sharedPort is the ID under which the shared HTTP port is kept.
const sharedPort = "shared-http"

// portLimit is the time limit of one request to the portKeeper.
const portLimit = 10 * time.Second

// gates holds the gates of all instances.
type gates struct {
	relay *relay.Router
	front *relay.Front
	ports portKeeper

	mu   sync.Mutex
	open map[string]bool // IDs under which ports are kept
}

// has reports whether ports are kept under id.
func (g *gates) has(id string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open[id]
}

// gate is the relay's half of one instance, as used by the host.
type gate struct {
	*relay.Instance
	all *gates
	id  string // the ID under which its ports are kept; empty without ports
}

// add opens the relay's ports for an instance.
func (g *gates) add(t host.RelayTarget) (host.Gate, error) {
	opt, err := relayOptions(t.Noise)
	if err != nil {
		return nil, err
	}
	in, err := g.relay.Add(t.Name, t.Waker, opt)
	if err != nil {
		return nil, err
	}
	one := &gate{Instance: in, all: g}
	if len(t.Endpoints) > 0 {
		err = one.listen(t)
	}
	if err == nil {
		err = g.front.Route(in, 0)
	}
	if err != nil {
		return nil, errors.Join(err, one.Close())
	}
	return one, nil
}

// listen opens the ports. Ports that an earlier daemon opened are taken over.
func (g *gate) listen(t host.RelayTarget) error {
	addrs := make([]string, len(t.Endpoints))
	for n, e := range t.Endpoints {
		addrs[n] = bothFamilies(e.Listen)
	}
	ctx, cancel := context.WithTimeout(context.Background(), portLimit)
	defer cancel()
	g.id = t.ID + ".relay" // differs from the ID of sockets kept for the program itself
	g.all.mu.Lock()
	g.all.open[g.id] = true
	g.all.mu.Unlock()
	ls, err := listenAgain(ctx, g.all.ports, g.id, addrs)
	if err != nil {
		return fmt.Errorf("cannot relay: %w", err)
	}
	for port, ln := range ls {
		if _, err := g.Listen(ln, port); err != nil {
			for _, ln := range ls[port:] {
				ln.Close()
			}
			return fmt.Errorf("cannot relay %s: %w", addrs[port], err)
		}
	}
	return nil
}

// listenAgain opens ports. If an address is still in use, it retries for a moment,
// because a daemon and a supervisor that were killed together may still be closing
// it.
func listenAgain(ctx context.Context, p portKeeper, id string, addrs []string) (ls []net.Listener, err error) {
	for range 20 {
		if ls, err = p.Listen(ctx, id, addrs); !errors.Is(err, syscall.EADDRINUSE) {
			return ls, err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil, err
}

// keepListening opens one port.
func keepListening(ctx context.Context, p portKeeper, id, addr string) (net.Listener, error) {
	to, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return nil, err
	}
	ls, err := listenAgain(ctx, p, id, []string{bothFamilies(to.String())})
	if err != nil {
		return nil, err
	}
	return ls[0], nil
}

// bothFamilies returns addr with the unspecified address of one family replaced by
// that of both.
func bothFamilies(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if ip, perr := netip.ParseAddr(host); err == nil && perr == nil && ip.IsUnspecified() {
		return ":" + port
	}
	return addr
}

func relayOptions(n *instance.Noise) (relay.Options, error) {
	opt := relay.Options{}
	if n == nil {
		return opt, nil
	}
	for _, s := range n.Sources {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return opt, fmt.Errorf("cannot use %q as an address range: %w", s, err)
		}
		opt.Noise.Sources = append(opt.Noise.Sources, p)
	}
	opt.Noise.SilentFor = time.Duration(n.Silent)
	opt.Noise.Paths, opt.Noise.UserAgents = n.Paths, n.UserAgents
	return opt, nil
}

// Close releases the ports permanently. Connections that are still open are cut after
// a second.
func (g *gate) Close() error {
	g.all.front.Unroute(g.Instance)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := g.Instance.Close(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil
	}
	if g.id == "" {
		return err
	}
	g.all.mu.Lock()
	delete(g.all.open, g.id)
	g.all.mu.Unlock()
	ctx, cancel = context.WithTimeout(context.Background(), portLimit)
	defer cancel()
	return errors.Join(err, g.all.ports.Unhold(ctx, g.id))
}

// RelayStats returns the statistics shown by why.
func (g *gate) RelayStats() hostctl.RelayStats {
	s := g.Stats()
	out := hostctl.RelayStats{Accepted: s.Accepted, Relayed: s.Relayed, Waiting: s.Waiting, ClientsGone: s.Gone,
		Refused: s.Refused, FailedWakes: s.WakesFailed, LastFailure: s.LastFailure}
	for _, i := range s.Ignored {
		if i.Count > 0 {
			if out.Ignored == nil {
				out.Ignored = map[string]uint64{}
			}
			out.Ignored[i.Rule] = i.Count
		}
	}
	return out
}
