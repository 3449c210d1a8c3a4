package host

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
	"lull/internal/runtime/container"
)

// starved is the exit reason of a container with a limit of 32 MiB that the
// kernel killed because memory ran out.
const starved = "exited with code 137: out of memory: the kernel ended it; it has 32 MiB: raise --memory"

// hog is a shell script that doubles a string until memory runs out.
const hog = `x=0123456789abcdef; while :; do x=$x$x; done`

// hungry returns a function that starts containers with 32 MiB each. They see the
// directory shared as /shared; the tests create the file go there.
func hungry(t *testing.T) (m *bare, run func(name, script string), shared string) {
	daemontest.NeedRunc(t)
	root := daemontest.Image(t)
	m = bare{}.over(t)
	shared = t.TempDir()
	errtest.None(t, os.Chmod(shared, 0o755))
	return m, func(name, script string) {
		t.Helper()
		s := instance.Spec{Name: name, Runtime: "container", Image: root, Memory: 32 << 20, Restart: instance.RestartNo,
			Workspace: shared + ":/shared:ro", StopAfter: daemontest.Seconds(0), Command: []string{"sh", "-c", script}}
		o, err := m.d.Create(t.Context(), hostctl.Create{Spec: s, Start: true})
		if err != nil {
			t.Fatal(err)
		}
		m.trace(name, o)
	}, shared
}

// starveAway makes a container run out of memory while no daemon runs, and then
// restarts the daemon.
func starveAway(t *testing.T, m *bare, run func(name, script string), shared string) {
	t.Helper()
	run("late", "while [ ! -e /shared/go ]; do sleep 0.05; done; "+hog)
	id := m.traces["late"].id
	m.d.Kill()
	errtest.None(t, os.WriteFile(filepath.Join(shared, "go"), nil, 0o644))
	waittest.Until(t, "it ends", func() bool { return len(m.d.Marked()[id]) == 0 })
	m.d.Boot()
	if o := m.d.Await("late", "stopped"); o.StatusReason != starved+", while the daemon was away" {
		t.Errorf("out of memory while the daemon was away: %q", o.StatusReason)
	}
}

// TestStarvedContainer checks that a container that was killed for lack of memory
// reports that reason, even if it ended while no daemon was running, and that all
// its resources are released. A container that exits with the same code by itself
// must not report it.
func TestStarvedContainer(t *testing.T) {
	m, run, shared := hungry(t)
	run("hog", hog)
	if o := m.d.Await("hog", "stopped"); o.StatusReason != starved {
		t.Errorf("out of memory: %q", o.StatusReason)
	}
	y, err := m.d.Why(t.Context(), "hog", time.Time{})
	if err != nil || !strings.Contains(y.Answer, starved) {
		t.Errorf("why: %+v, %v", y, err)
	}
	starveAway(t, m, run, shared)
	run("other", "while [ ! -e /shared/end ]; do sleep 0.05; done; exit 137")
	errtest.None(t, os.WriteFile(filepath.Join(shared, "end"), nil, 0o644))
	if o := m.d.Await("other", "stopped"); o.StatusReason != "exited with code 137" {
		t.Errorf("another end: %q", o.StatusReason)
	}
	for name := range m.traces {
		if err := m.Remove(name); err != nil {
			t.Error(err)
		}
		if left := m.Left(name); len(left) > 0 {
			t.Errorf("%s left %q", name, left)
		}
	}
}

// TestStarvedAndHalfSwept checks that the reason of an exit is known even if the
// control groups with the evidence were removed before the exit was recorded. A
// wrapper of runc interrupts the first delete in the middle.
func TestStarvedAndHalfSwept(t *testing.T) {
	real, err := container.Find("")
	daemontest.Need(t, err, "runc")
	dir := t.TempDir()
	script := fmt.Sprintf(`#!/bin/sh
for last; do :; done
case " $* " in *" delete "*)
	if [ ! -e %[1]s/cut ]; then
		: > %[1]s/cut
		find /sys/fs/cgroup -depth -type d -path "*/$last/c" -exec rmdir {} +
		exit 1
	fi
esac
exec %[2]s "$@"
`, dir, real)
	errtest.None(t, os.WriteFile(filepath.Join(dir, "runc"), []byte(script), 0o755))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	m, run, shared := hungry(t)
	starveAway(t, m, run, shared)
	if _, err := os.Stat(filepath.Join(dir, "cut")); err != nil {
		t.Errorf("no delete was interrupted: %v", err)
	}
	// The recorded reason belongs to that run only, not to the next.
	errtest.None(t, os.Remove(filepath.Join(shared, "go")))
	errtest.None(t, m.Start("late"))
	errtest.None(t, syscall.Kill(m.d.Show("late").PID, syscall.SIGKILL))
	if o := m.d.Await("late", "stopped"); strings.Contains(o.StatusReason, "memory") {
		t.Errorf("killed: %q", o.StatusReason)
	}
	if err := m.Remove("late"); err != nil {
		t.Error(err)
	}
}

// TestFailedStartBlamesNobody checks the reason given for a program that exits
// before it listens. While only lull holds its port, the port must not be
// reported as taken. A process that does have the port must be named.
func TestFailedStartBlamesNobody(t *testing.T) {
	m := bare{}.over(t)
	addr := daemontest.Addr(t)
	start := func(name string) string {
		t.Helper()
		s := instance.Spec{Name: name, Restart: instance.RestartNo, Expose: []instance.Endpoint{{Listen: addr, Target: addr}}, Command: []string{"sh", "-c", "exit 3"}}
		if _, err := m.d.Create(t.Context(), hostctl.Create{Spec: s, Start: true}); err == nil {
			t.Fatal("it started")
		} else {
			return err.Error()
		}
		return ""
	}
	if said := start("alone"); strings.Contains(said, addr) || !strings.Contains(said, "code 3") {
		t.Errorf("the port is free, and it says %q", said)
	}
	l, err := net.Listen("tcp", addr)
	errtest.None(t, err)
	defer l.Close()
	if said := start("beside"); !strings.Contains(said, addr) {
		t.Errorf("another process has the port, and it says %q", said)
	}
}

// TestStartSaysWhatItWaitsFor checks that a start that waits for a port names
// that port long before it fails, and the port on which the program listens
// instead.
func TestStartSaysWhatItWaitsFor(t *testing.T) {
	m := bare{}.over(t)
	wrong, right := daemontest.Addr(t), daemontest.Addr(t)
	s := instance.Spec{Name: "web", Expose: []instance.Endpoint{{Listen: right, Target: right}},
		Command: []string{"python3", "-m", "http.server", port(wrong), "--bind", "127.0.0.1"}}
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { _, err := m.d.Create(ctx, hostctl.Create{Spec: s, Start: true}); ended <- err }()
	waittest.Until(t, "it is said", func() bool {
		o, err := m.d.Get(t.Context(), "web")
		return err == nil && o.State == "starting" && strings.Contains(o.StatusReason, right) && strings.Contains(o.StatusReason, wrong)
	})
	cancel()
	<-ended
}
