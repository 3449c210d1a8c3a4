package shimctl

import (
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strings"
	"syscall"

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

// SparePath returns the path at which a unix socket is made before it is moved to
// path, and which the kernel reports as its name from then on.
func SparePath(path string) string {
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(path))
	return fmt.Sprintf("%s/%s%08x", filepath.Dir(path), SpareName, sum.Sum32())
}

// SpareName is the beginning of the name of such a file.
const SpareName = ".lull"

// UDPAddr returns the host:port of a UDP address. ok is false for other
// addresses.
func UDPAddr(addr string) (hostport string, ok bool) { return strings.CutPrefix(addr, "udp:") }

// UnitSocket returns the abstract socket at which the shim with a directory is told of
// the binds of units. It has no file, so the sandbox of a unit does not hide it.
func UnitSocket(dir string) (string, error) {
	st, err := os.Stat(dir)
	if err != nil {
		return "", err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return "", errors.ErrUnsupported
	}
	return fmt.Sprintf("@lull-handoff-%x-%x", sys.Dev, sys.Ino), nil
}

// HandoffFile is the name of the file beside a copy of lull-shim that systemd executes
// in place of a unit's program. It contains a Handoff.
const HandoffFile = "handoff.json"

// Handoff tells such a copy what it becomes.
type Handoff struct {
	Program string `json:"program"` // absolute path
	Dir     string `json:"dir"`     // with which PATH begins because of the drop-in
	Path    string `json:"path"`    // PATH without the drop-in
	Socket  string `json:"socket"`  // see UnitSocket
	UID     int    `json:"uid"`     // user of the shim
}
