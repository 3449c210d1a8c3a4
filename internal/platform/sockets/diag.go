package sockets

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// State is a TCP state, numbered as the kernel does. An unconnected UDP socket is
// in Close, a connected one in Established.
type State uint8

// The TCP states.
const (
	Established State = iota + 1
	SynSent
	SynRecv
	FinWait1
	FinWait2
	TimeWait
	Close
	CloseWait
	LastAck
	Listen
	Closing
	NewSynRecv
)

var stateNames = [...]string{"", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT",
	"CLOSE", "CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV"}

// String gives the usual name.
func (s State) String() string {
	if s > 0 && int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// Query says what to list. The zero value lists every TCP socket of the caller's
// network namespace.
type Query struct {
	UDP        bool     // UDP instead of TCP
	States     []State  // empty is all
	LocalPorts []uint16 // empty is all
	Info       bool     // with Socket.Traffic, for TCP
	NetNSFD    int      // an open network namespace, 0 is the caller's own
	NetNSPID   int      // the network namespace of this process, 0 is the caller's own
}

// Socket is the kernel's description of one socket.
//
// Inode is 0 where no program holds it: in Established and CloseWait a
// connection that still waits in a listener's queue, in the later states one
// that its program has closed.
type Socket struct {
	Family   uint8 // unix.AF_INET or unix.AF_INET6
	State    State
	Local    netip.AddrPort // IPv4 in IPv6 is unmapped
	Remote   netip.AddrPort
	Inode    uint64
	UID      uint32
	RQueue   uint32        // bytes not yet read; of a listener the connections waiting
	WQueue   uint32        // bytes not yet acknowledged; of a listener the limit of the queue (sock_diag only)
	Expires  time.Duration // until a TIME_WAIT, or a FIN_WAIT2 without a program, is forgotten; otherwise 0
	Traffic  Traffic
	InfoSize int // bytes of tcp_info that the kernel gave; 0 means that Traffic is not known
}

// Waiting says that the connection is complete and no program has accepted it.
func (s Socket) Waiting() bool {
	return s.Inode == 0 && (s.State == Established || s.State == CloseWait)
}

// Traffic is the part of tcp_info that reports whether a connection is in use. The
// kernel counts LastSent and LastReceived in milliseconds and of data only.
type Traffic struct {
	BytesAcked    uint64 // sent and acknowledged; only with InfoSize of at least 128 (Linux 4.1)
	BytesReceived uint64 // only with InfoSize of at least 136 (Linux 4.1)
	LastSent      time.Duration
	LastReceived  time.Duration
	LastAck       time.Duration // since the last acknowledgement came, with data or without

	// Segments, retransmitted ones included; only with InfoSize of at least 160
	// (Linux 4.6). The difference to those with data are plain acknowledgements,
	// handshakes and ends.
	SegsOut, SegsIn, DataSegsIn, DataSegsOut uint32
}

// HasSegments reports whether the kernel was new enough to count segments.
func (s Socket) HasSegments() bool { return s.InfoSize >= infoDataSegsOut+4 }

// HasBytes says that the kernel was new enough to count bytes.
func (s Socket) HasBytes() bool { return s.InfoSize >= infoBytesReceived+8 }

// Source says where a Table comes from.
type Source string

// The sources of a Table.
const (
	FromDiag Source = "sock_diag"
	FromProc Source = "proc" // netlink was refused: no Traffic
)

// Table is the answer to a Query. It is no snapshot: sockets that came or went
// while it was read may be missing or in it.
type Table struct {
	Sockets []Socket
	Source  Source
}

// ErrInterrupted says that the kernel's tables changed under every attempt.
var ErrInterrupted = errors.New("the socket list changed while it was read")

// attempts bounds how often a dump is repeated that the kernel calls interrupted.
const attempts = 5

// Dump lists sockets, IPv4 and IPv6. Any user may; no privileges are needed in the
// caller's own network namespace, and CAP_SYS_ADMIN over another one.
func Dump(ctx context.Context, q Query) (Table, error) {
	t, err := inNamespace(q, func() (Table, error) { return dump(ctx, q, openDiag, procNet) })
	if err != nil {
		return Table{}, fmt.Errorf("cannot list sockets: %w", err)
	}
	return t, nil
}

// conn is a netlink socket as the dump needs it.
type conn interface {
	send([]byte) error
	receive([]byte) (int, error) // a datagram; larger than the buffer is an error
	close() error
}

// dump asks netlink, and reads proc where netlink is refused.
func dump(ctx context.Context, q Query, open func() (conn, error), proc func(Query) ([]Socket, error)) (Table, error) {
	var err error
	for range attempts {
		var all []Socket
		if all, err = dumpOnce(ctx, q, open); err == nil {
			return Table{Sockets: all, Source: FromDiag}, nil
		}
		if !errors.Is(err, ErrInterrupted) && !errors.Is(err, unix.ENOBUFS) {
			break
		}
	}
	if !refused(err) {
		return Table{}, err
	}
	all, procErr := proc(q)
	if procErr != nil {
		return Table{}, errors.Join(err, procErr)
	}
	return Table{Sockets: all, Source: FromProc}, nil
}

// refused says that sock_diag is not to be had here: forbidden by a sandbox, or
// not in this kernel.
func refused(err error) bool {
	for _, e := range []error{unix.EPERM, unix.EACCES, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT, unix.ENOENT, unix.EOPNOTSUPP, unix.ENOSYS} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// blocks are receive buffers; the kernel fills at most 32 KiB at a time.
var blocks = sync.Pool{New: func() any { return new([64 << 10]byte) }}

func dumpOnce(ctx context.Context, q Query, open func() (conn, error)) ([]Socket, error) {
	c, err := open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.close() }()
	var all []Socket
	block := blocks.Get().(*[64 << 10]byte)
	defer blocks.Put(block)
	buf := block[:]
	for seq, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		more, err := dumpFamily(ctx, c, q, family, uint32(seq+1), buf, all)
		if family == unix.AF_INET6 && errors.Is(err, unix.ENOENT) {
			break // a kernel without IPv6 has no sockets of it
		}
		if err != nil {
			return nil, err
		}
		all = more
	}
	return all, nil
}

func dumpFamily(ctx context.Context, c conn, q Query, family uint8, seq uint32, buf []byte, all []Socket) ([]Socket, error) {
	if err := c.send(request(q, family, seq)); err != nil {
		return nil, fmt.Errorf("netlink request: %w", err)
	}
	interrupted := false
	keep := func(s *Socket) bool { return q.matches(s) }
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		n, err := c.receive(buf)
		if err != nil {
			return nil, fmt.Errorf("netlink answer: %w", err)
		}
		part, err := parseAnswer(buf[:n], seq, all, keep)
		if err != nil {
			return nil, fmt.Errorf("netlink answer: %w", err)
		}
		all = part.sockets
		interrupted = interrupted || part.interrupted
		if part.done {
			break
		}
	}
	if interrupted {
		return nil, ErrInterrupted
	}
	return all, nil
}

// matches is the filter in user space; the kernel may have filtered before.
func (q Query) matches(s *Socket) bool {
	return (len(q.States) == 0 || slices.Contains(q.States, s.State)) &&
		(len(q.LocalPorts) == 0 || slices.Contains(q.LocalPorts, s.Local.Port()))
}
