//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"lull/internal/daemon/host"
	"lull/internal/instance"
	"lull/internal/link/hostctl"
	"lull/internal/router"
)

// gate is the relay's half of one instance, as the host uses it.
type gate struct {
	*router.Instance
	front *router.Front
}

// newGate opens the relay's ports of an instance.
func newGate(r *router.Router, f *router.Front, t host.RelayTarget) (host.Gate, error) {
	opt, err := relayOptions(t.Noise)
	if err != nil {
		return nil, err
	}
	in, err := r.Add(t.Name, t.Waker, opt)
	if err != nil {
		return nil, err
	}
	g := &gate{in, f}
	for port, e := range t.Endpoints {
		ln, err := listen(e.Listen)
		if err == nil {
			_, err = in.Listen(ln, port)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("cannot relay %s: %w", e.Listen, err), g.Close())
		}
	}
	if err := f.Route(in, 0); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// listen opens a port. An address that a daemon before this one still closes
// is tried again for a moment.
func listen(addr string) (ln net.Listener, err error) {
	for range 20 {
		if ln, err = net.Listen("tcp", addr); err == nil {
			return ln, nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil, err
}

func relayOptions(n *instance.Noise) (router.Options, error) {
	opt := router.Options{}
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

// Close gives the ports back; connections that are still open are cut after a
// moment.
func (g *gate) Close() error {
	g.front.Unroute(g.Instance)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := g.Instance.Close(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

// RelayStats is what why shows.
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
