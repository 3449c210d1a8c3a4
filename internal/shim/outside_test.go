package shim_test

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/proc"
	"lull/internal/protocol/shimctl"
)

// keeper is another program, which freezes and thaws on request.
type keeper struct {
	socket string
	mu     sync.Mutex
	asked  map[string]int
	status int
	said   string
	srv    *http.Server
	done   sync.WaitGroup
}

func newKeeper(t *testing.T) *keeper {
	k := &keeper{socket: filepath.Join(t.TempDir(), "k"), asked: map[string]int{}, status: http.StatusNoContent}
	t.Cleanup(k.close)
	return k
}

func (k *keeper) open(t *testing.T) {
	t.Helper()
	ln, err := net.Listen("unix", k.socket)
	errtest.None(t, err)
	k.srv = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		k.mu.Lock()
		k.asked[q.Method+" "+q.URL.Path]++
		status, said := k.status, k.said
		k.mu.Unlock()
		w.WriteHeader(status)
		if said != "" {
			fmt.Fprint(w, said)
		}
	})}
	k.done.Go(func() { _ = k.srv.Serve(ln) }) // until it is closed
}

func (k *keeper) close() {
	if k.srv != nil {
		k.srv.Close()
		k.done.Wait()
	}
}

func (k *keeper) answer(status int, said string) {
	k.mu.Lock()
	k.status, k.said = status, said
	k.mu.Unlock()
}

func (k *keeper) count(path string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.asked["POST "+path]
}

func (b *bench) outside(o shimctl.Outside) {
	b.t.Helper()
	if err := b.c.Outside(waittest.Context(b.t), o); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) kept() (names []string) {
	l, err := os.ReadDir(filepath.Join(b.dir, "outside"))
	if err != nil {
		b.t.Fatal(err)
	}
	for _, e := range l {
		names = append(names, strings.TrimSuffix(e.Name(), ".json"))
	}
	return names
}

// TestOutside checks that the programs that froze something for a daemon that has
// ended are asked to thaw it until they do, also by a later shim, and that nothing
// is asked for an entry that was deleted.
func TestOutside(t *testing.T) {
	k := newKeeper(t)
	b := newBench(t, "LULL_TEST_GONE=50ms").start()
	b.outside(shimctl.Outside{ID: "a", Socket: k.socket, Path: "/a"})
	b.outside(shimctl.Outside{ID: "b", Socket: k.socket, Path: "/b"})
	b.outside(shimctl.Outside{ID: "b"})
	b.outside(shimctl.Outside{ID: "never"})
	b.stop(syscall.SIGKILL)
	b.start()
	b.c.Close() // the keeper does not answer, and must be asked again
	waittest.Until(t, "the shim says that it cannot", func() bool {
		return strings.Contains(b.text(b.log.Name()), k.socket)
	})
	k.open(t)
	waittest.Until(t, "it is thawed and forgotten", func() bool { return k.count("/a") > 0 && len(b.kept()) == 0 })
	if k.count("/b") != 0 {
		t.Error("what had been taken back was thawed")
	}

	// A keeper that fails is asked again. One that answers that there is nothing to
	// thaw is not.
	b.connect()
	k.answer(http.StatusInternalServerError, "cannot just now")
	b.outside(shimctl.Outside{ID: "c", Socket: k.socket, Path: "/c"})
	b.c.Close()
	waittest.Until(t, "it is asked twice", func() bool { return k.count("/c") > 1 })
	if got := b.kept(); len(got) != 1 {
		t.Errorf("kept %q", got)
	}
	k.answer(http.StatusInternalServerError, `{"message":"Container c is not paused"}`)
	waittest.Until(t, "it is forgotten", func() bool { return len(b.kept()) == 0 })

	// A shim that receives SIGTERM asks too.
	b.connect()
	k.answer(http.StatusNoContent, "")
	b.outside(shimctl.Outside{ID: "d", Socket: k.socket, Path: "/d"})
	b.stop(syscall.SIGTERM)
	if k.count("/d") != 1 {
		t.Error("a shim that ends leaves it frozen")
	}
}

