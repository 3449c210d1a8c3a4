package shim_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/waittest"
	"lull/internal/protocol/shimctl"
	"lull/internal/shim"
)

// The test binary is also the shim and the exec stage.
func TestMain(m *testing.M) {
	if code, ok := shim.Stage(os.Args); ok {
		os.Exit(code)
	}
	if steps := os.Getenv("LULL_TEST_SCRIPT"); steps != "" {
		os.Exit(script(steps))
	}
	if dir := os.Getenv("LULL_TEST_SHIM"); dir != "" {
		os.Exit(shimMain(dir))
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
	duration := func(name string) time.Duration { d, _ := time.ParseDuration(os.Getenv(name)); return d }
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	s, err := shim.New(shim.Config{Dir: dir, Exe: exe, Release: "test", Log: log,
		Gone: duration("LULL_TEST_GONE"), Linger: duration("LULL_TEST_LINGER")})
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

// bench is a shim under test, together with a daemon's connection to it.
type bench struct {
	t   *testing.T
	dir string
	exe string
	env []string

	mu    sync.Mutex
	ends  map[string][]shimctl.Ended
	execs map[uint64]shimctl.Exit

	cmd *exec.Cmd
	log *os.File
	c   *shimctl.Client
}

func newBench(t *testing.T, env ...string) *bench {
	t.Helper()
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, dir: filepath.Join(t.TempDir(), "shim"), exe: exe, env: env,
		ends: map[string][]shimctl.Ended{}, execs: map[uint64]shimctl.Exit{}}
	if b.log, err = os.Create(filepath.Join(t.TempDir(), "shim.log")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.stop(syscall.SIGKILL)
		b.endWatchdogs()
		if t.Failed() {
			text, _ := os.ReadFile(b.log.Name())
			t.Logf("the shim said:\n%s", text)
		}
	})
	return b
}

func (b *bench) start() *bench {
	b.t.Helper()
	b.cmd = b.command()
	b.cmd.Stderr = b.log
	if err := b.cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.connect()
	return b
}

func (b *bench) command() *exec.Cmd {
	cmd := exec.Command(b.exe)
	cmd.Env = append(append(os.Environ(), "LULL_TEST_SHIM="+b.dir), b.env...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

func (b *bench) connect() {
	b.t.Helper()
	var err error
	waittest.Until(b.t, "the shim answers", func() bool {
		b.c, err = shimctl.Dial(waittest.Context(b.t), b.dir+"/shim.sock", shimctl.Events{Ended: b.ended, ExecEnded: b.execEnded})
		return err == nil
	})
}

func (b *bench) ended(e shimctl.Ended) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ends[e.ID] = append(b.ends[e.ID], e)
}

func (b *bench) execEnded(e shimctl.ExecEnded) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.execs[e.Exec] = e.Exit
}

// stop ends the shim with a signal. It is no error if the shim has already ended.
func (b *bench) stop(sig syscall.Signal) {
	if b.c != nil {
		b.c.Close()
		b.c = nil
	}
	if b.cmd != nil {
		_ = b.cmd.Process.Signal(sig)
		_ = b.cmd.Wait()
		b.cmd = nil
	}
}

// endWatchdogs ends the watchdogs, which outlive a killed shim and write into
// its directory.
func (b *bench) endWatchdogs() {
	waittest.Until(b.t, "the watchdogs end", func() bool {
		none := true
		all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		for _, name := range all {
			line, _ := os.ReadFile(name) // empty if the process has ended
			if strings.Contains(string(line), "\x00"+shim.WatchVerb+"\x00"+b.dir+"\x00") {
				pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(name)))
				_ = syscall.Kill(pid, syscall.SIGKILL)
				none = false
			}
		}
		return none
	})
}

func (b *bench) launch(id string, run uint64, script string) shimctl.Start {
	return shimctl.Start{ID: id, Run: run, Command: []string{"sh", "-c", script}, Dir: "/",
		Env: []string{"PATH=/usr/bin:/bin", "OUT=" + filepath.Join(b.dir, "out")}, LogPath: b.logPath(id), LogMax: 1 << 20}
}

func (b *bench) logPath(id string) string { return filepath.Join(b.dir, id+".log") }

func (b *bench) run(id string, run uint64, script string) shimctl.Started {
	b.t.Helper()
	got, err := b.c.Start(waittest.Context(b.t), b.launch(id, run, script))
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = syscall.Kill(-got.PID, syscall.SIGKILL); _ = syscall.Kill(-got.PID, syscall.SIGCONT) })
	return got
}

// exit waits until a run has ended and returns how.
func (b *bench) exit(id string, run uint64) shimctl.Exit {
	b.t.Helper()
	var got shimctl.Exit
	waittest.Until(b.t, fmt.Sprintf("run %d of %s ends", run, id), func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, e := range b.ends[id] {
			if e.Run == run {
				got = e.Exit
				return true
			}
		}
		return false
	})
	return got
}

func (b *bench) text(path string) string {
	text, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		b.t.Fatal(err)
	}
	return string(text)
}

func (b *bench) waitText(path, want string) {
	b.t.Helper()
	waittest.Until(b.t, fmt.Sprintf("%q in %s", want, path), func() bool { return strings.Contains(b.text(path), want) })
}
