// Package files is what the harness of a guest asks its host about the
// workspace, a directory of the host, and how both say it: one request and one
// answer each, over a stream that may be cut and connected again anywhere.
//
// No request rests on an earlier one. It names a file by its path below the
// workspace and by the inode that the path had, so that it means the same to a
// host that was started again since, and one that was answered and whose answer
// got lost may be sent again (Request.Again).
//
// What comes from a guest is hostile: lengths are bounded before anything is
// kept, and a path that could leave the workspace is no request at all.
package files

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// Version of these messages; a harness and a host of different ones do not
// speak with each other.
const Version = 1

// Bounds of one message.
const (
	MaxData = 128 << 10 // bytes that are read or written at once
	MaxPath = 4095
	MaxName = 255
	maxBody = requestHead + 2*MaxPath + MaxData
)

// Hidden begins the names of files that a guest removed while it had them open.
// They lie in the workspace itself until they are closed, and no listing has
// them.
const Hidden = ".lull-removed-"

// Op is what is asked.
type Op uint8

// The operations. A path is Request.Path unless another is named.
const (
	Stat     Op = iota + 1 // attributes, of a symbolic link itself
	Change                 // attributes by Request.Mask
	ReadLink               // Answer.Data is where a symbolic link points
	Symlink                // makes one that points to Request.To
	Mkdir
	Remove    // a file, or what is no directory
	RemoveDir // an empty directory
	Rename    // to the path Request.To; Mask 1 keeps what is there
	Link      // a second name Request.To
	Create    // a file that is not there
	Open      // whether it may be opened: Mask 1 for reading, 2 for writing
	Read      // Size bytes at Off
	Write     // Data at Off
	Sync      // returns once the file is on the host's disk
	List      // entries from the cursor Off on; none when it is through
	Space     // of the file system: Attr.Size, Blocks and Ino are its blocks, free ones and free inodes
	Close     // nobody in the guest has it open any more
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

// KeepTarget is the bit of Request.Mask with which Rename replaces nothing.
const KeepTarget = 1

// Bits of Request.Mask for Open.
const (
	ForReading = 1 << iota
	ForWriting
)

// Request asks one thing.
type Request struct {
	ID    uint64
	Op    Op
	Again bool   // it was sent before, and may have been done
	Path  string // below the workspace, which itself is ""
	Ino   uint64 // that the path had; 0 is any
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

// Answer answers the request of the same ID. Errno is Linux's, 0 for success.
type Answer struct {
	ID    uint64
	Errno uint32
	Attr  Attr
	Data  []byte
}

// Key begins every message of one connection. It is drawn by the host at
// random and told over the control channel, so that what is left of an earlier
// connection is never taken for a message of this one.
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

// cut takes fixed parts from the front of a body that is long enough.
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

// ParseRequest reads the body of a request. Data is part of b. A body that is
// no request is an error, after which the stream is not worth reading.
func ParseRequest(b []byte) (q Request, err error) {
	if len(b) < requestHead {
		return q, fmt.Errorf("cannot read a request of %d bytes", len(b))
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
		return q, fmt.Errorf("cannot read a request: there is no operation %d", q.Op)
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
			err = errors.New("cannot read a request: a symbolic link points nowhere")
		}
	default:
		if q.To != "" {
			err = errors.New("cannot read a request: it has a second path for nothing")
		}
	}
	return q, err
}

// checkPath refuses a path that is not plainly below the workspace.
func checkPath(p string) error {
	if p == "" {
		return nil
	}
	for name := range strings.SplitSeq(p, "/") {
		if name == "" || name == "." || name == ".." || len(name) > MaxName || strings.ContainsRune(name, 0) {
			return fmt.Errorf("cannot use the path %.200q: it is not plain", p)
		}
	}
	return nil
}

// ParseAnswer reads the body of an answer. Data is part of b.
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

// Entry is one name of a directory.
type Entry struct {
	Ino  uint64
	Next int64 // the cursor behind it
	Type uint8 // as in a directory entry of Linux
	Name string
}

// AppendEntry appends e to the data of an answer to List.
func AppendEntry(b []byte, e Entry) []byte {
	b = binary.LittleEndian.AppendUint64(b, e.Ino)
	b = binary.LittleEndian.AppendUint64(b, uint64(e.Next))
	return append(append(b, e.Type, byte(len(e.Name))), e.Name...)
}

// ParseEntries reads the data of an answer to List.
func ParseEntries(b []byte) (out []Entry, err error) {
	for c := cut(b); len(c) > 0; {
		if len(c) < 18 || len(c) < 18+int(c[17]) {
			return nil, errors.New("cannot read a directory: an entry is cut")
		}
		e := Entry{Ino: c.u64(), Next: int64(c.u64()), Type: c.u8()}
		n := int(c.u8())
		e.Name = string(c[:n])
		c = c[n:]
		out = append(out, e)
	}
	return out, nil
}

// Stream cuts what arrives into messages. It begins, and goes on after anything
// that is no message, by looking for its key.
type Stream struct {
	key  Key
	buf  []byte
	sync bool // the last message ended where the next begins
}

// Reset begins a new connection.
func (s *Stream) Reset(k Key) { s.key, s.buf, s.sync = k, nil, false }

// Feed adds what has arrived.
func (s *Stream) Feed(b []byte) { s.buf = append(s.buf, b...) }

// Begun says whether part of a message is here.
func (s *Stream) Begun() bool { return len(s.buf) > 0 && s.sync }

// Next is the body of the next whole message; nil without an error when there is
// none yet. A message that cannot be one is an error, and then Reset looks for
// the next.
func (s *Stream) Next() ([]byte, error) {
	if !s.sync {
		n := bytes.Index(s.buf, s.key[:])
		if n < 0 { // the key may have begun
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
		return nil, errors.New("cannot read a message: it does not begin as one")
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
