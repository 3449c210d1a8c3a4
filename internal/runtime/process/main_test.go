package process_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/lib/freeport"
	"lull/internal/lib/waittest"
	"lull/internal/platform/cgroup"
	"lull/internal/runtime/process"
	"lull/internal/shim"
)

// The test binary is also the shim, its exec stage and the programs under test.
func TestMain(m *testing.M) {
	if code, ok := shim.Stage(os.Args); ok {
		os.Exit(code)
	}
	switch {
	case len(os.Args) == 3 && os.Args[1] == "--dir":
		os.Exit(shimMain(os.Args[2]))
	case len(os.Args) > 2 && os.Args[1] == "program":
		program(os.Args[2], os.Args[3:])
	}
	os.Exit(m.Run())
}

func shimMain(dir string) int {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	exe, err := os.Executable()
	if err != nil {
		log.Error("no executable", "error", err)
		return 1
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	s, err := shim.New(shim.Config{Dir: dir, Exe: exe, Release: "test", Log: log, Gone: 300 * time.Millisecond, Linger: 2 * time.Second})
	if err == nil {
		err = s.Run(ctx)
	}
	if err != nil {
		log.Error("ended", "error", err)
		return 1
	}
	return 0
}

const waitLimit = waittest.Timeout

// freezers runs a test with every freezer available to this user.
func freezers(t *testing.T, test func(t *testing.T, cfg process.Config)) {
	all := map[string]process.Config{"v2": {Kinds: []cgroup.Kind{cgroup.V2}}, "v1": {Kinds: []cgroup.Kind{cgroup.V1}}, "signals": {Signals: true}}
	for name, cfg := range all {
		t.Run(name, func(t *testing.T) {
			if !cfg.Signals {
				if _, err := cgroup.Find("probe", cfg.Kinds...); err != nil {
					t.Skipf("needs root or a delegated group: %v", err)
				}
			}
			test(t, cfg)
		})
	}
}

// host is a runtime under test, together with a daemon's use of it.
type host struct {
	t   *testing.T
	cfg process.Config
	rt  *process.Runtime

	mu    sync.Mutex
	exits map[string][]instance.Exit
	lost  int

	stop func()
	ids  []string
}

func newHost(t *testing.T, cfg process.Config) *host {
	t.Helper()
	exe, err := os.Executable()
	errtest.None(t, err)
	h := &host{t: t, cfg: cfg, exits: map[string][]instance.Exit{}}
	h.cfg.Dir, h.cfg.Shim = filepath.Join(t.TempDir(), "shim"), exe
	h.cfg.Log = slog.New(slog.NewTextHandler(testWriter{t}, nil))
	h.cfg.OnExit = func(id string, run uint64, e instance.Exit) {
		h.mu.Lock()
		defer h.mu.Unlock()
		k := fmt.Sprintf("%s/%d", id, run)
		h.exits[k] = append(h.exits[k], e)
	}
	h.cfg.OnShimLost = func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.lost++
	}
	t.Cleanup(h.end)
	h.open()
	return h
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	defer func() { _ = recover() }() // t.Log panics after the end of the test; such log lines are discarded
	w.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

// open creates the runtime, as a starting daemon does.
func (h *host) open() {
	h.t.Helper()
	rt, err := process.New(waittest.Context(h.t), h.cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- rt.Run(ctx) }()
	h.rt = rt
	h.stop = func() {
		cancel()
		if err := <-done; err != nil {
			h.t.Errorf("Run: %v", err)
		}
		if err := rt.Close(); err != nil {
			h.t.Errorf("Close: %v", err)
		}
	}
}

// close closes the runtime, as an ending daemon does. The shim and the programs
// continue to run.
func (h *host) close() {
	h.stop()
	h.stop = nil
}

func (h *host) end() {
	pid := h.shimPID()
	if h.stop != nil {
		for _, id := range h.ids {
			_ = h.rt.Unhold(waittest.Context(h.t), id)
		}
		h.close()
	}
	if pid > 1 {
		_ = syscall.Kill(pid, syscall.SIGTERM)
		waittest.Until(h.t, "the shim ends", func() bool { return over(pid) })
	}
	// The watchdog ends only after the shim. It may even be starting still, and
	// create its socket.
	waittest.Until(h.t, "the shim's watchdog ends", func() bool { return !h.inUse() })
	if h.t.Failed() {
		b, _ := os.ReadFile(filepath.Join(h.cfg.Dir, "shim.log"))
		h.t.Logf("the shim said:\n%s", b)
	}
}

// inUse reports whether a shim or watchdog of this host runs.
func (h *host) inUse() bool {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	return slices.ContainsFunc(all, func(name string) bool {
		b, _ := os.ReadFile(name) // empty if the process has ended
		return strings.Contains(string(b), "\x00"+h.cfg.Dir+"\x00")
	})
}

func (h *host) shimPID() int {
	var pid int
	_, _ = fmt.Sscanf(h.rt.Shim(), "pid %d", &pid)
	return pid
}

func over(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(b), ") Z ")
}

