package daemontest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/lib/httpx"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// Config configures a host. The zero value means the daemon's defaults.
type Config struct {
	Args     []string // arguments of lull host besides data and socket
	UID, GID int      // user that runs it; 0 means the user of the tests
	Under    string   // where its directory is created; "" means the directory for temporary files
	Env      []string // environment of the daemon besides the necessary variables
	Lull     string   // path of the lull binary; "" means the one that Build has built
}

// Host is a lull host in a child process, and a client of it. Its methods fail the
// test on errors.
type Host struct {
	*hostctl.Client
	T   *testing.T
	Dir string // directory of its data, socket and log, which everyone may read
	*child
}

// child is the current process of a host.
type child struct {
	cfg    Config
	cmd    *exec.Cmd
	gone   chan struct{} // closed when it has ended; err is set then
	err    error
	killed bool

	evidence   sync.Mutex // held while evidence is recorded
	evidenceAt time.Time  // when it was last recorded
}

// Start runs a host until the test ends.
func Start(t *testing.T, cfg Config) *Host {
	t.Helper()
	Build(t)
	dir, err := os.MkdirTemp(cfg.Under, "lh") // short, because of the length limit of socket paths
	if err == nil {
		err = errors.Join(os.Chmod(dir, 0o755), os.Chown(dir, owner(cfg.UID), owner(cfg.GID)))
	}
	if err != nil {
		t.Fatal(err)
	}
	h := &Host{T: t, Dir: dir, child: &child{cfg: cfg}}
	if h.Client, err = hostctl.NewClient(h.socket()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.end)
	h.Boot()
	return h
}

// owner returns an ID for chown, where -1 means unchanged.
func owner(id int) int {
	if id == 0 {
		return -1
	}
	return id
}

func (h *Host) socket() string { return h.Dir + "/host.sock" }

// In returns a copy of h that reports failures to the subtest t.
func (h *Host) In(t *testing.T) *Host { c := *h; c.T = t; return &c }

// Set adds arguments for the next daemons. If an argument is repeated, the last
// value counts.
func (h *Host) Set(args ...string) { h.cfg.Args = append(slices.Clip(h.cfg.Args), args...) }

// Boot starts the daemon, for the first time or after Kill, and waits until it
// answers.
func (h *Host) Boot() {
	h.T.Helper()
	log, err := os.OpenFile(h.Dir+"/daemon.log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		h.T.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(cmp.Or(h.cfg.Lull, Program("lull")), append([]string{"host", "--data", h.Dir + "/data", "--socket", h.socket()}, h.cfg.Args...)...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	// The tests' environment is not inherited, because variables are settings too.
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=/", "GORACE=halt_on_error=1 exitcode=66"}, h.cfg.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if h.cfg.UID != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(h.cfg.UID), Gid: uint32(h.cfg.GID)}
	}
	if err := cmd.Start(); err != nil {
		h.T.Fatal(err)
	}
	c := h.child
	c.cmd, c.gone, c.killed = cmd, make(chan struct{}), false
	go func() { c.err = cmd.Wait(); close(c.gone) }() // end waits for this goroutine
	if !waittest.Within(WaitLimit, func() bool { _, err := h.Status(h.T.Context()); return err == nil || h.Over() }) || h.Over() {
		h.T.Fatalf("the daemon does not come up:\n%s", h.Log())
	}
}

// Over reports whether the daemon has exited.
func (h *Host) Over() bool {
	select {
	case <-h.gone:
		return true
	default:
		return false
	}
}

// Kill kills the daemon with SIGKILL.
func (h *Host) Kill() {
	h.killed = true
	_ = h.cmd.Process.Kill() // fails if it has already ended
	<-h.gone
}

// PID returns the daemon's process ID.
func (h *Host) PID() int { return h.cmd.Process.Pid }

// Log returns the end of the logs of the daemon and its shim, without routine
// messages.
func (h *Host) Log() string {
	var out []byte
	for _, f := range []string{"/daemon.log", "/data/shim/shim.log"} {
		b, _ := os.ReadFile(h.Dir + f) // the shim may have no log yet
		var rare []byte
		for line := range bytes.Lines(b) {
			if !bytes.Contains(line, []byte("level=INFO")) {
				rare = append(rare, line...)
			}
		}
		out = append(out, rare[max(0, len(rare)-6000):]...)
	}
	return string(out)
}

// end ends the host, its instances and its shim, and fails the test if one of them
// does not end.
func (h *Host) end() {
	ctx, cancel := context.WithTimeout(context.Background(), WaitLimit)
	defer cancel()
	switch {
	case h.cmd == nil: // the daemon was never started
	case !h.Over():
		h.removeAll(ctx)
		_ = h.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-h.gone:
			if h.err != nil {
				h.T.Errorf("the daemon ended with: %v", h.err)
			}
		case <-ctx.Done():
			h.T.Error("the daemon does not end")
			h.Kill()
		}
	case !h.killed:
		h.T.Errorf("the daemon ended by itself: %v", h.err)
	}
	h.endShim()
	for _, what := range h.left() {
		h.T.Errorf("left at the end: %s", what)
	}
	if b, _ := os.ReadFile(h.Dir + "/daemon.log"); bytes.Contains(b, []byte("DATA RACE")) {
		h.T.Error("the race detector spoke")
	}
	if h.T.Failed() {
		h.T.Logf("the daemon said:\n%s", h.Log())
	}
	os.RemoveAll(h.Dir)
}

