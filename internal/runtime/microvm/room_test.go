package microvm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
)

// TestNoRoom checks that the exit of a QEMU killed by a full disk says so, and that
// other exits do not mention disks.
func TestNoRoom(t *testing.T) {
	dir := t.TempDir()
	for sig, want := range map[syscall.Signal]string{
		syscall.SIGBUS:  "QEMU was killed by signal 7 (bus error): there is no room for its memory on the file system of " + dir,
		syscall.SIGKILL: "QEMU was killed by signal 9 (killed)",
		syscall.SIGSEGV: "QEMU was killed by signal 11 (segmentation fault)",
	} {
		w := (&Runtime{cfg: Config{Dir: dir}}).newWork("a")
		w.rec.Machine.Memory = 128 << 20
		w.status, w.exited = syscall.WaitStatus(sig), true
		e := w.outcome()
		if e.Signal != int(sig) || !strings.HasPrefix(e.Machine, want) || strings.Contains(e.Machine, "128 MiB") != (sig == syscall.SIGBUS) {
			t.Errorf("%v: %+v", sig, e)
		}
		err := w.noBoot()
		if byItself := sig == syscall.SIGSEGV; errors.Is(err, errNoBoot) != byItself || strings.Contains(err.Error(), want) == byItself {
			t.Errorf("%v while it boots: %v", sig, err)
		}
		var ended *instance.EndedError
		if errors.As(err, &ended) != (sig == syscall.SIGKILL) || ended != nil && ended.Exit.Signal != int(sig) {
			t.Errorf("%v while it boots: %+v", sig, ended)
		}
		w.cancel()
	}
}

// TestShortage checks that a saved state is kept if QEMU rejects it for lack of
// resources, and not if QEMU cannot read it.
func TestShortage(t *testing.T) {
	for said, short := range map[string]bool{
		"qemu-system-x86_64: cannot set up guest memory 'ram': Cannot allocate memory": true,
		"qemu-system-x86_64: Failed to allocate memory":                                true,
		"qemu-system-x86_64: error while loading state: No space left on device":       true,
		"qemu-system-x86_64: load of migration failed: Invalid argument":               false,
		"": false,
	} {
		r := &Runtime{cfg: Config{Dir: t.TempDir()}}
		w := r.newWork("a")
		w.status, w.exited = syscall.WaitStatus(1<<8), true // exited with 1
		close(w.gone)
		errtest.None(t, errors.Join(os.MkdirAll(r.dir("a"), 0o700), os.WriteFile(w.path(errorsFile), []byte(said), 0o600)))
		err := w.refused(t.Context(), errMonitorEnded)
		var unusable *instance.SnapshotError
		if errors.As(err, &unusable) == short || !strings.Contains(err.Error(), said) || strings.Contains(err.Error(), "is retried") != short {
			t.Errorf("%q: %v", said, err)
		}
		w.cancel()
	}
}

// TestEndedWhileRestored checks that a QEMU killed by a signal while it read a
// state says so, and that the state is kept.
func TestEndedWhileRestored(t *testing.T) {
	r := &Runtime{cfg: Config{Dir: t.TempDir()}}
	w := r.newWork("a")
	defer w.cancel()
	w.status, w.exited = syscall.WaitStatus(syscall.SIGKILL), true
	close(w.gone)
	err := w.refused(t.Context(), errMonitorEnded)
	var unusable *instance.SnapshotError
	if errors.As(err, &unusable) || !strings.Contains(err.Error(), "signal 9") {
		t.Errorf("killed: %v", err)
	}
}

