package microvm

import (
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestHungQEMU: a QEMU that does not answer says so, is let go on where a signal
// has stopped it, at once when somebody comes, and is ended where nothing helps.
func TestHungQEMU(t *testing.T) {
	b := newBench(t, func(c *Config) { c.StoppedLimit = time.Millisecond })
	w := b.start("hung", "guest", "serve", ":80")
	listening(t, w, "80")
	c := dial(t, w)
	defer c.Close()
	talk(t, c, "before")
	stop := func() {
		t.Helper()
		if err := syscall.Kill(w.Identity().PID, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	if what := w.Trouble(); what != "" {
		t.Errorf("trouble of one that runs: %s", what)
	}
	stop()
	if s := w.Sample(nil); s.CPUErr == nil {
		t.Errorf("it was read: %+v", s)
	}
	if what := w.Trouble(); !strings.Contains(what, "has not answered for") || !strings.Contains(what, "a signal has stopped it") {
		t.Errorf("trouble: %q", what)
	}
	until(t, "it goes on", func() bool { w.Sample(nil); return w.Trouble() == "" })
	talk(t, c, "after")

	if err := w.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := w.Thaw(); err != nil {
		t.Fatal(err)
	}
	talk(t, c, "thawed")

	b.cfg.StoppedLimit, b.cfg.MuteLimit = time.Hour, time.Second
	stop()
	ended := false
	until(t, "it is ended", func() bool {
		select {
		case e := <-b.exits:
			if e.Code == 0 || !strings.Contains(e.Machine, "QEMU had not answered for") {
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
