package proc

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// childEnv is the environment variable that makes the test binary act as a child
// process instead of running tests.
const childEnv = "LULL_PROC_TEST_PART"

func TestMain(m *testing.M) {
	switch os.Getenv(childEnv) {
	case "":
		os.Exit(m.Run())
	case "parent": // starts a child that starts a grandchild, and prints the pids of both
		child := part("child")
		child.Stdout = os.Stdout
		if err := child.Start(); err != nil {
			panic(err)
		}
		fmt.Println(child.Process.Pid)
	case "child":
		grandchild := part("sleep")
		if err := grandchild.Start(); err != nil {
			panic(err)
		}
		fmt.Println(grandchild.Process.Pid)
	case "sleep":
		fmt.Println(os.Getpid())
	case "burn":
		for i := uint64(0); ; i++ {
			if i%(1<<20) == 0 && os.Getppid() == 1 {
				return
			}
		}
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test closes the other end
}

func part(name string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+name)
	cmd.Stdin = os.Stdin
	return cmd
}

// start starts a child process that is killed when the test ends.
func start(t *testing.T, name string, env ...string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	cmd := part(name)
	cmd.Env = append(cmd.Env, env...)
	cmd.Stdin = nil
	in, err := cmd.StdinPipe()
	errtest.None(t, err)
	out, err := cmd.StdoutPipe()
	errtest.None(t, err)
	errtest.None(t, cmd.Start())
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, bufio.NewScanner(out)
}

func nextPID(t *testing.T, lines *bufio.Scanner) int {
	t.Helper()
	if !lines.Scan() {
		t.Fatalf("the child said nothing: %v", lines.Err())
	}
	pid, err := strconv.Atoi(lines.Text())
	errtest.None(t, err)
	return pid
}

func TestStatOfThisProcess(t *testing.T) {
	st, err := Live().Stat(os.Getpid())
	errtest.None(t, err)
	if st.PID != os.Getpid() || st.PPID != os.Getppid() || st.PGRP != unix.Getpgrp() || st.Threads < 1 || st.Start == 0 || st.RSS <= 0 {
		t.Errorf("Stat = %+v", st)
	}
}

func TestParseStat(t *testing.T) {
	const numbers = " 7 8 9 0 -1 4194560 1 2 3 4 50 60 70 80 20 0 5 0 12345 1000000 42 18446744073709551615 1 1 0"
	want := Stat{PID: 12, State: 'S', PPID: 7, PGRP: 8, Session: 9, UTime: 50, STime: 60, CUTime: 70, CSTime: 80, Threads: 5, Start: 12345, RSS: 42}
	for _, name := range []string{"sh", "a b", "a) S 1 1 (b", "))((", "x\ny", ""} {
		got, err := parseStat([]byte("12 (" + name + ") S" + numbers + "\n"))
		if err != nil {
			t.Errorf("name %q: %v", name, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("name %q: %s", name, diff)
		}
	}
	for _, bad := range []string{"", "12", "12 (sh", "12 (sh)", "12 (sh) S", "12 (sh) S 1 2", "x (sh) S" + numbers, "12 (sh) SS" + numbers,
		"12 (sh) S x" + numbers, "12 (sh) S" + strings.Replace(numbers, " 50 ", " fifty ", 1)} {
		if got, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("parseStat(%q) = %+v, want an error", bad, got)
		}
	}
}

func TestStatOfNobody(t *testing.T) {
	_, err := Live().Stat(1 << 30)
	if !errors.Is(err, ErrGone) || !strings.HasPrefix(err.Error(), "cannot read /proc/1073741824/stat") {
		t.Errorf("err = %v, want ErrGone with the path", err)
	}
}

func TestUnreadableIsNotGone(t *testing.T) {
	root := t.TempDir()
	errtest.None(t, os.MkdirAll(filepath.Join(root, "5/stat"), 0o755))
	_, err := At(root).Stat(5)
	if err == nil || errors.Is(err, ErrGone) {
		t.Errorf("err = %v, want one that is not ErrGone", err)
	}
}

func TestTasksOfAStoppedProcess(t *testing.T) {
	_, lines := start(t, "sleep")
	pid := nextPID(t, lines)
	errtest.None(t, syscall.Kill(pid, syscall.SIGSTOP))
	waittest.Until(t, "the stop of every task", func() bool {
		tasks, err := Live().Tasks(pid)
		errtest.None(t, err)
		for _, task := range tasks {
			if !task.Still() {
				return false
			}
		}
		return len(tasks) > 1 // a Go program soon has several threads
	})
	errtest.None(t, syscall.Kill(pid, syscall.SIGCONT))
	waittest.Until(t, "a task that runs again", func() bool {
		tasks, err := Live().Tasks(pid)
		return err == nil && !tasks[0].Still()
	})
	if _, err := Live().Tasks(1 << 30); !errors.Is(err, ErrGone) {
		t.Errorf("err = %v, want ErrGone", err)
	}
}

