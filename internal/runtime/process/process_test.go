package process_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/platform/cgroup"
	"lull/internal/runtime/process"
)

// say sends a line and returns the answer.
func say(c net.Conn, line string) (string, error) {
	if err := c.SetDeadline(time.Now().Add(waitLimit)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(c, line); err != nil {
		return "", err
	}
	got, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSpace(got), err
}

// ask connects, sends a line and expects it back.
func ask(addr string) error {
	c, err := net.DialTimeout("tcp", addr, waitLimit)
	if err != nil {
		return err
	}
	defer c.Close()
	got, err := say(c, "hello")
	if err != nil {
		return err
	}
	if !strings.HasSuffix(got, " hello") {
		return fmt.Errorf("answered %q", got)
	}
	return nil
}

// sleep freezes and guards a program as the daemon does. The reasons of wakes go to
// woken.
func sleep(t testing.TB, w instance.Workload, ports []instance.Endpoint, outbound bool) (instance.Guard, chan string) {
	t.Helper()
	errtest.None(t, w.Freeze(waittest.Context(t)))
	woken := make(chan string, 64)
	g, err := w.Guard(ports, outbound, func(why string) {
		select {
		case woken <- why:
		default:
		}
	})
	if err != nil {
		_ = w.Thaw()
		t.Fatal(err)
	}
	return g, woken
}

func wake(t testing.TB, w instance.Workload, g instance.Guard) {
	t.Helper()
	g.Close()
	errtest.None(t, w.Thaw())
}

func reason(t testing.TB, woken chan string) string {
	t.Helper()
	select {
	case why := <-woken:
		return why
	case <-time.After(waitLimit):
		t.Fatal("nothing woke it")
		return ""
	}
}

func quiet(t testing.TB, g instance.Guard, woken chan string) {
	t.Helper()
	if why := g.Pending(); why != "" {
		t.Fatalf("Pending() = %q, want nothing", why)
	}
	select {
	case why := <-woken:
		t.Fatalf("woken by %q, want nothing", why)
	case <-time.After(20 * time.Millisecond):
	}
}

// lookNow samples a program after the cached list of ended connections has expired.
func lookNow(w instance.Workload, ports []instance.Endpoint) instance.Sample {
	<-time.After(60 * time.Millisecond)
	return w.Sample(ports)
}

// lastClosed returns when the newest connection ended, including those that no
// sample has seen.
func lastClosed(s instance.Sample) (at time.Time, err error) {
	if s.Unseen != nil {
		at, err = s.Unseen.Newest(func(time.Time) bool { return false })
		if at.After(s.Unseen.Until) {
			err = fmt.Errorf("one ended at %v, after %v", at, s.Unseen.Until)
		}
	}
	if s.LastClosed.After(at) {
		at = s.LastClosed
	}
	return at, err
}

func TestExitCodes(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		h.start(h.launch("exits0", 1, "sh", "-c", "echo hello; exit 0"))
		h.start(h.launch("exits42", 1, "sh", "-c", "exit 42"))
		h.start(h.launch("killed", 1, "sh", "-c", "kill -9 $$"))
		for id, want := range map[string]instance.Exit{"exits0": {}, "exits42": {Code: 42}, "killed": {Code: 137, Signal: 9}} {
			got := h.exit(id, 1)
			got.At = time.Time{}
			if got != want {
				t.Errorf("%s ended as %+v, want %+v", id, got, want)
			}
		}
		waittest.Until(t, "the log", func() bool { b, _ := os.ReadFile(h.log("exits0")); return string(b) == "hello\n" })
		_, err := h.rt.Start(waittest.Context(t), h.launch("none", 1, "/no/such/program"))
		if !errors.Is(err, syscall.ENOENT) || !strings.Contains(err.Error(), "/no/such/program") {
			t.Errorf("start of what does not exist: %v", err)
		}
		// The ID is used again for another run. Only one run of an ID can exist.
		w := h.start(h.launch("exits42", 2, "sleep", "1000"))
		if _, err := h.rt.Start(waittest.Context(t), h.launch("exits42", 3, "sleep", "1000")); err == nil {
			t.Error("two runs of one instance live")
		}
		errtest.None(t, w.Signal(syscall.SIGTERM))
		if got := h.exit("exits42", 2); got.Signal != int(syscall.SIGTERM) {
			t.Errorf("ended as %+v, want by SIGTERM", got)
		}
		if err := w.Signal(syscall.SIGTERM); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("signal to what has ended: %v, want ESRCH", err)
		}
	})
}

