package host

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/host/hosttest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
	"lull/internal/protocol/hostctl/execstream"
)

// TestConformance runs the same suite over every runtime that is available on
// this machine. In package host, the simulated runtime passes it too.
func TestConformance(t *testing.T) {
	machines := map[string]func(t *testing.T, b bare) hosttest.Machine{
		"process": ordinary, "container": containers, "docker": dockers, "microvm": microvms,
	}
	for _, s := range hosttest.Subjects() {
		if s.Name == hosttest.Simulated().Name {
			continue
		}
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel() // each has a daemon of its own
			m := machines[s.Name](t, bare{Subject: s})
			for _, row := range hosttest.Suite(scaletest.Count(t, "LULL_CONFORMANCE_KILLS", 1), random(t)) {
				t.Run(row.Name, func(t *testing.T) {
					if why := m.Lacks(row.Needs); why != "" {
						t.Skip(why)
					}
					row.Do(t, m)
				})
			}
		})
	}
}

// bare implements a machine of the suite with one daemon.
type bare struct {
	hosttest.Subject
	d      *daemontest.Host
	traces map[string]*trace // of every instance that existed, by name
	ports  map[string]string // addresses of the servers, by instance
	before []string          // network interfaces before the test
	box    func(s *instance.Spec, p hosttest.Program)
}

// over starts the daemon. Its probe windows are long enough to notice a program
// that uses a processor all the time, even on a busy machine.
func (m bare) over(t *testing.T, args ...string) *bare {
	m.before = cards(t)
	m.d = host(t, append([]string{"--probe", "1s"}, args...)...)
	m.traces, m.ports = map[string]*trace{}, map[string]string{}
	return &m
}

func ordinary(t *testing.T, b bare) hosttest.Machine {
	m := b.over(t)
	m.box = func(s *instance.Spec, p hosttest.Program) {
		s.Command = []string{"sh", "-c", p.Script}
		if p.Serves {
			s.Command = []string{daemontest.Program("guest"), "serve", "-listen", s.Expose[0].Target}
		}
	}
	return m
}

func containers(t *testing.T, b bare) hosttest.Machine {
	daemontest.NeedRunc(t)
	root := daemontest.Image(t)
	m := b.over(t)
	m.box = func(s *instance.Spec, p hosttest.Program) {
		s.Runtime, s.Image = "container", root
		s.Command = []string{"sh", "-c", p.Script}
		if p.Serves {
			s.Command = []string{"guest", "serve", "-listen", s.Expose[0].Target}
		}
	}
	return m
}

func microvms(t *testing.T, b bare) hosttest.Machine {
	kernel := os.Getenv("LULL_GUEST_KERNEL")
	if kernel == "" {
		t.Skip("no guest kernel: make test fetches one")
	}
	for tool, pkg := range map[string]string{"qemu-system-x86_64": "qemu-system-x86", "mke2fs": "e2fsprogs"} {
		_, err := exec.LookPath(tool)
		if err != nil {
			_, err = os.Stat("/usr/sbin/" + tool)
		}
		daemontest.Need(t, err, pkg)
	}
	root := daemontest.Image(t)
	m := b.over(t, "--guest-kernel", kernel)
	m.box = func(s *instance.Spec, p hosttest.Program) {
		s.Runtime, s.Image, s.Memory = "microvm", root, 128<<20
		s.Command = []string{"sh", "-c", p.Script}
		if p.Serves {
			s.Command = []string{"guest", "serve", "-listen", "0.0.0.0:8080"}
			s.Expose[0].Target = "127.0.0.1:8080"
		}
	}
	return m
}

// spec returns the spec that Run starts.
func (m *bare) spec(t *testing.T, name string, p hosttest.Program, change func(*instance.Spec)) instance.Spec {
	s := instance.Spec{Name: name, StopAfter: daemontest.Seconds(0), ReadyTimeout: *daemontest.Seconds(daemontest.WaitLimit)}
	if p.Serves {
		at := daemontest.Addr(t)
		s.Expose = []instance.Endpoint{{Listen: at, Target: at}}
		m.ports[name] = at
	}
	m.box(&s, p)
	change(&s)
	return s
}

