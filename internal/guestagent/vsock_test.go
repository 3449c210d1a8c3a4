package guestagent

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/waittest"
	"lull/internal/protocol/guest"
	"lull/internal/protocol/guest/vsock"

	"golang.org/x/sys/unix"
)

// TestVsock checks that the guest agent sends over vsock once the host asks for it,
// that the port is used again after the vsock connection ends in any way, and that
// the end of the workload is then reported again.
func TestVsock(t *testing.T) {
	key := vsock.Key{1, 2, 3}
	var fast *host
	var refuse error
	p := begin(t, func(c *Config) {
		c.Beat = time.Hour
		c.DialHost = func(_ context.Context, port uint32, k vsock.Key) (io.ReadWriteCloser, error) {
			if port != 7 || k != key {
				t.Errorf("it connects to port %d with key %x", port, k)
			}
			if refuse != nil {
				return nil, refuse
			}
			near, far := ends(t)
			fast = newHost(t, near)
			return far, nil
		}
	})
	serial := p.connect(t)
	move := func() {
		t.Helper()
		serial.must(t, guest.Vsock, guest.VsockCall{Port: 7, Key: key[:]}, nil)
		fast.must(t, guest.Hello, nil, nil)
		serial.must(t, guest.Hello, nil, nil)
	}
	over := func(h *host) {
		t.Helper()
		waittest.Until(t, "the connection ends", func() bool {
			err := h.do(t, guest.Hello, nil, nil)
			return errors.Is(err, guest.ErrChannelEnded) || err != nil && strings.Contains(err.Error(), "cannot send")
		})
		serial.must(t, guest.Hello, nil, nil)
	}
	if err := serial.do(t, guest.Vsock, guest.VsockCall{Port: 7, Key: key[1:]}, nil); err == nil {
		t.Error("a short key was taken")
	}
	refuse = unix.ENODEV
	if err := serial.do(t, guest.Vsock, guest.VsockCall{Port: 7, Key: key[:]}, nil); err == nil || !strings.Contains(err.Error(), unix.ENODEV.Error()) {
		t.Errorf("it could not connect, and says %v", err)
	}
	serial.must(t, guest.Hello, nil, nil)
	refuse = nil

	move()
	first := fast
	move()
	over(first)

	seed := make([]byte, 16)
	serial.must(t, guest.SetClock, guest.ClockCall{UnixNano: 1, Seed: seed}, nil) // in the form that quick answers
	over(fast)
	move()
	serial.must(t, guest.SetClock, guest.ClockCall{UnixNano: 1, Seed: seed, Name: "", Machine: "x"}, nil)
	over(fast)
	move()
	fast.must(t, guest.SetClock, guest.ClockCall{UnixNano: 1, Seed: seed}, nil)
	fast.must(t, guest.Hello, nil, nil)

	fast.must(t, guest.Run, shell("echo said; exit 4"), nil)
	select {
	case n := <-fast.exit:
		if n.Code != 4 || fast.text() != "said\n" || serial.text() != "" {
			t.Errorf("exit %+v after %q, and %q over the port", n, fast.text(), serial.text())
		}
	case <-time.After(waitLimit):
		t.Fatal("no message over vsock said that the workload ended")
	}
	fast.c.Close()
	select {
	case n := <-serial.exit:
		if n.Code != 4 {
			t.Errorf("exit %+v", n)
		}
	case <-time.After(waitLimit):
		t.Fatal("no message over the port repeated it")
	}
}
