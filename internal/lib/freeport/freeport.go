// Package freeport chooses TCP ports for programs that tests start.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Ports are taken below those that the kernel gives to outgoing connections
// (32768 and up), or a client of another test could sit on one while its program
// is away.
const first, last = 10000, 31999

var (
	mu   sync.Mutex
	next = first + rand.IntN(last-first) // tests of other packages run at the same time
)

// Take returns an unused port, and no port twice in one process until all were
// returned. Another process may still take it before its use.
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

// free looks on every address and on the loopback, of both families: one that
// is bound to a single address does not show on the others.
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