func (m *bare) Run(t *testing.T, name string, p hosttest.Program, change func(*instance.Spec)) {
	t.Helper()
	o, err := m.d.Create(t.Context(), hostctl.Create{Spec: m.spec(t, name, p, change), Start: true})
	if err != nil {
		t.Fatalf("cannot run %s: %v\n%s", name, err, m.d.Log())
	}
	m.trace(name, o)
}

// lines implements hosttest.Conn.
type lines struct{ *client }

func (l lines) Ask(line string) error { return l.echo(line) }

func (l lines) HalfClose(line string) error {
	if _, err := io.WriteString(l, line+"\n"); err != nil {
		return err
	}
	if err := l.Conn.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	b, err := io.ReadAll(l.r)
	// The guest reports how much it had read when it saw the end.
	if want := fmt.Sprintf("echo %s\nend after %d\n", line, len(line)+1); err == nil && string(b) != want {
		err = fmt.Errorf("got %q and the end", b)
	}
	return err
}

func (l lines) Close() { l.Conn.Close() }

func (m *bare) Dial(t *testing.T, name string) hosttest.Conn {
	t.Helper()
	return lines{mustDial(t, m.ports[name])}
}

func (m *bare) Crash(t *testing.T, down func()) {
	t.Helper()
	m.d.Kill()
	down()
	m.d.Boot()
}

func (m *bare) Until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	if !waittest.Within(daemontest.WaitLimit, ok) {
		l, err := m.d.List(t.Context())
		t.Fatalf("not within %s: %s\n%+v, %v\n%s", daemontest.WaitLimit, what, l, err, m.d.Log())
	}
}

func (m *bare) Left(name string) []string {
	left := m.traces[name].left(m.d)
	if at := m.ports[name]; at != "" {
		if c, err := net.Dial("tcp", at); err == nil {
			c.Close()
			left = append(left, "something listens where its clients came")
		}
	}
	for _, c := range cards(m.d.T) {
		if !slices.Contains(m.before, c) {
			left = append(left, "the network card "+c)
		}
	}
	return left
}

func (m *bare) Get(name string) (hostctl.Instance, error) { return m.d.Get(m.d.T.Context(), name) }

func (m *bare) verb(name, verb string, force bool) error {
	q := map[string][]string{}
	if force {
		q["force"] = []string{"true"}
	}
	_, err := m.d.Do(m.d.T.Context(), name, verb, q)
	return err
}

func (m *bare) Pause(name string, force bool) error { return m.verb(name, "pause", force) }
func (m *bare) Resume(name string) error            { return m.verb(name, "resume", false) }
func (m *bare) Start(name string) error             { return m.verb(name, "start", false) }
func (m *bare) Stop(name string) error              { return m.verb(name, "stop", false) }

func (m *bare) Remove(name string) error {
	o, err := m.Get(name)
	if err != nil {
		return err
	}
	m.traces[name].sample(m.d, o.PID) // its namespaces may have changed since its start
	return m.d.Remove(m.d.T.Context(), name)
}

func (m *bare) Hold(name, holder string, ttl time.Duration) error {
	_, err := m.d.Hold(m.d.T.Context(), name, hostctl.LeaseRequest{Holder: holder, TTL: *daemontest.Seconds(ttl)})
	return err
}

func (m *bare) Release(name, holder string) error {
	_, err := m.d.Release(m.d.T.Context(), name, holder)
	return err
}

func (m *bare) Exec(name string, command ...string) (instance.Outcome, error) {
	return m.d.Exec(m.d.T.Context(), name, hostctl.ExecRequest{Command: command})
}

func (m *bare) Attach(t *testing.T, name string, q execstream.Request) io.ReadWriteCloser {
	t.Helper()
	rw, err := m.d.OpenExec(t.Context(), name, q)
	errtest.None(t, err)
	return rw
}

func (m *bare) Logs(name string, l hostctl.Logs) (string, error) {
	var b bytes.Buffer
	err := m.d.Logs(m.d.T.Context(), name, l, &b)
	return b.String(), err
}
