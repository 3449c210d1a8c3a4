package logs

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/lib/logfile"
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
		errtest.None(t, errors.Join(os.WriteFile(path, []byte(c.in), 0o600), os.WriteFile(path+".1", []byte(c.old), 0o600)))
		var got strings.Builder
		parts, err := new(view).selected(path, instance.LogQuery{Tail: c.n})
		if err == nil {
			err = (&lines{w: &got}).copy(parts)
		}
		if err != nil || got.String() != c.want {
			t.Errorf("last %d of %.20q and %.20q: %.40q, %v, want %.40q", c.n, c.old, c.in, got.String(), err, c.want)
		}
	}
}

// TestLastLineOfMuch checks that reading the last line of a large log takes no more
// memory than one block.
func TestLastLineOfMuch(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.log")
	errtest.None(t, os.WriteFile(path, []byte("the last\n"), 0o600))
	if err := errors.Join(os.WriteFile(path+".1", nil, 0o600), os.Truncate(path+".1", 1<<30)); err != nil { // a sparse file
		t.Fatal(err)
	}
	held := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			parts, err := new(view).selected(path, instance.LogQuery{Tail: 1})
			if err == nil {
				err = (&lines{w: io.Discard}).copy(parts)
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

// TestLogAcrossRotation checks that following a log across a rotation yields every
// line once, in order.
func TestLogAcrossRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.log")
	write := func(s string) {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		errtest.None(t, err)
		errtest.Get(f.WriteString(s))(t)
		f.Close()
	}
	write("1\n")
	v := &view{}
	var got strings.Builder
	take := func(parts []part, err error) {
		if err == nil {
			err = (&lines{w: &got}).copy(parts)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	more := func() { take(v.more(path)) }
	take(v.selected(path, instance.LogQuery{Tail: -1}))
	write("2\n")
	more()
	write("3\n")
	errtest.None(t, os.Rename(path, path+".1"))
	write("4\n")
	more()
	more()
	if want := "1\n2\n3\n4\n"; got.String() != want {
		t.Errorf("read %q, want %q", strings.ReplaceAll(got.String(), "\n", " "), want)
	}
}

// TestTimes checks which lines a period selects, and the time shown for each, in a
// log that was rotated in the middle of a line.
func TestTimes(t *testing.T) {
	begin := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	at := func(s float64) time.Time { return begin.Add(time.Duration(s * float64(time.Second))) }
	path := filepath.Join(t.TempDir(), "x.log")
	w := logfile.New(path, 115)
	long := "a" + strings.Repeat("-", 100)
	for _, p := range []struct {
		at   float64
		text string
	}{{0, long + "\n"}, {1, "b1\nb2"}, {2, " end\nc"}, {3, "cc\n"}, {4, "d\n"}, {4.05, "e"}, {5, "e\n"}} {
		errtest.None(t, w.Add([]byte(p.text), at(p.at)))
	}
	if old, err := os.ReadFile(path + logfile.Older); err != nil || string(old) != long+"\nb1\nb2 end\nccc" {
		t.Fatalf("the older log is %q, %v: want the rotation in a line", old, err)
	}
	const all = "12:00:00 a|12:00:01 b1|12:00:01 b2 end|12:00:02 ccc|12:00:04 d|12:00:04 ee|"
	for _, c := range []struct {
		q    instance.LogQuery
		want string
	}{
		{instance.LogQuery{Tail: -1}, all},
		{instance.LogQuery{Tail: 2}, "12:00:04 d|12:00:04 ee|"},
		{instance.LogQuery{Tail: -1, Since: at(1)}, strings.TrimPrefix(all, "12:00:00 a|")},
		{instance.LogQuery{Tail: -1, Since: at(1.5)}, "12:00:02 ccc|12:00:04 d|12:00:04 ee|"},
		{instance.LogQuery{Tail: -1, Since: at(2.5)}, "12:00:04 d|12:00:04 ee|"},
		{instance.LogQuery{Tail: -1, Since: at(4.5)}, ""},
		{instance.LogQuery{Tail: -1, Until: at(0.5)}, "12:00:00 a|"},
		{instance.LogQuery{Tail: -1, Until: at(1.5)}, "12:00:00 a|12:00:01 b1|12:00:01 b2 end|"},
		{instance.LogQuery{Tail: -1, Until: at(2.5)}, "12:00:00 a|12:00:01 b1|12:00:01 b2 end|12:00:02 ccc|"},
		{instance.LogQuery{Tail: 1, Since: at(1), Until: at(3)}, "12:00:02 ccc|"},
		{instance.LogQuery{Tail: -1, Until: at(-1)}, ""},
	} {
		parts, err := new(view).selected(path, c.q)
		errtest.None(t, err)
		var b strings.Builder
		errtest.None(t, (&lines{w: &b, times: true}).copy(parts))
		got := strings.ReplaceAll(strings.ReplaceAll(strings.ReplaceAll(strings.ReplaceAll(b.String(), long, "a"), "2026-03-01T", ""), ".000Z", ""), "\n", "|")
		if got != c.want {
			t.Errorf("%+v:\n%q, want\n%q", c.q, got, c.want)
		}
	}
}

// TestNoTimes checks a log whose first lines have no times, because it was begun
// without an index. They are shown with NoTime, and selected if they may belong to
// the period.
func TestNoTimes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.log")
	errtest.None(t, os.WriteFile(path, []byte("old\n"), 0o600))
	read := func(since time.Time) string {
		t.Helper()
		parts, err := new(view).selected(path, instance.LogQuery{Tail: -1, Since: since})
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		errtest.None(t, (&lines{w: &b, times: true}).copy(parts))
		return b.String()
	}
	now := time.Now()
	if got := read(now.Add(-time.Hour)); got != "- old\n" {
		t.Errorf("without an index, read %q", got)
	}
	if got := read(now.Add(time.Hour)); got != "" {
		t.Errorf("last written before the period, read %q", got)
	}
	errtest.None(t, logfile.New(path, 0).Add([]byte("new\n"), now))
	stamped := now.UTC().Format(TimeForm) + " new\n"
	if got := read(now.Add(-time.Hour)); got != "- old\n"+stamped {
		t.Errorf("with half an index, read %q", got)
	}
}
