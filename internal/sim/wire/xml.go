package wire

import (
	"strconv"
	"sync"
	"time"
	"unicode/utf8"
)

// XML builds a document in memory. The caller must pass valid element names.
type XML struct{ buf []byte }

// Bytes returns what was written.
func (x *XML) Bytes() []byte { return x.buf }

// pool holds buffers for reuse. Large ones are worth keeping: a page of a thousand
// instances is a megabyte.
var pool = sync.Pool{New: func() any { return new([]byte) }}

// Take gives x a buffer from the pool. Give returns the buffer; after that, neither x
// nor the result of Bytes may be used.
func (x *XML) Take() { x.buf = (*pool.Get().(*[]byte))[:0] }

// Give returns the buffer that Take took.
func (x *XML) Give() {
	b := x.buf
	x.buf = nil
	pool.Put(&b)
}

// Open begins an element.
func (x *XML) Open(name string) {
	x.buf = append(x.buf, '<')
	x.buf = append(x.buf, name...)
	x.buf = append(x.buf, '>')
}

// OpenNS begins an element with a default namespace.
func (x *XML) OpenNS(name, ns string) { x.Open(name + ` xmlns="` + ns + `"`) }

// Close ends an element.
func (x *XML) Close(name string) {
	x.buf = append(x.buf, '<', '/')
	x.buf = append(x.buf, name...)
	x.buf = append(x.buf, '>')
}

// Text writes an element with text.
func (x *XML) Text(name, v string) {
	x.Open(name)
	x.escape(v)
	x.Close(name)
}

// Maybe writes an element with text unless the text is empty.
func (x *XML) Maybe(name, v string) {
	if v != "" {
		x.Text(name, v)
	}
}

// Int writes an element with a number.
func (x *XML) Int(name string, v int) {
	x.Open(name)
	x.buf = strconv.AppendInt(x.buf, int64(v), 10)
	x.Close(name)
}

// Float writes an element with a number.
func (x *XML) Float(name string, v float64) {
	x.Open(name)
	x.buf = strconv.AppendFloat(x.buf, v, 'g', -1, 64)
	x.Close(name)
}

// Bool writes an element with true or false.
func (x *XML) Bool(name string, v bool) {
	x.Open(name)
	x.buf = strconv.AppendBool(x.buf, v)
	x.Close(name)
}

// Time writes an element with a time to the millisecond.
func (x *XML) Time(name string, t time.Time) {
	x.Open(name)
	x.buf = t.UTC().AppendFormat(x.buf, "2006-01-02T15:04:05.000Z")
	x.Close(name)
}

// In writes an element around the output of body.
func (x *XML) In(name string, body func()) {
	x.Open(name)
	body()
	x.Close(name)
}

// escape writes s as text. Characters that XML cannot contain become the replacement
// character.
func (x *XML) escape(s string) {
	if !needsEscape(s) {
		x.buf = append(x.buf, s...)
		return
	}
	for k, r := range s {
		switch {
		case r == '<':
			x.buf = append(x.buf, "&lt;"...)
		case r == '>':
			x.buf = append(x.buf, "&gt;"...)
		case r == '&':
			x.buf = append(x.buf, "&amp;"...)
		case r == '"':
			x.buf = append(x.buf, "&#34;"...)
		case r == '\r' || r == '\n' || r == '\t':
			x.buf = append(x.buf, "&#"...)
			x.buf = strconv.AppendInt(x.buf, int64(r), 10)
			x.buf = append(x.buf, ';')
		case r < 0x20 || r == 0xfffe || r == 0xffff || r == utf8.RuneError && s[k] != 0xef:
			x.buf = append(x.buf, "\ufffd"...)
		default:
			x.buf = utf8.AppendRune(x.buf, r)
		}
	}
}

// needsEscape reports whether s has anything but harmless ASCII. Nearly all strings
// do not.
func needsEscape(s string) bool {
	for k := range len(s) {
		if c := s[k]; c < 0x20 || c >= 0x7f || c == '<' || c == '>' || c == '&' || c == '"' {
			return true
		}
	}
	return false
}
