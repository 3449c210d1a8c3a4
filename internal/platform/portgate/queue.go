package portgate

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// Constants from linux/netfilter/nfnetlink_queue.h that package unix lacks.
const (
	subsystem = unix.NFNL_SUBSYS_QUEUE << 8

	msgPacket  = subsystem
	msgVerdict = subsystem | 1
	msgConfig  = subsystem | 2

	attrPacketHeader  = 1
	attrVerdictHeader = 2
	attrPayload       = 10

	configCommand = 1
	configParams  = 2
	configMaxLen  = 3

	commandBind = 1
	copyPacket  = 2
	verdictPass = 1
)

// Limits of a queue. The kernel drops packets beyond them, and clients send them
// again.
const (
	maxWaiting = 4096
	copyBytes  = 256 // bytes of a packet that are copied here: its headers
)

// packet is a packet that waits in the kernel.
type packet struct {
	id       uint32
	udp      bool
	from, to netip.AddrPort
}

// queue is a packet queue of the kernel. Rules refer to it by its number.
type queue struct {
	conn   *netlink.Conn
	number uint16
}

// openQueue binds a queue number that no other process uses.
func openQueue() (*queue, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, err
	}
	for range 16 {
		q := &queue{conn: conn, number: uint16(1024 + rand.N(60000))}
		err = q.config(configCommand, []byte{commandBind, 0, 0, 0})
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EEXIST) {
			continue // in use by another process, or this one may not bind any
		}
		if err == nil {
			err = q.config(configParams, append(binary.BigEndian.AppendUint32(nil, copyBytes), copyPacket))
		}
		if err == nil {
			err = q.config(configMaxLen, binary.BigEndian.AppendUint32(nil, maxWaiting))
		}
		if err == nil {
			return q, nil
		}
		break
	}
	conn.Close()
	return nil, err
}

// message returns a message about the queue with one attribute.
func (q *queue) message(kind, attr uint16, data []byte) (netlink.Message, error) {
	b, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: attr, Data: data}})
	body := append([]byte{unix.AF_UNSPEC, unix.NFNETLINK_V0}, binary.BigEndian.AppendUint16(nil, q.number)...)
	return netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind), Flags: netlink.Request}, Data: append(body, b...)}, err
}

func (q *queue) config(attr uint16, data []byte) error {
	m, err := q.message(msgConfig, attr, data)
	if err != nil {
		return err
	}
	m.Header.Flags |= netlink.Acknowledge
	_, err = q.conn.Execute(m)
	return err
}

// accept lets a packet continue. It has no effect if the kernel no longer has the
// packet.
func (q *queue) accept(id uint32) {
	m, err := q.message(msgVerdict, attrVerdictHeader, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, verdictPass), id))
	if err == nil {
		_, _ = q.conn.Send(m) // fails only if the queue is closed; the kernel then drops all its packets
	}
}

// receive waits for packets and returns them. It returns an error only if the
// queue is closed.
func (q *queue) receive() (out []packet, err error) {
	all, err := q.conn.Receive()
	if err != nil {
		if errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed) || errors.Is(err, unix.EBADF) {
			return nil, err
		}
		return nil, nil // an error about a single packet or verdict, or the socket's buffer was full
	}
	for _, m := range all {
		if m.Header.Type != msgPacket {
			continue
		}
		id, p, ok := parse(m.Data)
		switch {
		case ok:
			out = append(out, p)
		case id != 0:
			q.accept(id)
		}
	}
	return out, nil
}

// parse parses a message with a packet. If that fails, ok is false and id is the
// packet's, 0 if that is unknown too.
func parse(b []byte) (id uint32, p packet, ok bool) {
	if len(b) < 4 {
		return 0, p, false
	}
	attrs, err := netlink.UnmarshalAttributes(b[4:])
	if err != nil {
		return 0, p, false
	}
	var payload []byte
	for _, a := range attrs {
		switch {
		case a.Type == attrPacketHeader && len(a.Data) >= 4:
			id = binary.BigEndian.Uint32(a.Data)
		case a.Type == attrPayload:
			payload = a.Data
		}
	}
	p, ok = headers(payload)
	p.id = id
	return id, p, ok && id != 0
}

// headers parses the protocol and the addresses of a packet.
func headers(b []byte) (p packet, ok bool) {
	var proto tcpip.TransportProtocolNumber
	var from, to tcpip.Address
	switch header.IPVersion(b) {
	case header.IPv4Version:
		h := header.IPv4(b)
		if len(b) < header.IPv4MinimumSize || int(h.HeaderLength()) < header.IPv4MinimumSize || len(b) < int(h.HeaderLength()) {
			return p, false
		}
		proto, from, to, b = h.TransportProtocol(), h.SourceAddress(), h.DestinationAddress(), b[h.HeaderLength():]
	case header.IPv6Version:
		h := header.IPv6(b)
		if len(b) < header.IPv6MinimumSize {
			return p, false
		}
		proto, from, to, b = h.TransportProtocol(), h.SourceAddress(), h.DestinationAddress(), b[header.IPv6MinimumSize:]
	default:
		return p, false
	}
	p.udp = proto == header.UDPProtocolNumber
	if len(b) < 4 || !p.udp && proto != header.TCPProtocolNumber {
		return p, false
	}
	at := func(a tcpip.Address, port uint16) netip.AddrPort {
		addr, _ := netip.AddrFromSlice(a.AsSlice())
		return netip.AddrPortFrom(addr, port)
	}
	p.from, p.to = at(from, binary.BigEndian.Uint16(b)), at(to, binary.BigEndian.Uint16(b[2:]))
	return p, true
}
