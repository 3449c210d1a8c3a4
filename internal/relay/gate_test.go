package relay

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"lull/internal/lib/waittest"

	"pgregory.net/rapid"
)

// TestGateCountsLikeAModel compares the gate's word with plain counters over random
// operations.
func TestGateCountsLikeAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var g gate
		inside, waiting, moving := 0, 0, 0
		held, asleep := false, false
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "op") {
			case 0:
				if g.enter() != !held {
					t.Fatal("enter and the held flag differ")
				}
				if held {
					waiting++
				} else {
					inside++
				}
			case 1:
				if waiting > 0 {
					if g.reenter() != !held {
						t.Fatal("reenter and the held flag differ")
					}
					if !held {
						waiting--
						inside++
					}
				}
			case 2:
				if inside > 0 {
					g.leaveInside()
					inside--
				}
			case 3:
				if waiting > 0 {
					g.leaveWaiting()
					waiting--
				}
			case 4:
				if inside > 0 {
					g.insideToWaiting()
					inside--
					waiting++
				}
			case 5:
				if g.begin() != (!held && !asleep) {
					t.Fatal("begin and the flags differ")
				}
				if held || asleep {
					waiting++
				} else {
					moving++
				}
			case 6:
				if moving > 0 {
					before := g.activity().Moves
					g.end(true, 7)
					moving--
					if a := g.activity(); a.Moves != before+1 || a.LastByte.UnixNano() != 7 {
						t.Fatalf("a move left no trace: %+v", a)
					}
				}
			case 7:
				g.setHeld()
				held = true
			case 8:
				g.setAsleep()
				held, asleep = false, true
			case 9:
				g.setAwake()
				held, asleep = false, false
			}
			a := g.activity()
			if a.Open != inside || a.Waiting != waiting || a.Moving != moving || a.Held != held || a.Asleep != asleep {
				t.Fatalf("the gate shows %+v; the model has %d inside, %d waiting, %d moving, held %v, asleep %v",
					a, inside, waiting, moving, held, asleep)
			}
		}
	})
}

// fencedWorld is a backend that is frozen only by a fence as in the package
// comment. It answers each byte with one byte. Every connection that has reached it
// is open, and therefore counted, until it has answered. If anything reaches it
// while it is frozen, the gate is faulty.
type fencedWorld struct {
	b       Backend
	in      *Instance
	up      atomic.Bool
	frozen  atomic.Bool
	touched atomic.Int64
	reads   atomic.Int64
	wakes   atomic.Int64

	mu sync.Mutex // one transition at a time
}

func newFencedWorld(t *testing.T, wrap func(Backend) Backend) *fencedWorld {
	w := &fencedWorld{}
	w.b = wrap(serveTCP(t, func(c *net.TCPConn) {
		w.touch()
		var b [1]byte
		for {
			if _, err := io.ReadFull(c, b[:]); err != nil {
				return
			}
			w.touch()
			w.reads.Add(1)
			if _, err := c.Write(b[:]); err != nil {
				return
			}
		}
	}))
	w.up.Store(true)
	return w
}

func (w *fencedWorld) touch() {
	if w.frozen.Load() {
		w.touched.Add(1)
	}
}

func (w *fencedWorld) Ready(int) (Backend, bool) { return w.b, w.up.Load() }

func (w *fencedWorld) Wake(context.Context, Arrival) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.up.Load() {
		return nil
	}
	w.wakes.Add(1)
	w.frozen.Store(false)
	w.up.Store(true)
	w.in.Release()
	return nil
}

// pause tries once to pause the backend. quiet decides whether open connections
// permit that.
func (w *fencedWorld) pause(quiet func(Activity) bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.up.Load() {
		return false
	}
	w.in.Hold()
	dither(40)
	if a := w.in.Activity(); a.Stirred() || !quiet(a) {
		w.in.Release()
		return false
	}
	w.frozen.Store(true)
	w.up.Store(false)
	dither(40)
	w.in.Sleep()
	return true
}

// dither yields the CPU at most n times, a random number of times, which takes a few
// microseconds.
func dither(n int) {
	for range rand.IntN(n) {
		runtime.Gosched()
	}
}

