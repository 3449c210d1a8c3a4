package relay

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"flag"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

const waitLimit = waittest.Timeout

// switchWaker is the waker of an instance whose state the test sets.
type switchWaker struct {
	b       Backend
	up      atomic.Bool
	calls   atomic.Int64
	onWake  func(ctx context.Context, a Arrival) error // if nil, wakes succeed
	mu      sync.Mutex
	arrived []Arrival
}

var _ Waker = (*switchWaker)(nil)

func (w *switchWaker) Ready(int) (Backend, bool) { return w.b, w.up.Load() }

func (w *switchWaker) Wake(ctx context.Context, a Arrival) error {
	w.calls.Add(1)
	w.mu.Lock()
	w.arrived = append(w.arrived, a)
	w.mu.Unlock()
	if w.onWake != nil {
		return w.onWake(ctx, a)
	}
	w.up.Store(true)
	return nil
}

// TestMain checks that the package's tests leave no goroutine behind.
func TestMain(m *testing.M) {
	flag.Parse()
	before := runtime.NumGoroutine()
	code := m.Run()
	if flag.Lookup("test.fuzz").Value.String() != "" {
		os.Exit(code) // without the check, because the fuzzing engine leaves goroutines
	}
	if left := waittest.Goroutines(before); code == 0 && left != "" {
		os.Stderr.WriteString(left)
		code = 1
	}
	os.Exit(code)
}

func (w *switchWaker) first() Arrival {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.arrived[0]
}

func loopback(t *testing.T) *net.TCPListener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	return ln.(*net.TCPListener)
}

// serveTCP runs a backend until the end of the test.
func serveTCP(t *testing.T, serve func(*net.TCPConn)) Backend {
	t.Helper()
	ln := loopback(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.AcceptTCP()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
	return Backend{Addr: ln.Addr().(*net.TCPAddr).AddrPort(), Generation: 1}
}

func echoAll(c *net.TCPConn) {
	_, _ = io.Copy(c, c)
	_ = c.CloseWrite()
}

func startRouter(t *testing.T) *Router {
	t.Helper()
	r, err := New(Config{Loops: 2})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return r
}

// expose adds an instance with one port and returns the port's address.
func expose(t *testing.T, r *Router, w Waker, opt Options) (*Instance, string) {
	t.Helper()
	in, err := r.Add("web", w, opt)
	errtest.None(t, err)
	l, err := in.Listen(loopback(t), 80)
	errtest.None(t, err)
	return in, l.Addr().String()
}

func dialTo(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	errtest.None(t, err)
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(waitLimit))
	return c.(*net.TCPConn)
}

// planes runs a test once with a backend on the event loops, and once with one that
// is reached through Dial, by goroutines.
func planes(t *testing.T, test func(t *testing.T, wrap func(Backend) Backend)) {
	t.Run("loops", func(t *testing.T) { test(t, func(b Backend) Backend { return b }) })
	t.Run("dial", func(t *testing.T) {
		test(t, func(b Backend) Backend {
			to := b.Addr.String()
			b.Dial = func(ctx context.Context) (net.Conn, error) {
				// A dial over loopback needs no timeout. With one, the test would
				// fail on a slow machine.
				var d net.Dialer
				return d.DialContext(context.WithoutCancel(ctx), "tcp", to)
			}
			return b
		})
	})
}

func TestFirstBytesReachABackendThatWasAsleep(t *testing.T) {
	planes(t, func(t *testing.T, wrap func(Backend) Backend) {
		w := &switchWaker{b: wrap(serveTCP(t, echoAll))}
		in, addr := expose(t, startRouter(t), w, Options{})
		c := dialTo(t, addr)
		errtest.Get(c.Write([]byte("first bytes")))(t)
		_ = c.CloseWrite()
		got, err := io.ReadAll(c)
		if err != nil || string(got) != "first bytes" {
			t.Fatalf("got %q, %v", got, err)
		}
		if n := w.calls.Load(); n != 1 {
			t.Errorf("%d wakes, want 1", n)
		}
		if a := w.first(); a.Cause != CauseConnect || a.Port != 80 || a.Remote != netip.MustParseAddrPort(c.LocalAddr().String()) {
			t.Errorf("arrival %+v", a)
		}
		waittest.Until(t, "the count goes back to zero", func() bool { return in.Activity().Open == 0 })
		if s := in.Stats(); s.Accepted != 1 || s.Relayed != 1 || s.Wakes != 1 {
			t.Errorf("stats %+v", s)
		}
	})
}

