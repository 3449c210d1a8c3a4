package process_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/runtime/process"
)

// TestNothingEscapes checks that a freeze includes every process of a tree, also
// one that has left the process group and one that is being forked at that moment.
func TestNothingEscapes(t *testing.T) {
	for name, script := range map[string]string{
		"twenty":  `i=1; while [ $i -lt 20 ]; do (while :; do echo x >> $OUT; sleep 0.001; done) & i=$((i+1)); done; while :; do echo x >> $OUT; sleep 0.001; done`,
		"strays":  `i=0; while [ $i -lt 5 ]; do (setsid sh -c 'while :; do echo x >> $OUT; sleep 0.001; done' &); i=$((i+1)); done; while :; do echo x >> $OUT; sleep 0.001; done`,
		"forking": `while :; do (echo x >> $OUT; (echo y >> $OUT) & ) & i=$((i+1)); [ $((i % 8)) = 0 ] && wait; done`,
		"setsid":  `while :; do setsid sh -c 'echo x >> $OUT; (echo y >> $OUT &)' & i=$((i+1)); [ $((i % 4)) = 0 ] && wait; done`,
	} {
		t.Run(name, func(t *testing.T) {
			freezers(t, func(t *testing.T, cfg process.Config) {
				h := newHost(t, cfg)
				w := h.start(h.launch("tree", 1, "sh", "-c", script))
				for range 5 {
					was := size(h.out("tree"))
					waittest.Until(t, "it writes", func() bool { return size(h.out("tree")) > was+20 })
					errtest.None(t, w.Freeze(waittest.Context(t)))
					was = size(h.out("tree"))
					<-time.After(10 * time.Millisecond)
					if now := size(h.out("tree")); now != was {
						t.Fatalf("%d bytes were written while frozen", now-was)
					}
					errtest.None(t, w.Thaw())
				}
				errtest.None(t, w.Freeze(waittest.Context(t)))
				if err := w.Kill(waittest.Context(t)); err != nil { // whether it is frozen or not
					t.Fatal(err)
				}
				was := size(h.out("tree"))
				<-time.After(10 * time.Millisecond)
				if now := size(h.out("tree")); now != was {
					t.Fatal("something of it was left by Kill")
				}
			})
		})
	}
}

// TestUnwatchable checks that a program whose sockets may not be inspected can be
// neither sampled as quiet nor guarded.
func TestUnwatchable(t *testing.T) {
	if os.Getuid() == 0 {
		t.Skip("root may look into everything; runs as nobody")
	}
	h := newHost(t, process.Config{})
	addr, other := port(t, "127.0.0.1"), port(t, "127.0.0.1")
	w := h.start(h.launch("hidden", 1, h.cfg.Shim, "program", "hidden", addr))
	waittest.Until(t, "it answers", func() bool { return ask(addr) == nil })
	if s := w.Sample(ends(addr)); s.ConnErr == nil {
		t.Errorf("Sample() = %+v, want that connections are not known", s)
	}
	errtest.None(t, w.Freeze(waittest.Context(t)))
	if g, err := w.Guard(ends(addr), false, func(string) {}); err == nil {
		g.Close()
		t.Error("it can be guarded")
	}
	errtest.None(t, w.Thaw())
	errtest.None(t, ask(addr))
	// Another program can still be guarded.
	guardOne(t, h.serve("seen", 1, "echo", other), other)
}

func TestReclaim(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		addr := port(t, "127.0.0.1")
		w := h.serve("big", 1, "mapped", addr)
		if _, err := w.Reclaim(waittest.Context(t)); err == nil {
			t.Error("memory of a running program was pushed out")
		}
		g, _ := sleep(t, w, ends(addr), false)
		before, err := w.Memory()
		if err != nil || before < 1<<20 {
			t.Fatalf("Memory() = %d, %v", before, err)
		}
		freed, err := w.Reclaim(waittest.Context(t))
		if h.rt.Capabilities().Reclaim != (err == nil) {
			t.Errorf("Reclaim() = %v, but the capability is %v", err, h.rt.Capabilities().Reclaim)
		}
		after, _ := w.Memory()
		t.Logf("%d KiB freed of %d, %d left (%v)", freed>>10, before>>10, after>>10, err)
		if err == nil && freed < mapped/2 {
			t.Errorf("%d of the %d bytes that have a file behind them were freed", freed, mapped)
		}
		wake(t, w, g)
		errtest.None(t, ask(addr))
	})
}