// TestNoConnectionReachesAFrozenBackend starts one to three clients at the same
// moment as the fence, so that they arrive before, during and after it. It checks
// that each is answered, and never by a frozen backend.
func TestNoConnectionReachesAFrozenBackend(t *testing.T) {
	planes(t, func(t *testing.T, wrap func(Backend) Backend) {
		rounds := 2000
		if testing.Short() {
			rounds = 200
		}
		w := newFencedWorld(t, wrap)
		var addr string
		w.in, addr = expose(t, startRouter(t), w, Options{})
		served, paused, cancelled := 0, 0, 0
		for range rounds {
			waittest.Until(t, "nothing is open", func() bool { a := w.in.Activity(); return a.Open == 0 && a.Waiting == 0 })
			var wg sync.WaitGroup
			for range 1 + rand.IntN(3) {
				served++
				wg.Go(func() {
					dither(60)
					if err := oneByte(addr); err != nil {
						t.Errorf("a client was not served: %v", err)
					}
				})
			}
			dither(120)
			if w.pause(func(a Activity) bool { return a.Open == 0 }) {
				paused++
			} else {
				cancelled++
			}
			wg.Wait()
			if t.Failed() {
				return
			}
		}
		t.Logf("%d connections in %d rounds: %d pauses, %d given up at the second look or asleep already, %d wakes",
			served, rounds, paused, cancelled, w.wakes.Load())
		if n := w.touched.Load(); n != 0 {
			t.Errorf("%d times something reached the backend while it was frozen", n)
		}
		if paused == 0 || w.wakes.Load() == 0 {
			t.Error("no connection met a pause: nothing was shown")
		}
	})
}

func oneByte(addr string) error {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(waitLimit))
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	_, err = io.ReadFull(c, make([]byte, 1))
	return err
}

// TestBytesOfQuietConnectionsWake checks that, if open connections do not keep the
// instance awake because they are quiet, their next byte wakes it and does not
// reach it before.
func TestBytesOfQuietConnectionsWake(t *testing.T) {
	planes(t, func(t *testing.T, wrap func(Backend) Backend) {
		bytes, wantPauses := int64(4000), int64(300)
		if testing.Short() {
			bytes, wantPauses = 400, 20
		}
		w := newFencedWorld(t, wrap)
		var addr string
		w.in, addr = expose(t, startRouter(t), w, Options{})
		var sent, answered, pauses atomic.Int64
		end := time.Now().Add(2 * waitLimit)
		enough := func() bool {
			return t.Failed() || time.Now().After(end) || sent.Load() >= bytes && pauses.Load() >= wantPauses
		}
		var wg sync.WaitGroup
		for range 3 {
			c := dialTo(t, addr)
			_ = c.SetDeadline(end.Add(waitLimit))
			wg.Go(func() {
				var b [1]byte
				for first := true; first || !enough(); first = false {
					if _, err := c.Write([]byte("x")); err != nil {
						t.Error(err)
						return
					}
					if _, err := io.ReadFull(c, b[:]); err != nil {
						t.Errorf("a byte was not answered: %v", err)
						return
					}
					sent.Add(1)
					if first {
						answered.Add(1)
					}
					dither(200)
				}
			})
		}
		// Otherwise an open connection might not have been accepted by the backend
		// yet, and would count as quiet.
		waittest.Until(t, "each has been answered", func() bool { return answered.Load() == 3 })
		for !enough() {
			// Open connections are quiet once the backend has read everything sent
			// to it.
			if w.pause(func(a Activity) bool { return a.Open == 3 && int64(a.Moves) == w.reads.Load() }) {
				pauses.Add(1)
			}
			dither(100)
		}
		wg.Wait()
		t.Logf("%d bytes answered, %d pauses, %d wakes", sent.Load(), pauses.Load(), w.wakes.Load())
		if n := w.touched.Load(); n != 0 {
			t.Errorf("%d times a byte reached the backend while it was frozen", n)
		}
		if sent.Load() < bytes || pauses.Load() < wantPauses {
			t.Error("the run ended before enough was tried")
		}
	})
}

// TestCloseOnAnOpenConnectionWakes checks that the close of an open connection
// wakes a paused instance, because the application must see it.
func TestCloseOnAnOpenConnectionWakes(t *testing.T) {
	planes(t, func(t *testing.T, wrap func(Backend) Backend) {
		w := newFencedWorld(t, wrap)
		var addr string
		w.in, addr = expose(t, startRouter(t), w, Options{})
		c := dialTo(t, addr)
		waittest.Until(t, "it is open", func() bool { return w.in.Activity().Open == 1 })
		if !w.pause(func(Activity) bool { return true }) {
			t.Fatal("a quiet instance was not paused")
		}
		c.Close()
		waittest.Until(t, "it is awake again", func() bool { return w.up.Load() })
		waittest.Until(t, "nothing is open", func() bool { return w.in.Activity().Open == 0 && w.in.Activity().Waiting == 0 })
	})
}

func TestHeldArrivalsWaitForRelease(t *testing.T) {
	w := newFencedWorld(t, func(b Backend) Backend { return b })
	var addr string
	w.in, addr = expose(t, startRouter(t), w, Options{})
	w.in.Hold()
	c := dialTo(t, addr)
	_, _ = c.Write([]byte("x"))
	waittest.Until(t, "it waits", func() bool { a := w.in.Activity(); return a.Waiting == 1 && a.Open == 0 && a.Held })
	if n := w.in.Stats().Wakes; n != 0 {
		t.Errorf("%d wakes asked for while the gate was held", n)
	}
	w.in.Release()
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
}