func TestBootID(t *testing.T) {
	id, err := Live().BootID()
	if err != nil || len(id) != 36 {
		t.Errorf("BootID = %q, %v", id, err)
	}
}

func TestTreeFindsGrandchildren(t *testing.T) {
	cmd, lines := start(t, "parent")
	a, b := nextPID(t, lines), nextPID(t, lines)
	got, err := Live().Tree(cmd.Process.Pid, "", nil)
	errtest.None(t, err)
	want := map[int]bool{cmd.Process.Pid: true, a: true, b: true}
	if len(got) != len(want) {
		t.Fatalf("Tree = %v, want %v", got, want)
	}
	for _, pid := range got {
		if !want[pid] {
			t.Errorf("Tree has the stranger %d", pid)
		}
	}
}

func TestTreeFindsOrphansByTheirMark(t *testing.T) {
	errtest.None(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	const mark = "LULL_TEST_MARK=one two"
	marked, lines := start(t, "parent", mark)
	child, grandchild := nextPID(t, lines), nextPID(t, lines)
	if st, err := Live().Stat(child); err == nil && st.PPID == grandchild { // they print side by side
		child, grandchild = grandchild, child
	}
	other, _ := start(t, "sleep", mark+" three") // contains the mark only as a prefix
	errtest.None(t, marked.Process.Kill())
	waittest.Until(t, "the orphan", func() bool {
		st, err := Live().Stat(child)
		return err == nil && st.PPID == os.Getpid()
	})
	got, err := Live().Tree(1<<30, mark, []int{os.Getpid()})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int{child, grandchild}, got); diff != "" {
		t.Errorf("Tree (child %d, grandchild %d, stranger %d): %s", child, grandchild, other.Process.Pid, diff)
	}
	for _, pid := range []int{child, grandchild} {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		waittest.Until(t, "the end of the orphan", func() bool {
			_, err := syscall.Wait4(pid, nil, 0, nil)
			return err == nil || err == syscall.ECHILD
		})
	}
}

func fixture(t *testing.T, files map[string]string) *FS {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		errtest.None(t, os.MkdirAll(filepath.Dir(path), 0o755))
		errtest.None(t, os.WriteFile(path, []byte(content), 0o644))
	}
	return At(root)
}

func statLine(pid, ppid int) string {
	return fmt.Sprintf("%d (x) S %d 1 1 0 -1 0 0 0 0 0 1 2 3 4 20 0 1 0 99 0 0 0\n", pid, ppid)
}

func TestTreeWithoutChildrenFiles(t *testing.T) {
	fs := fixture(t, map[string]string{
		"1/stat":     statLine(1, 0),
		"10/stat":    statLine(10, 1),
		"11/stat":    statLine(11, 10),
		"12/stat":    statLine(12, 11),
		"20/stat":    statLine(20, 1),
		"20/environ": "A=1\x00M=x\x00",
		"21/stat":    statLine(21, 20),
		"30/stat":    statLine(30, 1),
		"30/environ": "A=M=x\x00M=xy\x00",
		"meminfo":    "",
	})
	for _, tc := range []struct {
		name  string
		root  int
		mark  string
		extra []int
		want  []int
	}{
		{"descendants only", 10, "", nil, []int{10, 11, 12}},
		{"and the marked orphan with its child", 10, "M=x", []int{1}, []int{10, 11, 12, 20, 21}},
		{"a root that is gone", 99, "M=x", []int{1}, []int{20, 21}},
		{"an empty mark matches no process", 99, "", []int{1}, []int{}},
		{"nothing at all", 99, "M=x", []int{98}, []int{}},
	} {
		got, err := fs.Tree(tc.root, tc.mark, tc.extra)
		if err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s: %s", tc.name, diff)
		}
	}
	cpu, err := fs.TreeCPU([]int{10, 11, 77})
	if want := 20 * fs.Tick(); err != nil || cpu != want {
		t.Errorf("TreeCPU = %v, %v, want %v", cpu, err, want)
	}
}

