package sockets

import (
	"net"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
)

// TestUnixPeers checks that each end of a unix connection has the other as its
// peer.
func TestUnixPeers(t *testing.T) {
	ln, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	errtest.None(t, err)
	defer ln.Close()
	c, err := net.Dial("unix", ln.Addr().String())
	errtest.None(t, err)
	defer c.Close()
	s, err := ln.Accept()
	errtest.None(t, err)
	defer s.Close()
	inode := func(c net.Conn) uint64 {
		raw, err := c.(*net.UnixConn).SyscallConn()
		errtest.None(t, err)
		var st unix.Stat_t
		errtest.None(t, raw.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }))
		return st.Ino
	}
	a, b := inode(c), inode(s)
	gone, err := net.Listen("unix", filepath.Join(t.TempDir(), "gone"))
	errtest.None(t, err)
	raw, err := gone.(*net.UnixListener).SyscallConn()
	errtest.None(t, err)
	var st unix.Stat_t
	errtest.None(t, raw.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }))
	gone.Close()
	peers, err := UnixPeers(t.Context(), 0, []uint64{a, st.Ino, b})
	if err != nil {
		t.Fatal(err)
	}
	if peers[a] != b || peers[b] != a || len(peers) != 2 {
		t.Errorf("peers of %d and %d: %d and %d", a, b, peers[a], peers[b])
	}
}

// FuzzPeers parses random answers of the kernel. It must not panic.
func FuzzPeers(f *testing.F) {
	f.Add([]byte{20, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add(append([]byte{40, 0, 0, 0, 20, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 8, 0, 2, 0, 7, 0, 0, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		peers := map[uint64]uint64{}
		if err := parsePeers(b, peers); err == nil && len(b) > 0 && len(b) < headerSize {
			t.Errorf("%d bytes are an answer", len(b))
		}
	})
}
