package vnet

import (
	"encoding/binary"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// TestAllow: what a guest may reach, by mode.
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
	if err != nil {
		t.Fatal(err)
	}
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

// TestHostileLink: frames of any kind from a guest harm nobody, one that is too
// long ends the link, and closing gives every goroutine back.
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
		if _, err := near.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...)); err != nil {
			t.Fatal(err)
		}
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
	if _, err := near.Write(binary.BigEndian.AppendUint32(nil, maxFrame+1)); err != nil {
		t.Fatal(err)
	}
	run.Wait()
	if ended == nil || !strings.Contains(ended.Error(), "at most") {
		t.Errorf("the link ended with %v", ended)
	}
	near.Close()
	if n.Attached() {
		t.Error("the link is still up")
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(30 * time.Second); runtime.NumGoroutine() > before; {
		if time.Now().After(end) {
			buf := make([]byte, 1<<20)
			t.Fatalf("goroutines are left:\n%s", buf[:runtime.Stack(buf, true)])
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func FuzzStirs(f *testing.F) {
	f.Add(make([]byte, 60), true)
	f.Fuzz(func(t *testing.T, b []byte, out bool) {
		if what := stirs(b, out); what != "" && len(b) < 34 {
			t.Fatalf("%d bytes stir: %s", len(b), what)
		}
	})
}
