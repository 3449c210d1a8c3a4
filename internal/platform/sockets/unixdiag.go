package sockets

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Sizes from linux/unix_diag.h.
const (
	unixRequestSize = 24 // struct unix_diag_req
	unixMessageSize = 16 // struct unix_diag_msg
	unixShowPeer    = 1 << 2
	attrUnixPeer    = 2
)

// UnixPeers returns the peers of connected unix sockets, by inode, in the network
// namespace of process pid, or in the caller's own if pid is 0. A socket that
// does not exist, or whose peer the kernel does not report, is omitted.
func UnixPeers(ctx context.Context, pid int, inodes []uint64) (map[uint64]uint64, error) {
	peers := make(map[uint64]uint64, len(inodes))
	_, err := inNamespace(Query{NetNSPID: pid}, func() (Table, error) { return Table{}, askPeers(ctx, openDiag, inodes, peers) })
	if err != nil {
		return nil, fmt.Errorf("cannot ask for the peers of unix sockets: %w", err)
	}
	return peers, nil
}

func askPeers(ctx context.Context, open func() (conn, error), inodes []uint64, peers map[uint64]uint64) error {
	c, err := open()
	if err != nil {
		return err
	}
	defer func() { _ = c.close() }()
	q := make([]byte, headerSize+unixRequestSize)
	native.PutUint32(q, uint32(len(q)))
	native.PutUint16(q[4:], sockDiagByFamily)
	native.PutUint16(q[6:], unix.NLM_F_REQUEST)
	q[headerSize] = unix.AF_UNIX
	native.PutUint32(q[headerSize+4:], ^uint32(0))
	native.PutUint32(q[headerSize+12:], unixShowPeer)
	native.PutUint64(q[headerSize+16:], ^uint64(0)) // the cookie: any
	block := blocks.Get().(*[64 << 10]byte)
	defer blocks.Put(block)
	for n, inode := range inodes {
		native.PutUint32(q[8:], uint32(n+1))
		native.PutUint32(q[headerSize+8:], uint32(inode))
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := c.send(q); err != nil {
			return fmt.Errorf("netlink request: %w", err)
		}
		size, err := c.receive(block[:])
		if err == nil {
			err = parsePeers(block[:size], peers)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("netlink answer: %w", err)
		}
	}
	return nil
}

// parsePeers adds the sockets of one answer to peers. It returns ENOENT if the
// socket does not exist.
func parsePeers(b []byte, peers map[uint64]uint64) error {
	for len(b) > 0 {
		if len(b) < headerSize {
			return errTruncated
		}
		size := native.Uint32(b)
		if size < headerSize || uint64(size) > uint64(len(b)) {
			return errTruncated
		}
		kind, body := native.Uint16(b[4:]), b[headerSize:size]
		b = b[min(int(align(size)), len(b)):]
		switch kind {
		case unix.NLMSG_NOOP:
		case unix.NLMSG_ERROR:
			return status(kind, body)
		case sockDiagByFamily:
			if err := parsePeer(body, peers); err != nil {
				return err
			}
		default:
			return fmt.Errorf("unexpected message type %d", kind)
		}
	}
	return nil
}

func parsePeer(b []byte, peers map[uint64]uint64) error {
	if len(b) < unixMessageSize {
		return errTruncated
	}
	inode := uint64(native.Uint32(b[4:]))
	for b = b[unixMessageSize:]; len(b) >= 4; {
		size := native.Uint16(b)
		if size < 4 || int(size) > len(b) {
			return errTruncated
		}
		if native.Uint16(b[2:])&attrTypeMask == attrUnixPeer && size >= 8 {
			peers[inode] = uint64(native.Uint32(b[4:]))
		}
		b = b[min(int(align(uint32(size))), len(b)):]
	}
	return nil
}
