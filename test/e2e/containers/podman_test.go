package containers

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"lull/internal/host/daemontest"
)

// podmanConf sets limits that this process may set, and avoids systemd.
const podmanConf = `[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
`

// TestPodman checks that a container of Podman, which lull manages through
// Podman's Docker API, sleeps paused and stopped, wakes for a client, and stays
// as its user left it. LULL_PODMAN names the program. The container's network is
// a namespace made by the test.
func TestPodman(t *testing.T) {
	podman := os.Getenv("LULL_PODMAN")
	if podman == "" {
		t.Skip("LULL_PODMAN does not name podman; make soak does")
	}
	here, dir := newMachine(t, "p"), t.TempDir()
	conf, socket := filepath.Join(dir, "containers.conf"), filepath.Join(dir, "s")
	if err := os.WriteFile(conf, []byte(podmanConf), 0o600); err != nil {
		t.Fatal(err)
	}
	command := func(args ...string) *exec.Cmd {
		args = append([]string{"--net=" + here.path(), podman, "--root", dir + "/root", "--runroot", dir + "/run", "--storage-driver", "vfs"}, args...)
		cmd := exec.Command("nsenter", args...)
		cmd.Env = append(os.Environ(), "CONTAINERS_CONF="+conf)
		return cmd
	}
	must := func(args ...string) string {
		t.Helper()
		out, err := command(args...).CombinedOutput()
		if err != nil {
			t.Fatalf("podman %s: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	service := command("system", "service", "--time=0", "unix://"+socket)
	if err := service.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = command("rm", "-af", "-t", "0").Run()
		_ = service.Process.Signal(syscall.SIGTERM) // may have ended already
		_ = service.Wait()
		_ = command("unmount", "-a").Run()
	})
	tar := filepath.Join(t.TempDir(), "root.tar")
	if out, err := exec.Command("tar", "-C", daemontest.Image(t), "-cf", tar, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	must("import", tar, "box:1")
	daemontest.Wait(t, "podman serves", func() (bool, string) { _, err := os.Stat(socket); return err == nil, "" })

	inside := filepath.Join(t.TempDir(), "lull")
	script := fmt.Sprintf("#!/bin/sh\nexec nsenter --net=%s %s \"$@\"\n", here.path(), daemontest.Program("lull"))
	if err := os.WriteFile(inside, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	d := daemontest.Start(t, daemontest.Config{Lull: inside, Args: []string{"--probe", "200ms", "--docker=unix://" + socket}})
	must("run", "-d", "--name", "web", "--label", "lull.pause-after=0", "--label", "lull.stop-after=4s", "-p", "8080:8080",
		"box:1", "guest", "serve", "-listen", "0.0.0.0:8080")
	k := dock{d: d}
	k.known("web")
	client := func() error { return here.do(func() error { return say("127.0.0.1:8080", "hello") }) }
	daemontest.Wait(t, "it answers", func() (bool, string) { err := client(); return err == nil, fmt.Sprint(err) })
	status := func(want string) {
		t.Helper()
		daemontest.Wait(t, "podman says that it is "+want, func() (bool, string) {
			got := must("inspect", "-f", "{{.State.Status}}", "web")
			return got == want, got
		})
	}
	for _, sleep := range []string{"paused", "stopped"} {
		if err := d.Force("web"); err != nil {
			t.Fatal(err)
		}
		d.Await("web", sleep)
		status(map[string]string{"paused": "paused", "stopped": "exited"}[sleep])
		if err := client(); err != nil {
			t.Errorf("a client of the %s one: %v", sleep, err)
		}
		d.Await("web", "running")
	}
	must("pause", "web")
	if o := d.Await("web", "paused"); o.LastPausedBy != "external" {
		t.Errorf("it was paused by %s", o.LastPausedBy)
	}
	must("unpause", "web")
	d.Await("web", "running")
	must("stop", "-t", "0", "web")
	d.Await("web", "stopped")
	if err := client(); err == nil {
		t.Error("what a user has stopped serves")
	}
	must("start", "web")
	d.Await("web", "running")
}
