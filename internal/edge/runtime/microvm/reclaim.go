package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Reclaim implements instance.Workload: the guest's memory is written to its
// file and every mapping of QEMU pushed out, which needs no swap. freed is by
// how much QEMU's own memory shrank.
func (w *Work) Reclaim(ctx context.Context) (freed int64, err error) {
	if !w.isFrozen() {
		return 0, errors.New("cannot reclaim: the guest is not frozen")
	}
	before, err := resident(w.proc.pid)
	if err != nil {
		return 0, err
	}
	if w.rec.Template == "" { // what a clone has written is in no file
		// What is not written cannot be dropped.
		if _, err := syncMemory(w.path(memoryFile)); err != nil {
			return 0, fmt.Errorf("cannot write the guest's memory to its file: %w", err)
		}
	}
	if err := pageOut(w.proc); err != nil {
		return 0, err
	}
	after, err := resident(w.proc.pid)
	return max(before-after, 0), err
}

// resident is the memory that a process holds.
func resident(pid int) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0, fmt.Errorf("cannot read the memory of process %d: %w", pid, err)
	}
	var total, rss int64
	if _, err := fmt.Sscan(string(b), &total, &rss); err != nil {
		return 0, fmt.Errorf("cannot read the memory of process %d: %w", pid, err)
	}
	return rss * int64(os.Getpagesize()), nil
}

// pageOut asks the kernel to push all of a process out. It is advice: a range
// that cannot go stays. Only when none goes it is an error.
func pageOut(p process) error {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return fmt.Errorf("cannot open process %d: %w", p.pid, err)
	}
	defer unix.Close(fd)
	if !p.alive() {
		return fmt.Errorf("cannot push out process %d: it has ended", p.pid)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.pid))
	if err != nil {
		return fmt.Errorf("cannot read the mappings of process %d: %w", p.pid, err)
	}
	var last error
	gone := 0
	for line := range strings.Lines(string(b)) {
		var from, to uint64
		if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err != nil || to <= from || strings.Contains(line, "[v") {
			continue
		}
		r := struct{ base, size uint64 }{from, to - from}
		if _, _, errno := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(fd), uintptr(unsafe.Pointer(&r)), 1, unix.MADV_PAGEOUT, 0, 0); errno != 0 {
			last = errno
			continue
		}
		gone++
	}
	if gone == 0 && last != nil {
		return fmt.Errorf("cannot push out the memory of process %d: %w", p.pid, last)
	}
	return nil
}
