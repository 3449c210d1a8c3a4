package shim_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/shimctl"
)

// state returns the state of a process as in its stat file; T means stopped.
func state(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "gone"
	}
	s := string(b)
	return strings.Fields(s[strings.LastIndex(s, ")")+1:])[0]
}

// frozen starts a run, makes the shim watch this daemon's heartbeat, and stops the
// run. The run has a unique ID, because shims find processes by ID, and those of
// concurrent tests would thaw each other's.
func (b *bench) frozen() (id string, pid int, p shimctl.Pulse) {
	b.t.Helper()
	id = fmt.Sprint(b.t.Name(), os.Getpid())
	s := b.run(id, 1, "exec sleep 1000")
	fd, err := b.c.Beat(waittest.Context(b.t))
	if err != nil {
		b.t.Fatal(err)
	}
	if p, err = shimctl.OpenPulse(fd); err != nil {
		b.t.Fatal(err)
	}
	_ = syscall.Close(fd)
	if err := syscall.Kill(s.PID, syscall.SIGSTOP); err != nil {
		b.t.Fatal(err)
	}
	waittest.Until(b.t, "the run is stopped", func() bool { return state(b.t, s.PID) == "T" })
	return id, s.PID, p
}

// TestHungDaemon checks that the shim thaws the instances of a hung daemon and
// tells the daemon so, and that it watches the daemon again afterwards.
func TestHungDaemon(t *testing.T) {
	t.Parallel()
	b := newBench(t).start()
	id, pid, p := b.frozen()
	var slowest time.Duration
	for range 8 { // longer than the time after which a daemon counts as hung
		<-time.After(shimctl.BeatEvery)
		slowest = max(slowest, p.Age())
		p.Beat()
	}
	if s := state(t, pid); s != "T" && slowest > shimctl.BeatLimit/2 {
		t.Skipf("this machine let %s pass between two beats", slowest)
	} else if s != "T" {
		t.Fatalf("it was thawed, state %s, although the daemon runs", s)
	}
	began := time.Now()
	waittest.Until(t, "the run of a hung daemon is thawed", func() bool { return state(t, pid) != "T" })
	t.Logf("thawed %s after the last beat", time.Since(began).Round(time.Millisecond))
	select {
	case <-b.c.Done():
	case <-time.After(waitLimit):
		t.Fatal("the connection of the hung daemon stays")
	}
	b.connect()
	if w := b.c.Welcome.Thawed; len(w) != 1 || len(w[0].IDs) != 1 || w[0].IDs[0] != id {
		t.Errorf("the shim tells of %+v", w)
	}
	errtest.None(t, syscall.Kill(pid, syscall.SIGSTOP))
	// A daemon with nothing frozen need not send heartbeats.
	waittest.Until(t, "the run is stopped", func() bool { return state(t, pid) == "T" })
	<-time.After(2 * shimctl.BeatLimit)
	if s := state(t, pid); s != "T" {
		t.Errorf("state %s: it was thawed without being asked to watch", s)
	}
}

// TestBothKilled checks that the watchdog thaws instances when the daemon and the
// shim are killed, and that a watchdog that is killed is replaced.
func TestBothKilled(t *testing.T) {
	t.Parallel()
	b := newBench(t).start()
	id, pid, p := b.frozen()
	dog := func() int { return watchdogOf(b.cmd.Process.Pid) }
	first := dog()
	if first == 0 {
		t.Fatal("there is no watchdog")
	}
	status, _ := os.ReadFile("/proc/" + strconv.Itoa(first) + "/smaps_rollup")
	t.Logf("REPORT the watchdog's memory:\n%s", status)
	errtest.None(t, syscall.Kill(first, syscall.SIGKILL))
	waittest.Until(t, "another watchdog", func() bool { p.Beat(); d := dog(); return d != 0 && d != first })
	// The shim is stopped, so that it cannot thaw the run between this check and
	// the kill.
	errtest.None(t, b.cmd.Process.Signal(syscall.SIGSTOP))
	waittest.Until(t, "the shim is stopped", func() bool { return state(t, b.cmd.Process.Pid) == "T" })
	if s := state(t, pid); s != "T" {
		t.Skip("the machine is so slow that the shim has thawed it")
	}
	b.c.Close()
	errtest.None(t, b.cmd.Process.Kill())
	began := time.Now()
	waittest.Until(t, "the run of a killed daemon and shim is thawed", func() bool { return state(t, pid) != "T" })
	t.Logf("thawed %s after the kill", time.Since(began).Round(time.Millisecond))
	_ = b.cmd.Wait()
	waittest.Until(t, "the watchdog has recorded it", func() bool { _, err := os.Stat(b.dir + "/thawed.json"); return err == nil })
	b.start()
	if w := b.c.Welcome.Thawed; len(w) != 1 || len(w[0].IDs) != 1 || w[0].IDs[0] != id {
		t.Errorf("the next shim tells of %+v", w)
	}
}

// watchdogOf finds the watchdog among the children of a shim.
func watchdogOf(pid int) int {
	all, _ := os.ReadDir("/proc")
	for _, e := range all {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		line, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err != nil || !strings.Contains(string(line), "\x00watchdog\x00") {
			continue
		}
		st, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		s := string(st)
		if f := strings.Fields(s[strings.LastIndex(s, ")")+1:]); len(f) > 1 && f[1] == strconv.Itoa(pid) {
			return n
		}
	}
	return 0
}
