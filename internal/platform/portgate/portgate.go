// Package portgate makes clients of ports of this machine wait before their
// connection is made, whether or not anything listens there.
//
// The first packet of a connection (with UDP, every packet) is queued in the
// kernel (NFQUEUE) before its destination is evaluated. Once the gate is opened,
// the packet continues to whatever has the port then: a listening socket, or an
// address that it is translated to. The client notices only that its connect
// takes longer. Nothing is accepted on behalf of the program, and nothing is
// relayed.
//
// The rules are in an nftables table that is owned by a socket of this process.
// The kernel removes the table when the last descriptor of that socket is closed,
// however the process ends. If the process is gone while another one keeps the
// socket open, the kernel drops the packets, and clients send them again.
package portgate

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Port is a port of this machine.
type Port struct {
	UDP  bool
	Addr netip.Addr // an unspecified address stands for all of this machine's addresses of its family
	Port uint16
}

func (p Port) String() string {
	proto := "tcp "
	if p.UDP {
		proto = "udp "
	}
	return proto + netip.AddrPortFrom(p.Addr, p.Port).String()
}

// compare orders ports.
func compare(a, b Port) int { return cmp.Compare(a.String(), b.String()) }

// takes reports whether packet to is for p.
func (p Port) takes(to packet) bool {
	return p.UDP == to.udp && p.Port == to.to.Port() &&
		(p.Addr == to.to.Addr() || p.Addr.IsUnspecified() && p.Addr.Is4() == to.to.Addr().Is4())
}

// Gate makes clients of ports wait. It is safe for concurrent use.
type Gate struct {
	log   *slog.Logger
	rules *nftables.Conn
	raw   *netlink.Conn // the socket of rules; owns the table
	owner int           // a duplicate of the descriptor of raw
	queue *queue
	table *nftables.Table
	last  expr.Any // sends a packet to the queue
	done  chan struct{}

	mu    sync.Mutex
	shut  map[string]*hold
	there bool // the table exists

	closed bool
}

// hold is one call of Shut: its ports and the packets that wait for them.
type hold struct {
	ports   []Port
	came    func(from netip.AddrPort)
	packets []packet
}

// tableOwner is the kernel's NFT_TABLE_F_OWNER.
const tableOwner = 2

// New returns a gate with all ports open. It returns an error if this kernel
// (older than 5.12, or without NFQUEUE) or this process (without CAP_NET_ADMIN)
// cannot hold clients.
func New(log *slog.Logger) (_ *Gate, err error) {
	g := &Gate{log: log, owner: -1, shut: map[string]*hold{}, done: make(chan struct{})}
	own := func(c *netlink.Conn) error {
		g.raw = c
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		var derr error
		if err := raw.Control(func(fd uintptr) { g.owner, derr = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 3) }); err != nil {
			return err
		}
		return derr
	}
	if g.rules, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(own)); err != nil {
		return nil, fmt.Errorf("open the firewall: %w", err)
	}
	defer func() {
		if err != nil {
			g.end()
		}
	}()
	if g.queue, err = openQueue(); err != nil {
		return nil, fmt.Errorf("open a queue of packets: %w", err)
	}
	g.table = &nftables.Table{Name: fmt.Sprintf("lull-%08x", rand.Uint32()), Family: nftables.TableFamilyINet}
	// Depending on the kernel, either or both of these expressions work.
	info := xt.Unknown(binaryutil.NativeEndian.PutUint16(g.queue.number))
	var errs []error
	for _, last := range []expr.Any{&expr.Queue{Num: g.queue.number}, &expr.Target{Name: "NFQUEUE", Info: &info}} {
		g.last = last
		terr := g.apply([]Port{{Addr: netip.IPv6Loopback(), Port: 1}})
		if derr := g.remove(); terr == nil && derr == nil {
			go g.run()
			return g, nil
		}
		errs = append(errs, terr)
	}
	return nil, fmt.Errorf("add rules to the firewall: %w", errors.Join(errs...))
}

