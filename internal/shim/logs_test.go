package shim_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/shimctl"
)

func TestLogRotates(t *testing.T) {
	b := newBench(t).start()
	l := b.launch("long", 1, "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done")
	l.LogMax = 8 << 10
	errtest.Get(b.c.Start(waittest.Context(t), l))(t)
	b.exit("long", 1)
	b.waitText(b.logPath("long"), "line 2999\n")
	now, before := b.text(b.logPath("long")), b.text(b.logPath("long")+".1")
	if len(now) > 8<<10 || len(before) != 8<<10 {
		t.Errorf("%d bytes and %d before, want at most 8 KiB and 8 KiB", len(now), len(before))
	}
	var all strings.Builder
	for i := range 3000 {
		fmt.Fprintf(&all, "line %d\n", i)
	}
	if !strings.HasSuffix(all.String(), before+now) {
		t.Error("the two files are not the end of what was written")
	}
	if left, _ := filepath.Glob(b.logPath("long") + "*"); len(left) != 4 {
		t.Errorf("files %v, want two logs and their indexes", left)
	}
}

// TestLogCannotBeWritten checks that, if a log cannot be written, only bytes of it
// are lost, and that their number is noted.
func TestLogCannotBeWritten(t *testing.T) {
	const before = 50_000 * 100 // more than the pipe and the shim's queue hold, so the shim must have tried to write some of it
	b := newBench(t).start()
	l := b.launch("full", 1, "yes 012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789012345678 | head -c 5000000; echo done > $OUT; until [ -e $OUT.go ]; do sleep 0.01; done; echo after; exit 4")
	dir := filepath.Join(b.dir, "later")
	l.LogPath, l.LogMax = filepath.Join(dir, "log"), 2*before // the log's directory does not exist yet
	errtest.Get(b.c.Start(waittest.Context(t), l))(t)
	b.waitText(b.dir+"/out", "done")
	errtest.None(t, os.Mkdir(dir, 0o700))
	errtest.None(t, os.WriteFile(b.dir+"/out.go", nil, 0o600))
	if e := b.exit("full", 1); e.Code != 4 {
		t.Errorf("ended as %+v, want code 4", e)
	}
	b.waitText(l.LogPath, "after\n")
	// The log has the output that the shim had not yet tried to write when the
	// directory was created.
	text := b.text(l.LogPath)
	if !strings.HasPrefix(text, "\n[lull] ") {
		t.Errorf("the log begins with %q, want how much is missing", text[:min(len(text), 200)])
	}
	missing := 0
	note := regexp.MustCompile(`\n\[lull\] (\d+) bytes of output are missing here: .*\n`)
	for _, m := range note.FindAllStringSubmatch(text, -1) {
		n, err := strconv.Atoi(m[1])
		if err != nil || n == 0 {
			t.Errorf("%q: %v", m[0], err)
		}
		missing += n
	}
	rest := note.ReplaceAllString(text, "")
	if got, want := missing+len(rest), before+len("after\n"); got != want {
		t.Errorf("%d bytes are missing and %d there, want %d in all", missing, len(rest), want)
	}
}

// TestLogOverTheDeathOfTheShim checks that a program continues to write after the
// shim has died, as far as the pipe has room, and that the next shim writes that
// output to the log.
func TestLogOverTheDeathOfTheShim(t *testing.T) {
	b := newBench(t).start()
	got := b.run("talks", 1, "echo one; until [ -e $OUT ]; do sleep 0.01; done; echo two; echo said > $OUT.said; exec sleep 1000")
	b.waitText(b.logPath("talks"), "one\n")
	b.stop(syscall.SIGKILL)
	errtest.None(t, os.WriteFile(b.dir+"/out", nil, 0o600))
	b.waitText(b.dir+"/out.said", "said")
	b.start()
	b.waitText(b.logPath("talks"), "one\ntwo\n")
	runs, err := b.c.List(waittest.Context(t), "talks")
	if err != nil || len(runs) != 1 || !runs[0].Adopted || runs[0].PID != got.PID {
		t.Fatalf("List() = %+v, %v, want it adopted as process %d", runs, err, got.PID)
	}
	errtest.None(t, syscall.Kill(got.PID, syscall.SIGKILL))
	if e := b.exit("talks", 1); !e.Lost {
		t.Errorf("ended as %+v, want lost", e)
	}
}