func TestExecBeside(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		l := h.launch("main", 1, "sleep", "1000")
		l.Env = append(l.Env, "COLOUR=red")
		l.Dir = "/usr"
		if os.Getuid() == 0 {
			l.User = "65534"
		}
		w := h.start(l)
		got, err := h.exec(waittest.Context(t), "main", instance.Command{Command: []string{"sh", "-c", "echo $COLOUR $(pwd) $(id -u); cat /proc/self/cgroup; echo bad >&2; exit 7"}})
		if err != nil {
			t.Fatal(err)
		}
		uid := fmt.Sprint(os.Getuid())
		if l.User != "" {
			uid = l.User
		}
		if got.ExitCode != 7 || !strings.HasPrefix(got.Stdout, "red /usr "+uid+"\n") || got.Stderr != "bad\n" {
			t.Errorf("Exec() = %+v", got)
		}
		if c := w.Identity().Cgroup; c != "" && !strings.Contains(got.Stdout, filepath.Join(filepath.Base(filepath.Dir(c)), filepath.Base(c))) {
			t.Errorf("it ran in %s, want %s", got.Stdout, c)
		}
		id, err := h.rt.Identify(w.Identity().PID)
		if err != nil || id != "main" {
			t.Errorf("Identify() = %q, %v", id, err)
		}
		// Exec returns when the command ends, even if a background process keeps
		// running.
		got, err = h.exec(waittest.Context(t), "main", instance.Command{Command: []string{"sh", "-c", "sleep 1000 & echo done"}})
		if err != nil || got.Stdout != "done\n" {
			t.Errorf("Exec() with a background job = %+v, %v", got, err)
		}
		// A command that ignores SIGTERM is killed after its caller's context has
		// ended.
		ctx, cancel := context.WithCancel(t.Context())
		dir, err := os.MkdirTemp("", "exec") // not t.TempDir, because another user writes into it
		errtest.None(t, err)
		defer os.RemoveAll(dir)
		errtest.None(t, os.Chmod(dir, 0o777))
		file := filepath.Join(dir, "pid")
		gone := make(chan error, 1)
		go func() {
			_, err := h.exec(ctx, "main", instance.Command{Command: []string{"sh", "-c", "trap '' TERM; echo $$ >" + file + "; while :; do sleep 0.1; done"}})
			gone <- err
		}()
		pid := 0
		waittest.Until(t, "the command runs", func() bool {
			b, err := os.ReadFile(file)
			if err == nil {
				pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
			}
			return err == nil
		})
		cancel()
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Errorf("Exec() that was left = %v", err)
		}
		waittest.Until(t, "the command is ended", func() bool { return syscall.Kill(pid, 0) != nil })
	})
}

// TestStartGivenUp checks that a start whose context has ended leaves no process.
func TestStartGivenUp(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if _, err := h.rt.Start(ctx, h.launch("unwanted", 1, "sleep", "1000")); !errors.Is(err, context.Canceled) {
			t.Fatalf("error %v, want that it was cancelled", err)
		}
		h.exit("unwanted", 1)
		h.start(h.launch("unwanted", 2, "sleep", "1000"))
		h.mu.Lock()
		e := h.exits["unwanted/2"]
		h.mu.Unlock()
		if len(e) != 0 {
			t.Fatalf("the second run ended: %+v", e)
		}
		if !slices.Contains(h.ids, "unwanted") {
			t.Fatal("not started")
		}
	})
}
