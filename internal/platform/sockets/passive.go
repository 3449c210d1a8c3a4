package sockets

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
)

// PassiveOpens returns how many TCP connections were ever opened from the other
// side, in the network namespace of process pid, or in the caller's own if pid is
// 0. While the number stays the same, no listener in the namespace has got a
// connection. The cost does not depend on the number of connections.
func PassiveOpens(pid int) (uint64, error) {
	path := "/proc/thread-self/net/snmp"
	if pid != 0 {
		path = fmt.Sprintf("/proc/%d/net/snmp", pid)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("cannot count connections: %w", err)
	}
	n, err := parsePassiveOpens(b)
	if err != nil {
		return 0, fmt.Errorf("cannot count connections: read %s: %w", path, err)
	}
	return n, nil
}

// parsePassiveOpens finds the number in /proc/PID/net/snmp: pairs of lines, one
// with names and one with their values.
func parsePassiveOpens(b []byte) (uint64, error) {
	var names [][]byte
	for line := range bytes.Lines(b) {
		if !bytes.HasPrefix(line, []byte("Tcp:")) {
			continue
		}
		words := bytes.Fields(line)
		if names == nil {
			names = words
			continue
		}
		for n, name := range names {
			if string(name) == "PassiveOpens" && n < len(words) {
				return strconv.ParseUint(string(words[n]), 10, 64)
			}
		}
		break
	}
	return 0, errors.New("the kernel reports no count of TCP connections")
}
