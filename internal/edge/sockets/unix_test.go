package sockets

import (
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestUnix(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a b.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := ln.Accept()
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
		}
	}
	slices.Sort(kinds)
	if !slices.Equal(kinds, []string{"connected", "listening"}) {
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
