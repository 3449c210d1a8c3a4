package segment

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"lull/internal/lib/errtest"
)

// sample writes a log of two files. It returns the log's folder and its records.
func sample(t *testing.T) (dir string, want []string) {
	l, _ := open(t, fresh(t), Options{SegmentBytes: 200})
	add(t, l, "first", "second", "third", "fourth", "fifth", "sixth", "", "eighth")
	want, _, _ = read(l, From{})
	errtest.None(t, l.Close())
	if len(l.files) != 2 {
		t.Fatalf("%d files", len(l.files))
	}
	return l.dir, want
}

func segments(t *testing.T, dir string) []string {
	names, err := filepath.Glob(filepath.Join(dir, "*.seg"))
	errtest.None(t, err)
	return names
}

// clone copies the files of a log to a fresh folder.
func clone(t *testing.T, dir string) string {
	to := fresh(t)
	errtest.None(t, os.CopyFS(to, os.DirFS(dir)))
	return to
}

// TestTornAtEachByte cuts the newest file at every length. It checks that the
// records before the cut can be read, that the cut is reported unless it lies
// between two records, and that the log can be continued.
func TestTornAtEachByte(t *testing.T) {
	dir, want := sample(t)
	newest := segments(t, dir)[1]
	data, err := os.ReadFile(newest)
	errtest.None(t, err)
	whole := map[int]int{0: 0, headSize: 0} // number of records in the file up to each boundary
	for pos, n := headSize, 0; pos < len(data); {
		_, size, err := decodeRecord(data[pos:])
		errtest.None(t, err)
		pos, n = pos+size, n+1
		whole[pos] = n
	}
	older := len(want) - whole[len(data)]
	kept := older
	for size := range len(data) + 1 {
		if n, ok := whole[size]; ok {
			kept = older + n
		}
		at := clone(t, dir)
		name := segments(t, at)[1]
		errtest.None(t, os.Truncate(name, int64(size)))
		l, damage := open(t, at, Options{SegmentBytes: 200})
		if _, clean := whole[size]; clean != (len(damage) == 0) {
			t.Errorf("cut at %d: %v", size, damage)
		}
		for _, d := range damage {
			if !d.Torn || d.File != name || d.Offset+d.Length != int64(size) {
				t.Errorf("cut at %d: %+v", size, d)
			}
		}
		add(t, l, "after")
		got, more, err := read(l, From{})
		if err != nil || more != nil || !slices.Equal(got, append(slices.Clone(want[:kept]), fmt.Sprintf("%d:after", kept+1))) {
			t.Errorf("cut at %d: %q %v %v, want %d and one", size, got, more, err, kept)
		}
		l.Close()
		l, damage = open(t, at, Options{SegmentBytes: 200})
		if len(damage) != 0 {
			t.Errorf("cut at %d and opened again: %v", size, damage)
		}
		l.Close()
	}
}

// TestFlippedAtEachByte changes each byte of each file. It checks that no record
// is returned modified, that no record is missing without a report of file and
// offset, and that the log can be continued.
func TestFlippedAtEachByte(t *testing.T) {
	dir, want := sample(t)
	for i, original := range segments(t, dir) {
		data, err := os.ReadFile(original)
		errtest.None(t, err)
		for pos := range data {
			at := clone(t, dir)
			name := segments(t, at)[i]
			bad := slices.Clone(data)
			bad[pos] ^= byte(1 << (pos % 8))
			errtest.None(t, os.WriteFile(name, bad, 0o600))
			l, damage := open(t, at, Options{SegmentBytes: 200})
			got, more, err := read(l, From{})
			if err != nil {
				t.Fatal(err)
			}
			damage = append(damage, more...)
			missing := 0
			for _, r := range want {
				if !slices.Contains(got, r) {
					missing++
				}
			}
			if len(got)+missing != len(want) || missing > 1 || len(damage) == 0 {
				t.Errorf("byte %d of file %d: %q is left, %v", pos, i, got, damage)
			}
			for _, d := range damage {
				if d.File != name || d.Offset > int64(pos) || d.Offset+d.Length <= int64(pos) || !strings.Contains(d.Error(), name) {
					t.Errorf("byte %d of file %d: %v", pos, i, d)
				}
			}
			next := l.Next()
			add(t, l, "after")
			got, _, err = read(l, From{Number: next})
			if err != nil || !slices.Equal(got, []string{fmt.Sprintf("%d:after", next)}) {
				t.Errorf("byte %d of file %d: then %q %v", pos, i, got, err)
			}
			l.Close()
		}
	}
}

func TestLostFilesAreReported(t *testing.T) {
	l, _ := open(t, fresh(t), Options{SegmentBytes: 100})
	add(t, l, "one", "two", "three", "four", "five", "six")
	l.Close()
	names := segments(t, l.dir)
	errtest.None(t, os.Remove(names[1]))
	l, _ = open(t, l.dir, Options{SegmentBytes: 100})
	got, damage, err := read(l, From{})
	if err != nil || len(damage) != 1 || damage[0].File != names[0] || damage[0].Lost != uint64(6-len(got)) || damage[0].Lost == 0 {
		t.Errorf("%q %v %v", got, damage, err)
	}
	l.Close()
	for _, name := range []string{"xyz.seg", "1.seg"} {
		path := filepath.Join(l.dir, name)
		os.WriteFile(path, nil, 0o600)
		if _, _, err := Open(l.dir, Options{}); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("a file that is no segment: %v", err)
		}
		os.Remove(path)
	}
	os.Rename(names[2], names[1])
	if _, _, err := Open(l.dir, Options{}); err == nil || !strings.Contains(err.Error(), names[1]) {
		t.Errorf("a renamed segment: %v", err)
	}
}

// TestTwiceDamaged reads a log with zeros in the middle and an incomplete record
// at its end, and checks that both are reported.
func TestTwiceDamaged(t *testing.T) {
	dir, want := sample(t)
	name := segments(t, dir)[1]
	data, _ := os.ReadFile(name)
	copy(data[headSize+8:], make([]byte, 10))
	os.WriteFile(name, append(data, "torn"...), 0o600)
	l, damage := open(t, dir, Options{SegmentBytes: 200})
	if len(damage) != 2 || damage[0].Torn || damage[0].Lost != 1 || damage[0].Offset != headSize || damage[1].Length != 4 {
		t.Errorf("%+v", damage)
	}
	add(t, l, "after")
	got, again, _ := read(l, From{})
	if len(got) != len(want) || len(again) != 2 || l.Next() != uint64(len(want)+2) {
		t.Errorf("%q %v", got, again)
	}
	l.Close()
}
