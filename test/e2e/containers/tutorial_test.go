package containers

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/pagetest"
	"lull/internal/lib/waittest"
)

// TestTutorial runs the commands for containers in the tutorial about adopting.
// Programs that need no registry take the place of its images.
func TestTutorial(t *testing.T) {
	_, err := exec.LookPath("docker-compose")
	daemontest.Need(t, err, "docker-compose")
	b, err := os.ReadFile("../../../docs/tutorial-adopt.md")
	errtest.None(t, err)
	doc := pagetest.Section(string(b), "Containers and Compose")
	k := daemontest.StartDockerd(t)
	daemontest.Build(t)
	for _, fixed := range []string{"127.0.0.1:8080", "127.0.0.1:8081"} {
		doc = strings.ReplaceAll(doc, fixed, daemontest.Addr(t))
	}
	doc = strings.NewReplacer("host --docker ", "host --docker="+k.Socket()+" ", " nginx\nlull adopt", " box:1 /bin/busybox httpd -f -p 80\nlull adopt",
		"image: nginx\n", "image: box:1\n    command: [/bin/busybox, httpd, -f, -p, \"80\"]\n    stop_signal: SIGKILL\n",
		"image: redis\n", "image: box:1\n    command: [guest, serve, -listen, \"0.0.0.0:6379\"]\n    stop_signal: SIGKILL\n").Replace(doc)
	all, err := pagetest.Steps(doc)
	errtest.None(t, err)
	dir, err := os.MkdirTemp("", "lt") // short, because socket paths in it are limited
	errtest.None(t, err)
	t.Cleanup(func() {
		waittest.Until(t, "the host's shim ends", func() bool {
			pid := shim(filepath.Join(dir, "work", "host", "shim"))
			if pid > 1 {
				_ = syscall.Kill(pid, syscall.SIGTERM)
			}
			return pid <= 1
		})
		errtest.None(t, os.RemoveAll(dir))
	})
	env := []string{"HOME=" + dir, "TZ=UTC", "PATH=" + filepath.Dir(daemontest.Program("lull")) + ":/usr/sbin:/usr/bin:/sbin:/bin", "DOCKER_HOST=unix://" + k.Socket()}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	for _, err := range pagetest.Follow(ctx, all, dir, env) {
		t.Error(err)
	}
}
