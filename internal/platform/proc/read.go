package proc

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrGone means that a file does not exist. For a path below a pid, it means that
// the process has ended.
var ErrGone = errors.New("process or file is gone")

// maxFile bounds one file in bytes. The largest legitimate file here is the
// environ of a process with a very large environment.
const maxFile = 16 << 20

// Error is a failed read of one file.
type Error struct {
	Path string
	Err  error // a unix.Errno, or why the content was rejected
}

// Error implements error.
func (e *Error) Error() string { return "cannot read " + e.Path + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is reports whether target is ErrGone and the error is ENOENT (no such pid) or
// ESRCH (the process ended while its file was open).
func (e *Error) Is(target error) bool {
	return target == ErrGone && (e.Err == unix.ENOENT || e.Err == unix.ESRCH)
}

// FS reads one mounted proc file system.
type FS struct {
	root string
	tick time.Duration
}

// Live returns an FS that reads /proc.
func Live() *FS { return At("/proc") }

// At returns an FS that reads below root, which must have the layout of /proc
// (fixtures, another mount).
func At(root string) *FS {
	return &FS{root: strings.TrimRight(root, "/"), tick: clockTick()}
}

// clockTick returns the length of one tick of the times in stat. The kernel
// passes its tick rate to every program in the auxiliary vector. All present
// Linux machines use 100 per second.
func clockTick() time.Duration {
	const (
		atClockTicks = 17
		usual        = 100
	)
	vector, err := unix.Auxv()
	if err == nil {
		for _, pair := range vector {
			if uint64(pair[0]) == atClockTicks && pair[1] > 0 {
				return time.Second / time.Duration(pair[1])
			}
		}
	}
	return time.Second / usual
}

// Tick returns the length of one clock tick of Stat's times.
func (f *FS) Tick() time.Duration { return f.tick }

// scratch holds the path and the content of one read.
type scratch struct {
	path []byte
	buf  []byte
}

var scratches = sync.Pool{New: func() any {
	return &scratch{path: make([]byte, 0, 128), buf: make([]byte, 4096)}
}}

func (f *FS) scratch() *scratch {
	s := scratches.Get().(*scratch)
	s.path = append(s.path[:0], f.root...)
	return s
}

// free releases s. Nothing that points into s may be used afterwards.
func (s *scratch) free() {
	if len(s.buf) <= 1<<20 {
		scratches.Put(s)
	}
}

// str and num append to the path.
func (s *scratch) str(x string) *scratch { s.path = append(s.path, x...); return s }

func (s *scratch) num(n int) *scratch {
	s.path = append(s.path, '/')
	s.path = appendInt(s.path, n)
	return s
}

func appendInt(b []byte, n int) []byte {
	if n < 0 {
		b, n = append(b, '-'), -n
	}
	var digits [20]byte
	i := len(digits)
	for {
		i--
		digits[i] = byte('0' + n%10)
		if n /= 10; n == 0 {
			return append(b, digits[i:]...)
		}
	}
}

func (s *scratch) fail(err error) error { return &Error{Path: string(s.path), Err: err} }

// open opens the path without converting it to a string.
func (s *scratch) open(flags int) (int, error) {
	s.path = append(s.path, 0)
	at := unix.AT_FDCWD
	defer func() { s.path = s.path[:len(s.path)-1] }()
	for {
		fd, _, errno := unix.Syscall6(unix.SYS_OPENAT, uintptr(at),
			uintptr(unsafe.Pointer(&s.path[0])), uintptr(flags|unix.O_CLOEXEC), 0, 0, 0)
		if errno == 0 {
			return int(fd), nil
		}
		if errno != unix.EINTR {
			return -1, s.fail(errno)
		}
	}
}

// read reads the whole file at the path. The result is valid until s is freed.
func (s *scratch) read() ([]byte, error) {
	fd, err := s.open(unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	b, err := slurp(fd, &s.buf)
	if err != nil {
		return nil, s.fail(err)
	}
	return b, nil
}

// slurp reads fd from its beginning to its end into *buf, growing the buffer up
// to maxFile. Files in /proc have no size, so only an empty read shows the end.
func slurp(fd int, buf *[]byte) ([]byte, error) {
	n := 0
	for {
		if n == len(*buf) {
			if n >= maxFile {
				return nil, fmt.Errorf("the file is larger than %d bytes", maxFile)
			}
			grown := make([]byte, 2*n)
			copy(grown, *buf)
			*buf = grown
		}
		m, err := unix.Pread(fd, (*buf)[n:], int64(n))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return nil, err
		case m == 0:
			return (*buf)[:n], nil
		default:
			n += m
		}
	}
}

// numbers calls each for every entry of the directory at the path whose name is a
// number (pids, tids, fds). It stops when each returns false.
func (s *scratch) numbers(each func(n int) bool) error {
	fd, err := s.open(unix.O_RDONLY | unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for {
		n, err := unix.Getdents(fd, s.buf)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return s.fail(err)
		case n <= 0:
			return nil
		default:
			if !eachNumber(s.buf[:n], each) {
				return nil
			}
		}
	}
}

// eachNumber parses a block of struct linux_dirent64.
func eachNumber(b []byte, each func(n int) bool) bool {
	const (
		lengthAt = 16
		nameAt   = 19
	)
	for len(b) > nameAt {
		size := int(b[lengthAt]) | int(b[lengthAt+1])<<8 // all supported machines are little endian
		if size <= nameAt || size > len(b) {
			return true
		}
		name := b[nameAt:size]
		b = b[size:]
		n, rest, ok := number(name)
		if ok && len(rest) > 0 && rest[0] == 0 && n <= 1<<31 && !each(int(n)) {
			return false
		}
	}
	return true
}

// File is an open file of /proc that is read repeatedly, each time from its
// beginning and into the same buffer. Create it with FS.File.
type File struct {
	path string
	fd   int
	buf  []byte
}

// File opens name (such as "meminfo" or "net/dev") for repeated reading.
func (f *FS) File(name string) (*File, error) {
	s := f.scratch().str("/").str(name)
	defer s.free()
	fd, err := s.open(unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	return &File{path: string(s.path), fd: fd, buf: make([]byte, 4096)}, nil
}

// Read returns the whole present content, valid until the next Read or Close.
func (f *File) Read() ([]byte, error) {
	b, err := slurp(f.fd, &f.buf)
	if err != nil {
		return nil, &Error{Path: f.path, Err: err}
	}
	return b, nil
}

// Close closes the file.
func (f *File) Close() error { return unix.Close(f.fd) }

// number parses the decimal number at the start of b. ok is false if there is
// none or it overflows.
func number(b []byte) (n uint64, rest []byte, ok bool) {
	i := 0
	for i < len(b) && '0' <= b[i] && b[i] <= '9' {
		d := uint64(b[i] - '0')
		if n > (1<<64-1-d)/10 {
			return 0, b, false
		}
		n = n*10 + d
		i++
	}
	return n, b[i:], i > 0
}

// signed parses a decimal number with an optional minus sign.
func signed(b []byte) (n int64, rest []byte, ok bool) {
	minus := len(b) > 0 && b[0] == '-'
	if minus {
		b = b[1:]
	}
	u, rest, ok := number(b)
	if !ok || u > 1<<63-1 {
		return 0, rest, false
	}
	if minus {
		return -int64(u), rest, true
	}
	return int64(u), rest, true
}

// field returns the next word of b and the rest. Words are separated by spaces,
// tabs and newlines.
func field(b []byte) (word, rest []byte) {
	i := 0
	for i < len(b) && blank(b[i]) {
		i++
	}
	j := i
	for j < len(b) && !blank(b[j]) {
		j++
	}
	return b[i:j], b[j:]
}

func blank(c byte) bool { return c == ' ' || c == '\t' || c == '\n' }
