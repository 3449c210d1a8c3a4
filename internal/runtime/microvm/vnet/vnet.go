// Package vnet is the network of one guest, inside this process: a link to QEMU,
// a TCP/IP stack (gVisor's netstack) as the gateway, connections into the guest,
// and the guest's access to the outside.
//
// A frozen guest blocks nothing: its frames wait in a bounded queue and are then
// dropped, as on a real wire. Each guest has its own network, so guests cannot
// reach each other. With mode Outbound neither this machine's loopback nor any of
// its addresses can be reached; with None nothing can. Only the gateway answers
// pings.
//
// IPv6, DHCP (the guest gets its address at boot) and ICMP to the outside are not
// supported.
package vnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"lull/internal/core/instance"
)

// Addresses, the same in every network, because networks are never connected.
var (
	Guest   = netip.MustParseAddr("192.168.127.2")
	Gateway = netip.MustParseAddr("192.168.127.1") // and name server
	Subnet  = netip.MustParsePrefix("192.168.127.0/24")
	// HostAddr is this machine's loopback, in mode Full only.
	HostAddr = netip.MustParseAddr("192.168.127.254")
)

// GuestMAC is the hardware address of the guest's network card.
const GuestMAC = "52:54:00:6c:75:02"

const (
	gatewayMAC = "\x52\x54\x00\x6c\x75\x01"
	mtu        = 1500
	nic        = 1
)

// Mode selects the destinations that a guest may reach.
type Mode string

// The modes. The zero value means Outbound.
const (
	None     Mode = "none"     // nothing; clients still reach the guest
	Outbound Mode = "outbound" // everything except this machine and its link-local network
	Full     Mode = "full"     // this machine too, its loopback at HostAddr
)

// Config configures a Network.
type Config struct {
	Mode     Mode
	Resolver netip.AddrPort // name server for the guest; zero means the one in /etc/resolv.conf
}

// Network is one guest's network. It is safe for concurrent use.
type Network struct {
	cfg   Config
	stack *stack.Stack
	link  *link
	ctx   context.Context
	stop  context.CancelFunc
	work  sync.WaitGroup

	mu    sync.Mutex
	conns map[*Conn]struct{}
	calls map[*call]struct{} // connections that the guest opened
	ended time.Time          // when the last connection into the guest that was closed ended
	flows int                // open connections and UDP flows of the guest

	moved atomic.Uint64 // payload bytes of connections into the guest, in both directions
	watch atomic.Pointer[watch]
}

// New returns a network without a guest. Close releases its resources.
func New(cfg Config) (*Network, error) {
	if cfg.Mode == "" {
		cfg.Mode = Outbound
	}
	if cfg.Mode != None && cfg.Mode != Outbound && cfg.Mode != Full {
		return nil, fmt.Errorf("cannot make a network: mode %q is not none, outbound or full", cfg.Mode)
	}
	n := &Network{cfg: cfg, conns: map[*Conn]struct{}{}, calls: map[*call]struct{}{}}
	n.ctx, n.stop = context.WithCancel(context.Background())
	n.link = newLink(n.sees)
	n.stack = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})
	if err := n.configure(); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

func (n *Network) configure() error {
	if err := n.stack.CreateNIC(nic, n.link); err != nil {
		return fmt.Errorf("cannot make a network: %s", err)
	}
	addr := tcpip.ProtocolAddress{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: address(Gateway).WithPrefix()}
	if err := n.stack.AddProtocolAddress(nic, addr, stack.AddressProperties{}); err != nil {
		return fmt.Errorf("cannot make a network: %s", err)
	}
	sack := tcpip.TCPSACKEnabled(true)
	if err := n.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &sack); err != nil {
		return fmt.Errorf("cannot make a network: %s", err)
	}
	// The stack accepts every address, because it is the guest's route to all of
	// them; allow decides what passes.
	n.stack.SetSpoofing(nic, true)
	n.stack.SetPromiscuousMode(nic, true)
	subnet, err := tcpip.NewSubnet(address(Subnet.Addr()), tcpip.MaskFromBytes(net.CIDRMask(Subnet.Bits(), 32)))
	if err != nil {
		return fmt.Errorf("cannot make a network: %w", err)
	}
	n.stack.SetRouteTable([]tcpip.Route{{Destination: subnet, NIC: nic}})
	n.forward()
	return nil
}

func address(a netip.Addr) tcpip.Address { return tcpip.AddrFrom4(a.As4()) }

// Attach carries frames over c until c ends, and takes ownership of c. It closes an
// earlier link first. A normal end returns nil.
func (n *Network) Attach(c net.Conn) error { return n.link.run(n.ctx, c) }

// Attached reports whether a guest is connected.
func (n *Network) Attached() bool { return n.link.up() }

// Bytes returns the payload bytes of connections into the guest, in both
// directions.
func (n *Network) Bytes() uint64 { return n.moved.Load() }

// Dial connects to a port of the guest.
func (n *Network) Dial(ctx context.Context, port uint16) (*Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(n.ctx, cancel)()
	c, err := gonet.DialContextTCP(ctx, n.stack, tcpip.FullAddress{NIC: nic, Addr: address(Guest), Port: port}, ipv4.ProtocolNumber)
	if err != nil {
		return nil, fmt.Errorf("cannot connect to port %d of the guest: %w", port, err)
	}
	local, _ := c.LocalAddr().(*net.TCPAddr)
	conn := &Conn{TCPConn: c, n: n, port: port, local: local.AddrPort().Port()}
	conn.last.Store(time.Now().UnixNano())
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ctx.Err() != nil {
		_ = c.Close()
		return nil, errors.New("cannot connect to the guest: its network was closed")
	}
	n.conns[conn] = struct{}{}
	return conn, nil
}

