package microvm

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

// workspaceOwner is the UID that owns the workspaces here; no account has it.
const workspaceOwner = 12345

// workspace returns a directory that belongs to workspaceOwner.
func workspace(t testing.TB) string {
	t.Helper()
	top, err := os.MkdirTemp("", "ws") // another user may enter it, unlike t.TempDir
	if err == nil {
		err = os.Chmod(top, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(top) })
	dir := filepath.Join(top, "work")
	errtest.None(t, os.Mkdir(dir, 0o755))
	give(t, dir)
	return dir
}

// give makes workspaceOwner the owner of a file.
func give(t testing.TB, path string) {
	t.Helper()
	if os.Geteuid() == 0 {
		errtest.None(t, os.Lchown(path, workspaceOwner, workspaceOwner))
	}
}

// startWith starts a guest with a workspace.
func (b *bench) startWith(id, ws string, command ...string) *Work {
	b.t.Helper()
	l := b.launch(id, 1, command...)
	l.Workspace = ws
	w, err := b.Start(b.t.Context(), l)
	if err != nil {
		b.t.Fatal(err)
	}
	return w.(*Work)
}

// try runs a command of the test's program in a guest.
func (b *bench) try(id string, args ...string) (string, bool) {
	b.t.Helper()
	o, err := b.Exec(b.t.Context(), id, instance.Command{Command: append([]string{"guest", "files"}, args...)})
	if err != nil {
		b.t.Fatal(err)
	}
	return strings.TrimSpace(o.Stdout + o.Stderr), o.ExitCode == 0
}

// must runs a command that must succeed.
func (b *bench) must(id string, args ...string) string {
	b.t.Helper()
	out, ok := b.try(id, args...)
	if !ok {
		b.t.Fatalf("%v: %s", args, out)
	}
	return out
}

// refused runs a command that must fail with an errno.
func (b *bench) refused(id string, want syscall.Errno, args ...string) {
	b.t.Helper()
	if out, ok := b.try(id, args...); ok || !strings.HasPrefix(out, fmt.Sprintf("errno %d ", want)) {
		b.t.Errorf("%v: %q, want %v", args, out, want)
	}
}

