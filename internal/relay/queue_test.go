package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

// slowWaker returns a waker whose wakes last until the test sends a result on wake,
// or until they are canceled, which it reports on ended.
func slowWaker(b Backend) (w *switchWaker, wake chan error, ended chan error) {
	w = &switchWaker{b: b}
	wake, ended = make(chan error, 1), make(chan error, 1024)
	w.onWake = func(ctx context.Context, _ Arrival) error {
		if w.up.Load() { // the instance is up already, and a client's first connection to it failed
			w.calls.Add(-1)
			return nil
		}
		select {
		case err := <-wake:
			w.up.Store(err == nil)
			return err
		case <-ctx.Done():
			ended <- context.Cause(ctx)
			return ctx.Err()
		}
	}
	return w, wake, ended
}

func TestClientGoneWhileWaitingEndsTheWake(t *testing.T) {
	for name, leave := range map[string]func(*net.TCPConn){
		"close": func(c *net.TCPConn) { c.Close() },
		"reset": func(c *net.TCPConn) { _ = c.SetLinger(0); c.Close() },
		"reset after data": func(c *net.TCPConn) {
			_, _ = c.Write([]byte("x"))
			_ = c.SetLinger(0)
			c.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, _, ended := slowWaker(serveTCP(t, echoAll))
			in, addr := expose(t, startRouter(t), w, Options{})
			c := dialTo(t, addr)
			waittest.Until(t, "the wake is asked for", func() bool { return w.calls.Load() == 1 })
			leave(c)
			select {
			case err := <-ended:
				if !errors.Is(err, errAbandoned) {
					t.Errorf("the wake ended with %v", err)
				}
			case <-time.After(waitLimit):
				t.Fatal("a client that went away keeps waking")
			}
			waittest.Until(t, "no client waits", func() bool { return in.Activity().Waiting == 0 })
			if s := in.Stats(); s.Gone != 1 || s.WakesFailed != 0 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

func TestOneOfTwoClientsLeaves(t *testing.T) {
	w, wake, _ := slowWaker(serveTCP(t, echoAll))
	in, addr := expose(t, startRouter(t), w, Options{})
	first, second := dialTo(t, addr), dialTo(t, addr)
	waittest.Until(t, "both wait", func() bool { return in.Activity().Waiting == 2 })
	first.Close()
	waittest.Until(t, "one waits", func() bool { return in.Activity().Waiting == 1 })
	_, _ = second.Write([]byte("still here"))
	_ = second.CloseWrite()
	wake <- nil
	if b, err := io.ReadAll(second); err != nil || string(b) != "still here" {
		t.Fatalf("%q, %v", b, err)
	}
	if n := w.calls.Load(); n != 1 {
		t.Errorf("%d wakes", n)
	}
}

// TestHalfClosedClientWithDataIsServed checks that a client whose FIN comes right
// after its data, long before the backend is up, is answered, as with "echo hello |
// nc -N host port".
func TestHalfClosedClientWithDataIsServed(t *testing.T) {
	w, wake, ended := slowWaker(serveTCP(t, echoAll))
	in, addr := expose(t, startRouter(t), w, Options{})
	c := dialTo(t, addr)
	_, _ = c.Write([]byte("hello"))
	_ = c.CloseWrite()
	waittest.Until(t, "it waits", func() bool { return w.calls.Load() == 1 })
	// A second client makes the loops run, which must not drop the first one.
	other := dialTo(t, addr)
	waittest.Until(t, "both wait", func() bool { return in.Activity().Waiting == 2 })
	other.Close()
	waittest.Until(t, "the first waits", func() bool { return in.Activity().Waiting == 1 })
	wake <- nil
	if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
		t.Fatalf("%q, %v", b, err)
	}
	if len(ended) != 0 || in.Stats().Gone != 1 {
		t.Errorf("stats %+v", in.Stats())
	}
}

func TestQueueIsBounded(t *testing.T) {
	w, wake, _ := slowWaker(serveTCP(t, echoAll))
	in, addr := expose(t, startRouter(t), w, Options{MaxWaiting: 3})
	var waits []*net.TCPConn
	for range 3 {
		waits = append(waits, dialTo(t, addr))
	}
	waittest.Until(t, "three wait", func() bool { return in.Activity().Waiting == 3 })
	over := dialTo(t, addr)
	if b, err := io.ReadAll(over); err != nil || len(b) != 0 {
		t.Fatalf("the fourth got %q, %v, want a clean close", b, err)
	}
	wake <- nil
	for _, c := range waits {
		_, _ = c.Write([]byte("x"))
		_ = c.CloseWrite()
		if b, err := io.ReadAll(c); err != nil || string(b) != "x" {
			t.Fatalf("one that waited: %q, %v", b, err)
		}
	}
	if s := in.Stats(); s.Refused != 1 || s.Relayed != 3 {
		t.Errorf("stats %+v", s)
	}
}

func TestListenerLimit(t *testing.T) {
	w := &switchWaker{b: serveTCP(t, echoAll)}
	w.up.Store(true)
	in, addr := expose(t, startRouter(t), w, Options{MaxOpen: 1})
	first := dialTo(t, addr)
	waittest.Until(t, "one open", func() bool { return in.Activity().Open == 1 })
	if b, err := io.ReadAll(dialTo(t, addr)); err != nil || len(b) != 0 {
		t.Fatalf("over the limit: %q, %v", b, err)
	}
	first.Close()
	waittest.Until(t, "none open", func() bool { return in.Activity().Open == 0 })
	c := dialTo(t, addr)
	_, _ = c.Write([]byte("x"))
	_ = c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "x" {
		t.Fatalf("after one left: %q, %v", b, err)
	}
}

func TestFailedWakeClosesCleanlyWithItsReason(t *testing.T) {
	w, wake, _ := slowWaker(Backend{})
	in, addr := expose(t, startRouter(t), w, Options{})
	c := dialTo(t, addr)
	waittest.Until(t, "it waits", func() bool { return in.Activity().Waiting == 1 })
	failure := errors.New("no space left for the guest")
	wake <- failure
	if b, err := io.ReadAll(c); err != nil || len(b) != 0 {
		t.Fatalf("got %q, %v, want a clean close", b, err)
	}
	waittest.Until(t, "all counts at zero", func() bool { a := in.Activity(); return a.Waiting == 0 && a.Open == 0 })
	if s := in.Stats(); s.WakesFailed != 1 || !strings.Contains(s.LastFailure, failure.Error()) {
		t.Errorf("stats %+v", s)
	}
}

// TestFailedWakeResetsNoClient checks that a client that has sent its request, and
// may still be sending, sees an end of the connection and no reset.
func TestFailedWakeResetsNoClient(t *testing.T) {
	w, wake, _ := slowWaker(Backend{})
	r := startRouter(t)
	in, addr := expose(t, r, w, Options{})
	path := filepath.Join(t.TempDir(), "s")
	ln, err := net.Listen("unix", path)
	errtest.None(t, err)
	errtest.Get(in.Listen(ln, 80))(t)
	stream, err := net.Dial("unix", path)
	errtest.None(t, err)
	defer stream.Close()
	clients := []net.Conn{dialTo(t, addr), stream}
	for _, c := range clients {
		errtest.Get(fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: web\r\n\r\n"))(t)
	}
	waittest.Until(t, "both wait", func() bool { return in.Activity().Waiting == 2 })
	failure := errors.New("no space left for the guest")
	wake <- failure
	for _, c := range clients {
		_ = c.SetDeadline(time.Now().Add(waitLimit))
		if b, err := io.ReadAll(c); err != nil || len(b) != 0 {
			t.Errorf("got %q, %v, want a clean close", b, err)
		}
		if _, err := c.Write([]byte("more")); err != nil && !errors.Is(err, syscall.EPIPE) {
			t.Error(err)
		}
		c.Close()
	}
	waittest.Until(t, "nothing is open", func() bool { return in.Activity().Open == 0 })
}

// TestClientThatStaysAfterAFailedWakeIsClosed checks that a client that never
// closes its side is disconnected.
func TestClientThatStaysAfterAFailedWakeIsClosed(t *testing.T) {
	w := &switchWaker{onWake: func(context.Context, Arrival) error { return errors.New("no") }}
	_, addr := expose(t, startRouter(t), w, Options{})
	c := dialTo(t, addr)
	if b, err := io.ReadAll(c); err != nil || len(b) != 0 {
		t.Fatalf("got %q, %v, want a clean close", b, err)
	}
	waittest.Until(t, "its end is closed", func() bool {
		_, err := c.Write([]byte("x"))
		return err != nil
	})
}

func TestPanickingWakeIsAFailedWake(t *testing.T) {
	w := &switchWaker{onWake: func(context.Context, Arrival) error { panic("boom") }}
	in, addr := expose(t, startRouter(t), w, Options{})
	if b, err := io.ReadAll(dialTo(t, addr)); err != nil || len(b) != 0 {
		t.Fatalf("got %q, %v", b, err)
	}
	if s := in.Stats(); s.Panics != 1 || s.WakesFailed != 1 {
		t.Errorf("stats %+v", s)
	}
}

// TestWakeWithoutReadyGivesUp checks that a waker whose Wake succeeds while Ready
// returns false neither uses up the CPU nor keeps the client forever.
func TestWakeWithoutReadyGivesUp(t *testing.T) {
	w := &switchWaker{onWake: func(context.Context, Arrival) error { return nil }}
	in, addr := expose(t, startRouter(t), w, Options{WakeTimeout: 300 * time.Millisecond})
	if b, err := io.ReadAll(dialTo(t, addr)); err != nil || len(b) != 0 {
		t.Fatalf("got %q, %v", b, err)
	}
	if n := w.calls.Load(); n > 50 {
		t.Errorf("%d wakes asked for in 300 ms", n)
	}
	if s := in.Stats(); s.Unreachable != 1 {
		t.Errorf("stats %+v", s)
	}
}

func TestWakeThatTakesTooLong(t *testing.T) {
	w, _, ended := slowWaker(Backend{})
	in, addr := expose(t, startRouter(t), w, Options{WakeTimeout: 50 * time.Millisecond})
	if b, err := io.ReadAll(dialTo(t, addr)); err != nil || len(b) != 0 {
		t.Fatalf("got %q, %v", b, err)
	}
	if err := <-ended; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the wake ended with %v", err)
	}
	if s := in.Stats(); s.WakesFailed != 1 {
		t.Errorf("stats %+v", s)
	}
}

func TestStormOfClientsIsOneWake(t *testing.T) {
	planes(t, func(t *testing.T, wrap func(Backend) Backend) {
		const clients = 500
		w, wake, _ := slowWaker(wrap(serveTCP(t, echoAll)))
		in, addr := expose(t, startRouter(t), w, Options{})
		var wg sync.WaitGroup
		for range clients {
			c := dialTo(t, addr)
			wg.Go(func() {
				_, _ = c.Write([]byte("x"))
				_ = c.CloseWrite()
				if b, err := io.ReadAll(c); err != nil || string(b) != "x" {
					t.Errorf("%q, %v", b, err)
				}
			})
		}
		waittest.Until(t, "all wait", func() bool { return in.Activity().Waiting == clients })
		wake <- nil
		wg.Wait()
		if n := w.calls.Load(); n != 1 {
			t.Errorf("%d wakes for %d clients", n, clients)
		}
		waittest.Until(t, "all gone", func() bool { return in.Activity().Open == 0 })
	})
}

func TestRemovedInstanceTurnsItsClientsAway(t *testing.T) {
	w, _, ended := slowWaker(Backend{})
	in, addr := expose(t, startRouter(t), w, Options{})
	c := dialTo(t, addr)
	waittest.Until(t, "it waits", func() bool { return w.calls.Load() == 1 })
	errtest.None(t, in.Close(context.Background()))
	if b, err := io.ReadAll(c); err != nil || len(b) != 0 {
		t.Fatalf("got %q, %v", b, err)
	}
	if err := <-ended; !errors.Is(err, ErrClosed) {
		t.Errorf("the wake ended with %v", err)
	}
	if a := in.Activity(); a.Waiting != 0 {
		t.Errorf("activity %+v", a)
	}
}
