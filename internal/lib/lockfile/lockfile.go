// Package lockfile keeps a second process out of a directory. The kernel releases
// the lock when its process ends, in whatever way.
package lockfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Patience is how long Take waits for a killed process to release its lock. The
// kernel frees the memory of the process first, which may take long.
const Patience = 5 * time.Second

const again = 10 * time.Millisecond

// HeldError means that another process has the lock.
type HeldError struct {
	Path string
	PID  int // 0 if unknown
}

func (e *HeldError) Error() string {
	if e.PID == 0 {
		return e.Path + " is locked by another process"
	}
	return fmt.Sprintf("%s is locked by process %d", e.Path, e.PID)
}

// Take locks the file at path, creating it if needed, and writes the ID of this
// process into it. Closing the file unlocks it. If another process has the lock
// and is not ending, Take returns a *HeldError that names it. If that process is
// ending or unknown, Take first waits up to Patience.
func Take(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(Patience); ; time.Sleep(again) {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			break
		}
		pid := holder(f)
		if pid != 0 && !ending(pid) || time.Now().After(end) {
			return nil, errors.Join(&HeldError{path, pid}, f.Close())
		}
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if errors.Is(err, unix.ENOSPC) { // the file then does not name the holder
		err = nil
	}
	if err != nil {
		return nil, errors.Join(&os.PathError{Op: "lock", Path: path, Err: err}, f.Close())
	}
	return f, nil
}

// holder returns the process ID in the file; 0 if there is none.
func holder(f *os.File) int {
	b := make([]byte, 20)
	n, _ := f.ReadAt(b, 0) // only for the error message
	pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n])))
	if err != nil || pid <= 0 {
		return 0
	}
	return pid
}

// pfExiting is the kernel's flag of a task that is exiting (linux/sched.h).
const pfExiting = 0x4

// ending reports whether a process has ended, or was killed and is about to end.
// Without /proc it returns false for a process that exists.
func ending(pid int) bool {
	if errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
		return true
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// The fields after the name are: state ppid pgrp session tty tpgid flags.
	stat := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(stat) < 7 {
		return false
	}
	if flags, err := strconv.ParseUint(stat[6], 10, 64); err == nil && flags&pfExiting != 0 || stat[0] == "Z" || stat[0] == "X" {
		return true
	}
	b, err = os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "ShdPnd:"); ok {
			pending, err := strconv.ParseUint(strings.TrimSpace(v), 16, 64)
			return err == nil && pending&(1<<(unix.SIGKILL-1)) != 0
		}
	}
	return false
}
