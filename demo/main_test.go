package main

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/programtest"
)

// The demo shows a program asleep and woken by its client, a microVM on disk
// where there can be one, and a fleet, says what to type, and leaves nothing
// behind when it is interrupted.
func TestDemo(t *testing.T) {
	dir, err := os.MkdirTemp("", "lull-demo") // PostgreSQL's user has to get in
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := programtest.Into(dir, "lull/cmd/lull", "lull/cmd/lull-shim", "lull/cmd/lull-harness", "lull/demo"); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(dir, "data")
	ctx, cancel := context.WithTimeout(t.Context(), 12*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "demo"), "--bin", dir, "--data", data, "--for", "10m")
	cmd.Env = append(os.Environ(), "NO_COLOR=1")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) } // it says where it hangs
	cmd.WaitDelay = time.Minute
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	want := map[string]string{"what to type": "export LULL_HOST=unix://" + data, "a sleeping program": "web paused",
		"a visit":            "a client came to web, which was paused: status 200",
		"where the fleet is": "export LULL_SERVER=http://127.0.0.1:", "its token": "export LULL_TOKEN=", "the fleet": " active"}
	_, err = exec.LookPath("qemu-system-x86_64")
	machines := err == nil && os.Getenv("LULL_GUEST_KERNEL") != ""
	if machines {
		want["a sleeping guest"], want["a visit to it"] = "guest hibernated", "a client came to guest, which was hibernated: status 200"
	}
	var said strings.Builder
	for lines := bufio.NewScanner(out); lines.Scan(); {
		said.WriteString(lines.Text() + "\n")
		for what, text := range want {
			if strings.Contains(lines.Text(), text) {
				delete(want, what)
			}
		}
		if len(want) == 0 && cmd.Process.Signal(os.Interrupt) != nil {
			t.Error("the demo ended by itself")
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the demo ended with %v after %s", err, time.Since(began))
	}
	for what := range want {
		t.Errorf("the demo never showed %s", what)
	}
	if _, err := os.Stat(data); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the demo left its folder behind (%v)", err)
	}
	if t.Failed() {
		t.Logf("it said:\n%s", said.String())
	}
	t.Run("MicroVM", func(t *testing.T) {
		if !machines {
			t.Skip("its microVM was not shown: QEMU or the guest kernel is not installed")
		}
	})
}

// The demo must not empty a directory with a user's files.
func TestForeignFolder(t *testing.T) {
	dir := t.TempDir()
	keep := filepath.Join(dir, "mine")
	if err := os.WriteFile(keep, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (&stage{data: dir}).freshFolder(); err == nil {
		t.Error("the demo took a folder that is not its own")
	}
	if _, err := os.Stat(keep); err != nil {
		t.Error(err)
	}
}
