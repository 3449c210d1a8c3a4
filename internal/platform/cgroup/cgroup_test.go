package cgroup_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/platform/cgroup"
)

// place returns a place for groups of one kind, or skips the test if there is
// none here.
func place(t *testing.T, kind cgroup.Kind) cgroup.Place {
	t.Helper()
	p, err := cgroup.Find(fmt.Sprintf("test-%d", os.Getpid()), kind)
	if err != nil {
		t.Skipf("needs root or a delegated group: %v", err)
	}
	t.Cleanup(p.Release)
	return p
}

func group(t *testing.T, p cgroup.Place) *cgroup.Group {
	t.Helper()
	t.TempDir() // created first, so that it is removed after the group's processes
	g, err := p.Create("i-" + strings.ToLower(strings.NewReplacer("/", "-", "#", "-").Replace(t.Name())))
	errtest.None(t, err)
	t.Cleanup(func() {
		if err := g.Kill(waittest.Context(t)); err != nil {
			t.Error(err)
		}
		if err := g.Remove(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// script runs a shell program in a session of its own and in the group, if any.
func script(t *testing.T, g *cgroup.Group, text string, env ...string) *exec.Cmd {
	t.Helper()
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	join := ""
	if g != nil {
		for _, d := range g.Dirs() {
			join += fmt.Sprintf("echo $$ > %s/cgroup.procs; ", d)
		}
	}
	cmd := exec.Command("/bin/sh", "-c", join+text)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Env = append(os.Environ(), env...)
	errtest.None(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

// hold blocks the test for d, while the programs under test run.
func hold(d time.Duration) { <-time.After(d) }

func size(t *testing.T, file string) int64 {
	t.Helper()
	st, err := os.Stat(file)
	if os.IsNotExist(err) {
		return 0
	}
	if err != nil {
		t.Fatal(err)
	}
	return st.Size()
}

// workers is a shell program of n processes that append to $OUT forever.
func workers(n int) string {
	return fmt.Sprintf(`i=1; while [ $i -lt %d ]; do (while :; do echo x >> $OUT; sleep 0.001; done) & i=$((i+1)); done; while :; do echo x >> $OUT; done`, n)
}

// bomb is a shell program that forks without end, mostly children in chains that
// have detached from their parents.
const bomb = `f() { echo x >> $OUT; (f & ) ; sleep 0.02; }; i=0; while :; do (echo x >> $OUT; (echo y >> $OUT) & ) & i=$((i+1)); [ $((i % 16)) = 0 ] && wait; done`

func TestGroup(t *testing.T) {
	for _, kind := range []cgroup.Kind{cgroup.V2, cgroup.V1} {
		t.Run(string(kind), func(t *testing.T) {
			p := place(t, kind)
			for name, text := range map[string]string{"one": workers(1), "tree of 20": workers(20), "forking": bomb} {
				t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) { freezeAndThaw(t, group(t, p), text) })
			}
			t.Run("kill-frozen", func(t *testing.T) { killFrozen(t, group(t, p)) })
			t.Run("open-files", func(t *testing.T) { openFiles(t, group(t, p)) })
			t.Run("kill-forking", func(t *testing.T) {
				g := group(t, p)
				out := filepath.Join(t.TempDir(), "out")
				script(t, g, bomb, "OUT="+out)
				waittest.Until(t, "it forks", func() bool { return size(t, out) > 100 })
				errtest.None(t, g.Kill(waittest.Context(t)))
				if pids, err := g.PIDs(); err != nil || len(pids) != 0 {
					t.Fatalf("left after Kill: %v, %v", pids, err)
				}
			})
			t.Run("nested", func(t *testing.T) { nested(t, p) })
			t.Run("cpu", func(t *testing.T) { account(t, group(t, p)) })
			t.Run("cancelled", func(t *testing.T) {
				g := group(t, p)
				out := filepath.Join(t.TempDir(), "out")
				script(t, g, bomb, "OUT="+out)
				waittest.Until(t, "it forks", func() bool { return size(t, out) > 100 })
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				if err := g.Freeze(ctx); err != nil { // a process may have ended before the freeze
					if held, herr := g.Held(); herr != nil || held {
						t.Fatalf("after a failed freeze (%v): held %v, %v", err, held, herr)
					}
				}
				errtest.None(t, g.Thaw())
			})
		})
	}
}

func freezeAndThaw(t *testing.T, g *cgroup.Group, text string) {
	out := filepath.Join(t.TempDir(), "out")
	script(t, g, text, "OUT="+out)
	for range 10 {
		before := size(t, out)
		waittest.Until(t, "it writes", func() bool { return size(t, out) > before+20 })
		errtest.None(t, g.Freeze(waittest.Context(t)))
		if frozen, err := g.Frozen(); err != nil || !frozen {
			t.Fatalf("Frozen() = %v, %v after Freeze", frozen, err)
		}
		if held, err := g.Held(); err != nil || !held {
			t.Fatalf("Held() = %v, %v after Freeze", held, err)
		}
		stays(t, out, g.PIDs)
		for range 2 { // thawing twice is allowed
			errtest.None(t, g.Thaw())
		}
		if held, err := g.Held(); err != nil || held {
			t.Fatalf("Held() = %v, %v after Thaw", held, err)
		}
	}
}

// stays fails if the programs' output changes while they should be frozen.
func stays(t *testing.T, out string, list func() ([]int, error)) {
	t.Helper()
	written := size(t, out)
	pids, err := list()
	errtest.None(t, err)
	for range 5 {
		hold(2 * time.Millisecond)
		if now := size(t, out); now != written {
			t.Fatalf("%d bytes were written while frozen", now-written)
		}
		now, err := list()
		slices.Sort(now)
		slices.Sort(pids)
		if err != nil || !slices.Equal(now, pids) {
			t.Fatalf("processes changed while frozen: %v, then %v (%v)", pids, now, err)
		}
	}
}

// openFiles checks that a frozen group keeps the file for the thaw open, that the
// group has no open file after the thaw, and that Thaw works on a group that was
// recreated.
func openFiles(t *testing.T, g *cgroup.Group) {
	opened := func() (n int) {
		l, err := os.ReadDir("/proc/self/fd")
		errtest.None(t, err)
		for _, e := range l {
			if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.Contains(to, filepath.Base(g.Dir())) {
				n++
			}
		}
		return n
	}
	steps := []struct {
		name string
		do   func() error
		want int
	}{
		{"freeze", func() error { return g.Freeze(waittest.Context(t)) }, 1},
		{"freeze again", func() error { return g.Freeze(waittest.Context(t)) }, 1},
		{"thaw", g.Thaw, 0},
		{"thaw again", g.Thaw, 0},
		{"freeze once more", func() error { return g.Freeze(waittest.Context(t)) }, 1},
		{"kill", func() error { return g.Kill(waittest.Context(t)) }, 0},
		{"freeze what is empty", func() error { return g.Freeze(waittest.Context(t)) }, 1},
		{"make it anew", func() error {
			for _, d := range g.Dirs() {
				if err := errors.Join(os.Remove(d), os.Mkdir(d, 0o755)); err != nil {
					return err
				}
			}
			name, value := "cgroup.freeze", "1"
			if g.Kind() == cgroup.V1 {
				name, value = "freezer.state", "FROZEN"
			}
			return os.WriteFile(filepath.Join(g.Dir(), name), []byte(value), 0)
		}, 1},
		{"thaw what was made anew", g.Thaw, 0},
	}
	script(t, g, "sleep 100")
	waittest.Until(t, "the program is in its group", func() bool { pids, err := g.PIDs(); return err == nil && len(pids) > 0 })
	for _, s := range steps {
		if err := s.do(); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		if n := opened(); n != s.want {
			t.Errorf("%s: %d files are open, want %d", s.name, n, s.want)
		}
	}
	if held, err := g.Held(); err != nil || held {
		t.Errorf("it is held: %t, %v", held, err)
	}
}

func killFrozen(t *testing.T, g *cgroup.Group) {
	script(t, g, "sleep 1000 & sleep 1000 & sleep 1000")
	waittest.Until(t, "four processes", func() bool { pids, _ := g.PIDs(); return len(pids) == 4 })
	errtest.None(t, g.Freeze(waittest.Context(t)))
	errtest.None(t, g.Kill(waittest.Context(t)))
	if populated, err := g.Populated(); err != nil || populated {
		t.Fatalf("Populated() = %v, %v after Kill", populated, err)
	}
}

// nested is a program that creates groups.
func nested(t *testing.T, p cgroup.Place) {
	g := group(t, p)
	out := filepath.Join(t.TempDir(), "out")
	script(t, g, fmt.Sprintf("mkdir -p %[1]s/inner/deep; echo $$ > %[1]s/inner/deep/cgroup.procs; %s", g.Dir(), workers(3)), "OUT="+out)
	waittest.Until(t, "it writes", func() bool { return size(t, out) > 10 })
	errtest.None(t, g.Freeze(waittest.Context(t)))
	if g.Kind() == cgroup.V2 {
		stays(t, out, g.PIDs)
	}
	if pids, err := g.PIDs(); err != nil || len(pids) < 3 {
		t.Fatalf("PIDs() = %v, %v, want those of the inner groups too", pids, err)
	}
	errtest.None(t, g.Kill(waittest.Context(t)))
	errtest.None(t, g.Remove())
	if _, err := os.Stat(g.Dir()); !os.IsNotExist(err) {
		t.Fatalf("the directory is still there: %v", err)
	}
}

func account(t *testing.T, g *cgroup.Group) {
	script(t, g, "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; sleep 1000")
	var used time.Duration
	waittest.Until(t, "20 ms of CPU", func() bool {
		var err error
		if used, err = g.CPU(); err != nil {
			t.Fatal(err)
		}
		return used > 20*time.Millisecond
	})
	errtest.None(t, g.Kill(waittest.Context(t)))
	if after, err := g.CPU(); err != nil || after < used {
		t.Fatalf("CPU() = %v, %v after the processes ended, %v before", after, err, used)
	}
}

func TestOpen(t *testing.T) {
	for _, kind := range []cgroup.Kind{cgroup.V2, cgroup.V1} {
		t.Run(string(kind), func(t *testing.T) {
			p := place(t, kind)
			g := group(t, p)
			again, err := p.Open(g.Dir())
			if err != nil || again.Kind() != kind || !slices.Equal(again.Dirs(), g.Dirs()) {
				t.Fatalf("Open(%s) = %+v, %v", g.Dir(), again, err)
			}
			if _, err := p.Open(g.Dir() + "-not"); !os.IsNotExist(unwrap(err)) {
				t.Fatalf("Open of a group that is gone: %v", err)
			}
			if ids, err := p.IDs(); err != nil || !slices.Contains(ids, filepath.Base(g.Dir())) {
				t.Fatalf("IDs() = %v, %v", ids, err)
			}
			for _, id := range []string{"", ".", "..", "a/b", "cgroup.procs", ".x", "a\n"} {
				if _, err := p.Create(id); err == nil {
					t.Errorf("Create(%q) was allowed", id)
				}
			}
		})
	}
}

func unwrap(err error) error {
	for {
		u, ok := err.(interface{ Unwrap() error })
		if !ok {
			return err
		}
		if _, path := err.(*os.PathError); path {
			return err
		}
		err = u.Unwrap()
	}
}

// TestDelegated checks that an ordinary user can create groups in a directory
// that was delegated to that user.
func TestDelegated(t *testing.T) {
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	if os.Getenv("LULL_TEST_DELEGATED") != "" {
		delegatedChild(t)
		return
	}
	if os.Getuid() != 0 {
		t.Skip("needs root to delegate a group")
	}
	p := place(t, cgroup.V2)
	dir := filepath.Join(p.Dir, "delegated")
	errtest.None(t, os.Mkdir(dir, 0o755))
	t.Cleanup(func() {
		for _, d := range []string{"lull/nobody", "lull", ""} {
			if err := unix.Rmdir(filepath.Join(dir, d)); err != nil && err != unix.ENOENT {
				t.Errorf("rmdir %s: %v", d, err)
			}
		}
	})
	const nobody = 65534
	for _, f := range []string{"", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"} {
		errtest.None(t, os.Chown(filepath.Join(dir, f), nobody, nobody))
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	errtest.None(t, err)
	defer unix.Close(fd)
	cmd := exec.Command(public(t), "-test.run=^TestDelegated$", "-test.v")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "LULL_TEST_DELEGATED="+dir, "TMPDIR=/tmp")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd,
		Credential: &syscall.Credential{Uid: nobody, Gid: nobody, NoSetGroups: false}}
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("as nobody: %v\n%s", err, b)
	}
}

func delegatedChild(t *testing.T) {
	p, err := cgroup.Find("nobody")
	errtest.None(t, err)
	want := filepath.Join(os.Getenv("LULL_TEST_DELEGATED"), "lull", "nobody")
	if p.Dir != want {
		t.Fatalf("place %s, want the delegated %s", p.Dir, want)
	}
	freezeAndThaw(t, group(t, p), workers(5))
}

// public copies the test binary to where another user may run it.
func public(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "lull-test-")
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	b, err := os.ReadFile("/proc/self/exe")
	errtest.None(t, err)
	exe := filepath.Join(dir, "test")
	errtest.None(t, os.WriteFile(exe, b, 0o755))
	errtest.None(t, os.Chmod(dir, 0o755))
	return exe
}

func BenchmarkFreezeThaw(b *testing.B) {
	for _, kind := range []cgroup.Kind{cgroup.V2, cgroup.V1} {
		b.Run(string(kind), func(b *testing.B) {
			p, err := cgroup.Find(fmt.Sprintf("bench-%d", os.Getpid()), kind)
			if err != nil {
				b.Skip(err)
			}
			g, err := p.Create("one")
			if err != nil {
				b.Fatal(err)
			}
			cmd := exec.Command("/bin/sh", "-c", "echo $$ > "+g.Dir()+"/cgroup.procs; exec sleep 1000")
			if err := cmd.Start(); err != nil {
				b.Fatal(err)
			}
			ctx := context.Background()
			var thaw time.Duration
			for b.Loop() {
				if err := g.Freeze(ctx); err != nil {
					b.Fatal(err)
				}
				t := time.Now()
				if err := g.Thaw(); err != nil {
					b.Fatal(err)
				}
				thaw += time.Since(t)
			}
			b.ReportMetric(float64(thaw.Nanoseconds())/float64(b.N), "ns/thaw")
			if err := g.Kill(ctx); err != nil {
				b.Fatal(err)
			}
			_ = cmd.Wait()
			_ = g.Remove()
			_ = os.Remove(p.Dir)
		})
	}
}

// TestLookup checks that Lookup finds a group by its directory and by its path,
// and never returns the root of a hierarchy.
func TestLookup(t *testing.T) {
	for _, bad := range []string{"", "relative", "/", "/no/such/group", "/proc/self"} {
		if g, err := cgroup.Lookup(bad); err == nil {
			t.Errorf("%q: %s", bad, g.Dir())
		}
	}
	for _, kind := range []cgroup.Kind{cgroup.V2, cgroup.V1} {
		place, err := cgroup.Find("lookup-test-"+string(kind), kind)
		if err != nil {
			t.Logf("no groups of %s here: %v", kind, err)
			continue
		}
		defer place.Release()
		g, err := place.Create("it")
		errtest.None(t, err)
		defer g.Remove()
		path, err := g.Path()
		errtest.None(t, err)
		for _, name := range []string{g.Dir(), g.Dir() + "/", path} {
			if got, err := cgroup.Lookup(name); err != nil || got.Dir() != g.Dir() || got.Kind() != kind || got.MayFreeze() != nil {
				t.Errorf("%s: %+v, %v", name, got, err)
			}
		}
		root := strings.TrimSuffix(g.Dir(), path)
		if _, err := cgroup.Lookup(root); err == nil {
			t.Errorf("%s is a root", root)
		}
	}
}
