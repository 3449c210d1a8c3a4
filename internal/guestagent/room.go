package guestagent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/guest"
)

// A guest's own disk is a sparse file on the host, which may have less free space
// than the disk claims. If a write fails on the host, it is too late: the program
// has already continued. The file system therefore reserves the free blocks that
// the host cannot back, and programs get ENOSPC when they write.

// reserve remembers the reservation that the file system had at first, in blocks.
type reserve struct {
	mu    sync.Mutex
	known bool
	own   int64
}

// applySpace adjusts the reservation to the free space that the host reports.
func (h *Harness) applySpace(c guest.RoomCall) error {
	dir, err := ext4Of(h.cfg.Sys, upperDir)
	if err != nil {
		return fmt.Errorf("cannot reserve disk space: %w", err)
	}
	h.reserve.mu.Lock()
	defer h.reserve.mu.Unlock()
	file := filepath.Join(dir, "reserved_clusters")
	if !h.reserve.known {
		if h.reserve.own, err = readNumber(file); err != nil {
			return fmt.Errorf("cannot reserve disk space: %w", err)
		}
		h.reserve.known = true
	}
	delayed, err := readNumber(filepath.Join(dir, "delayed_allocation_blocks"))
	var st unix.Statfs_t
	if err = errors.Join(err, unix.Statfs(upperDir, &st)); err != nil {
		return fmt.Errorf("cannot reserve disk space: %w", err)
	}
	n := keepBack(h.reserve.own, int64(st.Bfree), delayed, st.Bsize, c.Free)
	if err := os.WriteFile(file, []byte(strconv.FormatInt(n, 10)), 0o644); err != nil {
		return fmt.Errorf("cannot reserve disk space: %w", err)
	}
	return nil
}

// keepBack returns how many blocks of the given size to reserve if the host has
// space for bytes more. own is the file system's own reservation, and free is the
// number of unused blocks. delayed is the number of blocks allocated but not
// written yet; the host has not seen these, so they use up its space too.
func keepBack(own, free, delayed, size, bytes int64) int64 {
	if bytes < 0 {
		return own
	}
	return max(own, free-max(bytes/size-delayed, 0))
}

// ext4Of returns the sysfs directory of the ext4 file system mounted on path.
func ext4Of(sys, path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", err
	}
	to, err := os.Readlink(filepath.Join(sys, "dev/block", fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))))
	if err != nil {
		return "", fmt.Errorf("the guest has no writable disk: %w", err)
	}
	return filepath.Join(sys, "fs/ext4", filepath.Base(to)), nil
}

func readNumber(file string) (int64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}
