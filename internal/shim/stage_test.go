package shim_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/shimctl"
)

// TestWhatAProgramBegins checks the state in which a program starts: in its own
// session, with its user, environment and directory, no signal ignored or blocked,
// and only its own descriptors open.
func TestWhatAProgramBegins(t *testing.T) {
	b := newBench(t)
	// The shim itself starts with ignored signals, which the program must not
	// inherit.
	b.exe = ignoring(t, b.exe)
	b.start()
	for _, who := range []string{"", "65534", "65534:12345", "nobody"} {
		if who != "" && os.Getuid() != 0 {
			continue
		}
		id := "begins" + strings.ReplaceAll(who, ":", "-")
		l := b.launch(id, 1, `echo uid $(id -u) gid $(id -g) groups $(id -G); echo dir $(pwd); echo mark $LULL_INSTANCE_ID; `+
			`cut -d' ' -f1,5,6 /proc/$$/stat; grep -E '^Sig(Ign|Blk)' /proc/self/status; ls /proc/self/fd | tr '\n' ' '; echo; ulimit -n; echo ok > /dev/stdout`)
		l.User, l.Dir = who, "/usr"
		got, err := b.c.Start(waittest.Context(t), l)
		errtest.None(t, err)
		if e := b.exit(id, 1); e.Code != 0 {
			t.Errorf("%q ended as %+v: %s", who, e, b.text(b.logPath(id)))
		}
		b.waitText(b.logPath(id), "ok\n")
		text := b.text(b.logPath(id))
		uid, gid := fmt.Sprint(os.Getuid()), fmt.Sprint(os.Getgid())
		if who != "" {
			uid, gid = "65534", "65534"
		}
		if who == "65534:12345" {
			gid = "12345"
		}
		for _, want := range []string{"uid " + uid + " gid " + gid + " groups " + gid, "dir /usr", "mark " + id,
			fmt.Sprintf("%d %d %d", got.PID, got.PID, got.PID), "SigIgn:\t0000000000000000", "SigBlk:\t0000000000000000", "0 1 2 3 "} {
			if !strings.Contains(text, want) {
				t.Errorf("%q: no %q in:\n%s", who, want, text)
			}
		}
	}
}

// ignoring returns a program that starts exe with SIGHUP, SIGPIPE and SIGUSR1
// ignored, as nohup and shells do.
func ignoring(t *testing.T, exe string) string {
	path := filepath.Join(t.TempDir(), "ignoring")
	errtest.None(t, os.WriteFile(path, []byte("#!/bin/sh\ntrap '' HUP PIPE USR1\nexec "+exe+"\n"), 0o700))
	return path
}

func TestUserRefused(t *testing.T) {
	if os.Getuid() == 0 {
		t.Skip("root may become anybody")
	}
	b := newBench(t).start()
	l := b.launch("other", 1, "true")
	l.User = "0"
	_, err := b.c.Start(waittest.Context(t), l)
	if !errors.Is(err, syscall.EPERM) {
		t.Fatalf("error %v, want that only root can", err)
	}
}

func TestListenFDs(t *testing.T) {
	b := newBench(t).start()
	addrs := make([]string, 12) // more than the stage has descriptors of its own, so that the numbers overlap
	for i := range addrs {
		addrs[i] = freeAddr(t, "tcp", "127.0.0.1")
	}
	l := b.launch("held", 1, `echo $LISTEN_FDS $LISTEN_PID $$ $LISTEN_FDNAMES; for i in 3 4 5 6 7 8 9 10 11 12 13 14; do readlink /proc/$$/fd/$i; done; ls /proc/$$/fd | wc -l; exec sleep 1000`)
	l.Listen = addrs
	l.Env = append(l.Env, "LISTEN_FDS=99")
	got, err := b.c.Start(waittest.Context(t), l)
	errtest.None(t, err)
	t.Cleanup(func() { _ = syscall.Kill(got.PID, syscall.SIGKILL) })
	want := fmt.Sprintf("12 %d %d %s\n", got.PID, got.PID, strings.ReplaceAll(strings.Join(addrs, "|"), ":", "_"))
	want = strings.ReplaceAll(want, "|", ":")
	b.waitText(b.logPath("held"), want)
	waittest.Until(t, "all lines", func() bool { return strings.Count(b.text(b.logPath("held")), "\n") >= 14 })
	if n := len(regexp.MustCompile(`(?m)^socket:\[\d+\]$`).FindAllString(b.text(b.logPath("held")), -1)); n != 12 {
		t.Errorf("%d sockets, want 12:\n%s", n, b.text(b.logPath("held")))
	}
	again, fds, err := b.c.Listeners(waittest.Context(t), "held")
	if err != nil || len(fds) != 12 || strings.Join(again, " ") != strings.Join(addrs, " ") {
		t.Fatalf("Listeners() = %v, %v, %v", again, fds, err)
	}
	for i, fd := range fds {
		sa, err := unix.Getsockname(fd)
		if err != nil || fmt.Sprintf("127.0.0.1:%d", sa.(*unix.SockaddrInet4).Port) != addrs[i] {
			t.Errorf("descriptor %d is %v, %v, want %s", i, sa, err, addrs[i])
		}
	}
	shimctl.CloseAll(fds)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	defer taken.Close()
	if err := b.c.Hold(waittest.Context(t), "other", []string{addrs[0], taken.Addr().String()}); err == nil || !strings.Contains(err.Error(), addrs[0]) {
		t.Errorf("holding a taken address: %v, want %s named", err, addrs[0])
	}
	errtest.None(t, b.c.Hold(waittest.Context(t), "held", addrs[:1]))
	if _, fds, err := b.c.Listeners(waittest.Context(t), "held"); err != nil || len(fds) != 1 {
		t.Errorf("after holding fewer: %v, %v", fds, err)
	} else {
		shimctl.CloseAll(fds)
	}
}

