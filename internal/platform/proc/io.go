package proc

import (
	"bytes"
	"errors"
	"strconv"

	"golang.org/x/sys/unix"
)

// IO is the number of bytes that a process read from and wrote to disks, from
// /proc/PID/io. Reads from the page cache do not count, and a page counts as
// written when it becomes dirty. The counts include reaped children.
type IO struct {
	Read    uint64
	Written uint64
	// Calls is the number of bytes that the process passed to write calls, to
	// files, pipes and sockets alike. Changes of a mapped file appear in Written
	// only.
	Calls uint64
}

// ErrNoIO means that this kernel does not account for disk traffic by process.
var ErrNoIO = errors.New("the kernel does not count disk traffic by process")

var errIO = errors.New("not an io file")

// IO reads the disk traffic of one process. It returns ErrGone if the process has
// ended, ErrNoIO if the kernel does not account for disk traffic.
func (f *FS) IO(pid int) (IO, error) {
	s := f.scratch().num(pid).str("/io")
	defer s.free()
	b, err := s.read()
	if err != nil {
		switch st, serr := f.Stat(pid); {
		case serr == nil && st.Ended(): // the files of a zombie belong to root
			return IO{}, &Error{Path: string(s.path), Err: ErrGone}
		case serr == nil && errors.Is(err, unix.ENOENT):
			return IO{}, ErrNoIO
		}
		return IO{}, err
	}
	io, err := parseIO(b)
	if err != nil {
		return IO{}, s.fail(err)
	}
	return io, nil
}

func parseIO(b []byte) (io IO, err error) {
	seen := 0
	for line := range bytes.Lines(b) {
		name, value, ok := bytes.Cut(bytes.TrimSpace(line), []byte(": "))
		var into *uint64
		switch string(name) {
		case "wchar":
			into = &io.Calls
		case "read_bytes":
			into = &io.Read
		case "write_bytes":
			into = &io.Written
		default:
			continue
		}
		if !ok {
			return IO{}, errIO
		}
		if *into, err = strconv.ParseUint(string(value), 10, 64); err != nil {
			return IO{}, errIO
		}
		seen++
	}
	if seen != 3 {
		return IO{}, errIO
	}
	return io, nil
}

// Tally combines the counters of a changing set of processes into one that only
// grows. The bytes that a process transfers between its last reading and its end
// are in the counter of the parent that reaped it. That counter includes the
// earlier bytes too, which are then counted twice; this can only keep something
// awake. The zero value is ready for use.
type Tally struct {
	total uint64
	last  map[int]uint64
}

// Add takes the present counter of every process, by pid, and returns the sum of
// everything ever counted.
func (t *Tally) Add(now map[int]uint64) uint64 {
	for pid, n := range now {
		old := t.last[pid]
		if n < old { // the pid now belongs to another process
			old = 0
		}
		t.total += n - old
	}
	t.last = now
	return t.total
}
