package cml

import (
	"errors"
	"fmt"
	"io"
)

const (
	// maxDepth bounds the nesting of one value. It is far above anything CML
	// writes; a deeper value makes the whole answer unreadable.
	maxDepth = 1024

	// maxShort is the maximum raw length, in bytes between the quotes, of a
	// string that is read as a key, a category or a timestamp. Longer strings
	// are checked for syntax and skipped.
	maxShort = 256

	// readAhead is the number of bytes that must be in the buffer before a short
	// string is read, so that it is in one piece.
	readAhead = maxShort + 16

	// minRead is the free space below which a buffer of the usual size is
	// compacted before a read.
	minRead = 8 << 10

	// maxEmptyReads bounds how often a reader may return nothing and no error.
	maxEmptyReads = 100
)

// errTruncated means that the stream ended inside the array.
var errTruncated = errors.New("the array ends before its closing bracket")

// errTooLarge means that the stream exceeded its size limit.
var errTooLarge = errors.New("the answer is larger than the limit")

// syntaxError is a fault of JSON syntax at a byte offset of the stream.
type syntaxError struct {
	Offset int64
	Fault  string
}

func (e *syntaxError) Error() string {
	return fmt.Sprintf("%s at byte %d", e.Fault, e.Offset)
}

// readError is a failure of the underlying reader, as opposed to a bad answer.
type readError struct{ err error }

func (e *readError) Error() string { return "cannot read the answer: " + e.err.Error() }
func (e *readError) Unwrap() error { return e.err }

// scanner checks the syntax of JSON text in a fixed buffer without decoding it
// (RFC 8259; like encoding/json it accepts invalid UTF-8 and lone surrogates
// inside strings). It can keep the bytes from a chosen position on across
// refills, up to a limit.
//
// The comment of each method says where the read position must be. Errors are
// nil, a *syntaxError, a *readError, errTruncated or errTooLarge.
type scanner struct {
	src   io.Reader
	buf   []byte
	pos   int   // next byte to read
	end   int   // end of the valid bytes
	hold  int   // first byte that must survive a refill, or -1
	limit int   // maximum number of held bytes; more are dropped
	room  int   // compact the buffer before a read if it has less free space than this
	base  int64 // offset in the stream of buf[0]
	max   int64 // size limit of the stream
	err   error // why no more bytes follow

	// objects records which of the open containers are objects: bit d is set if
	// the one at depth d is.
	objects [maxDepth / 64]uint64
}

// reset starts over on src. buf must be longer than limit + readAhead, the
// largest number of bytes ever held.
func (s *scanner) reset(src io.Reader, buf []byte, limit int, max int64) {
	s.src, s.buf, s.pos, s.end, s.base, s.err = src, buf, 0, 0, 0, nil
	s.hold, s.limit, s.max = -1, limit, max
	s.room = min(minRead, (len(buf)-limit)/4)
}

// resetBytes starts over on text in memory.
func (s *scanner) resetBytes(text []byte) {
	s.src, s.buf, s.pos, s.end, s.base, s.err = nil, text, 0, len(text), 0, io.EOF
	s.hold, s.limit, s.max = -1, len(text), int64(len(text))
}

// offset returns the stream offset of the read position.
func (s *scanner) offset() int64 { return s.base + int64(s.pos) }

// more makes at least one more byte available after s.end. It moves held bytes
// to the front of the buffer when space is short.
func (s *scanner) more() bool {
	if s.err != nil {
		return false
	}
	if len(s.buf)-s.end < s.room {
		s.compact()
	}
	for range maxEmptyReads {
		n, err := s.src.Read(s.buf[s.end:])
		s.end += n
		if s.base+int64(s.end) > s.max {
			s.err = errTooLarge
			return false
		}
		if err != nil {
			s.err = err
		}
		if n > 0 {
			return true
		}
		if err != nil {
			return false
		}
	}
	s.err = io.ErrNoProgress
	return false
}

func (s *scanner) compact() {
	keep := s.pos
	if s.hold >= 0 {
		// The held bytes end at the read position; bytes after it may belong to
		// the next value.
		if s.pos-s.hold > s.limit {
			s.hold = -1
		} else {
			keep = s.hold
		}
	}
	if keep == 0 {
		return
	}
	copy(s.buf, s.buf[keep:s.end])
	s.pos -= keep
	s.end -= keep
	s.base += int64(keep)
	if s.hold >= 0 {
		s.hold -= keep
	}
}

// ensure tries to have n bytes in the buffer from the read position on.
func (s *scanner) ensure(n int) {
	for s.end-s.pos < n && s.more() {
	}
}

// stop returns the error for a stream that ends where more bytes are needed.
func (s *scanner) stop() error {
	switch {
	case s.err == io.EOF:
		return errTruncated
	case s.err == errTooLarge:
		return errTooLarge
	default:
		return &readError{s.err}
	}
}

