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

// First and Next bound the numbers of the records that are kept: First is that
// of the oldest, Next that of the one to be appended next. They are equal when
// there is none.
func (l *Log) First() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.files) == 0 {
		return l.next
	}
	return l.files[0].first
}

// Next is the number that the next record gets.
func (l *Log) Next() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next
}

// Size is the number of bytes of all files and of what waits to be written.
func (l *Log) Size() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	size := int64(len(l.buf))
	for _, f := range l.files {
		size += f.size
	}
	return size
}

// From says where a reading begins: at a record's number and at a time. Both
// bounds hold; zero values do not bound.
type From struct {
	Number uint64
	Time   time.Time
}

// Records reads what was appended before the call, oldest first. Where a file
// cannot be read a *Damage comes instead of the records that were there, and
// the reading continues; another error ends it. Files that the ring drops
// meanwhile are passed over: compare First.
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

// snapshot lists the files that may hold records from a point on, with the
// sizes they have now.
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

// visitFile yields the records and the damage of one file, records missing at
// its end included. next is the number of the first record after it.
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
		err = nil // it has shrunk: what is missing shows as damage
	}
	return data[:n], err
}