// TestWorkspace checks that the guest and this machine see the same files, in
// both directions, and nothing outside them.
func TestWorkspace(t *testing.T) {
	b := newBench(t, nil)
	dir := workspace(t)
	put := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		errtest.None(t, os.WriteFile(path, []byte(text), mode))
		give(t, path)
		return path
	}
	put("hello", "from here", 0o644)
	w := b.startWith("ws", dir, "guest", "serve", ":80")
	if got := b.must("ws", "get", "/workspace/hello"); got != "from here" {
		t.Errorf("read %q", got)
	}
	b.must("ws", "put", "/workspace/answer", "from there")
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(dir, "answer"), &st); err != nil || st.Mode != unix.S_IFREG|0o644 || os.Geteuid() == 0 && (st.Uid != workspaceOwner || st.Gid != workspaceOwner) {
		t.Errorf("mode %o, user %d, group %d, %v", st.Mode, st.Uid, st.Gid, err)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "answer")); err != nil || string(text) != "from there" {
		t.Errorf("%q, %v", text, err)
	}
	t.Run("many", func(t *testing.T) {
		b := b.in(t)
		b.must("ws", "mkdir", "/workspace/many")
		for n := range 2000 {
			put(fmt.Sprint("many/h", n), "", 0o644)
		}
		if got := b.must("ws", "ls", "/workspace/many"); got != "2000" {
			t.Errorf("the guest lists %s", got)
		}
		for n := range 2000 {
			errtest.None(t, os.Remove(filepath.Join(dir, fmt.Sprint("many/h", n))))
		}
		b.must("ws", "many", "/workspace/many", "100")
		if l, err := os.ReadDir(filepath.Join(dir, "many")); err != nil || len(l) != 100 {
			t.Errorf("%d are here, %v", len(l), err)
		}
		b.must("ws", "rmrf", "/workspace/many")
		if _, err := os.Stat(filepath.Join(dir, "many")); !os.IsNotExist(err) {
			t.Errorf("it is still here: %v", err)
		}
	})
	t.Run("large", func(t *testing.T) {
		b := b.in(t)
		began := time.Now()
		sum := b.must("ws", "fill", "/workspace/large", "20000000", "a")
		t.Logf("20 MB written in %s", time.Since(began).Round(time.Millisecond))
		text, err := os.ReadFile(filepath.Join(dir, "large"))
		if got := fmt.Sprintf("%x", sha256.Sum256(text)); err != nil || got != sum {
			t.Errorf("written %s, here %s, %v", sum, got, err)
		}
		for n := range text {
			text[n] ^= byte(n)
		}
		put("back", string(text), 0o600)
		began = time.Now()
		if sum, got := fmt.Sprintf("%x", sha256.Sum256(text)), b.must("ws", "sum", "/workspace/back"); got != sum {
			t.Errorf("here %s, read %s", sum, got)
		}
		t.Logf("20 MB read in %s", time.Since(began).Round(time.Millisecond))
	})
	t.Run("names", func(t *testing.T) {
		b := b.in(t)
		b.must("ws", "mkdir", "/workspace/a")
		b.must("ws", "put", "/workspace/a/x", "1")
		b.must("ws", "mv", "/workspace/a", "/workspace/b")
		b.must("ws", "mv", "/workspace/b/x", "/workspace/y")
		b.must("ws", "stat", "/workspace/y") // so that the guest caches it
		b.must("ws", "hardlink", "/workspace/y", "/workspace/z")
		b.must("ws", "truncate", "/workspace/z", "0")
		b.must("ws", "chmod", "/workspace/z", "600")
		if got, want := b.must("ws", "stat", "/workspace/y"), "100600 uid 0 gid 0 size 0 links 2"; got != want {
			t.Errorf("%s, want %s", got, want)
		}
		b.refused("ws", syscall.EEXIST, "mkdir", "/workspace/b")
		b.refused("ws", syscall.ENOENT, "get", "/workspace/a/x")
		b.refused("ws", syscall.ENAMETOOLONG, "put", "/workspace/"+strings.Repeat("n", 256), "")
	})
	t.Run("refused", func(t *testing.T) {
		b := b.in(t)
		secret := filepath.Join(filepath.Dir(dir), "secret")
		errtest.None(t, os.WriteFile(secret, []byte("secret"), 0o644))
		errtest.None(t, os.Symlink(secret, filepath.Join(dir, "abs")))
		errtest.None(t, os.Symlink("../secret", filepath.Join(dir, "rel")))
		b.must("ws", "ln", "/etc", "/workspace/etc") // a link that the guest made
		for _, l := range []string{"abs", "rel", "../secret", "etc/shadow"} {
			b.refused("ws", syscall.ENOENT, "get", "/workspace/"+l)
		}
		b.must("ws", "put", "/workspace/own", "x")
		b.refused("ws", syscall.EPERM, "chmod", "/workspace/own", "4755")
		b.refused("ws", syscall.EPERM, "mknod", "/workspace/null", "20666")
		b.refused("ws", syscall.EPERM, "mknod", "/workspace/pipe", "10666")
		b.refused("ws", syscall.EPERM, "chown", "/workspace/own", "1")
		if os.Geteuid() != 0 {
			return
		}
		errtest.None(t, os.WriteFile(filepath.Join(dir, "roots"), []byte("secret"), 0o600))
		b.refused("ws", syscall.EACCES, "get", "/workspace/roots")
		b.refused("ws", syscall.EACCES, "put", "/workspace/roots", "")
	})
	t.Run("pause", func(t *testing.T) { b.in(t).holdsPause(w) })
	errtest.None(t, w.Kill(t.Context()))
	b.clean("ws")
}