func TestSecondShimRefuses(t *testing.T) {
	b := newBench(t).start()
	second := newBench(t)
	second.dir = b.dir
	cmd := second.command()
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), b.dir) {
		t.Fatalf("a second shim on the same directory: %v, %s", err, out)
	}
	b.run("still", 1, "exec sleep 1000") // the first run is not affected
	errtest.Get(b.c.List(waittest.Context(t), ""))(t)
}

func TestDamagedState(t *testing.T) {
	b := newBench(t).start()
	b.run("good", 1, "exec sleep 1000")
	b.run("bad", 1, "exec sleep 1000")
	b.stop(syscall.SIGKILL)
	errtest.None(t, os.WriteFile(b.dir+"/runs/bad.json", []byte(`{"id":"bad"`), 0o600))
	b.start()
	runs, err := b.c.List(waittest.Context(t), "")
	if err != nil || len(runs) != 1 || runs[0].ID != "good" {
		t.Fatalf("List() = %+v, %v, want the good one", runs, err)
	}
	if said := b.text(b.log.Name()); !strings.Contains(said, "runs/bad.json") {
		t.Errorf("the damaged file is not named: %s", said)
	}
	if _, err := os.Stat(b.dir + "/runs/bad.json"); err != nil {
		t.Errorf("the damaged file was dropped: %v", err)
	}
}

func TestShimEnds(t *testing.T) {
	// The shim exits by itself if it has nothing to keep and no daemon.
	b := newBench(t, "LULL_TEST_GONE=50ms", "LULL_TEST_LINGER=100ms")
	b.cmd = b.command()
	b.cmd.Stderr = b.log
	errtest.None(t, b.cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- b.cmd.Wait() }()
	if err := waittest.Receive(t, "a shim with nothing to keep ends", ended); err != nil {
		t.Errorf("ended with %v: %s", err, b.text(b.log.Name()))
	}
	// With a program to keep it does not exit. On SIGTERM it thaws the program and
	// leaves it running.
	b = newBench(t, "LULL_TEST_GONE=50ms").start()
	// The shell must have no child: while it waits for one in vfork, it cannot be
	// stopped.
	got := b.run("kept", 1, "while :; do echo x >> $OUT; done")
	waittest.Until(t, "it writes", func() bool { return len(b.text(b.dir+"/out")) > 10 })
	errtest.None(t, syscall.Kill(-got.PID, syscall.SIGSTOP))
	waittest.Until(t, "it is stopped", func() bool {
		return strings.Contains(b.text(fmt.Sprintf("/proc/%d/stat", got.PID)), ") T ")
	})
	was := len(b.text(b.dir + "/out"))
	b.stop(syscall.SIGTERM)
	waittest.Until(t, "it writes again", func() bool { return len(b.text(b.dir+"/out")) > was })
	if _, err := os.Stat(b.dir + "/shim.sock"); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
	b.start()
	if len(b.c.Welcome.Thawed) != 1 || b.c.Welcome.Thawed[0].Count != 1 || b.c.Welcome.Thawed[0].IDs[0] != "kept" {
		t.Errorf("the next shim says it thawed %+v, want kept", b.c.Welcome.Thawed)
	}
	errtest.None(t, b.c.AckThawed(waittest.Context(t)))
}

func TestNewestDaemonWins(t *testing.T) {
	b := newBench(t).start()
	old := b.c
	second, err := shimctl.Dial(waittest.Context(t), b.dir+"/shim.sock", shimctl.Events{})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	select {
	case <-old.Done():
	case <-waittest.Context(t).Done():
		t.Fatal("the older connection stays")
	}
	if _, err := old.List(waittest.Context(t), ""); err == nil {
		t.Error("the older connection still works")
	}
	if _, err := second.List(waittest.Context(t), ""); err != nil {
		t.Error(err)
	}
}

// TestLogIsClosedAtTheEnd checks that the log of a run that has ended is closed,
// because a deleted file uses disk space as long as it is open.
func TestLogIsClosedAtTheEnd(t *testing.T) {
	b := newBench(t).start()
	b.run("short", 1, "echo said; until [ -e $OUT.go ]; do sleep 0.01; done")
	open := func() bool {
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", b.cmd.Process.Pid))
		errtest.None(t, err)
		for _, f := range files {
			if to, _ := os.Readlink(f); to == b.logPath("short") {
				return true
			}
		}
		return false
	}
	b.waitText(b.logPath("short"), "said\n")
	if !open() {
		t.Error("the log of a program that runs is not open, so this shows nothing")
	}
	errtest.None(t, os.WriteFile(b.dir+"/out.go", nil, 0o600))
	b.exit("short", 1)
	waittest.Until(t, "the log is closed", func() bool { return !open() })
}
