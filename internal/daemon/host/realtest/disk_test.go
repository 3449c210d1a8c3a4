package realtest

import (
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"lull/internal/daemon/host/daemontest"
	"lull/internal/idle"
	"lull/internal/link/hostctl"
)

// A program that writes and syncs ten times a second is never frozen, and what
// nothing could wake is not paused by default.
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
	if err := syscall.Kill(d.Look("writer").PID, syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	d.Await("writer", "paused")
	cron := d.Look("cron")
	if cron.State != "running" || cron.PauseCount != 0 || len(cron.Blocks) == 0 || cron.PauseAt != nil {
		t.Errorf("what nothing wakes is %s, paused %d times, to be paused at %v: %v", cron.State, cron.PauseCount, cron.PauseAt, cron.Blocks)
	}
}
