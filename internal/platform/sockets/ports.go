package sockets

import (
	"fmt"
	"os"
)

// EphemeralPorts returns the range of ports that the kernel chooses from for sockets
// that name none.
func EphemeralPorts() (low, high uint16) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if n, _ := fmt.Sscan(string(b), &low, &high); err != nil || n != 2 {
		return 32768, 60999 // the kernel's default
	}
	return low, high
}
