package machines

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/httpx"
)

// TestFiles copies files into and out of a guest with lull cp. That must wake a
// sleeping guest, and must not start a stopped one.
func TestFiles(t *testing.T) {
	d := host(t)
	b := run(d, "files", small(t), nil, func(s *instance.Spec) { s.User = "1234" }, "guest", "serve", ":80")
	lull := func(args ...string) (string, error) {
		t.Helper()
		c := exec.CommandContext(t.Context(), daemontest.Program("lull"), args...)
		c.Env = append(os.Environ(), "LULL_HOST=unix://"+d.Dir+"/host.sock")
		c.WaitDelay = daemontest.WaitLimit
		var said bytes.Buffer
		c.Stderr = &said
		out, err := c.Output()
		if err != nil {
			err = fmt.Errorf("lull %s: %w: %s", strings.Join(args, " "), err, &said)
		}
		return string(out), err
	}
	must := func(args ...string) string {
		t.Helper()
		out, err := lull(args...)
		errtest.None(t, err)
		return strings.TrimSpace(out)
	}
	inside := func(order ...string) string {
		t.Helper()
		return must(append([]string{"exec", "files", "--", "guest", "files"}, order...)...)
	}
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	content := bytes.Repeat([]byte("0123456789abcde\n"), 1<<17) // 2 MiB, more than the window of a stream
	for _, err := range []error{
		os.WriteFile(at("big"), content, 0o640),
		os.MkdirAll(at("tree/deep/empty"), 0o755),
		os.WriteFile(at("tree/deep/run.sh"), []byte("true\n"), 0o755),
		os.Symlink("/etc/passwd", at("tree/link")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	sum := func(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }

	inside("mkdir", "/tmp/own") // as user 1234
	must("cp", at("big"), "files:/tmp/own/named")
	if got := inside("sum", "/tmp/own/named"); got != sum(content) {
		t.Errorf("the file has the sum %s in the guest, want %s", got, sum(content))
	}
	if got := inside("stat", "/tmp/own/named"); !strings.HasPrefix(got, "100640 uid 1234 gid 1234 size 2097152 ") {
		t.Errorf("the file is %s", got)
	}
	must("cp", at("tree"), "files:/tmp/own")
	if got := inside("stat", "/tmp/own/tree/deep/run.sh"); !strings.HasPrefix(got, "100755 uid 1234 ") {
		t.Errorf("the script is %s", got)
	}

	b.pause()
	must("cp", "files:/tmp/own/named", at("back"))
	if got, err := os.ReadFile(at("back")); err != nil || sum(got) != sum(content) {
		t.Errorf("the file came back with %d bytes and the sum %s, want %s: %v", len(got), sum(got), sum(content), err)
	}
	must("cp", "files:/tmp/own/tree", at("copy"))
	if out, err := exec.Command("diff", "-r", "--no-dereference", at("tree"), at("copy")).CombinedOutput(); err != nil {
		t.Errorf("the tree came back changed: %v\n%s", err, out)
	}
	if st, err := os.Stat(at("copy/deep/run.sh")); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("the script came back as %v, %v", st, err)
	}
	archive, err := lull("cp", "files:/tmp/own/tree", "-")
	errtest.None(t, err)
	list := exec.Command("tar", "t")
	list.Stdin = strings.NewReader(archive)
	if out, err := list.CombinedOutput(); err != nil || !strings.Contains(string(out), "tree/deep/run.sh\n") {
		t.Errorf("tar reads %q, %v", out, err)
	}
	out := exec.Command("tar", "c", "-C", dir, "tree")
	in := exec.Command(daemontest.Program("lull"), "cp", "-", "files:/tmp/own/named2/../tree")
	in.Env = append(os.Environ(), "LULL_HOST=unix://"+d.Dir+"/host.sock")
	if in.Stdin, err = out.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	errtest.None(t, out.Start())
	if said, err := in.CombinedOutput(); err != nil || out.Wait() != nil {
		t.Errorf("from tar: %v, %s", err, said)
	}
	if got := inside("get", "/tmp/own/tree/tree/deep/run.sh"); got != "true" {
		t.Errorf("from tar came %q", got)
	}

	refused := func(status int, path string) {
		t.Helper()
		_, err := d.ReadFiles(t.Context(), "files", path)
		if p, ok := err.(*httpx.Problem); !ok || p.Status != status {
			t.Errorf("reading %s: %v, want status %d", path, err, status)
		}
		err = d.WriteFiles(t.Context(), "files", path, strings.NewReader(archive))
		if p, ok := err.(*httpx.Problem); !ok || p.Status != status {
			t.Errorf("writing %s: %v, want status %d", path, err, status)
		}
	}
	refused(404, "/none/x")
	if _, err := d.ReadFiles(t.Context(), "files", "/dev/null"); err == nil {
		t.Error("a device was copied")
	} else if p, ok := err.(*httpx.Problem); !ok || p.Status != 409 {
		t.Errorf("a device: %v", err)
	}
	if err := d.WriteFiles(t.Context(), "files", "/tmp", strings.NewReader("no archive")); err == nil {
		t.Error("no archive was unpacked")
	}
	d.Must("files", "stop")
	refused(409, "/tmp/own")
	if s := b.get().State; s != "stopped" {
		t.Errorf("a stopped guest is %s", s)
	}
}
