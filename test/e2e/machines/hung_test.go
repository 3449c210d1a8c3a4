package machines

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/why"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/hostctl"
)

// TestHungAtRestart checks that QEMUs that hang while the daemon is killed and
// restarted are reported, do not delay other instances, and can be stopped and
// removed.
func TestHungAtRestart(t *testing.T) {
	d := host(t)
	files := small(t)
	stopped := run(d, "stopped", files, []int{80}, nil, "guest", "serve", ":80")
	removed := run(d, "removed", files, []int{80}, nil, "guest", "serve", ":80")
	well := run(d, "well", files, []int{80}, nil, "guest", "serve", ":80")
	well.send("count")
	stopped.signal(syscall.SIGSTOP)
	removed.signal(syscall.SIGSTOP)
	d.Kill()
	d.Boot()
	if got := well.send("count"); got != "counted 2" {
		t.Errorf("the guest that is well %s", got)
	}
	daemontest.Wait(t, "it says that it was not taken over", func() (bool, string) {
		y, err := d.Why(t.Context(), "stopped", time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		return y.Fact(why.Unreached.Code) != nil && y.Instance.PauseAt == nil, y.Answer
	})
	d.Must("stopped", "stop")
	if o := stopped.is("stopped"); !strings.Contains(o.StatusReason, "cleanly") {
		t.Errorf("it was stopped: %s", o.StatusReason)
	}
	if err := d.Remove(t.Context(), "removed"); err != nil {
		t.Error(err)
	}
	d.Must("stopped", "start")
	if got := stopped.send("count"); got != "counted 1" {
		t.Errorf("started again it %s", got)
	}
}

// TestRestartWithoutKernel checks that a daemon whose guest kernel has
// disappeared can still adopt running guests, relay to them, pause and wake them,
// and stop them.
func TestRestartWithoutKernel(t *testing.T) {
	d := host(t)
	b := run(d, "a", small(t), []int{80}, nil, "guest", "serve", ":80")
	b.send("count")
	d.Kill()
	c := b.dial(0) // waits for the next daemon
	d.Set("--guest-kernel", "/nowhere")
	d.Boot()
	if got := b.ask(c, "count"); got != "counted 2" {
		t.Errorf("a client that came without a daemon: it %s", got)
	}
	c.Close()
	b.pause()
	if got := b.send("count"); got != "counted 3" {
		t.Errorf("woken it %s", got)
	}
	d.Must("a", "stop")
	b.is("stopped")
	if _, err := d.Do(t.Context(), "a", "start", nil); err == nil || !strings.Contains(err.Error(), "guest kernel") {
		t.Errorf("it was started: %v", err)
	}
	if err := d.Remove(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

// TestGuestFailsOpen checks that no guest that lull has paused stays paused if
// the daemon hangs, or is killed together with the shim. The next daemon must set
// the guest's clock.
func TestGuestFailsOpen(t *testing.T) {
	d := host(t)
	b := run(d, "a", small(t), []int{80}, nil, "guest", "serve", ":80")
	b.send("count")
	for n, c := range []struct {
		name string
		do   func() (undo func())
	}{
		{"the daemon hangs", func() func() {
			errtest.None(t, syscall.Kill(d.PID(), syscall.SIGSTOP))
			return func() {
				errtest.None(t, syscall.Kill(d.PID(), syscall.SIGCONT))
			}
		}},
		{"daemon and shim are killed", func() func() {
			shim := d.ShimPID()
			d.Kill()
			errtest.None(t, syscall.Kill(shim, syscall.SIGKILL))
			return d.Boot
		}},
	} {
		b.pause()
		home := b.home()
		began := time.Now()
		undo := c.do()
		daemontest.Wait(t, c.name+": the shim or its watchdog has continued the guest", func() (bool, string) {
			text, err := os.ReadFile(filepath.Join(d.Dir, "data", "shim", "shim.log"))
			return err == nil && strings.Count(string(text), "by="+home+"/go.sock") > n, string(text)
		})
		t.Logf("REPORT microVM, %s: continued after %s", c.name, time.Since(began).Round(time.Millisecond))
		undo()
		d.Until("a", "its resume is known", func(o hostctl.Instance) bool {
			return o.State == "running" && o.LastResumedAt != nil && o.LastResumedAt.After(began)
		})
		if got, want := b.send("count"), fmt.Sprint("counted ", n+2); got != want {
			t.Errorf("%s: it %s, want %s", c.name, got, want)
		}
	}
}