// TestAtWork checks that a program with a thread that uses or wants a CPU is at
// work, and that one that only waits for clients is not.
func TestAtWork(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		at := func(w instance.Workload) bool {
			busy, err := w.(instance.Toiler).AtWork()
			errtest.None(t, err)
			return busy
		}
		spins := h.start(h.launch("spins", 1, "sh", "-c", "sleep 1000 & while :; do :; done"))
		sleeps := h.start(h.launch("sleeps", 1, "sleep", "1000"))
		waittest.Until(t, "a child that spins", func() bool { return at(spins) })
		waittest.Until(t, "one that sleeps", func() bool { return !at(sleeps) })
	})
}

func TestGuardWakes(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		for _, kind := range []string{"echo", "plain", "reuseport", "prefork"} {
			for _, ip := range []string{"127.0.0.1", "::1", "::"} {
				if ip != "127.0.0.1" && len(cfg.Kinds) > 0 && cfg.Kinds[0] == cgroup.V1 {
					continue // addresses and freezers do not affect each other, so not every pair is tested
				}
				addr := port(t, ip)
				name := kind + strings.ReplaceAll(ip, ":", "x")
				w := h.serve(name, 1, kind, addr)
				t.Run(name, func(t *testing.T) { guardOne(t, w, addr) })
				errtest.None(t, w.Kill(waittest.Context(t)))
			}
		}
	})
}

func guardOne(t *testing.T, w instance.Workload, addr string) {
	ports := ends(addr)
	_, p, _ := net.SplitHostPort(addr)
	dial := addr
	if strings.HasPrefix(addr, "[::]") {
		dial = "127.0.0.1:" + p
	}
	waittest.Until(t, "it answers", func() bool { return ask(dial) == nil })
	waittest.Until(t, "no connection", func() bool { return len(lookNow(w, ports).Inbound) == 0 })
	idle, err := net.Dial("tcp", dial)
	errtest.None(t, err)
	defer idle.Close()
	errtest.Get(say(idle, "one"))(t)
	s := lookNow(w, ports)
	if s.ConnErr != nil || len(s.Inbound) != 1 || !s.Inbound[0].Accepted || !s.Inbound[0].Loopback {
		t.Fatalf("Sample() = %+v, want one accepted connection", s)
	}
	// A new connection wakes the program and is answered.
	g, woken := sleep(t, w, ports, false)
	quiet(t, g, woken)
	answer := make(chan error, 1)
	go func() { answer <- ask(dial) }()
	if why := reason(t, woken); !strings.Contains(why, p) {
		t.Errorf("woken by %q, want the port %s in it", why, p)
	}
	waittest.Until(t, "pending", func() bool { return strings.HasPrefix(g.Pending(), "connection waiting") })
	if s := w.Sample(ports); len(s.Inbound) != 2 {
		t.Errorf("while one waits Sample() has %d connections, want 2: %+v", len(s.Inbound), s.Inbound)
	}
	wake(t, w, g)
	if err := <-answer; err != nil {
		t.Fatalf("after the wake: %v", err)
	}
	waittest.Until(t, "the first connection is gone", func() bool { return len(lookNow(w, ports).Inbound) == 1 })
	// Data on an open connection wakes the program, and so does the connection's
	// end.
	g, woken = sleep(t, w, ports, false)
	quiet(t, g, woken)
	errtest.Get(fmt.Fprintln(idle, "two"))(t)
	if why := reason(t, woken); !strings.HasPrefix(why, "data on") {
		t.Errorf("woken by %q, want data", why)
	}
	wake(t, w, g)
	_ = idle.SetReadDeadline(time.Now().Add(waitLimit))
	if got, err := bufio.NewReader(idle).ReadString('\n'); err != nil || !strings.HasSuffix(got, " two\n") {
		t.Fatalf("after the wake: %q, %v", got, err)
	}
	g, woken = sleep(t, w, ports, false)
	quiet(t, g, woken)
	idle.Close()
	if why := reason(t, woken); !strings.HasPrefix(why, "closed") {
		t.Errorf("woken by %q, want a close", why)
	}
	wake(t, w, g)
	waittest.Until(t, "the connection is gone", func() bool { s := lookNow(w, ports); return s.ConnErr == nil && len(s.Inbound) == 0 })
	if at, err := lastClosed(w.Sample(ports)); err != nil || at.IsZero() || time.Since(at) > time.Minute {
		t.Errorf("the last connection ended at %v: %v", at, err)
	}
}

