// Package memnet is an in-memory network: named hosts, listeners with a backlog,
// buffered connections with half-close, deadlines, aborts, latency and cut links.
//
// It lets whole daemons, including net/http clients and servers, run inside
// testing/synctest bubbles, where a real socket would keep the clock from
// advancing. All waits are on channels or timers (a mutex is never held across a
// wait). A dial succeeds as soon as the backlog has room, as in a kernel, whether
// or not the connection is accepted. Bytes sent before a Close arrive. The zero
// Network is ready for use.
//
// It omits what its users cannot observe: segmentation, Nagle, keepalives, and
// the reset that a kernel sends when a socket is closed with unread bytes.
// Channels belong to the bubble that made them, so listeners and connections must
// be created inside the bubble that uses them.
package memnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// DefaultBacklog is the number of connections that wait for Accept before
// further dials block. DefaultBuffer is the number of bytes that one direction
// of a connection holds before writes block.
const (
	DefaultBacklog = 128
	DefaultBuffer  = 64 << 10
)

// DefaultHost is the source host of dials made through the Network itself.
const DefaultHost = "client"

// Network is a set of hosts that can reach one another. It is safe for
// concurrent use and must not be copied.
type Network struct {
	mu        sync.Mutex
	listeners map[string]*Listener
	known     map[string]bool // hosts that ever had a listener
	conns     map[*Conn]struct{}
	cut       map[string]chan struct{} // by host; closed when the host is healed
	latency   map[string]time.Duration
	lastPort  uint16
}

// Addr is an address of the network: "host:port", or a path, which acts as a unix
// socket. A host that is an IP literal has a *net.TCPAddr instead.
type Addr string

// Network returns "mem".
func (a Addr) Network() string { return "mem" }

func (a Addr) String() string { return string(a) }

// address returns a name as a net.Addr.
func address(name string) net.Addr {
	if ap, err := netip.ParseAddrPort(name); err == nil {
		return net.TCPAddrFromAddrPort(ap)
	}
	return Addr(name)
}

// hostOf returns the host part of a name, or all of it if there is no port.
func hostOf(name string) string {
	if host, _, err := net.SplitHostPort(name); err == nil {
		return host
	}
	return name
}

// port returns the next free ephemeral port. The caller holds n.mu.
func (n *Network) port() uint16 {
	if n.lastPort < 32767 || n.lastPort == 65535 {
		n.lastPort = 32767
	}
	n.lastPort++
	return n.lastPort
}

// Listen opens a listener with DefaultBacklog. The address is "host:port" (port
// 0 chooses a free one), ":port" for every host that has no listener of its own
// on that port, or a path. An address in use yields EADDRINUSE.
func (n *Network) Listen(addr string) (*Listener, error) {
	return n.ListenBacklog(addr, DefaultBacklog)
}

// ListenBacklog is Listen with the given maximum of connections that are not
// accepted yet; at least 1.
func (n *Network) ListenBacklog(addr string, backlog int) (*Listener, error) {
	if addr == "" {
		return nil, &net.OpError{Op: "listen", Net: "mem", Err: errors.New("cannot listen on an empty address")}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if host, port, err := net.SplitHostPort(addr); err == nil && port == "0" {
		addr = net.JoinHostPort(host, strconv.Itoa(int(n.freePort(host))))
	}
	if n.listeners[addr] != nil {
		return nil, &net.OpError{Op: "listen", Net: "mem", Addr: address(addr), Err: os.NewSyscallError("bind", syscall.EADDRINUSE)}
	}
	l := &Listener{network: n, name: addr, backlog: max(backlog, 1)}
	if n.listeners == nil {
		n.listeners, n.known = map[string]*Listener{}, map[string]bool{}
	}
	n.listeners[addr] = l
	n.known[hostOf(addr)] = true
	return l, nil
}

func (n *Network) freePort(host string) uint16 {
	for {
		p := n.port()
		if n.listeners[net.JoinHostPort(host, strconv.Itoa(int(p)))] == nil {
			return p
		}
	}
}

// DialContext connects from DefaultHost. It has the signature of
// http.Transport.DialContext and ignores the network name.
func (n *Network) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return n.Host(DefaultHost).DialContext(ctx, network, addr)
}

// Dial is DialContext without a context.
func (n *Network) Dial(network, addr string) (net.Conn, error) {
	return n.DialContext(context.Background(), network, addr)
}

// Host is a host to dial from. Cut, Reset and SetLatency refer to it by name, and
// the other side sees the name as the remote host.
type Host struct {
	network *Network
	name    string
}

// Host returns the named host. It need not exist before.
func (n *Network) Host(name string) Host { return Host{network: n, name: name} }

// Dial is DialContext without a context.
func (h Host) Dial(network, addr string) (net.Conn, error) {
	return h.DialContext(context.Background(), network, addr)
}

