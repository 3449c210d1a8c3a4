package outward_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/lib/outward"
)

// TestCheck checks for many addresses whether they are refused, with and without
// an Allow list.
func TestCheck(t *testing.T) {
	allow, err := outward.ParseAllow([]string{"10.1.0.0/16", "127.0.0.1", "169.254.0.0/16", "fd00::/8"})
	if err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string][2]bool{ // refused without and with the list
		"93.184.216.34": {true, true}, "2606:2800:220:1::1": {true, true},
		"127.0.0.1": {false, true}, "127.0.0.2": {false, false}, "::1": {false, false}, "::ffff:127.0.0.1": {false, true},
		"10.1.2.3": {false, true}, "10.2.2.3": {false, false}, "192.168.1.1": {false, false}, "172.16.0.1": {false, false},
		"169.254.1.1": {false, true}, "169.254.169.254": {false, false}, "169.254.170.2": {false, false}, "::ffff:169.254.169.254": {false, false},
		"fd00:ec2::254": {false, false}, "fd12::1": {false, true}, "fe80::1": {false, false}, "fe80::1%eth0": {false, false},
		"0.0.0.0": {false, false}, "0.1.2.3": {false, false}, "::": {false, false}, "100.64.0.1": {false, false}, "198.18.0.1": {false, false},
		"224.0.0.1": {false, false}, "255.255.255.255": {false, false}, "240.0.0.1": {false, false},
		"64:ff9b::a9fe:a9fe": {false, false}, "2002:7f00:1::": {false, false},
	} {
		a := netip.MustParseAddr(address)
		for i, d := range []*outward.Dialer{{}, {Allow: allow}} {
			if got := d.Check(a) == nil; got != want[i] {
				t.Errorf("%s with list %d: allowed %t", address, i, got)
			}
		}
	}
	if (&outward.Dialer{Allow: allow}).Check(netip.Addr{}) == nil {
		t.Error("no address at all is allowed")
	}
	for _, bad := range []string{"", "10.0.0.0/33", "localhost", "10.0.0.0/8 "} {
		if _, err := outward.ParseAllow([]string{bad}); err == nil {
			t.Errorf("%q is a network", bad)
		}
	}
}

// TestDial checks that the addresses to which a name resolves decide, not the
// name.
func TestDial(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	errtest.None(t, err)
	for _, host := range []string{"127.0.0.1", "localhost", "::ffff:127.0.0.1"} {
		if _, err := (&outward.Dialer{}).DialContext(context.Background(), "tcp", net.JoinHostPort(host, port)); !refused(err) {
			t.Errorf("%s: %v", host, err)
		}
	}
	c, err := (&outward.Dialer{Allow: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}).DialContext(t.Context(), "tcp4", net.JoinHostPort("localhost", port))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func refused(err error) bool {
	_, ok := errors.AsType[*outward.RefusedError](err)
	return ok
}
