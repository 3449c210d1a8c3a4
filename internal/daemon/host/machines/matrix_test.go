package machines

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"lull/internal/edge/runtime/microvm/vnet"
	"lull/internal/idle"
	"lull/internal/instance"
	"lull/internal/link/hostctl"
)

const pauseAfter = 2 * time.Second

// holds checks that the guest keeps running over several idle times, for the
// given reason.
func (b *box) holds(row, reason string) {
	b.t.Helper()
	b.await(row+": "+reason+" holds it", func() (bool, string) {
		o := b.get()
		for _, x := range o.Blocks {
			if string(x.Code)+"/"+x.Signal+x.Holder == reason {
				return true, ""
			}
		}
		return false, fmt.Sprintf("it is %s, blocks %+v", o.State, o.Blocks)
	})
	was := b.get().PauseCount
	for end := time.Now().Add(2 * pauseAfter); time.Now().Before(end); {
		if o := b.get(); o.State != "running" || o.PauseCount != was {
			b.t.Fatalf("%s: it is %s after %d pauses, want it to run on: %s", row, o.State, o.PauseCount-was, o.StatusReason)
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-b.t.Context().Done():
		}
	}
}

// lease takes or releases a lease from inside the guest.
func (b *box) lease(line string) {
	b.t.Helper()
	o, err := b.Exec(b.t.Context(), b.name, hostctl.ExecRequest{Command: []string{"guest", "say", line}})
	if err != nil || !strings.Contains(o.Stdout, `"ok":true`) {
		b.t.Fatalf("%s: %+v, %v", line, o, err)
	}
}

const (
	take    = `{"jsonrpc":"2.0","id":1,"method":"keepalive","params":{"ttl_ms":600000,"reason":"build"}}`
	release = `{"jsonrpc":"2.0","id":2,"method":"keepalive.release","params":{}}`
)

// TestInteractionMatrix is seeds/004, section 6, row by row, inside real guests:
// one with each policy.
func TestInteractionMatrix(t *testing.T) {
	d := host(t)
	// What the guests poll: somebody outside, here this machine's loopback.
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	var open []net.Conn // kept: one that nobody holds is closed
	go func() {         // ends with the listener
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			open = append(open, c)
		}
	}()
	polled := "poll " + netip.AddrPortFrom(vnet.HostAddr, netip.MustParseAddrPort(ln.Addr().String()).Port()).String()
	guest := func(policy string) *box {
		return d.run(strings.ReplaceAll(policy, "_", "-"), small, []int{80}, func(s *instance.Spec) {
			after := idle.Duration(pauseAfter)
			s.PauseAfter, s.IdlePolicy, s.Net = &after, policy, instance.NetFull
		}, "guest", "serve", ":80")
	}
	b := guest(instance.PolicyDefault)
	c := b.dial(0)
	b.ask(c, "a request")
	b.holds("HTTP server with active requests", "connection_open/")
	c.Close()
	b.is("paused") // HTTP server, no requests; sleep 300
	if s := b.tell(polled); s != "polling" {
		t.Fatalf("poll: %s", s)
	}
	b.holds("bot that polls", "recent_activity/tcp")
	b.tell("unpoll")
	b.is("paused")
	b.tell("spin on")
	b.holds("npm install", "recent_activity/cpu")
	b.tell("spin off")
	b.is("paused")
	b.lease(take)
	b.holds("build with a lease", "lease_held/default")
	b.lease(release)
	b.is("paused")
	b.do("stop", nil)

	b = guest(instance.PolicyLeasesOnly)
	b.tell(polled)
	b.tell("spin on")
	b.is("paused") // a bot that polls, and computes, is ignored
	b.lease(take)
	b.holds("leases_only with a lease", "lease_held/default")
	b.lease(release)
	b.is("paused")
}
