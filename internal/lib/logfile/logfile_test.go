package logfile

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// marks returns the records of the index of a log file, nil if it has none.
func marks(t *testing.T, base, path string) (all []Mark) {
	t.Helper()
	st, err := os.Stat(path)
	errtest.None(t, err)
	x := OpenTimes(base, st)
	defer x.Close()
	for m, ok := x.Next(); ok; m, ok = x.Next() {
		all = append(all, m)
	}
	return all
}

func add(t *testing.T, l *File, text string, at time.Time) {
	t.Helper()
	errtest.None(t, l.Add([]byte(text), at))
}

func TestRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l")
	l := New(path, 100)
	for n := range 11 {
		add(t, l, strings.Repeat(string(rune('a'+n)), 30), noon.Add(time.Duration(n)*time.Second))
	}
	now, err1 := os.ReadFile(path)
	old, err2 := os.ReadFile(path + Older)
	if err := errors.Join(err1, err2); err != nil || len(now) != 30 || len(old) != 100 || !bytes.HasSuffix(now, []byte("k")) {
		t.Errorf("%q after %q, %v", now, old, err)
	}
	if m := marks(t, path, path); len(m) != 1 || !m[0].Time.Equal(noon.Add(10*time.Second)) {
		t.Errorf("times %v", m)
	}
	if m := marks(t, path, path+Older); len(m) != 4 || m[0].Offset != 0 || !m[1].Time.Equal(noon.Add(7*time.Second)) {
		t.Errorf("times of the older log %v", m)
	}
	if err := errors.Join(l.Close(), Remove(path)); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(path + "*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestIndexIsBounded checks that an index does not grow beyond the size limit of
// its log, even if very little is written each time.
func TestIndexIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l")
	l := New(path, 200)
	for n := range 100 {
		add(t, l, "x", noon.Add(time.Duration(n)*time.Second))
	}
	for _, p := range []string{path + times, path + Older + times} {
		if st, err := os.Stat(p); err != nil || st.Size() > 200+record {
			t.Errorf("%s has %v bytes, %v", p, st, err)
		}
	}
}

// TestCutOff opens logs as a crash can leave them. It checks that every line has
// either its own time or none.
func TestCutOff(t *testing.T) {
	later := noon.Add(time.Hour)
	for name, c := range map[string]struct {
		crash     func(path string) error
		now, old  int // number of records of each index after the next write
		nowOffset int64
	}{
		"between the renames": {func(p string) error { return os.Rename(p, p+Older) }, 1, 1, 0},
		"in a record":         {func(p string) error { return os.Truncate(p+times, 2*record-3) }, 1, 0, 4},
		"in the header":       {func(p string) error { return os.Truncate(p+times, 3) }, 1, 0, 4},
		"index of another log": {func(p string) error {
			return errors.Join(os.Rename(p, p+".moved"), os.WriteFile(p, []byte("old\n"), 0o600))
		}, 1, 0, 4},
		"no index": {func(p string) error { return os.Remove(p + times) }, 1, 0, 4},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "l")
			l := New(path, 100)
			add(t, l, "old\n", noon)
			errtest.None(t, errors.Join(l.Close(), c.crash(path)))
			l = New(path, 100)
			add(t, l, "new\n", later)
			m := marks(t, path, path)
			if len(m) != c.now || m[0].Offset != c.nowOffset || !m[0].Time.Equal(later) {
				t.Errorf("times %v", m)
			}
			if c.old > 0 {
				if m := marks(t, path, path+Older); len(m) != c.old || !m[0].Time.Equal(noon) {
					t.Errorf("times of the older log %v", m)
				}
			}
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestClockSetBack checks that the times after a backward step of the clock are
// recorded.
func TestClockSetBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l")
	l := New(path, 0)
	add(t, l, "a\n", noon)
	add(t, l, "b\n", noon.Add(-time.Hour))
	add(t, l, "c\n", noon.Add(-time.Hour+Precision/2))
	if m := marks(t, path, path); len(m) != 2 || !m[1].Time.Equal(noon.Add(-time.Hour)) {
		t.Errorf("times %v", m)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}
