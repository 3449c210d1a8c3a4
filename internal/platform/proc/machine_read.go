package proc

import (
	"errors"
	"fmt"
	"io/fs"
	"math"

	"golang.org/x/sys/unix"
)

// machineFileMax bounds one file of /proc, in bytes: 128 CPUs need 10 KiB of
// /proc/stat, a thousand NICs 120 KiB of /proc/net/dev.
const machineFileMax = 4 << 20

var (
	errTooLarge  = errors.New("larger than 4 MiB")
	errMalformed = errors.New("malformed")
	errReset     = errors.New("a counter went backwards")
)

// machineFile is a file of /proc that is opened once and read with pread into
// one buffer, so that reading it again allocates nothing. It is not safe for
// concurrent use.
type machineFile struct {
	path string
	fd   int // 0 before the first read and after a failure
	buf  []byte
}

func (f *machineFile) open() error {
	if f.fd > 0 {
		return nil
	}
	fd, err := unix.Open(f.path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: f.path, Err: err}
	}
	f.fd = fd
	if f.buf == nil {
		f.buf = make([]byte, 16<<10)
	}
	return nil
}

func (f *machineFile) close() {
	if f.fd > 0 {
		unix.Close(f.fd)
		f.fd = 0
	}
}

// read returns the whole content, valid until the next read. If enough is not
// nil, reading ends as soon as enough returns true for the content so far. After
// a failure the file is closed; the next read opens it again.
func (f *machineFile) read(enough func([]byte) bool) ([]byte, error) {
	if err := f.open(); err != nil {
		return nil, err
	}
	n := 0
	for {
		if n == len(f.buf) {
			if n >= machineFileMax {
				f.close()
				return nil, &fs.PathError{Op: "read", Path: f.path, Err: errTooLarge}
			}
			f.buf = append(f.buf, make([]byte, len(f.buf))...)
		}
		k, err := unix.Pread(f.fd, f.buf[n:], int64(n))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			f.close()
			return nil, &fs.PathError{Op: "read", Path: f.path, Err: err}
		}
		n += k
		if k == 0 || (enough != nil && enough(f.buf[:n])) {
			return f.buf[:n], nil
		}
	}
}

// missing reports whether err means that the source does not exist at all, rather
// than that it cannot be read.
func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// cutLine returns the first line of b without its newline, and the rest.
func cutLine(b []byte) (line, rest []byte) {
	for i, c := range b {
		if c == '\n' {
			return b[:i], b[i+1:]
		}
	}
	return b, nil
}

// cutField returns the first space-separated field of b and the rest.
func cutField(b []byte) (field, rest []byte) {
	i := 0
	for i < len(b) && (b[i] == ' ' || b[i] == '\t') {
		i++
	}
	j := i
	for j < len(b) && b[j] != ' ' && b[j] != '\t' {
		j++
	}
	return b[i:j], b[j:]
}

// cutUint parses the first field of b as a decimal number. ok is false for
// anything else, including an overflow.
func cutUint(b []byte) (v uint64, rest []byte, ok bool) {
	field, rest := cutField(b)
	if len(field) == 0 {
		return 0, rest, false
	}
	for _, c := range field {
		d := uint64(c - '0')
		if d > 9 || v > (math.MaxUint64-d)/10 {
			return 0, rest, false
		}
		v = v*10 + d
	}
	return v, rest, true
}

// tally combines the counters of devices that come, go, wrap and restart into one
// total that only grows. Names have at most 32 bytes, as names of interfaces and
// disks do.
type tally struct {
	devices []device
	round   uint32
	total   uint64
	primed  bool // one round is complete, so a device that appears later is new
	broken  bool // a counter decreased in this round
}

type device struct {
	name    [32]byte
	n       int
	round   uint32
	counted bool
	known   bool // has a previous value to subtract
	value   [2]uint64
}

// begin starts a round, in which set is called for each device.
func (t *tally) begin() {
	t.round++
	t.broken = false
}

// find returns the device of that name, or nil.
func (t *tally) find(name []byte) *device {
	for i := range t.devices {
		d := &t.devices[i]
		if d.n == len(name) && string(d.name[:d.n]) == string(name) {
			return d
		}
	}
	return nil
}

// add adds a device that is seen for the first time. Names longer than 32 bytes
// are truncated; the kernel assigns none.
func (t *tally) add(name []byte, counted bool) *device {
	d := device{counted: counted}
	d.n = copy(d.name[:], name)
	t.devices = append(t.devices, d)
	return &t.devices[len(t.devices)-1]
}

// set records the two counters of d and adds their increase.
func (t *tally) set(d *device, a, b uint64) {
	d.round = t.round
	if !d.counted {
		return
	}
	switch {
	case d.known:
		t.total += t.gain(d.value[0], a) + t.gain(d.value[1], b)
	case t.primed:
		t.total += a + b // it appeared after the previous round, so all of its bytes are new
	}
	d.value[0], d.value[1], d.known = a, b, true
}

// gain returns the increase of a counter since old. It accounts for a wrap at 32
// bits. Any other decrease marks the round as broken.
func (t *tally) gain(old, now uint64) uint64 {
	if now >= old {
		return now - old
	}
	if old < 1<<32 && old > 1<<31 && now < 1<<31 {
		return now + 1<<32 - old
	}
	t.broken = true
	return 0
}

// end drops the devices not seen in this round and returns how many of those seen
// are counted.
func (t *tally) end() (counted int) {
	kept := t.devices[:0]
	for i := range t.devices {
		if d := &t.devices[i]; d.round == t.round {
			if d.counted {
				counted++
			}
			kept = append(kept, *d)
		}
	}
	t.devices = kept
	t.primed = true
	return counted
}

func cannotParse(what string, line []byte) error {
	const most = 80
	if len(line) > most {
		line = line[:most]
	}
	return fmt.Errorf("cannot parse %s: %w line %q", what, errMalformed, line)
}
