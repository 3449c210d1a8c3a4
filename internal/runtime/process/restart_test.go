package process_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"
	"lull/internal/runtime/process"
)

func gone(t *testing.T, err error) instance.Exit {
	t.Helper()
	var g *instance.GoneError
	if !errors.As(err, &g) {
		t.Fatalf("error %v, want that the run is over", err)
	}
	return g.Exit
}

func TestAdopt(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		addr := port(t, "127.0.0.1")
		w := h.serve("runs", 1, "echo", addr)
		still := h.start(h.launch("frozen", 1, "sh", "-c", "while :; do echo x >> $OUT; done"))
		waittest.Until(t, "it writes", func() bool { return size(h.out("frozen")) > 10 })
		h.start(h.launch("finishes", 3, "sh", "-c", "until [ -e $OUT ]; do sleep 0.01; done; exit 9"))
		errtest.None(t, still.Freeze(waittest.Context(t)))
		shim := h.shimPID()
		h.close()
		errtest.None(t, os.WriteFile(h.out("finishes"), nil, 0o600))
		waittest.Until(t, "the exit is on disk", func() bool { return exists(h.cfg.Dir + "/exits/finishes.3.json") })
		h.open()
		if h.shimPID() != shim {
			t.Fatalf("another shim: %d, was %d", h.shimPID(), shim)
		}
		// Adopt by the complete identity, and by the run number alone.
		for _, ident := range []instance.Identity{w.Identity(), {Run: 1}} {
			got, err := h.rt.Adopt(waittest.Context(t), "runs", ident)
			errtest.None(t, err)
			if got.Identity() != w.Identity() {
				t.Fatalf("adopted %+v, want %+v", got.Identity(), w.Identity())
			}
			g, woken := sleep(t, got, ends(addr), false)
			answer := make(chan error, 1)
			go func() { answer <- ask(addr) }()
			reason(t, woken)
			wake(t, got, g)
			errtest.None(t, <-answer)
		}
		if e := h.exit("finishes", 3); e.Code != 9 {
			t.Errorf("ended as %+v, want code 9", e)
		}
		_, err := h.rt.Adopt(waittest.Context(t), "finishes", instance.Identity{Run: 3})
		if e := gone(t, err); e.Code != 9 || e.Lost {
			t.Errorf("gone as %+v, want code 9", e)
		}
		// Adopt a frozen run. The shim may have thawed it meanwhile; otherwise the
		// new daemon thaws it.
		got, err := h.rt.Adopt(waittest.Context(t), "frozen", still.Identity())
		errtest.None(t, err)
		errtest.None(t, got.Thaw())
		before := size(h.out("frozen"))
		waittest.Until(t, "it writes again", func() bool { return size(h.out("frozen")) > before })
		// Identities of other runs must not be adopted.
		for name, change := range map[string]func(*instance.Identity){
			"run":   func(i *instance.Identity) { i.Run++; i.Start++ },
			"boot":  func(i *instance.Identity) { i.BootID = "00000000-0000-0000-0000-000000000000"; i.Run = 77 },
			"start": func(i *instance.Identity) { i.Start++; i.Run = 77 },
			"pid":   func(i *instance.Identity) { i.PID = os.Getpid(); i.Run = 77 },
		} {
			ident := w.Identity()
			change(&ident)
			_, err := h.rt.Adopt(waittest.Context(t), "runs", ident)
			if e := gone(t, err); !e.Lost {
				t.Errorf("another %s: gone as %+v, want lost", name, e)
			}
		}
	})
}

