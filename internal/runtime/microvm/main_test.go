package microvm

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/programtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/guest"
)

// rig builds the programs that tests of real guests need, once.
var rig = sync.OnceValues(func() (r struct{ harness, saboteur, program, kernel string }, err error) {
	if dir := os.Getenv("LULL_RIG"); dir != "" { // for a guest that runs its own guests and has no compiler
		r.harness, r.program, r.kernel = filepath.Join(dir, "lull-harness"), filepath.Join(dir, "guest"), os.Getenv("LULL_GUEST_KERNEL")
		return r, nil
	}
	dir, err := os.MkdirTemp("", "lullvm")
	if err != nil {
		return r, err
	}
	scratch = dir
	const own = "lull/internal/runtime/microvm/testdata/"
	if err := programtest.Into(dir, "lull/cmd/lull-harness", own+"saboteur", own+"guest"); err != nil {
		return r, err
	}
	r.harness, r.saboteur, r.program = filepath.Join(dir, "lull-harness"), filepath.Join(dir, "saboteur"), filepath.Join(dir, "guest")
	if r.kernel = os.Getenv("LULL_GUEST_KERNEL"); r.kernel == "" {
		return r, &absent{"no guest kernel: make test fetches one"}
	}
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		return r, &absent{"no QEMU (Debian package qemu-system-x86)"}
	}
	return r, nil
})

var scratch string

type absent struct{ what string }

func (a *absent) Error() string { return a.what }

// need skips a test if a prerequisite is missing. In CI, or if a kernel was
// specified, a missing prerequisite is a failure, because make test provides it.
func need(t testing.TB, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if _, ok := err.(*absent); ok && os.Getenv("LULL_GUEST_KERNEL") == "" && os.Getenv("CI") == "" {
		t.Skip(err)
	}
	t.Fatal(err)
}

func TestMain(m *testing.M) {
	code := m.Run()
	if scratch != "" {
		os.RemoveAll(scratch)
	}
	os.Exit(code)
}

// waitLimit bounds every wait for a guest. It is generous, because machines may be
// busy.
var waitLimit = waittest.Timeout

// until waits for a condition.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	if !waittest.Within(waitLimit, ok) {
		t.Fatalf("not within %s: %s", waitLimit, what)
	}
}

// bench is a runtime whose reports of exits and messages are recorded.
type bench struct {
	*Runtime
	t     testing.TB
	exits chan instance.Exit

	mu   sync.Mutex
	said []guest.Message
}

// Exec runs a command and returns its output.
func (b *bench) Exec(ctx context.Context, id string, c instance.Command) (instance.Outcome, error) {
	return instance.Capture(func(s instance.Streams) (int, error) { return b.Runtime.Exec(ctx, id, c, s) })
}

func newBench(t testing.TB, change func(*Config)) *bench {
	t.Helper()
	if testing.Short() {
		t.Skip("a guest boots in seconds")
	}
	parts, err := rig()
	need(t, err)
	dir, err := os.MkdirTemp("", "vm") // short, because of the length limit of socket paths
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	b := &bench{t: t, exits: make(chan instance.Exit, 8)}
	cfg := Config{Dir: dir, Harness: parts.harness, Kernel: parts.kernel,
		Machine: func(string) (Machine, error) {
			return Machine{Memory: 128 << 20, Files: map[string]string{"/bin/guest": parts.program}}, nil
		},
		OnExit: func(_ string, _ uint64, e instance.Exit) { b.exits <- e },
		OnMessage: func(_ context.Context, _ string, m guest.Message) error {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.said = append(b.said, m)
			return nil
		}}
	if change != nil {
		change(&cfg)
	}
	if b.Runtime, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		b.sweep()
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// next opens another daemon's runtime, once b is closed, and returns the guest that
// it has adopted.
func (b *bench) next(id string) *Work {
	b.t.Helper()
	r, err := New(b.cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.Runtime = r
	w, err := b.Adopt(b.t.Context(), id, instance.Identity{Run: 1})
	if err != nil {
		b.t.Fatal(err)
	}
	return w.(*Work)
}

// sweep removes what a failed test has left.
func (b *bench) sweep() {
	b.mu.Lock()
	defer b.mu.Unlock()
	ents, _ := os.ReadDir(filepath.Join(b.cfg.Dir, "vm"))
	for _, e := range ents {
		pids, _ := findQEMU(b.dir(e.Name()))
		for _, p := range pids {
			if err := p.kill(b.t.Context()); err != nil && b.t.Context().Err() == nil {
				b.t.Error(err)
			}
		}
	}
}

// in returns a bench with the same runtime that reports failures to the subtest t.
func (b *bench) in(t *testing.T) *bench {
	return &bench{Runtime: b.Runtime, t: t, exits: b.exits}
}

func (b *bench) launch(id string, run uint64, command ...string) instance.Launch {
	return instance.Launch{ID: id, Run: run, Command: command, Env: []string{"PATH=/bin", "FROM=host", "LULL_SOCKET=/nowhere"}, Dir: "/",
		LogPath: filepath.Join(b.cfg.Dir, id+".log"), LogMax: 1 << 20}
}

func (b *bench) start(id string, command ...string) *Work {
	b.t.Helper()
	w, err := b.Start(b.t.Context(), b.launch(id, 1, command...))
	if err != nil {
		b.t.Fatal(err)
	}
	return w.(*Work)
}

func (b *bench) log(id string) string {
	text, err := os.ReadFile(filepath.Join(b.cfg.Dir, id+".log"))
	if err != nil {
		b.t.Fatal(err)
	}
	return string(text)
}

// exit waits until a run has ended and returns how.
func (b *bench) exit() instance.Exit {
	b.t.Helper()
	select {
	case e := <-b.exits:
		return e
	case <-time.After(waitLimit):
		b.t.Fatal("no message said that the run ended")
		panic("unreachable")
	}
}

// clean checks that nothing of an instance is left.
func (b *bench) clean(id string) {
	b.t.Helper()
	until(b.t, "its process ends", func() bool {
		p, err := findQEMU(b.dir(id))
		if err != nil {
			b.t.Fatal(err)
		}
		return len(p) == 0
	})
	until(b.t, "its files go", func() bool { _, err := os.Stat(b.dir(id)); return os.IsNotExist(err) })
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), b.cfg.Dir) {
		b.t.Fatalf("mounts are left (%v):\n%s", err, mounts)
	}
}
