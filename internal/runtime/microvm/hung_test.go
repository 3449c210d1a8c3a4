package microvm

import (
	"log/slog"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
)

// TestHungQEMU checks that a QEMU that does not answer is reported. One that a
// signal has stopped is continued, at once if a client comes. One that stays silent
// is killed.
func TestHungQEMU(t *testing.T) {
	b := newBench(t, func(c *Config) { c.StoppedLimit = time.Millisecond })
	w := b.start("hung", "guest", "serve", ":80")
	listening(t, w, "80")
	c := dial(t, w)
	defer c.Close()
	talk(t, c, "before")
	stop := func() {
		t.Helper()
		errtest.None(t, syscall.Kill(w.Identity().PID, syscall.SIGSTOP))
	}
	if what := w.Trouble(); what != "" {
		t.Errorf("trouble of one that runs: %s", what)
	}
	stop()
	if s := w.Sample(nil); s.CPUErr == nil {
		t.Errorf("it was read: %+v", s)
	}
	if what := w.Trouble(); !strings.Contains(what, "not answered") || !strings.Contains(what, "a signal") {
		t.Errorf("trouble: %q", what)
	}
	until(t, "it continues", func() bool { w.Sample(nil); return w.Trouble() == "" })
	talk(t, c, "after")

	errtest.None(t, w.Freeze(t.Context()))
	stop()
	errtest.None(t, w.Thaw())
	talk(t, c, "thawed")

	b.cfg.StoppedLimit, b.cfg.MuteLimit = time.Hour, time.Second
	stop()
	ended := false
	until(t, "it is ended", func() bool {
		select {
		case e := <-b.exits:
			if e.Code == 0 || !strings.Contains(e.Machine, "not answered") {
				t.Errorf("exit %+v", e)
			}
			ended = true
		default:
			w.Sample(nil)
		}
		return ended
	})
	b.clean("hung")
}

// TestMuteThatWorks checks that a silent QEMU counts as hung only once it has been
// inactive for the whole limit. Working, waiting for a CPU or a disk, and being
// debugged do not count as inactive.
func TestMuteThatWorks(t *testing.T) {
	began := time.Unix(1000, 0)
	for name, looks := range map[string]struct {
		states string // one per minute
		used   []uint64
		still  time.Duration // at the last check
	}{
		"asleep":              {"SSSS", []uint64{7, 7, 7, 7}, 3 * time.Minute},
		"stopped":             {"TTT", []uint64{7, 7, 7}, 2 * time.Minute},
		"at work":             {"SSSS", []uint64{7, 9, 12, 13}, 0},
		"at work for a while": {"SSSS", []uint64{7, 9, 9, 9}, 2 * time.Minute},
		"without a processor": {"RRRR", []uint64{7, 7, 7, 7}, 0},
		"without its disk":    {"SDDS", []uint64{7, 7, 7, 7}, time.Minute},
		"debugged":            {"ttt", []uint64{7, 7, 7}, 0},
	} {
		var m unresponsive
		now := began
		for n, used := range looks.used {
			now = began.Add(time.Duration(n) * time.Minute)
			m.saw(now, 1, looks.states[n], used)
		}
		if got := now.Sub(m.still); got != looks.still {
			t.Errorf("%s: still for %s, want %s", name, got, looks.still)
		}
		if got := now.Sub(m.since); got != time.Duration(len(looks.used)-1)*time.Minute {
			t.Errorf("%s: silent for %s", name, got)
		}
	}
}

// TestTimerRejected checks that a guest whose kernel rejects its timer boots again
// until the kernel accepts it, and that the last try accepts any timer. Kernels
// reject it on a host too busy to let it tick in time.
func TestTimerRejected(t *testing.T) {
	for _, c := range []struct {
		rejected int
		timer    string
	}{{1, "lapic"}, {timerTries, "hpet"}} {
		dir, err := os.MkdirTemp("", "qemu") // for an unprivileged QEMU
		errtest.None(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
		errtest.None(t, os.Chmod(dir, 0o755))
		qemu := dir + "/qemu"
		errtest.None(t, os.WriteFile(qemu, []byte(`#!/bin/sh
for a; do
	case $a in console=*) a="$a nolapic_timer" ;; esac
	shift
	set -- "$@" "$a"
done
exec qemu-system-x86_64 "$@"
`), 0o755))
		rejected := 0
		logged := onWrite(func(line string) {
			if !strings.Contains(line, errTimer.Error()) {
				return
			}
			if rejected++; rejected == c.rejected && c.timer == "lapic" {
				errtest.None(t, os.WriteFile(qemu, []byte("#!/bin/sh\nexec qemu-system-x86_64 \"$@\"\n"), 0o755))
			}
		})
		b := newBench(t, func(f *Config) { f.Accel, f.QEMU, f.Log = TCG, qemu, slog.New(slog.NewTextHandler(logged, nil)) })
		b.start("busy", "guest", "serve", ":80")
		if rejected != c.rejected {
			t.Errorf("its timer was rejected %d times, want %d", rejected, c.rejected)
		}
		o, err := b.Exec(t.Context(), "busy", instance.Command{Command: []string{"guest", "cat", "/sys/devices/system/clockevents/clockevent0/current_device"}})
		if err != nil || strings.TrimSpace(o.Stdout) != c.timer {
			t.Errorf("its timer is %q, want %s: %v", o.Stdout, c.timer, err)
		}
		if s := b.log("busy"); strings.Contains(s, "lull:") {
			t.Errorf("its log tells of the boots before: %q", s)
		}
	}
}

// onWrite is a writer that calls itself.
type onWrite func(string)

func (f onWrite) Write(b []byte) (int, error) {
	f(string(b))
	return len(b), nil
}

// TestClockOfAStarvedBoot boots a guest that gets time only now and then, and checks
// that its clock runs as fast as the host's afterwards.
func TestClockOfAStarvedBoot(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Accel = TCG })
	started := make(chan error, 1)
	go func() {
		_, err := b.Start(t.Context(), b.launch("starved", 1, "guest", "serve", ":80"))
		started <- err
	}()
	pulse := time.NewTicker(50 * time.Millisecond)
	defer pulse.Stop()
	var err error
	for stopped, booting := 0, true; booting; {
		select {
		case err = <-started:
			booting = false
		case <-pulse.C:
		}
		if stopped != 0 {
			_ = syscall.Kill(stopped, syscall.SIGCONT) // it may have ended
			stopped = 0
		} else if w := b.work("starved"); booting && w != nil && w.Identity().PID != 0 {
			stopped = w.Identity().PID
			_ = syscall.Kill(stopped, syscall.SIGSTOP)
		}
	}
	errtest.None(t, err)
	uptime := func() (guest time.Duration, read time.Time) {
		t.Helper()
		o, err := b.Exec(t.Context(), "starved", instance.Command{Command: []string{"guest", "cat", "/proc/uptime"}})
		errtest.None(t, err)
		seconds, err := strconv.ParseFloat(strings.Fields(o.Stdout)[0], 64)
		errtest.None(t, err)
		return time.Duration(seconds * float64(time.Second)), time.Now()
	}
	before, began := uptime()
	<-time.After(3 * time.Second)
	after, ended := uptime()
	guest, host := after-before, ended.Sub(began)
	t.Logf("the guest's clock went %s in %s", guest, host)
	if guest < host*9/10 || guest > host*11/10 {
		t.Errorf("the guest's clock went %s in %s", guest, host)
	}
}
