package proc

import (
	"bytes"
	"errors"
	"strconv"

	"golang.org/x/sys/unix"
)

// IO counts the bytes that a process moved to and from disks, from
// /proc/PID/io. Pages that were already cached are not read, and a page counts
// as written when it becomes dirty. Collected children are included.
type IO struct {
	Read    uint64
	Written uint64
}

// ErrNoIO means that this kernel does not account for disk traffic by process.
var ErrNoIO = errors.New("the kernel does not count disk traffic by process")

var errIO = errors.New("not an io file")

// IO reads the disk traffic of one process. A pid that does not exist gives
// ErrGone, a kernel without the accounting ErrNoIO.
func (f *FS) IO(pid int) (IO, error) {
	s := f.scratch().num(pid).str("/io")
	defer s.free()
	b, err := s.read()
	if err != nil {
		switch st, serr := f.Stat(pid); {
		case serr == nil && st.Ended(): // its files belong to root until it is collected
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
	if seen != 2 {
		return IO{}, errIO
	}
	return io, nil
}

// Tally turns counts of processes that come and go into one that only grows.
// What a process moved after it was last counted and before it ended is found in
// the parent that collected it; what it had moved before is then counted twice,
// which can only keep something awake. The zero value is ready.
type Tally struct {
	total uint64
	last  map[int]uint64
}

// Add takes the present count of every process and returns the sum of all that
// was ever counted.
func (t *Tally) Add(now map[int]uint64) uint64 {
	for pid, n := range now {
		old := t.last[pid]
		if n < old { // the pid is another process's by now
			old = 0
		}
		t.total += n - old
	}
	t.last = now
	return t.total
}
