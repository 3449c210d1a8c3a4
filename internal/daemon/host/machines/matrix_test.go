package machines

import (
	"net"
	"net/netip"
	"slices"
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
	b.T.Helper()
	b.Until(b.name, row+": "+reason+" holds it", func(o hostctl.Instance) bool {
		return slices.ContainsFunc(o.Blocks, func(x idle.Block) bool { return string(x.Code)+"/"+x.Signal+x.Holder == reason })
	})
	was := b.get().PauseCount
	for end := time.Now().Add(2 * pauseAfter); time.Now().Before(end); {
		if o := b.get(); o.State != "running" || o.PauseCount != was {
			b.T.Fatalf("%s: it is %s after %d pauses, want it to run on: %s", row, o.State, o.PauseCount-was, o.StatusReason)
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
		return run(d, strings.ReplaceAll(policy, "_", "-"), small(t), []int{80}, func(s *instance.Spec) {
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
	b.Must(b.name, "stop")

	b = guest(instance.PolicyLeasesOnly)
	b.tell(polled)
	b.tell("spin on")
	b.is("paused") // a bot that polls, and computes, is ignored
	b.lease(take)
	b.holds("leases_only with a lease", "lease_held/default")
	b.lease(release)
	b.is("paused")
}
