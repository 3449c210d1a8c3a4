package units

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/host/daemontest"
	"lull/internal/lib/httpx"
	"lull/internal/lib/waittest"
	"lull/internal/platform/cgroup"
	"lull/internal/protocol/hostctl"
)

func TestMain(m *testing.M) { daemontest.Main(m, "lull/cmd/lull-harness") }

//go:embed boot.sh
var bootScript string

// machine is a booted systemd. A lull host runs as one of its units.
type machine struct {
	*hostctl.Client
	t   *testing.T
	pid int // process ID of its init
}

// hostUnit is the unit of the lull host in a machine.
const hostUnit = `[Service]
ExecStart=/opt/lull/lull host --probe 200ms
Delegate=yes
KillMode=process
Restart=no
LimitNOFILE=65536
`

// boot boots a machine and starts its lull host. Both end with the test.
func boot(t *testing.T) *machine {
	t.Helper()
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("booting systemd needs root")
	}
	for file, pkg := range map[string]string{"/lib/systemd/systemd": "systemd", "/usr/sbin/nginx": "nginx-light", "/usr/bin/redis-server": "redis-server",
		"/usr/bin/pg_createcluster": "postgresql", "/usr/bin/nsenter": "util-linux"} {
		_, err := os.Stat(file)
		daemontest.Need(t, err, pkg)
	}
	daemontest.Build(t)
	place, err := cgroup.Find("units"+strconv.FormatInt(time.Now().UnixNano(), 36), cgroup.V2)
	if err != nil {
		t.Skipf("no unified control group can be made here: %v", err)
	}
	t.Cleanup(func() { place.Release() })
	group, err := place.Create("machine")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	// The shell joins the group before it creates the namespaces, so that the
	// group becomes the root of the machine's tree.
	cmd := exec.Command("sh", "-c", `echo $$ >"$1/cgroup.procs" && shift && exec "$@"`, "sh", group.Dir(),
		"unshare", "--pid", "--fork", "--mount", "--cgroup", "--uts", "--ipc", "--net", "--kill-child", "sh", "-c", bootScript, "sh", root, filepath.Dir(daemontest.Program("lull")))
	var console bytes.Buffer
	cmd.Stdout, cmd.Stderr = &console, &console
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	go func() { _ = cmd.Wait(); close(over) }()
	m := &machine{t: t}
	t.Cleanup(func() {
		if t.Failed() && m.pid != 0 {
			out, err := m.command("journalctl", "--no-pager", "--boot", "--output=short-precise").CombinedOutput()
			t.Logf("journal (%v):\n%s", err, out[max(0, len(out)-20000):])
		}
		if err := group.Kill(waittest.Context(t)); err != nil {
			t.Error(err)
		}
		<-over
		if t.Failed() {
			t.Logf("console:\n%s", console.Bytes())
		}
		if out, err := exec.Command("find", group.Dir(), "-depth", "-type", "d", "-exec", "rmdir", "{}", ";").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	daemontest.Wait(t, "systemd runs", func() (bool, string) {
		select {
		case <-over:
			t.Fatal("systemd has ended")
		default:
		}
		if m.pid == 0 {
			m.pid = childOf(cmd.Process.Pid)
		}
		if m.pid == 0 {
			return false, "no process"
		}
		out, err := m.command("systemctl", "is-system-running").CombinedOutput()
		return err == nil, string(out)
	})
	m.write("/etc/systemd/system/lull-host.service", hostUnit)
	m.systemctl("daemon-reload")
	if m.Client, err = hostctl.NewClient(fmt.Sprintf("/proc/%d/root/run/lull/host.sock", m.pid)); err != nil {
		t.Fatal(err)
	}
	m.startHost()
	return m
}

func childOf(pid int) int {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	child, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	return child
}

// command returns a command that runs in the machine.
func (m *machine) command(args ...string) *exec.Cmd {
	cmd := exec.Command("nsenter", append([]string{"-t", strconv.Itoa(m.pid), "-a", "--"}, args...)...)
	cmd.Env, cmd.Dir = []string{"PATH=/usr/sbin:/usr/bin:/opt/lull", "LANG=C.UTF-8"}, "/"
	return cmd
}

// run runs a command in the machine and returns its output. The command must
// succeed.
func (m *machine) run(args ...string) string {
	m.t.Helper()
	out, err := m.command(args...).CombinedOutput()
	if err != nil {
		m.t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

func (m *machine) systemctl(args ...string) string {
	m.t.Helper()
	return m.run(append([]string{"systemctl"}, args...)...)
}

// show returns the value of a property of a unit.
func (m *machine) show(unit, property string) string {
	m.t.Helper()
	return m.systemctl("show", "--value", "-p", property, unit)
}

// write writes a file in the machine.
func (m *machine) write(path, text string) {
	m.t.Helper()
	path = fmt.Sprintf("/proc/%d/root%s", m.pid, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
		m.t.Fatal(err)
	}
}

// startHost starts the lull host and waits until it answers.
func (m *machine) startHost() {
	m.t.Helper()
	m.systemctl("start", "lull-host")
	waittest.NoError(m.t, "the host answers", func() error { _, err := m.List(m.t.Context()); return err })
}

// database creates a PostgreSQL cluster, starts its unit and returns the unit's
// name.
func (m *machine) database() string {
	m.t.Helper()
	version := strings.TrimSpace(m.run("sh", "-c", "ls /usr/lib/postgresql | tail -1"))
	m.run("pg_createcluster", version, "main", "--", "--auth=trust", "--no-sync")
	unit := "postgresql@" + version + "-main.service"
	m.systemctl("start", unit)
	return unit
}

// inNetwork runs do on a thread in the machine's network namespace.
func (m *machine) inNetwork(do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", m.pid))
		if err != nil {
			done <- err
			return
		}
		defer ns.Close()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- do()
	}()
	return <-done
}

// dial connects to an address in the machine.
func (m *machine) dial(addr string) (c net.Conn, err error) {
	err = m.inNetwork(func() error {
		c, err = net.DialTimeout("tcp", addr, daemontest.WaitLimit)
		return err
	})
	return c, err
}

// question is a client's request to a program, and the beginning of the expected
// answer.
type question struct{ addr, sends, wants string }

var (
	askNginx = question{"127.0.0.1:80", "GET / HTTP/1.0\r\n\r\n", "HTTP/1.1 "}
	askRedis = question{"127.0.0.1:6379", "PING\r\n", "+PONG"}
	// A request to start TLS, which PostgreSQL answers with one letter.
	askPostgres = question{"127.0.0.1:5432", "\x00\x00\x00\x08\x04\xd2\x16\x2f", "S"}
)

// ask sends a question and returns how long the answer took.
func (m *machine) ask(q question) (took time.Duration, err error) {
	began := time.Now()
	c, err := m.dial(q.addr)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(daemontest.WaitLimit)); err != nil {
		return 0, err
	}
	if _, err := c.Write([]byte(q.sends)); err != nil {
		return 0, err
	}
	got := make([]byte, len(q.wants))
	if _, err := io.ReadFull(c, got); err != nil {
		return 0, err
	}
	took = time.Since(began)
	if string(got) != q.wants && !(q == askPostgres && string(got) == "N") {
		return took, fmt.Errorf("%s answers %q", q.addr, got)
	}
	if t, ok := c.(*net.TCPConn); ok && t.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, c) // read everything, so that the close does not cause a reset
	}
	return took, nil
}

