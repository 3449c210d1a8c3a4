package relay

import (
	"fmt"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

// TestOtherListeners checks that a listener that is not a TCP socket is served by
// goroutines, from the first byte to both half-closes.
func TestOtherListeners(t *testing.T) {
	w := &switchWaker{b: serveTCP(t, echoAll)}
	in, err := startRouter(t).Add("web", w, Options{})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "s")
	ln, err := net.Listen("unix", path)
	errtest.None(t, err)
	errtest.Get(in.Listen(ln, 80))(t)
	for i := range 3 {
		c, err := net.Dial("unix", path)
		errtest.None(t, err)
		_ = c.SetDeadline(time.Now().Add(waitLimit))
		fmt.Fprint(c, "hello")
		_ = c.(*net.UnixConn).CloseWrite()
		if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
			t.Fatalf("connection %d: %q, %v", i, b, err)
		}
		c.Close()
	}
	if w.calls.Load() != 1 {
		t.Errorf("%d wakes", w.calls.Load())
	}
	waittest.Until(t, "nothing is open", func() bool { return in.Activity().Open == 0 })
}

// TestNoGoroutinePerInstanceOrConnection checks that neither a sleeping instance
// nor an open connection needs a goroutine.
func TestNoGoroutinePerInstanceOrConnection(t *testing.T) {
	r := startRouter(t)
	w := &switchWaker{b: serveTCP(t, echoAll)}
	w.up.Store(true)
	_, addr := expose(t, r, w, Options{})
	const own = 8 // those of the loops and of the listener may not have started yet
	before := runtime.NumGoroutine()
	for i := range 300 {
		in, err := r.Add(fmt.Sprint("asleep-", i), &switchWaker{}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		errtest.Get(in.Listen(loopback(t), 80))(t)
	}
	if n := runtime.NumGoroutine() - before; n > own {
		t.Errorf("300 instances cost %d goroutines", n)
	}
	const conns = 100
	for range conns {
		c := dialTo(t, addr)
		fmt.Fprint(c, "x")
		errtest.Get(io.ReadFull(c, make([]byte, 1)))(t)
	}
	// The echo server in this process needs one per connection.
	if n := runtime.NumGoroutine() - before; n > conns+own {
		t.Errorf("%d connections cost %d goroutines beside the server's", conns, n-conns)
	}
}

func TestOpenSinceAndCut(t *testing.T) {
	planes(t, func(t *testing.T, wrap func(Backend) Backend) {
		w := &switchWaker{b: wrap(serveTCP(t, echoAll))}
		w.up.Store(true)
		in, addr := expose(t, startRouter(t), w, Options{})
		start := time.Now()
		quiet, busy := dialTo(t, addr), dialTo(t, addr)
		say := func(c *net.TCPConn) {
			t.Helper()
			fmt.Fprint(c, "x")
			errtest.Get(io.ReadFull(c, make([]byte, 1)))(t)
		}
		say(quiet)
		say(busy)
		if n := in.OpenSince(start); n != 2 {
			t.Errorf("%d open since the start, want 2", n)
		}
		waittest.Until(t, "the clock of the relay is past now", func() bool {
			mark := time.Now()
			say(busy)
			return in.OpenSince(mark) == 1
		})
		in.Cut()
		if _, err := quiet.Read(make([]byte, 1)); err == nil {
			t.Error("a connection was not cut")
		}
		waittest.Until(t, "nothing is open", func() bool { return in.Activity().Open == 0 })
		say(dialTo(t, addr))
	})
}

func TestOptionsAreChecked(t *testing.T) {
	r := startRouter(t)
	for _, bad := range []Options{{MaxWaiting: -1}, {MaxWaiting: 1 << 20}, {MaxOpen: -1}, {WakeTimeout: -1}, {Noise: Noise{Paths: []string{"x"}}}} {
		if _, err := r.Add("bad", &switchWaker{}, bad); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
	errtest.Get(r.Add("twice", &switchWaker{}, Options{}))(t)
	if _, err := r.Add("twice", &switchWaker{}, Options{}); err == nil {
		t.Error("a name was given twice")
	}
	if _, err := New(Config{Loops: -1}); err == nil {
		t.Error("a negative number of loops was taken")
	}
}

func TestPanicEndsOneConnectionOnly(t *testing.T) {
	w := &panicWaker{switchWaker: &switchWaker{b: serveTCP(t, echoAll)}}
	w.up.Store(true)
	in, addr := expose(t, startRouter(t), w, Options{})
	w.boom.Store(true)
	c := dialTo(t, addr)
	if b, err := io.ReadAll(c); len(b) != 0 {
		t.Fatalf("got %q, %v", b, err)
	}
	w.boom.Store(false)
	c = dialTo(t, addr)
	_, _ = c.Write([]byte("x"))
	_ = c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "x" {
		t.Fatalf("after a panic: %q, %v", b, err)
	}
	waittest.Until(t, "all counts at zero", func() bool { return in.Activity().Open == 0 })
	if n := in.Stats().Panics; n != 1 {
		t.Errorf("%d panics counted", n)
	}
}

type panicWaker struct {
	*switchWaker
	boom atomic.Bool
}

func (w *panicWaker) Ready(p int) (Backend, bool) {
	if w.boom.Load() {
		panic("boom")
	}
	return w.switchWaker.Ready(p)
}