// TestFullDisk checks that a start, a save, a restore and a clone are refused
// before anything is written if space is missing, with how much and where, and
// succeed once there is space.
func TestFullDisk(t *testing.T) {
	var dir string
	size := func(bytes int64) error {
		return unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, fmt.Sprintf("size=%d,mode=700", bytes))
	}
	b := newBench(t, func(c *Config) {
		dir = c.Dir
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64m,mode=700"); err != nil {
			t.Skipf("cannot mount a small file system here: %v", err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	})
	full := func(what string, err error) {
		t.Helper()
		var no *instance.NoRoomError
		if !errors.As(err, &no) || no.Needs <= no.Free || !strings.HasPrefix(no.Path, dir) || !strings.Contains(no.What, what) {
			t.Fatalf("without room for %s: %v", what, err)
		}
		t.Log(err)
	}
	// leave shrinks the file system until only that much is free.
	leave := func(bytes int64) {
		t.Helper()
		var st unix.Statfs_t
		errtest.None(t, unix.Statfs(dir, &st))
		errtest.None(t, size(int64(st.Blocks-st.Bfree)*st.Bsize+bytes))
	}
	enough := func() {
		t.Helper()
		errtest.None(t, size(1<<30))
	}
	nothing := func(id string) {
		t.Helper()
		if _, err := os.Stat(b.dir(id)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("something is left of %s: %v", id, err)
		}
	}
	_, err := b.Start(t.Context(), b.launch("full", 1, "guest", "serve", ":80"))
	full("its memory", err)
	nothing("full")
	enough()
	w := b.start("full", "guest", "serve", ":80")
	listening(t, w, "80")
	c := dial(t, w)
	talk(t, c, "before")
	errtest.None(t, w.Freeze(t.Context()))
	leave(1 << 20)
	_, err = w.Hibernate(t.Context())
	full("its state", err)
	if w.Hibernated() || !w.isFrozen() {
		t.Fatal("it is not frozen as before")
	}
	enough()
	errtest.Get(w.Hibernate(t.Context()))(t)
	leave(1 << 20)
	full("its memory", w.Thaw())
	if !w.Hibernated() {
		t.Fatal("it is not on disk any more")
	}
	c.Close()
	until(t, "no client is connected", func() bool { open, _ := w.net.Opens(); return len(open) == 0 })
	_, err = b.Clone(t.Context(), "full", b.launch("copy", 1))
	full("the memory that clones share", err)
	nothing("copy")
	enough()
	errtest.None(t, w.Thaw())
	c = dial(t, w)
	defer c.Close()
	talk(t, c, "after")
}

// TestWakeWithoutMemory checks that a saved guest stays on disk, with the reason,
// while this machine lacks memory for its QEMU, and is restored once there is
// enough.
func TestWakeWithoutMemory(t *testing.T) {
	b := newBench(t, nil)
	w := b.start("short", "guest", "serve", ":80")
	listening(t, w, "80")
	c := dial(t, w)
	defer c.Close()
	talk(t, c, "before")
	errtest.None(t, w.Freeze(t.Context()))
	errtest.Get(w.Hibernate(t.Context()))(t)
	dir, err := os.MkdirTemp("", "qemu") // a directory that QEMU's own user may enter
	errtest.None(t, err)
	defer os.RemoveAll(dir)
	short := filepath.Join(dir, "qemu")
	script := fmt.Sprintf("#!/bin/sh\nulimit -v %d\nexec %s \"$@\"\n", 200<<10, b.parts().qemu) // in KiB; QEMU needs twice as much
	errtest.None(t, errors.Join(os.Chmod(dir, 0o755), os.WriteFile(short, []byte(script), 0o755)))
	enough := b.parts().qemu
	b.parts().qemu = short
	err = w.Thaw()
	var unusable *instance.SnapshotError
	if err == nil || errors.As(err, &unusable) || shortage(err.Error()) != syscall.ENOMEM.Error() || !w.Hibernated() {
		t.Fatalf("without memory: %v, hibernated %t", err, w.Hibernated())
	}
	t.Log(err)
	b.parts().qemu = enough
	errtest.None(t, w.Thaw())
	talk(t, c, "after")
}

// TestRoomIsReserved checks that concurrent operations begin only if there is space
// for all of them, and that the space is released when they end.
func TestRoomIsReserved(t *testing.T) {
	dir := t.TempDir()
	free, err := freeBytes(dir)
	errtest.None(t, err)
	most := writes{"its memory", filepath.Join(dir, "a", "b"), free / 10 * 6}
	r := &reserved{}
	for range 2 {
		var mu sync.Mutex
		var begun []func()
		var refused int
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				give, err := r.take(most, writes{"nothing", "/nowhere", 0})
				mu.Lock()
				defer mu.Unlock()
				var no *instance.NoRoomError
				switch {
				case err == nil:
					begun = append(begun, give)
				case errors.As(err, &no) && no.Free < no.Needs && strings.HasPrefix(no.Path, dir):
					refused++
				default:
					t.Error(err)
				}
			})
		}
		all.Wait()
		if len(begun) != 1 || refused != 7 {
			t.Fatalf("%d operations that need 60 %% of the room have begun together, %d were refused", len(begun), refused)
		}
		begun[0]()
		begun[0]() // a second call must not release the space again
	}
	half := writes{"its memory", dir, free / 10 * 4}
	a, err := r.take(half)
	errtest.None(t, err)
	b, err := r.take(half)
	if err != nil {
		t.Fatalf("two for which there is room: %v", err)
	}
	a()
	b()
}
