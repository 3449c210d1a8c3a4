package units

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

func dropInOf(unit string) string { return "/run/systemd/system/" + unit + ".d/zz-lull.conf" }

// exists reports whether a file of the machine exists.
func (m *machine) exists(path string) bool {
	_, err := os.Lstat(fmt.Sprintf("/proc/%d/root%s", m.pid, path))
	return err == nil
}

// askFrom asks from one of the machine's own addresses, or over a unix socket, and
// returns the whole answer.
func (m *machine) askFrom(from, network, addr, sends string) (answer string, err error) {
	var c net.Conn
	err = m.inNetwork(func() error {
		d := net.Dialer{Timeout: daemontest.WaitLimit}
		if network == "tcp" {
			d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
		} else {
			addr = fmt.Sprintf("/proc/%d/root%s", m.pid, addr)
		}
		c, err = d.Dial(network, addr)
		return err
	})
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(daemontest.WaitLimit)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c, sends); err != nil {
		return "", err
	}
	if h, ok := c.(interface{ CloseWrite() error }); ok && !strings.HasPrefix(sends, "\x00") {
		if err := h.CloseWrite(); err != nil {
			return "", err
		}
	}
	b, err := io.ReadAll(io.LimitReader(c, 1<<16))
	return string(b), err
}

// crowd sends clients with addresses of their own at once, and returns their answers.
func (m *machine) crowd(n int, ask func(from string) (string, error)) {
	m.t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			from := fmt.Sprintf("127.1.1.%d", i+1)
			if answer, err := ask(from); err != nil || !strings.Contains(answer, from) {
				m.t.Errorf("the client %s: %q, %v", from, answer, err)
			}
		})
	}
	wg.Wait()
}

// filtered waits until the present run of a unit is under the filter: after the first
// start by a client.
func (m *machine) filtered(name, unit string, ask func(from string) (string, error)) {
	m.t.Helper()
	m.await(name, "stopped")
	errtest.Get(ask("127.0.0.1"))(m.t)
	waittest.Until(m.t, unit+" runs under the filter", func() bool {
		return strings.Contains(m.run("cat", "/proc/"+m.show(unit, "MainPID")+"/status"), "Seccomp:\t2")
	})
}

// TestDropIn checks that units which lull stops and starts with a drop-in serve every
// client themselves, over TCP and over unix sockets, and that a release leaves nothing.
func TestDropIn(t *testing.T) {
	m := boot(t)
	m.write("/etc/nginx/conf.d/who.conf", "server { listen 8080; listen [::]:8080; return 200 $remote_addr; }\n")
	m.run("sh", "-c", `echo "unixsocket /run/redis/redis-server.sock
unixsocketperm 777
protected-mode no" >>/etc/redis/redis.conf`)
	database := m.database()
	m.systemctl("start", "nginx", "redis-server")
	const redisSocket = "/run/redis/redis-server.sock"
	for _, p := range []struct {
		unit string
		ask  func(from string) (string, error)
		unix func() (string, error)
	}{
		{"nginx.service", func(from string) (string, error) {
			return m.askFrom(from, "tcp", "127.0.0.1:8080", "GET / HTTP/1.0\r\n\r\n")
		}, nil},
		{"redis-server.service", func(from string) (string, error) {
			return m.askFrom(from, "tcp", "127.0.0.1:6379", "CLIENT INFO\r\nQUIT\r\n")
		}, func() (string, error) { return m.askFrom("", "unix", redisSocket, "PING\r\nQUIT\r\n") }},
		{database, func(from string) (string, error) {
			out, err := m.command("runuser", "-u", "postgres", "--", "psql", "-h", "127.0.0.1", "-tAc", "select '"+from+"' where inet_client_addr() is not null").CombinedOutput()
			if strings.Contains(string(out), "starting up") { // PostgreSQL's own answer
				return from, nil
			}
			return string(out), err
		}, nil},
	} {
		q := hostctl.Adopt{Unit: p.unit, Stop: true, DropIn: true, StopAfter: daemontest.Seconds(stopAfter)}
		plan := errtest.Get(m.DropIn(t.Context(), q))(t)
		if m.exists(plan.Path) || plan.Path != dropInOf(p.unit) {
			t.Errorf("planned %s, exists %v", plan.Path, m.exists(plan.Path))
		}
		name := m.adopt(q)
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/root%s", m.pid, plan.Path)); err != nil || string(b) != plan.Text {
			t.Errorf("written %s, %v; shown %s", b, err, plan.Text)
		}
		if !strings.Contains(m.show(p.unit, "DropInPaths"), plan.Path) {
			t.Error("systemd does not know", plan.Path)
		}
		m.filtered(name, p.unit, p.ask)
		for range scaletest.Count(t, "LULL_UNIT_STARTS", 1) {
			m.await(name, "stopped")
			if s := m.show(p.unit, "ActiveState"); s != "inactive" {
				t.Errorf("%s is %s", p.unit, s)
			}
			m.crowd(20, p.ask)
			if p.unix != nil {
				m.await(name, "stopped")
				if s, err := p.unix(); err != nil || !strings.HasPrefix(s, "+PONG") {
					t.Errorf("over a unix socket: %q, %v", s, err)
				}
			}
		}

		// A release starts it again, and it runs on without the drop-in.
		m.await(name, "stopped")
		errtest.None(t, m.ReleaseAdopted(t.Context(), name))
		if s := m.show(p.unit, "ActiveState"); s != "active" || m.exists(filepath.Dir(plan.Path)) || strings.Contains(m.show(p.unit, "DropInPaths"), plan.Path) {
			t.Errorf("%s is released: %s, drop-ins %s", p.unit, s, m.show(p.unit, "DropInPaths"))
		}
		errtest.Get(p.ask("127.0.0.1"))(t)
		m.systemctl("restart", p.unit)
		waittest.NoError(t, "it answers after a restart", func() error { _, err := p.ask("127.0.0.1"); return err })
	}
	m.noDropIns()
	m.nothingLeft()
}

// noDropIns checks that nothing that belongs to a drop-in is left.
func (m *machine) noDropIns() {
	m.t.Helper()
	if m.exists("/var/lib/lull-handoff") {
		m.t.Error("copies of lull-shim are left")
	}
	if l, err := os.ReadDir(fmt.Sprintf("/proc/%d/root/var/lib/lull/host/shim/units", m.pid)); err != nil || len(l) > 0 {
		m.t.Errorf("units are left in the shim: %v, %v", l, err)
	}
}
