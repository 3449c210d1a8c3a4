package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"lull/internal/lib/errtest"
	"lull/internal/lib/pagetest"
	"lull/internal/lib/programtest"
)

// TestGuestsPage runs the commands in docs/guests.md one after the other, with QEMU
// and runc; only the directory, image and ports are the test's. It checks that the
// guests answer afterwards, and that every flag named by the page exists.
func TestGuestsPage(t *testing.T) {
	t.Parallel()
	kernel := os.Getenv("LULL_GUEST_KERNEL")
	if kernel == "" {
		t.Skip("no guest kernel: make test fetches one")
	}
	if os.Geteuid() != 0 {
		t.Skip("containers need root")
	}
	for _, tool := range []string{"bash", "curl", "busybox", "qemu-system-x86_64"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed", tool)
		}
	}
	shim, harness := programtest.Build(t, "lull/cmd/lull-shim"), programtest.Build(t, "lull/cmd/lull-harness")
	dir, err := os.MkdirTemp("", "lull-guests-")
	if err == nil {
		err = os.Chmod(dir, 0o755) // each QEMU runs as a different user
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Log(err) // a daemon that is ending may still be writing
		}
	})
	t.Cleanup(func() { endShim(filepath.Join(dir, "work", "host", "shim")) })

	doc := contents(t, "../../docs/guests.md")
	flags := regexp.MustCompile(`--[a-z][a-z-]+`).FindAllString(doc, -1)
	ports := map[string]string{}
	for _, port := range []string{"8080", "8081", "9000", "9001"} {
		ports[port] = freePort(t)
		doc = strings.ReplaceAll(doc, port, ports[port])
	}
	rootfs := webFiles(t, filepath.Join(dir, "rootfs"))
	doc = strings.ReplaceAll(doc, "./rootfs", rootfs)
	doc = strings.ReplaceAll(doc, "docker.io/library/nginx:1", webImage(t, rootfs))
	all, err := pagetest.Steps(doc)
	errtest.None(t, err)
	before := []pagetest.Step{
		{Text: `lull host --data "$PWD/host" --socket "$PWD/host.sock" --stop-all &`},
		{Text: `until lull ps 2>/dev/null; do sleep 1; done`},
	}
	var after []pagetest.Step
	for _, port := range []string{"8080", "8081", "9000", "9001"} {
		after = append(after, pagetest.Step{Text: fmt.Sprintf(`for n in $(seq 60); do curl -sf http://127.0.0.1:%[1]s/ && break; sleep 1; done; curl -sf http://127.0.0.1:%[1]s/ | grep -q "it answers"`, ports[port])})
	}
	after = append(after, pagetest.Step{Text: "lull why vm && lull image ls && lull image prune && lull doctor"})
	for _, flag := range flags {
		if flag == "--health-interval" { // a flag of Docker
			continue
		}
		after = append(after, pagetest.Step{Text: "for verb in run host 'instance clone' 'instance logs' 'image prune'; do lull $verb --help; done | grep -q -- ' " + flag + "[ =]'"})
	}
	after = append(after, pagetest.Step{Text: "lull rm api web vm vm2"})

	env := []string{"LULL_HOST_SHIM=" + shim, "LULL_HOST_HARNESS=" + harness, "LULL_GUEST_KERNEL=" + kernel, "LULL_HOST=unix://" + filepath.Join(dir, "work", "host.sock"),
		"HOME=" + dir, "TZ=UTC", "PATH=" + os.Getenv("PATH") + ":/usr/sbin:/sbin"}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	for _, err := range pagetest.Follow(ctx, append(append(before, all...), after...), dir, env) {
		t.Error(err)
	}
}

// webFiles creates the files of a guest whose program /usr/bin/api is a web server on
// port 80.
func webFiles(t *testing.T, dir string) string {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	errtest.None(t, err)
	b, err := os.ReadFile(busybox)
	errtest.None(t, err)
	for _, d := range []string{"bin", "usr/bin", "srv", "tmp", "proc", "dev", "sys", "run", "etc"} {
		errtest.None(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	for file, content := range map[string][]byte{"bin/busybox": b, "srv/index.html": []byte("it answers\n"),
		"usr/bin/api": []byte("#!/bin/busybox sh\nexec /bin/busybox httpd -f -p 80 -h /srv\n")} {
		errtest.None(t, os.WriteFile(filepath.Join(dir, file), content, 0o755))
	}
	return dir
}

// webImage returns a reference to an image of those files in a registry that the test
// runs.
func webImage(t *testing.T, dir string) string {
	t.Helper()
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(srv.Close)
	tar := dir + ".tar"
	if out, err := exec.Command("tar", "-C", dir, "-cf", tar, ".").CombinedOutput(); err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
	layer, err := tarball.LayerFromFile(tar)
	errtest.None(t, err)
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{Cmd: []string{"/usr/bin/api"}}})
	if err == nil {
		img, err = mutate.AppendLayers(img, layer)
	}
	ref, rerr := name.ParseReference(srv.Listener.Addr().String() + "/library/nginx:1")
	if err = errors.Join(err, rerr); err == nil {
		err = remote.Write(ref, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	return ref.String()
}