func (h *Host) removeAll(ctx context.Context) {
	l, err := h.List(ctx)
	if err != nil {
		h.T.Errorf("cannot list at the end: %v", err)
	}
	var wg sync.WaitGroup
	for _, o := range l {
		wg.Go(func() {
			err := h.Remove(ctx, o.ID)
			if p, ok := errors.AsType[*httpx.Problem](err); ok && p.Status == http.StatusNotFound {
				return // an adopted program has ended and was released
			}
			if err != nil {
				h.T.Errorf("cannot remove %s at the end: %v", o.Name, err)
			}
		})
	}
	wg.Wait()
}

func (h *Host) endShim() {
	pid := h.ShimPID()
	if pid == 0 {
		return
	}
	_ = syscall.Kill(pid, syscall.SIGTERM)
	if !waittest.Within(WaitLimit, func() bool { return h.ShimPID() == 0 }) {
		h.T.Errorf("the shim %d does not end", pid)
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// left kills the processes that this host has left. It returns their names, and the
// names of guests' files that are left.
func (h *Host) left() (what []string) {
	var pids []int
	waittest.Within(WaitLimit, func() bool { pids = h.Processes(); return len(pids) == 0 })
	for _, pid := range pids {
		what = append(what, fmt.Sprintf("process %d: %q", pid, read(pid, "cmdline")))
		_ = syscall.Kill(pid, syscall.SIGKILL)
		_ = syscall.Kill(pid, syscall.SIGCONT)
	}
	files, err := filepath.Glob(h.Dir + "/data/vm/vm/*")
	if err != nil {
		what = append(what, err.Error())
	}
	return append(what, files...)
}

// Seconds returns a duration in the type that the API uses.
func Seconds(d time.Duration) *idle.Duration { v := idle.Duration(d); return &v }

// Launch creates and starts an instance.
func (h *Host) Launch(s instance.Spec) hostctl.Instance {
	h.T.Helper()
	o, err := h.Create(h.T.Context(), hostctl.Create{Spec: s, Start: true})
	if err != nil {
		h.T.Fatalf("cannot start %s: %v\nit said: %s\nthe daemon said: %s", s.Name, err, h.Said(s.Name), h.Log())
	}
	return o
}

// Said returns the last output of an instance.
func (h *Host) Said(name string) string {
	var b bytes.Buffer
	if err := h.Logs(h.T.Context(), name, hostctl.Logs{Tail: 30}, &b); err != nil {
		return err.Error()
	}
	return b.String()
}

// Show returns the view of an instance, which must exist. It does not wake the
// instance.
func (h *Host) Show(name string) hostctl.Instance {
	h.T.Helper()
	o, err := h.Get(h.T.Context(), name)
	if err != nil {
		h.T.Fatalf("cannot get %s: %v", name, err)
	}
	return o
}

// Until waits until an instance exists and ok returns true for it, and returns its
// view. what describes the condition.
func (h *Host) Until(name, what string, ok func(o hostctl.Instance) bool) (o hostctl.Instance) {
	h.T.Helper()
	Wait(h.T, name+": "+what, func() (bool, string) {
		var err error
		if o, err = h.Get(h.T.Context(), name); err != nil {
			if h.Over() {
				h.T.Fatalf("the daemon has ended: %v", err)
			}
			return false, err.Error()
		}
		return ok(o), Describe(o)
	})
	return o
}

// Await waits until an instance is in a state, and returns its view.
func (h *Host) Await(name, state string) hostctl.Instance {
	h.T.Helper()
	return h.Until(name, "it is "+state, func(o hostctl.Instance) bool { return o.State == state })
}

// Describe returns the state of an instance and its reason.
func Describe(o hostctl.Instance) string {
	return fmt.Sprintf("%s is %s (%s), process %d, %d connections; blocks %+v; activity %+v",
		o.Name, o.State, o.StatusReason, o.PID, o.Connections, o.Blocks, o.Activity)
}

// Must performs an operation (verb) that must succeed.
func (h *Host) Must(name, verb string) {
	h.T.Helper()
	if _, err := h.Do(h.T.Context(), name, verb, nil); err != nil {
		h.T.Fatalf("cannot %s %s: %v", verb, name, err)
	}
}

// Force pauses an instance even if it is in use.
func (h *Host) Force(name string) error {
	_, err := h.Do(h.T.Context(), name, "pause", url.Values{"force": {"true"}})
	return err
}
