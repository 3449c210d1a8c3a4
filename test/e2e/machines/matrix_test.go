package machines

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/host/hosttest"
	"lull/internal/protocol/hostctl"
	"lull/internal/runtime/microvm/vnet"
)

const pauseAfter = 2 * time.Second

// holds checks that the guest keeps running for several idle timeouts, and that
// the given reason is why.
func (b *box) holds(reason string) {
	b.T.Helper()
	b.Until(b.name, reason+" holds it", func(o hostctl.Instance) bool {
		return slices.ContainsFunc(o.Blocks, func(x idle.Block) bool { return string(x.Code)+"/"+x.Signal+x.Holder == reason })
	})
	was := b.get().PauseCount
	for end := time.Now().Add(2 * pauseAfter); time.Now().Before(end); {
		if o := b.get(); o.State != "running" || o.PauseCount != was {
			b.T.Fatalf("it is %s after %d pauses, want it to run on: %s", o.State, o.PauseCount-was, o.StatusReason)
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-b.T.Context().Done():
		}
	}
}

// lease takes or releases a lease from inside the guest.
func (b *box) lease(line string) {
	b.T.Helper()
	o, err := b.Exec(b.T.Context(), b.name, hostctl.ExecRequest{Command: []string{"guest", "say", line}})
	if err != nil || !strings.Contains(o.Stdout, `"ok":true`) {
		b.T.Fatalf("%s: %+v, %v", line, o, err)
	}
}

const (
	take    = `{"jsonrpc":"2.0","id":1,"method":"keepalive","params":{"ttl_ms":600000,"reason":"build"}}`
	release = `{"jsonrpc":"2.0","id":2,"method":"keepalive.release","params":{}}`
)

// TestInteractionMatrix checks which signals keep an instance running, in real
// guests: one guest with each policy, and one that may sleep.
func TestInteractionMatrix(t *testing.T) {
	d := host(t)
	polled := "poll " + netip.AddrPortFrom(vnet.HostAddr, polledPort(t)).String()
	guest := func(name, policy string, ports []int, command ...string) *box {
		return run(d, name, sleeper(t), ports, func(s *instance.Spec) {
			after := idle.Duration(pauseAfter)
			s.PauseAfter, s.IdlePolicy, s.Net = &after, policy, instance.NetFull
		}, command...)
	}
	serve := []string{"guest", "serve", ":80"}
	b := guest("server", instance.PolicyDefault, []int{80}, serve...)
	rows := map[string]func(b *box){
		"HTTP server with active requests": func(b *box) {
			c := b.dial(0)
			defer c.Close()
			b.ask(c, "a request")
			b.holds("connection_open/")
		},
		"HTTP server, no requests": func(b *box) { b.is("paused") },
		"Telegram bot polling": func(b *box) {
			if s := b.send(polled); s != "polling" {
				b.T.Fatalf("poll: %s", s)
			}
			b.holds("recent_activity/tcp")
			b.send("unpoll")
			b.is("paused")
		},
		"npm install": func(b *box) {
			b.send("spin on")
			b.holds("recent_activity/cpu")
			b.send("spin off")
			b.is("paused")
		},
		"sleep 300": func(b *box) {
			s := guest("sleeper", instance.PolicyDefault, nil, "sleep", "300")
			s.In(b.T).Await("sleeper", "paused")
		},
		"Build with explicit lease": func(b *box) {
			b.lease(take)
			b.holds("lease_held/default")
			b.lease(release)
			b.is("paused")
		},
		"Bot with leases_only policy, polling": func(b *box) {
			b.send(polled)
			b.send("spin on") // its computation does not count either
			b.is("paused")
		},
		"Bot with leases_only, lease held": func(b *box) {
			b.lease(take)
			b.holds("lease_held/default")
			b.lease(release)
			b.is("paused")
		},
	}
	for n, name := range hosttest.Scenarios {
		if n == 6 { // the first guest with the other policy
			b.Must(b.name, "stop")
			b = guest("bot", instance.PolicyLeasesOnly, []int{80}, serve...)
		}
		t.Run(name, func(t *testing.T) {
			row := *b
			row.Host = b.In(t)
			rows[name](&row)
		})
	}
}

// polledPort starts a server on this machine's loopback that guests poll, and
// returns its port.
func polledPort(t *testing.T) uint16 {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	var open []net.Conn // keeps the connections from being garbage-collected and closed
	go func() {         // ends with the listener
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			open = append(open, c)
		}
	}()
	return netip.MustParseAddrPort(ln.Addr().String()).Port()
}

// sleeper returns the root files of small, with the command sleep added.
func sleeper(t *testing.T) string {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	daemontest.Need(t, err, "busybox-static")
	dir := small(t)
	b, err := os.ReadFile(busybox)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "bin", "sleep"), b, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
