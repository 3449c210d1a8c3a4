//go:build !linux

package httpx

import (
	"errors"
	"net"
)

// PeerOfConn asks the kernel for the peer of a unix socket, which only Linux
// is asked for.
func PeerOfConn(*net.UnixConn) (Peer, error) {
	return Peer{}, errors.New("cannot read the peer of a unix socket: this system is not asked for it")
}
