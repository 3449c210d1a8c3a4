package shim_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"
	"lull/internal/platform/proc"
	"lull/internal/protocol/shimctl"
)

func TestExitCodesAndLogs(t *testing.T) {
	b := newBench(t).start()
	for id, c := range map[string]struct {
		script string
		want   shimctl.Exit
	}{
		"clean":   {"echo out; echo err >&2", shimctl.Exit{}},
		"code":    {"echo out; echo err >&2; exit 42", shimctl.Exit{Code: 42}},
		"signal":  {"echo out; echo err >&2; kill -TERM $$", shimctl.Exit{Code: 143, Signal: 15}},
		"instant": {"echo out; exec echo err", shimctl.Exit{}},
	} {
		errtest.Get(b.c.Start(waittest.Context(t), b.launch(id, 7, c.script)))(t)
		got := b.exit(id, 7)
		if time.Since(got.At) > time.Minute || got.At.IsZero() {
			t.Errorf("%s: ended at %v", id, got.At)
		}
		got.At = time.Time{}
		if got != c.want {
			t.Errorf("%s: ended as %+v, want %+v", id, got, c.want)
		}
		b.waitText(b.logPath(id), "out\nerr\n")
		errtest.None(t, b.c.AckExit(waittest.Context(t), id, 7))
	}
	runs, err := b.c.List(waittest.Context(t), "")
	if err != nil || len(runs) != 0 {
		t.Fatalf("after every acknowledgement List() = %+v, %v", runs, err)
	}
	for _, d := range []string{"runs", "exits"} {
		if left, _ := os.ReadDir(filepath.Join(b.dir, d)); len(left) != 0 {
			t.Errorf("left in %s: %v", d, left)
		}
	}
	waittest.Until(t, "no pipe is left", func() bool {
		left, _ := os.ReadDir(filepath.Join(b.dir, "pipes"))
		return len(left) == 0
	})
}

func TestDaemonComesBack(t *testing.T) {
	b := newBench(t).start()
	stays := b.run("stays", 1, "trap 'echo asked; exit 3' TERM; echo ready; while :; do sleep 0.01; done")
	b.run("ends", 1, "until [ -e $OUT ]; do sleep 0.01; done; exit 5")
	b.waitText(b.logPath("stays"), "ready")
	pid := b.c.Welcome.PID
	b.c.Close()
	errtest.None(t, os.WriteFile(b.dir+"/out", nil, 0o600))
	waittest.Until(t, "the exit is on disk", func() bool { _, err := os.Stat(b.dir + "/exits/ends.1.json"); return err == nil })
	b.connect()
	if b.c.Welcome.PID != pid {
		t.Fatalf("another shim: process %d, was %d", b.c.Welcome.PID, pid)
	}
	if got := b.exit("ends", 1); got.Code != 5 || got.Lost {
		t.Fatalf("ended while nothing listened: %+v, want code 5", got)
	}
	runs, err := b.c.List(waittest.Context(t), "stays")
	errtest.None(t, err)
	i := slices.IndexFunc(runs, func(r shimctl.Run) bool { return r.ID == "stays" })
	if i < 0 || runs[i].PID != stays.PID || runs[i].Start != stays.Start || runs[i].Exit != nil || runs[i].Adopted {
		t.Fatalf("List() = %+v, want stays as %+v", runs, stays)
	}
	errtest.None(t, syscall.Kill(stays.PID, syscall.SIGTERM))
	if got := b.exit("stays", 1); got.Code != 3 {
		t.Fatalf("ended as %+v, want code 3", got)
	}
	b.waitText(b.logPath("stays"), "ready\nasked\n")
}

