package proc

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
)

func TestSharedFiles(t *testing.T) {
	name := filepath.Join(t.TempDir(), "a file")
	f, err := os.Create(name)
	errtest.None(t, err)
	defer f.Close()
	errtest.None(t, f.Truncate(4096))
	has := func() bool {
		files, err := Live().SharedFiles(os.Getpid())
		errtest.None(t, err)
		return slices.Contains(files, name)
	}
	if has() {
		t.Error("it is there before it is mapped")
	}
	m, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	errtest.None(t, err)
	defer unix.Munmap(m)
	if !has() {
		t.Error("a mapped file is not there")
	}
	private, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	errtest.None(t, err)
	defer unix.Munmap(private)
	if files, _ := Live().SharedFiles(os.Getpid()); len(slices.DeleteFunc(files, func(s string) bool { return s != name })) != 1 {
		t.Error("a private mapping counts")
	}
}

func FuzzSharedFiles(f *testing.F) {
	f.Add([]byte("7f0000000000-7f0000008000 rw-s 00000000 fe:00 42   /tmp/hsperfdata_ada/100\n7fff-8fff r-xp 0 00:00 0 [vdso]\n"))
	f.Add([]byte("x\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		files, err := parseSharedFiles(b)
		if err != nil && files != nil {
			t.Error("files with an error")
		}
	})
}
