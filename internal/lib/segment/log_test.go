package segment

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"lull/internal/lib/errtest"
)

var t0 = time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)

// dirs has the methods of *testing.T and *rapid.T that fresh calls.
type dirs interface {
	Fatal(...any)
	Cleanup(func())
}

func fresh(t dirs) string {
	dir, err := os.MkdirTemp("", "segment-test-")
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func open(t dirs, dir string, o Options) (*Log, []*Damage) {
	l, damage, err := Open(dir, o)
	errtest.None(t, err)
	return l, damage
}

// read returns the records of a log as "number:payload", and its damage.
func read(l *Log, from From) (records []string, damage []*Damage, err error) {
	for r, err := range l.Records(from) {
		d, ok := errors.AsType[*Damage](err)
		switch {
		case ok:
			damage = append(damage, d)
		case err != nil:
			return records, damage, err
		default:
			records = append(records, fmt.Sprintf("%d:%s", r.Number, r.Payload))
		}
	}
	return records, damage, nil
}

func add(t dirs, l *Log, texts ...string) {
	for _, text := range texts {
		errtest.Get(l.Append(t0, []byte(text)))(t)
	}
}

func TestAppendAndRead(t *testing.T) {
	dir := fresh(t)
	l, damage := open(t, filepath.Join(dir, "new", "log"), Options{})
	if len(damage) != 0 || l.First() != 1 || l.Next() != 1 {
		t.Errorf("a new log: %v, %d to %d", damage, l.First(), l.Next())
	}
	if err := l.Sync(); err != nil {
		t.Error(err)
	}
	add(t, l, "a", "", "ccc")
	got, damage, err := read(l, From{})
	if want := []string{"1:a", "2:", "3:ccc"}; !slices.Equal(got, want) || damage != nil || err != nil {
		t.Errorf("%q %v %v", got, damage, err)
	}
	if _, _, err := Open(l.dir, Options{}); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), l.dir) {
		t.Errorf("a second Open: %v", err)
	}
	if _, err := l.Append(t0, make([]byte, MaxRecord+1)); err == nil {
		t.Error("a record past the limit was taken")
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	l, damage = open(t, l.dir, Options{})
	add(t, l, "d")
	got, _, _ = read(l, From{Number: 3})
	if want := []string{"3:ccc", "4:d"}; !slices.Equal(got, want) || damage != nil {
		t.Errorf("after opening again: %q %v", got, damage)
	}
	for r, err := range l.Records(From{}) {
		if err != nil || !r.Time.Equal(t0) {
			t.Error(r, err)
		}
		break
	}
	l.Close()
}

func TestRotationAndBound(t *testing.T) {
	l, _ := open(t, fresh(t), Options{SegmentBytes: 200, MaxBytes: 1000})
	for i := range 100 {
		add(t, l, fmt.Sprintf("record %3d", i))
		if l.Size() > 1000 {
			t.Fatalf("%d bytes after record %d", l.Size(), i)
		}
	}
	got, damage, err := read(l, From{})
	if err != nil || damage != nil || len(got) == 0 || got[len(got)-1] != "100:record  99" || !strings.HasPrefix(got[0], fmt.Sprint(l.First(), ":")) {
		t.Errorf("%q %v %v, first is %d", got, damage, err, l.First())
	}
	if l.First() == 1 || uint64(len(got)) != l.Next()-l.First() {
		t.Errorf("%d records from %d to %d", len(got), l.First(), l.Next())
	}
	l.Close()
	l, damage = open(t, l.dir, Options{SegmentBytes: 200, MaxBytes: 1000})
	if again, _, _ := read(l, From{}); !slices.Equal(got, again) || damage != nil {
		t.Errorf("after opening again: %q %v", again, damage)
	}
	l.Close()
}

func TestRotationByAge(t *testing.T) {
	l, _ := open(t, fresh(t), Options{SegmentAge: time.Hour})
	for i := range 10 {
		l.Append(t0.Add(time.Duration(i)*30*time.Minute), nil)
	}
	if len(l.files) != 5 {
		t.Errorf("%d files, want 5", len(l.files))
	}
	if n, err := l.Drop(t0.Add(2 * time.Hour)); n != 2 || err != nil || l.First() != 5 {
		t.Errorf("dropped %d, %v; first is %d", n, err, l.First())
	}
	if n, _ := l.Drop(t0.Add(999 * time.Hour)); n != 2 || l.First() != 9 {
		t.Errorf("dropped %d; first is %d", n, l.First())
	}
	l.Close()
}