// TestReopenedListener checks that the new listener of a program that has reopened
// it is watched, and that no duplicate keeps the old one open.
func TestReopenedListener(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		addr := port(t, "127.0.0.1")
		w := h.serve("reopens", 1, "reopen", addr)
		for n := 1; n <= 5; n++ {
			g, _ := sleep(t, w, ends(addr), false)
			wake(t, w, g)
			errtest.None(t, w.Signal(syscall.SIGHUP))
			waittest.Until(t, "it opened again", func() bool {
				b, _ := os.ReadFile(h.log("reopens"))
				return strings.Count(string(b), "open\n") == n+1
			})
			g, woken := sleep(t, w, ends(addr), false)
			answer := make(chan error, 1)
			go func() { answer <- ask(addr) }()
			reason(t, woken)
			wake(t, w, g)
			errtest.None(t, <-answer)
		}
	})
}

// TestUnixClients checks that a client of a unix socket counts as an inbound
// connection, accepted or not, until it disconnects.
func TestUnixClients(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		path := h.out("sock")
		w := h.start(h.launch("unix", 1, h.cfg.Shim, "program", "unix", path))
		clients := func(n int, accepted bool) {
			t.Helper()
			waittest.Until(t, fmt.Sprint(n, " clients are counted"), func() bool {
				s := w.Sample(nil)
				return s.ConnErr == nil && len(s.Inbound) == n && !slices.ContainsFunc(s.Inbound, func(c instance.Conn) bool {
					return c.Local != "unix "+path || c.Accepted != accepted
				})
			})
		}
		waittest.Until(t, "it listens", func() bool { c, err := net.Dial("unix", path); return err == nil && c.Close() == nil })
		clients(0, true)
		u, err := net.Dial("unix", path)
		errtest.None(t, err)
		defer u.Close()
		errtest.Get(say(u, "one"))(t)
		clients(1, true)
		errtest.None(t, u.Close())
		clients(0, true)
		g, _ := sleep(t, w, nil, false)
		late, err := net.Dial("unix", path) // a frozen program does not accept it
		errtest.None(t, err)
		defer late.Close()
		clients(1, false)
		wake(t, w, g)
		clients(1, true)

		// A connection between the program's own processes is not use.
		path = h.out("own")
		w = h.start(h.launch("own", 1, h.cfg.Shim, "program", "unix-to-itself", path))
		// The socket's file exists before the program listens.
		waittest.Until(t, "it listens", func() bool { c, err := net.Dial("unix", path); return err == nil && c.Close() == nil })
		clients(0, true)
		other, err := net.Dial("unix", path)
		errtest.None(t, err)
		defer other.Close()
		clients(1, true)
		if table, err := os.ReadFile("/proc/net/unix"); err != nil || strings.Count(string(table), " 03 ") == 0 || strings.Count(string(table), path) < 3 {
			t.Errorf("the connections of %s are not listed: %v", path, err)
		}
	})
}

func TestDatagramsAndUnixSockets(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		addr := port(t, "127.0.0.1")
		w := h.serve("udp", 1, "udp", addr)
		c, err := net.Dial("udp", addr)
		errtest.None(t, err)
		defer c.Close()
		g, woken := sleep(t, w, ends(addr), false)
		quiet(t, g, woken)
		errtest.Get(c.Write([]byte("ping\n")))(t)
		if why := reason(t, woken); !strings.HasPrefix(why, "datagram") {
			t.Errorf("woken by %q, want a datagram", why)
		}
		wake(t, w, g)
		_ = c.SetReadDeadline(time.Now().Add(waitLimit))
		if got, err := bufio.NewReader(c).ReadString('\n'); err != nil || got != "ping\n" {
			t.Fatalf("after the wake: %q, %v", got, err)
		}

		path := h.out("sock")
		w = h.start(h.launch("unix", 1, h.cfg.Shim, "program", "unix", path))
		waittest.Until(t, "it listens", func() bool { c, err := net.Dial("unix", path); return err == nil && c.Close() == nil })
		u, err := net.Dial("unix", path)
		errtest.None(t, err)
		defer u.Close()
		errtest.Get(say(u, "one"))(t)
		waittest.Until(t, "the first client is gone", func() bool {
			g, _ := sleep(t, w, nil, false)
			defer wake(t, w, g)
			return g.Pending() == ""
		})
		g, woken = sleep(t, w, nil, false)
		quiet(t, g, woken)
		errtest.Get(fmt.Fprintln(u, "two"))(t)
		reason(t, woken)
		wake(t, w, g)
		if got, err := bufio.NewReader(u).ReadString('\n'); err != nil || !strings.HasSuffix(got, " two\n") {
			t.Fatalf("after the wake: %q, %v", got, err)
		}
	})
}
