package host

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/host/hosttest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/httpx"
	"lull/internal/lib/tartree"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// dockered is a machine of the suite whose containers a user has started. lull
// finds them by their labels.
type dockered struct {
	*bare
	k     *daemontest.Dockerd
	again map[string]bool // those that Docker restarts when they fail
}

func dockers(t *testing.T, b bare) hosttest.Machine {
	k := daemontest.StartDockerd(t)
	return &dockered{b.over(t, "--docker="+k.Socket()), k, map[string]bool{}}
}

func (m *dockered) Run(t *testing.T, name string, p hosttest.Program, change func(*instance.Spec)) {
	t.Helper()
	s := instance.Spec{}
	change(&s)
	args := []string{"run", "-d", "--name", name, "--label", "lull.pause-after=" + time.Duration(*s.PauseAfter).String()}
	if s.IdlePolicy != "" {
		args = append(args, "--label", "lull.idle-policy="+s.IdlePolicy)
	}
	if s.ReclaimAfter > 0 {
		args = append(args, "--label", "lull.reclaim-after="+time.Duration(s.ReclaimAfter).String())
	}
	if s.Restart == instance.RestartOnFailure {
		args = append(args, "--restart", "on-failure")
	}
	m.again[name] = s.Restart == instance.RestartOnFailure
	if p.Serves {
		at := daemontest.Addr(t)
		m.ports[name] = at
		m.k.Must(append(args, "-p", at+":8080", "box:1", "guest", "serve", "-listen", "0.0.0.0:8080")...)
	} else {
		// Its script begins once it is adopted, because only running containers
		// are.
		m.k.Must(append(args, "box:1", "sh", "-c", untilGo+p.Script)...)
	}
	m.Until(t, name+" is taken over", func() bool {
		o, err := m.Get(name)
		m.trace(name, o)
		return err == nil && (o.State == "running" || o.State == "paused")
	})
	if p.Serves {
		m.answers(t, name)
	} else {
		// Through lull, which resumes the container first if it is paused.
		if _, err := m.Exec(name, "touch", "/tmp/go"); err != nil {
			t.Fatalf("cannot tell %s to begin: %v", name, err)
		}
	}
}

const untilGo = `trap "exit 0" TERM; while [ ! -e /tmp/go ]; do sleep 0.1; done; `

// answers waits until the server answers. Docker accepts connections before the
// program listens.
func (m *dockered) answers(t *testing.T, name string) {
	t.Helper()
	m.Until(t, name+" answers", func() bool { got, err := once(m.ports[name], "hello"); return err == nil && got == "echo hello" })
}

func (m *dockered) Start(name string) error {
	err := m.bare.Start(name)
	if err == nil {
		m.answers(m.d.T, name)
	}
	return err
}

func (m *dockered) Remove(name string) error {
	if m.again[name] { // it may be between two starts, of which lull knows nothing
		m.k.Must("update", "--restart", "no", name)
		m.Until(m.d.T, name+" ends by itself", func() bool { return !m.runs(name) })
	}
	if err := m.bare.Remove(name); err != nil {
		return err
	}
	if m.runs(name) {
		return fmt.Errorf("after it was removed from lull the container %s runs", name)
	}
	m.k.Must("rm", name)
	return nil
}

// Get returns an instance. Its count of restarts is Docker's, because Docker
// restarts failed containers and lull follows.
func (m *dockered) Get(name string) (hostctl.Instance, error) {
	o, err := m.bare.Get(name)
	if err == nil && m.again[name] {
		o.RestartCount, err = strconv.Atoi(m.k.Say("inspect", "-f", "{{.RestartCount}}", name))
	}
	return o, err
}

// runs reports whether Docker lists the container as not exited.
func (m *dockered) runs(name string) bool {
	return m.k.Say("inspect", "-f", "{{.State.Running}}", name) != "false"
}

