package machines

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/protocol/hostctl"
)

const killedSaying = "QEMU was killed by signal 9 (killed)"

// home returns the directory of the guest's runs.
func (b *box) home() string {
	b.T.Helper()
	return filepath.Join(b.Dir, "data", "vm", "vm", b.get().ID)
}

// qemu returns the PID of the QEMU whose directory is home, from /proc; 0 if
// there is none. The daemon does not report it in the middle of a transition.
func qemu(home string) int {
	ents, _ := os.ReadDir("/proc")
	for _, e := range ents {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		line, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err == nil && bytes.Contains(line, []byte("\x00lull in "+home+"\x00")) {
			return pid
		}
	}
	return 0
}

// killAt kills the guest's QEMU as soon as ok returns true. what names that
// moment.
func (b *box) killAt(what string, ok func() bool) {
	b.T.Helper()
	home := b.home()
	for end := time.Now().Add(daemontest.WaitLimit); !ok(); {
		if time.Now().After(end) {
			b.T.Fatalf("%s: not within %s: %s", b.name, daemontest.WaitLimit, what)
		}
	}
	pid := qemu(home)
	if pid == 0 {
		b.T.Logf("%s: it had no QEMU any more", what)
		return
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		b.T.Fatal(err)
	}
}

func missing(path string) bool {
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// TestQEMUKilled kills QEMU at moments at which the guest is neither running nor
// paused. Each kill must be reported with its reason. The next client must be
// answered by the restored guest if the guest was on disk, otherwise by a freshly
// booted one.
func TestQEMUKilled(t *testing.T) {
	d := host(t)
	b := run(d, "a", small(t), []int{80}, func(s *instance.Spec) {
		s.ReclaimAfter, s.HibernateAfter = idle.Duration(200*time.Millisecond), idle.Duration(3*time.Second)
		s.Restart = instance.RestartOnFailure
	}, "guest", "serve", ":80")
	home := b.home()
	answered := func(step string) string {
		t.Helper()
		got := ""
		daemontest.Wait(t, step+": a client is answered", func() (bool, string) {
			var err error
			got, err = b.try("count")
			return err == nil, fmt.Sprint(err, "; ", daemontest.Describe(b.get()))
		})
		return got
	}
	told := func(step string) {
		t.Helper()
		y, err := d.Why(t.Context(), "a", time.Time{})
		if err != nil || !strings.Contains(y.Answer, killedSaying) {
			t.Errorf("%s: why says %q, %v", step, y.Answer, err)
		}
	}
	anew := func(step string) {
		t.Helper()
		if got := answered(step); got != "counted 1" {
			t.Errorf("%s: %s", step, got)
		}
		told(step)
		b.Must("a", "start") // so that the kills do not count as a crash loop
	}

	// Killed while it boots, after a kill while it ran.
	old := b.get().PID
	b.signal(syscall.SIGKILL)
	b.killAt("it boots again", func() bool { pid := qemu(home); return pid != 0 && pid != old })
	anew("booting")
	if o := b.get(); o.RestartCount != 2 {
		t.Errorf("restarted %d times: %s", o.RestartCount, daemontest.Describe(o))
	}

	b.sinks("reclaimed")
	b.signal(syscall.SIGKILL)
	anew("reclaimed")

	// Killed during the save. The guest is then on disk or has ended.
	b.sinks("reclaimed")
	b.killAt("it is being saved", func() bool { return !missing(filepath.Join(home, "state")) })
	b.Until("a", "it is at rest", func(o hostctl.Instance) bool { return o.State == "hibernated" || o.State == "running" })
	kept := b.get().State == "hibernated"
	switch got := answered("saving"); {
	case kept && got != "counted 2":
		t.Errorf("it was on disk: %s", got)
	case !kept && got != "counted 1":
		t.Errorf("it was not on disk: %s", got)
	case !kept:
		told("saving")
	}
	t.Logf("killed while it was saved: kept %t", kept)

	// Killed during a restore, before the guest agent answers.
	b.sinks("hibernated")
	woken := make(chan string, 1)
	go func() {
		got, err := b.try("count")
		woken <- fmt.Sprint(got, err)
	}()
	b.killAt("its state was read", func() bool { return missing(filepath.Join(home, "hibernated.json")) })
	t.Logf("the client that woke it: %s", <-woken)
	anew("waking")
	if left, err := os.ReadDir(home); err != nil || len(left) == 0 {
		t.Errorf("its directory: %v, %v", left, err)
	}
	for _, name := range []string{"state", "hibernated.json", "hibernated.json.new"} {
		if !missing(filepath.Join(home, name)) {
			t.Errorf("%s is left over", name)
		}
	}
}
