// Package logfile writes log files that rotate and record when their lines were
// written. A log contains exactly the bytes that were written to it. The times
// are in a separate index file, so a log without an index can still be read.
//
// The index of PATH is PATH.times. It begins with a header with the inode of its
// log, so that it is never taken for the index of another log: a rotation renames
// two files, and can be interrupted by a crash or observed by a reader. Each
// record after the header is an offset in the log, and the time at which the
// bytes from there on were written.
package logfile

import (
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// Suffixes of the files beside a log. The older log has its own index.
const (
	Older = ".1"
	times = ".times"
)

// Precision is the minimum time between two records of an index. The time of a
// line may be too early by this much.
const Precision = 100 * time.Millisecond

// The header and each record of an index are two numbers, little-endian.
const (
	magic  = uint64(0x656d69746c6c756c) // "lulltime"
	record = 16                         // bytes
)

// File is a log to be written. It is not safe for concurrent use.
type File struct {
	path string
	max  int64

	f    *os.File
	size int64

	index   *os.File // nil if the index cannot be written
	indexed int64    // size of the index
	last    time.Time
}

// New returns the log at path. When the log or its index reaches max bytes, the
// log is renamed to path.1, replacing an older one, and a new log begins. A max
// of 0 disables rotation. New opens no file.
func New(path string, max int64) *File { return &File{path: path, max: max} }

// Open opens the files if they are not open. It creates the log if it is missing.
func (l *File) Open() error {
	if l.f != nil {
		return nil
	}
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	l.f, l.size = f, st.Size()
	l.openIndex(st)
	return nil
}

// IsOpen reports whether the files are open.
func (l *File) IsOpen() bool { return l.f != nil }

// Close closes the files. The next write opens them again.
func (l *File) Close() error {
	if l.f == nil {
		return nil
	}
	err := l.f.Close()
	l.f = nil
	l.dropIndex()
	return err
}

// Add appends bytes that were received at a time. After an error, bytes before
// the failed ones may have been written.
func (l *File) Add(b []byte, at time.Time) error {
	for len(b) > 0 {
		if err := l.Open(); err != nil {
			return err
		}
		if l.max > 0 && l.size > 0 && (l.size >= l.max || l.indexed >= l.max) {
			if err := l.rotate(); err != nil {
				return err
			}
			continue
		}
		n := len(b)
		if l.max > 0 {
			n = int(min(int64(n), l.max-l.size))
		}
		l.mark(at) // before the bytes, so that their reader finds the time
		wrote, err := l.f.Write(b[:n])
		l.size += int64(wrote)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func (l *File) rotate() error {
	err := errors.Join(l.Close(), os.Rename(l.path, l.path+Older))
	if err == nil {
		_ = l.moveIndex() // if it fails, opening the next log repeats it
	}
	return err
}

// moveIndex completes a rotation by renaming the index.
func (l *File) moveIndex() error { return os.Rename(l.path+times, l.path+Older+times) }

// openIndex opens the index of the log whose file is st. If that fails, times are
// not recorded, but the log is written.
func (l *File) openIndex(st fs.FileInfo) {
	open := func() (*os.File, error) { return os.OpenFile(l.path+times, os.O_RDWR|os.O_APPEND|os.O_CREATE, 0o600) }
	f, err := open()
	if err != nil {
		return
	}
	of := indexOf(f)
	if of != 0 && of != inode(st) {
		if old, err := os.Stat(l.path + Older); err == nil && of == inode(old) && l.moveIndex() == nil { // a rotation was interrupted
			f.Close()
			if f, err = open(); err != nil {
				return
			}
		}
		of = 0
	}
	l.index, l.last = f, time.Time{}
	if of == 0 {
		if l.index.Truncate(0) != nil || l.put(magic, inode(st)) != nil {
			l.dropIndex()
			return
		}
		l.indexed = record
		return
	}
	end, err := f.Seek(0, io.SeekEnd)
	l.indexed = end / record * record
	if err != nil || end != l.indexed && f.Truncate(l.indexed) != nil { // cut off an incomplete record
		l.dropIndex()
	}
}

func (l *File) dropIndex() {
	if l.index != nil {
		l.index.Close() // errors were already found by the writes
		l.index, l.indexed = nil, 0
	}
}

// mark records that the following bytes were received at a time.
func (l *File) mark(at time.Time) {
	if d := at.Sub(l.last); l.index == nil || d >= 0 && d < Precision {
		return
	}
	if l.put(uint64(l.size), uint64(at.UnixNano())) != nil {
		l.dropIndex() // opened again with the next log
		return
	}
	l.indexed += record
	l.last = at
}

func (l *File) put(a, b uint64) error {
	var r [record]byte
	binary.LittleEndian.PutUint64(r[:], a)
	binary.LittleEndian.PutUint64(r[8:], b)
	_, err := l.index.Write(r[:])
	return err
}

// indexOf returns the inode of the log to which the index f belongs; 0 if f is
// not an index.
func indexOf(f *os.File) uint64 {
	var r [record]byte
	if _, err := f.ReadAt(r[:], 0); err != nil || binary.LittleEndian.Uint64(r[:]) != magic {
		return 0
	}
	return binary.LittleEndian.Uint64(r[8:])
}

func inode(st fs.FileInfo) uint64 {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return s.Ino
	}
	return 0
}

// Remove deletes a log and the files beside it.
func Remove(path string) error {
	var errs []error
	for _, p := range []string{path, path + times, path + Older, path + Older + times} {
		if err := os.Remove(p); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
