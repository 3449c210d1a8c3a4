package vnet

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"lull/internal/core/instance"
)

// Limits on a guest's outbound connections.
const (
	maxFlows    = 1024
	maxOpening  = 64
	dialLimit   = 30 * time.Second
	datagramGap = 60 * time.Second // a UDP flow ends after this long without datagrams
	dnsPort     = 53
)

// forward forwards the guest's outbound traffic, as allow permits.
func (n *Network) forward() {
	t := tcp.NewForwarder(n.stack, 0, maxOpening, func(r *tcp.ForwarderRequest) {
		to, ok := n.allow(r.ID())
		if !ok || !n.begin() {
			r.Complete(true)
			return
		}
		// The forwarder runs this in its own goroutine.
		defer n.finish()
		n.relayTCP(r, to)
	})
	n.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, t.HandlePacket)
	u := udp.NewForwarder(n.stack, func(r *udp.ForwarderRequest) {
		to, ok := n.allow(r.ID())
		if !ok || !n.begin() {
			return
		}
		var wq waiter.Queue
		ep, err := r.CreateEndpoint(&wq)
		if err != nil {
			n.finish()
			return
		}
		inside := gonet.NewUDPConn(&wq, ep)
		go func() { // Close waits for it through finish
			defer n.finish()
			n.relayUDP(inside, to)
		}()
	})
	n.stack.SetTransportProtocolHandler(udp.ProtocolNumber, u.HandlePacket)
}

// begin counts a new flow of the guest. It returns false if there are too many or
// the network is closed.
func (n *Network) begin() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ctx.Err() != nil || n.flows >= maxFlows {
		return false
	}
	n.flows++
	n.work.Add(1)
	return true
}

func (n *Network) finish() {
	n.mu.Lock()
	n.flows--
	n.mu.Unlock()
	n.work.Done()
}

// allow returns the address to dial for a destination that the guest requests, and
// whether the guest may reach it. The gateway offers only DNS, on port 53.
func (n *Network) allow(id stack.TransportEndpointID) (netip.AddrPort, bool) {
	a, ok := netip.AddrFromSlice(id.LocalAddress.AsSlice())
	if !ok || n.cfg.Mode == None {
		return netip.AddrPort{}, false
	}
	a = a.Unmap()
	switch {
	case a == Gateway && id.LocalPort == dnsPort:
		r := n.cfg.Resolver
		if !r.IsValid() {
			r = systemResolver()
		}
		return r, r.IsValid()
	case a == HostAddr && n.cfg.Mode == Full:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), id.LocalPort), true
	case Subnet.Contains(a), !reachable(a):
		return netip.AddrPort{}, false
	case n.cfg.Mode != Full && ours(a):
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(a, id.LocalPort), true
}

// reachable reports whether a can belong to another machine. It excludes loopback,
// link-local (at which clouds serve credentials), multicast, broadcast and
// unspecified addresses.
func reachable(a netip.Addr) bool {
	return a.Is4() && !a.IsLoopback() && !a.IsLinkLocalUnicast() && !a.IsMulticast() && !a.IsUnspecified() &&
		a.As4()[0] != 0 && a.As4()[0] < 240
}

// ours reports whether an address belongs, or may belong, to this machine.
func ours(a netip.Addr) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return true
	}
	for _, x := range addrs {
		if p, err := netip.ParsePrefix(x.String()); err == nil && p.Addr().Unmap() == a {
			return true
		}
	}
	return false
}

// systemResolver returns the address of this machine's first name server, or zero.
func systemResolver() netip.AddrPort {
	b, err := os.ReadFile("/etc/resolv.conf")
	if err != nil {
		return netip.AddrPort{}
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(f[1]); err == nil {
			return netip.AddrPortFrom(a, dnsPort)
		}
	}
	return netip.AddrPort{}
}

func (n *Network) relayTCP(r *tcp.ForwarderRequest, to netip.AddrPort) {
	ctx, cancel := context.WithTimeout(n.ctx, dialLimit)
	defer cancel()
	var d net.Dialer
	outside, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		r.Complete(true) // the guest gets a connection refused
		return
	}
	defer outside.Close()
	var wq waiter.Queue
	ep, terr := r.CreateEndpoint(&wq)
	r.Complete(false)
	if terr != nil {
		return
	}
	inside := gonet.NewTCPConn(&wq, ep)
	defer inside.Close()
	defer context.AfterFunc(n.ctx, func() { inside.Close(); outside.Close() })()
	var up sync.WaitGroup
	c, ends := n.noteCall(to)
	defer ends()
	up.Go(func() { carry(outside, inside, func() { c.note(instance.TurnLocal) }) })
	carry(inside, outside, func() { c.note(instance.TurnRemote) })
	up.Wait()
}

// carry copies src to dst and then shuts down dst's sending side. An error closes
// both.
func carry(dst, src net.Conn, moved func()) {
	_, err := io.Copy(struct{ io.Writer }{dst}, reading{src, moved})
	if err == nil {
		if half, ok := dst.(interface{ CloseWrite() error }); ok {
			err = half.CloseWrite()
		}
	}
	if err != nil {
		dst.Close()
		src.Close()
	}
}

func (n *Network) relayUDP(inside *gonet.UDPConn, to netip.AddrPort) {
	defer inside.Close()
	var d net.Dialer
	outside, err := d.DialContext(n.ctx, "udp", to.String())
	if err != nil {
		return
	}
	defer outside.Close()
	defer context.AfterFunc(n.ctx, func() { inside.Close(); outside.Close() })()
	var up sync.WaitGroup
	up.Go(func() { datagrams(outside, inside) })
	datagrams(inside, outside)
	up.Wait()
}

// datagrams copies src to dst until neither direction has carried a datagram for
// datagramGap.
func datagrams(dst, src net.Conn) {
	defer dst.Close()
	defer src.Close()
	buf := make([]byte, 64<<10)
	for {
		if src.SetReadDeadline(time.Now().Add(datagramGap)) != nil {
			return
		}
		k, err := src.Read(buf)
		if err != nil {
			return
		}
		if _, err := dst.Write(buf[:k]); err != nil && !errors.Is(err, io.ErrShortWrite) {
			return
		}
		if dst.SetReadDeadline(time.Now().Add(datagramGap)) != nil {
			return
		}
	}
}

// reading is a reader that calls moved whenever it has read data.
type reading struct {
	io.Reader
	moved func()
}

// Read implements io.Reader.
func (r reading) Read(b []byte) (int, error) {
	n, err := r.Reader.Read(b)
	if n > 0 {
		r.moved()
	}
	return n, err
}
