package programs

import (
	"context"
	"net"
	"os"
	"os/user"
	"strconv"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/hostctl"
)

// pauseAfter is the idle timeout of the instances, short so that many cycles fit
// into a test.
const pauseAfter = 150 * time.Millisecond

func TestMain(m *testing.M) {
	daemontest.Main(m, "lull/test/e2e/programs/testdata/serve")
}

func cycles(t *testing.T) int { return scaletest.Count(t, "LULL_PROGRAM_CYCLES", 15) }

// account is the user that runs the daemon; nil means root.
type account struct {
	name     string
	uid, gid int
}

func ordinary(t *testing.T) *account {
	u, err := user.Lookup("nobody")
	if err != nil {
		t.Skipf("there is no ordinary user here: %v", err)
	}
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	return &account{u.Username, uid, gid}
}

// own makes the account the owner of a path.
func (a *account) own(t *testing.T, path string) {
	if a == nil {
		return
	}
	errtest.None(t, os.Chown(path, a.uid, a.gid))
}

// start runs a host until the test ends.
func start(t *testing.T, who *account) *daemontest.Host {
	if os.Geteuid() != 0 {
		t.Skip("it needs root, to run programs as their own users")
	}
	cfg := daemontest.Config{Args: []string{"--probe", "50ms", "--stop-after", "0", "--stop-all"}}
	if who != nil {
		cfg.UID, cfg.GID = who.uid, who.gid
	}
	h := daemontest.Start(t, cfg)
	s, err := h.Status(t.Context())
	errtest.None(t, err)
	t.Logf("freezer %s", s.Freezer)
	return h
}

// workload is one program under test.
type workload struct {
	*daemontest.Host
	name    string
	listen  string // where clients connect
	target  string // the program's own address
	adopted bool   // the test starts the program, and lull adopts it
	// inside, if not nil, asks the program about its state.
	inside func(context.Context) string
}

func (w *workload) port() string {
	_, p, _ := net.SplitHostPort(w.listen)
	return p
}

// place returns a workload with addresses for a path, before its program is
// configured.
func place(h *daemontest.Host, name string, path instance.Path) *workload {
	w := &workload{Host: h, name: name, target: daemontest.Addr(h.T), adopted: path == adopted}
	w.listen = w.target
	if path == instance.PathRelay {
		w.listen = daemontest.Addr(h.T)
	}
	return w
}

func (w *workload) targetPort() string {
	_, p, _ := net.SplitHostPort(w.target)
	return p
}

// launch runs the program with quiet as its quiet-connection-after.
func (w *workload) launch(user string, quiet time.Duration, command ...string) {
	w.T.Helper()
	if w.adopted {
		w.outside(quiet, command)
		return
	}
	after := idle.Duration(pauseAfter)
	path := instance.PathDirect
	if w.listen != w.target {
		path = instance.PathRelay
	}
	w.Launch(instance.Spec{Name: w.name, Command: command, User: user, Workdir: w.Dir, PauseAfter: &after,
		QuietConnectionAfter: idle.Duration(quiet), Expose: []instance.Endpoint{{Listen: w.listen, Target: w.target, Path: path}}})
}

func (w *workload) get() hostctl.Instance {
	w.T.Helper()
	return w.Show(w.name)
}

// awaitState waits until the instance is in a state. Reading the state does not
// wake it.
func (w *workload) awaitState(state string) {
	w.T.Helper()
	w.Await(w.name, state)
}
