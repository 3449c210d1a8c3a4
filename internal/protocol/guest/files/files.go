// Package files is the protocol between a guest agent and its host for the
// workspace, a directory of the host. Each request has one answer. The stream
// that carries them may break and be reconnected at any point.
//
// Requests are stateless. Each names a file by its path below the workspace and
// by the inode that the path had. It therefore means the same to a restarted
// host, and can be repeated if its answer was lost (Request.Again).
//
// Input from a guest is untrusted: lengths are checked before anything is stored,
// and a path that could leave the workspace is rejected.
package files

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// Version is the version of the protocol, which must be the same in guest agent
// and host.
const Version = 1

// Limits of one message.
const (
	MaxData = 128 << 10 // bytes per read or write
	MaxPath = 4095
	MaxName = 255
	maxBody = requestHead + 2*MaxPath + MaxData
)

// Hidden is the prefix of files that a guest removed while it had them open. They
// stay in the workspace until they are closed, and are not listed.
const Hidden = ".lull-removed-"

// Op is an operation.
type Op uint8

// The operations. They act on Request.Path unless stated otherwise.
const (
	Stat     Op = iota + 1 // attributes; does not follow symbolic links
	Change                 // attributes by Request.Mask
	ReadLink               // Answer.Data is the target of a symbolic link
	Symlink                // creates one that points to Request.To
	Mkdir
	Remove    // anything but a directory
	RemoveDir // removes an empty directory
	Rename    // renames to Request.To; with Mask 1 it never replaces a file
	Link      // creates a second name Request.To
	Create    // creates a file
	Open      // checks access: for reading if Mask has 1, for writing if it has 2
	Read      // reads Size bytes at Off
	Write     // writes Data at Off
	Sync      // returns once the file is on the host's disk
	List      // returns entries from the cursor Off on; none at the end
	Space     // returns the file system's space: Attr.Size, Blocks and Ino are blocks, free blocks and free inodes
	Close     // the file is no longer open in the guest
	lastOp    = Close
)

// Bits of Request.Mask for Change.
const (
	SetMode = 1 << iota
	SetSize // to Off
	SetAtime
	SetMtime
	SetAtimeNow
	SetMtimeNow
)

// KeepTarget is the bit of Request.Mask with which Rename never replaces a file.
const KeepTarget = 1

// Bits of Request.Mask for Open.
const (
	ForReading = 1 << iota
	ForWriting
)

// HelloID is the ID of the request by which the guest announces itself on each
// connection, after the requests that it repeats. The answer is ignored.
const HelloID = 0

// Request is one operation on one file.
type Request struct {
	ID    uint64
	Op    Op
	Again bool   // sent before, possibly executed
	Path  string // relative to the workspace root, which is ""
	Ino   uint64 // expected inode; 0 means any
	To    string
	Off   int64
	Size  uint32
	Mode  uint32
	Mask  uint32
	Atime int64 // Unix nanoseconds
	Mtime int64
	Data  []byte
}

// Attr are the attributes of a file.
type Attr struct {
	Ino                 uint64
	Size                int64
	Blocks              int64 // of 512 bytes
	Mode                uint32
	Links               uint32
	Atime, Mtime, Ctime int64 // Unix nanoseconds
}

// Answer answers the request with the same ID. Errno is Linux's, 0 for success.
type Answer struct {
	ID    uint64
	Errno uint32
	Attr  Attr
	Data  []byte
}

// Key precedes every message of a connection. The host chooses it at random and
// sends it over the control channel, so that leftovers of an earlier connection
// are never taken for messages.
type Key [16]byte

const (
	frameHead   = len(Key{}) + 4
	requestHead = 8 + 1 + 1 + 8 + 8 + 4 + 4 + 4 + 8 + 8 + 2 + 2
	answerHead  = 8 + 4 + 8*3 + 4*2 + 8*3
)

