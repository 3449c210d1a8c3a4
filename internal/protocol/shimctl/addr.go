package shimctl

import (
	"strings"

	"lull/internal/core/instance"
)

// Addr returns the address under which the shim holds the socket of an endpoint:
// host:port for TCP, udp:host:port, or unix:[USER@]/PATH. The file of a unix
// socket is created with the rights of user; an empty user means the shim's own.
func Addr(e instance.Endpoint, user string) string {
	switch {
	case e.Proto == instance.ProtoUnix && user != "":
		return "unix:" + user + "@" + e.Target
	case e.Proto != "":
		return e.Proto + ":" + e.Target
	}
	return e.Target
}

// UnixAddr parses the address of a unix socket. ok is false for other addresses.
func UnixAddr(addr string) (user, path string, ok bool) {
	rest, ok := strings.CutPrefix(addr, "unix:")
	n := strings.IndexByte(rest, '/')
	if !ok || n < 0 {
		return "", "", false
	}
	return strings.TrimSuffix(rest[:n], "@"), rest[n:], true
}

// UDPAddr returns the host:port of a UDP address. ok is false for other
// addresses.
func UDPAddr(addr string) (hostport string, ok bool) { return strings.CutPrefix(addr, "udp:") }
