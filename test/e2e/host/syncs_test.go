package host

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/shimctl"
)

// TestSyncsPerCycle counts the daemon's syncs and renames while an instance is
// paused and woken ten times. A cycle may cost two syncs, of the intent before
// the freeze and of the commit after it. No sync may come between a client and
// the thaw, and no file may be renamed.
func TestSyncsPerCycle(t *testing.T) {
	if _, err := exec.LookPath("strace"); err != nil {
		t.Skip("strace is not installed")
	}
	const cycles = 10
	d := host(t, "--pause-after", "1h")
	s, addr := web(t, "web", false)
	d.Launch(s)
	refused := 0 // a refused pause may have synced its intent
	cycle := func() {
		t.Helper()
		pauses := d.Show("web").PauseCount
		waittest.Until(t, "web is paused", func() bool {
			_, err := d.Do(t.Context(), "web", "pause", nil) // refused while the last connection is open
			if err != nil {
				refused++
			}
			return err == nil && d.Show("web").PauseCount > pauses
		})
		mustAnswer(t, addr)
		d.Await("web", "running")
	}
	cycle() // the first cycle creates the log files
	trace := traced(t, d, "fsync,fdatasync,sync,syncfs,msync,sync_file_range,?rename,renameat,renameat2,write,pwrite64")
	refused = 0
	for range cycles {
		cycle()
	}
	log := trace()
	count := func(what *regexp.Regexp) int { return len(what.FindAllString(log, -1)) }
	syncs, renames := count(syncCall), count(regexp.MustCompile(`(?m)^\d+ +rename`))
	t.Logf("REPORT disk: %d cycles took %d syncs and %d renames", cycles, syncs, renames)
	if most := 2*cycles + refused + 1; syncs > most || renames > 0 {
		t.Errorf("%d cycles took %d syncs and %d renames, want at most %d and 0:\n%s", cycles, syncs, renames, most, log)
	}
	var order strings.Builder
	for line := range strings.Lines(log) {
		switch {
		case syncCall.MatchString(line):
			order.WriteString("s")
		case strings.Contains(line, `freeze>, "1"`), strings.Contains(line, `state>, "FROZEN"`):
			order.WriteString("F")
		case strings.Contains(line, `freeze>, "0"`), strings.Contains(line, `state>, "THAWED"`):
			order.WriteString("T")
		}
	}
	got := order.String()
	if !strings.ContainsAny(got, "FT") {
		t.Log("instances are frozen by signals here, so the order of syncs and thaws is not seen")
	} else if !regexp.MustCompile(fmt.Sprintf(`^((s+FT)*s+Fs+T){%d}$`, cycles)).MatchString(got) {
		t.Errorf("syncs (s), freezes (F) and thaws (T) came as %s, want sFsT in each of %d cycles, an s or sFT for each of %d refused pauses, and one at most for what was recorded late", got, cycles, refused)
	}
}

var syncCall = regexp.MustCompile(`(?m)^\d+ +(fsync|fdatasync|sync|syncfs|msync|sync_file_range)\(`)

// TestNothingBeforeThaw traces the daemon's system calls when a client connects
// to a paused program. Between the event and the thaw, the thread that thaws must
// make no other call; afterwards it must sleep before any other call.
// One such wake of ten suffices, because the runtime sometimes moves the work to
// another thread, while a call made by the code would appear in every wake.
func TestNothingBeforeThaw(t *testing.T) {
	if _, err := exec.LookPath("strace"); err != nil {
		t.Skip("strace is not installed")
	}
	d := host(t, "--pause-after", "1h")
	s, addr := web(t, "web", false)
	d.Launch(s)
	trace := traced(t, d, "all")
	for range 10 {
		waittest.Until(t, "web is paused", func() bool {
			_, err := d.Do(t.Context(), "web", "pause", nil)
			return err == nil && d.Show("web").State == "paused"
		})
		mustAnswer(t, addr)
		d.Await("web", "running")
		time.Sleep(2 * headStarts) // outside a bubble: if wakes follow sooner, only the first one sleeps
	}
	var seen []string
	if log := trace(); !slices.ContainsFunc(wakes(log), func(calls string) bool {
		seen = append(seen, calls)
		return calls == "THAW nanosleep"
	}) {
		if len(seen) == 0 {
			t.Skip("instances are frozen by signals here")
		}
		t.Errorf("none of the wakes is as short as it should be:\n%s", strings.Join(seen, "\n"))
	}
}

