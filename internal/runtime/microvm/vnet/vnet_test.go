package vnet

import (
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"

	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// TestAllow checks the addresses that a guest may reach, by mode.
func TestAllow(t *testing.T) {
	resolver := netip.MustParseAddrPort("9.9.9.9:53")
	for _, c := range []struct {
		mode Mode
		to   string
		want string // empty: refused
	}{
		{Outbound, "93.184.216.34:443", "93.184.216.34:443"},
		{Outbound, "192.168.127.1:53", "9.9.9.9:53"},
		{Outbound, "192.168.127.1:80", ""},
		{Outbound, "192.168.127.2:80", ""},
		{Outbound, "192.168.127.254:80", ""},
		{Outbound, "127.0.0.1:80", ""},
		{Outbound, "127.9.9.9:80", ""},
		{Outbound, "169.254.169.254:80", ""},
		{Outbound, "0.0.0.0:80", ""},
		{Outbound, "0.1.2.3:80", ""},
		{Outbound, "224.0.0.1:80", ""},
		{Outbound, "255.255.255.255:80", ""},
		{Full, "192.168.127.254:80", "127.0.0.1:80"},
		{Full, "127.0.0.1:80", ""},
		{Full, "169.254.169.254:80", ""},
		{None, "93.184.216.34:443", ""},
		{None, "192.168.127.1:53", ""},
	} {
		n := &Network{cfg: Config{Mode: c.mode, Resolver: resolver}}
		to := netip.MustParseAddrPort(c.to)
		got, ok := n.allow(stack.TransportEndpointID{LocalAddress: address(to.Addr()), LocalPort: to.Port()})
		if ok != (c.want != "") || ok && got.String() != c.want {
			t.Errorf("%s to %s: %s, %v, want %q", c.mode, c.to, got, ok, c.want)
		}
	}
	addrs, err := net.InterfaceAddrs()
	errtest.None(t, err)
	for _, a := range addrs { // this machine's own addresses
		p, err := netip.ParsePrefix(a.String())
		if err != nil || !p.Addr().Is4() {
			continue
		}
		n := &Network{cfg: Config{Mode: Outbound}}
		if _, ok := n.allow(stack.TransportEndpointID{LocalAddress: address(p.Addr()), LocalPort: 80}); ok {
			t.Errorf("outbound reaches this machine at %s", p.Addr())
		}
	}
}

// TestHostileLink checks that no frame from a guest does harm, that an oversized
// frame ends the link, and that closing the network ends every goroutine.
func TestHostileLink(t *testing.T) {
	before := runtime.NumGoroutine()
	n, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	near, far := net.Pipe()
	var run sync.WaitGroup
	var ended error
	run.Go(func() { ended = n.Attach(far) })
	send := func(frame []byte) {
		t.Helper()
		errtest.Get(near.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...)))(t)
	}
	for size := range 80 {
		f := make([]byte, size)
		copy(f, gatewayMAC)
		if size > 14 {
			f[12], f[13] = 8, 0
			f[14] = 0x45
		}
		send(f)
	}
	errtest.Get(near.Write(binary.BigEndian.AppendUint32(nil, maxFrame+1)))(t)
	run.Wait()
	if ended == nil || !strings.Contains(ended.Error(), "at most") {
		t.Errorf("the link ended with %v", ended)
	}
	near.Close()
	if n.Attached() {
		t.Error("the link is still up")
	}
	errtest.None(t, n.Close())
	waittest.NoGoroutines(t, before)
}

// ping returns a guest's frame with an echo request to to.
func ping(to netip.Addr, ident uint16, fragment uint8) []byte {
	f := make([]byte, header.EthernetMinimumSize+header.IPv4MinimumSize+header.ICMPv4MinimumSize)
	header.Ethernet(f).Encode(&header.EthernetFields{SrcAddr: guestMAC, DstAddr: gatewayMAC, Type: header.IPv4ProtocolNumber})
	ip := header.IPv4(f[header.EthernetMinimumSize:])
	ip.Encode(&header.IPv4Fields{TotalLength: uint16(len(ip)), TTL: 64, Flags: fragment, Protocol: uint8(header.ICMPv4ProtocolNumber), SrcAddr: address(Guest), DstAddr: address(to)})
	ip.SetChecksum(^ip.CalculateChecksum())
	icmp := header.ICMPv4(ip.Payload())
	icmp.SetType(header.ICMPv4Echo)
	icmp.SetIdent(ident)
	icmp.SetChecksum(header.ICMPv4Checksum(icmp, 0))
	return f
}