// DialContext connects to addr. If the host never had a listener, it returns a
// *net.DNSError (for IP literals and paths: ECONNREFUSED). If a known host has no
// listener on that port, it returns ECONNREFUSED. If the backlog is full or the
// link is cut, it waits until that changes or ctx ends.
func (h Host) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := h.dial(ctx, addr)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: address(addr), Err: err}
	}
	return c, nil
}

func (h Host) dial(ctx context.Context, addr string) (*Conn, error) {
	n := h.network
	if err := n.cross(ctx, h.name, hostOf(addr)); err != nil {
		return nil, err
	}
	for {
		if err := ctx.Err(); err != nil {
			return nil, dialError(err)
		}
		c, wait, err := n.connect(h.name, addr)
		if c != nil || err != nil {
			return c, err
		}
		select {
		case <-wait:
		case <-ctx.Done():
		}
	}
}

// cross waits for a round trip between two hosts, and while the link between them
// is cut.
func (n *Network) cross(ctx context.Context, from, to string) error {
	if d := n.delay(from, to); d > 0 {
		t := time.NewTimer(2 * d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
			return dialError(ctx.Err())
		}
	}
	for {
		healed := n.cutBetween(from, to)
		if healed == nil {
			return nil
		}
		select {
		case <-healed:
		case <-ctx.Done():
			return dialError(ctx.Err())
		}
	}
}

// dialError converts a context's error to what net.Dialer returns: a timeout
// becomes a net.Error whose Timeout method returns true.
func dialError(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return os.ErrDeadlineExceeded
	}
	return err
}

// connect makes a connection if the backlog has room. Otherwise it returns a
// channel that is closed when that may have changed.
func (n *Network) connect(from, addr string) (*Conn, <-chan struct{}, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.listeners[addr]
	if l == nil {
		if _, port, err := net.SplitHostPort(addr); err == nil {
			l = n.listeners[":"+port]
		}
	}
	if l == nil {
		return nil, nil, n.refusal(addr)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) >= l.backlog {
		return nil, l.changed.wait(), nil
	}
	local := net.JoinHostPort(from, strconv.Itoa(int(n.port())))
	a, b := pipe(n, local, addr)
	if n.conns == nil {
		n.conns = map[*Conn]struct{}{}
	}
	n.conns[a], n.conns[b] = struct{}{}, struct{}{}
	l.queue = append(l.queue, b)
	l.changed.notify()
	return a, nil, nil
}

func (n *Network) refusal(addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil || n.known[host] {
		return os.NewSyscallError("connect", syscall.ECONNREFUSED)
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return os.NewSyscallError("connect", syscall.ECONNREFUSED)
	}
	return &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
}

// SetLatency sets the one-way delay of bytes, of ends of streams and of connects
// to or from host. An empty host sets the default of hosts without their own.
// Between two hosts the larger delay applies. Data in flight is not affected.
func (n *Network) SetLatency(host string, d time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.latency == nil {
		n.latency = map[string]time.Duration{}
	}
	n.latency[host] = max(d, 0)
}

func (n *Network) delay(a, b string) time.Duration {
	if n == nil {
		return 0
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	of := func(host string) time.Duration {
		if d, ok := n.latency[host]; ok {
			return d
		}
		return n.latency[""]
	}
	return max(of(a), of(b))
}

// Cut disconnects a host silently: dials wait, and bytes and ends of streams sent
// to or from it do not arrive until Heal.
func (n *Network) Cut(host string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.cut == nil {
		n.cut = map[string]chan struct{}{}
	}
	if n.cut[host] == nil {
		n.cut[host] = make(chan struct{})
	}
}

// Heal undoes Cut. Data that was withheld arrives.
func (n *Network) Heal(host string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if ch := n.cut[host]; ch != nil {
		close(ch)
		delete(n.cut, host)
	}
}

// cutBetween returns a channel that is closed when one of the cuts between two
// hosts is healed; nil if the hosts can reach each other.
func (n *Network) cutBetween(a, b string) <-chan struct{} {
	if n == nil {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if ch := n.cut[a]; ch != nil {
		return ch
	}
	if ch := n.cut[b]; ch != nil {
		return ch
	}
	return nil
}

// Reset aborts every connection to or from a host, as if it had crashed, and
// returns their number. Its listeners stay.
func (n *Network) Reset(host string) int {
	n.mu.Lock()
	var hit []*Conn
	pairs := map[*stream]bool{}
	for c := range n.conns {
		if c.touches(host) {
			hit = append(hit, c)
			pairs[c.pair] = true
		}
	}
	n.mu.Unlock()
	for _, c := range hit {
		c.Abort()
	}
	return len(pairs)
}

// Conns returns the number of connections with at least one open end.
func (n *Network) Conns() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	pairs := map[*stream]bool{}
	for c := range n.conns {
		pairs[c.pair] = true
	}
	return len(pairs)
}

func (n *Network) forget(c *Conn) {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.conns, c)
}

func (n *Network) String() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return fmt.Sprintf("network in memory with %d listeners", len(n.listeners))
}
