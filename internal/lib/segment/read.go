package segment

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"math"
	"os"
	"time"
)

// First returns the number of the oldest record. If there is none, it equals
// Next.
func (l *Log) First() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.files) == 0 {
		return l.next
	}
	return l.files[0].first
}

// Next returns the number of the next record.
func (l *Log) Next() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next
}

// Size returns the size of all files and of the buffer, in bytes.
func (l *Log) Size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	size := int64(len(l.buf))
	for _, f := range l.files {
		size += f.size
	}
	return size
}

// From is where to begin reading: at a record number and at a time. Both apply;
// zero values do not restrict.
type From struct {
	Number uint64
	Time   time.Time
}

// Records yields the records appended before the call, oldest first. If part of a
// file cannot be read, it yields a *Damage in place of the records and continues.
// Any other error ends it. Files that are removed in the meantime are skipped
// without an error; compare First.
func (l *Log) Records(from From) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		files, err := l.snapshot(from)
		if err != nil {
			yield(Record{}, fmt.Errorf("cannot read the log %s: %w", l.dir, err))
			return
		}
		for i, f := range files {
			data, err := readFile(f.path, f.size)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				yield(Record{}, fmt.Errorf("cannot read the log %s: %w", l.dir, err))
				return
			}
			next := uint64(math.MaxUint64)
			if i+1 < len(files) {
				next = files[i+1].first
			}
			if !visitFile(f, data, next, from, yield) {
				return
			}
		}
	}
}

// snapshot lists the files that may contain records from a position on, with
// their present sizes.
func (l *Log) snapshot(from From) ([]file, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.active != nil {
		if err := l.flush(); err != nil {
			return nil, err
		}
	}
	var files []file
	for i, f := range l.files {
		if i+1 < len(l.files) {
			after := l.files[i+1]
			early := !from.Time.IsZero() && after.headErr == nil && after.head.prior < from.Time.UnixNano()
			if early || after.first <= from.Number {
				continue
			}
		}
		files = append(files, *f)
	}
	return files, nil
}

// visitFile yields the records and the damage of one file. next is the number of
// the first record of the following file, so that records missing at the end are
// reported.
func visitFile(f file, data []byte, next uint64, from From, yield func(Record, error) bool) bool {
	on := true
	c := scan(f.path, data, func(r Record, d *Damage) bool {
		switch {
		case d != nil:
			on = yield(Record{}, d)
		case r.Number >= from.Number && (from.Time.IsZero() || !r.Time.Before(from.Time)):
			on = yield(r, nil)
		}
		return on
	})
	if !on {
		return false
	}
	begin := max(f.first, c.last+1)
	if next == math.MaxUint64 || begin >= next || c.good < int64(len(data)) {
		return true
	}
	return yield(Record{}, &Damage{File: f.path, Offset: int64(len(data)), Lost: next - begin, What: "the file ends before its last record"})
}

// readFile reads the first size bytes of a file.
func readFile(path string, size int64) ([]byte, error) {
	if size > MaxFile+recordSize+MaxRecord {
		return nil, fmt.Errorf("%s has %d bytes, more than any segment file: move it away", path, size)
	}
	in, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	data := make([]byte, size)
	n, err := io.ReadFull(in, data)
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		err = nil // the file has shrunk; the missing part is reported as damage
	}
	return data[:n], err
}