// answers asks a question, and fails the test if there is no answer.
func (m *machine) answers(q question) time.Duration {
	m.t.Helper()
	took, err := m.ask(q)
	if err != nil {
		m.t.Fatalf("%s: %v", q.addr, err)
	}
	return took
}

// until waits until ok returns true for an instance.
func (m *machine) until(name, what string, ok func(o hostctl.Instance) bool) (o hostctl.Instance) {
	m.t.Helper()
	daemontest.Wait(m.t, name+": "+what, func() (bool, string) {
		var err error
		if o, err = m.Get(m.t.Context(), name); err != nil {
			return false, err.Error()
		}
		return ok(o), daemontest.Describe(o)
	})
	return o
}

// await waits until an instance is in a state.
func (m *machine) await(name, state string) hostctl.Instance {
	m.t.Helper()
	return m.until(name, "it is "+state, func(o hostctl.Instance) bool { return o.State == state })
}

// pauseAfter is the idle timeout of the units that these tests adopt.
const pauseAfter = 400 * time.Millisecond

// adopt adopts a unit under its name without suffix. It must succeed.
func (m *machine) adopt(q hostctl.Adopt) (name string) {
	m.t.Helper()
	if q.PauseAfter == nil {
		q.PauseAfter = daemontest.Seconds(pauseAfter)
	}
	o, err := m.Adopt(m.t.Context(), q)
	if err != nil {
		m.t.Fatalf("cannot adopt %s: %v", q.Unit, err)
	}
	return o.Name
}

// frozen reports whether the kernel shows a unit's control group as frozen.
func (m *machine) frozen(unit string) bool {
	m.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/sys/fs/cgroup%s/cgroup.events", m.pid, m.show(unit, "ControlGroup")))
	if err != nil {
		m.t.Fatal(err)
	}
	return slices.Contains(strings.Split(string(b), "\n"), "frozen 1")
}

// refused returns the reason for which a request was refused; "" if it was not
// refused.
func refused(err error) string {
	var p *httpx.Problem
	if errors.As(err, &p) && p.Status == 409 {
		return p.Error()
	}
	return ""
}

// killHost kills the lull host and waits until systemd has noticed.
func (m *machine) killHost() {
	m.t.Helper()
	m.systemctl("kill", "--kill-whom=main", "-s", "KILL", "lull-host")
	waittest.Until(m.t, "the host is gone", func() bool { return m.show("lull-host", "ActiveState") != "active" })
	m.run("systemctl", "reset-failed", "lull-host")
}
