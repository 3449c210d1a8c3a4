// Package outward dials destinations that come from users' settings and not from
// the operator of the process, such as receivers of notifications.
//
// It never connects to an address of this machine, of its networks or of a
// cloud's metadata service unless the process was configured to allow that
// (Allow), whatever the name resolves to: the address is checked after the name
// was resolved, right before the connect. Metadata addresses are refused even if
// allowed. The package does not support proxies, which would connect themselves.
package outward

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"
)

// Dialer dials the public internet and the networks in Allow.
type Dialer struct {
	// Allow lists permitted networks besides the public internet, such as
	// 10.0.0.0/8.
	Allow []netip.Prefix
	// Timeout bounds one dial; 0 means 10 s.
	Timeout time.Duration
}

// RefusedError means that an address must not be connected to.
type RefusedError struct{ Addr netip.Addr }

func (e *RefusedError) Error() string {
	return fmt.Sprintf("cannot connect to %s: it is not on the public internet and not in a network that notifications may go to (--notify-allow)", e.Addr)
}

// metadata are the addresses at which clouds serve credentials to instances.
var metadata = []netip.Addr{netip.MustParseAddr("169.254.169.254"), netip.MustParseAddr("169.254.170.2"), netip.MustParseAddr("fd00:ec2::254")}

// shared are non-public networks for which netip has no predicate: carriers' (RFC
// 6598), benchmarking (RFC 2544), reserved, and IPv4 in IPv6.
var shared = []netip.Prefix{netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("64:ff9b::/96"), netip.MustParsePrefix("64:ff9b:1::/48"), netip.MustParsePrefix("2002::/16"), netip.MustParsePrefix("2001::/32")}

// Check returns a *RefusedError if an address must not be connected to.
func (d *Dialer) Check(a netip.Addr) error {
	a = a.Unmap().WithZone("")
	for _, m := range metadata {
		if a == m {
			return &RefusedError{a}
		}
	}
	for _, p := range d.Allow {
		if p.Contains(a) {
			return nil
		}
	}
	private := !a.IsValid() || !a.IsGlobalUnicast() || a.IsPrivate() || a.IsLoopback() || a.IsLinkLocalUnicast()
	for _, p := range shared {
		private = private || p.Contains(a)
	}
	if private {
		return &RefusedError{a}
	}
	return nil
}

// DialContext dials like net.Dialer if Check permits it.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	timeout := d.Timeout
	if timeout == 0 {
		timeout = 10 * time.Second
	}
	inner := net.Dialer{Timeout: timeout, ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
		at, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("cannot connect to %q: it is not an address", address)
		}
		return d.Check(at.Addr())
	}}
	return inner.DialContext(ctx, network, address)
}

// ParseAllow parses networks and single addresses.
func ParseAllow(s []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, part := range s {
		p, err := netip.ParsePrefix(part)
		if err != nil {
			a, bad := netip.ParseAddr(part)
			if bad != nil {
				return nil, fmt.Errorf("cannot read %q: it is not a network like 10.0.0.0/8 or an address", part)
			}
			p = netip.PrefixFrom(a, a.BitLen())
		}
		out = append(out, p.Masked())
	}
	return out, nil
}