func TestStartRefused(t *testing.T) {
	b := newBench(t).start()
	b.run("lives", 1, "exec sleep 1000")
	for name, c := range map[string]struct {
		change func(*shimctl.Start)
		code   shimctl.Code
		step   string
		errno  syscall.Errno
		says   string
	}{
		"busy":      {func(s *shimctl.Start) { s.ID, s.Run = "lives", 2 }, shimctl.CodeBusy, "", 0, "run 1 is still running"},
		"bad id":    {func(s *shimctl.Start) { s.ID = "../x" }, shimctl.CodeInvalid, "", 0, "../x"},
		"no run":    {func(s *shimctl.Start) { s.Run = 0 }, shimctl.CodeInvalid, "", 0, "run is 0"},
		"relative":  {func(s *shimctl.Start) { s.Dir = "x" }, shimctl.CodeInvalid, "", 0, "not absolute"},
		"no dir":    {func(s *shimctl.Start) { s.Dir = "/no/such" }, shimctl.CodeStage, "workdir", syscall.ENOENT, "/no/such"},
		"missing":   {func(s *shimctl.Start) { s.Command = []string{"no-such-program"} }, shimctl.CodeStage, "command", syscall.ENOENT, "no-such-program"},
		"no exec":   {func(s *shimctl.Start) { s.Command = []string{"/etc/passwd"} }, shimctl.CodeStage, "exec", syscall.EACCES, "/etc/passwd"},
		"no user":   {func(s *shimctl.Start) { s.User = "no-such-user" }, shimctl.CodeStage, "user", 0, "no-such-user"},
		"no cgroup": {func(s *shimctl.Start) { s.Cgroups = []string{"/no/such"} }, shimctl.CodeStage, "cgroup", syscall.ENOENT, "/no/such"},
		"bad hold":  {func(s *shimctl.Start) { s.Listen = []string{"1.2.3.4.5:6"} }, shimctl.CodeInvalid, "", 0, "1.2.3.4.5"},
	} {
		s := b.launch("refused", 1, "exit 0")
		c.change(&s)
		_, err := b.c.Start(waittest.Context(t), s)
		e, ok := err.(*shimctl.Error)
		if !ok || e.Code != c.code || e.Step != c.step || syscall.Errno(e.Errno) != c.errno || !strings.Contains(e.Message, c.says) {
			t.Errorf("%s: %#v (%v), want code %s, step %q, errno %v, with %q", name, err, err, c.code, c.step, c.errno, c.says)
		}
	}
	runs, err := b.c.List(waittest.Context(t), "")
	if err != nil || len(runs) != 1 {
		t.Fatalf("List() = %+v, %v, want only the one that lives", runs, err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.ends["refused"]) != 0 {
		t.Fatalf("refused starts were told as ends: %+v", b.ends["refused"])
	}
}

// TestRefusedAgain checks that a run that is tried again right after a refusal gets
// a new pipe, which a restarted shim finds too.
func TestRefusedAgain(t *testing.T) {
	b := newBench(t).start()
	for n := range scaletest.N(t, 25) {
		s := b.launch("again", uint64(n+1), "exec sleep 1000")
		bad := s
		bad.Command = []string{"/etc/passwd"}
		for range 3 {
			if _, err := b.c.Start(waittest.Context(t), bad); err == nil {
				t.Fatal("a program that is none was started")
			}
		}
		started, err := b.c.Start(waittest.Context(t), s)
		errtest.None(t, err)
		if _, err := os.Stat(filepath.Join(b.dir, "pipes", "again."+strconv.Itoa(n+1))); err != nil {
			t.Fatalf("after %d: %v", n, err)
		}
		errtest.None(t, syscall.Kill(started.PID, syscall.SIGKILL))
		b.exit("again", uint64(n+1))
	}
}

// TestStartAfterTheEnd checks that a program that has ended does not prevent the
// next run, whether or not its exit has been collected, and whether it was started
// by this shim or an earlier one.
func TestStartAfterTheEnd(t *testing.T) {
	b := newBench(t).start()
	var last shimctl.Started
	end := func() {
		errtest.None(t, syscall.Kill(last.PID, syscall.SIGKILL))
		for { // without a pause, in which the exit would be collected
			st, err := proc.Live().Stat(last.PID)
			if errors.Is(err, proc.ErrGone) || err == nil && st.Ended() {
				return
			}
		}
	}
	for run := uint64(1); run <= 60; run++ {
		if run%20 == 0 {
			b.stop(syscall.SIGKILL)
			b.start()
		}
		if run > 1 {
			end()
		}
		var err error
		if last, err = b.c.Start(waittest.Context(t), b.launch("again", run, "exec sleep 1000")); err != nil {
			t.Fatalf("run %d: %v", run, err)
		}
	}
	end()
}