// TestOutsideInPlace checks that what a daemon that has ended froze itself runs
// again, and that a process that has reused a PID is left alone.
func TestOutsideInPlace(t *testing.T) {
	if testing.Short() {
		t.Skip("-short")
	}
	b := newBench(t, "LULL_TEST_GONE=50ms").start()
	sleeper := func() (pid int, start uint64) {
		cmd := exec.Command("sleep", "1000")
		errtest.None(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		s, err := proc.Live().Stat(cmd.Process.Pid)
		errtest.None(t, err)
		return cmd.Process.Pid, s.Start
	}
	state := func(pid int) byte {
		s, err := proc.Live().Stat(pid)
		errtest.None(t, err)
		return s.State
	}
	mine, start := sleeper()
	other, later := sleeper()
	for _, pid := range []int{mine, other} {
		errtest.None(t, syscall.Kill(pid, syscall.SIGSTOP))
	}
	waittest.Until(t, "they are stopped", func() bool { return state(mine) == 'T' && state(other) == 'T' })
	b.outside(shimctl.Outside{ID: "tree", Tree: []shimctl.Process{{PID: mine, Start: start}, {PID: other, Start: later - 1}}})
	b.outside(shimctl.Outside{ID: "gone", Group: "/sys/fs/cgroup/missing"})
	b.c.Close()
	waittest.Until(t, "it is thawed and forgotten", func() bool { return state(mine) == 'S' && len(b.kept()) == 0 })
	if s := state(other); s != 'T' {
		t.Errorf("another process is in state %q", s)
	}

	place, err := cgroup.Find("outside-test")
	if err != nil {
		t.Logf("no control group can be made here: %v", err)
		return
	}
	defer place.Release()
	g, err := place.Create("it")
	errtest.None(t, err)
	defer g.Remove()
	pid, _ := sleeper()
	errtest.None(t, os.WriteFile(g.Dir()+"/cgroup.procs", []byte(strconv.Itoa(pid)), 0))
	b.connect()
	b.outside(shimctl.Outside{ID: "group", Group: g.Dir()})
	errtest.None(t, g.Freeze(waittest.Context(t)))
	b.c.Close()
	waittest.Until(t, "the group is thawed and forgotten", func() bool {
		held, err := g.Held()
		return err == nil && !held && len(b.kept()) == 0
	})
	errtest.None(t, g.Kill(waittest.Context(t)))
}

func TestOutsideRefused(t *testing.T) {
	b := newBench(t).start()
	for _, o := range []shimctl.Outside{{ID: "../x", Socket: "/s", Path: "/p"}, {ID: "../x"}, {ID: "a", Socket: "s", Path: "/p"}, {ID: "a", Socket: "/s"}, {ID: "a", Socket: "/s", Path: "/p", QMP: true}, {ID: "a", Socket: "s", QMP: true},
		{ID: "a", Socket: "/s", Path: "/p HTTP/1.1\r\nX: y"}, {ID: "a", Socket: "/s", Path: "/" + strings.Repeat("x", 2000)},
		{ID: "a", Group: "g"}, {ID: "a", Group: "/g", Socket: "/s", Path: "/p"}, {ID: "a", Group: "/g", Tree: []shimctl.Process{{PID: 2}}},
		{ID: "a", Tree: []shimctl.Process{{PID: 1}}}, {ID: "a", Tree: []shimctl.Process{{PID: -2}}}} {
		var said *shimctl.Error
		if err := b.c.Outside(waittest.Context(t), o); !errors.As(err, &said) || said.Code != shimctl.CodeInvalid {
			t.Errorf("%+v: %v", o, err)
		}
	}
	if got := b.kept(); len(got) != 0 {
		t.Errorf("kept %q", got)
	}
}
