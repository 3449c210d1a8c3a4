package daemontest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"lull/internal/lib/programtest"
)

// Image returns the directory of a root file system with a shell and the program
// guest, which must be among those passed to Main.
func Image(t testing.TB) string {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	Need(t, err, "busybox-static")
	Build(t)
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil { // other users run programs in it
		t.Fatal(err)
	}
	for _, d := range []string{"bin", "tmp", "etc", "proc", "dev", "sys", "run", "root"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for from, to := range map[string]string{busybox: "bin/busybox", Program("guest"): "bin/guest"} {
		if err := programtest.Copy(from, filepath.Join(dir, to)); err != nil {
			t.Fatal(err)
		}
	}
	for _, tool := range []string{"sh", "sleep", "echo", "touch", "cat", "id", "pwd", "env", "ls", "rm", "mkdir", "grep", "kill", "stat", "hostname", "mount", "unshare", "test", "head", "nc", "date", "tty", "stty", "wc"} {
		if err := os.Symlink("busybox", filepath.Join(dir, "bin", tool)); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command(filepath.Join(dir, "bin/sh"), "-c", "exit 0").CombinedOutput(); err != nil {
		t.Fatalf("busybox does not run: %v: %s", err, out)
	}
	return dir
}

// NeedRunc skips the test if runc cannot run.
func NeedRunc(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("containers need root")
	}
	_, err := exec.LookPath("runc")
	if err != nil {
		_, err = os.Stat("/usr/sbin/runc")
	}
	Need(t, err, "runc")
}