// holdsPause checks that the final check of a pause finds a request in progress,
// and that the request is answered after the thaw.
func (b *bench) holdsPause(w *Work) {
	t := b.t
	w.files.Hold() // as if a disk were slow
	put := make(chan error, 1)
	go func() {
		o, err := b.Exec(t.Context(), w.id, instance.Command{Command: []string{"guest", "files", "put", "/workspace/slow", "text"}})
		if err == nil && o.ExitCode != 0 {
			err = errors.New(o.Stdout)
		}
		put <- err
	}()
	until(t, "the guest asks for a file, and waits", func() bool {
		if w.files.Pending() == "" {
			return false
		}
		<-time.After(100 * time.Millisecond) // an earlier request, which is not held, ends meanwhile
		return w.files.Pending() != ""
	})
	errtest.None(t, w.Freeze(t.Context()))
	g, err := w.Guard(nil, false, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	if what := g.Pending(); !strings.Contains(what, "workspace") {
		t.Errorf("the final check finds %q", what)
	}
	g.Close()
	if err := w.Thaw(); err != nil { // this lets the request continue
		t.Fatal(err)
	}
	select {
	case err := <-put:
		if err != nil {
			t.Errorf("afterwards: %v", err)
		}
	case <-time.After(waitLimit):
		t.Fatal("the guest got no answer")
	}
}

// TestWorkspaceAway checks that a guest whose workspace was moved away during a
// pause gets an errno, that the fault is reported, and that the files work again
// once they are back.
func TestWorkspaceAway(t *testing.T) {
	b := newBench(t, nil)
	dir := workspace(t)
	w := b.startWith("away", dir, "guest", "serve", ":80")
	b.must("away", "put", "/workspace/kept", "text")
	errtest.None(t, w.Freeze(t.Context()))
	errtest.Get(w.Hibernate(t.Context()))(t)
	errtest.None(t, os.Rename(dir, dir+".away"))
	errtest.None(t, w.Thaw())
	b.refused("away", syscall.ENOENT, "get", "/workspace/kept")
	b.refused("away", syscall.ENOENT, "put", "/workspace/new", "text")
	if what := w.Trouble(); !strings.Contains(what, "workspace") || !strings.Contains(what, dir) {
		t.Errorf("trouble: %q", what)
	}
	errtest.None(t, os.Rename(dir+".away", dir))
	until(t, "it is said that it is back", func() bool { return w.Trouble() == "" })
	if got := b.must("away", "get", "/workspace/kept"); got != "text" {
		t.Errorf("read %q", got)
	}
	errtest.None(t, w.Kill(t.Context()))
}

// TestWorkspaceReadOnly checks that no user in the guest can change anything in a
// read-only workspace.
func TestWorkspaceReadOnly(t *testing.T) {
	b := newBench(t, nil)
	dir := workspace(t)
	errtest.None(t, os.WriteFile(filepath.Join(dir, "hello"), []byte("text"), 0o644))
	parts, err := rig()
	errtest.None(t, err)
	program, err := os.ReadFile(parts.program)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "program"), program, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	// The program and its working directory are in the workspace.
	l := b.launch("ro", 1, "./program", "serve", ":80")
	l.Workspace, l.Dir = dir+":/mnt/here:ro", "/mnt/here"
	aw, err := b.Start(t.Context(), l)
	errtest.None(t, err)
	w := aw.(*Work)
	if o, err := b.Exec(t.Context(), "ro", instance.Command{Command: []string{"/mnt/here/program", "where"}, Dir: "/mnt/here"}); err != nil || !strings.HasPrefix(o.Stdout, "/mnt/here ") {
		t.Errorf("a command there: %+v, %v", o, err)
	}
	if got := b.must("ro", "get", "/mnt/here/hello"); got != "text" {
		t.Errorf("read %q", got)
	}
	for _, args := range [][]string{{"put", "/mnt/here/hello", "x"}, {"mkdir", "/mnt/here/d"}, {"mv", "/mnt/here/hello", "/mnt/here/x"}, {"chmod", "/mnt/here/hello", "600"}} {
		b.refused("ro", syscall.EROFS, args...)
	}
	errtest.None(t, w.Kill(t.Context()))
}