func TestDup(t *testing.T) {
	b := newBench(t).start()
	got := b.run("has", 1, "exec sleep 1000")
	fds, err := b.c.Dup(waittest.Context(t), got.PID, []int{0, 1, 2})
	if err != nil || len(fds) != 3 {
		t.Fatalf("Dup() = %v, %v", fds, err)
	}
	shimctl.CloseAll(fds)
	many := make([]int, 600) // more than one message can carry
	fds, err = b.c.Dup(waittest.Context(t), got.PID, many)
	if err != nil || len(fds) != 600 {
		t.Fatalf("Dup() of many = %d, %v", len(fds), err)
	}
	shimctl.CloseAll(fds)
	_, err = b.c.Dup(waittest.Context(t), got.PID, []int{77})
	if e, ok := err.(*shimctl.Error); !ok || e.Code != shimctl.CodeGone {
		t.Errorf("Dup() of a closed descriptor: %v", err)
	}
}

// TestManyRuns checks the size of the shim's real binary, and its memory, threads
// and descriptors with many runs.
func TestManyRuns(t *testing.T) {
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	const runs = 1000
	b := newBench(t)
	b.exe = programtest.Build(t, "lull/cmd/lull-shim")
	st, err := os.Stat(b.exe)
	if err != nil || st.Size() > 6<<20 {
		t.Errorf("the binary has %d bytes, want at most 6 MiB (%v)", st.Size(), err)
	}
	b.exe = wrapped(t, b.exe, b.dir)
	b.start()
	rss0, threads0, _ := b.cost()
	var wg sync.WaitGroup
	ids := make(chan int)
	failed := make(chan error, runs)
	for range 4 {
		wg.Go(func() {
			for i := range ids {
				l := b.launch(fmt.Sprintf("many-%d", i), 1, "")
				l.Command = []string{"sh", "-c", "echo begun; exec sleep 1000"}
				got, err := b.c.Start(waittest.Context(t), l)
				if err != nil {
					failed <- err
					continue
				}
				t.Cleanup(func() { _ = syscall.Kill(got.PID, syscall.SIGKILL) })
			}
		})
	}
	for i := range runs {
		ids <- i
	}
	close(ids)
	wg.Wait()
	select {
	case err := <-failed:
		t.Fatal(err)
	default:
	}
	waittest.Until(t, "every log", func() bool {
		logs, _ := filepath.Glob(b.dir + "/many-*.log")
		return len(logs) == runs
	})
	rss, threads, fds := b.cost()
	each := float64(rss-rss0) / runs
	t.Logf("%d runs: %d KiB resident (%d before any), %.1f KiB each, %d threads (%d before), %d descriptors; 10,000 would need about %.0f MiB",
		runs, rss, rss0, each, threads, threads0, fds, (float64(rss0)+each*10000)/1024)
	if threads > threads0+16 {
		t.Errorf("%d threads for %d runs: there must be none for each", threads, runs)
	}
	if fds > runs+100 {
		t.Errorf("%d descriptors for %d runs, want one each", fds, runs)
	}
	listed, err := b.c.List(waittest.Context(t), "")
	if err != nil || len(listed) != runs {
		t.Errorf("List() has %d runs, %v", len(listed), err)
	}
}

// wrapped returns a program that runs the real binary exe and ignores its own
// arguments.
func wrapped(t *testing.T, exe, dir string) string {
	path := filepath.Join(t.TempDir(), "wrapped")
	errtest.None(t, os.WriteFile(path, []byte("#!/bin/sh\nexec "+exe+" --dir "+dir+"\n"), 0o700))
	return path
}

// cost returns the shim's resource usage; memory is in KiB.
func (b *bench) cost() (rss, threads, fds int) {
	b.t.Helper()
	pid := strconv.Itoa(b.cmd.Process.Pid)
	status := b.text("/proc/" + pid + "/status")
	get := func(name string) int {
		m := regexp.MustCompile(`(?m)^` + name + `:\s+(\d+)`).FindStringSubmatch(status)
		if m == nil {
			b.t.Fatalf("no %s in %s", name, status)
		}
		n, _ := strconv.Atoi(m[1])
		return n
	}
	list, err := os.ReadDir("/proc/" + pid + "/fd")
	if err != nil {
		b.t.Fatal(err)
	}
	return get("VmRSS"), get("Threads"), len(list)
}

// TestListHeld checks that exactly the IDs under which sockets are held are listed,
// including those held by an earlier shim.
func TestListHeld(t *testing.T) {
	b := newBench(t).start()
	var want []string
	for n := range shimctl.MaxListed + 2 { // more than fit in one answer
		id := fmt.Sprintf("id%04d", n)
		errtest.None(t, b.c.Hold(waittest.Context(t), id, []string{"127.0.0.1:0"}))
		want = append(want, id)
	}
	errtest.None(t, b.c.Unhold(waittest.Context(t), want[0]))
	check := func() {
		t.Helper()
		if got, err := b.c.Holds(waittest.Context(t)); err != nil || !slices.Equal(got, want[1:]) {
			t.Errorf("%d ids are listed, want %d: %v", len(got), len(want)-1, err)
		}
	}
	check()
	b.stop(syscall.SIGKILL)
	b.start()
	check()
}
