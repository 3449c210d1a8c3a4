package machines

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// steps records the steps down the ladder that are taken for lack of memory, in
// order, as "NAME STATE".
type steps struct {
	mu  sync.Mutex
	all []string
}

// follow returns steps that are recorded until the test ends.
func follow(d *daemontest.Host) *steps {
	s := &steps{}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		err := d.Follow(ctx, "", func(string) {}, func(e hostctl.Event) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if e.By == "memory" {
				s.all = append(s.all, e.Instance+" "+e.State)
			}
			return nil
		})
		if err != nil {
			d.T.Error(err)
		}
	})
	d.T.Cleanup(func() { cancel(); wg.Wait() })
	return s
}

// since returns the steps after the first n.
func (s *steps) since(n int) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all[n:])
}

// TestMemoryIsShort runs three guests on a host with memory for two and a
// quarter. A start or wake that does not fit must push sleeping guests down the
// ladder, least recently used first, or wait if none sleeps.
func TestMemoryIsShort(t *testing.T) {
	image := small(t)
	roomy := host(t, "--memory", "64G")
	run(roomy, "measure", image, nil, nil, "guest", "serve", ":80")
	st, err := roomy.Status(t.Context())
	errtest.None(t, err)
	size := st.Room.Memory - st.Room.Free
	errtest.None(t, roomy.Remove(t.Context(), "measure"))

	d := host(t, "--memory", fmt.Sprintf("%dM", size*9/4>>20))
	pushed := follow(d)
	guest := func(name string) *box { return run(d, name, image, []int{80}, nil, "guest", "serve", ":80") }
	counts := func(b *box, want int) {
		t.Helper()
		if got := b.send("count"); got != fmt.Sprint("counted ", want) {
			t.Fatalf("%s %s, want %d", b.name, got, want)
		}
	}
	// first checks that, after the first n steps, the younger guest took no step
	// before the older guest took the same step.
	first := func(n int, older, younger *box) {
		t.Helper()
		daemontest.Wait(t, "a step down", func() (bool, string) { return len(pushed.since(n)) > 0, "" })
		got := pushed.since(0)
		for _, state := range []string{"reclaimed", "hibernated"} {
			o, y := slices.Index(got, older.name+" "+state), slices.Index(got, younger.name+" "+state)
			if y >= 0 && (o < 0 || o > y) {
				t.Errorf("the steps down were %q, want %s before %s", got, older.name, younger.name)
			}
		}
		t.Logf("because memory is missing: %q", got)
	}
	// sleeps pauses a guest until it stays paused. The end of a client's
	// connection may wake it first.
	sleeps := func(b *box) {
		t.Helper()
		daemontest.Wait(t, b.name+" stays paused", func() (bool, string) {
			if b.get().State == "running" {
				_ = b.Force(b.name) // the loop checks the result
			}
			return waittest.Stays(300*time.Millisecond, func() bool { return b.get().State == "paused" }), daemontest.Describe(b.get())
		})
	}

	// after makes sure that younger was active after older. A guest that receives
	// the end of a connection late becomes active by that, perhaps after the
	// other fell asleep.
	after := func(older, younger *box) {
		t.Helper()
		daemontest.Wait(t, younger.name+" was active after "+older.name, func() (bool, string) {
			o, y := older.get(), younger.get()
			if o.State == "paused" && y.State == "paused" && y.LastActivityAt.After(*o.LastActivityAt) {
				return true, ""
			}
			sleeps(older)
			if _, err := d.Do(t.Context(), younger.name, "resume", nil); err != nil {
				return false, err.Error()
			}
			sleeps(younger)
			return false, daemontest.Describe(o) + daemontest.Describe(y)
		})
	}

	a, b := guest("a"), guest("b")
	counts(a, 1)
	counts(b, 1)
	sleeps(a)
	sleeps(b)
	after(a, b)
	c := guest("c")
	counts(c, 1)
	first(0, a, b)

	sleeps(c)
	n := len(pushed.since(0))
	counts(a, 2)
	first(n, b, c)
	counts(b, 2)
	a.is("running")
	b.is("running")

	// The only sleeping guest is the one that has to wake.
	if s := c.get().State; s != "reclaimed" && s != "hibernated" {
		t.Errorf("the third is %s while two run", s)
	}
	answer := make(chan string, 1)
	conn := c.dial(0)
	defer conn.Close()
	go func() {
		_, err := fmt.Fprintln(conn, "count")
		line := make([]byte, 64)
		if err == nil {
			var n int
			n, err = conn.Read(line)
			line = line[:n]
		}
		answer <- fmt.Sprintf("%s%v", line, err)
	}()
	o := c.Until("c", "its wake waits", func(o hostctl.Instance) bool { return o.Waiting != nil })
	if o.Waiting.Place != 1 || o.Waiting.Reason == "" || o.State == "running" {
		t.Errorf("it is %s and waits as %+v", o.State, o.Waiting)
	}
	if a.get().State != "running" || b.get().State != "running" {
		t.Errorf("what runs was disturbed: %s and %s", a.get().State, b.get().State)
	}
	a.pause()
	if got := <-answer; got != "counted 2\n<nil>" {
		t.Errorf("the client that waited for room got %q", got)
	}
	if st, err = d.Status(t.Context()); err != nil || st.Room.Pushed == 0 || st.Room.Refused != 0 || st.Room.Waiting != 0 {
		t.Errorf("its room is %+v, %v", st.Room, err)
	}
	counts(b, 3)
}
