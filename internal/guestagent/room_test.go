package guestagent

import "testing"

// TestKeepBack checks that programs may use the host's free space minus pending
// writes, and never more than the disk has.
func TestKeepBack(t *testing.T) {
	for _, c := range []struct {
		what                            string
		own, free, delayed, bytes, want int64
	}{
		{"no limit", 10, 1000, 5, -1, 10},
		{"more room than disk", 10, 1000, 5, 4096 * 5000, 10},
		{"less", 10, 1000, 0, 4096 * 300, 700},
		{"some is on its way", 10, 1000, 100, 4096 * 300, 800},
		{"none", 10, 1000, 0, 0, 1000},
		{"all of it is on its way", 10, 1000, 400, 4096 * 300, 1000},
		{"a disk that is full itself", 10, 0, 0, 4096 * 300, 10},
	} {
		if got := keepBack(c.own, c.free, c.delayed, 4096, c.bytes); got != c.want {
			t.Errorf("%s: %d blocks are kept back, want %d", c.what, got, c.want)
		}
	}
}
