package host

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/host/hosttest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

const (
	soon  = 2 * time.Second // pause-after of the matrix; with a shorter one, a child that gets no CPU for a while would look idle
	watch = 6 * time.Second // how long an instance that must keep running is watched
)

// row is one combination of the interaction matrix.
type row struct {
	name   string // name of the instance
	of     string // row of the matrix; empty for an additional rule
	args   []string
	policy string
	serves bool // has an exposed port
	asked  bool // clients send requests continuously
	lease  bool
	sleeps bool   // it must be paused
	by     string // otherwise the signal or holder that must keep it running
}

// TestMatrix checks the whole interaction matrix, row by row, on real processes.
// It also checks two rules about CPU: a busy grandchild keeps its instance
// running although it left its session and its parents exited, and a few
// scheduler ticks do not.
func TestMatrix(t *testing.T) {
	peer := pollServer(t)
	rows := []row{
		{name: "http-active", of: "HTTP server with active requests", serves: true, asked: true, by: "connection_open"},
		{name: "http-none", of: "HTTP server, no requests", serves: true, sleeps: true},
		{name: "polling", of: "Telegram bot polling", args: []string{"poll", peer, "50ms"}, by: "tcp"},
		{name: "build", of: "npm install", args: []string{"burn", "2", "2m"}, by: "cpu"},
		{name: "sleeper", of: "sleep 300", args: nil, sleeps: true},
		{name: "build-leased", of: "Build with explicit lease", args: []string{"burn", "2", "2m"}, policy: instance.PolicyLeasesOnly, lease: true, by: "lease_held"},
		{name: "bot", of: "Bot with leases_only policy, polling", args: []string{"poll", peer, "50ms"}, policy: instance.PolicyLeasesOnly, sleeps: true},
		{name: "bot-leased", of: "Bot with leases_only, lease held", args: []string{"poll", peer, "50ms"}, policy: instance.PolicyLeasesOnly, lease: true, by: "lease_held"},
		{name: "detached", args: []string{"burn", "3", "detach", "2m"}, by: "cpu"},
		{name: "ticks", args: []string{"tick", "100ms"}, sleeps: true},
	}
	var of []string
	for _, r := range rows {
		if r.of != "" {
			of = append(of, r.of)
		}
	}
	if !slices.Equal(of, hosttest.Scenarios) {
		t.Errorf("the rows are %q, want %q", of, hosttest.Scenarios)
	}
	d := host(t, "--probe", "1s", "--pause-after", soon.String())
	t.Run("rows", func(t *testing.T) {
		for _, r := range rows {
			t.Run(cmp.Or(r.of, r.name), func(t *testing.T) { t.Parallel(); r.prove(t, d) })
		}
	})
}

func (r row) prove(t *testing.T, d *daemontest.Host) {
	d = d.In(t)
	s := spec(r.name, r.args...)
	addr := ""
	switch {
	case r.serves:
		s, addr = web(t, r.name, false)
	case r.args == nil:
		s.Command = []string{"sleep", "300"}
	}
	s.IdlePolicy, s.StopGrace = r.policy, *daemontest.Seconds(time.Second)
	s.PauseAfter = daemontest.Seconds(soon) // most rows expose no port, and pause only because of this setting
	d.Launch(s)
	defer func() {
		if err := d.Remove(context.Background(), r.name); err != nil {
			t.Error(err)
		}
	}()
	if r.lease {
		hold(d, r.name, "build")
	}
	if r.asked {
		defer keepAsking(t, addr)()
	}
	if r.sleeps {
		o := d.Await(r.name, "paused")
		t.Logf("REPORT matrix %s: paused, %s", r.name, o.StatusReason)
		return
	}
	if !waittest.Stays(watch, func() bool { return d.Show(r.name).PauseCount == 0 }) {
		o := d.Show(r.name)
		t.Fatalf("it is %s (%s), want running for %s", o.State, o.StatusReason, watch)
	}
	found := ""
	d.Until(r.name, "a block names "+r.by, func(o hostctl.Instance) bool {
		for _, b := range o.Blocks {
			if string(b.Code) == r.by {
				found = b.Sentence
			}
		}
		for _, a := range o.Activity {
			if a.Signal == r.by && a.State == idle.Active {
				found = fmt.Sprintf("%s %v %s, threshold %v", a.Signal, a.Value, a.Unit, a.Threshold)
			}
		}
		return found != ""
	})
	t.Logf("REPORT matrix %s: running for %s, pause-after %s: %s", r.name, watch, soon, found)
}

// keepAsking sends requests without a pause until stop is called.
func keepAsking(t *testing.T, addr string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			if _, err := once(addr, "wait 150ms"); err != nil {
				t.Errorf("a request failed: %v", err)
				return
			}
		}
	})
	return func() { cancel(); wg.Wait() }
}

// pollServer starts a server for a polling client, on an address that is not
// loopback.
func pollServer(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", net.JoinHostPort(ownAddress(t), "0"))
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() { ln.Close(); wg.Wait() })
	return ln.Addr().String()
}