func (s *scanner) syntax(format string, args ...any) error {
	return &syntaxError{Offset: s.offset(), Fault: fmt.Sprintf(format, args...)}
}

// next skips white space and returns the next byte without consuming it.
func (s *scanner) next() (byte, error) {
	for {
		for s.pos < s.end {
			c := s.buf[s.pos]
			if c > ' ' {
				return c, nil
			}
			if c != ' ' && c != '\n' && c != '\t' && c != '\r' {
				return 0, s.syntax("unexpected byte 0x%02x", c)
			}
			s.pos++
		}
		if !s.more() {
			return 0, s.stop()
		}
	}
}

// peek returns the byte at the read position.
func (s *scanner) peek() (byte, error) {
	if s.pos < s.end || s.more() {
		return s.buf[s.pos], nil
	}
	return 0, s.stop()
}

// value consumes one value whose first byte is at the read position.
func (s *scanner) value() error {
	depth := 0
	for {
		c, err := s.next()
		if err != nil {
			return err
		}
		opened := false
		switch c {
		case '"':
			s.pos++
			err = s.str()
		case '{', '[':
			if depth == maxDepth {
				return s.syntax("value nested deeper than %d", maxDepth)
			}
			s.pos++
			word, bit := depth>>6, uint64(1)<<(depth&63)
			if c == '{' {
				s.objects[word] |= bit
			} else {
				s.objects[word] &^= bit
			}
			depth++
			opened = true
		case 't':
			err = s.literal("true")
		case 'f':
			err = s.literal("false")
		case 'n':
			err = s.literal("null")
		default:
			err = s.number(c)
		}
		if err != nil {
			return err
		}
		if depth == 0 {
			return nil
		}
		depth, err = s.follow(depth, opened)
		if err != nil || depth == 0 {
			return err
		}
	}
}

// follow consumes what stands between two values inside a container: closing
// brackets, a comma, a key with its colon. It returns the depth at which the next
// value starts, 0 if the outermost value is complete.
func (s *scanner) follow(depth int, opened bool) (int, error) {
	for depth > 0 {
		object := s.objects[(depth-1)>>6]>>((depth-1)&63)&1 == 1
		c, err := s.next()
		if err != nil {
			return 0, err
		}
		switch {
		case object && c == '}', !object && c == ']':
			s.pos++
			depth--
			opened = false
			continue
		case opened:
		case c == ',':
			s.pos++
		default:
			return 0, s.syntax("unexpected %q after a value", c)
		}
		if object {
			return depth, s.key()
		}
		return depth, nil
	}
	return 0, nil
}

// key consumes white space, a key and its colon.
func (s *scanner) key() error {
	c, err := s.next()
	if err != nil {
		return err
	}
	if c != '"' {
		return s.syntax("unexpected %q, want a key", c)
	}
	s.pos++
	if err := s.str(); err != nil {
		return err
	}
	return s.colon()
}

func (s *scanner) colon() error {
	c, err := s.next()
	if err != nil {
		return err
	}
	if c != ':' {
		return s.syntax("unexpected %q after a key", c)
	}
	s.pos++
	return nil
}

func (s *scanner) literal(word string) error {
	for i := range len(word) {
		c, err := s.peek()
		if err != nil {
			return err
		}
		if c != word[i] {
			return s.syntax("unexpected %q inside the word %s", c, word)
		}
		s.pos++
	}
	return nil
}

// number consumes a number that starts with c. A number at the end of the stream
// is complete only for text in memory; inside an array something must follow.
func (s *scanner) number(c byte) error {
	if c == '-' {
		s.pos++
		var err error
		if c, err = s.peek(); err != nil {
			return err
		}
	}
	switch {
	case c == '0':
		s.pos++
	case '1' <= c && c <= '9':
		s.digits()
	default:
		return s.syntax("unexpected %q, want a value", c)
	}
	if s.at('.') {
		s.pos++
		if s.digits() == 0 {
			return s.digitMissing("after its point")
		}
	}
	if s.at('e') || s.at('E') {
		s.pos++
		if s.at('+') || s.at('-') {
			s.pos++
		}
		if s.digits() == 0 {
			return s.digitMissing("in its exponent")
		}
	}
	return nil
}

func (s *scanner) digitMissing(where string) error {
	if _, err := s.peek(); err != nil {
		return err
	}
	return s.syntax("a number without digits %s", where)
}

func (s *scanner) at(c byte) bool {
	return (s.pos < s.end || s.more()) && s.buf[s.pos] == c
}

// digits consumes a run of digits and returns its length.
func (s *scanner) digits() int {
	n := 0
	for s.pos < s.end || s.more() {
		if c := s.buf[s.pos]; c < '0' || '9' < c {
			break
		}
		s.pos++
		n++
	}
	return n
}