// TestCallsWhileAsleep counts the daemon's system calls while its only instance is
// paused. From one heartbeat to the next it does nothing else: it waits, reads the
// timer and the clock. What is written once after the pause, or the runtime does now
// and then, is not in most of the intervals.
func TestCallsWhileAsleep(t *testing.T) {
	if _, err := exec.LookPath("strace"); err != nil {
		t.Skip("strace is not installed")
	}
	d := host(t, "--pause-after", "1h")
	s, _ := web(t, "web", false)
	d.Launch(s)
	_, err := d.Do(t.Context(), "web", "pause", nil)
	errtest.None(t, err)
	trace := traced(t, d, "all")
	<-time.After(9 * shimctl.BeatEvery)
	var calls []int // since a beat
	for line := range strings.Lines(trace()) {
		switch _, call, _ := strings.Cut(line, " "); {
		case strings.Contains(call, "clock_gettime(CLOCK_MONOTONIC"):
			calls = append(calls, 0)
		case len(calls) > 0 && !strings.HasPrefix(strings.TrimSpace(call), "<"): // not the end of one
			calls[len(calls)-1]++
		}
	}
	if len(calls) < 4 {
		t.Skipf("this machine let only %d heartbeats pass", len(calls))
	}
	calls = calls[:len(calls)-1]
	t.Logf("REPORT asleep: calls from heartbeat to heartbeat: %d", calls)
	if slices.Sort(calls); calls[len(calls)/2] > 6 {
		t.Errorf("%d calls from heartbeat to heartbeat, at the median; want at most 6 without that of the clock", calls[len(calls)/2])
	}
}

// headStarts is the minimum interval between two head starts: after a thaw, the
// process runtime lets the program run before the daemon.
const headStarts = 4 * time.Millisecond

// wakes returns, for each thaw, the calls of the thread that made it, from the
// event until the thread sleeps or calls write or futex.
func wakes(log string) (out []string) {
	byThread := map[string][]string{}
	after := map[string]bool{} // threads that have thawed and whose calls are still collected
	for line := range strings.Lines(log) {
		pid, rest, _ := strings.Cut(line, " ")
		name, _, called := strings.Cut(strings.TrimSpace(rest), "(")
		if !called || strings.HasPrefix(name, "<") {
			continue // the second half of an interrupted line
		}
		switch thaw := strings.Contains(line, `freeze>, "0"`) || strings.Contains(line, `state>, "THAWED"`); {
		case after[pid]:
			byThread[pid] = append(byThread[pid], name)
			if name == "nanosleep" || name == "write" || name == "futex" {
				out = append(out, strings.Join(byThread[pid], " "))
				delete(after, pid)
				byThread[pid] = nil
			}
		case thaw:
			byThread[pid], after[pid] = append(byThread[pid], "THAW"), true
		case strings.HasPrefix(name, "epoll_pwait"):
			byThread[pid] = nil
		default:
			byThread[pid] = append(byThread[pid], name)
		}
	}
	return out
}

// traced runs strace on the daemon for the given calls. trace ends it and returns
// its output.
func traced(t *testing.T, d *daemontest.Host, calls string) (trace func() string) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "trace")
	cmd := exec.Command("strace", "-f", "-y", "-o", out, "-p", fmt.Sprint(d.PID()),
		"-e", "trace="+calls, "-e", "signal=none")
	said, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, said) }()
	end := func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Signal(syscall.SIGINT)
			_ = cmd.Wait()
		}
	}
	t.Cleanup(end)
	tasks := func() []string {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", d.PID()))
		errtest.None(t, err)
		return tasks
	}
	waittest.Until(t, "strace follows every thread", func() bool {
		return !slices.ContainsFunc(tasks(), func(path string) bool {
			b, err := os.ReadFile(path)
			return err == nil && !regexp.MustCompile(fmt.Sprintf(`(?m)^TracerPid:\s+%d$`, cmd.Process.Pid)).Match(b)
		})
	})
	return func() string {
		end()
		b, err := os.ReadFile(out)
		errtest.None(t, err)
		return string(b)
	}
}
