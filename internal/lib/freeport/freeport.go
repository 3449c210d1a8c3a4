// Package freeport chooses TCP ports for programs that tests start.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Ports are chosen below those that the kernel assigns to outgoing connections
// (32768 and up). Otherwise a client of another test could get a program's port
// while the program is down.
const (
	first  = 10000
	size   = 200 // ports in a block; one process uses a block alone
	blocks = 109
)

var (
	mu   sync.Mutex
	mine []int          // first ports of this process's blocks
	held []net.Listener // sockets that reserve the blocks until the process ends
	used int            // ports of the blocks that were returned or found in use
)

// Take returns an unused port. Within a process it returns a port again only
// after it has returned all others. Processes that run at the same time never get
// the same port.
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

// reserve adds a block that no other process has. An abstract unix socket, which
// ends with its process, reserves the block. The caller holds mu.
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

// free reports whether port is free on every address and on the loopback, for
// both families. Both must be checked, because a listener on one address does not
// conflict with listeners on others.
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
