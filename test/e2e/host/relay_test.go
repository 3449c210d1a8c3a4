package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
)

// TestRelayQueuesWithoutADaemon checks that clients that connect to the relay
// while the daemon is killed, shut down or restarted wait and are answered. Only
// a connection that the old daemon had accepted may break.
func TestRelayQueuesWithoutADaemon(t *testing.T) {
	shared := daemontest.Addr(t)
	d := host(t, "--probe", "50ms", "--http", shared)
	_, p4, _ := net.SplitHostPort(daemontest.Addr(t))
	_, p6, _ := net.SplitHostPort(daemontest.Addr(t))
	_, pa, _ := net.SplitHostPort(daemontest.Addr(t))
	listen := map[string]string{"v4": "127.0.0.1:" + p4, "v6": "[::1]:" + p6, "all": "0.0.0.0:" + pa, "stopped": daemontest.Addr(t)}
	for name, addr := range listen {
		target := daemontest.Addr(t)
		s := spec(name, "serve", "-listen", target)
		s.PauseAfter = daemontest.Seconds(200 * time.Millisecond)
		if name == "stopped" {
			s.StopAfter = daemontest.Seconds(100 * time.Millisecond)
		}
		s.Expose = []instance.Endpoint{{Listen: addr, Target: target}}
		d.Launch(s)
	}
	addrs := []string{listen["v4"], listen["v6"], "127.0.0.1:" + pa, "[::1]:" + pa, listen["stopped"]}
	rounds := scaletest.Count(t, "LULL_RELAY_KILLS", 3)
	var answered, cut, queued atomic.Int64
	for n := range rounds {
		ctx, cancel := context.WithCancel(t.Context())
		var busy sync.WaitGroup
		for _, addr := range addrs { // before, during and after
			busy.Go(func() {
				for ctx.Err() == nil {
					switch got, err := once(addr, "hello"); {
					case err == nil && got == "echo hello":
						answered.Add(1)
					case errors.Is(err, syscall.ECONNREFUSED):
						t.Errorf("%s refused a client: %v", addr, err)
						return
					default:
						cut.Add(1)
					}
				}
			})
		}
		if n%2 == 0 {
			d.Await("stopped", "running")
		}
		if n%2 == 1 { // in order
			_ = syscall.Kill(d.PID(), syscall.SIGTERM)
			daemontest.Wait(t, "the daemon has ended", func() (bool, string) { return d.Over(), "it runs" })
		}
		d.Kill()
		var waiting sync.WaitGroup
		for _, addr := range addrs {
			for range 3 { // only the next daemon accepts them
				c, err := dial(addr)
				if err != nil {
					t.Fatalf("round %d: %s without a daemon: %v", n, addr, err)
				}
				waiting.Go(func() {
					defer c.Close()
					if err := c.echo("queued"); err != nil {
						t.Errorf("a client of %s that came without a daemon: %v", addr, err)
					}
					queued.Add(1)
				})
			}
		}
		waiting.Go(func() {
			if r, err := http.Get("http://" + shared); err != nil {
				t.Errorf("the shared port without a daemon: %v", err)
			} else {
				r.Body.Close()
			}
		})
		d.Boot()
		waiting.Wait()
		cancel()
		busy.Wait()
	}
	t.Logf("REPORT relay without a daemon: %d kills and ends, %d clients queued and answered, %d others answered, %d cut, 0 refused",
		rounds, queued.Load(), answered.Load(), cut.Load())

	d.Kill()
	errtest.None(t, syscall.Kill(d.ShimPID(), syscall.SIGKILL))
	d.Boot()
	for _, addr := range addrs {
		mustAnswer(t, addr)
	}
	shim := d.ShimPID() // another shim holds the daemon's duplicates
	errtest.None(t, syscall.Kill(shim, syscall.SIGKILL))
	daemontest.Wait(t, "another shim has the port", func() (bool, string) {
		p := d.ShimPID()
		return p > 0 && p != shim && listens(t, p, p4), fmt.Sprint("process ", p)
	})
	d.Kill()
	c := mustDial(t, listen["v4"])
	d.Boot()
	if err := c.echo("after both"); err != nil {
		t.Errorf("after the shim and then the daemon were killed: %v", err)
	}
}

// listens reports whether a process has the listening socket of an IPv4 port.
func listens(t *testing.T, pid int, port string) bool {
	t.Helper()
	n, err := strconv.Atoi(port)
	errtest.None(t, err)
	b, err := os.ReadFile("/proc/net/tcp")
	errtest.None(t, err)
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	errtest.None(t, err)
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 10 || !strings.HasSuffix(f[1], fmt.Sprintf(":%04X", n)) || f[3] != "0A" {
			continue
		}
		for _, fd := range fds {
			if to, err := os.Readlink(fd); err == nil && to == "socket:["+f[9]+"]" {
				return true
			}
		}
	}
	return false
}

// TestRelayPortsCloseForGood checks that the port of a relayed instance is closed
// when the instance is removed, even if the daemon was killed before it could
// close it, and that another instance can then use it.
func TestRelayPortsCloseForGood(t *testing.T) {
	d := host(t)
	closed := func(addr string) {
		t.Helper()
		c, err := net.DialTimeout("tcp", addr, daemontest.WaitLimit)
		if err == nil {
			c.Close()
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("a connection to the port of a removed instance: %v, want it refused", err)
		}
	}
	a, addr := web(t, "a", true)
	d.Launch(a)
	mustAnswer(t, addr)
	errtest.None(t, d.Remove(t.Context(), "a"))
	closed(addr)
	a.Name = "again"
	o := d.Launch(a)
	mustAnswer(t, addr)
	d.Must("again", "stop")
	d.Kill()
	errtest.None(t, os.Remove(filepath.Join(d.Dir, "data/instances", o.ID+".json")))
	d.Boot()
	closed(addr)
	a.Name = "third"
	d.Launch(a)
	mustAnswer(t, addr)
}
