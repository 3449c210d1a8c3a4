// Package segment stores records in append-only files with checksums. A Log is a
// bounded ring of such files. WriteFile and sealed files are single documents,
// written completely or not at all.
//
// A Log guarantees that records are on disk when Sync has returned; that an
// incomplete record at the end, left by a crash, is cut off and reported by the
// next Open; that other damage is reported to readers with file and offset, and
// that reading continues after it; that a record is never returned modified; and
// that the files together stay within their limit, because the oldest are removed
// first. Only one process at a time can open a Log.
//
// It has no indexes, no compression and no deletion of single records. It never
// reads the clock: the writer provides the time of each record, and times need
// not increase.
package segment

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"time"
)

// MaxRecord is the largest payload, in bytes. MaxFile is the largest segment
// file that is read.
const (
	MaxRecord = 1 << 20
	MaxFile   = 64 << 20
)

// Record is one entry of a log.
type Record struct {
	Number  uint64 // 1 for the first, then increasing by one
	Time    time.Time
	Payload []byte // shares memory with other payloads; clone it to keep it
}

// Damage is a part of a file without a valid record. It is an error, yielded
// between the records before and after it.
type Damage struct {
	File   string
	Offset int64  // offset of its first byte
	Length int64  // in bytes
	Lost   uint64 // number of records missing, judged by the numbers around it; 0 if unknown or none
	Torn   bool   // it was at the end of the newest file and was cut off
	What   string // the first fault
}

func (d *Damage) Error() string {
	if d.Torn {
		return fmt.Sprintf("cannot read %s from byte %d: %s; the last write was cut short and its %d bytes were removed", d.File, d.Offset, d.What, d.Length)
	}
	return fmt.Sprintf("cannot read %d bytes of %s from byte %d: %s; the records around them are intact, restore the file from a backup if those are needed",
		d.Length, d.File, d.Offset, d.What)
}

// A file has a header of 40 bytes followed by records, all little endian. The
// header contains a magic number, the number of the first record, its time, the
// latest time of all records in earlier files, zeros, and a checksum. A record
// contains the length of the payload, a checksum of everything else in the
// record, its number, its time, and the payload.
const (
	magic      = "lullseg1"
	headSize   = 40
	recordSize = 24
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// head is a file's header.
type head struct {
	first uint64
	begun int64 // time of the first record, Unix nanoseconds
	prior int64 // latest time in earlier files; math.MinInt64 for none
}

func (h head) encode() []byte {
	b := make([]byte, headSize)
	copy(b, magic)
	binary.LittleEndian.PutUint64(b[8:], h.first)
	binary.LittleEndian.PutUint64(b[16:], uint64(h.begun))
	binary.LittleEndian.PutUint64(b[24:], uint64(h.prior))
	binary.LittleEndian.PutUint32(b[36:], crc32.Checksum(b[:36], castagnoli))
	return b
}

var (
	errShortHead = errors.New("the head is cut short")
	errMagic     = errors.New("not a segment file, or of an unknown version")
	errHeadSum   = errors.New("the checksum of the head is wrong")
)

func decodeHead(b []byte) (head, error) {
	switch {
	case len(b) < headSize:
		return head{}, errShortHead
	case string(b[:8]) != magic:
		return head{}, errMagic
	case binary.LittleEndian.Uint32(b[36:]) != crc32.Checksum(b[:36], castagnoli):
		return head{}, errHeadSum
	}
	return head{binary.LittleEndian.Uint64(b[8:]), int64(binary.LittleEndian.Uint64(b[16:])), int64(binary.LittleEndian.Uint64(b[24:]))}, nil
}

// appendRecord encodes a record at the end of b.
func appendRecord(b []byte, number uint64, at time.Time, payload []byte) []byte {
	begin := len(b)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	b = append(b, 0, 0, 0, 0)
	b = binary.LittleEndian.AppendUint64(b, number)
	b = binary.LittleEndian.AppendUint64(b, uint64(at.UnixNano()))
	b = append(b, payload...)
	binary.LittleEndian.PutUint32(b[begin+4:], sum(b[begin:]))
	return b
}

// sum returns the checksum of an encoded record, excluding its own field.
func sum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:4], castagnoli), castagnoli, b[8:])
}

var (
	errShort    = errors.New("a record is incomplete")
	errTooLong  = errors.New("a record is longer than the maximum")
	errChecksum = errors.New("the checksum of a record is wrong")
	errMissing  = errors.New("records are missing")
)

// decodeRecord returns the record at the start of b and its encoded size in
// bytes.
func decodeRecord(b []byte) (Record, int, error) {
	if len(b) < recordSize {
		return Record{}, 0, errShort
	}
	n := int(binary.LittleEndian.Uint32(b))
	if n > MaxRecord {
		return Record{}, 0, errTooLong
	}
	size := recordSize + n
	if len(b) < size {
		return Record{}, 0, errShort
	}
	if binary.LittleEndian.Uint32(b[4:]) != sum(b[:size]) {
		return Record{}, 0, errChecksum
	}
	return Record{
		Number:  binary.LittleEndian.Uint64(b[8:]),
		Time:    time.Unix(0, int64(binary.LittleEndian.Uint64(b[16:]))).UTC(),
		Payload: b[recordSize:size:size],
	}, size, nil
}

// contents summarizes what can be read of a file.
type contents struct {
	head    head
	headErr error
	records int
	last    uint64 // number of the last record; 0 for none
	latest  int64  // latest time of a record; math.MinInt64 for none
	damaged bool   // a part other than the tail is unreadable
	good    int64  // bytes up to the end of the last valid record
}

// scan parses the bytes of a file. It calls visit, unless nil, for every record
// and every damaged part, in order, until visit returns false.
func scan(name string, data []byte, visit func(Record, *Damage) bool) contents {
	c := contents{latest: math.MinInt64}
	var next uint64
	pos := 0
	if c.head, c.headErr = decodeHead(data); c.headErr == nil {
		next = c.head.first
		pos, c.good = headSize, headSize
	}
	cause := c.headErr
	bad := -1 // start of the damaged part being skipped
	if c.headErr != nil {
		bad = 0
	}
	effort := 8*len(data) + 4*MaxRecord // bytes that may still be hashed while searching for the next record
	for pos < len(data) {
		r, size, err := decodeRecord(data[pos:])
		if err == nil && r.Number < next {
			err = fmt.Errorf("a record has the number %d, want %d", r.Number, next)
		}
		if err != nil {
			if bad < 0 {
				bad, cause = pos, err
			}
			if err == errChecksum {
				effort -= recordSize + int(binary.LittleEndian.Uint32(data[pos:]))
			}
			if effort < 0 {
				break
			}
			pos++
			continue
		}
		if bad < 0 && r.Number > next {
			bad, cause = pos, errMissing
		}
		if bad >= 0 {
			c.damaged = true
			d := &Damage{File: name, Offset: int64(bad), Length: int64(pos - bad), What: cause.Error()}
			if next != 0 {
				d.Lost = r.Number - next
			}
			if bad = -1; visit != nil && !visit(Record{}, d) {
				return c
			}
		}
		pos += size
		next, c.last, c.good = r.Number+1, r.Number, int64(pos)
		c.records++
		c.latest = max(c.latest, r.Time.UnixNano())
		if visit != nil && !visit(r, nil) {
			return c
		}
	}
	if bad >= 0 && bad < len(data) && visit != nil {
		visit(Record{}, &Damage{File: name, Offset: int64(bad), Length: int64(len(data) - bad), What: cause.Error()})
	}
	// The search was given up, so valid records may follow.
	c.damaged = c.damaged || effort < 0
	return c
}
