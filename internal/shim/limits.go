package shim

import (
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// RaiseFiles raises this process's limit on open files to the hard limit or, as
// root, to the kernel's maximum per process, and returns the limit. It bypasses the
// Go runtime, so that programs started by this process still get the original
// limit.
func RaiseFiles() (uint64, error) {
	var was unix.Rlimit
	if err := prlimit(nil, &was); err != nil {
		return 0, err
	}
	want := unix.Rlimit{Cur: was.Max, Max: was.Max}
	if os.Geteuid() == 0 {
		if b, err := os.ReadFile("/proc/sys/fs/nr_open"); err == nil {
			if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil && n > was.Max {
				want = unix.Rlimit{Cur: n, Max: n}
			}
		}
	}
	err := prlimit(&want, nil)
	if err == nil {
		return want.Cur, nil
	}
	return was.Cur, err
}

func prlimit(set, get *unix.Rlimit) error {
	_, _, e := unix.RawSyscall6(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_NOFILE,
		uintptr(unsafe.Pointer(set)), uintptr(unsafe.Pointer(get)), 0, 0)
	if e != 0 {
		return e
	}
	return nil
}