// TestDockerOutside manages containers with docker as a user does, and checks
// that lull follows.
func TestDockerOutside(t *testing.T) {
	k := daemontest.StartDockerd(t)
	m := &dockered{bare{}.over(t, "--docker="+k.Socket()), k, map[string]bool{}}
	// It pauses on request only, so that no automatic pause interferes.
	m.Run(t, "web", hosttest.Serve, func(s *instance.Spec) { s.PauseAfter = daemontest.Seconds(0) })

	force(m.d, "web")
	m.d.Await("web", "paused")
	if got := k.Must("ps", "--format", "{{.Status}}"); !strings.Contains(got, "(Paused)") {
		t.Errorf("docker does not know that it is paused: %s", got)
	}
	k.Must("unpause", "web")
	m.d.Until("web", "docker unpause was seen", func(o hostctl.Instance) bool { return o.LastResumedBy == "external" })

	// A user's pause remains: no client wakes the container.
	m.answers(t, "web")
	k.Must("pause", "web")
	m.d.Until("web", "docker pause was seen", func(o hostctl.Instance) bool { return o.State == "paused" && o.LastPausedBy == "external" })
	c := mustDial(t, m.ports["web"])
	errtest.Get(c.Write([]byte("hello\n")))(t)
	if !waittest.Stays(time.Second, func() bool { return m.d.Show("web").State == "paused" }) {
		t.Error("a client woke what a user had paused")
	}
	// After a restart the daemon does not wake it either.
	m.Crash(t, func() {})
	if o := m.d.Show("web"); o.State != "paused" || o.LastPausedBy != "external" {
		t.Errorf("after a restart it is %s, by %s", o.State, o.LastPausedBy)
	}
	k.Must("unpause", "web")
	if got, err := c.r.ReadString('\n'); err != nil || got != "echo hello\n" {
		t.Errorf("the client that waited got %q, %v", got, err)
	}
	c.Close()

	// While the Docker daemon is unavailable a wake is delayed, but no client is
	// lost.
	m.d.Await("web", "running")
	force(m.d, "web")
	m.d.Await("web", "paused")
	k.Stop()
	c = mustDialLater(t, k, m, "web")
	if got, err := c.r.ReadString('\n'); err != nil || got != "echo later\n" {
		t.Errorf("the client that came while dockerd was away got %q, %v", got, err)
	}
	c.Close()

	pid := m.d.Show("web").PID
	k.Must("restart", "-t", "5", "web")
	m.d.Until("web", "docker restart was seen", func(o hostctl.Instance) bool { return o.State != "stopped" && o.PID != 0 && o.PID != pid })
	m.answers(t, "web")
	k.Must("stop", "-t", "5", "web")
	o := m.d.Await("web", "stopped")
	if o.ExitCode == nil {
		t.Errorf("docker stop: no exit code: %s", o.StatusReason)
	}
	k.Must("rm", "web")
	daemontest.Wait(t, "docker rm was seen", func() (bool, string) {
		o, err := m.d.Get(t.Context(), "web")
		return err != nil, daemontest.Describe(o)
	})

	// A container with invalid labels is left alone.
	k.Must("run", "-d", "--name", "odd", "--label", "lull.pause-after=soon", "box:1", "sh", "-c", untilGo)
	daemontest.Wait(t, "the label is named in the log", func() (bool, string) {
		said := m.d.Log()
		return strings.Contains(said, "lull.pause-after"), said
	})
	if _, err := m.d.Get(t.Context(), "odd"); err == nil {
		t.Error("it was taken over")
	}
}

// mustDialLater connects while dockerd is not running, sends a line, and restarts
// dockerd. docker-proxy ends with dockerd, so the client connects to the
// container's own address.
func mustDialLater(t *testing.T, k *daemontest.Dockerd, m *dockered, name string) *client {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/fib_trie", m.d.Show(name).PID))
	errtest.None(t, err)
	addr := ""
	lines := strings.Split(string(b), "\n")
	for n, l := range lines {
		if n > 0 && strings.Contains(l, "/32 host") && !strings.Contains(lines[n-1], "127.") {
			addr = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(lines[n-1]), "|--"))
		}
	}
	c := mustDial(t, net.JoinHostPort(addr, "8080"))
	errtest.Get(c.Write([]byte("later\n")))(t)
	k.Start()
	return c
}

// TestDockerFiles copies files into and out of a container, while it is paused and
// while it is stopped.
func TestDockerFiles(t *testing.T) {
	m := dockers(t, bare{Subject: hosttest.Subject{Name: "docker"}}).(*dockered)
	m.Run(t, "files", hosttest.Serve, func(s *instance.Spec) { s.PauseAfter = daemontest.Seconds(0) })
	tree := t.TempDir()
	errtest.None(t, os.Mkdir(tree+"/deep", 0o755))
	errtest.None(t, os.WriteFile(tree+"/deep/f", []byte("content"), 0o644))
	root, err := os.OpenRoot(tree)
	errtest.None(t, err)
	defer root.Close()
	in := func(at string) error {
		var b bytes.Buffer
		errtest.None(t, tartree.Pack(&b, root, "tree"))
		return m.d.WriteFiles(t.Context(), "files", at, &b)
	}
	out := func(at, file string) {
		t.Helper()
		r, err := m.d.ReadFiles(t.Context(), "files", at)
		if err != nil {
			t.Errorf("%s: %v", at, err)
			return
		}
		defer r.Close()
		dir := t.TempDir()
		to, err := os.OpenRoot(dir)
		errtest.None(t, err)
		defer to.Close()
		errtest.None(t, tartree.Unpack(r, to, "", nil))
		if b, err := os.ReadFile(filepath.Join(dir, file)); err != nil || string(b) != "content" {
			t.Errorf("%s has %q, %v", at, b, err)
		}
	}
	for n, state := range []string{"running", "paused", "stopped"} {
		switch state {
		case "paused":
			errtest.None(t, m.Pause("files", true))
		case "stopped":
			errtest.None(t, m.Stop("files"))
		}
		named := fmt.Sprintf("/tmp/named%d", n)
		for _, at := range []string{"/root", named} {
			if err := in(at); err != nil {
				t.Errorf("%s, to %s: %v", state, at, err)
			}
		}
		out("/root/tree", "tree/deep/f")
		out(named, fmt.Sprintf("named%d/deep/f", n))
		out(named+"/deep/f", "f")
		_, err := m.d.ReadFiles(t.Context(), "files", "/none")
		if p, ok := errors.AsType[*httpx.Problem](err); !ok || p.Status != 404 {
			t.Errorf("a missing file: %v", err)
		}
		if err := in("/none/x"); err == nil {
			t.Error("it was copied into a directory that does not exist")
		}
		if o, err := m.Get("files"); err != nil || o.State != state {
			t.Errorf("it is %s, %v, and was %s", o.State, err, state)
		}
	}
}
