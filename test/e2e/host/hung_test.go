package host

import (
	"syscall"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/hostctl"
)

// TestHungDaemonFailsOpen checks that clients of paused instances are answered
// while the daemon is stopped by a signal, and that the daemon's records are
// right once it continues.
func TestHungDaemonFailsOpen(t *testing.T) {
	d := host(t, "--probe", "50ms")
	addr := map[string]string{}
	for _, name := range []string{"a", "b"} {
		s, listen := web(t, name, false)
		s.PauseAfter = daemontest.Seconds(150 * time.Millisecond)
		addr[name] = listen
		d.Launch(s)
	}
	for range scaletest.Count(t, "LULL_HOST_HANGS", 1) {
		for name := range addr {
			d.Await(name, "paused")
		}
		errtest.None(t, syscall.Kill(d.PID(), syscall.SIGSTOP))
		began := time.Now()
		for name, a := range addr {
			if got, err := once(a, "hello"); err != nil || got != "echo hello" {
				t.Errorf("%s of a hung daemon: %q, %v", name, got, err)
			}
		}
		t.Logf("REPORT hung daemon: clients answered after %s", time.Since(began).Round(time.Millisecond))
		errtest.None(t, syscall.Kill(d.PID(), syscall.SIGCONT))
		for name := range addr {
			d.Until(name, "is known to have been thawed", func(o hostctl.Instance) bool {
				return o.LastResumedAt != nil && o.LastResumedAt.After(began)
			})
		}
	}
}

// TestBothKilledFailOpen checks that clients of paused instances are answered
// although the daemon and the shim were killed together.
func TestBothKilledFailOpen(t *testing.T) {
	d := host(t, "--probe", "50ms")
	s, addr := web(t, "a", false)
	s.PauseAfter = daemontest.Seconds(150 * time.Millisecond)
	d.Launch(s)
	d.Await("a", "paused")
	shim := d.ShimPID()
	d.Kill()
	errtest.None(t, syscall.Kill(shim, syscall.SIGKILL))
	began := time.Now()
	if got, err := once(addr, "hello"); err != nil || got != "echo hello" {
		t.Errorf("with the daemon and the shim killed: %q, %v", got, err)
	}
	t.Logf("REPORT both killed: a client is answered after %s", time.Since(began).Round(time.Millisecond))
	d.Boot()
	d.Await("a", "paused")
}
