package records

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
)

// crash copies the disk as a daemon that is killed would leave it, and opens the
// copy.
func crash(t *testing.T, f *Files) *Files {
	t.Helper()
	to := t.TempDir()
	errtest.None(t, os.CopyFS(to, os.DirFS(f.Dir())))
	after, err := OpenFiles(to)
	errtest.None(t, err)
	t.Cleanup(func() { after.Close() })
	return after
}

func load(t *testing.T, f *Files) map[string]instance.Record {
	t.Helper()
	recs, err := f.Load()
	errtest.None(t, err)
	for _, d := range f.Damage() {
		t.Errorf("damage: %v", d)
	}
	out := map[string]instance.Record{}
	for _, r := range recs {
		out[r.ID] = r
	}
	return out
}

// TestChangesOutliveCrashes does random changes, removals, folds, restarts and
// crashes. It checks that after each crash the next daemon has exactly the records
// that were written last.
func TestChangesOutliveCrashes(t *testing.T) {
	rng := scaletest.Random(t)
	for range scaletest.Count(t, "histories of a data directory", 10) {
		f, err := OpenFiles(t.TempDir())
		errtest.None(t, err)
		want := load(t, f)
		number := 0
		for range 60 {
			ids := slices.Sorted(maps.Keys(want))
			switch op := rng.IntN(20); {
			case op == 0 || len(ids) == 0:
				number++
				r := sampleRecord()
				r.ID, r.Spec.Name = fmt.Sprint("i", number), fmt.Sprint("n", number)
				errtest.None(t, f.Put(&r))
				want[r.ID] = r
			case op == 1:
				id := ids[rng.IntN(len(ids))]
				errtest.None(t, f.Delete(id))
				delete(want, id)
			case op == 2:
				errtest.None(t, f.changes.fold())
			case op == 3:
				f = crash(t, f)
				fallthrough
			case op == 4:
				if diff := cmp.Diff(want, load(t, crash(t, f))); diff != "" {
					t.Fatalf("after a crash:\n%s", diff)
				}
				if op == 3 {
					load(t, f)
				}
			case op == 5:
				dir := f.Dir()
				errtest.None(t, f.Close())
				if _, err := os.Stat(filepath.Join(dir, "changes")); !os.IsNotExist(err) {
					t.Errorf("the log is left after a clean end: %v", err)
				}
				if f, err = OpenFiles(dir); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(want, load(t, f)); diff != "" {
					t.Fatalf("after a restart:\n%s", diff)
				}
			default:
				r := want[ids[rng.IntN(len(ids))]]
				r.Generation++
				r.StatusReason = strings.Repeat("x", rng.IntN(200))
				put := f.Put
				if rng.IntN(2) == 0 {
					put = f.Note
				}
				errtest.None(t, put(&r))
				want[r.ID] = r
			}
		}
		errtest.None(t, f.Close())
	}
}

