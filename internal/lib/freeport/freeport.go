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
const (
	first  = 10000
	size   = 200 // of a block, which one process has for itself
	blocks = 109
)

var (
	mu   sync.Mutex
	mine []int          // first ports of the blocks of this process
	held []net.Listener // hold them until the process ends
	used int            // ports returned from them, or found in use
)

// Take returns an unused port. It returns no port twice in one process before
// it has returned all of them, and none that it returns in another process that
// runs at the same time.
func Take() (int, error) {
	mu.Lock()
	defer mu.Unlock()
	for range blocks * size {
		if used == len(mine)*size && !reserve() {
			used = 0
		}
		if len(mine) == 0 {
			break
		}
		p := mine[used/size] + used%size
		used++
		if free(p) {
			return p, nil
		}
	}
	return 0, fmt.Errorf("cannot find a free port from %d to %d", first, first+blocks*size-1)
}

// reserve adds a block that no other process has. An abstract socket stands for
// it, which ends with its process. The caller holds mu.
func reserve() bool {
	from := rand.IntN(blocks)
	for n := range blocks {
		b := (from + n) % blocks
		if l, err := net.Listen("unix", fmt.Sprintf("@lull-ports-%d", b)); err == nil {
			mine, held = append(mine, first+b*size), append(held, l)
			return true
		}
	}
	return false
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
