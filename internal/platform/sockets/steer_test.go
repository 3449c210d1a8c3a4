package sockets

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSteer checks that connections go to another socket only while they are
// steered, whether or not something listens on their address. They must keep the
// address that the client connected to.
func TestSteer(t *testing.T) {
	for _, network := range []string{"tcp4", "tcp6"} {
		t.Run(network, func(t *testing.T) {
			loopback := map[string]string{"tcp4": "127.0.0.1:0", "tcp6": "[::1]:0"}[network]
			listen := func() *net.TCPListener {
				var cfg net.ListenConfig
				cfg.SetMultipathTCP(false)
				l, err := cfg.Listen(t.Context(), network, loopback)
				if err != nil {
					t.Skip(err)
				}
				t.Cleanup(func() { l.Close() })
				return l.(*net.TCPListener)
			}
			own, other, closed := listen(), listen(), listen()
			closed.Close()
			f, err := other.File()
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			addr := func(l net.Listener) netip.AddrPort { return netip.MustParseAddrPort(l.Addr().String()) }
			s, err := Steer([]netip.AddrPort{addr(own), addr(closed)}, []int{int(f.Fd()), int(f.Fd())})
			if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL) {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			reaches := func(l net.Listener, at netip.AddrPort) {
				t.Helper()
				c, err := net.Dial(network, at.String())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				got, err := l.Accept()
				if err != nil {
					t.Fatal(err)
				}
				if got.LocalAddr().String() != at.String() {
					t.Errorf("a client of %s arrives at %s", at, got.LocalAddr())
				}
				if _, err := got.Write([]byte("x")); err != nil {
					t.Error(err)
				}
				got.Close()
				if b, err := io.ReadAll(c); string(b) != "x" {
					t.Errorf("%q, %v", b, err)
				}
			}
			reaches(other, addr(own))
			reaches(other, addr(closed))
			reaches(other, addr(other))
			s.Close()
			reaches(own, addr(own))
			if c, err := net.Dial(network, closed.Addr().String()); err == nil {
				c.Close()
				t.Error("a connection is steered after the end")
			}
		})
	}
}