// AppendRequest appends q as one message.
func AppendRequest(b []byte, k Key, q *Request) []byte {
	b = head(b, k, requestHead+len(q.Path)+len(q.To)+len(q.Data))
	le := binary.LittleEndian
	b = le.AppendUint64(b, q.ID)
	again := byte(0)
	if q.Again {
		again = 1
	}
	b = append(b, byte(q.Op), again)
	b = le.AppendUint64(b, q.Ino)
	b = le.AppendUint64(b, uint64(q.Off))
	b = le.AppendUint32(b, q.Size)
	b = le.AppendUint32(b, q.Mode)
	b = le.AppendUint32(b, q.Mask)
	b = le.AppendUint64(b, uint64(q.Atime))
	b = le.AppendUint64(b, uint64(q.Mtime))
	b = le.AppendUint16(b, uint16(len(q.Path)))
	b = le.AppendUint16(b, uint16(len(q.To)))
	b = append(b, q.Path...)
	b = append(b, q.To...)
	return append(b, q.Data...)
}

func head(b []byte, k Key, n int) []byte {
	b = append(b, k[:]...)
	return binary.LittleEndian.AppendUint32(b, uint32(n))
}

// AppendAnswer appends a as one message.
func AppendAnswer(b []byte, k Key, a *Answer) []byte {
	b = head(b, k, answerHead+len(a.Data))
	le := binary.LittleEndian
	b = le.AppendUint64(b, a.ID)
	b = le.AppendUint32(b, a.Errno)
	b = le.AppendUint64(b, a.Attr.Ino)
	b = le.AppendUint64(b, uint64(a.Attr.Size))
	b = le.AppendUint64(b, uint64(a.Attr.Blocks))
	b = le.AppendUint32(b, a.Attr.Mode)
	b = le.AppendUint32(b, a.Attr.Links)
	b = le.AppendUint64(b, uint64(a.Attr.Atime))
	b = le.AppendUint64(b, uint64(a.Attr.Mtime))
	b = le.AppendUint64(b, uint64(a.Attr.Ctime))
	return append(b, a.Data...)
}

// cut is the rest of a message's body. Its methods consume fixed-size parts from
// the front; the body must be long enough.
type cut []byte

func (c *cut) u8() byte {
	v := (*c)[0]
	*c = (*c)[1:]
	return v
}

func (c *cut) u16() int {
	v := binary.LittleEndian.Uint16(*c)
	*c = (*c)[2:]
	return int(v)
}

func (c *cut) u32() uint32 {
	v := binary.LittleEndian.Uint32(*c)
	*c = (*c)[4:]
	return v
}

func (c *cut) u64() uint64 {
	v := binary.LittleEndian.Uint64(*c)
	*c = (*c)[8:]
	return v
}

// ParseRequest parses the body of a request. Data of the result shares memory
// with b. After an error the stream must be abandoned.
func ParseRequest(b []byte) (q Request, err error) {
	if len(b) < requestHead {
		return q, fmt.Errorf("cannot read a request of %d bytes: it is too short", len(b))
	}
	c := cut(b)
	q.ID = c.u64()
	q.Op = Op(c.u8())
	again := c.u8()
	q.Ino, q.Off = c.u64(), int64(c.u64())
	q.Size, q.Mode, q.Mask = c.u32(), c.u32(), c.u32()
	q.Atime, q.Mtime = int64(c.u64()), int64(c.u64())
	path, to := c.u16(), c.u16()
	switch {
	case q.Op == 0 || q.Op > lastOp:
		return q, fmt.Errorf("cannot read a request: unknown operation %d", q.Op)
	case again > 1:
		return q, errors.New("cannot read a request: a flag is neither 0 nor 1")
	case path > MaxPath || to > MaxPath || path+to > len(c):
		return q, errors.New("cannot read a request: a path is too long")
	case q.Size > MaxData || len(c)-path-to > MaxData || q.Off < 0:
		return q, errors.New("cannot read a request: a size is out of range")
	}
	q.Again = again == 1
	q.Path, q.To, q.Data = string(c[:path]), string(c[path:path+to]), c[path+to:]
	if err := checkPath(q.Path); err != nil {
		return q, err
	}
	switch q.Op {
	case Rename, Link:
		err = checkPath(q.To)
	case Symlink:
		if q.To == "" || strings.ContainsRune(q.To, 0) {
			err = errors.New("cannot read a request: a symbolic link has no target")
		}
	default:
		if q.To != "" {
			err = errors.New("cannot read a request: this operation takes no second path")
		}
	}
	return q, err
}