// TestExiting checks that a frozen program that was sent SIGTERM counts as exiting,
// also for the next daemon, and that a program that ignores SIGTERM does not.
func TestExiting(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		for id, signals := range map[string][]syscall.Signal{"asked": {syscall.SIGTERM}, "told": {syscall.SIGWINCH}, "left": nil} {
			w := h.start(h.launch(id, 1, "sh", "-c", "trap 'exit 7' TERM; trap : WINCH; while :; do echo x >> $OUT; sleep 0.01; done"))
			waittest.Until(t, "it writes", func() bool { return exists(h.out(id)) })
			errtest.None(t, w.Freeze(waittest.Context(t)))
			for _, sig := range signals {
				errtest.None(t, w.Signal(sig))
			}
			again, err := h.rt.Adopt(waittest.Context(t), id, w.Identity())
			errtest.None(t, err)
			for _, w := range []instance.Workload{w, again} {
				if exiting, err := w.Exiting(); err != nil || exiting != (id == "asked") {
					t.Errorf("%s: exiting %v, %v", id, exiting, err)
				}
			}
			errtest.None(t, w.Thaw())
			if id == "asked" && h.exit(id, 1).Code != 7 {
				t.Error("it did not exit by itself")
			}
		}
	})
}

// TestAdoptWhatEnds checks that Adopt reports how a run ended if it ends between
// the shim's answer and the check of its process.
func TestAdoptWhatEnds(t *testing.T) {
	h := newHost(t, process.Config{})
	for run := range uint64(40) {
		w := h.start(h.launch("finishes", run+1, "sh", "-c", "sleep 0.003; exit 9"))
		for {
			_, err := h.rt.Adopt(waittest.Context(t), "finishes", w.Identity())
			var g *instance.GoneError
			if !errors.As(err, &g) {
				continue // the run still lives, or is about to end
			}
			if g.Exit.Lost || g.Exit.Code != 9 {
				t.Fatalf("run %d is gone as %+v, want code 9", run+1, g.Exit)
			}
			break
		}
	}
}

// TestDaemonGone checks that the shim thaws everything that is frozen when no
// daemon runs.
func TestDaemonGone(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		// This program includes a process whose parents have exited, which must be
		// thawed too.
		w := h.start(h.launch("writes", 1, "sh", "-c", `(setsid sh -c 'while :; do echo y >> $OUT.2; sleep 0.001; done' &); while :; do echo x >> $OUT; sleep 0.001; done`))
		waittest.Until(t, "both write", func() bool { return size(h.out("writes")) > 10 && size(h.out("writes")+".2") > 10 })
		errtest.None(t, w.Freeze(waittest.Context(t)))
		one, two := size(h.out("writes")), size(h.out("writes")+".2")
		<-time.After(20 * time.Millisecond)
		if one != size(h.out("writes")) || two != size(h.out("writes")+".2") {
			t.Fatal("it wrote while frozen")
		}
		h.close()
		waittest.Until(t, "both write again", func() bool { return size(h.out("writes")) > one && size(h.out("writes")+".2") > two })
		waittest.Until(t, "the record of it", func() bool {
			b, _ := os.ReadFile(h.cfg.Dir + "/thawed.json")
			return strings.Contains(string(b), "writes")
		})
		h.open()
		if exists(h.cfg.Dir + "/thawed.json") {
			t.Error("the record stays although the daemon has read it")
		}
		errtest.Get(h.rt.Adopt(waittest.Context(t), "writes", w.Identity()))(t)
	})
}

func size(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.Size()
}

