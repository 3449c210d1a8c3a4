package proc

import (
	"bytes"
	"errors"
	"strconv"
	"syscall"
)

// Pending reports whether a signal was sent to the process but not yet delivered,
// as while the process is frozen or stopped.
func (f *FS) Pending(pid int, sig syscall.Signal) (bool, error) {
	s := f.scratch().num(pid).str("/status")
	defer s.free()
	b, err := s.read()
	if err != nil {
		return false, err
	}
	set, err := parsePending(b)
	if err != nil {
		return false, s.fail(err)
	}
	return sig > 0 && sig <= 64 && set>>(sig-1)&1 == 1, nil
}

var errPending = errors.New("no sets of pending signals")

// parsePending returns the signals in a status file (proc_pid_status(5)) that are
// pending for the main thread or the whole process. Signal n is bit n-1.
func parsePending(b []byte) (set uint64, err error) {
	found := 0
	for line := range bytes.Lines(b) {
		name, value, ok := bytes.Cut(line, []byte(":"))
		if !ok || string(name) != "SigPnd" && string(name) != "ShdPnd" {
			continue
		}
		n, err := strconv.ParseUint(string(bytes.TrimSpace(value)), 16, 64)
		if err != nil {
			return 0, errPending
		}
		set |= n
		found++
	}
	if found != 2 {
		return 0, errPending
	}
	return set, nil
}
