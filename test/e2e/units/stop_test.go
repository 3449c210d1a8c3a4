package units

import (
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// stopAfter is how long the units of these tests are paused before they are
// stopped.
const stopAfter = 400 * time.Millisecond

// visit sends n clients at once and returns how many of them were answered.
func (m *machine) visit(q question, n int) (answered int64) {
	m.t.Helper()
	var wg sync.WaitGroup
	var ok atomic.Int64
	for range n {
		wg.Go(func() {
			if _, err := m.ask(q); err == nil {
				ok.Add(1)
			} else {
				m.t.Logf("a client of %s: %v", q.addr, err)
			}
		})
	}
	wg.Wait()
	return ok.Load()
}

// TestStop checks that idle units are stopped through systemd and started by
// clients, and that all of these are answered.
func TestStop(t *testing.T) {
	m := boot(t)
	database := m.database()
	m.systemctl("start", "nginx", "redis-server")
	for _, p := range []struct {
		unit string
		question
	}{{"nginx.service", askNginx}, {"redis-server.service", askRedis}, {database, askPostgres}} {
		name := m.adopt(hostctl.Adopt{Unit: p.unit, Stop: true, StopAfter: daemontest.Seconds(stopAfter)})
		var slowest time.Duration
		for range scaletest.Count(t, "LULL_UNIT_STARTS", 2) {
			o := m.await(name, "stopped")
			if s := m.show(p.unit, "ActiveState"); s != "inactive" || !o.StartsOnConnection {
				t.Errorf("%s is %s: %+v", p.unit, s, o)
			}
			slowest = max(slowest, m.answers(p.question))
			if s := m.show(p.unit, "ActiveState"); s != "active" {
				t.Errorf("%s is %s", p.unit, s)
			}
		}
		m.await(name, "stopped")
		const clients = 20
		got := m.visit(p.question, clients)
		t.Logf("%s: slowest first answer %s; of %d clients at once, %d were answered", p.unit, slowest.Round(time.Millisecond), clients, got)
		if got != clients {
			t.Errorf("%s: %d clients were turned away", p.unit, clients-got)
		}

		// Releasing a stopped unit starts it again.
		m.await(name, "stopped")
		if err := m.ReleaseAdopted(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		if s := m.show(p.unit, "ActiveState"); s != "active" {
			t.Errorf("%s is released, and %s", p.unit, s)
		}
		m.answers(p.question)
	}
	m.nothingLeft()
}

// TestStopOperators checks that operators can start units that lull has stopped,
// and that no client starts a unit that an operator or a user stops.
func TestStopOperators(t *testing.T) {
	m := boot(t)
	m.systemctl("start", "redis-server", "nginx")
	name := m.adopt(hostctl.Adopt{Unit: "redis-server", Stop: true, StopAfter: daemontest.Seconds(stopAfter)})
	for range scaletest.Count(t, "LULL_UNIT_STARTS", 3) {
		o := m.await(name, "stopped")
		m.systemctl("start", "redis-server")
		m.until(name, "an operator started it", func(n hostctl.Instance) bool {
			return n.StartedAt != nil && n.StartedAt.After(*o.StartedAt) && slices.Contains([]string{"running", "pausing", "paused"}, n.State)
		})
		m.answers(askRedis)
	}
	m.systemctl("stop", "redis-server")
	m.await(name, "stopped")
	m.staysDown("redis-server", askRedis)

	// A unit that a user stops through lull stays stopped until a user starts it.
	if _, err := m.Do(t.Context(), name, "start", nil); err != nil {
		t.Fatal(err)
	}
	m.answers(askRedis)
	if _, err := m.Do(t.Context(), name, "stop", url.Values{}); err != nil {
		t.Fatal(err)
	}
	if s := m.show("redis-server", "ActiveState"); s != "inactive" {
		t.Errorf("stopped by a user, and %s", s)
	}
	m.staysDown("redis-server", askRedis)
	if err := m.ReleaseAdopted(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	if s := m.show("redis-server", "ActiveState"); s != "inactive" {
		t.Errorf("a release started what a user stopped: %s", s)
	}

	// If the daemon is restarted or killed while a unit is stopped, no client is
	// lost.
	name = m.adopt(hostctl.Adopt{Unit: "nginx", Stop: true, StopAfter: daemontest.Seconds(stopAfter)})
	for _, end := range []func(){func() { m.systemctl("stop", "lull-host") }, m.killHost} {
		m.await(name, "stopped")
		if _, err := m.Change(t.Context(), name, hostctl.Change{Labels: map[string]string{"seen": "yes"}}); err != nil { // leaves its sockets alone
			t.Fatal(err)
		}
		end()
		came := make(chan error, 1)
		go func() { _, err := m.ask(askNginx); came <- err }()
		m.startHost()
		if err := waittest.Receive(t, "the client is answered", came); err != nil {
			t.Errorf("a client that came while no daemon ran: %v", err)
		}
	}

	// If the kept sockets are lost together with everything that held them, they
	// are created again.
	m.await(name, "stopped")
	m.systemctl("kill", "--kill-whom=all", "-s", "KILL", "lull-host")
	waittest.Until(t, "the host is gone", func() bool { return m.show("lull-host", "ActiveState") == "failed" })
	m.startHost()
	waittest.NoError(t, "a client is answered", func() error { _, err := m.ask(askNginx); return err })

	// After a reboot, systemd decides what runs.
	m.await(name, "stopped")
	m.systemctl("kill", "--kill-whom=all", "-s", "KILL", "lull-host")
	m.write("/run/boot_id", "01234567-89ab-4def-8123-456789abcdef\n")
	m.run("mount", "--bind", "/run/boot_id", "/proc/sys/kernel/random/boot_id")
	m.startHost()
	m.until(name, "it is systemd's", func(o hostctl.Instance) bool { return o.State == "stopped" && !o.StartsOnConnection })
	m.staysDown("nginx", askNginx)
	m.systemctl("start", "nginx")
	m.until(name, "it is followed", func(o hostctl.Instance) bool { return o.State == "running" || o.State == "paused" })
	m.answers(askNginx)
	if err := m.ReleaseAdopted(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	m.nothingLeft()
}

// staysDown checks that clients are refused and do not start the unit.
func (m *machine) staysDown(unit string, q question) {
	m.t.Helper()
	if _, err := m.ask(q); err == nil || !strings.Contains(err.Error(), "refused") {
		m.t.Errorf("a client of %s: %v", unit, err)
	}
	if waittest.Within(time.Second, func() bool { return m.show(unit, "ActiveState") != "inactive" }) {
		m.t.Errorf("%s was started", unit)
	}
}

// TestSocketUnit checks that a service is stopped although its .socket unit
// listens, and that systemd then starts it for a client.
func TestSocketUnit(t *testing.T) {
	m := boot(t)
	m.write("/etc/systemd/system/hello.socket", "[Socket]\nListenStream=127.0.0.1:99\n")
	m.write("/etc/systemd/system/hello.service", "[Service]\nExecStart=/usr/bin/python3 -c 'import socket, sys\\n"+
		"s = socket.socket(fileno=3)\\nwhile True:\\n c, _ = s.accept()\\n c.recv(9)\\n c.sendall(b\"hello\")\\n c.close()'\n")
	m.systemctl("daemon-reload")
	m.systemctl("start", "hello.socket")
	hello := question{"127.0.0.1:99", "x", "hello"}
	m.answers(hello)
	name := m.adopt(hostctl.Adopt{Unit: "hello", Stop: true, StopAfter: daemontest.Seconds(stopAfter)})
	m.await(name, "paused")
	m.answers(hello)
	for range 2 {
		m.await(name, "stopped")
		m.answers(hello)
		m.until(name, "it is followed", func(o hostctl.Instance) bool { return o.State != "stopped" })
	}
	if err := m.ReleaseAdopted(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	m.nothingLeft()
}
