package sockets

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Sizes and constants from linux/inet_diag.h and linux/netlink.h. Lengths and
// counters are in the machine's byte order, ports and addresses in network byte
// order.
const (
	sockDiagByFamily = 20
	headerSize       = 16 // struct nlmsghdr
	requestSize      = 56 // struct inet_diag_req_v2
	messageSize      = 72 // struct inet_diag_msg
	idSize           = 48 // struct inet_diag_sockid

	attrRequestBytecode = 1 // INET_DIAG_REQ_BYTECODE
	attrInfo            = 2 // INET_DIAG_INFO
	attrTypeMask        = 0x3fff

	timerTimeWait = 3

	// Offsets in struct tcp_info (linux/tcp.h), which is only ever extended at
	// its end.
	infoUnacked       = 24
	infoLastSent      = 44
	infoLastReceived  = 52
	infoLastAck       = 56
	infoBytesAcked    = 120
	infoBytesReceived = 128
	infoSegsOut       = 136
	infoSegsIn        = 140
	infoDataSegsIn    = 152
	infoDataSegsOut   = 156
)

var native = binary.NativeEndian

// request builds the netlink message that requests the sockets of one address
// family.
func request(q Query, family uint8, seq uint32) []byte {
	b := make([]byte, headerSize+requestSize, 256)
	native.PutUint16(b[4:], sockDiagByFamily)
	native.PutUint16(b[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	native.PutUint32(b[8:], seq)
	b[16] = family
	b[17] = unix.IPPROTO_TCP
	if q.UDP {
		b[17] = unix.IPPROTO_UDP
	} else if q.Info {
		b[18] = 1 << (attrInfo - 1)
	}
	states := ^uint32(0)
	if len(q.States) > 0 {
		states = 0
		for _, s := range q.States {
			states |= 1 << (s & 31)
		}
	}
	native.PutUint32(b[20:], states)
	if code := portFilter(q.LocalPorts); len(code) > 0 {
		b = native.AppendUint16(b, uint16(4+len(code)))
		b = native.AppendUint16(b, attrRequestBytecode)
		b = append(b, code...)
	}
	native.PutUint32(b, uint32(len(b)))
	return b
}

// maxFilterPorts bounds the kernel's filter program, which runs for every socket
// and has 16-bit jumps. Longer lists of ports are filtered in user space.
const maxFilterPorts = 256

// portFilter returns the program that the kernel runs on each socket, to keep
// those with one of the local ports. An instruction is a code and two jump
// distances, taken if it matches (one byte) and if it does not (two bytes). A
// jump to the exact end keeps the socket; a jump beyond it drops it. For each
// port the program tests "not below", "not above", and jumps to the end.
func portFilter(ports []uint16) []byte {
	const (
		opJump  = 1 // INET_DIAG_BC_JMP
		opLeast = 2 // INET_DIAG_BC_S_GE
		opMost  = 3 // INET_DIAG_BC_S_LE
		compare = 8 // bytes of a comparison: the instruction and its port
		jump    = 4
		block   = 2*compare + jump
	)
	if len(ports) > maxFilterPorts {
		return nil
	}
	var b []byte
	add := func(code, yes uint8, no uint16) {
		b = append(b, code, yes)
		b = native.AppendUint16(b, no)
	}
	for i, port := range ports {
		last := 0
		if i == len(ports)-1 {
			last = 4 // a jump beyond the end
		}
		add(opLeast, compare, uint16(block+last))
		add(0, 0, port)
		add(opMost, compare, uint16(block-compare+last))
		add(0, 0, port)
		add(opJump, jump, uint16(jump+block*(len(ports)-1-i)))
	}
	return b
}

// answer is the content of one datagram of a dump.
type answer struct {
	sockets     []Socket
	done        bool
	interrupted bool
}

var errTruncated = errors.New("the message is cut short")

// parseAnswer parses one datagram, and appends to all the sockets for which keep
// returns true. Messages that answer another request (an earlier, aborted dump)
// are skipped.
func parseAnswer(b []byte, seq uint32, all []Socket, keep func(*Socket) bool) (answer, error) {
	a := answer{sockets: all}
	for len(b) > 0 {
		if len(b) < headerSize {
			return a, errTruncated
		}
		size := native.Uint32(b)
		if size < headerSize || uint64(size) > uint64(len(b)) {
			return a, errTruncated
		}
		kind, flags := native.Uint16(b[4:]), native.Uint16(b[6:])
		mine := native.Uint32(b[8:]) == seq
		body := b[headerSize:size]
		b = b[min(int(align(size)), len(b)):]
		if !mine {
			continue
		}
		a.interrupted = a.interrupted || flags&unix.NLM_F_DUMP_INTR != 0
		switch kind {
		case unix.NLMSG_NOOP:
		case unix.NLMSG_OVERRUN:
			return a, unix.ENOBUFS
		case unix.NLMSG_ERROR, unix.NLMSG_DONE:
			a.done = true
			return a, status(kind, body)
		case sockDiagByFamily:
			n := len(a.sockets)
			a.sockets = append(a.sockets, Socket{})
			err := parseMessage(body, &a.sockets[n])
			if err != nil || !keep(&a.sockets[n]) {
				a.sockets = a.sockets[:n]
			}
			if err != nil {
				return a, err
			}
		default:
			return a, fmt.Errorf("unexpected message type %d", kind)
		}
	}
	return a, nil
}

func align(n uint32) uint64 { return (uint64(n) + 3) &^ 3 }

// status parses the message that ends a dump: a negative errno, or 0. Old kernels
// send no status.
func status(kind uint16, body []byte) error {
	if len(body) < 4 {
		if kind == unix.NLMSG_DONE {
			return nil
		}
		return errTruncated
	}
	code := int32(native.Uint32(body))
	switch {
	case code < 0 && code > -4096:
		return unix.Errno(-code)
	case code != 0:
		return fmt.Errorf("status %d is not an error number", code)
	case kind == unix.NLMSG_ERROR:
		return errors.New("an acknowledgement instead of a list")
	}
	return nil
}

// parseMessage parses a struct inet_diag_msg and its attributes.
func parseMessage(b []byte, s *Socket) error {
	if len(b) < messageSize {
		return errTruncated
	}
	s.Family, s.State = b[0], State(b[1])
	id := b[4 : 4+idSize]
	var err error
	if s.Local, err = parseAddr(s.Family, id[4:20], id[0:2]); err != nil {
		return err
	}
	if s.Remote, err = parseAddr(s.Family, id[20:36], id[2:4]); err != nil {
		return err
	}
	if b[2] == timerTimeWait {
		s.Expires = time.Duration(native.Uint32(b[52:])) * time.Millisecond
	}
	s.RQueue, s.WQueue = native.Uint32(b[56:]), native.Uint32(b[60:])
	s.UID, s.Inode = native.Uint32(b[64:]), uint64(native.Uint32(b[68:]))
	for b = b[messageSize:]; len(b) >= 4; {
		size := native.Uint16(b)
		if size < 4 || int(size) > len(b) {
			return errTruncated
		}
		if native.Uint16(b[2:])&attrTypeMask == attrInfo {
			s.Traffic, s.InfoSize = parseInfo(b[4:size]), int(size)-4
		}
		b = b[min(int(align(uint32(size))), len(b)):]
	}
	return nil
}

func parseAddr(family uint8, addr, port []byte) (netip.AddrPort, error) {
	var ip netip.Addr
	switch family {
	case unix.AF_INET:
		ip = netip.AddrFrom4([4]byte(addr[:4]))
	case unix.AF_INET6:
		ip = netip.AddrFrom16([16]byte(addr)).Unmap()
	default:
		return netip.AddrPort{}, fmt.Errorf("unexpected address family %d", family)
	}
	return netip.AddrPortFrom(ip, binary.BigEndian.Uint16(port)), nil
}

// parseInfo parses a struct tcp_info. Older kernels send a shorter one; the
// missing fields stay zero.
func parseInfo(b []byte) Traffic {
	ms := func(at int) time.Duration {
		if len(b) < at+4 {
			return 0
		}
		return time.Duration(native.Uint32(b[at:])) * time.Millisecond
	}
	count := func(at int) uint64 {
		if len(b) < at+8 {
			return 0
		}
		return native.Uint64(b[at:])
	}
	short := func(at int) uint32 {
		if len(b) < at+4 {
			return 0
		}
		return native.Uint32(b[at:])
	}
	return Traffic{
		LastAck: ms(infoLastAck),
		SegsOut: short(infoSegsOut), SegsIn: short(infoSegsIn),
		DataSegsIn: short(infoDataSegsIn), DataSegsOut: short(infoDataSegsOut),

		BytesAcked:    count(infoBytesAcked),
		BytesReceived: count(infoBytesReceived),
		LastSent:      ms(infoLastSent),
		LastReceived:  ms(infoLastReceived),
	}
}
