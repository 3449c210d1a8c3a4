package machines

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/why"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/hostctl"
)

// deep sets timers with which a guest goes down the ladder soon after a manual
// pause.
func deep(s *instance.Spec) {
	s.ReclaimAfter, s.HibernateAfter = idle.Duration(200*time.Millisecond), idle.Duration(400*time.Millisecond)
}

// TestDaemonKilled kills the daemon with SIGKILL while a guest runs, is paused or
// is being saved. The next daemon must find the guest as it was, with its
// counters.
func TestDaemonKilled(t *testing.T) {
	d := host(t)
	b := run(d, "a", small(t), []int{80}, nil, "guest", "serve", ":80")
	again := func(want, count string) {
		t.Helper()
		pid := b.get().PID
		d.Kill()
		d.Boot()
		b.Until(b.name, fmt.Sprintf("it is taken over while %s, process %d", want, pid), func(o hostctl.Instance) bool {
			return o.State == want && o.PID == pid && o.RestartCount == 0
		})
		if got := b.send("count"); got != "counted "+count {
			t.Errorf("after a kill while %s: %s", want, got)
		}
		b.is("running")
	}
	b.send("count")
	again("running", "2")
	b.pause()
	again("paused", "3")
	d2 := run(d, "b", small(t), []int{80}, deep, "guest", "serve", ":80")
	d2.send("count")
	d2.sinks("hibernated")
	b = d2
	again("hibernated", "2")
}

// TestFaults causes one fault after another around one instance, and checks that
// each is reported and survived.
func TestFaults(t *testing.T) {
	d := host(t)
	b := run(d, "a", small(t), []int{80}, deep, "guest", "serve", ":80")
	file := func(name string) string { return filepath.Join(d.Dir, "data", "vm", "vm", b.get().ID, name) }
	explained := func() hostctl.Why {
		y, err := d.Why(t.Context(), "a", time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		return y
	}

	// The disk is full when the guest is to be saved.
	b.send("count")
	errtest.None(t, os.Symlink("/dev/full", file("state")))
	b.pause()
	b.Until("a", "saving fails", func(o hostctl.Instance) bool {
		return o.State == "reclaimed" && strings.Contains(o.StatusReason, "cannot hibernate")
	})
	t.Logf("a full disk: %s", explained().Answer)
	if got := b.send("count"); got != "counted 2" {
		t.Errorf("after a disk was full: %s", got)
	}

	// A QEMU that is stopped by a signal is unknown and not idle. It is reported,
	// and is continued automatically, so that a waiting client is answered.
	b.signal(syscall.SIGSTOP)
	daemontest.Wait(b.T, "it is unknown", func() (bool, string) {
		y := explained()
		return y.Fact(idle.SignalUnknown) != nil && strings.Contains(y.Answer, "a signal"), y.Answer
	})
	if got := b.send("count"); got != "counted 3" {
		t.Errorf("after a hang: %s", got)
	}

	// A saved guest with damaged files.
	b.sinks("hibernated")
	errtest.None(t, os.Truncate(file("state"), 1000))
	if got := b.send("count"); got != "counted 1" {
		t.Errorf("after a boot: %s", got)
	}
	if y := explained(); y.Fact(why.BootedAnew.Code) == nil || !strings.Contains(y.Answer, "damaged") {
		t.Errorf("why: %s", y.Answer)
	}

	// QEMU is killed while the guest runs, and while it is paused.
	for _, paused := range []bool{false, true} {
		if paused {
			b.Must(b.name, "start")
			b.lease(take) // a lease, so that it stays paused and does not go deeper
			b.pause()
		}
		b.signal(syscall.SIGKILL)
		if o := b.is("stopped"); o.StatusReason != "the virtual machine ended: QEMU was killed by signal 9 (killed)" {
			t.Errorf("paused %v: its reason is %q", paused, o.StatusReason)
		}
	}

	// A guest that runs out of memory ends with a reason.
	b.Must(b.name, "start")
	c := b.dial(0)
	defer c.Close()
	errtest.Get(c.Write([]byte("hog\n")))(t)
	o := b.is("stopped")
	const want = "ended by signal 9 (killed): out of memory: the guest's kernel ended it; it has 128 MiB: raise --memory"
	if o.ExitCode == nil || *o.ExitCode != 137 || o.StatusReason != want {
		t.Errorf("out of memory: exit %v, %s", o.ExitCode, o.StatusReason)
	}
	if a := explained().Answer; !strings.Contains(a, want) {
		t.Errorf("out of memory: why says %s", a)
	}
}
