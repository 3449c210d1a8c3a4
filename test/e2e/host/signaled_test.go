package host

import (
	"path/filepath"
	"syscall"
	"testing"

	"lull/internal/core/power"
	"lull/internal/host/records"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/platform/proc"
)

// TestSignaledStop kills a daemon in the middle of an automatic stop: the program
// is frozen with a pending SIGTERM, or the supervisor has thawed it and it takes
// a while to exit. It checks that the program's next run answers a client.
func TestSignaledStop(t *testing.T) {
	t.Parallel()
	for _, thawed := range []bool{false, true} {
		for _, relay := range []bool{false, true} {
			t.Run(map[bool]string{false: "frozen", true: "thawed"}[thawed]+map[bool]string{false: " direct", true: " relay"}[relay], func(t *testing.T) {
				t.Parallel()
				d := host(t, "--probe", "100ms", "--pause-after", "1h", "--stop-after", "1h")
				var args []string
				if thawed {
					args = []string{"-linger", "4s"}
				}
				s, addr := web(t, "a", relay, args...)
				s.StopAfter = nil
				pid := d.Launch(s).PID
				force(d, "a")
				d.Await("a", "paused")
				d.Kill()
				errtest.None(t, syscall.Kill(pid, syscall.SIGTERM))
				stopping(t, filepath.Join(d.Dir, "data"))
				if thawed {
					waittest.Until(t, "the supervisor thaws it", func() bool {
						pending, err := proc.Live().Pending(pid, syscall.SIGTERM)
						errtest.None(t, err)
						return !pending
					})
				}
				d.Boot()
				mustAnswer(t, addr)
				o := d.Await("a", "running")
				if o.PID == pid {
					t.Errorf("it is still process %d", pid)
				}
			})
		}
	}
}

// stopping changes the only record below data to that of an instance whose
// automatic stop has begun.
func stopping(t *testing.T, data string) {
	t.Helper()
	f, err := records.OpenFiles(data)
	errtest.None(t, err)
	defer f.Close()
	all, err := f.Load()
	if err != nil || len(all) != 1 {
		t.Fatalf("%d records, %v", len(all), err)
	}
	all[0].State, all[0].StoppedBy = power.Stopping, "stop_after"
	errtest.None(t, f.Put(&all[0]))
}
