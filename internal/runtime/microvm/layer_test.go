package microvm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/guest"
)

// layered returns a bench whose guests have a root and their own layer.
func layered(t *testing.T, kind string) *bench {
	t.Helper()
	parts, err := rig()
	need(t, err)
	if _, err := FindTool("mke2fs"); err != nil {
		need(t, &absent{"no mke2fs (Debian package e2fsprogs)"})
	}
	root := t.TempDir()
	put(t, root, parts.program, "/bin/guest")
	errtest.None(t, os.Mkdir(filepath.Join(root, "var"), 0o755))
	return newBench(t, func(c *Config) {
		c.Layer = 1 << 30
		c.Machine = func(string) (Machine, error) { return Machine{Memory: 128 << 20, Kind: kind, Root: root}, nil }
	})
}

// again starts an instance's next run.
func (b *bench) again(id string, run uint64) *Work {
	b.t.Helper()
	w, err := b.Start(b.t.Context(), b.launch(id, run, "guest", "serve", ":80"))
	if err != nil {
		b.t.Fatal(err)
	}
	listening(b.t, w.(*Work), "80")
	return w.(*Work)
}

// stop ends a run in the way a stop by a user does.
func (b *bench) stop(w *Work) {
	b.t.Helper()
	if err := w.Signal(syscall.SIGTERM); err != nil {
		b.t.Fatal(err)
	}
	b.exit()
	if err := w.Kill(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	b.clean(w.id)
}

// crash ends a run in the way a power failure does.
func (b *bench) crash(w *Work) {
	b.t.Helper()
	if err := syscall.Kill(w.Identity().PID, syscall.SIGKILL); err != nil {
		b.t.Fatal(err)
	}
	b.exit()
	b.clean(w.id)
}

// used returns a file's disk usage in bytes.
func used(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	errtest.None(t, unix.Stat(path, &st))
	return st.Blocks * 512
}

// TestLayer checks that a guest's changes to its root survive a stop, a kill, a
// hibernation, a kill while paused, and a boot because its snapshot did not
// fit. Deleted files free their space, and the layer is removed with the
// instance.
func TestLayer(t *testing.T) {
	b := layered(t, "microvm")
	w := b.again("own", 1)
	file := b.layer("own")
	if n := used(t, file); n > 4<<20 {
		t.Errorf("an empty layer takes %d bytes", n)
	}
	want := map[string]string{}
	write := func(name string) { // does not sync: stopping the guest must
		t.Helper()
		b.must("own", "put", "/var/"+name, "before "+name)
		want[name] = "before " + name
	}
	synced := func(name string) {
		t.Helper()
		want[name] = b.must("own", "fill", "/var/"+name, "300000", name)
	}
	check := func() {
		t.Helper()
		for name, text := range want {
			do := "get"
			if !strings.HasPrefix(text, "before ") {
				do = "sum"
			}
			if got := b.must("own", do, "/var/"+name); got != text {
				t.Errorf("%s: %q, want %q", name, got, text)
			}
		}
	}
	freeze := func() {
		t.Helper()
		w.Flush(t.Context())
		errtest.None(t, w.Freeze(t.Context()))
	}
	save := func() {
		t.Helper()
		freeze()
		errtest.Get(w.Hibernate(t.Context()))(t)
	}

	write("stop")
	b.stop(w)
	w = b.again("own", 2)
	check()
	before := w.Sample(nil)
	synced("crash")
	if after := w.Sample(nil); errors.Join(before.DiskErr, after.DiskErr) != nil || after.DiskBytes-before.DiskBytes < 300000 {
		t.Errorf("300 kB written to its disk: %d, %v bytes before, %d, %v afterwards", before.DiskBytes, before.DiskErr, after.DiskBytes, after.DiskErr)
	}
	b.crash(w)
	w = b.again("own", 3)
	check()
	write("killed")
	errtest.None(t, w.Kill(t.Context()))
	b.exit()
	w = b.again("own", 4)
	check()
	write("hibernate")
	save()
	errtest.None(t, w.Thaw())
	check()
	write("paused")
	freeze()
	b.crash(w)
	w = b.again("own", 5)
	check()

	write("refused")
	save()
	if man, err := readManifest(b.dir("own")); err != nil || man.Layer == "" {
		t.Errorf("the manifest says nothing of the layer: %+v, %v", man, err)
	}
	now := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Sec: 1_000_000_000}}
	errtest.None(t, unix.UtimesNanoAt(unix.AT_FDCWD, file, now, 0))
	var bad *instance.SnapshotError
	if err := w.Thaw(); !errors.As(err, &bad) || !strings.Contains(bad.Reason, "disk") {
		t.Fatalf("its disk was written to: %v", err)
	}
	errtest.None(t, w.Kill(t.Context()))
	b.exit()
	w = b.again("own", 6)
	check()

	b.must("own", "fill", "/var/large", "50000000", "x")
	full := used(t, file)
	b.must("own", "rmrf", "/var/large")
	until(t, "what was removed is given back", func() bool { return used(t, file) < full-40_000_000 })
	b.stop(w)
	errtest.None(t, b.Forget(t.Context(), "own"))
	if l, err := os.ReadDir(b.layers()); err != nil || len(l) > 0 {
		t.Errorf("left over: %v, %v", l, err)
	}
}