func TestShimKilled(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		addr, held := port(t, "127.0.0.1"), port(t, "127.0.0.1")
		w := h.serve("runs", 1, "echo", addr)
		chatty := h.start(h.launch("chatty", 1, "sh", "-c", "while :; do echo again; sleep 0.01; done"))
		errtest.None(t, h.rt.Hold(waittest.Context(t), "asleep", []string{held}))
		h.ids = append(h.ids, "asleep")
		waiting, err := net.Dial("tcp", held) // waits in the backlog of a program that is not running
		errtest.None(t, err)
		defer waiting.Close()
		errtest.None(t, w.Freeze(waittest.Context(t)))
		for n := 1; n <= 3; n++ {
			old := h.shimPID()
			errtest.None(t, syscall.Kill(old, syscall.SIGKILL))
			waittest.Until(t, "another shim", func() bool {
				h.mu.Lock()
				defer h.mu.Unlock()
				return h.lost == n
			})
			if over(w.Identity().PID) || over(chatty.Identity().PID) {
				t.Fatal("a program ended with the shim")
			}
			logged := size(h.log("chatty"))
			waittest.Until(t, "the log continues", func() bool { return size(h.log("chatty")) > logged })
		}
		errtest.None(t, w.Thaw())
		g, woken := sleep(t, w, ends(addr), false)
		answer := make(chan error, 1)
		go func() { answer <- ask(addr) }()
		reason(t, woken)
		wake(t, w, g)
		errtest.None(t, <-answer)
		// The held port, with the client in its backlog, still exists.
		serves := h.launch("asleep", 1, h.cfg.Shim, "program", "listenfds")
		serves.Listen = []string{held}
		h.start(serves)
		if got, err := say(waiting, "hello"); err != nil || !strings.HasSuffix(got, " hello") {
			t.Fatalf("who waited over three shims got %q, %v", got, err)
		}
		// Their ends are reported, but not their exit codes.
		errtest.None(t, syscall.Kill(chatty.Identity().PID, syscall.SIGKILL))
		if e := h.exit("chatty", 1); !e.Lost {
			t.Errorf("ended as %+v, want lost", e)
		}
	})
}

// TestWatchWhileShimIsReplaced checks that the sockets of a stopped instance are
// watched even if the shim ends just before. Otherwise its clients would wait
// forever.
func TestWatchWhileShimIsReplaced(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		held := port(t, "127.0.0.1")
		errtest.None(t, h.rt.Hold(waittest.Context(t), "asleep", []string{held}))
		h.ids = append(h.ids, "asleep")
		errtest.None(t, syscall.Kill(h.shimPID(), syscall.SIGKILL))
		woken := make(chan string, 8)
		g, err := h.rt.Watch("asleep", func(why string) { woken <- why })
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		c, err := net.Dial("tcp", held)
		errtest.None(t, err)
		defer c.Close()
		reason(t, woken)
	})
}

func TestListenFDs(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		addrs := []string{port(t, "127.0.0.1"), port(t, "::1")}
		start := func(run uint64) instance.Workload {
			l := h.launch("taken", run, h.cfg.Shim, "program", "listenfds")
			l.Listen = addrs
			return h.start(l)
		}
		errtest.None(t, h.rt.Hold(waittest.Context(t), "taken", addrs))
		for run := uint64(1); run <= 3; run++ {
			// While the instance is stopped, a client waits in the kernel, and
			// wakes it.
			woken := make(chan string, 8)
			g, err := h.rt.Watch("taken", func(why string) { woken <- why })
			if err != nil {
				t.Fatal(err)
			}
			answers := make(chan error, 2)
			for _, a := range addrs {
				go func() { answers <- ask(a) }()
			}
			if why := reason(t, woken); !strings.HasPrefix(why, "connection waiting") {
				t.Errorf("woken by %q", why)
			}
			g.Close()
			w := start(run)
			for range addrs {
				errtest.None(t, <-answers)
			}
			g2, woken2 := sleep(t, w, ends(addrs...), false)
			eventuallyQuiet(t, g2)
			go func() { answers <- ask(addrs[1]) }()
			reason(t, woken2)
			wake(t, w, g2)
			errtest.None(t, <-answers)
			errtest.None(t, w.Kill(waittest.Context(t)))
			h.exit("taken", run)
			if run == 2 { // in this run, a new daemon finds the sockets held
				h.close()
				h.open()
			}
		}
		// If shim and daemon die together, the program keeps the port.
		w := start(4)
		for _, a := range addrs {
			errtest.None(t, ask(a))
		}
		pid := h.shimPID()
		h.close()
		errtest.None(t, syscall.Kill(pid, syscall.SIGKILL))
		waittest.Until(t, "the shim is dead", func() bool { return over(pid) })
		h.open()
		w, err := h.rt.Adopt(waittest.Context(t), "taken", w.Identity())
		errtest.None(t, err)
		errtest.None(t, w.Kill(waittest.Context(t)))
		c, err := net.Dial("tcp", addrs[0])
		if err != nil {
			t.Fatalf("after the program ended the port is lost: %v", err)
		}
		c.Close()
		errtest.None(t, h.rt.Unhold(waittest.Context(t), "taken"))
		waittest.Until(t, "the port is free", func() bool { c, err := net.Dial("tcp", addrs[0]); return err != nil || c.Close() != nil })
	})
}

