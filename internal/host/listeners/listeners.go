// Package listeners matches the listening sockets of a program with the endpoints
// of its instance.
package listeners

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
)

// Missing returns the first target of want on which no listener accepts clients, or
// "".
func Missing(want []instance.Endpoint, ls []instance.Listener) string {
	for _, e := range want {
		if len(On(e, ls)) == 0 {
			return e.Target
		}
	}
	return ""
}

// Explain describes where the program listens instead of at the missing target,
// limit after its start. guest means that the addresses are those of a guest.
func Explain(want []instance.Endpoint, ls []instance.Listener, guest bool, limit time.Duration) string {
	target := Missing(want, ls)
	_, port, err := net.SplitHostPort(target)
	if err != nil { // a path
		return fmt.Sprintf("nothing listens on the unix socket %s after %s", target, idle.Human(limit))
	}
	for _, l := range ls {
		if _, lp, err := net.SplitHostPort(l.Addr); err == nil && l.Private && lp == port {
			return fmt.Sprintf("after %s it listens on %s of the guest only, which no client reaches: bind it to 0.0.0.0", idle.Human(limit), l.Addr)
		}
	}
	for _, l := range ls {
		if _, lp, err := net.SplitHostPort(l.Addr); err == nil && lp == port && !guest {
			return fmt.Sprintf("after %s it listens on %s and not on %s, the address of its clients", idle.Human(limit), l.Addr, target)
		}
	}
	where := ""
	if guest {
		where = " in the guest"
	}
	text := fmt.Sprintf("nothing listens on %s%s after %s", target, where, idle.Human(limit))
	if found := others(want, ls); len(found) > 0 {
		text += "; the program listens on " + strings.Join(found, ", ") + ": expose that instead"
	}
	return text
}

// Awaited describes the first target of want without a listener among ls, and
// where the program listens instead.
func Awaited(want []instance.Endpoint, ls []instance.Listener) string {
	text := "nothing listens on " + Missing(want, ls) + " yet"
	if found := others(want, ls); len(found) > 0 {
		text += "; the program listens on " + strings.Join(found, ", ")
	}
	return text
}

// others returns the addresses of TCP listeners that belong to no endpoint of want.
func others(want []instance.Endpoint, ls []instance.Listener) (out []string) {
	for _, l := range ls {
		if l.Network != "tcp" || slices.ContainsFunc(want, func(e instance.Endpoint) bool { return len(On(e, []instance.Listener{l})) > 0 }) {
			continue
		}
		if !slices.Contains(out, l.Addr) {
			out = append(out, l.Addr)
		}
	}
	return out
}

// Taken returns the first target of want on which another process listens, because
// of which the program cannot, or "". own are the program's listeners.
func Taken(want []instance.Endpoint, own []instance.Listener) string {
	for _, e := range want {
		if e.Proto != "" || len(On(e, own)) > 0 {
			continue
		}
		l, err := net.Listen("tcp", e.Target)
		switch {
		case err == nil:
			l.Close()
		case errors.Is(err, syscall.EADDRINUSE):
			return e.Target
		}
	}
	return ""
}

// checkSocket returns an error if no unix socket can be created at path.
func checkSocket(path string) error {
	dir := filepath.Dir(path)
	switch st, err := os.Stat(dir); {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the directory %s does not exist: create it first", dir)
	case err == nil && !st.IsDir():
		return fmt.Errorf("%s is not a directory", dir)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s exists and is not a socket", path)
	}
	return nil
}

// CheckAddresses returns an error if no program can listen on an endpoint: because
// this machine does not have its address, or because no socket can be created at
// its path.
func CheckAddresses(expose []instance.Endpoint) error {
	for n, e := range expose {
		if e.Proto == instance.ProtoUnix {
			if err := checkSocket(e.Target); err != nil {
				return fmt.Errorf("cannot use expose[%d]: %w", n, err)
			}
			continue
		}
		host, _, err := net.SplitHostPort(e.Target)
		if err != nil {
			continue // reported elsewhere
		}
		addr, err := netip.ParseAddr(host)
		if err != nil || addr.IsLoopback() || addr.IsUnspecified() {
			continue
		}
		l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		switch {
		case err == nil:
			l.Close()
		case errors.Is(err, syscall.EADDRNOTAVAIL):
			return fmt.Errorf("cannot use expose[%d]: this machine has no address %s, so the program cannot listen there", n, host)
		}
	}
	return nil
}

// On returns the listeners that accept clients of an endpoint.
func On(e instance.Endpoint, ls []instance.Listener) (out []instance.Listener) {
	if e.Proto == instance.ProtoUnix {
		for _, l := range ls {
			if l.Network == e.Proto && l.Addr == e.Target {
				out = append(out, l)
			}
		}
		return out
	}
	host, port, err := net.SplitHostPort(e.Target)
	if err != nil {
		return nil
	}
	for _, l := range ls {
		lh, lp, err := net.SplitHostPort(l.Addr)
		if err == nil && !l.Private && lp == port && serves(lh, host) && l.Network == cmp.Or(e.Proto, "tcp") {
			out = append(out, l)
		}
	}
	return out
}

// serves reports whether a listener bound to bound accepts connections to host.
func serves(bound, host string) bool {
	b, err := netip.ParseAddr(bound)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return b.IsLoopback() || b.IsUnspecified()
	}
	h, err := netip.ParseAddr(host)
	if err != nil {
		return host == ""
	}
	if b.IsUnspecified() {
		return b.Is6() || h.Is4() || h.Is4In6()
	}
	return b.Unmap() == h.Unmap()
}

// Loopback returns an address at which this machine reaches a listener on addr.
// addr may be unspecified.
func Loopback(addr string) string {
	host, port, _ := net.SplitHostPort(addr)
	if host == "" || host == "localhost" || host == "0.0.0.0" {
		host = "127.0.0.1"
	}
	if host == "::" {
		host = "::1"
	}
	return net.JoinHostPort(host, port)
}