// Owner returns a descriptor that keeps the table alive while any duplicate of it
// is open. The gate owns the descriptor.
func (g *Gate) Owner() int { return g.owner }

// Shut makes new clients of ports wait until Open is called with the same id.
// came is called in its own goroutine with the address of the first client that
// waits; it may be nil. Another call with the same id replaces ports and came.
// Clients that already wait continue to wait, and the new came is called for
// them.
func (g *Gate) Shut(id string, ports []Port, came func(from netip.AddrPort)) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	ports = slices.SortedFunc(slices.Values(ports), compare)
	h := g.shut[id]
	if h == nil {
		h = &hold{}
	}
	was := h.ports
	if h.ports = ports; !slices.Equal(was, ports) {
		g.shut[id] = h
		if err := g.apply(g.all()); err != nil {
			if h.ports = was; len(was) == 0 {
				delete(g.shut, id)
			}
			if len(g.shut) == 0 {
				err = errors.Join(err, g.remove())
			}
			return fmt.Errorf("hold %v in the firewall: %w", ports, err)
		}
	}
	h.came = came
	h.call()
	return nil
}

// call calls came if a packet waits.
func (h *hold) call() {
	if came := h.came; came != nil && len(h.packets) > 0 {
		h.came = nil
		go came(h.packets[0].from)
	}
}

// Waiting returns the ports of id, and whether a client waits for each.
func (g *Gate) Waiting(id string) map[Port]bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.shut[id]
	if h == nil {
		return nil
	}
	out := map[Port]bool{}
	for _, p := range h.ports {
		out[p] = slices.ContainsFunc(h.packets, p.takes)
	}
	return out
}

// Open lets all waiting and future clients of id pass. It does nothing if id has
// no shut ports.
func (g *Gate) Open(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.shut[id]
	if h == nil {
		return
	}
	delete(g.shut, id)
	if err := g.apply(g.all()); err != nil { // an error is not serious: rules were only removed
		g.log.Error("cannot change the firewall", "err", err)
	}
	for _, p := range h.packets {
		g.queue.accept(p.id)
	}
	if len(g.shut) == 0 { // with the table, the kernel would drop packets that are still on their way here
		time.AfterFunc(removeAfter, g.removeUnused)
	}
}

// removeAfter is how long a table without rules is kept before it is removed.
const removeAfter = time.Second

func (g *Gate) removeUnused() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.shut) > 0 || g.closed {
		return
	}
	if err := g.remove(); err != nil {
		g.log.Error("cannot change the firewall", "err", err)
	}
}

// Close removes the rules and lets every waiting client pass.
func (g *Gate) Close() {
	g.mu.Lock()
	ids := make([]string, 0, len(g.shut))
	for id := range g.shut {
		ids = append(ids, id)
	}
	g.mu.Unlock()
	for _, id := range ids {
		g.Open(id)
	}
	g.removeUnused()
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.end()
	<-g.done
}

func (g *Gate) end() {
	if g.queue != nil {
		g.queue.conn.Close()
	}
	_ = g.rules.CloseLasting()
	if g.owner >= 0 {
		unix.Close(g.owner)
	}
}

// run receives packets until the queue is closed.
func (g *Gate) run() {
	defer close(g.done)
	for {
		all, err := g.queue.receive()
		for _, p := range all {
			g.take(p)
		}
		if err != nil {
			return
		}
	}
}

func (g *Gate) take(p packet) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, h := range g.shut {
		if slices.ContainsFunc(h.ports, func(o Port) bool { return o.takes(p) }) {
			h.packets = append(h.packets, p)
			h.call()
			return
		}
	}
	g.queue.accept(p.id) // the port was opened in the meantime
}

// all returns every port that is shut. The caller holds g.mu.
func (g *Gate) all() (ports []Port) {
	for _, h := range g.shut {
		ports = append(ports, h.ports...)
	}
	slices.SortFunc(ports, compare)
	return slices.Compact(ports)
}