const guestMAC = "\x52\x54\x00\x6c\x75\x02"

// whoIs returns a guest's ARP request for the gateway's address, which also tells
// the gateway the guest's.
func whoIs() []byte {
	f := make([]byte, header.EthernetMinimumSize+header.ARPSize)
	header.Ethernet(f).Encode(&header.EthernetFields{SrcAddr: guestMAC, DstAddr: header.EthernetBroadcastAddress, Type: header.ARPProtocolNumber})
	a := header.ARP(f[header.EthernetMinimumSize:])
	a.SetIPv4OverEthernet()
	a.SetOp(header.ARPRequest)
	copy(a.HardwareAddressSender(), guestMAC)
	copy(a.ProtocolAddressSender(), Guest.AsSlice())
	copy(a.ProtocolAddressTarget(), Gateway.AsSlice())
	return f
}

// TestPing checks that the gateway answers pings and no other address does.
func TestPing(t *testing.T) {
	for _, mode := range []Mode{None, Outbound, Full} {
		n, err := New(Config{Mode: mode})
		if err != nil {
			t.Fatal(err)
		}
		near, far := net.Pipe()
		var run sync.WaitGroup
		run.Go(func() { _ = n.Attach(far) }) // returns when the pipe is closed
		answers := make(chan uint16, 16)
		run.Go(func() {
			defer close(answers)
			for {
				var size [4]byte
				if _, err := io.ReadFull(near, size[:]); err != nil {
					return
				}
				f := make([]byte, binary.BigEndian.Uint32(size[:]))
				if _, err := io.ReadFull(near, f); err != nil {
					return
				}
				if header.Ethernet(f).Type() == header.IPv4ProtocolNumber {
					answers <- header.ICMPv4(header.IPv4(f[header.EthernetMinimumSize:]).Payload()).Ident()
				}
			}
		})
		const last = 100
		frames := [][]byte{whoIs()}
		for k, to := range []string{"8.8.8.8", HostAddr.String(), Guest.Next().String(), "169.254.169.254", "127.0.0.1"} {
			frames = append(frames, ping(netip.MustParseAddr(to), uint16(k), 0))
		}
		frames = append(frames, ping(netip.MustParseAddr("8.8.8.8"), 50, header.IPv4FlagMoreFragments), ping(Gateway, last, 0))
		for _, f := range frames {
			errtest.Get(near.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(f))), f...)))(t)
		}
		select {
		case ident := <-answers: // answers arrive in the order of the requests
			if ident != last {
				t.Errorf("with %s ping %d was answered", mode, ident)
			}
		case <-time.After(2 * time.Minute):
			t.Errorf("with %s the gateway does not answer", mode)
		}
		near.Close()
		run.Wait()
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}

func FuzzCallsAbroad(f *testing.F) {
	f.Add(ping(Gateway, 1, 0)[header.EthernetMinimumSize:])
	f.Add(ping(HostAddr, 1, header.IPv4FlagMoreFragments)[header.EthernetMinimumSize:])
	f.Fuzz(func(t *testing.T, b []byte) {
		if callsAbroad(b) && len(b) < header.IPv4MinimumSize {
			t.Fatalf("%d bytes are a packet", len(b))
		}
	})
}

func FuzzStirs(f *testing.F) {
	f.Add(make([]byte, 60), true)
	f.Fuzz(func(t *testing.T, b []byte, out bool) {
		if what := stirs(b, out); what != "" && len(b) < 34 {
			t.Fatalf("%d bytes stir: %s", len(b), what)
		}
	})
}
