package cml

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// str consumes the rest of a string after its opening quote.
func (s *scanner) str() error {
	for {
		s.pos = plain(s.buf[:s.end], s.pos)
		if s.pos == s.end {
			if !s.more() {
				return s.stop()
			}
			continue
		}
		switch c := s.buf[s.pos]; c {
		case '"':
			s.pos++
			return nil
		case '\\':
			s.pos++
			if err := s.escape(); err != nil {
				return err
			}
		default:
			return s.syntax("control byte 0x%02x in a string", c)
		}
	}
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// plain returns the index of the first byte of b, from i on, that ends a run of
// ordinary string bytes: a quote, a backslash or a control byte; len(b) if there
// is none. It tests eight bytes at a time. The subtraction's borrow can mark a
// wrong byte only above a true hit, so the lowest mark is exact.
func plain(b []byte, i int) int {
	for i+8 <= len(b) {
		w := binary.LittleEndian.Uint64(b[i:])
		quote := w ^ ones*'"'
		slash := w ^ ones*'\\'
		hit := ((quote-ones)&^quote | (slash-ones)&^slash | (w-ones*0x20)&^w) & highs
		if hit != 0 {
			return i + bits.TrailingZeros64(hit)>>3
		}
		i += 8
	}
	for i < len(b) && b[i] >= 0x20 && b[i] != '"' && b[i] != '\\' {
		i++
	}
	return i
}

// escape consumes what follows a backslash.
func (s *scanner) escape() error {
	c, err := s.peek()
	if err != nil {
		return err
	}
	switch c {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.pos++
		return nil
	case 'u':
		s.pos++
		for range 4 {
			c, err := s.peek()
			if err != nil {
				return err
			}
			if _, ok := hexDigit(c); !ok {
				return s.syntax("byte 0x%02x in a \\u escape", c)
			}
			s.pos++
		}
		return nil
	}
	return s.syntax("unknown escape \\%c", c)
}

func hexDigit(c byte) (rune, bool) {
	switch {
	case '0' <= c && c <= '9':
		return rune(c - '0'), true
	case 'a' <= c && c <= 'f':
		return rune(c-'a') + 10, true
	case 'A' <= c && c <= 'F':
		return rune(c-'A') + 10, true
	}
	return 0, false
}

// short consumes the rest of a string after its opening quote and returns its
// decoded bytes. They are in the buffer or in scratch and are valid until the
// next call. ok is false for a string longer than maxShort.
func (s *scanner) short(scratch []byte) (text []byte, ok bool, err error) {
	s.ensure(readAhead)
	start, base := s.pos, s.base
	if err := s.str(); err != nil {
		return nil, false, err
	}
	// If a refill moved the buffer, the string was longer than the ensured bytes,
	// so it is too long to be a known one.
	if s.base != base || s.pos-1-start > maxShort {
		return nil, false, nil
	}
	raw := s.buf[start : s.pos-1]
	if verbatim(raw) {
		return raw, true, nil
	}
	return unquote(scratch[:0], raw), true, nil
}

// skip consumes text if it is next in the buffer.
func (s *scanner) skip(text string) bool {
	if s.end-s.pos < len(text) || string(s.buf[s.pos:s.pos+len(text)]) != text {
		return false
	}
	s.pos += len(text)
	return true
}

// verbatim reports whether a raw string equals its decoded form.
func verbatim(raw []byte) bool {
	for _, c := range raw {
		if c == '\\' || c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// unquote appends the decoded form of a raw string that str has accepted.
// Invalid UTF-8 and lone surrogates become U+FFFD.
func unquote(dst, raw []byte) []byte {
	for i := 0; i < len(raw); {
		c := raw[i]
		if c != '\\' {
			r, size := utf8.DecodeRune(raw[i:])
			dst = utf8.AppendRune(dst, r)
			i += size
			continue
		}
		i++
		switch raw[i] {
		case 'b':
			dst = append(dst, '\b')
		case 'f':
			dst = append(dst, '\f')
		case 'n':
			dst = append(dst, '\n')
		case 'r':
			dst = append(dst, '\r')
		case 't':
			dst = append(dst, '\t')
		case 'u':
			r := hex4(raw[i+1:])
			i += 4
			if utf16.IsSurrogate(r) {
				r, i = surrogate(r, raw, i)
			}
			dst = utf8.AppendRune(dst, r)
		default:
			dst = append(dst, raw[i])
		}
		i++
	}
	return dst
}

// surrogate combines hi, the high half of a surrogate pair whose last digit is at
// raw[i], with a low half if one follows. It returns the index of the last byte
// used.
func surrogate(hi rune, raw []byte, i int) (rune, int) {
	if i+6 < len(raw) && raw[i+1] == '\\' && raw[i+2] == 'u' {
		if r := utf16.DecodeRune(hi, hex4(raw[i+3:])); r != utf8.RuneError {
			return r, i + 6
		}
	}
	return utf8.RuneError, i
}

func hex4(b []byte) rune {
	var r rune
	for _, c := range b[:4] {
		d, _ := hexDigit(c)
		r = r<<4 | d
	}
	return r
}
