package host

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/hostctl"
)

// TestLongPollIsAnswered checks that an unanswered request keeps the instance
// running however long its connection has been quiet, on both paths, even if it
// directly followed an answer. A connection whose requests are answered must not.
func TestLongPollIsAnswered(t *testing.T) {
	t.Parallel()
	onBothPaths(t, func(t *testing.T, d *daemontest.Host, relay bool) {
		s, addr := web(t, fmt.Sprintf("poll-%t", relay), relay)
		s.QuietConnectionAfter = *daemontest.Seconds(150 * time.Millisecond)
		d.Launch(s)
		c := mustDial(t, addr)
		for range 3 {
			for n := range 4 {
				errtest.None(t, c.echo(fmt.Sprint("before ", n)))
			}
			sent := time.Now() // a pause before this time is allowed
			if got, err := c.ask("wait 1500ms"); err != nil || got != "waited" {
				t.Fatalf("the long poll got %q: %v", got, err)
			}
			if o := d.Show(s.Name); o.LastPausedAt != nil && o.LastPausedAt.After(sent) {
				t.Errorf("paused %s after a client began to wait", o.LastPausedAt.Sub(sent))
			}
			d.Await(s.Name, "paused") // the connection is open but quiet again
		}
	})
}

// TestOutboundRequests checks that an outbound connection with an unanswered
// request keeps the instance running, and that an idle one does not.
func TestOutboundRequests(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "100ms", "--pause-after", "200ms")
	ln, err := net.Listen("tcp", ownAddress(t)+":0")
	errtest.None(t, err)
	defer ln.Close()
	s := spec("pool", "poll", ln.Addr().String(), "1h")
	s.QuietConnectionAfter, s.PauseAfter = *daemontest.Seconds(150 * time.Millisecond), daemontest.Seconds(200*time.Millisecond)
	d.Launch(s)
	c, err := ln.Accept()
	errtest.None(t, err)
	defer c.Close()
	errtest.Get(io.ReadFull(c, make([]byte, len("anything new?\n"))))(t)
	seen := map[time.Time]bool{}
	d.Until("pool", "was seen ten times waiting for its answer", func(o hostctl.Instance) bool {
		if o.PauseCount > 0 {
			t.Fatal("it was paused while it waited for an answer")
		}
		for _, r := range o.Activity {
			if r.Signal == "tcp" && r.Value > 0 && r.Detail != "" {
				seen[r.At] = true
			}
		}
		return len(seen) >= 10
	})
	errtest.Get(io.WriteString(c, "nothing\n"))(t)
	d.Await("pool", "paused")
	if _, err := io.WriteString(c, "something\n"); err != nil { // data wakes it, even on an ignored connection
		t.Fatal(err)
	}
	d.Until("pool", "was woken", func(o hostctl.Instance) bool { return o.WakeCount > 0 })
}
