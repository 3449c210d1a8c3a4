package units

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// TestUnits checks that nginx, Redis and PostgreSQL are frozen through systemd,
// that a client wakes them, and that nothing is left behind after a release.
func TestUnits(t *testing.T) {
	m := boot(t)
	database := m.database()
	m.systemctl("start", "nginx", "redis-server")
	for _, p := range []struct {
		unit string
		question
	}{{"nginx.service", askNginx}, {"redis-server.service", askRedis}, {database, askPostgres}} {
		name := m.adopt(hostctl.Adopt{Unit: strings.TrimSuffix(p.unit, ".service")})
		var slowest time.Duration
		for range scaletest.Count(t, "LULL_UNIT_WAKES", 3) {
			m.await(name, "paused")
			if s := m.show(p.unit, "FreezerState"); s != "frozen" || !m.frozen(p.unit) {
				t.Fatalf("%s is paused; systemd says %s", p.unit, s)
			}
			slowest = max(slowest, m.answers(p.question))
			m.until(name, "it was woken", func(o hostctl.Instance) bool { return o.State == "running" || o.WakeCount > 0 })
		}
		t.Logf("%s: slowest first answer %s", p.unit, slowest)
		o, err := m.Get(t.Context(), name)
		if err != nil || o.Adopted == nil || o.Adopted.Unit != p.unit || o.Runtime != instance.RuntimeAdopted || len(o.Endpoints) == 0 || o.PID == 0 {
			t.Errorf("%+v, %v", o, err)
		}
		m.await(name, "paused")
		if err := m.ReleaseAdopted(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		if s := m.show(p.unit, "FreezerState"); s != "running" || m.frozen(p.unit) {
			t.Errorf("%s is released; systemd says %s", p.unit, s)
		}
		m.answers(p.question)
	}
	m.nothingLeft()
}

// nothingLeft checks that lull has no instance and no data of one.
func (m *machine) nothingLeft() {
	m.t.Helper()
	if l, err := m.List(m.t.Context()); err != nil || len(l) > 0 {
		m.t.Errorf("%d instances are left, %v", len(l), err)
	}
	for _, dir := range []string{"adopted", "shim/outside", "shim/held"} {
		l, err := os.ReadDir(fmt.Sprintf("/proc/%d/root/var/lib/lull/host/%s", m.pid, dir))
		if err != nil && !os.IsNotExist(err) || len(l) > 0 {
			m.t.Errorf("left in %s: %v (%v)", dir, l, err)
		}
	}
}

// TestOperators checks that lull follows what systemctl does with a frozen unit.
func TestOperators(t *testing.T) {
	m := boot(t)
	m.systemctl("start", "nginx")
	name := m.adopt(hostctl.Adopt{Unit: "nginx"})
	first := m.await(name, "paused").PID

	m.systemctl("daemon-reload")
	m.systemctl("daemon-reexec")
	if o := m.await(name, "paused"); !m.frozen("nginx") || m.show("nginx", "FreezerState") != "frozen" || o.PauseCount != 1 {
		t.Errorf("a reload of systemd changed %s", daemontest.Describe(o))
	}
	m.answers(askNginx)

	m.await(name, "paused")
	m.systemctl("reload", "nginx")
	m.until(name, "the reload woke it", func(o hostctl.Instance) bool { return o.WakeCount >= 2 })
	m.answers(askNginx)

	m.await(name, "paused")
	m.systemctl("restart", "nginx")
	o := m.until(name, "it is followed", func(o hostctl.Instance) bool { return o.State == "running" && o.PID != first && o.PID != 0 })
	if o.LastResumedBy != "external" {
		t.Errorf("restarted by %s", o.LastResumedBy)
	}
	m.answers(askNginx)

	m.await(name, "paused")
	m.systemctl("stop", "nginx")
	m.await(name, "stopped")
	if _, err := m.ask(askNginx); err == nil {
		t.Error("a connection started what an operator stopped")
	}
	if waittest.Within(2*time.Second, func() bool { return m.show("nginx", "ActiveState") != "inactive" }) {
		t.Error("lull started what an operator stopped")
	}
	m.systemctl("start", "nginx")
	m.await(name, "paused")
	m.answers(askNginx)

	// A freeze by others remains.
	m.await(name, "paused")
	m.answers(askNginx)
	m.systemctl("freeze", "nginx")
	m.until(name, "others paused it", func(o hostctl.Instance) bool { return o.State == "paused" && o.LastPausedBy == "external" })
	c, err := m.dial(askNginx.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if waittest.Within(2*time.Second, func() bool { return !m.frozen("nginx") }) {
		t.Error("lull thawed what an operator froze")
	}
	m.systemctl("thaw", "nginx")
	m.await(name, "running")

	// A failed unit stays failed.
	c.Close()
	m.await(name, "paused")
	m.write("/etc/nginx/nginx.conf", "nonsense")
	if out, err := m.command("systemctl", "restart", "nginx").CombinedOutput(); err == nil {
		t.Errorf("nginx starts with nonsense: %s", out)
	}
	o = m.await(name, "stopped")
	if waittest.Within(2*time.Second, func() bool { return m.show("nginx", "ActiveState") != "failed" }) || !strings.Contains(o.StatusReason, "unit") {
		t.Errorf("the failed unit: %s", daemontest.Describe(o))
	}
	if err := m.ReleaseAdopted(t.Context(), name); err != nil {
		t.Error(err)
	}
	m.nothingLeft()
}

// TestHostKilled checks that nothing stays frozen without a daemon, and that the
// next daemon adopts the unit again.
func TestHostKilled(t *testing.T) {
	m := boot(t)
	m.systemctl("start", "nginx", "redis-server")
	name := m.adopt(hostctl.Adopt{Unit: "nginx"})
	m.await(name, "paused")
	m.killHost()
	began := time.Now()
	waittest.Until(t, "the shim thaws it", func() bool { return !m.frozen("nginx") })
	t.Logf("thawed %s after the daemon was killed", time.Since(began).Round(time.Millisecond))
	m.answers(askNginx)
	m.startHost()
	m.await(name, "paused")
	if s := m.show("nginx", "FreezerState"); s != "frozen" {
		t.Errorf("systemd says %s", s)
	}
	m.answers(askNginx)

	// Kill the daemon together with its shim.
	m.await(name, "paused")
	m.run("sh", "-c", "kill -KILL $(systemctl show --value -p MainPID lull-host) $(pgrep -f -- '[l]ull-shim --dir')")
	began = time.Now()
	waittest.Until(t, "the watchdog thaws it", func() bool { return !m.frozen("nginx") })
	t.Logf("thawed %s after daemon and shim were killed", time.Since(began).Round(time.Millisecond))
}

// TestRefused checks which units cannot be adopted.
func TestRefused(t *testing.T) {
	m := boot(t)
	for name, text := range map[string]string{
		"dog":   "[Service]\nType=notify\nNotifyAccess=all\nWatchdogSec=30\nExecStart=/bin/sh -c 'systemd-notify --ready; exec sleep infinity'\n",
		"once":  "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n",
		"idle":  "[Service]\nExecStart=/bin/sleep infinity\n",
		"many@": "[Service]\nExecStart=/bin/sleep infinity\n",
	} {
		m.write("/etc/systemd/system/"+name+".service", text)
	}
	m.systemctl("daemon-reload")
	m.systemctl("start", "dog", "once")
	for unit, want := range map[string]string{"dog": "watchdog", "once": "oneshot", "idle": "inactive", "many@": "template", "many@.service": "template",
		"system.slice": "slice", "dbus.socket": "socket", "nothing-of-that-name": "unit", "systemd-journald": "machine", "lull-host": "daemon"} {
		if _, err := m.Adopt(t.Context(), hostctl.Adopt{Unit: unit}); !strings.Contains(refused(err), want) {
			t.Errorf("%s: %v", unit, err)
		}
	}
	for _, q := range []hostctl.Adopt{{Unit: "nginx", PID: 4}, {PID: 4, Stop: true}, {Unit: "nginx", StopAfter: daemontest.Seconds(time.Second)}, {Unit: "nginx", Manager: "root"}} {
		if _, err := m.Adopt(t.Context(), q); err == nil || refused(err) != "" {
			t.Errorf("%+v: %v", q, err)
		}
	}
	m.nothingLeft()

	// A watchdog that is added to an adopted unit blocks its pause.
	m.systemctl("start", "redis-server")
	name := m.adopt(hostctl.Adopt{Unit: "redis-server", PauseAfter: daemontest.Seconds(time.Hour)})
	m.write("/etc/systemd/system/redis-server.service.d/dog.conf", "[Service]\nWatchdogSec=1h\n")
	m.systemctl("daemon-reload")
	m.systemctl("restart", "redis-server")
	m.until(name, "it is unknown", func(o hostctl.Instance) bool {
		for _, b := range o.Blocks {
			if strings.Contains(b.Sentence, "watchdog") {
				return true
			}
		}
		return false
	})
	if _, err := m.Do(t.Context(), name, "pause", nil); err == nil || m.frozen("redis-server") {
		t.Errorf("a unit with a watchdog is paused: %v", err)
	}
}

// TestUnknown checks that a unit is not paused while systemd does not answer,
// that why says so, and that a client wakes a unit that was frozen before.
func TestUnknown(t *testing.T) {
	m := boot(t)
	m.systemctl("start", "redis-server", "nginx")
	busy := m.adopt(hostctl.Adopt{Unit: "redis-server", PauseAfter: daemontest.Seconds(3 * time.Second)})
	asleep := m.adopt(hostctl.Adopt{Unit: "nginx"})
	m.await(asleep, "paused")
	if o := m.await(busy, "running"); o.PauseCount > 0 {
		t.Fatalf("paused too early: %s", daemontest.Describe(o))
	}
	hang := func(sig syscall.Signal) {
		if err := syscall.Kill(m.pid, sig); err != nil {
			t.Fatal(err)
		}
	}
	hang(syscall.SIGSTOP)
	m.until(busy, "an unknown signal blocks its pause", func(o hostctl.Instance) bool {
		return slices.ContainsFunc(o.Blocks, func(b idle.Block) bool { return b.Code == idle.SignalUnknown })
	})
	took, err := m.ask(askNginx)
	if err != nil {
		t.Error(err)
	}
	t.Logf("woken %s after the client came, while systemd hung", took.Round(time.Millisecond))
	if waittest.Within(4*time.Second, func() bool { o, err := m.Get(t.Context(), busy); return err == nil && o.State != "running" }) {
		t.Error("a unit was paused while systemd did not answer")
	}
	hang(syscall.SIGCONT)
	m.await(busy, "paused")
	m.answers(askRedis)
	m.await(asleep, "paused")
	m.answers(askNginx)
}

// TestTimer checks that a frozen unit is woken for a systemd timer that triggers
// it.
func TestTimer(t *testing.T) {
	m := boot(t)
	m.systemctl("start", "redis-server")
	m.write("/etc/systemd/system/redis-job.timer", "[Timer]\nOnActiveSec=8s\nAccuracySec=10ms\nUnit=redis-server.service\n")
	m.systemctl("daemon-reload")
	m.systemctl("start", "redis-job.timer")
	due := time.Now().Add(8 * time.Second)
	name := m.adopt(hostctl.Adopt{Unit: "redis-server"})
	m.until(name, "the timer is known", func(o hostctl.Instance) bool {
		return o.WakeAt != nil && o.WakeAt.Sub(due).Abs() < 2*time.Second && strings.Contains(o.WakeAtBy, "redis-job.timer")
	})
	m.await(name, "paused")
	o := m.until(name, "the timer woke it", func(o hostctl.Instance) bool { return o.State == "running" })
	if o.LastResumedBy != "timer" || o.LastResumedAt == nil || o.LastResumedAt.After(due) {
		t.Errorf("woken by %s at %s, due at %s", o.LastResumedBy, o.LastResumedAt, due)
	}
	y, err := m.Why(t.Context(), name, time.Time{})
	if err != nil || !strings.Contains(fmt.Sprintf("%+v", y.Account), "redis-job.timer") {
		t.Errorf("why does not name the timer: %+v, %v", y.Account, err)
	}
}
