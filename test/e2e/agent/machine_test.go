package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/agentctl"
)

// program is the path of the lull-agent under test, server that of the lull that
// it reports to.
var program, server string

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		fmt.Println("SKIP test/e2e/agent: needs root for namespaces")
		return 0
	}
	// Not below /tmp: the agent trusts no file in a directory that other users
	// can write to.
	dir, err := os.MkdirTemp("/run", "lull-real-")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		fmt.Println(err)
		return 1
	}
	program, server = filepath.Join(dir, "lull-agent"), filepath.Join(dir, "lull")
	if err := programtest.Into(dir, "lull/cmd/lull-agent", "lull/cmd/lull"); err != nil {
		fmt.Println(err)
		return 1
	}
	if err := touchSources(); err != nil {
		fmt.Println(err)
		return 1
	}
	// The tests mostly wait for windows that cannot be shorter than a minute, so
	// many of them run in parallel.
	flag.Parse()
	if err := flag.Set("test.parallel", "16"); err != nil {
		fmt.Println(err)
		return 1
	}
	return m.Run()
}

// touchSources stats every source file, so that go test reruns the tests when one
// has changed. go test does not know that the program is built from them.
func touchSources() error {
	return filepath.WalkDir("../../..", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), ".") && len(d.Name()) > 2 {
			return fs.SkipDir
		}
		if err == nil && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			_, err = os.Stat(path)
		}
		return err
	})
}

// need skips the test if a program is not installed. In CI it fails the test
// instead.
func need(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatal(err)
			}
			t.Skipf("SKIP: %v", err)
		}
	}
}

// machine is a set of namespaces with its own mounts, network, processes and
// terminals. All its processes end with the test.
type machine struct {
	t   *testing.T
	pid int    // process ID of its init
	dir string // visible inside and outside, but only to root
}

const initScript = `set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts /dev/pts
mount --bind /dev/pts/ptmx /dev/ptmx
mkdir $1/run && mount -t tmpfs -o mode=755 tmpfs $1/run
for f in wtmp lastlog; do : > $1/$f; [ ! -e /var/log/$f ] || mount --bind $1/$f /var/log/$f; done
grep -v ^lull: /etc/group > $1/group; echo lull:x:4242: >> $1/group; mount --bind $1/group /etc/group
ip link set lo up
echo ready
while read -r line; do :; done
`

func newMachine(t *testing.T) *machine {
	t.Helper()
	need(t, "nsenter", "ip", "mount", "bash")
	dir, err := os.MkdirTemp("/run", "lull-machine-")
	errtest.None(t, err)
	errtest.None(t, os.Chmod(dir, 0o755))
	m := &machine{t: t, dir: dir}
	cmd := exec.Command("bash", "-c", initScript, "init", dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL,
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	errtest.None(t, err)
	out, err := cmd.StdoutPipe()
	errtest.None(t, err)
	if err := cmd.Start(); err != nil {
		t.Skipf("SKIP: cannot make namespaces: %v", err)
	}
	m.pid = cmd.Process.Pid
	t.Cleanup(func() {
		in.Close()
		cmd.Process.Kill() // the kernel kills all processes of the namespace with its init
		cmd.Wait()
		os.RemoveAll(dir)
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("cannot set the namespaces up: %v", err)
	}
	return m
}

// command returns a command that runs inside the machine.
func (m *machine) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command("nsenter", append([]string{"-t", fmt.Sprint(m.pid), "-m", "-n", "-p", "-u", "-i", "--", name}, args...)...)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "TERM=xterm", "LANG=C.UTF-8",
		"LULL_AGENT_SOCKET=" + m.socket()}
	return cmd
}

func (m *machine) socket() string { return filepath.Join(m.dir, "run", "agent.sock") }

// sh runs a script inside the machine and returns its output. The script must
// succeed.
func (m *machine) sh(script string) string {
	m.t.Helper()
	out, err := m.command("bash", "-c", script).CombinedOutput()
	if err != nil {
		m.t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

// start runs a program inside the machine until stop is called or the test ends.
func (m *machine) start(cmd *exec.Cmd) (stop func()) {
	m.t.Helper()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	var once sync.Once
	stop = func() {
		once.Do(func() {
			syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			cmd.Wait()
		})
	}
	m.t.Cleanup(stop)
	return stop
}

// log collects an agent's output.
type log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// policy writes the agent's local policy file.
func (m *machine) policy(lines ...string) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(m.dir, "agent.yaml"), []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
		m.t.Fatal(err)
	}
}

