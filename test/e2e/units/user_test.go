package units

import (
	"fmt"
	"testing"

	"lull/internal/host/daemontest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// TestUserUnit checks units of a user's systemd, adopted by the user's own host
// and by root's host.
func TestUserUnit(t *testing.T) {
	m := boot(t)
	const uid, home, runtime = "1234", "/home/alice", "/run/user/1234"
	m.run("useradd", "-u", uid, "-m", "alice")
	m.run("install", "-d", "-o", "alice", "-g", "alice", "-m", "700", runtime, home+"/.config/systemd/user")
	m.write("/etc/systemd/system/alice.service", "[Service]\nUser=alice\nType=notify\nDelegate=yes\nExecStart=/lib/systemd/systemd --user --unit=basic.target\n"+
		"Environment=XDG_RUNTIME_DIR="+runtime+"\n")
	m.write(home+"/.config/systemd/user/mine.service", "[Service]\nExecStart=/usr/bin/redis-server --port 7000 --protected-mode no --save ''\n")
	m.write(home+"/.config/systemd/user/lull-host.service", hostUnit)
	m.systemctl("daemon-reload")
	m.systemctl("start", "alice")
	systemctl := func(args ...string) string {
		t.Helper()
		return m.run(append([]string{"runuser", "-u", "alice", "--", "env", "XDG_RUNTIME_DIR=" + runtime, "systemctl", "--user"}, args...)...)
	}
	systemctl("start", "mine", "lull-host")
	ask := question{"127.0.0.1:7000", "PING\r\n", "+PONG"}
	waittest.NoError(t, "Redis answers", func() error { _, err := m.ask(ask); return err })

	own := *m
	var err error
	if own.Client, err = hostctl.NewClient(fmt.Sprintf("/proc/%d/root%s/lull/host.sock", m.pid, runtime)); err != nil {
		t.Fatal(err)
	}
	waittest.NoError(t, "the user's host answers", func() error { _, err := own.List(t.Context()); return err })
	if _, err := own.Adopt(t.Context(), hostctl.Adopt{Unit: "lull-host"}); refused(err) == "" {
		t.Errorf("a user's host adopts a unit of the machine: %v", err)
	}
	for _, host := range []*machine{&own, m} {
		name := host.adopt(hostctl.Adopt{Unit: "mine", Manager: uid})
		host.await(name, "paused")
		if s := systemctl("show", "--value", "-p", "FreezerState", "mine"); s != "frozen" {
			t.Errorf("the user's systemd says %s", s)
		}
		host.answers(ask)
		if err := host.ReleaseAdopted(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	// A host without the right to steer connections uses held sockets for the
	// first clients.
	name := own.adopt(hostctl.Adopt{Unit: "mine", Manager: uid, Stop: true, StopAfter: daemontest.Seconds(stopAfter)})
	for range 2 {
		own.await(name, "stopped")
		own.answers(ask)
	}
	if err := own.ReleaseAdopted(t.Context(), name); err != nil {
		t.Fatal(err)
	}

	// With a drop-in, the unit serves them all itself.
	const dropIn = runtime + "/systemd/user/mine.service.d/zz-lull.conf"
	if _, err := m.DropIn(t.Context(), hostctl.Adopt{Unit: "mine", Manager: uid}); refused(err) == "" {
		t.Errorf("root's host plans a drop-in in a user's directory: %v", err)
	}
	name = own.adopt(hostctl.Adopt{Unit: "mine", Manager: uid, Stop: true, DropIn: true, StopAfter: daemontest.Seconds(stopAfter)})
	own.await(name, "stopped")
	own.answers(ask)
	own.await(name, "stopped")
	own.crowd(20, func(from string) (string, error) {
		return own.askFrom(from, "tcp", ask.addr, "CLIENT INFO\r\nQUIT\r\n")
	})
	if s := systemctl("show", "--value", "-p", "DropInPaths", "mine"); s != dropIn {
		t.Errorf("drop-ins of the unit: %s", s)
	}
	if err := own.ReleaseAdopted(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	if s := systemctl("show", "--value", "-p", "DropInPaths", "mine"); s != "" || m.exists(dropIn) {
		t.Errorf("a released unit has %s", s)
	}
	m.nothingLeft()
}