func TestTreeReportsWhatItMayNotSee(t *testing.T) {
	fs := fixture(t, map[string]string{
		"1/stat":              statLine(1, 0),
		"1/task/1/children":   "10 20 30 ",
		"10/stat":             statLine(10, 1),
		"10/task/10/children": "",
		"20/stat":             statLine(20, 1),
		"20/status":           fmt.Sprintf("Name:\tx\nUid:\t%d\t0\t0\t0\n", os.Getuid()),
		"20/environ/x":        "a directory cannot be read as a file",
		"30/stat":             statLine(30, 1),
		"30/status":           fmt.Sprintf("Name:\tx\nUid:\t%d\t0\t0\t0\n", os.Getuid()+1),
		"30/environ/x":        "another user's, so it cannot be one of ours",
	})
	got, err := fs.Tree(10, "M=x", []int{1})
	if err == nil || errors.Is(err, ErrGone) {
		t.Errorf("err = %v, want that 20 cannot be read", err)
	}
	if err != nil && strings.Contains(err.Error(), "/30/") {
		t.Errorf("err = %v, but 30 is another user's", err)
	}
	if diff := cmp.Diff([]int{10}, got); diff != "" {
		t.Error(diff)
	}
}

func TestTreeCPUCountsABusyChild(t *testing.T) {
	cmd, _ := start(t, "burn")
	pids, err := Live().Tree(os.Getpid(), "", nil)
	if err != nil && !errors.Is(err, ErrUnsettled) {
		t.Fatal(err)
	}
	if !strings.Contains(fmt.Sprint(pids), strconv.Itoa(cmd.Process.Pid)) {
		t.Fatalf("Tree = %v lacks the child %d", pids, cmd.Process.Pid)
	}
	waittest.Until(t, "30 ms of processor time", func() bool {
		cpu, err := Live().TreeCPU([]int{cmd.Process.Pid})
		if err != nil {
			t.Fatal(err)
		}
		return cpu >= 30*time.Millisecond
	})
}

func TestSockets(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	defer l.Close()
	raw, err := l.(*net.TCPListener).SyscallConn()
	errtest.None(t, err)
	var st unix.Stat_t
	var fd int
	errtest.None(t, raw.Control(func(n uintptr) { fd, err = int(n), unix.Fstat(int(n), &st) }))
	got, err := Live().Sockets(os.Getpid())
	errtest.None(t, err)
	for _, s := range got {
		if s.FD == fd && s.Inode == st.Ino {
			return
		}
	}
	t.Errorf("Sockets = %v lacks fd %d inode %d", got, fd, st.Ino)
}

func TestSocketsOfAnUncollectedProcess(t *testing.T) {
	cmd, _ := start(t, "sleep")
	errtest.None(t, cmd.Process.Kill())
	waittest.Until(t, "the zombie", func() bool {
		st, err := Live().Stat(cmd.Process.Pid)
		return err == nil && st.Ended() && st.Threads <= 1 // the kernel ends its threads one by one
	})
	if got, err := Live().Sockets(cmd.Process.Pid); err != nil || len(got) != 0 {
		t.Errorf("Sockets = %v, %v, want none", got, err)
	}
	if _, err := Live().Sockets(1 << 30); !errors.Is(err, ErrGone) {
		t.Errorf("err = %v, want ErrGone", err)
	}
}

func TestFileReadsAgain(t *testing.T) {
	name := filepath.Join(t.TempDir(), "x")
	errtest.None(t, os.WriteFile(name, []byte(strings.Repeat("a", 10000)), 0o600))
	f, err := At(filepath.Dir(name)).File("x")
	errtest.None(t, err)
	defer f.Close()
	for _, want := range []string{strings.Repeat("a", 10000), "short"} {
		errtest.None(t, os.WriteFile(name, []byte(want), 0o600))
		if got, err := f.Read(); err != nil || string(got) != want {
			t.Errorf("Read = %d bytes, %v, want %d", len(got), err, len(want))
		}
	}
}

func TestStatDoesNotAllocate(t *testing.T) {
	fs, pid := Live(), os.Getpid()
	if n := testing.AllocsPerRun(100, func() {
		errtest.Get(fs.Stat(pid))(t)
	}); n >= 1 {
		t.Errorf("Stat allocates %v times", n)
	}
}

func BenchmarkStat(b *testing.B) {
	fs, pid := Live(), os.Getpid()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := fs.Stat(pid); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkTree(b *testing.B) {
	fs, pid := Live(), os.Getpid()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := fs.Tree(pid, "", nil); err != nil {
			b.Fatal(err)
		}
	}
}