// checkPath returns an error unless p clearly names a file below the workspace.
func checkPath(p string) error {
	if p == "" {
		return nil
	}
	for name := range strings.SplitSeq(p, "/") {
		if name == "" || name == "." || name == ".." || len(name) > MaxName || strings.ContainsRune(name, 0) {
			return fmt.Errorf("cannot use the path %.200q: a part of it is empty, \".\", \"..\" or too long", p)
		}
	}
	return nil
}

// ParseAnswer parses the body of an answer. Data of the result shares memory with
// b.
func ParseAnswer(b []byte) (a Answer, err error) {
	if len(b) < answerHead {
		return a, fmt.Errorf("cannot read an answer of %d bytes", len(b))
	}
	c := cut(b)
	a.ID, a.Errno = c.u64(), c.u32()
	a.Attr.Ino, a.Attr.Size, a.Attr.Blocks = c.u64(), int64(c.u64()), int64(c.u64())
	a.Attr.Mode, a.Attr.Links = c.u32(), c.u32()
	a.Attr.Atime, a.Attr.Mtime, a.Attr.Ctime = int64(c.u64()), int64(c.u64()), int64(c.u64())
	a.Data = c
	return a, nil
}

// Entry is a directory entry.
type Entry struct {
	Ino  uint64
	Next int64 // cursor of the entry after it
	Type uint8 // Linux directory entry type
	Name string
}

// AppendEntry appends e to the data of an answer to List.
func AppendEntry(b []byte, e Entry) []byte {
	b = binary.LittleEndian.AppendUint64(b, e.Ino)
	b = binary.LittleEndian.AppendUint64(b, uint64(e.Next))
	return append(append(b, e.Type, byte(len(e.Name))), e.Name...)
}

// ParseEntries parses the data of an answer to List.
func ParseEntries(b []byte) (out []Entry, err error) {
	for c := cut(b); len(c) > 0; {
		if len(c) < 18 || len(c) < 18+int(c[17]) {
			return nil, errors.New("cannot read a directory: an entry is incomplete")
		}
		e := Entry{Ino: c.u64(), Next: int64(c.u64()), Type: c.u8()}
		n := int(c.u8())
		e.Name = string(c[:n])
		c = c[n:]
		out = append(out, e)
	}
	return out, nil
}

// Stream splits input into messages. At the beginning, and after invalid input
// and a Reset, it searches for its key.
type Stream struct {
	key  Key
	buf  []byte
	sync bool // in sync: a message begins at the start of buf
}

// Reset discards buffered input and starts a new connection with key k.
func (s *Stream) Reset(k Key) { s.key, s.buf, s.sync = k, nil, false }

// Feed adds input.
func (s *Stream) Feed(b []byte) { s.buf = append(s.buf, b...) }

// Begun reports whether part of a message has arrived.
func (s *Stream) Begun() bool { return len(s.buf) > 0 && s.sync }

// Next returns the body of the next complete message, or nil and no error if
// there is none yet. After an error for an invalid message, Reset makes the
// stream search for the next one.
func (s *Stream) Next() ([]byte, error) {
	if !s.sync {
		n := bytes.Index(s.buf, s.key[:])
		if n < 0 { // may be the beginning of the key
			s.buf = s.buf[max(0, len(s.buf)-len(s.key)+1):]
			return nil, nil
		}
		s.buf = s.buf[n:]
		s.sync = true
	}
	if len(s.buf) < frameHead {
		return nil, nil
	}
	if !bytes.Equal(s.buf[:len(s.key)], s.key[:]) {
		return nil, errors.New("cannot read a message: invalid header")
	}
	n := int(binary.LittleEndian.Uint32(s.buf[len(s.key):]))
	if n > maxBody {
		return nil, fmt.Errorf("cannot read a message of %d bytes, at most %d", n, maxBody)
	}
	if len(s.buf) < frameHead+n {
		return nil, nil
	}
	body := s.buf[frameHead : frameHead+n]
	s.buf = s.buf[frameHead+n:]
	return body, nil
}
