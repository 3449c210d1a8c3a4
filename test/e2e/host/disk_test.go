package host

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/idle"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/hostctl"
)

// TestDiskWorkAndNoPort checks that a program that writes and syncs ten times a
// second is not frozen, and that an instance that nothing could wake is not
// paused by default.
func TestDiskWorkAndNoPort(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "500ms", "--pause-after", "1s")
	writer := spec("writer", "record", filepath.Join(t.TempDir(), "log"), "100ms")
	writer.PauseAfter = daemontest.Seconds(time.Second)
	d.Launch(writer)
	d.Launch(spec("cron", "tick", "1h"))
	seen := map[time.Time]bool{}
	d.Until("writer", "was seen at work ten times", func(o hostctl.Instance) bool {
		if o.PauseCount > 0 {
			t.Fatal("it was paused while it wrote")
		}
		for _, r := range o.Activity {
			switch {
			case r.Signal != "disk":
			case r.State == idle.Absent:
				t.Skip("this kernel does not count disk traffic")
			case r.State == idle.Active:
				seen[r.At] = true
			}
		}
		return len(seen) >= 10
	})
	errtest.None(t, syscall.Kill(d.Show("writer").PID, syscall.SIGHUP))
	d.Await("writer", "paused")
	cron := d.Show("cron")
	if cron.State != "running" || cron.PauseCount != 0 || len(cron.Blocks) == 0 || cron.PauseAt != nil {
		t.Errorf("what nothing wakes is %s, paused %d times, to be paused at %v: %v", cron.State, cron.PauseCount, cron.PauseAt, cron.Blocks)
	}
}

// TestFullFileSystem fills the file system with the host's data. Users' requests
// must work, ps and why must name the disk, and no automatic action may happen.
// With free space again everything must continue, and the requests made in the
// meantime must be on disk.
func TestFullFileSystem(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16m,mode=755"); err != nil {
		t.Skipf("cannot mount a small file system here: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	d := daemontest.Start(t, daemontest.Config{Under: dir, Args: []string{"--probe", "50ms"}})
	addr := map[string]string{}
	for _, name := range []string{"paused", "stopped", "removed", "idle", "woken"} {
		s, listen := web(t, name, name == "woken")
		s.PauseAfter = daemontest.Seconds(0)
		if name == "idle" {
			s.PauseAfter = daemontest.Seconds(2 * time.Second)
		}
		addr[name] = listen
		d.Launch(s)
	}
	d.Must("woken", "pause")
	filler := filepath.Join(dir, "filler")
	fill := func() {
		t.Helper()
		f, err := os.OpenFile(filler, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		errtest.None(t, err)
		defer f.Close()
		for size := 1 << 20; size > 0; { // fill it to the last byte
			if _, err := f.Write(make([]byte, size)); errors.Is(err, unix.ENOSPC) {
				size /= 2
			} else if err != nil {
				t.Fatal(err)
			}
		}
	}
	fill()
	before := d.Show("idle")

	d.Must("paused", "pause")
	d.Must("stopped", "stop")
	if err := d.Remove(t.Context(), "removed"); err != nil {
		t.Errorf("rm on a full disk: %v", err)
	}
	fill() // the removed instance freed some space
	for name, want := range map[string]string{"paused": "paused", "stopped": "stopped"} {
		if o := d.Show(name); o.State != want {
			t.Errorf("%s on a full disk: %s", want, daemontest.Describe(o))
		}
	}
	mustAnswer(t, addr["woken"])
	// A pause that could not be recorded is undone.
	o := d.Until("idle", "names the disk, and runs", func(o hostctl.Instance) bool { return o.Unwritable != "" && o.State == "running" })
	if o.PauseAt != nil || o.PauseCount != before.PauseCount {
		t.Errorf("what is idle on a full disk: %s, to be paused at %v", daemontest.Describe(o), o.PauseAt)
	}
	d.Until("idle", "is held by the disk", func(o hostctl.Instance) bool {
		return slices.ContainsFunc(o.Blocks, func(b idle.Block) bool { return b.Code == "disk_unwritable" })
	})
	if y, err := d.Why(t.Context(), "idle", time.Time{}); err != nil || y.Instance.Unwritable == "" {
		t.Errorf("why on a full disk: %q, %v", y.Answer, err)
	}

	errtest.None(t, os.Remove(filler))
	d.Await("idle", "paused")
	d.Kill()
	d.Boot()
	for name, want := range map[string]string{"paused": "paused", "stopped": "stopped", "idle": "paused"} {
		d.Await(name, want)
	}
	if _, err := d.Get(t.Context(), "removed"); err == nil {
		t.Error("what was removed on a full disk is back")
	}
	for _, name := range []string{"paused", "idle", "woken"} {
		mustAnswer(t, addr[name])
	}
}