func TestBulkIsCarriedUnchanged(t *testing.T) {
	planes(t, func(t *testing.T, wrap func(Backend) Backend) {
		w := &switchWaker{b: wrap(serveTCP(t, echoAll))}
		w.up.Store(true)
		in, addr := expose(t, startRouter(t), w, Options{})
		for _, size := range []int{0, 1, copyBuffer - 1, copyBuffer, copyBuffer + 1, 1 << 20, 8<<20 + 13} {
			data := make([]byte, size)
			_, _ = rand.Read(data)
			c := dialTo(t, addr)
			var sent sync.WaitGroup
			sent.Go(func() {
				if _, err := c.Write(data); err != nil {
					t.Error(err)
				}
				_ = c.CloseWrite()
			})
			h := sha256.New()
			n, err := io.Copy(h, c)
			sent.Wait()
			if err != nil || int(n) != size || [32]byte(h.Sum(nil)) != sha256.Sum256(data) {
				t.Fatalf("size %d: got %d bytes, %v; the checksum or the size is wrong", size, n, err)
			}
		}
		waittest.Until(t, "nothing open", func() bool { return in.Activity().Open == 0 })
	})
}

// TestSlowReaderBlocksNobodyElse checks that a client that reads slowly loses no
// bytes, and that others are served meanwhile.
func TestSlowReaderBlocksNobodyElse(t *testing.T) {
	const size = 16 << 20
	w := &switchWaker{b: serveTCP(t, func(c *net.TCPConn) {
		var b [1]byte
		if _, err := io.ReadFull(c, b[:]); err != nil {
			return
		}
		if b[0] == 'b' {
			_, _ = c.Write(bytes.Repeat([]byte("x"), size))
			return
		}
		_, _ = c.Write(b[:])
	})}
	w.up.Store(true)
	in, addr := expose(t, startRouter(t), w, Options{})
	slow := dialTo(t, addr)
	_, _ = slow.Write([]byte("b"))
	waittest.Until(t, "the relay holds bytes for the slow client", func() bool { return in.OpenSince(time.Now().Add(time.Hour)) == 1 })
	for range 50 {
		c := dialTo(t, addr)
		_, _ = c.Write([]byte("a"))
		if b, err := io.ReadAll(c); err != nil || string(b) != "a" {
			t.Fatalf("beside a slow client: %q, %v", b, err)
		}
		c.Close()
	}
	n, err := io.Copy(io.Discard, slow)
	if err != nil || n != size {
		t.Fatalf("the slow client got %d bytes, %v", n, err)
	}
}

func TestHalfCloseBothWays(t *testing.T) {
	planes(t, func(t *testing.T, wrap func(Backend) Backend) {
		served := make(chan string, 1)
		w := &switchWaker{b: wrap(serveTCP(t, func(c *net.TCPConn) {
			// The server shuts down its sending side first, and continues to read.
			_, _ = c.Write([]byte("greeting"))
			_ = c.CloseWrite()
			b, _ := io.ReadAll(c)
			served <- string(b)
		}))}
		w.up.Store(true)
		_, addr := expose(t, startRouter(t), w, Options{})
		c := dialTo(t, addr)
		if b, err := io.ReadAll(c); err != nil || string(b) != "greeting" {
			t.Fatalf("greeting %q, %v", b, err)
		}
		_, _ = c.Write([]byte("after the server's end"))
		_ = c.CloseWrite()
		select {
		case got := <-served:
			if got != "after the server's end" {
				t.Fatalf("server read %q", got)
			}
		case <-time.After(waitLimit):
			t.Fatal("the client's end never came")
		}
	})
}

func TestResetIsPassedOn(t *testing.T) {
	t.Run("to the backend", func(t *testing.T) {
		failed := make(chan error, 1)
		w := &switchWaker{b: serveTCP(t, func(c *net.TCPConn) {
			var b [16]byte
			for {
				if _, err := c.Read(b[:]); err != nil {
					failed <- err
					return
				}
			}
		})}
		w.up.Store(true)
		in, addr := expose(t, startRouter(t), w, Options{})
		c := dialTo(t, addr)
		_, _ = c.Write([]byte("x"))
		waittest.Until(t, "relayed", func() bool { return in.Activity().Moves > 0 })
		_ = c.SetLinger(0)
		c.Close()
		if err := <-failed; !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("the backend read %v, want a reset", err)
		}
	})
	t.Run("to the client", func(t *testing.T) {
		w := &switchWaker{b: serveTCP(t, func(c *net.TCPConn) {
			var b [1]byte
			_, _ = c.Read(b[:])
			_ = c.SetLinger(0)
		})}
		w.up.Store(true)
		_, addr := expose(t, startRouter(t), w, Options{})
		c := dialTo(t, addr)
		_, _ = c.Write([]byte("x"))
		var b [1]byte
		if _, err := c.Read(b[:]); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("the client read %v, want a reset", err)
		}
	})
}

