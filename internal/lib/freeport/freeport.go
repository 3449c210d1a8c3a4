// Package freeport chooses TCP ports for programs that tests start.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Ports are below those that the kernel assigns to outgoing connections (32768
// and up). Otherwise a client of another test could use one while its program
// is down.
const first, last = 10000, 31999

var (
	mu   sync.Mutex
	next = first + rand.IntN(last-first) // tests of other packages run at the same time
)

// Take returns an unused port. It returns no port twice in one process before
// it has returned all of them. Another process may still take the port before
// it is used.
func Take() (int, error) {
	mu.Lock()
	defer mu.Unlock()
	for range last - first + 1 {
		p := next
		if next++; next > last {
			next = first
		}
		if free(p) {
			return p, nil
		}
	}
	return 0, fmt.Errorf("cannot find a free port from %d to %d", first, last)
}

// free reports whether port is free on every address and on the loopback, of
// both families: a listener on a single address does not conflict with the
// others.
func free(port int) bool {
	for _, host := range []string{"0.0.0.0", "127.0.0.1", "::", "::1"} {
		network := "tcp4"
		if net.ParseIP(host).To4() == nil {
			network = "tcp6"
		}
		l, err := net.Listen(network, net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil {
			err = l.Close()
		} else if network == "tcp6" && !six() {
			err = nil
		}
		if err != nil {
			return false
		}
	}
	return true
}

// six reports whether this machine has IPv6.
var six = sync.OnceValue(func() bool {
	l, err := net.Listen("tcp6", "[::1]:0")
	if err == nil {
		err = l.Close()
	}
	return err == nil
})