// beforeAll is a priority before that of connection tracking, so that the rest of
// the kernel does not know a waiting packet yet.
const beforeAll = -310

// apply replaces all rules atomically, creating the table if needed. The caller
// holds g.mu.
func (g *Gate) apply(ports []Port) error {
	if !g.there {
		if err := g.create(); err != nil {
			return err
		}
		g.there = true
	}
	chain := func(name string, hook *nftables.ChainHook) *nftables.Chain {
		return g.rules.AddChain(&nftables.Chain{Name: name, Table: g.table, Type: nftables.ChainTypeFilter,
			Hooknum: hook, Priority: nftables.ChainPriorityRef(beforeAll)})
	}
	out, in := chain("output", nftables.ChainHookOutput), chain("prerouting", nftables.ChainHookPrerouting)
	g.rules.FlushTable(g.table)
	lo := make([]byte, unix.IFNAMSIZ)
	copy(lo, "lo")
	for _, p := range ports {
		g.rules.AddRule(&nftables.Rule{Table: g.table, Chain: out, Exprs: append(p.match(), g.last)})
		// Packets of this machine itself have already passed the output chain.
		elsewhere := []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: lo}}
		g.rules.AddRule(&nftables.Rule{Table: g.table, Chain: in, Exprs: append(append(elsewhere, p.match()...), g.last)})
	}
	return g.rules.Flush()
}

// create creates the table with an owner, which package nftables does not
// support. The caller holds g.mu.
func (g *Gate) create() error {
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_TABLE_NAME, Data: append([]byte(g.table.Name), 0)},
		{Type: unix.NFTA_TABLE_FLAGS, Data: binaryutil.BigEndian.PutUint32(tableOwner)},
	})
	if err != nil {
		return err
	}
	header := func(family byte, resource uint16) []byte {
		return append([]byte{family, unix.NFNETLINK_V0}, binaryutil.BigEndian.PutUint16(resource)...)
	}
	batch := func(kind netlink.HeaderType) netlink.Message {
		return netlink.Message{Header: netlink.Header{Type: kind, Flags: netlink.Request}, Data: header(unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)}
	}
	sent, err := g.raw.SendMessages([]netlink.Message{
		batch(unix.NFNL_MSG_BATCH_BEGIN),
		{Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE, Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Excl},
			Data: append(header(byte(g.table.Family), 0), attrs...)},
		batch(unix.NFNL_MSG_BATCH_END),
	})
	if err != nil {
		return err
	}
	got, err := g.raw.Receive()
	if err == nil {
		err = netlink.Validate(sent[1], got)
	}
	return err
}

// remove removes the table. The caller holds g.mu.
func (g *Gate) remove() error {
	if !g.there {
		return nil
	}
	g.rules.DelTable(g.table)
	err := g.rules.Flush()
	g.there = err != nil
	return err
}

// match returns the expressions that match packets that open a connection to p.
func (p Port) match() []expr.Any {
	family, proto := byte(unix.NFPROTO_IPV6), byte(unix.IPPROTO_TCP)
	if p.Addr.Is4() {
		family = unix.NFPROTO_IPV4
	}
	if p.UDP {
		proto = unix.IPPROTO_UDP
	}
	all := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(p.Port)},
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
	}
	if !p.UDP {
		const flags, fin, syn, rst, ack = 13, 0x01, 0x02, 0x04, 0x10
		all = append(all,
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: flags, Len: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{fin | syn | rst | ack}, Xor: []byte{0}},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{syn}})
	}
	if p.Addr.IsUnspecified() {
		return append(all,
			&expr.Fib{Register: 1, ResultADDRTYPE: true, FlagDADDR: true},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)})
	}
	at := uint32(24) // offset of the destination in the IP header
	if p.Addr.Is4() {
		at = 16
	}
	return append(all,
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: at, Len: uint32(len(p.Addr.AsSlice()))},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Addr.AsSlice()})
}
