package vnet

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// maxFrame limits a frame from the guest, including the header.
const maxFrame = mtu + header.EthernetMinimumSize

// maxQueue is the maximum number of frames queued for a guest that does not read
// them.
const maxQueue = 512

// link connects the stack to QEMU. A frame is preceded by its length, 32 bits in
// network byte order. link implements stack.LinkEndpoint.
type link struct {
	sees func(frame []byte)

	mu         sync.RWMutex
	dispatcher stack.NetworkDispatcher

	out chan []byte

	cmu  sync.Mutex
	conn net.Conn
	over chan struct{} // closed when run has ended
}

func newLink(sees func([]byte)) *link {
	return &link{sees: sees, out: make(chan []byte, maxQueue)}
}

var _ stack.LinkEndpoint = (*link)(nil)

func (l *link) MTU() uint32                      { return mtu }
func (l *link) SetMTU(uint32)                    {}
func (l *link) MaxHeaderLength() uint16          { return header.EthernetMinimumSize }
func (l *link) LinkAddress() tcpip.LinkAddress   { return gatewayMAC }
func (l *link) SetLinkAddress(tcpip.LinkAddress) {}
func (l *link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityResolutionRequired
}
func (l *link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }
func (l *link) Wait()                                   {}
func (l *link) Close()                                  {}
func (l *link) SetOnCloseAction(func())                 {}
func (l *link) ParseHeader(*stack.PacketBuffer) bool    { return true }

// AddHeader implements stack.LinkEndpoint.
func (l *link) AddHeader(pkt *stack.PacketBuffer) {
	eth := header.Ethernet(pkt.LinkHeader().Push(header.EthernetMinimumSize))
	eth.Encode(&header.EthernetFields{Type: pkt.NetworkProtocolNumber, SrcAddr: gatewayMAC, DstAddr: pkt.EgressRoute.RemoteLinkAddress})
}

func (l *link) Attach(d stack.NetworkDispatcher) {
	l.mu.Lock()
	l.dispatcher = d
	l.mu.Unlock()
}

func (l *link) IsAttached() bool { return l.to() != nil }

func (l *link) to() stack.NetworkDispatcher {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.dispatcher
}

// WritePackets implements stack.LinkEndpoint. It never blocks. If the queue is full
// it drops the frame, which TCP retransmits.
func (l *link) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	sent := 0
	for _, pkt := range pkts.AsSlice() {
		if len(pkt.LinkHeader().Slice()) == 0 {
			l.AddHeader(pkt)
		}
		v := pkt.ToView()
		framed := make([]byte, 4+v.Size())
		binary.BigEndian.PutUint32(framed, uint32(v.Size()))
		copy(framed[4:], v.AsSlice())
		v.Release()
		l.sees(framed[4:])
		select {
		case l.out <- framed:
		default:
		}
		sent++
	}
	return sent, nil
}

func (l *link) up() bool {
	l.cmu.Lock()
	defer l.cmu.Unlock()
	return l.conn != nil
}

// cut closes the current connection and waits for its run to end.
func (l *link) cut() {
	l.cmu.Lock()
	c, over := l.conn, l.over
	l.cmu.Unlock()
	if c != nil {
		c.Close()
		<-over
	}
}

// run carries frames between the stack and c until c is closed or ctx ends.
func (l *link) run(ctx context.Context, c net.Conn) error {
	l.cut()
	over := make(chan struct{})
	l.cmu.Lock()
	if l.conn != nil {
		l.cmu.Unlock()
		return errors.Join(errors.New("cannot attach: another link was attached at the same time"), c.Close())
	}
	l.conn, l.over = c, over
	l.cmu.Unlock()
	var writer sync.WaitGroup
	done := make(chan struct{})
	writer.Go(func() { l.drain(c, done) })
	stop := context.AfterFunc(ctx, func() { c.Close() })
	err := l.receive(c)
	stop()
	close(done)
	c.Close()
	writer.Wait()
	l.cmu.Lock()
	l.conn = nil
	l.cmu.Unlock()
	close(over)
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

func (l *link) drain(c net.Conn, done chan struct{}) {
	for {
		select {
		case f := <-l.out:
			if _, err := c.Write(f); err != nil {
				c.Close() // the reader then reports the end
				return
			}
		case <-done:
			return
		}
	}
}

func (l *link) receive(c net.Conn) error {
	r := bufio.NewReaderSize(c, 64<<10)
	var size [4]byte
	for {
		if _, err := io.ReadFull(r, size[:]); err != nil {
			return err
		}
		k := binary.BigEndian.Uint32(size[:])
		if k > maxFrame {
			return fmt.Errorf("cannot read a frame of %d bytes from the guest: at most %d", k, maxFrame)
		}
		frame := make([]byte, k)
		if _, err := io.ReadFull(r, frame); err != nil {
			return err
		}
		if d := l.to(); d != nil {
			inject(d, frame)
		}
	}
}

// inject passes a frame from the guest to the stack. Frames too short for a
// header are dropped.
func inject(d stack.NetworkDispatcher, frame []byte) {
	if len(frame) < header.EthernetMinimumSize {
		return
	}
	eth := header.Ethernet(frame)
	kind := eth.Type()
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame[header.EthernetMinimumSize:])})
	defer pkt.DecRef()
	if to := eth.DestinationAddress(); to != gatewayMAC && to != header.EthernetBroadcastAddress {
		return
	}
	if kind == ipv4.ProtocolNumber && callsAbroad(frame[header.EthernetMinimumSize:]) {
		return
	}
	d.DeliverNetworkPacket(kind, pkt)
}

// callsAbroad reports whether a packet is an echo request to an address other than
// the gateway's. The stack owns every address, so it would answer for hosts that
// never saw the request.
func callsAbroad(packet []byte) bool {
	ip := header.IPv4(packet)
	if !ip.IsValid(len(ip)) || ip.TransportProtocol() != header.ICMPv4ProtocolNumber || ip.DestinationAddress() == address(Gateway) {
		return false
	}
	if ip.More() || ip.FragmentOffset() != 0 { // a fragment could hide an echo request, and ICMP errors are too short to be fragmented
		return true
	}
	icmp := header.ICMPv4(ip.Payload())
	return len(icmp) > 0 && icmp.Type() == header.ICMPv4Echo
}
