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

// Reclaim implements instance.Workload: it syncs the guest's memory to its file
// and pages out every mapping of QEMU, which needs no swap. freed is the decrease
// of QEMU's resident memory in bytes.
func (w *Work) Reclaim(ctx context.Context) (freed int64, err error) {
	if !w.isFrozen() {
		return 0, errors.New("cannot reclaim: the guest is not frozen")
	}
	before, err := resident(w.proc.pid)
	if err != nil {
		return 0, err
	}
	if w.rec.Template == "" { // a clone has no file for the memory it has changed
		// The kernel cannot page out dirty pages of a file.
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

// resident returns the resident memory of a process.
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

// pageOut asks the kernel to page out the memory of a process. It returns an error
// only if no range can be paged out.
func pageOut(p process) error {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return fmt.Errorf("cannot open process %d: %w", p.pid, err)
	}
	defer unix.Close(fd)
	if !p.alive() {
		return fmt.Errorf("cannot page out process %d: it has ended", p.pid)
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
		return fmt.Errorf("cannot page out the memory of process %d: %w", p.pid, last)
	}
	return nil
}