// Conn is a connection into the guest.
type Conn struct {
	*gonet.TCPConn
	n     *Network
	port  uint16 // the guest's port
	local uint16 // the gateway's port
	last  atomic.Int64
	turn  atomic.Uint32
	once  sync.Once
}

func (c *Conn) note(k int, turn instance.Turn) {
	if k > 0 {
		c.last.Store(time.Now().UnixNano())
		c.turn.Store(uint32(turn))
		c.n.moved.Add(uint64(k))
	}
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) {
	k, err := c.TCPConn.Read(b)
	c.note(k, instance.TurnLocal)
	return k, err
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (int, error) {
	k, err := c.TCPConn.Write(b)
	c.note(k, instance.TurnRemote)
	return k, err
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.once.Do(func() {
		c.n.mu.Lock()
		delete(c.n.conns, c)
		c.n.ended = time.Now()
		c.n.mu.Unlock()
	})
	return c.TCPConn.Close()
}

// Open is one connection into the guest.
type Open struct {
	Port     uint16 // guest port
	From     uint16 // source port on the gateway
	QuietFor time.Duration
	Turn     instance.Turn
}

// Opens returns the open connections into the guest, and when the last closed one
// ended (zero for never).
func (n *Network) Opens() (open []Open, ended time.Time) {
	now := time.Now().UnixNano()
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.conns {
		open = append(open, Open{Port: c.port, From: c.local, QuietFor: time.Duration(max(now-c.last.Load(), 0)), Turn: instance.Turn(c.turn.Load())})
	}
	return open, n.ended
}

// Close closes every connection and releases all resources.
func (n *Network) Close() error {
	n.stop()
	n.mu.Lock()
	for c := range n.conns {
		c.TCPConn.Close()
	}
	n.mu.Unlock()
	n.link.cut()
	n.work.Wait()
	n.stack.Destroy()
	return nil
}

// watch is notified when something arrives for a frozen guest.
type watch struct {
	outbound bool
	wake     func(reason string)
	found    atomic.Pointer[string]
}

// Watch calls wake, from any goroutine, when a connection, bytes or the end of a
// connection arrive for the guest. Connections that the guest opened count only if
// outbound is set. Only one watch can exist at a time. pending describes what has
// arrived so far, and end ends the watch.
func (n *Network) Watch(outbound bool, wake func(reason string)) (pending func() string, end func()) {
	w := &watch{outbound: outbound, wake: wake}
	n.watch.Store(w)
	pending = func() string {
		if s := w.found.Load(); s != nil {
			return *s
		}
		return ""
	}
	return pending, func() { n.watch.CompareAndSwap(w, nil) }
}

// sees inspects a frame for the guest, and notifies the watch if there is one.
func (n *Network) sees(frame []byte) {
	w := n.watch.Load()
	if w == nil {
		return
	}
	if what := stirs(frame, w.outbound); what != "" && w.found.CompareAndSwap(nil, &what) {
		w.wake(what)
	}
}

// stirs describes the effect of a frame on the guest's programs, or returns "".
// Plain acknowledgements and resets have none.
func stirs(frame []byte, outbound bool) string {
	if len(frame) < header.EthernetMinimumSize+header.IPv4MinimumSize || header.Ethernet(frame).Type() != ipv4.ProtocolNumber {
		return ""
	}
	ip := header.IPv4(frame[header.EthernetMinimumSize:])
	if !ip.IsValid(len(ip)) {
		return ""
	}
	inbound := ip.SourceAddress() == address(Gateway)
	if !inbound && !outbound {
		return ""
	}
	switch ip.TransportProtocol() {
	case tcp.ProtocolNumber:
		t := header.TCP(ip.Payload())
		if len(t) < header.TCPMinimumSize || int(t.DataOffset()) > len(t) {
			return ""
		}
		switch f := t.Flags(); {
		case f.Contains(header.TCPFlagSyn) && !f.Contains(header.TCPFlagAck):
			return fmt.Sprintf("a client connects to port %d", t.DestinationPort())
		case len(t.Payload()) > 0:
			return fmt.Sprintf("received %d bytes for port %d", len(t.Payload()), t.DestinationPort())
		case f.Contains(header.TCPFlagFin):
			return fmt.Sprintf("the other end closed a connection of port %d", t.DestinationPort())
		}
	case udp.ProtocolNumber:
		if !inbound { // the gateway itself sends only answers of its name server
			return "received a datagram"
		}
	}
	return ""
}

// call is a connection that the guest opened.
type call struct {
	to   netip.AddrPort
	last atomic.Int64
	turn atomic.Uint32
}

func (c *call) note(turn instance.Turn) {
	c.last.Store(time.Now().UnixNano())
	c.turn.Store(uint32(turn))
}

// noteCall tracks a connection that the guest opened until ends is called.
func (n *Network) noteCall(to netip.AddrPort) (c *call, ends func()) {
	c = &call{to: to}
	c.last.Store(time.Now().UnixNano())
	n.mu.Lock()
	defer n.mu.Unlock()
	n.calls[c] = struct{}{}
	return c, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.calls, c)
	}
}

// Calls returns the connections that the guest opened.
func (n *Network) Calls() (calls []instance.Conn) {
	now := time.Now().UnixNano()
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.calls {
		calls = append(calls, instance.Conn{Remote: c.to.String(), Accepted: true,
			QuietFor: time.Duration(max(now-c.last.Load(), 0)), Turn: instance.Turn(c.turn.Load())})
	}
	return calls
}
