package proc

import (
	"errors"
	"os"
	"testing"

	"lull/internal/lib/errtest"
)

func TestIO(t *testing.T) {
	fs := Live()
	before, err := fs.IO(os.Getpid())
	if errors.Is(err, ErrNoIO) {
		t.Skipf("%v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.CreateTemp(t.TempDir(), "io")
	errtest.None(t, err)
	defer f.Close()
	for range 8 {
		errtest.Get(f.Write(make([]byte, 4096)))(t)
		if err := f.Sync(); err != nil {
			t.Skipf("the temporary directory is on no disk: %v", err)
		}
	}
	after, err := fs.IO(os.Getpid())
	errtest.None(t, err)
	if n := after.Written - before.Written; n < 8*4096 {
		t.Skipf("%d bytes were counted: the temporary directory is on no disk", n)
	}
	if _, err := fs.IO(1 << 30); !errors.Is(err, ErrGone) {
		t.Errorf("a process that is not there: %v", err)
	}
}

func TestParseIO(t *testing.T) {
	const good = "rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n"
	if io, err := parseIO([]byte(good)); err != nil || io != (IO{Read: 4096, Written: 8192, Calls: 2}) {
		t.Errorf("%+v, %v", io, err)
	}
	for _, bad := range []string{"", "read_bytes: 1\n", "wchar: 1\nread_bytes: x\nwrite_bytes: 1\n", "wchar: 1\nread_bytes: 1\nwrite_bytes: -1\n", "wchar: 1\nread_bytes:1\nwrite_bytes: 1\n",
		"read_bytes: 1\nwrite_bytes: 1\n", "wchar: -1\nread_bytes: 1\nwrite_bytes: 1\n"} {
		if io, err := parseIO([]byte(bad)); err == nil {
			t.Errorf("%q gives %+v", bad, io)
		}
	}
}

// TestTally checks that the sum never decreases, whichever processes come and go,
// and includes every byte that was ever read.
func TestTally(t *testing.T) {
	var n Tally
	for i, step := range []struct {
		now  map[int]uint64
		want uint64
	}{
		{map[int]uint64{1: 100}, 100},
		{map[int]uint64{1: 100, 2: 50}, 150},
		{map[int]uint64{1: 100, 2: 70}, 170},
		{map[int]uint64{1: 100}, 170},       // 2 ended and was not reaped by 1
		{map[int]uint64{1: 180, 2: 5}, 255}, // a child of 1 has ended; pid 2 was reused
		{nil, 255},
		{map[int]uint64{7: 1}, 256},
	} {
		if got := n.Add(step.now); got != step.want {
			t.Errorf("step %d: %d, want %d", i, got, step.want)
		}
	}
}
