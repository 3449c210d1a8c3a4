package units

import (
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// inEffect reports whether systemd has loaded a unit with lull's drop-in.
func (m *machine) inEffect(unit string) bool {
	m.t.Helper()
	return strings.Contains(m.show(unit, "DropInPaths"), dropInOf(unit))
}

// TestDropInOperators checks that a unit with a drop-in obeys systemctl, the files of the
// unit and their changes as it does without lull.
func TestDropInOperators(t *testing.T) {
	m := boot(t)
	const unit = "redis-server.service"
	m.systemctl("start", unit)
	ask := func(string) (string, error) {
		return m.askFrom("127.0.0.1", "tcp", askRedis.addr, "CONFIG GET maxclients\r\nQUIT\r\n")
	}
	name := m.adopt(hostctl.Adopt{Unit: unit, Stop: true, DropIn: true, StopAfter: daemontest.Seconds(stopAfter)})
	m.filtered(name, unit, ask)

	// What lull has stopped can be started with systemctl, and gets its sockets; a start
	// that does nothing changes nothing.
	o := m.await(name, "stopped")
	m.systemctl("stop", unit)
	m.systemctl("try-restart", unit)
	m.systemctl("start", unit)
	m.until(name, "an operator started it", func(n hostctl.Instance) bool { return n.StartedAt.After(*o.StartedAt) && n.State != "starting" })
	m.answers(askRedis)
	m.await(name, "stopped")
	m.answers(askRedis)
	m.systemctl("restart", unit)
	m.answers(askRedis)
	m.systemctl("stop", unit)
	m.await(name, "stopped")
	m.staysDown(unit, askRedis)
	m.systemctl("start", unit)
	m.answers(askRedis)

	// A command that an operator changes applies at once.
	m.await(name, "stopped")
	const override = "/etc/systemd/system/redis-server.service.d/override.conf"
	m.write(override, "[Service]\nExecStart=\nExecStart=/usr/bin/redis-server /etc/redis/redis.conf --supervised systemd --daemonize no --maxclients 77\n")
	m.systemctl("daemon-reload")
	m.systemctl("restart", unit)
	if s, err := ask(""); err != nil || !strings.Contains(s, "77") {
		t.Errorf("after a change of the unit: %q, %v", s, err)
	}
	waittest.Until(t, "the drop-in has the new command", func() bool {
		return m.inEffect(unit) && strings.Contains(m.run("cat", dropInOf(unit)), "--maxclients 77")
	})
	m.filtered(name, unit, ask)

	// Hardening that forbids the handoff is respected: clients are relayed again.
	m.await(name, "stopped")
	m.write(override, "[Service]\nType=simple\nRestrictAddressFamilies=\nRestrictAddressFamilies=AF_INET AF_INET6\n"+
		"ExecStart=\nExecStart=/usr/bin/redis-server /etc/redis/redis.conf --daemonize no\n")
	m.systemctl("daemon-reload")
	waittest.Until(t, "there is no drop-in", func() bool { return !m.exists(dropInOf(unit)) && !m.inEffect(unit) })
	for range 2 {
		m.answers(askRedis)
		m.await(name, "stopped")
	}
	if _, err := m.DropIn(t.Context(), hostctl.Adopt{Unit: unit}); !strings.Contains(refused(err), "RestrictAddressFamilies") && !strings.Contains(refused(err), "inactive") {
		t.Errorf("planned for a unit without AF_UNIX: %v", err)
	}
	m.run("rm", override)
	m.systemctl("daemon-reload")
	waittest.Until(t, "the drop-in is back", func() bool { return m.inEffect(unit) })

	// One that an operator removes stays removed, also for the next daemon.
	m.run("rm", dropInOf(unit))
	m.systemctl("daemon-reload")
	m.systemctl("restart", "lull-host")
	waittest.NoError(t, "the host answers", func() error { _, err := m.List(t.Context()); return err })
	for range 2 {
		m.await(name, "stopped")
		m.answers(askRedis)
	}
	if m.exists(dropInOf(unit)) {
		t.Error("lull wrote again what an operator removed")
	}
	errtest.None(t, m.ReleaseAdopted(t.Context(), name))
	m.noDropIns()
	m.nothingLeft()
}

// TestDropInKilled checks that the drop-in goes with the setting that it serves, and
// that a daemon that is killed at any moment leaves unit and drop-in consistent.
func TestDropInKilled(t *testing.T) {
	m := boot(t)
	const unit = "nginx.service"
	m.systemctl("start", unit)
	verb := []string{"lull", "adopt", "unit", "nginx", "--pause-after", "400ms", "--stop", "--stop-after", "100ms", "--drop-in"}
	if shown := m.run(append(verb, "--dry-run")...); !strings.Contains(shown, dropInOf(unit)) || m.exists(dropInOf(unit)) {
		t.Errorf("a dry run shows %s", shown)
	}
	if out, err := m.command(verb...).CombinedOutput(); err == nil || !strings.Contains(string(out), "--yes") || m.exists(dropInOf(unit)) {
		t.Errorf("without confirmation: %v, %s", err, out)
	}
	m.run(append(verb, "--yes")...)
	const name = "nginx"
	m.filtered(name, unit, func(string) (string, error) { return m.askFrom("127.0.0.1", "tcp", askNginx.addr, askNginx.sends) })
	r := scaletest.Random(t)
	for range scaletest.Count(t, "LULL_UNIT_STARTS", 3) {
		after := time.Duration(r.IntN(1200)) * time.Millisecond
		waittest.Within(after, func() bool { return false })
		m.killHost()
		came := make(chan error, 1)
		go func() { _, err := m.ask(askNginx); came <- err }()
		m.startHost()
		if err := waittest.Receive(t, "the client is answered", came); err != nil {
			t.Errorf("killed after %s: %v", after, err)
		}
		if !m.exists(dropInOf(unit)) || !m.inEffect(unit) {
			t.Errorf("killed after %s: the drop-in is gone", after)
		}
	}

	// It goes with the setting, and comes back with it.
	for _, d := range []time.Duration{0, 100 * time.Millisecond} {
		after := idle.Duration(d)
		errtest.Get(m.Change(t.Context(), name, hostctl.Change{StopAfter: &after}))(t)
		if m.exists(dropInOf(unit)) != (d > 0) || m.inEffect(unit) != (d > 0) {
			t.Errorf("with stop_after=%s: %s", d, m.show(unit, "DropInPaths"))
		}
		m.answers(askNginx)
	}

	// Without lull, the unit starts, is handed nothing and binds what it wants.
	m.await(name, "stopped")
	m.systemctl("kill", "--kill-whom=all", "-s", "KILL", "lull-host")
	waittest.Until(t, "the host is gone", func() bool { return m.show("lull-host", "ActiveState") == "failed" })
	m.run("rm", "-r", "/var/lib/lull-handoff")
	m.systemctl("start", unit)
	m.answers(askNginx)
	m.systemctl("reload", unit)
	m.answers(askNginx)

	// A release that is cut off is completed by the next daemon.
	m.startHost()
	done := make(chan error, 1)
	go func() { done <- m.ReleaseAdopted(t.Context(), name) }()
	waittest.Within(time.Duration(r.IntN(100))*time.Millisecond, func() bool { return false })
	m.killHost()
	_ = waittest.Receive(t, "the release ends", done) // either way
	m.startHost()
	if l := errtest.Get(m.List(t.Context()))(t); len(l) > 0 {
		errtest.None(t, m.ReleaseAdopted(t.Context(), name))
	}
	if m.exists(dropInOf(unit)) || m.inEffect(unit) {
		t.Error("the drop-in is left")
	}
	m.answers(askNginx)
	m.noDropIns()
	m.nothingLeft()
}
