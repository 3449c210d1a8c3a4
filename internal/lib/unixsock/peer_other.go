//go:build !linux

package unixsock

import (
	"errors"
	"net"
)

// PeerOf returns an error: only Linux identifies the peer of a connection.
func PeerOf(*net.UnixConn) (Peer, error) {
	return Peer{}, errors.New("cannot identify the peer: not supported on this system")
}