func eventuallyQuiet(t *testing.T, g instance.Guard) {
	t.Helper()
	if p := g.Pending(); p != "" && !strings.HasPrefix(p, "closed by the client") {
		t.Fatalf("Pending() = %q", p)
	}
}

// TestWakeRace checks that clients that arrive around the moment of a freeze are
// answered: either the pause is canceled, or the guard wakes the program. The
// program takes a moment for each answer.
func TestWakeRace(t *testing.T) {
	rounds := scaletest.N(t, 40)
	if os.Getenv("LULL_SOAK") != "" {
		rounds = 6000
	}
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		addr := port(t, "127.0.0.1")
		w := h.serve("raced", 1, "thoughtful", addr)
		ports := ends(addr)
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		rng := rand.New(rand.NewPCG(seed, 1))
		const lead = 1500 * time.Microsecond
		took := lead // duration of a recent freeze
		var cancelled, frozen int
		var early atomic.Int64
		began := time.Now()
		for n := 0; n < rounds || (frozen == 0 || cancelled == 0) && time.Since(began) < 10*time.Second; n++ {
			const clients = 3
			var all sync.WaitGroup
			failed := make(chan error, clients)
			var isFrozen atomic.Bool
			for range clients {
				delay := time.Duration(rng.Int64N(int64(2*lead + 2*took)))
				all.Go(func() {
					spin(delay)
					if !isFrozen.Load() {
						early.Add(1)
					}
					if err := ask(addr); err != nil {
						failed <- err
					}
				})
			}
			spin(lead)
			began := time.Now()
			ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
			errtest.None(t, w.Freeze(ctx))
			cancel()
			isFrozen.Store(true)
			froze := time.Since(began)
			took = (3*took + froze) / 4
			woken := make(chan string, 64)
			g, err := w.Guard(ports, false, func(why string) { woken <- why })
			if err != nil {
				t.Fatal(err)
			}
			pending := g.Pending()
			if in := w.Sample(ports).Inbound; pending == "" && len(in) > 0 {
				// The program has read the request and was frozen before it
				// answered. No socket event shows that, but the open connection
				// keeps the daemon from pausing it.
				pending = "an open connection"
			}
			if pending != "" {
				cancelled++
			} else if done := answered(&all); true { // paused: only the guard can wake the program
				select {
				case <-woken:
					frozen++
				case <-done: // every client was answered before the pause
				case <-time.After(waitLimit):
					t.Fatalf("round %d: accepted and left frozen", n)
				}
			}
			slept := time.Since(began)
			wake(t, w, g)
			all.Wait()
			select {
			case err := <-failed:
				t.Fatalf("round %d: %v; frozen after %s with %q pending, thawed after %s, now %s", n, err, froze, pending, slept, time.Since(began))
			default:
			}
		}
		t.Logf("%d rounds of 3 clients: %d pauses cancelled, %d woken while paused, %d clients began before the freeze was known", rounds, cancelled, frozen, early.Load())
	})
}

func answered(all *sync.WaitGroup) <-chan struct{} {
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	return done
}

// spin waits by polling the clock, which is more precise than a timer.
func spin(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		_ = d
	}
}
