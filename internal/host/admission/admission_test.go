package admission

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/admit"
	"lull/internal/core/power"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/hostctl"
)

// guest is an instance that goes to a deeper state as soon as it is asked.
type guest struct {
	size  int64
	mu    sync.Mutex
	state power.Instance
}

func (g *guest) is() power.Instance {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.state
}

func (g *guest) set(s power.Instance) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.state = s
}

func (g *guest) Size() int64 { return g.size }

func (g *guest) Needs() (int64, bool) {
	if g.is() == power.Stopped || g.is() == power.Hibernated {
		return g.size, true
	}
	return 0, false
}

func (g *guest) Holds() int64 {
	if need, _ := g.Needs(); need > 0 {
		return 0
	}
	return g.size
}

func (g *guest) Sleeper() (admit.Sleeper, bool) {
	return admit.Sleeper{State: g.is(), Holds: g.Holds(), Hibernate: true}, g.is() == power.Paused
}

func (g *guest) PushDown(to power.Instance) bool {
	time.Sleep(100 * time.Millisecond) // saving takes a while
	g.set(to)
	return true
}

// machine is a Controller with its instances, in a synctest bubble.
type machine struct {
	*Controller
	guests []*guest
	halted atomic.Bool
}

func on(t *testing.T, o Options, sizes []int64, f func(m *machine)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := &machine{}
		for _, size := range sizes {
			m.guests = append(m.guests, &guest{size: size, state: power.Stopped})
		}
		var busy sync.WaitGroup
		o.Ctx, o.Now, o.Spawn, o.Halted = t.Context(), time.Now, busy.Go, m.halted.Load
		o.Sorted = func() (out []Instance) {
			for _, g := range m.guests {
				out = append(out, g)
			}
			return out
		}
		o.Each = func(yield func(Instance)) {
			for _, g := range m.guests {
				yield(g)
			}
		}
		m.Controller = New(o)
		f(m)
		busy.Wait()
		if s := m.Snapshot(); len(s.Waiting)+s.Taken+len(s.Given) != 0 || s.Making {
			t.Errorf("left at the end: %+v", s)
		}
	})
}

// start starts a guest, which takes the given time.
func (m *machine) start(g *guest, takes time.Duration, q Request) error {
	if q.Over == nil {
		q.Over = func() error { return nil }
	}
	if q.Waits == nil {
		q.Waits = func(string) {}
	}
	l, err := m.Admit(context.Background(), g, q)
	if err != nil {
		return err
	}
	time.Sleep(takes)
	g.set(power.Running)
	l.End()
	return nil
}

// TestErrors checks the error for each reason for which a request is refused.
func TestErrors(t *testing.T) {
	on(t, Options{Memory: 100, Wait: time.Minute}, []int64{60, 50, 101}, func(m *machine) {
		errtest.None(t, m.start(m.guests[0], 0, Request{}))
		var large *TooLargeError
		if err := m.start(m.guests[2], 0, Request{}); !errors.As(err, &large) || large.Needs != 101 || large.Memory != 100 {
			t.Errorf("what never fits: %v", err)
		}
		began, waits := time.Now(), ""
		var busy *BusyError
		err := m.start(m.guests[1], 0, Request{Name: "b", What: "wake", Waits: func(why string) { waits = why }})
		if !errors.As(err, &busy) || busy.Name != "b" || busy.What != "wake" || busy.Waited != time.Minute || time.Since(began) != time.Minute || waits != busy.Reason || waits == "" {
			t.Errorf("without room: %v, waits: %q", err, waits)
		}
		gone, stopped := errors.New("stopped"), atomic.Bool{}
		ended := make(chan error, 1)
		go func() {
			ended <- m.start(m.guests[1], 0, Request{Over: func() error {
				if stopped.Load() {
					return gone
				}
				return nil
			}})
		}()
		synctest.Wait()
		if w := m.Waiting(m.guests[1]); w == nil || w.Place != 1 || m.Waiting(m.guests[0]) != nil {
			t.Errorf("waits as %+v", w)
		}
		m.Recheck(func() { stopped.Store(true) })
		if err := <-ended; !errors.Is(err, gone) {
			t.Errorf("a request that is over: %v", err)
		}
		want := hostctl.Capacity{Memory: 100, Free: 40, Longest: 1, Granted: 1, Refused: 1}
		if got := m.Status(); got != want {
			t.Errorf("room %+v, want %+v", got, want)
		}
	})
}

// TestPushesDown checks that a sleeping instance gives up its memory for another,
// except during a halt.
func TestPushesDown(t *testing.T) {
	on(t, Options{Memory: 100, Wait: time.Minute}, []int64{60, 50}, func(m *machine) {
		a, b := m.guests[0], m.guests[1]
		errtest.None(t, m.start(a, 0, Request{}))
		a.set(power.Paused)
		m.halted.Store(true)
		var busy *BusyError
		if err := m.start(b, 0, Request{}); !errors.As(err, &busy) || a.is() != power.Paused {
			t.Errorf("during a halt: %v, a is %s", err, a.is())
		}
		m.halted.Store(false)
		if err := m.start(b, 0, Request{}); err != nil || a.is() != power.Hibernated || m.Status().Pushed != 1 {
			t.Errorf("after it: %v, a is %s, %+v", err, a.is(), m.Status())
		}
	})
}

// TestNeverBeyondTheBudget starts and ends instances of random sizes from many
// goroutines. It checks that the memory in use or granted never exceeds the limit,
// that no more instances boot concurrently than there are slots, and that every
// request that can be satisfied is.
func TestNeverBeyondTheBudget(t *testing.T) {
	rnd := scaletest.Random(t)
	sizes := make([]int64, 15)
	for n := range sizes {
		sizes[n] = 10 + rnd.Int64N(90)
	}
	const memory, places = 200, 2
	stay := make([]time.Duration, len(sizes))
	on(t, Options{Memory: memory, Places: places, Wait: 24 * time.Hour}, sizes, func(m *machine) {
		var booting, most atomic.Int32
		check := func() {
			held := int64(0)
			for _, g := range m.guests {
				held += g.Holds()
			}
			if held > memory {
				t.Errorf("%d of %d are held", held, memory)
			}
			if n := booting.Load(); n > places {
				t.Errorf("%d boot at once", n)
			}
			most.Store(max(most.Load(), booting.Load()))
		}
		var wg sync.WaitGroup
		for n, g := range m.guests {
			stay[n] = time.Duration(1+rnd.IntN(20)) * time.Second
			sleeps := rnd.IntN(2) == 0
			wg.Go(func() {
				for range 10 {
					l, err := m.Admit(context.Background(), g, Request{Over: func() error { return nil }, Waits: func(string) {}})
					if err != nil {
						t.Errorf("a request was refused: %v", err)
						return
					}
					booting.Add(1)
					check()
					time.Sleep(time.Second)
					g.set(power.Running)
					booting.Add(-1)
					l.End()
					check()
					time.Sleep(stay[n])
					if sleeps {
						g.set(power.Paused)
					} else {
						g.set(power.Stopped)
					}
					m.Kick()
					time.Sleep(stay[n])
					g.set(power.Stopped)
					m.Kick()
				}
			})
		}
		wg.Wait()
		if s := m.Status(); s.Granted != 10*uint64(len(sizes)) || s.Longest < 2 || s.Pushed == 0 || most.Load() != places {
			t.Errorf("too little was tried: %+v, %d booted at once", s, most.Load())
		}
	})
}
