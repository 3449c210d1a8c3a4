package sockets

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// dropSYN is a socket filter that drops the first packet of a connection and
// nothing else. Its input starts at the TCP header.
var dropSYN = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 13}, // flags
	{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0x12},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0x02, Jf: 1}, // SYN without ACK
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0xffffffff},
}

// Shut makes a listening TCP socket ignore new connections until Open. Clients
// wait instead of being refused, because they repeat their first packet after a
// second or more. Connections in the backlog stay. Shut affects every descriptor
// of the socket, in any process.
func Shut(fd int) error {
	prog := unix.SockFprog{Len: uint16(len(dropSYN)), Filter: &dropSYN[0]}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &prog); err != nil {
		return fmt.Errorf("cannot shut a listening socket: %w", failure("setsockopt", err))
	}
	return nil
}

// Open undoes Shut. It is not an error if the socket was not shut.
func Open(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0); err != nil && err != unix.ENOENT {
		return fmt.Errorf("cannot open a listening socket: %w", failure("setsockopt", err))
	}
	return nil
}
