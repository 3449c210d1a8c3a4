package logfile

import (
	"encoding/binary"
	"io/fs"
	"os"
	"time"
)

// Times reads the index of one log file. It is not safe for concurrent use.
type Times struct {
	f    *os.File
	next int64 // index of the record after the current one
	now  Mark
	buf  []byte // records from index next on
}

// Mark is one record of an index: the bytes from Offset on were received at Time.
type Mark struct {
	Offset int64
	Time   time.Time
}

// OpenTimes opens the index of a log file that was opened as path or path.1 and
// has the given stat. It returns nil if there is no index. The methods may be
// called on nil.
func OpenTimes(path string, st fs.FileInfo) *Times {
	for _, p := range []string{path + times, path + Older + times} {
		f, err := os.Open(p)
		if err != nil {
			continue
		}
		if indexOf(f) == inode(st) {
			return &Times{f: f}
		}
		f.Close()
	}
	return nil
}

// Close closes the index.
func (t *Times) Close() {
	if t != nil {
		t.f.Close()
	}
}

// peek returns the next record without advancing.
func (t *Times) peek() (Mark, bool) {
	if len(t.buf) < record {
		t.buf = make([]byte, 256*record)
		n, _ := t.f.ReadAt(t.buf, record*(1+t.next)) // an error means that there is no next record yet
		if t.buf = t.buf[:n]; n < record {
			return Mark{}, false
		}
	}
	return Mark{int64(binary.LittleEndian.Uint64(t.buf)), time.Unix(0, int64(binary.LittleEndian.Uint64(t.buf[8:])))}, true
}

// Next returns the next record; ok is false if there is none yet.
func (t *Times) Next() (m Mark, ok bool) {
	if t == nil {
		return m, false
	}
	if m, ok = t.peek(); ok {
		t.now, t.buf = m, t.buf[record:]
		t.next++
	}
	return m, ok
}

// Reset makes Next and At start again from the beginning.
func (t *Times) Reset() {
	if t != nil {
		*t = Times{f: t.f}
	}
}

// At returns the time of the byte at an offset, zero if unknown. Offsets must not
// decrease from call to call.
func (t *Times) At(offset int64) time.Time {
	if t == nil {
		return time.Time{}
	}
	for {
		if m, ok := t.peek(); !ok || m.Offset > offset {
			return t.now.Time
		}
		t.Next()
	}
}
