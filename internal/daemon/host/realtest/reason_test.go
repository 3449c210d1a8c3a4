package realtest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/daemon/host/daemontest"
	"lull/internal/instance"
	"lull/internal/link/hostctl"
)

// TestStarvedContainer: a container that the kernel ends for lack of memory says
// so, also one that ended while no daemon was there, and nothing of it is left.
// One that ends with the same code does not.
func TestStarvedContainer(t *testing.T) {
	needContainers(t)
	root := image(t)
	m := bare{}.over(t)
	const starved = "exited with code 137: out of memory: the kernel ended it; it has 32 MiB: raise --memory"
	shared := t.TempDir()
	if err := os.Chmod(shared, 0o755); err != nil {
		t.Fatal(err)
	}
	run := func(name, script string) {
		t.Helper()
		s := instance.Spec{Name: name, Runtime: "container", Image: root, Memory: 32 << 20, Restart: instance.RestartNo,
			Workspace: shared + ":/shared:ro", StopAfter: daemontest.Seconds(0), Command: []string{"sh", "-c", script}}
		o, err := m.d.Create(t.Context(), hostctl.Create{Spec: s, Start: true})
		if err != nil {
			t.Fatal(err)
		}
		m.trace(name, o)
	}
	// A shell that holds a string, doubled over and over.
	const hog = `x=0123456789abcdef; while :; do x=$x$x; done`
	run("hog", hog)
	if o := m.d.Await("hog", "stopped"); o.StatusReason != starved {
		t.Errorf("out of memory: %q", o.StatusReason)
	}
	y, err := m.d.Why(t.Context(), "hog", time.Time{})
	if err != nil || !strings.Contains(y.Answer, starved) {
		t.Errorf("why: %+v, %v", y, err)
	}

	run("late", "while [ ! -e /shared/go ]; do sleep 0.05; done; "+hog)
	id := m.traces["late"].id
	m.d.Kill()
	if err := os.WriteFile(filepath.Join(shared, "go"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if !daemontest.Within(daemontest.Patience, func() bool { return len(m.d.Marked()[id]) == 0 }) {
		t.Fatal("it does not end")
	}
	m.d.Boot()
	if o := m.d.Await("late", "stopped"); o.StatusReason != starved+", while the daemon was away" {
		t.Errorf("out of memory while the daemon was away: %q", o.StatusReason)
	}

	run("other", "exit 137")
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