// launch returns the launch of a run. Its ID must not be used by the tests of
// package shim, which may run at the same time, because processes are found by
// instance ID.
func (h *host) launch(id string, run uint64, argv ...string) instance.Launch {
	return instance.Launch{ID: id, Run: run, Command: argv, Dir: "/", LogPath: h.log(id), LogMax: 1 << 20,
		Env: []string{"PATH=/usr/bin:/bin", "OUT=" + h.out(id)}}
}

func (h *host) log(id string) string { return filepath.Join(h.cfg.Dir, id+".log") }
func (h *host) out(id string) string { return filepath.Join(h.cfg.Dir, id+".out") }

// start starts a run, which is killed at the end of the test.
func (h *host) start(l instance.Launch) instance.Workload {
	h.t.Helper()
	w, err := h.rt.Start(waittest.Context(h.t), l)
	if err != nil {
		h.t.Fatal(err)
	}
	h.ids = append(h.ids, l.ID)
	h.t.Cleanup(func() {
		if h.rt == nil {
			return
		}
		if err := w.Kill(waittest.Context(h.t)); err != nil {
			h.t.Errorf("Kill: %v", err)
		}
		if w.Identity().Cgroup != "" {
			waittest.Until(h.t, "the group can be removed", func() bool { return os.Remove(w.Identity().Cgroup) == nil || !exists(w.Identity().Cgroup) })
		}
	})
	return w
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// serve starts a server of this test binary, and waits until it listens.
func (h *host) serve(id string, run uint64, kind string, addrs ...string) instance.Workload {
	h.t.Helper()
	l := h.launch(id, run, append([]string{h.cfg.Shim, "program", kind}, addrs...)...)
	w := h.start(l)
	h.ready(w, len(addrs))
	return w
}

func (h *host) ready(w instance.Workload, n int) {
	h.t.Helper()
	var ls []instance.Listener
	waittest.NoError(h.t, "it listens", func() (err error) { // during exec, only root can read a program's sockets
		if ls, err = w.Listeners(); err == nil && len(ls) < n {
			err = fmt.Errorf("%d listeners, want %d", len(ls), n)
		}
		return err
	})
}

func (h *host) exit(id string, run uint64) instance.Exit {
	h.t.Helper()
	var e instance.Exit
	k := fmt.Sprintf("%s/%d", id, run)
	waittest.Until(h.t, "the end of "+k, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		if len(h.exits[k]) > 0 {
			e = h.exits[k][0]
		}
		return len(h.exits[k]) > 0
	})
	return e
}

// port returns an address of host that is not in use.
func port(t testing.TB, host string) string {
	t.Helper()
	p, err := freeport.Take()
	errtest.None(t, err)
	addr := net.JoinHostPort(host, strconv.Itoa(p))
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Skipf("needs the address %s: %v", host, err)
	}
	l.Close()
	return addr
}

func ends(addrs ...string) (out []instance.Endpoint) {
	for _, a := range addrs {
		out = append(out, instance.Endpoint{Listen: a, Target: a, Path: instance.PathDirect})
	}
	return out
}

// TestAsNobody runs the other tests again as an unprivileged user.
func TestAsNobody(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to become another user")
	}
	const nobody = 65534
	dir, err := os.MkdirTemp("/tmp", "lull-test-")
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	b, err := os.ReadFile("/proc/self/exe")
	errtest.None(t, err)
	exe := filepath.Join(dir, "test")
	errtest.None(t, os.WriteFile(exe, b, 0o755))
	errtest.None(t, os.Chown(dir, nobody, nobody))
	cmd := exec.Command(exe, "-test.v", "-test.timeout=10m")
	cmd.Dir, cmd.WaitDelay = dir, waitLimit
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, "HOME="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	var said []string
	for line := range strings.Lines(string(out)) {
		if s := strings.TrimSpace(line); strings.HasPrefix(s, "--- ") || strings.Contains(s, "rounds") {
			said = append(said, s)
		}
	}
	t.Logf("as nobody:\n%s", strings.Join(said, "\n"))
	if err != nil {
		t.Fatalf("as nobody: %v\n%s", err, out)
	}
}

// exec runs a command and returns its output.
func (h *host) exec(ctx context.Context, id string, c instance.Command) (instance.Outcome, error) {
	return instance.Capture(func(s instance.Streams) (int, error) { return h.rt.Exec(ctx, id, c, s) })
}
