package sockets

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
)

// PassiveOpens returns how many TCP connections have reached this side in a
// process's network namespace, or in our own if pid is 0, since it exists. As
// long as the number stays the same, no listener in that namespace has got a
// connection. It costs the same however many connections there are.
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

// parsePassiveOpens finds the number in pairs of lines: names, and values in the
// same order.
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
	return 0, errors.New("there is no count of TCP connections")
}