// TestFoldBesideWrites checks that folding works while many instances are written
// and some are removed, and that no removed instance comes back.
func TestFoldBesideWrites(t *testing.T) {
	f, err := OpenFiles(t.TempDir())
	errtest.None(t, err)
	load(t, f)
	var wg sync.WaitGroup
	for n := range 8 {
		wg.Go(func() {
			r := sampleRecord()
			r.ID, r.Spec.Name = fmt.Sprint("i", n), fmt.Sprint("n", n)
			for g := range 40 {
				r.Generation = uint64(g)
				if err := f.Put(&r); err != nil {
					t.Error(err)
				}
			}
			if n%2 == 1 {
				if err := f.Delete(r.ID); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 20 {
		errtest.None(t, f.changes.fold())
	}
	wg.Wait()
	check := func(what string, f *Files) {
		t.Helper()
		got := load(t, f)
		if len(got) != 4 {
			t.Errorf("%s: %d records", what, len(got))
		}
		for id, r := range got {
			if r.Generation != 39 {
				t.Errorf("%s: %s has generation %d", what, id, r.Generation)
			}
		}
	}
	check("a crash", crash(t, f))
	dir := f.Dir()
	errtest.None(t, f.Close())
	if f, err = OpenFiles(dir); err != nil {
		t.Fatal(err)
	}
	check("a clean end", f)
	errtest.None(t, f.Close())
}

// TestLogIsFolded checks that a large log is folded automatically, and that its
// size is bounded.
func TestLogIsFolded(t *testing.T) {
	f, err := OpenFiles(t.TempDir())
	errtest.None(t, err)
	defer f.Close()
	load(t, f)
	r := sampleRecord()
	r.StatusReason = strings.Repeat("x", 200<<10)
	for g := range 200 { // 40 MB in total
		r.Generation = uint64(g)
		errtest.None(t, f.Note(&r))
		f.changes.folding.Wait()
		if size := f.changes.log.Size(); size > 2*foldSize {
			t.Fatalf("after %d changes the log has %d bytes", g, size)
		}
	}
	if got := load(t, crash(t, f)); got[r.ID].Generation != r.Generation {
		t.Errorf("generation %d", got[r.ID].Generation)
	}
}

// TestDamagedLog flips single bytes of a log, or cuts it there. It checks that each
// record is then one of those that were written, and that the damage is reported. A
// record that cannot be decoded must prevent the start.
func TestDamagedLog(t *testing.T) {
	f, err := OpenFiles(t.TempDir())
	errtest.None(t, err)
	defer f.Close()
	load(t, f)
	r := sampleRecord()
	for g := range 4 {
		r.Generation = uint64(10 + g)
		errtest.None(t, f.Put(&r))
	}
	logs, err := filepath.Glob(filepath.Join(f.Dir(), "changes", "*.seg"))
	if err != nil || len(logs) != 1 {
		t.Fatal(logs, err)
	}
	whole, err := os.ReadFile(logs[0])
	errtest.None(t, err)
	dir := t.TempDir()
	errtest.None(t, os.CopyFS(dir, os.DirFS(f.Dir())))
	try := func(what string, b []byte) {
		t.Helper()
		errtest.None(t, os.WriteFile(filepath.Join(dir, "changes", filepath.Base(logs[0])), b, 0o600))
		f, err := OpenFiles(dir)
		errtest.None(t, err)
		defer f.Close()
		recs, err := f.Load()
		f.changes.loaded = false // so that the copy is not folded
		if err != nil || len(recs) != 1 || recs[0].Generation < 10 || recs[0].Generation > 13 {
			t.Fatalf("%s: %+v, %v", what, recs, err)
		}
		if recs[0].Generation < 13 && len(f.Damage()) == 0 && len(b) == len(whole) {
			t.Errorf("%s: generation %d, and no damage is reported", what, recs[0].Generation)
		}
	}
	for n := scaletest.Random(t).IntN(16); n < len(whole); n += 16 {
		try(fmt.Sprint("cut at ", n), whole[:n])
		flipped := slices.Clone(whole)
		flipped[n] ^= 1 << (n % 8)
		try(fmt.Sprint("flipped at ", n), flipped)
	}
	errtest.Get(f.changes.log.Append(r.CreatedAt, []byte(`{"id":"abc","later":true}`)))(t)
	errtest.None(t, f.changes.log.Flush())
	newer := crash(t, f)
	if _, err := newer.Load(); err == nil || !strings.Contains(err.Error(), newer.changes.dir) {
		t.Errorf("a change of a later version: %v", err)
	}
	errtest.None(t, newer.Close())
	if logs, _ := filepath.Glob(filepath.Join(newer.changes.dir, "*.seg")); len(logs) == 0 {
		t.Error("the log of a start that failed was removed")
	}
}

// TestLogFails checks that a change that cannot be written is neither in the log
// nor in the file, and that the next change goes to a new log.
func TestLogFails(t *testing.T) {
	f, err := OpenFiles(t.TempDir())
	errtest.None(t, err)
	load(t, f)
	put := func(g uint64) error {
		r := sampleRecord()
		r.Generation = g
		return f.Put(&r)
	}
	has := func(what string, f *Files, want uint64) {
		t.Helper()
		if got := load(t, f)["abc"].Generation; got != want {
			t.Errorf("%s: generation %d, want %d", what, got, want)
		}
	}
	for g := range uint64(3) {
		errtest.None(t, put(g))
	}
	if err := f.changes.log.Discard(); err != nil { // every further write to it fails
		t.Fatal(err)
	}
	if put(3) == nil {
		t.Error("a change was accepted by a log that cannot be written")
	}
	has("a crash after the refusal", crash(t, f), 2)
	errtest.None(t, f.changes.fold())
	has("the files after the refusal", crash(t, f), 2)
	for g := range uint64(3) {
		errtest.None(t, put(3+g))
	}
	has("a crash after later changes", crash(t, f), 5)
	errtest.None(t, f.Close())
	if f, err = OpenFiles(f.Dir()); err != nil {
		t.Fatal(err)
	}
	has("a clean end", f, 5)
	errtest.None(t, f.Close())
}