// TestFromTime checks that reading from a time returns exactly the records of
// that time and later, however the writer's clock moves, and also after the log
// was reopened.
func TestFromTime(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		o := Options{SegmentBytes: int64(rapid.IntRange(64, 300).Draw(r, "segment bytes"))}
		l, _ := open(r, fresh(r), o)
		var times []int
		for range rapid.IntRange(1, 40).Draw(r, "records") {
			at := rapid.IntRange(0, 20).Draw(r, "at")
			times = append(times, at)
			if _, err := l.Append(t0.Add(time.Duration(at)*time.Second), nil); err != nil {
				r.Fatal(err)
			}
			if rapid.IntRange(0, 9).Draw(r, "again") == 0 {
				l.Close()
				l, _ = open(r, l.dir, o)
			}
		}
		from := rapid.IntRange(0, 21).Draw(r, "from")
		number := uint64(rapid.IntRange(0, 41).Draw(r, "number"))
		var want []string
		for i, at := range times {
			if at >= from && uint64(i+1) >= number {
				want = append(want, fmt.Sprintf("%d:", i+1))
			}
		}
		got, damage, err := read(l, From{Time: t0.Add(time.Duration(from) * time.Second), Number: number})
		if !slices.Equal(got, want) || damage != nil || err != nil {
			r.Fatalf("got %q, %v, %v, want %q", got, damage, err, want)
		}
		l.Close()
	})
}

// TestGroupCommit checks that many concurrent writers all get their records
// synced.
func TestGroupCommit(t *testing.T) {
	l, _ := open(t, fresh(t), Options{SegmentBytes: 4096})
	var group sync.WaitGroup
	for w := range 8 {
		group.Go(func() {
			for i := range 50 {
				n, err := l.Append(t0, fmt.Appendf(nil, "writer %d record %d", w, i))
				if err != nil {
					t.Error(err)
					return
				}
				if err := l.Sync(); err != nil {
					t.Error(err)
				}
				l.mu.Lock()
				if l.synced <= n {
					t.Errorf("record %d is not durable, %d is", n, l.synced)
				}
				l.mu.Unlock()
			}
		})
	}
	group.Go(func() {
		for range 20 {
			if _, damage, err := read(l, From{}); damage != nil || err != nil {
				t.Errorf("reading beside the writers: %v %v", damage, err)
			}
		}
	})
	group.Wait()
	got, damage, err := read(l, From{})
	if len(got) != 400 || damage != nil || err != nil {
		t.Errorf("%d records, %v, %v", len(got), damage, err)
	}
	l.Close()
}

// TestDiskRefuses checks that a failed write loses no record that was
// acknowledged.
func TestDiskRefuses(t *testing.T) {
	l, _ := open(t, fresh(t), Options{})
	add(t, l, "kept")
	good := l.active
	readOnly, err := os.Open(good.Name())
	errtest.None(t, err)
	l.active = readOnly
	if err := l.Sync(); err == nil || !strings.HasPrefix(err.Error(), "cannot write to the log") {
		t.Errorf("Sync: %v", err)
	}
	refused := false
	for range 100 {
		if _, err := l.Append(t0, make([]byte, 1024)); err != nil {
			refused = true
		}
	}
	if !refused || len(l.buf) > buffered {
		t.Errorf("%d bytes wait in memory", len(l.buf))
	}
	l.active = good
	readOnly.Close()
	if err := l.Sync(); err != nil {
		t.Errorf("the disk is well again: %v", err)
	}
	got, damage, err := read(l, From{})
	if err != nil || damage != nil || got[0] != "1:kept" || uint64(len(got)) != l.Next()-1 {
		t.Errorf("%d records, %v, %v", len(got), damage, err)
	}
	good.Close()
	add(t, l, "more")
	l.flush()
	if err := l.Sync(); err == nil {
		t.Error("Sync on a closed file is well")
	}
	l.lock.Close()
}

func FuzzScan(f *testing.F) {
	var seed []byte
	seed = append(seed, head{first: 1, begun: t0.UnixNano(), prior: 0}.encode()...)
	f.Add(seed)
	for i := range 3 {
		seed = appendRecord(seed, uint64(i+1), t0, bytes.Repeat([]byte{byte(i)}, 10*i))
	}
	f.Add(seed)
	f.Add(seed[:len(seed)-5])
	f.Add(append(slices.Clone(seed[:50]), seed[60:]...))
	f.Add([]byte{})
	f.Add(make([]byte, 300))
	f.Fuzz(func(t *testing.T, data []byte) {
		covered := int64(0) // number of acknowledged bytes from the beginning
		last := uint64(0)
		c := scan("f", data, func(r Record, d *Damage) bool {
			if d != nil {
				if d.Offset < covered || d.Length < 0 || d.Offset+d.Length > int64(len(data)) {
					t.Fatalf("damage %+v after %d bytes of %d", d, covered, len(data))
				}
				covered = d.Offset + d.Length
				return true
			}
			if r.Number <= last {
				t.Fatalf("record %d after %d", r.Number, last)
			}
			last = r.Number
			covered += int64(recordSize + len(r.Payload))
			return true
		})
		if c.good > int64(len(data)) || c.last != last {
			t.Fatalf("%+v of %d bytes", c, len(data))
		}
	})
}
