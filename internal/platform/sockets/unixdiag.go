package sockets

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"
)

// The layout of linux/unix_diag.h.
const (
	unixRequestSize = 24 // struct unix_diag_req
	unixMessageSize = 16 // struct unix_diag_msg
	unixShowPeer    = 1 << 2
	attrUnixPeer    = 2
)

// UnixPeers returns the inodes of connected unix sockets and of their peers in
// a process's network namespace, or in our own if pid is 0. Sockets whose peer
// the kernel does not report are omitted.
func UnixPeers(ctx context.Context, pid int) (map[uint64]uint64, error) {
	peers := map[uint64]uint64{}
	_, err := inNamespace(Query{NetNSPID: pid}, func() (Table, error) { return Table{}, dumpPeers(ctx, openDiag, peers) })
	if err != nil {
		return nil, fmt.Errorf("cannot list the peers of unix sockets: %w", err)
	}
	return peers, nil
}

func dumpPeers(ctx context.Context, open func() (conn, error), peers map[uint64]uint64) error {
	c, err := open()
	if err != nil {
		return err
	}
	defer func() { _ = c.close() }()
	q := make([]byte, headerSize+unixRequestSize)
	native.PutUint32(q, uint32(len(q)))
	native.PutUint16(q[4:], sockDiagByFamily)
	native.PutUint16(q[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	native.PutUint32(q[8:], 1)
	q[headerSize] = unix.AF_UNIX
	native.PutUint32(q[headerSize+4:], 1<<Established)
	native.PutUint32(q[headerSize+12:], unixShowPeer)
	if err := c.send(q); err != nil {
		return fmt.Errorf("netlink request: %w", err)
	}
	block := blocks.Get().(*[64 << 10]byte)
	defer blocks.Put(block)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := c.receive(block[:])
		if err != nil {
			return fmt.Errorf("netlink answer: %w", err)
		}
		done, err := parsePeers(block[:n], peers)
		if err != nil {
			return fmt.Errorf("netlink answer: %w", err)
		}
		if done {
			return nil
		}
	}
}

// parsePeers adds the sockets of one datagram to peers. A dump that the kernel
// marks as interrupted is used although it may lack sockets: those are unknown.
func parsePeers(b []byte, peers map[uint64]uint64) (done bool, err error) {
	for len(b) > 0 {
		if len(b) < headerSize {
			return false, errTruncated
		}
		size := native.Uint32(b)
		if size < headerSize || uint64(size) > uint64(len(b)) {
			return false, errTruncated
		}
		kind, body := native.Uint16(b[4:]), b[headerSize:size]
		b = b[min(int(align(size)), len(b)):]
		switch kind {
		case unix.NLMSG_NOOP:
		case unix.NLMSG_ERROR, unix.NLMSG_DONE:
			return true, status(kind, body)
		case sockDiagByFamily:
			if err := parsePeer(body, peers); err != nil {
				return false, err
			}
		default:
			return false, fmt.Errorf("unexpected message type %d", kind)
		}
	}
	return false, nil
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
