package sockets

import (
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestUnix(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a b.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for range 2 {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	s, err := ln.Accept() // the second is left to wait
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	all, err := Unix(0)
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, u := range all {
		switch {
		case u.Path != path:
		case u.Listening:
			kinds = append(kinds, "listening")
		case u.Connected:
			kinds = append(kinds, "connected")
		case u.Pending:
			kinds = append(kinds, "pending")
		}
	}
	slices.Sort(kinds)
	if !slices.Equal(kinds, []string{"connected", "listening", "pending"}) {
		t.Errorf("found %v at %s among %d sockets", kinds, path, len(all))
	}
}

func TestParseUnix(t *testing.T) {
	const head = "Num       RefCount Protocol Flags    Type St Inode Path\n"
	all, err := parseUnix(strings.NewReader(head +
		"0000000000000000: 00000002 00000000 00010000 0001 01    12 @/tmp/x y\n" +
		"0000000000000000: 00000003 00000000 00000000 0001 03 89517\n"))
	if want := []UnixSocket{{Inode: 12, Path: "@/tmp/x y", Listening: true}}; err != nil || !slices.Equal(all, want) {
		t.Errorf("%+v, %v", all, err)
	}
	for _, bad := range []string{"0: 1 2\n", "0: 2 0 zz 1 01 5 /x\n"} {
		if all, err := parseUnix(strings.NewReader(head + bad)); err == nil {
			t.Errorf("%q gives %v", bad, all)
		}
	}
}

// TestUnixPeers: each end of a connection has the other as its peer.
func TestUnixPeers(t *testing.T) {
	ln, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("unix", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	peers, err := UnixPeers(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	inode := func(c net.Conn) uint64 {
		raw, err := c.(*net.UnixConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := raw.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }); err != nil {
			t.Fatal(err)
		}
		return st.Ino
	}
	if a, b := inode(c), inode(s); peers[a] != b || peers[b] != a {
		t.Errorf("peers of %d and %d: %d and %d", a, b, peers[a], peers[b])
	}
}

// FuzzPeers reads anything as an answer of the kernel without a crash.
func FuzzPeers(f *testing.F) {
	f.Add([]byte{20, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add(append([]byte{40, 0, 0, 0, 20, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 8, 0, 2, 0, 7, 0, 0, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		peers := map[uint64]uint64{}
		if done, err := parsePeers(b, peers); done && err == nil && len(b) < headerSize {
			t.Errorf("%d bytes are the end of a list", len(b))
		}
	})
}
