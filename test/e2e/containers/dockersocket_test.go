package containers

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// behind is a Docker daemon with a lull that serves another socket in front of
// Docker's. The tests call that socket the front.
type behind struct {
	dock
	front string
}

func newBehind(t *testing.T) behind {
	t.Helper()
	k := daemontest.StartDockerd(t)
	front := filepath.Join(filepath.Dir(k.Socket()), "front")
	return behind{dock{k, host(t, "--docker="+k.Socket(), "--docker-socket="+front)}, front}
}

// client returns a docker command that uses the front.
func (k behind) client(args ...string) *exec.Cmd {
	return exec.CommandContext(k.d.T.Context(), "/usr/bin/docker", append([]string{"-H", "unix://" + k.front}, args...)...)
}

// does runs a docker command through the front and returns its output. The
// command must succeed.
func (k behind) does(stdin string, args ...string) string {
	k.d.T.Helper()
	c := k.client(args...)
	c.Stdin = strings.NewReader(stdin)
	out, err := c.CombinedOutput()
	if err != nil {
		k.d.T.Fatalf("docker %s through the front: %v: %.500s", args, err, out)
	}
	return string(out)
}

// whilePaused lets lull pause a container, calls do, and checks who resumed the
// container; by is "" if it must still be paused. If the shim resumed it because
// the daemon was too slow, whilePaused tries again.
func (k behind) whilePaused(name, what, by string, do func()) {
	k.d.T.Helper()
	for end := time.Now().Add(2 * daemontest.WaitLimit); ; {
		k.pause(name)
		was := k.d.Show(name)
		do()
		o := k.d.Show(name)
		resumed := ""
		if o.State != "paused" || !o.LastPausedAt.Equal(*was.LastPausedAt) {
			resumed = o.LastResumedBy
		}
		if resumed == by {
			return
		}
		if resumed != "external" || time.Now().After(end) {
			k.d.T.Fatalf("%s: it was resumed by %q, want %q: %s", what, resumed, by, daemontest.Describe(o))
		}
	}
}

// heldBy returns the reason for which a command keeps an instance running.
func heldBy(o hostctl.Instance) string {
	i := slices.IndexFunc(o.Blocks, func(b idle.Block) bool { return b.Signal == "exec" })
	if i < 0 {
		return ""
	}
	return o.Blocks[i].Sentence
}

