package sockets

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Pair is the two addresses of a TCP connection.
type Pair struct{ Local, Remote netip.AddrPort } // IPv4 in IPv6 is unmapped

// Lookup returns the TCP sockets that have exactly these addresses, in any state,
// in the network namespace of process pid, or in the caller's own if pid is 0.
// Pairs that the kernel does not know are omitted. Each pair costs one lookup in
// the kernel's table. A connection that is bound to an interface is not found.
func Lookup(ctx context.Context, pid int, pairs []Pair) ([]Socket, error) {
	t, err := inNamespace(Query{NetNSPID: pid}, func() (t Table, err error) {
		t.Sockets, err = lookup(ctx, openDiag, pairs)
		return t, err
	})
	if err != nil {
		return nil, fmt.Errorf("cannot look up connections: %w", err)
	}
	return t.Sockets, nil
}

func lookup(ctx context.Context, open func() (conn, error), pairs []Pair) (found []Socket, err error) {
	c, err := open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.close() }()
	block := blocks.Get().(*[64 << 10]byte)
	defer blocks.Put(block)
	for n, p := range pairs {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := c.send(lookupRequest(p, uint32(n+1))); err != nil {
			return nil, fmt.Errorf("netlink request: %w", err)
		}
		size, err := c.receive(block[:])
		if err != nil {
			return nil, fmt.Errorf("netlink answer: %w", err)
		}
		// For a connection that a listener could accept, the kernel returns the
		// listener.
		same := func(s *Socket) bool { return s.Local == p.Local && s.Remote == p.Remote }
		a, err := parseAnswer(block[:size], uint32(n+1), found, same)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, fmt.Errorf("netlink answer: %w", err)
		}
		found = a.sockets
	}
	return found, nil
}

// lookupRequest builds the netlink message that requests one socket. The kernel
// finds a socket with IPv4-mapped IPv6 addresses by its IPv4 addresses.
func lookupRequest(p Pair, seq uint32) []byte {
	b := request(Query{}, unix.AF_INET, seq)
	native.PutUint16(b[6:], unix.NLM_F_REQUEST)
	id := b[headerSize+8:]
	binary.BigEndian.PutUint16(id, p.Local.Port())
	binary.BigEndian.PutUint16(id[2:], p.Remote.Port())
	if p.Local.Addr().Is4() {
		local, remote := p.Local.Addr().As4(), p.Remote.Addr().As4()
		copy(id[4:], local[:])
		copy(id[20:], remote[:])
	} else {
		b[headerSize] = unix.AF_INET6
		local, remote := p.Local.Addr().As16(), p.Remote.Addr().As16()
		copy(id[4:], local[:])
		copy(id[20:], remote[:])
	}
	native.PutUint64(id[40:], ^uint64(0)) // the cookie: any
	return b
}
