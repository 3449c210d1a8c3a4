package programs

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// adopted stands for the path of programs that the test starts and lull adopts.
// Clients reach them directly.
const adopted instance.Path = "adopted"

// outside starts the program without lull, as the host's user, and makes lull
// adopt it.
func (w *workload) outside(quiet time.Duration, command []string) {
	w.T.Helper()
	st, err := os.Stat(w.Dir)
	if err != nil {
		w.T.Fatal(err)
	}
	owner := st.Sys().(*syscall.Stat_t)
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir, cmd.Env = w.Dir, []string{"PATH=" + os.Getenv("PATH"), "HOME=" + w.Dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}}
	if err := cmd.Start(); err != nil {
		w.T.Fatal(err)
	}
	w.T.Cleanup(func() {
		for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGCONT} {
			_ = syscall.Kill(-cmd.Process.Pid, sig)
		}
		_ = cmd.Wait() // returns an error because it was killed
	})
	waittest.Until(w.T, w.name+" listens", func() bool {
		c, err := net.Dial("tcp", w.listen)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	o, err := w.Adopt(w.T.Context(), hostctl.Adopt{PID: cmd.Process.Pid, Name: w.name, PauseAfter: daemontest.Seconds(pauseAfter)})
	if err == nil && quiet > 0 {
		_, err = w.Change(w.T.Context(), w.name, hostctl.Change{QuietConnectionAfter: daemontest.Seconds(quiet)})
	}
	if err != nil {
		w.T.Fatalf("cannot adopt %s: %v", w.name, err)
	}
	w.T.Logf("adopted process %d of user %d, endpoints %+v", o.PID, owner.Uid, o.Endpoints)
	w.T.Cleanup(func() {
		if err := w.ReleaseAdopted(context.WithoutCancel(w.T.Context()), w.name); err != nil {
			w.T.Errorf("cannot release %s: %v", w.name, err)
		}
	})
}

func TestNginxAdopted(t *testing.T) {
	t.Parallel()
	nginxCycles(nginxAt(start(t, nil), adopted, 0), cycles(t))
}

func TestNginxAdoptedOrdinaryUser(t *testing.T) {
	t.Parallel()
	nginxCycles(nginxAt(start(t, ordinary(t)), adopted, 0), cycles(t))
}

func TestRedisAdopted(t *testing.T) {
	t.Parallel()
	redisCycles(redisAt(start(t, nil), adopted, 0), cycles(t))
}

func TestRedisAdoptedOrdinaryUser(t *testing.T) {
	t.Parallel()
	redisCycles(redisAt(start(t, ordinary(t)), adopted, 0), cycles(t))
}

// interpreted visits a program, run by an interpreter, that serves the page.
func interpreted(h *daemontest.Host, name string, command func(w *workload, root string) []string) *workload {
	w := place(h, name, adopted)
	root := filepath.Join(w.Dir, name)
	if err := os.Mkdir(root, 0o755); err != nil {
		h.T.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "index.html"), []byte(page), 0o644); err != nil {
		h.T.Fatal(err)
	}
	w.launch("", 0, command(w, root)...)
	return w
}

func pythonAt(h *daemontest.Host) *workload {
	python := installed(h.T, "python3", "/usr/bin/python3", "python3")
	return interpreted(h, "python", func(w *workload, root string) []string {
		return []string{python, "-m", "http.server", w.targetPort(), "--bind", "127.0.0.1", "--directory", root}
	})
}

func nodeAt(h *daemontest.Host) *workload {
	node := installed(h.T, "nodejs", "node", "/usr/bin/node")
	return interpreted(h, "node", func(w *workload, _ string) []string {
		return []string{node, "-e", fmt.Sprintf(`require("http").createServer((q, r) => r.end(%q)).listen(%s, "127.0.0.1")`, page, w.targetPort())}
	})
}

// TestInterpretersAdopted adopts and visits programs in Python and JavaScript.
func TestInterpretersAdopted(t *testing.T) {
	for name, at := range map[string]func(*daemontest.Host) *workload{"python": pythonAt, "node": nodeAt} {
		for user, who := range map[string]func(*testing.T) *account{"root": func(*testing.T) *account { return nil }, "ordinary": ordinary} {
			t.Run(name+" "+user, func(t *testing.T) {
				t.Parallel()
				w := at(start(t, who(t)))
				w.comeAndGo(cycles(t), func(int) {
					tr := &http.Transport{}
					defer tr.CloseIdleConnections()
					w.fetch(&http.Client{Transport: tr, Timeout: daemontest.WaitLimit}, 3)
				})
			})
		}
	}
}