// TestDockerSocket checks the commands that Docker refuses for a paused
// container. Through the front they must wake a container that lull has paused,
// and keep it running as long as they take. No other command may wake a
// container, and no command one that a user has paused.
func TestDockerSocket(t *testing.T) {
	t.Parallel()
	k := newBehind(t)
	k.serve("web")

	// Docker itself refuses an exec. A command that only reads must not wake the
	// container.
	k.whilePaused("web", "docker exec without the front", "", func() { k.Say("exec", "web", "/bin/busybox", "true") })
	for _, args := range [][]string{{"ps"}, {"inspect", "web"}, {"logs", "web"}, {"top", "web"}, {"port", "web"}, {"stats", "--no-stream", "web"}, {"diff", "web"},
		{"events", "--since=1s", "--until=0s"}, {"cp", "web:/bin/busybox", filepath.Join(k.d.Dir, "copied")}} {
		k.whilePaused("web", strings.Join(args, " "), "", func() { k.does("", args...) })
	}

	// An exec wakes it and gets its streams.
	k.whilePaused("web", "docker exec", "manual", func() {
		if got := k.does("", "exec", "web", "echo", "here"); got != "here\n" {
			t.Errorf("docker exec says %q", got)
		}
	})
	k.pause("web")
	long := strings.Repeat("0123456789abcdef", 1<<16)
	if got := k.does(long, "exec", "-i", "web", "cat"); got != long {
		t.Errorf("cat returns %d bytes, want %d", len(got), len(long))
	}

	// It is kept running while the command's stream is open, and no longer.
	k.pause("web")
	open := k.client("exec", "-i", "web", "cat")
	stdin, err := open.StdinPipe()
	errtest.None(t, err)
	errtest.None(t, open.Start())
	const once = "A command runs beside it: cat."
	k.d.Until("web", "the command holds it once", func(o hostctl.Instance) bool { return o.State == "running" && heldBy(o) == once })
	if _, err := k.d.Do(t.Context(), "web", "pause", nil); err == nil || !strings.Contains(err.Error(), once) {
		t.Errorf("paused under a command: %v", err)
	}
	if err := stdin.Close(); err != nil {
		t.Error(err)
	}
	if err := open.Wait(); err != nil {
		t.Error(err)
	}
	free := func(what string) {
		t.Helper()
		k.d.Until("web", "nothing holds it after "+what, func(o hostctl.Instance) bool { return heldBy(o) == "" })
	}
	free("the command")

	// A detached command keeps it running until the command ends.
	k.pause("web")
	k.does("", "exec", "-d", "web", "sleep", "77777")
	k.d.Until("web", "the detached command holds it", func(o hostctl.Instance) bool {
		return o.State == "running" && heldBy(o) == "A command runs beside it: sleep 77777."
	})
	k.does("", "exec", "web", "/bin/busybox", "killall", "sleep")
	free("the detached command")

	// A command that cannot start, or is never started, does not keep it running.
	k.pause("web")
	for _, flag := range []string{"-i", "-d"} {
		if out, err := k.client("exec", flag, "web", "no-such-command").CombinedOutput(); err == nil {
			t.Errorf("a command that does not exist: %s", out)
		}
	}
	k.Fails("exec", "web", "no-such-command") // without the front it fails, too
	made := k.asks("POST", "/containers/web/exec", `{"Cmd":["true"]}`)
	if made != http.StatusCreated {
		t.Errorf("a command is made: %d", made)
	}
	free("commands that did not start")

	// Other commands that Docker refuses for a paused container.
	for _, c := range []struct {
		method, path string
		want         int
	}{
		{"POST", "/containers/web/attach?stream=1&stdout=1", http.StatusSwitchingProtocols},
		{"POST", "/containers/web/start", http.StatusNotModified},
	} {
		k.whilePaused("web", c.path, "manual", func() {
			if got := k.asks(c.method, c.path, ""); got != c.want {
				t.Errorf("%s: %d, want %d", c.path, got, c.want)
			}
		})
		free(c.path)
	}

	// A user's pause remains, even if lull had paused the container before.
	k.pause("web")
	k.does("", "pause", "web")
	k.d.Until("web", "a user has paused it", func(o hostctl.Instance) bool { return o.State == "paused" && o.LastPausedBy == "external" })
	if out, err := k.client("exec", "web", "/bin/busybox", "true").CombinedOutput(); err == nil || !strings.Contains(string(out), "paused") {
		t.Errorf("docker exec after docker pause: %v: %s", err, out)
	}
	if o := k.d.Show("web"); o.LastPausedBy != "external" || k.status("web") != "paused" {
		t.Errorf("after docker exec: %s, docker says %s", daemontest.Describe(o), k.status("web"))
	}
	k.does("", "unpause", "web")
	k.known("web")

	// All other commands pass: uploads, runs with streams, waits and followed
	// logs.
	tar, err := os.ReadFile(filepath.Join(filepath.Dir(k.front), "root.tar"))
	errtest.None(t, err)
	k.does(string(tar), "import", "-", "box:2")
	if got := k.does("in", "run", "--rm", "-i", "--network", "none", "box:2", "sh", "-c", "cat; echo out"); got != "inout\n" {
		t.Errorf("docker run says %q", got)
	}
	k.does("", "run", "-d", "--name", "ends", "--network", "none", "box:1", "sh", "-c", "echo first; until [ -e /end ]; do sleep 0.1; done; echo last; exit 7")
	var followed bytes.Buffer
	logs, wait := k.client("logs", "-f", "ends"), k.client("wait", "ends")
	logs.Stdout = &followed
	var code bytes.Buffer
	wait.Stdout = &code
	for _, c := range []*exec.Cmd{logs, wait} {
		errtest.None(t, c.Start())
	}
	k.does("", "exec", "ends", "sh", "-c", ": >/end") // lull does not manage this one
	for _, c := range []*exec.Cmd{logs, wait} {
		if err := c.Wait(); err != nil {
			t.Errorf("docker %s: %v", c.Args[3:], err)
		}
	}
	if followed.String() != "first\nlast\n" || code.String() != "7\n" {
		t.Errorf("docker logs -f says %q, docker wait %q", followed.String(), code.String())
	}

	// After a restart of either daemon the front works again.
	k.pause("web")
	k.d.Kill()
	k.is("web", "running")
	k.d.Boot()
	k.known("web")
	k.does("", "exec", "web", "/bin/busybox", "true")
	k.Stop()
	if out, err := k.client("ps").CombinedOutput(); err == nil || !strings.Contains(string(out), k.Socket()) {
		t.Errorf("without Docker: %v, %s", err, out)
	}
	k.Start()
	waittest.NoError(t, "docker exec works with the next Docker", func() error {
		out, err := k.client("exec", "web", "/bin/busybox", "true").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

func (k behind) asks(method, path, body string) int {
	k.d.T.Helper()
	return requests(k.d.T, k.front, method, path, body)
}

// requests sends a request whose answer may become a stream, closes it, and
// returns the status.
func requests(t *testing.T, socket, method, path, body string) int {
	t.Helper()
	c := http.Client{Timeout: daemontest.WaitLimit, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}
	q, err := http.NewRequestWithContext(t.Context(), method, "http://docker"+path, strings.NewReader(body))
	errtest.None(t, err)
	q.Header.Set("Content-Type", "application/json")
	if strings.Contains(path, "/attach") {
		q.Header.Set("Connection", "Upgrade")
		q.Header.Set("Upgrade", "tcp")
	}
	res, err := c.Do(q)
	errtest.None(t, err)
	defer res.Body.Close()
	if res.StatusCode != http.StatusSwitchingProtocols {
		_, _ = io.Copy(io.Discard, res.Body) // only the status matters
	}
	return res.StatusCode
}

// TestDockerSocketOwner checks that the front can be used by those who may use
// Docker's own socket and by no others, from the moment it exists. It may replace
// a socket that no process serves, and nothing else.
func TestDockerSocketOwner(t *testing.T) {
	t.Parallel()
	k := newBehind(t)
	owner := func(path string) string {
		st, err := os.Stat(path)
		if err != nil {
			return err.Error()
		}
		s := st.Sys().(*syscall.Stat_t)
		return fmt.Sprintf("%s %d:%d", st.Mode(), s.Uid, s.Gid)
	}
	same := func(what string) {
		t.Helper()
		daemontest.Wait(t, what+": the front has the owner and mode of Docker's socket", func() (bool, string) {
			front, engine := owner(k.front), owner(k.Socket())
			return front == engine, front + " and " + engine
		})
	}
	same("at first")
	for _, c := range []struct {
		mode     os.FileMode
		uid, gid int
		want     string
	}{
		{0o660, 0, 4242, "Srw-rw---- 0:4242"},
		{0o666, 4241, 4242, "Srw-rw---- 4241:4242"},
		{0o600, 0, 0, "Srw------- 0:0"},
	} {
		errtest.None(t, os.Chown(k.Socket(), c.uid, c.gid))
		errtest.None(t, os.Chmod(k.Socket(), c.mode))
		k.d.Kill() // leaves its socket file behind
		k.d.Boot()
		daemontest.Wait(t, "the front is "+c.want, func() (bool, string) { got := owner(k.front); return got == c.want, got })
	}

	// Until lull reaches Docker, only root may use the front.
	errtest.None(t, os.Chown(k.Socket(), 0, 4242))
	k.d.Kill()
	k.Stop()
	k.d.Boot()
	if got := owner(k.front); got != "Srw------- 0:0" {
		t.Errorf("without Docker the front is %s", got)
	}
	k.Start()
	same("Docker came later")

	for _, c := range []struct{ name, at, want string }{
		{"a socket in use", k.front, "another process serves there"},
		{"a file", filepath.Join(k.d.Dir, "daemon.log"), "not a socket"},
		{"Docker's own", k.Socket(), "Docker's own socket"},
		{"Docker's own, through a link", filepath.Join(k.d.Dir, "link", filepath.Base(k.Socket())), "Docker's own socket"},
	} {
		if err := os.Symlink(filepath.Dir(k.Socket()), filepath.Join(k.d.Dir, "link")); err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
		before := owner(c.at)
		dir := t.TempDir()
		out, err := exec.CommandContext(t.Context(), daemontest.Program("lull"), "host", "--data", dir+"/d", "--socket", filepath.Join(k.d.Dir, "other.sock"),
			"--docker="+k.Socket(), "--docker-socket="+c.at).CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.want) {
			t.Errorf("%s: %v, %s", c.name, err, out)
		}
		if after := owner(c.at); after != before {
			t.Errorf("%s was %s and is %s", c.name, before, after)
		}
	}
	k.does("", "version")
}
