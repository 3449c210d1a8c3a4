package logs

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLastLines(t *testing.T) {
	long := strings.Repeat("x", block)
	for _, c := range []struct {
		old, in string
		n       int
		want    string
	}{
		{"", "a\nb\nc\n", -1, "a\nb\nc\n"}, {"", "a\nb\nc\n", 2, "b\nc\n"}, {"", "a\nb\nc", 1, "c"}, {"", "a\n", 5, "a\n"}, {"", "a\nb\n", 0, ""}, {"", "", 3, ""},
		{"1\n2\n", "3\n4\n", -1, "1\n2\n3\n4\n"}, {"1\n2\n", "3\n4\n", 3, "2\n3\n4\n"}, {"1\n2\n", "3\n4\n", 2, "3\n4\n"}, {"1\n2\n", "", 1, "2\n"},
		{"1\n2", "3\n4\n", 2, "23\n4\n"}, {"1\n2\n", "3\n", 0, ""}, {"1\n", "2\n", 9, "1\n2\n"}, {"", "\n\n", 1, "\n"},
		{long + "\n", long + "\n" + long, 2, long + "\n" + long}, {"a\n" + long, long + "\n", 1, long + long + "\n"},
	} {
		path := filepath.Join(t.TempDir(), "x.log")
		if err := errors.Join(os.WriteFile(path, []byte(c.in), 0o600), os.WriteFile(path+".1", []byte(c.old), 0o600)); err != nil {
			t.Fatal(err)
		}
		var got strings.Builder
		parts, err := new(view).last(path, c.n)
		if err == nil {
			err = copyParts(&got, parts)
		}
		if err != nil || got.String() != c.want {
			t.Errorf("last %d of %.20q and %.20q: %.40q, %v, want %.40q", c.n, c.old, c.in, got.String(), err, c.want)
		}
	}
}

// TestLastLineOfMuch checks that at most one block of a large log is held in
// memory.
func TestLastLineOfMuch(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.log")
	if err := os.WriteFile(path, []byte("the last\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(path+".1", nil, 0o600), os.Truncate(path+".1", 1<<30)); err != nil { // a hole
		t.Fatal(err)
	}
	held := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			parts, err := new(view).last(path, 1)
			if err == nil {
				err = copyParts(io.Discard, parts)
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	}).AllocedBytesPerOp()
	if held > 4*block {
		t.Errorf("the last line of a GiB took %d bytes", held)
	}
}

// TestLogAcrossRotation follows a log across a rotation: every line once, in
// order.
func TestLogAcrossRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.log")
	write := func(s string) {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(s); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	write("1\n")
	v := &view{}
	var got strings.Builder
	take := func(parts []part, err error) {
		if err == nil {
			err = copyParts(&got, parts)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	more := func() { take(v.more(path)) }
	take(v.last(path, -1))
	write("2\n")
	more()
	write("3\n")
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	write("4\n")
	more()
	more()
	if want := "1\n2\n3\n4\n"; got.String() != want {
		t.Errorf("read %q, want %q", strings.ReplaceAll(got.String(), "\n", " "), want)
	}
}
