package microvm

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestPruneKeepsWhatGuestsHave: the disk of a guest that is there stays, and so
// does the memory that a clone shares; the rest can go.
func TestPruneKeepsWhatGuestsHave(t *testing.T) {
	r := &Runtime{cfg: Config{Dir: t.TempDir()}, works: map[string]*Work{}}
	put := func(parts ...string) string {
		path := filepath.Join(append([]string{r.cfg.Dir}, parts...)...)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	old := time.Unix(1_000_000, 0)
	used, free := put("images", "used.ext4"), put("images", "free.ext4")
	shared, alone := put("templates", "shared", memoryFile), put("templates", "alone", memoryFile)
	put("vm", "g", errorsFile)
	if err := writeRecord(r.dir("g"), runRecord{Run: 1, Root: used, Template: "shared"}); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{used, free} {
		if err := os.Chtimes(f, old, old); err != nil {
			t.Fatal(err)
		}
	}
	if err := touch(used); err != nil {
		t.Fatal(err)
	}
	l, err := r.Images(t.Context())
	if err != nil || len(l) != 3 {
		t.Fatalf("%+v, %v", l, err)
	}
	for _, i := range l {
		// A saved guest knows its disk by the time at which that was made.
		if i.Kind == kindDisk && (!i.MadeAt.Equal(old) || i.UsedAt.After(old) != i.InUse) {
			t.Errorf("made and used long ago, %s: %+v", i.ID, i)
		}
		if i.InUse != (i.ID == "used.ext4") {
			t.Errorf("%+v", i)
		}
	}
	for _, bad := range []string{"", "..", "used.ext4", "nothing.ext4"} {
		if err := r.RemoveImage(t.Context(), bad); err == nil {
			t.Errorf("%q was removed", bad)
		}
	}
	if err := r.RemoveImage(t.Context(), "free.ext4"); err != nil {
		t.Error(err)
	}
	there := func(path string) bool { _, err := os.Stat(path); return err == nil }
	if _, err := r.sweepTemplates(); err != nil || there(alone) || !there(shared) || there(free) || !there(used) {
		t.Errorf("swept: %v", err)
	}
	if err := r.RemoveImage(t.Context(), "g"); err != nil || there(r.dir("g")) || there(shared) {
		t.Errorf("the guest that nobody has: %v", err)
	}
	if err := os.WriteFile(put("vm", "h", recordFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Images(t.Context()); err == nil { // what it uses is not known
		t.Error("a guest with a damaged record has no disk")
	}
}
