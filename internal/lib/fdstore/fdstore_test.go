package fdstore

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"lull/internal/lib/scaletest"
)

// TestStore keeps, opens and closes pipes at random. It checks that an opened
// file is the one that was kept, that only kept files stay open, and that few
// descriptors are used.
func TestStore(t *testing.T) {
	r := scaletest.Random(t)
	var s Store
	type kept struct {
		f     *File
		inode uint64
	}
	// Drawers are not refilled, so some have few files.
	const seldom = 8
	var all []kept
	before := open(t)
	for range scaletest.Count(t, "steps", 3000) {
		switch n := r.IntN(5); {
		case n < 2 || len(all) == 0:
			var p [2]int
			if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
				t.Fatal(err)
			}
			all = append(all, kept{s.Put(p[0]), inode(t, p[1])})
			_ = unix.Close(p[1])
		case n < 4:
			k := all[r.IntN(len(all))]
			fd, err := k.f.Open()
			if err != nil {
				t.Fatal(err)
			}
			if got := inode(t, fd); got != k.inode {
				t.Fatalf("opened file %d, kept %d", got, k.inode)
			}
			_ = unix.Close(fd)
		default:
			at := r.IntN(len(all))
			all[at].f.Close()
			all[at].f.Close() // a second Close does nothing
			if _, err := all[at].f.Open(); !errors.Is(err, os.ErrClosed) {
				t.Fatalf("opened a closed file: %v", err)
			}
			all = append(all[:at], all[at+1:]...)
		}
		if n := open(t) - before; n > 2*(1+seldom*len(all)/most) {
			t.Fatalf("%d descriptors for %d files", n, len(all))
		}
	}
	for _, k := range all {
		k.f.Close()
	}
	if n := open(t); n != before {
		t.Errorf("%d descriptors, %d before", n, before)
	}
}

// TestClosedFilesEnd checks that a file is really closed when Close returns, and
// that all others are still open.
func TestClosedFilesEnd(t *testing.T) {
	var s Store
	r := scaletest.Random(t)
	files, ends := map[int]*File{}, map[int]int{}
	for n := range 3 * most {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		files[n], ends[n] = s.Put(p[0]), p[1]
		defer unix.Close(p[1])
	}
	for _, n := range r.Perm(len(files)) {
		files[n].Close()
		delete(files, n)
		for k, fd := range ends {
			_, err := unix.Write(fd, []byte{0})
			if _, open := files[k]; (err == unix.EPIPE) == open {
				t.Fatalf("file %d, kept: %t, after %d was closed: %v", k, open, n, err)
			}
		}
	}
}

// TestUnixSocket checks that a unix socket keeps an open descriptor and works.
func TestUnixSocket(t *testing.T) {
	var s Store
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p[1])
	want := inode(t, p[0])
	f := s.Put(p[0])
	fd, err := f.Open()
	if err != nil || inode(t, fd) != want || inode(t, p[0]) != want {
		t.Errorf("%d, %v", fd, err)
	}
	_ = unix.Close(fd)
	f.Close()
	if _, err := unix.Write(p[1], []byte{0}); err != unix.EPIPE {
		t.Errorf("it is still open: %v", err)
	}
	if _, err := f.Open(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("opened a closed file: %v", err)
	}
}

func inode(t *testing.T, fd int) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

func open(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}
