package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLastLines(t *testing.T) {
	for _, c := range []struct {
		in   string
		n    int
		want string
	}{
		{"a\nb\nc\n", -1, "a\nb\nc\n"}, {"a\nb\nc\n", 2, "b\nc\n"}, {"a\nb\nc", 1, "c"}, {"a\n", 5, "a\n"}, {"a\nb\n", 0, ""}, {"", 3, ""},
	} {
		if got := string(lastLines([]byte(c.in), c.n)); got != c.want {
			t.Errorf("last %d of %q: %q, want %q", c.n, c.in, got, c.want)
		}
	}
}

// TestLogAcrossRotation follows a log over a rotation: every line once, in
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
	v, err := readLog(path)
	if err != nil {
		t.Fatal(err)
	}
	got := string(v.all)
	more := func() {
		b, err := v.more(path)
		if err != nil {
			t.Fatal(err)
		}
		got += string(b)
	}
	write("2\n")
	more()
	write("3\n")
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	write("4\n")
	more()
	more()
	if want := "1\n2\n3\n4\n"; got != want {
		t.Errorf("read %q, want %q", strings.ReplaceAll(got, "\n", " "), want)
	}
}