// TestAnswerBeforeTheEndOfTheRequest checks that an answer arrives that a backend
// has sent before it refused the rest of the request.
func TestAnswerBeforeTheEndOfTheRequest(t *testing.T) {
	w := &switchWaker{b: serveTCP(t, func(c *net.TCPConn) {
		var b [1]byte
		_, _ = c.Read(b[:])
		_, _ = c.Write([]byte("too large"))
		_ = c.CloseWrite()
		_, _ = io.CopyN(io.Discard, c, 1<<20)
	})}
	w.up.Store(true)
	_, addr := expose(t, startRouter(t), w, Options{})
	c := dialTo(t, addr)
	var sent sync.WaitGroup
	sent.Go(func() { _, _ = c.Write(make([]byte, 1<<20)) })
	b, err := io.ReadAll(c)
	if err != nil || string(b) != "too large" {
		t.Fatalf("got %q, %v", b, err)
	}
	sent.Wait()
}

func TestBackendThatListensLate(t *testing.T) {
	planes(t, func(t *testing.T, wrap func(Backend) Backend) {
		ln := loopback(t)
		to := ln.Addr().(*net.TCPAddr).AddrPort()
		ln.Close()
		w := &switchWaker{b: wrap(Backend{Addr: to})}
		w.up.Store(true)
		in, addr := expose(t, startRouter(t), w, Options{})
		c := dialTo(t, addr)
		_, _ = c.Write([]byte("x"))
		waittest.Until(t, "being dialled", func() bool { return in.Activity().Open == 1 })
		late, err := net.Listen("tcp", to.String())
		if err != nil {
			t.Skip("the port was taken by another program")
		}
		defer late.Close()
		b, err := late.Accept()
		errtest.None(t, err)
		defer b.Close()
		got := make([]byte, 1)
		if _, err := io.ReadFull(b, got); err != nil || got[0] != 'x' {
			t.Fatalf("%q, %v", got, err)
		}
	})
}

func TestBackendThatNeverListens(t *testing.T) {
	planes(t, func(t *testing.T, wrap func(Backend) Backend) {
		ln := loopback(t)
		to := ln.Addr().(*net.TCPAddr).AddrPort()
		ln.Close()
		w := &switchWaker{b: wrap(Backend{Addr: to})}
		w.up.Store(true)
		in, addr := expose(t, startRouter(t), w, Options{DialTimeout: 50 * time.Millisecond})
		c := dialTo(t, addr)
		if b, err := io.ReadAll(c); err != nil || len(b) != 0 {
			t.Fatalf("got %q, %v, want a clean close", b, err)
		}
		waittest.Until(t, "all counts at zero", func() bool { return in.Activity().Open == 0 })
		if s := in.Stats(); s.Unreachable != 1 || !strings.Contains(s.LastFailure, "refused") {
			t.Errorf("stats %+v", s)
		}
	})
}

// TestRefusalOutlivesTheTimeout checks that, if the timeout expires during an
// attempt, the failure of the previous attempt is reported.
func TestRefusalOutlivesTheTimeout(t *testing.T) {
	attempts := 0
	w := &switchWaker{b: Backend{Dial: func(ctx context.Context) (net.Conn, error) {
		if attempts++; attempts == 1 {
			return nil, syscall.ECONNREFUSED
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}}}
	w.up.Store(true)
	in, addr := expose(t, startRouter(t), w, Options{DialTimeout: 50 * time.Millisecond})
	if b, err := io.ReadAll(dialTo(t, addr)); err != nil || len(b) != 0 {
		t.Fatalf("got %q, %v, want a clean close", b, err)
	}
	waittest.Until(t, "the failure is counted", func() bool { return in.Stats().Unreachable == 1 })
	if s := in.Stats(); !strings.Contains(s.LastFailure, "refused") {
		t.Errorf("stats %+v", s)
	}
}

func TestCloseDrainsAndThenCuts(t *testing.T) {
	w := &switchWaker{b: serveTCP(t, echoAll)}
	w.up.Store(true)
	in, addr := expose(t, startRouter(t), w, Options{})
	stays, ends := dialTo(t, addr), dialTo(t, addr)
	for _, c := range []*net.TCPConn{stays, ends} {
		_, _ = c.Write([]byte("x"))
		errtest.Get(io.ReadFull(c, make([]byte, 1)))(t)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- in.Close(ctx) }()
	waittest.Until(t, "no longer listening", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	_, _ = ends.Write([]byte("y"))
	_ = ends.CloseWrite()
	if b, err := io.ReadAll(ends); err != nil || string(b) != "y" {
		t.Fatalf("an open connection while closing: %q, %v", b, err)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Close: %v, want to hear that it had to cut", err)
	}
	if _, err := stays.Read(make([]byte, 1)); err == nil {
		t.Error("the other connection was not cut")
	}
}
