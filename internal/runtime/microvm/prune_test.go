package microvm

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
)

// TestPruneKeepsWhatGuestsHave checks that the disk of an existing guest and a
// memory shared with a clone are kept, and that every other file can be removed.
func TestPruneKeepsWhatGuestsHave(t *testing.T) {
	r := &Runtime{cfg: Config{Dir: t.TempDir()}, works: map[string]*Work{}}
	put := func(parts ...string) string {
		path := filepath.Join(append([]string{r.cfg.Dir}, parts...)...)
		errtest.None(t, os.MkdirAll(filepath.Dir(path), 0o700))
		errtest.None(t, os.WriteFile(path, []byte("x"), 0o600))
		return path
	}
	old := time.Unix(1_000_000, 0)
	used, free := put("images", "used.ext4"), put("images", "free.ext4")
	shared, alone := put("templates", "shared", memoryFile), put("templates", "alone", memoryFile)
	began := put("boot", "used.cpio")
	ended := []string{put("boot", "old.cpio"), put("boot", "old.kernel")}
	put("vm", "g", errorsFile)
	errtest.None(t, writeRecord(r.dir("g"), runRecord{Run: 1, Root: used, Initrd: began, Template: "shared"}))
	for _, f := range []string{used, free} {
		errtest.None(t, os.Chtimes(f, old, old))
	}
	errtest.None(t, touch(used))
	l, err := r.Images(t.Context())
	if err != nil || len(l) != 6 {
		t.Fatalf("%+v, %v", l, err)
	}
	for _, i := range l {
		// A saved guest identifies its disk by its modification time.
		if i.Kind == kindDisk && (!i.MadeAt.Equal(old) || i.UsedAt.After(old) != i.InUse) {
			t.Errorf("made and used long ago, %s: %+v", i.ID, i)
		}
		if i.InUse != (i.ID == "used.ext4" || i.ID == "used.cpio") {
			t.Errorf("%+v", i)
		}
	}
	for _, bad := range []string{"", "..", "used.ext4", "nothing.ext4", "used.cpio", "nothing.kernel"} {
		if err := r.RemoveImage(t.Context(), bad); err == nil {
			t.Errorf("%q was removed", bad)
		}
	}
	for _, id := range []string{"free.ext4", "old.cpio", "old.kernel"} {
		if err := r.RemoveImage(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	there := func(path string) bool { _, err := os.Stat(path); return err == nil }
	if _, err := r.sweepTemplates(); err != nil || there(ended[0]) || there(ended[1]) || !there(began) || there(alone) || !there(shared) || there(free) || !there(used) {
		t.Errorf("swept: %v", err)
	}
	own, stopped := put("layers", "g"), put("layers", "stopped")
	if l, err = r.Images(t.Context()); err != nil || len(slices.DeleteFunc(l, func(i instance.Image) bool { return i.Kind != kindGuest })) != 2 {
		t.Errorf("a guest that ran and one that is stopped: %+v, %v", l, err)
	}
	if err := r.RemoveImage(t.Context(), "g"); err != nil || there(r.dir("g")) || there(shared) || there(own) || !there(stopped) {
		t.Errorf("the guest without an owner: %v", err)
	}
	errtest.None(t, os.WriteFile(put("vm", "h", recordFile), []byte("{"), 0o600))
	if _, err := r.Images(t.Context()); err == nil { // the record of a guest is unreadable, so which images it uses is unknown
		t.Error("a guest with a damaged record has no disk")
	}
}

// TestClearHalfMade checks that incomplete files left by a crash are removed
// when the runtime opens, and that the rest stays.
func TestClearHalfMade(t *testing.T) {
	dir := t.TempDir()
	file := func(parts ...string) string {
		path := filepath.Join(append([]string{dir}, parts...)...)
		errtest.None(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte("x"), 0o755)))
		return path
	}
	half := []string{file("images", "new-1"), file("boot", "new-2"), file("templates", "new-3", memoryFile)}
	whole := []string{file("images", "a.ext4"), file("boot", "a.cpio"), file("templates", "a", memoryFile), file("vm", "new-instance", recordFile)}
	self, err := os.Executable()
	errtest.None(t, err)
	r, err := New(Config{Dir: dir, QEMU: self, Kernel: self, Harness: self})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for _, path := range half {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
	for _, path := range whole {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
}

// TestAppear checks that a file that cannot be made durable does not get its final
// name.
func TestAppear(t *testing.T) {
	dir := t.TempDir()
	tmp, path := filepath.Join(dir, "new-1"), filepath.Join(dir, "a.ext4")
	if err := os.Symlink(os.DevNull, tmp); err != nil { // /dev/null cannot be synced
		t.Fatal(err)
	}
	if err := appear(tmp, path); err == nil {
		t.Error("a file that cannot be synced appeared")
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it has its name before it is durable: %v", err)
	}
	if err := errors.Join(os.Remove(tmp), os.WriteFile(tmp, []byte("x"), 0o600), appear(tmp, path)); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "x" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestToolEndsWithTheDaemon checks that a tool that builds a disk ends when this
// process is killed.
func TestToolEndsWithTheDaemon(t *testing.T) {
	const where = "LULL_TEST_MAKES_A_DISK_IN"
	if dir := os.Getenv(where); dir != "" {
		r := &Runtime{cfg: Config{Dir: dir}, making: make(chan struct{}, 1)}
		_, err := r.makeImage(t.Context(), t.TempDir(), "")
		t.Fatal("it came back", err)
	}
	dir := t.TempDir()
	said := filepath.Join(dir, "pid")
	tool := "#!/bin/sh\necho $$ >" + said + ".new && mv " + said + ".new " + said + "\nexec sleep 600\n"
	errtest.None(t, os.WriteFile(filepath.Join(dir, "mke2fs"), []byte(tool), 0o755))
	cmd := exec.Command(os.Args[0], "-test.run", "^TestToolEndsWithTheDaemon$")
	cmd.Env = append(os.Environ(), where+"="+dir, "PATH="+dir+":"+os.Getenv("PATH"), "TMPDIR="+t.TempDir())
	errtest.None(t, cmd.Start())
	var made process
	until(t, "the tool runs", func() bool {
		b, err := os.ReadFile(said)
		if err != nil {
			return false
		}
		if made.pid, err = strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			made.start, _, err = startTime(made.pid)
		}
		if err != nil {
			t.Error(err)
		}
		return true
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait() // an error, because the tool was killed
	until(t, "it ends with what started it", func() bool { return !made.alive() })
	if left, err := filepath.Glob(filepath.Join(dir, "images", "new-*")); err != nil || len(left) != 1 {
		t.Errorf("half made: %v, %v", left, err)
	}
}
