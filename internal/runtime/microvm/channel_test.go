package microvm

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/guest"
)

// sabotage makes the guest agent inject a fault into its control channel. The
// request goes over the guest's network.
func sabotage(t *testing.T, w *Work, fault string) {
	t.Helper()
	var c net.Conn
	until(t, "the guest takes orders", func() (ok bool) {
		var err error
		c, err = w.Dial(t.Context(), "127.0.0.1:9")
		return err == nil
	})
	defer c.Close()
	errtest.None(t, c.SetDeadline(time.Now().Add(waitLimit)))
	errtest.Get(c.Write([]byte(fault + "\n")))(t)
	if line, err := bufio.NewReader(c).ReadString('\n'); err != nil {
		t.Fatalf("%s: %q, %v", fault, line, err)
	}
}

// TestBrokenChannel has a guest agent close its control channel, send garbage, half
// a line or an oversized one, flood it, or fall silent. It checks that the guest's
// readings become unknown at worst, and that the guest can still be paused, saved
// and restored. A wake fails with its reason while the guest does not answer, and
// leaves the guest frozen. Once the channel works again everything does, and the
// program has kept its counter.
func TestBrokenChannel(t *testing.T) {
	b := newBench(t, func(c *Config) {
		parts, err := rig()
		need(t, err)
		c.Harness, c.Channel = parts.saboteur, ChannelSerial // faults are injected into the serial channel
	})
	w := b.start("broken", "guest", "serve", ":80")
	listening(t, w, "80")
	counted := func(want string) {
		t.Helper()
		c := dial(t, w)
		defer c.Close()
		errtest.None(t, c.SetDeadline(time.Now().Add(waitLimit)))
		errtest.Get(c.Write([]byte("count\n")))(t)
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != "counted "+want+"\n" {
			t.Fatalf("it answers %q, %v; want %s", line, err, want)
		}
	}
	counted("1")
	for n, f := range []struct {
		fault  string
		silent bool // the guest does not answer during the fault
	}{{"garbage", false}, {"half", false}, {"long", false}, {"newlines", false}, {"flood", false}, {"mute", true}, {"closed", true}} {
		sabotage(t, w, f.fault)
		s := w.Sample(nil)
		if f.silent && s.CPUErr == nil {
			t.Errorf("%s: a guest that does not answer has readings", f.fault)
		}
		if err := w.Freeze(t.Context()); err != nil {
			t.Fatalf("%s: %v", f.fault, err)
		}
		if n%2 == 0 || f.silent {
			if _, err := w.Hibernate(t.Context()); err != nil {
				t.Fatalf("%s: %v", f.fault, err)
			}
		}
		// An answer may be late on a busy machine, so the test waits for it unless
		// the fault prevents answers. An answer that is lost in an endless flood
		// counts as not sent.
		b.cfg.CallLimit = callLimit
		if f.silent {
			b.cfg.CallLimit = time.Second
		}
		err := w.Thaw()
		b.cfg.CallLimit = callLimit
		if err != nil {
			if !strings.Contains(err.Error(), "guest's clock") {
				t.Errorf("%s: woken with %v", f.fault, err)
			}
			if still, err := w.Still(); err != nil || !still || !w.isFrozen() {
				t.Errorf("%s: after a wake that failed it runs: %v, %v", f.fault, still, err)
			}
			m, err := w.monitor() // its program runs, and the channel works again
			errtest.None(t, err)
			errtest.None(t, m.do(t.Context(), "cont", nil, nil))
			sabotage(t, w, "right")
			for range 4 {
				if err = w.Thaw(); err == nil {
					break
				}
			}
			if err != nil {
				t.Fatalf("%s: it does not wake: %v", f.fault, err)
			}
		} else if f.silent {
			t.Errorf("%s: woken although nothing answers", f.fault)
		}
		sabotage(t, w, "right")
		until(t, f.fault+": it is known again", func() bool { return w.Sample(nil).CPUErr == nil })
		counted(string(rune('2' + n)))
	}
	if o, err := b.Exec(t.Context(), "broken", instance.Command{Command: []string{"guest", "exit", "3"}}); err != nil || o.ExitCode != 3 {
		t.Errorf("exec: %+v, %v", o, err)
	}
	errtest.None(t, w.Kill(t.Context()))
	b.clean("broken")
}

// TestTalkRate checks that, if a guest sends only empty lines, they are read at the
// permitted rate after the permitted burst.
func TestTalkRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := (&Runtime{log: slog.New(slog.DiscardHandler)}).newWork("x")
		defer w.loops.Wait()
		defer w.cancel()
		near, far := net.Pipe()
		const lines = 400_000
		var guests sync.WaitGroup
		defer guests.Wait()
		guests.Go(func() { _, _ = io.Copy(io.Discard, far) }) // discards requests to the guest
		guests.Go(func() {
			if _, err := far.Write(bytes.Repeat([]byte("\n"), lines)); err != nil {
				t.Error(err)
			}
			far.Close()
		})
		began := time.Now()
		_ = w.converse(near, guest.NewPeer(near), false) // ends when the guest's end is closed
		want := time.Second * (lines*emptyCost - talkBurst) / talkRate
		if took := time.Since(began); took < want || took > want+time.Second {
			t.Errorf("%d lines were read in %s, want %s", lines, took, want)
		}
	})
}

// TestPortsBlocked checks that the next daemon can use both ports even if QEMU
// blocks a guest's writes to them, because they were disconnected while the machine
// was stopped. It checks this for a running and for a frozen guest.
func TestPortsBlocked(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Channel = ChannelSerial })
	dir := workspace(t)
	w := b.startWith("blocked", dir, "guest", "flood", "/workspace/count")
	for _, frozen := range []bool{false, true} {
		until(t, "the guest writes", func() bool {
			_, err := os.Stat(filepath.Join(dir, "count"))
			return err == nil
		})
		errtest.None(t, w.Freeze(t.Context()))
		errtest.None(t, b.Close())
		gone := make(chan struct{})
		m, err := dialMonitor(t.Context(), w.path(qmpSocket), gone, func(string, json.RawMessage) {})
		if err != nil {
			t.Fatal(err)
		}
		do := func(what string) {
			t.Helper()
			errtest.None(t, m.do(t.Context(), what, nil, nil))
		}
		began := time.Now()
		do("cont") // as if from outside lull
		until(t, "the guest has run", func() bool { return time.Since(began) > time.Second })
		if frozen {
			do("stop")
		}
		m.close()
		w = b.next("blocked")
		if frozen {
			errtest.None(t, w.Thaw())
		}
		// The file is empty for a moment, because the guest truncates it before it
		// writes a count.
		until(t, "something is counted", func() bool { return b.must("blocked", "get", "/workspace/count") != "" })
		errtest.None(t, os.Remove(filepath.Join(dir, "count")))
	}
	errtest.None(t, w.Kill(t.Context()))
}