// TestLayerOfClone checks that a clone starts with its source's files, and that
// neither sees the other's later writes, even after the clone boots.
func TestLayerOfClone(t *testing.T) {
	b := layered(t, "q35")
	w := b.again("from", 1)
	b.must("from", "put", "/var/file", "first")
	w.Flush(t.Context())
	errtest.None(t, w.Freeze(t.Context()))
	errtest.Get(w.Hibernate(t.Context()))(t)
	errtest.Get(b.Clone(t.Context(), "from", b.launch("to", 1)))(t)
	aw, err := b.Adopt(t.Context(), "to", instance.Identity{Run: 1})
	if err != nil {
		t.Fatal(err)
	}
	c := aw.(*Work)
	for _, w := range []*Work{w, c} {
		errtest.None(t, w.Thaw())
		if got := b.must(w.id, "get", "/var/file"); got != "first" {
			t.Errorf("%s has %q", w.id, got)
		}
		b.must(w.id, "put", "/var/file", w.id)
		b.must(w.id, "put", "/var/"+w.id, w.id)
	}
	b.refused("from", syscall.ENOENT, "get", "/var/to")
	b.refused("to", syscall.ENOENT, "get", "/var/from")
	b.stop(w)
	b.stop(c)
	for _, id := range []string{"from", "to"} {
		w := b.again(id, 2)
		if got := b.must(id, "get", "/var/file"); got != id {
			t.Errorf("%s has %q", id, got)
		}
		if got := b.must(id, "get", "/etc/hosts"); got != "127.0.0.1 localhost "+id {
			t.Errorf("%s calls itself %q", id, got)
		}
		b.stop(w)
	}
}

// TestLayerBroken checks that a layer that cannot be mounted is reported with the
// kernel's message, is not attributed to KVM, and stays unchanged.
func TestLayerBroken(t *testing.T) {
	b := layered(t, "q35")
	b.stop(b.again("broken", 1))
	junk := []byte(strings.Repeat("junk", 1<<12))
	f, err := os.OpenFile(b.layer("broken"), os.O_WRONLY, 0)
	errtest.None(t, err)
	errtest.Get(f.WriteAt(junk, 0))(t)
	errtest.None(t, f.Close())
	_, err = b.Start(t.Context(), b.launch("broken", 2, "guest", "serve", ":80"))
	if err == nil || errors.Is(err, errNoBoot) || !strings.Contains(err.Error(), "vdb") {
		t.Fatalf("a broken disk: %v", err)
	}
	if text := b.console("broken"); !strings.Contains(text, "run 2") || !strings.Contains(text, "cannot mount") {
		t.Errorf("its console does not say so: %q", text)
	}
	got := make([]byte, len(junk))
	if f, err = os.Open(b.layer("broken")); err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.ReadAt(got, 0); err != nil || string(got) != string(junk) {
		t.Errorf("it was made anew (%v)", err)
	}
}