// order sends a line to the guest's program and returns its answer.
func order(t testing.TB, c net.Conn, line string) string {
	t.Helper()
	errtest.None(t, c.SetDeadline(time.Now().Add(waitLimit)))
	errtest.Get(c.Write([]byte(line + "\n")))(t)
	got, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return strings.TrimSuffix(got, "\n")
}

// TestWorkspaceIsKept checks that an open file, even a deleted one, stays open
// across a pause, a hibernation and a restart of the daemon, and that its content
// reaches this machine.
func TestWorkspaceIsKept(t *testing.T) {
	b := newBench(t, nil)
	dir := workspace(t)
	w := b.startWith("kept", dir, "guest", "serve", ":80")
	listening(t, w, "80")
	var want string
	step := func(what string) {
		t.Helper()
		c := dial(t, w)
		defer c.Close()
		if want == "" {
			if got := order(t, c, "keep open /workspace/log"); got != "done" {
				t.Fatalf("%s: %s", what, got)
			}
		}
		want += what
		if got := order(t, c, "keep append "+what); got != "done" {
			t.Fatalf("%s: %s", what, got)
		}
		if got := order(t, c, "keep read"); got != want {
			t.Fatalf("%s: read %q, want %q", what, got, want)
		}
		if text, err := os.ReadFile(filepath.Join(dir, "log")); err == nil && string(text) != want {
			t.Fatalf("%s: here is %q, want %q", what, text, want)
		}
	}
	thaw := func() {
		t.Helper()
		errtest.None(t, w.Thaw())
	}
	// Like the host, retry the pause while the guest waits for a file.
	freeze := func() {
		t.Helper()
		waittest.Until(t, "nothing is pending in the frozen guest", func() bool {
			errtest.None(t, w.Freeze(t.Context()))
			g, err := w.Guard(nil, false, func(string) {})
			if err != nil {
				t.Fatal(err)
			}
			defer g.Close()
			if what := g.Pending(); what != "" {
				t.Log("pending:", what)
				thaw()
				return false
			}
			return true
		})
	}
	save := func() {
		t.Helper()
		freeze()
		errtest.Get(w.Hibernate(t.Context()))(t)
	}
	daemon := func() {
		t.Helper()
		errtest.None(t, b.Close())
		w = b.next("kept")
	}
	step("begun,")
	freeze()
	thaw()
	step("paused,")
	save()
	thaw()
	step("hibernated,")
	daemon()
	step("restarted,")
	for range 10 { // the guest requests files as soon as it continues
		freeze()
		daemon()
		thaw()
		step("restarted while paused,")
	}
	save()
	for id, ws := range map[string]string{"alone": "", "both": dir} {
		l := b.launch(id, 1)
		l.Workspace = ws
		errtest.Get(b.Clone(t.Context(), "kept", l))(t)
		c, err := b.Adopt(t.Context(), id, instance.Identity{Run: 1})
		if err != nil {
			t.Fatal(err)
		}
		errtest.None(t, c.Thaw())
		if ws == "" {
			b.refused(id, syscall.EIO, "get", "/workspace/log")
		} else if got := b.must(id, "get", "/workspace/log"); got != want {
			t.Errorf("a clone with the workspace reads %q", got)
		}
		errtest.None(t, c.Kill(t.Context()))
	}
	daemon()
	thaw()
	step("restarted while hibernated,")
	func() { // a deleted file exists as long as a process has it open
		c := dial(t, w)
		defer c.Close()
		want += "removed"
		for _, o := range []struct{ say, hear string }{{"remove /workspace/log", "done"}, {"append removed", "done"}, {"read", want}, {"close", "done"}} {
			if got := order(t, c, "keep "+o.say); got != o.hear {
				t.Errorf("%s: %q, want %q", o.say, got, o.hear)
			}
		}
	}()
	until(t, "what was removed is gone", func() bool {
		l, err := os.ReadDir(dir)
		return err == nil && len(l) == 0
	})
	errtest.None(t, w.Kill(t.Context()))
	b.clean("kept")
}
