package freeport_test

import (
	"net"
	"strconv"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/lib/freeport"
)

func TestNoPortTwice(t *testing.T) {
	seen := map[int]bool{}
	for range 450 { // uses up three blocks
		p, err := freeport.Take()
		if err != nil || seen[p] {
			t.Fatalf("Take() = %d, %v after %d others", p, err, len(seen))
		}
		seen[p] = true
	}
}

// TestOtherProcess checks that another process cannot reserve the block of a
// returned port.
func TestOtherProcess(t *testing.T) {
	p, err := freeport.Take()
	errtest.None(t, err)
	if l, err := net.Listen("unix", "@lull-ports-"+strconv.Itoa((p-10000)/200)); err == nil {
		l.Close()
		t.Errorf("nothing reserves the block of port %d", p)
	}
}

func TestUsedPortIsLeftOut(t *testing.T) {
	p, err := freeport.Take()
	errtest.None(t, err)
	// The next one would be p+1, or a little later.
	used := map[int]bool{}
	for n := 1; n <= 5; n++ {
		l, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(p+n)))
		if err == nil {
			defer l.Close()
			used[p+n] = true
		}
	}
	for range 5 {
		got, err := freeport.Take()
		if err != nil || used[got] {
			t.Fatalf("Take() = %d, %v, which is in use", got, err)
		}
	}
}
