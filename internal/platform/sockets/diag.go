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

// State is a TCP state, with the kernel's number. An unconnected UDP socket is in
// Close, a connected one in Established.
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

// String returns the usual name.
func (s State) String() string {
	if s > 0 && int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// Query specifies what to list. The zero value lists every TCP socket of the
// caller's network namespace.
type Query struct {
	UDP        bool     // UDP instead of TCP
	States     []State  // empty means all
	LocalPorts []uint16 // empty means all
	Info       bool     // fill in Socket.Traffic, for TCP
	NetNSFD    int      // an open network namespace; 0 means the caller's own
	NetNSPID   int      // the network namespace of this process; 0 means the caller's own
}

// Socket is the kernel's description of one socket.
//
// Inode is 0 if no program has the socket open. In Established and CloseWait, the
// connection then still waits in a listener's queue; in later states, its program
// has closed it.
type Socket struct {
	Family   uint8 // unix.AF_INET or unix.AF_INET6
	State    State
	Local    netip.AddrPort // IPv4 in IPv6 is unmapped
	Remote   netip.AddrPort
	Inode    uint64
	UID      uint32
	RQueue   uint32        // unread bytes; for a listener, the waiting connections
	WQueue   uint32        // unacknowledged bytes; for a listener, the length limit of the queue (sock_diag only)
	Expires  time.Duration // time until the kernel drops a TIME_WAIT, or a FIN_WAIT2 without a program; otherwise 0
	Traffic  Traffic
	InfoSize int // bytes of tcp_info that the kernel returned; 0 means that Traffic is unknown
}

// Waiting reports whether the connection is complete and no program has
// accepted it.
func (s Socket) Waiting() bool {
	return s.Inode == 0 && (s.State == Established || s.State == CloseWait)
}

// Traffic is the part of tcp_info that shows whether a connection is in use.
// LastSent and LastReceived are the times since data was last sent and received,
// with a resolution of milliseconds.
type Traffic struct {
	BytesAcked    uint64 // sent and acknowledged; only with InfoSize of at least 128 (Linux 4.1)
	BytesReceived uint64 // only with InfoSize of at least 136 (Linux 4.1)
	LastSent      time.Duration
	LastReceived  time.Duration
	LastAck       time.Duration // since the last acknowledgement, with data or without

	// Numbers of segments, including retransmitted ones; only with InfoSize of at
	// least 160 (Linux 4.6). Segments without data are acknowledgments,
	// handshakes and ends.
	SegsOut, SegsIn, DataSegsIn, DataSegsOut uint32
}

// HasSegments reports whether the kernel counts segments.
func (s Socket) HasSegments() bool { return s.InfoSize >= infoDataSegsOut+4 }

// HasBytes reports whether the kernel counts bytes.
func (s Socket) HasBytes() bool { return s.InfoSize >= infoBytesReceived+8 }

// Source is the origin of a Table.
type Source string

// The sources of a Table.
const (
	FromDiag Source = "sock_diag"
	FromProc Source = "proc" // netlink was refused: no Traffic
)

// Table is the result of a Query. It is not a snapshot: sockets that appeared or
// disappeared while it was read may be missing or included.
type Table struct {
	Sockets []Socket
	Source  Source
}

// ErrInterrupted means that the kernel's tables changed during every attempt.
var ErrInterrupted = errors.New("the socket list changed while it was read")

// attempts bounds how often an interrupted dump is repeated.
const attempts = 5

// Dump lists the IPv4 and IPv6 sockets that q selects. It needs no privileges in
// the caller's own network namespace, and CAP_SYS_ADMIN for another one.
func Dump(ctx context.Context, q Query) (Table, error) {
	t, err := inNamespace(q, func() (Table, error) { return dump(ctx, q, openDiag, procNet) })
	if err != nil {
		return Table{}, fmt.Errorf("cannot list sockets: %w", err)
	}
	return t, nil
}

// conn is a netlink socket as needed by the dump.
type conn interface {
	send([]byte) error
	receive([]byte) (int, error) // receives a datagram; one larger than the buffer is an error
	close() error
}

// dump uses netlink, and reads /proc if netlink is refused.
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

// refused reports whether err means that sock_diag is not available here:
// forbidden by a sandbox, or not in this kernel.
func refused(err error) bool {
	for _, e := range []error{unix.EPERM, unix.EACCES, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT, unix.ENOENT, unix.EOPNOTSUPP, unix.ENOSYS} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// blocks are receive buffers. The kernel sends at most 32 KiB per datagram.
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
			break // a kernel without IPv6 has no IPv6 sockets
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

// matches reports whether s matches q. The kernel may already have applied the
// same filter.
func (q Query) matches(s *Socket) bool {
	return (len(q.States) == 0 || slices.Contains(q.States, s.State)) &&
		(len(q.LocalPorts) == 0 || slices.Contains(q.LocalPorts, s.Local.Port()))
}
