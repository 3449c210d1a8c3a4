package programs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/base/freeport"
	"lull/internal/idle"
	"lull/internal/instance"
	"lull/internal/link/hostctl"
)

// patience bounds every wait for a condition.
const patience = 60 * time.Second

// pauseAfter is the idle time of the instances here, short so that many cycles
// fit into a test.
const pauseAfter = 150 * time.Millisecond

// built is the folder of the programs under test.
var built string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "lull-programs")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	out, err := exec.Command("go", "build", "-o", dir, "lull/cmd/lull", "lull/cmd/lull-shim").CombinedOutput()
	if err == nil {
		err = os.Chmod(dir, 0o755) // an ordinary user runs them too
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "cannot build lull: %v\n%s", err, out)
		return 1
	}
	built = dir
	return m.Run()
}

func cycles(t *testing.T) int {
	s := os.Getenv("LULL_PROGRAM_CYCLES")
	if s == "" {
		return 50
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("LULL_PROGRAM_CYCLES is %q, want a number above 0", s)
	}
	return n
}

// account is who runs the daemon; nil is root.
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

// own gives a path to the account.
func (a *account) own(t *testing.T, path string) {
	if a == nil {
		return
	}
	if err := os.Chown(path, a.uid, a.gid); err != nil {
		t.Fatal(err)
	}
}

// daemon is a running lull host.
type daemon struct {
	*hostctl.Client
	t    *testing.T
	dir  string // a folder of its own, with the account's rights
	who  *account
	logs *locked
}

// locked collects what a process says.
type locked struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start runs a host until the test ends, then checks that nothing is left.
func start(t *testing.T, who *account) *daemon {
	if os.Geteuid() != 0 {
		t.Skip("it needs root, to run programs as their own users")
	}
	dir, err := os.MkdirTemp("", "lull-host")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	who.own(t, dir)
	d := &daemon{t: t, dir: dir, who: who, logs: &locked{}}
	socket := filepath.Join(dir, "sock", "host.sock")
	cmd := exec.Command(filepath.Join(built, "lull"), "host", "--data", filepath.Join(dir, "data"), "--socket", socket,
		"--probe", "50ms", "--stop-after", "0", "--stop-all")
	cmd.Dir, cmd.Stderr, cmd.Stdout = dir, d.logs, d.logs
	cmd.Env = append(os.Environ(), "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if who != nil {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(who.uid), Gid: uint32(who.gid)}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	d.Client, err = hostctl.NewClient("unix://" + socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.end(cmd) })
	d.await("the daemon to answer", func() (bool, string) {
		_, err := d.Status(t.Context())
		return err == nil, fmt.Sprint(err)
	})
	s, err := d.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("freezer %s", s.Freezer)
	return d
}

// end removes every instance and ends the daemon and its shim.
func (d *daemon) end(cmd *exec.Cmd) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	all, err := d.List(ctx)
	for _, o := range all {
		err = errors.Join(err, d.Remove(ctx, o.ID))
	}
	s, serr := d.Status(ctx)
	if err = errors.Join(err, serr); err != nil {
		d.t.Errorf("cannot clean up: %v", err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		d.t.Errorf("cannot end the daemon: %v", err)
	}
	if err := cmd.Wait(); err != nil {
		d.t.Errorf("the daemon ended with: %v", err)
	}
	var pid int
	if _, err := fmt.Sscanf(s.Shim, "pid %d", &pid); err == nil && pid > 1 {
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
			d.t.Errorf("cannot end the shim: %v", err)
		}
	}
	if d.t.Failed() {
		lines := strings.Split(d.logs.String(), "\n")
		d.t.Logf("the daemon said last:\n%s", strings.Join(lines[max(0, len(lines)-40):], "\n"))
	}
}

// await waits until cond holds.
func (d *daemon) await(what string, cond func() (ok bool, now string)) {
	d.t.Helper()
	end := time.Now().Add(patience)
	last := ""
	for {
		ok, now := cond()
		if ok {
			return
		}
		last = now
		if time.Now().After(end) {
			d.t.Fatalf("waited %s in vain for %s: %s", patience, what, last)
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-d.t.Context().Done():
			d.t.Fatalf("ended while waiting for %s: %s", what, last)
		}
	}
}

// workload is one program under test.
type workload struct {
	*daemon
	name   string
	listen string // where clients connect
	target string // where the program listens
}

func (w *workload) port() string {
	_, p, _ := net.SplitHostPort(w.listen)
	return p
}

// freePort finds a port that nobody uses.
func freePort(t *testing.T) string {
	port, err := freeport.Take()
	if err != nil {
		t.Fatal(err)
	}
	return strconv.Itoa(port)
}

// place chooses the addresses of a path before the program is configured.
func (d *daemon) place(name string, path instance.Path) *workload {
	w := &workload{daemon: d, name: name, target: "127.0.0.1:" + freePort(d.t)}
	w.listen = w.target
	if path == instance.PathRelay {
		w.listen = "127.0.0.1:" + freePort(d.t)
	}
	return w
}

func (w *workload) targetPort() string {
	_, p, _ := net.SplitHostPort(w.target)
	return p
}

// launch runs the program; quiet is its quiet-connection-after.
func (w *workload) launch(user string, quiet time.Duration, command ...string) {
	w.t.Helper()
	after := idle.Duration(pauseAfter)
	path := instance.PathDirect
	if w.listen != w.target {
		path = instance.PathRelay
	}
	spec := instance.Spec{Name: w.name, Command: command, User: user, Workdir: w.dir, PauseAfter: &after,
		QuietConnectionAfter: idle.Duration(quiet), Expose: []instance.Endpoint{{Listen: w.listen, Target: w.target, Path: path}}}
	if _, err := w.Create(w.t.Context(), hostctl.Create{Spec: spec, Start: true}); err != nil {
		w.t.Fatalf("cannot start %s: %v\n%s", w.name, err, w.output())
	}
}

func (w *workload) output() string {
	var b bytes.Buffer
	if err := w.Logs(w.t.Context(), w.name, 30, false, &b); err != nil {
		return err.Error()
	}
	return b.String()
}

func (w *workload) get() hostctl.Instance {
	w.t.Helper()
	o, err := w.Get(w.t.Context(), w.name)
	if err != nil {
		w.t.Fatal(err)
	}
	return o
}

// awaitState waits for a state of the instance. Reading it wakes nothing.
func (w *workload) awaitState(state string) {
	w.t.Helper()
	w.await(w.name+" to be "+state, func() (bool, string) {
		o := w.get()
		return o.State == state, fmt.Sprintf("it is %s, %d connections, blocks %+v", o.State, o.Connections, o.Blocks)
	})
}