// TestLayerFull checks that, while this machine has no space left, the program's
// write fails even without a sync, and that the same run can write again once there
// is space. A machine whose guest agent cannot limit its disk is stopped meanwhile,
// and loses nothing. Each failure states the reason.
func TestLayerFull(t *testing.T) {
	b := layered(t, "q35")
	errtest.None(t, os.MkdirAll(b.layers(), 0o700))
	if err := unix.Mount("tmpfs", b.layers(), "tmpfs", 0, "size=128m,mode=700"); err != nil {
		t.Skipf("cannot mount a small file system here: %v", err)
	}
	defer func() {
		b.sweep()
		if err := unix.Unmount(b.layers(), unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	size := func(bytes int64) {
		t.Helper()
		errtest.None(t, unix.Mount("tmpfs", b.layers(), "tmpfs", unix.MS_REMOUNT, fmt.Sprintf("size=%d,mode=700", bytes)))
	}
	w := b.again("full", 1)
	b.must("full", "put", "/var/kept", "kept")
	if out, ok := b.try("full", "bulk", "/var/large", "300000000"); ok || !strings.HasPrefix(out, "errno 28 ") {
		t.Fatalf("on a full disk: %q, %t", out, ok)
	}
	until(t, "it says so", func() bool { w.Sample(nil); return strings.Contains(w.Trouble(), "is full") })
	t.Log(w.Trouble())
	c := dial(t, w)
	defer c.Close()
	talk(t, c, "it still serves")
	size(256 << 20)
	until(t, "there is room again", func() bool { w.Sample(nil); return w.Trouble() == "" })
	b.must("full", "bulk", "/var/more", "30000000")
	sum := b.must("full", "fill", "/var/synced", "8000000", "x")

	// This guest is not told how much space is left.
	w.noSpaceCall.Store(true)
	size(used(t, b.layer("full")) + 4<<20)
	wrote := make(chan string, 1)
	go func() {
		fill := instance.Command{Command: []string{"guest", "files", "fill", "/var/late", "40000000", "y"}}
		o, err := b.Exec(t.Context(), "full", fill)
		wrote <- fmt.Sprint(err == nil && o.ExitCode == 0, " ", strings.TrimSpace(o.Stdout), err)
	}()
	until(t, "it stands still", func() bool {
		w.Sample(nil)
		return strings.Contains(w.Trouble(), "own disk")
	})
	t.Log(w.Trouble())
	if s := w.Sample(nil); s.CPUErr == nil || !strings.Contains(s.CPUErr.Error(), "own disk") {
		t.Errorf("it is known: %v", s.CPUErr)
	}
	size(512 << 20)
	var late string
	select {
	case late = <-wrote:
	case <-time.After(waitLimit):
		t.Fatal("it does not continue")
	}
	late, ok := strings.CutSuffix(late, "<nil>")
	if ok = ok && strings.HasPrefix(late, "true "); !ok {
		t.Fatalf("it heard of an error: %s", late)
	}
	talk(t, c, "it serves again")
	errtest.None(t, w.Kill(t.Context()))
	b.exit()
	b.again("full", 2)
	for name, want := range map[string]string{"synced": sum, "late": strings.TrimPrefix(late, "true ")} {
		if got := b.must("full", "sum", "/var/"+name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if got := b.must("full", "get", "/var/kept"); got != "kept" {
		t.Errorf("it kept %q", got)
	}
}

// TestLayerFullAdopted checks that a restarted daemon adopts a machine stopped for
// lack of space, and that the machine continues once there is space.
func TestLayerFullAdopted(t *testing.T) {
	b := layered(t, "microvm")
	errtest.None(t, os.MkdirAll(b.layers(), 0o700))
	if err := unix.Mount("tmpfs", b.layers(), "tmpfs", 0, "size=128m,mode=700"); err != nil {
		t.Skipf("cannot mount a small file system here: %v", err)
	}
	defer func() {
		b.sweep()
		if err := unix.Unmount(b.layers(), unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	size := func(bytes int64) {
		t.Helper()
		errtest.None(t, unix.Mount("tmpfs", b.layers(), "tmpfs", unix.MS_REMOUNT, fmt.Sprintf("size=%d,mode=700", bytes)))
	}
	w := b.again("stands", 1)
	w.noSpaceCall.Store(true)
	errtest.None(t, w.call(t.Context(), callLimit, guest.Room, guest.RoomCall{Free: unlimited}, nil))
	size(used(t, b.layer("stands")) + 4<<20)
	over := make(chan struct{})
	go func() { // ends when this daemon closes the channel
		defer close(over)
		fill := instance.Command{Command: []string{"guest", "files", "fill", "/var/late", "40000000", "y"}}
		_, _ = b.Exec(t.Context(), "stands", fill)
	}()
	until(t, "it stands still", func() bool { return w.stands() != "" })
	errtest.None(t, b.Close())
	<-over
	w = b.next("stands")
	if err := w.Thaw(); err == nil || !strings.Contains(err.Error(), "own disk") {
		t.Errorf("it was thawed without room: %v", err)
	}
	size(512 << 20)
	until(t, "it continues", func() bool { return w.stands() == "" })
	errtest.None(t, w.Thaw())
	c := dial(t, w)
	defer c.Close()
	talk(t, c, "taken over")
	b.must("stands", "fill", "/var/more", "8000000", "x")
}