// powerOff returns the path of a file that exists once the machine is powered
// off.
func (m *machine) powerOff() string { return filepath.Join(m.dir, "powered-off") }

// agent runs lull agent run inside the machine, without a cloud, and waits until
// it answers.
func (m *machine) agent(lines ...string) *log {
	m.t.Helper()
	m.policy(lines...)
	cmd := m.command(program, "agent", "run", "--cloud", "none", "--config", filepath.Join(m.dir, "agent.yaml"),
		"--state", filepath.Join(m.dir, "state"), "--shortest-window", "2s", "--power-off", "date +%s.%N > "+m.powerOff())
	l := &log{}
	cmd.Stdout, cmd.Stderr = l, l
	m.start(cmd)
	m.t.Cleanup(func() {
		if m.t.Failed() {
			m.t.Logf("the agent said:\n%s", l)
		}
	})
	m.await("the agent", 2*time.Minute, func() bool { _, err := m.dial().Status(m.t.Context()); return err == nil })
	return l
}

// dial returns a client of the agent for use outside the machine. The socket is
// on a mount of the machine, and is reached through /proc of the machine's init.
func (m *machine) dial() *agentctl.Client {
	return agentctl.Dial(fmt.Sprintf("/proc/%d/root%s", m.pid, m.socket()))
}

func (m *machine) status() agentctl.Status {
	m.t.Helper()
	s, err := m.dial().Status(m.t.Context())
	if err != nil {
		m.t.Fatal(err)
	}
	return s
}

// lull runs the command line inside the machine and returns its output and exit
// code.
func (m *machine) lull(args ...string) (out string, code int) {
	m.t.Helper()
	b, err := m.command(program, args...).CombinedOutput()
	exit, ok := errors.AsType[*exec.ExitError](err)
	if err != nil && !ok {
		m.t.Fatal(err)
	}
	if ok {
		code = exit.ExitCode()
	}
	return string(b), code
}

// reading returns the agent's newest reading of a signal.
func (m *machine) reading(signal string) idle.Reading {
	for _, r := range m.status().Readings {
		if r.Signal == signal {
			return r
		}
	}
	return idle.Reading{Signal: signal, Detail: "not in the status"}
}

// becomes waits until a signal has a state.
func (m *machine) becomes(signal string, state idle.State) {
	m.t.Helper()
	var last idle.Reading
	m.awaitf(2*time.Minute, func() bool { last = m.reading(signal); return last.State == state },
		func() string { return fmt.Sprintf("signal %s is %s: %+v", signal, state, last) })
}

// stays checks that a signal has a state at every poll for the duration d.
func (m *machine) stays(signal string, state idle.State, d time.Duration) {
	m.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); pause() {
		if r := m.reading(signal); r.State != state {
			m.t.Errorf("%s is %s, want %s all the time: %+v", signal, r.State, state, r)
			return
		}
	}
}

func pause() { <-time.After(250 * time.Millisecond) }

func (m *machine) await(what string, limit time.Duration, ok func() bool) {
	m.t.Helper()
	m.awaitf(limit, ok, func() string { return what })
}

func (m *machine) awaitf(limit time.Duration, ok func() bool, what func() string) {
	m.t.Helper()
	if !waittest.Within(limit, ok) {
		m.t.Fatalf("did not happen in %s: %s", limit, what())
	}
}

// offAt waits until the machine is powered off and returns when that happened.
func (m *machine) offAt(limit time.Duration) time.Time {
	m.t.Helper()
	m.awaitf(limit, func() bool { _, err := os.Stat(m.powerOff()); return err == nil }, func() string {
		s := m.status()
		b, _ := json.Marshal(s.Verdict.Blocks)
		return "powered off; blocks " + string(b)
	})
	st, err := os.Stat(m.powerOff())
	if err != nil {
		m.t.Fatal(err)
	}
	return st.ModTime()
}

// isOn fails the test if the machine is powered off.
func (m *machine) isOn(when string) {
	m.t.Helper()
	if _, err := os.Stat(m.powerOff()); err == nil {
		m.t.Fatalf("powered off %s", when)
	}
}

// warnings returns the number of warnings in the agent's history.
func (m *machine) warnings() (n int) {
	m.t.Helper()
	l, err := m.dial().History(context.WithoutCancel(m.t.Context()), agentctl.HistoryQuery{})
	if err != nil {
		m.t.Fatal(err)
	}
	for _, e := range l {
		if e.Kind == "warning" {
			n++
		}
	}
	return n
}
