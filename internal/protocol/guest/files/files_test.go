package files

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var key = Key{1, 2, 3}

// body returns the body of a message.
func body(b []byte) []byte { return b[frameHead:] }

func TestRoundTrip(t *testing.T) {
	q := Request{ID: 7, Op: Rename, Again: true, Path: "a/b", Ino: 9, To: "c", Off: 11, Size: 12, Mode: 0o644, Mask: 1, Atime: -5, Mtime: 6, Data: []byte("x")}
	got, err := ParseRequest(body(AppendRequest(nil, key, &q)))
	if err != nil || !cmp.Equal(got, q) {
		t.Errorf("%v, %s", err, cmp.Diff(q, got))
	}
	a := Answer{ID: 7, Errno: 2, Attr: Attr{1, 2, 3, 4, 5, 6, 7, 8}, Data: []byte("y")}
	back, err := ParseAnswer(body(AppendAnswer(nil, key, &a)))
	if err != nil || !cmp.Equal(back, a) {
		t.Errorf("%v, %s", err, cmp.Diff(a, back))
	}
	e := []Entry{{1, 2, 4, "name"}, {3, 4, 8, strings.Repeat("n", MaxName)}}
	var b []byte
	for _, x := range e {
		b = AppendEntry(b, x)
	}
	if list, err := ParseEntries(b); err != nil || !cmp.Equal(list, e) {
		t.Errorf("%v, %s", err, cmp.Diff(e, list))
	}
	if _, err := ParseEntries(b[:len(b)-1]); err == nil {
		t.Error("an entry that is cut was read")
	}
}

// TestRefused checks that malformed requests, and those that could leave the
// workspace, are rejected.
func TestRefused(t *testing.T) {
	for name, q := range map[string]Request{
		"no operation": {}, "an unknown one": {Op: lastOp + 1}, "up": {Op: Stat, Path: "a/../../b"}, "absolute": {Op: Stat, Path: "/etc"},
		"here": {Op: Stat, Path: "./a"}, "a slash too many": {Op: Stat, Path: "a//b"}, "a zero": {Op: Stat, Path: "a\x00b"},
		"a long name": {Op: Stat, Path: strings.Repeat("n", MaxName+1)}, "a second path that is up": {Op: Rename, Path: "a", To: ".."},
		"a second path for nothing": {Op: Stat, Path: "a", To: "b"}, "a link to nowhere": {Op: Symlink, Path: "a"},
		"a negative place": {Op: Read, Off: -1}, "too much": {Op: Read, Size: MaxData + 1}, "too much data": {Op: Write, Data: make([]byte, MaxData+1)},
	} {
		if got, err := ParseRequest(body(AppendRequest(nil, key, &q))); err == nil {
			t.Errorf("%s: read as %+v", name, got)
		}
	}
}

// TestStream checks that messages may arrive in pieces of any size, and that
// bytes before the first message are skipped, even if they end like a message of
// an earlier connection.
func TestStream(t *testing.T) {
	q := Request{ID: 1, Op: Read, Path: "p", Size: 5}
	one := AppendRequest(nil, key, &q)
	old := AppendRequest(nil, Key{9}, &q)
	in := append(append(bytes.Clone(old[5:]), key[:3]...), append(bytes.Clone(one), one...)...)
	for size := 1; size < len(in); size++ {
		var s Stream
		s.Reset(key)
		got := 0
		for b := in; len(b) > 0; {
			n := min(size, len(b))
			s.Feed(b[:n])
			b = b[n:]
			for {
				m, err := s.Next()
				if err != nil {
					t.Fatalf("in pieces of %d: %v", size, err)
				}
				if m == nil {
					break
				}
				if !bytes.Equal(m, body(one)) {
					t.Fatalf("in pieces of %d: got %x", size, m)
				}
				got++
			}
		}
		if got != 2 || s.Begun() {
			t.Fatalf("in pieces of %d: %d messages, begun %v", size, got, s.Begun())
		}
	}
}

// FuzzStream feeds random bytes as a guest. The result must be an error, or
// requests for paths below the workspace.
func FuzzStream(f *testing.F) {
	q := Request{ID: 1, Op: Rename, Path: "a/b", To: "c"}
	f.Add(AppendRequest(nil, key, &q), 3)
	q = Request{ID: 2, Op: Write, Path: "a", Data: []byte("text")}
	f.Add(AppendRequest(AppendRequest([]byte("junk"), key, &q), key, &q), 100)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		var s Stream
		s.Reset(key)
		for size = max(1, size); len(b) > 0; {
			n := min(size, len(b))
			s.Feed(b[:n])
			b = b[n:]
			for {
				m, err := s.Next()
				if err != nil {
					return
				}
				if m == nil {
					break
				}
				q, err := ParseRequest(m)
				if err != nil {
					return
				}
				for _, p := range []string{q.Path, q.To} {
					if q.Op != Symlink && (strings.HasPrefix(p, "/") || strings.Contains("/"+p+"/", "/../")) {
						t.Fatalf("%q was taken", p)
					}
				}
				if again, err := ParseRequest(body(AppendRequest(nil, key, &q))); err != nil || !cmp.Equal(again, q) {
					t.Fatalf("%v, %s", err, cmp.Diff(q, again))
				}
			}
		}
	})
}

// FuzzAnswer parses random answers. The entries of an accepted one must encode to
// the same bytes.
func FuzzAnswer(f *testing.F) {
	f.Add(body(AppendAnswer(nil, key, &Answer{ID: 1, Data: AppendEntry(nil, Entry{1, 2, 4, "name"})})))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := ParseAnswer(b)
		if err != nil {
			return
		}
		list, err := ParseEntries(a.Data)
		if err != nil {
			return
		}
		var back []byte
		for _, e := range list {
			back = AppendEntry(back, e)
		}
		if !bytes.Equal(back, a.Data) {
			t.Fatalf("%x came back as %x", a.Data, back)
		}
	})
}
