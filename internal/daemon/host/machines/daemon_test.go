package machines

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/base/freeport"
	"lull/internal/idle"
	"lull/internal/instance"
	"lull/internal/link/hostctl"
)

// patience bounds every wait for a condition: a guest on a busy machine boots
// in tens of seconds.
const patience = 120 * time.Second

var (
	built string // folder of the programs under test
	small string // files of a guest that has nothing but the test program
	lacks error  // why the tests cannot run
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "lullm")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	built, small = filepath.Join(dir, "bin"), filepath.Join(dir, "small")
	lacks = errors.Join(tool("qemu-system-x86_64"), tool("mke2fs"))
	if os.Getenv("LULL_GUEST_KERNEL") == "" {
		lacks = errors.Join(lacks, errors.New("no guest kernel: make test fetches one"))
	}
	if lacks == nil {
		err = errors.Join(os.MkdirAll(filepath.Join(small, "bin"), 0o755), os.MkdirAll(filepath.Join(small, "tmp"), 0o755),
			goBuild(built+"/", "lull/cmd/lull", "lull/cmd/lull-shim", "lull/cmd/lull-harness"),
			goBuild(filepath.Join(small, "bin", "guest"), "lull/internal/edge/runtime/microvm/testdata/guest"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

func tool(name string) error {
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/sbin") {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%s is not installed", name)
}

func goBuild(out string, pkgs ...string) error {
	cmd := exec.Command("go", append([]string{"build", "-trimpath", "-ldflags", "-s -w", "-o", out}, pkgs...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot build %v: %w\n%s", pkgs, err, b)
	}
	return nil
}

func rounds(t *testing.T) int {
	s := os.Getenv("LULL_VM_CYCLES")
	if s == "" {
		return 2
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("cannot use LULL_VM_CYCLES=%q: want a number above 0", s)
	}
	return n
}

// daemon is a lull host that can be killed and started again.
type daemon struct {
	*hostctl.Client
	t    *testing.T
	dir  string
	logs *locked
	cmd  *exec.Cmd
}

type locked struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// host starts a daemon; it is ended, and what is left is looked for, when the
// test ends.
func host(t *testing.T) *daemon {
	t.Helper()
	if testing.Short() {
		t.Skip("a guest boots in seconds")
	}
	if lacks != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(lacks)
		}
		t.Skip(lacks)
	}
	dir, err := os.MkdirTemp("", "vmh") // short, for its sockets
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{t: t, dir: dir, logs: &locked{}}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "host.sock")
	if d.Client, err = hostctl.NewClient("unix://" + socket); err != nil {
		t.Fatal(err)
	}
	d.start()
	t.Cleanup(d.end)
	return d
}

func (d *daemon) start() {
	d.t.Helper()
	d.cmd = exec.Command(filepath.Join(built, "lull"), "host", "--data", filepath.Join(d.dir, "data"),
		"--socket", filepath.Join(d.dir, "host.sock"), "--probe", "500ms", "--stop-after", "0")
	d.cmd.Stdout, d.cmd.Stderr = d.logs, d.logs
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := d.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	d.await("the daemon answers", func() (bool, string) {
		_, err := d.Status(d.t.Context())
		return err == nil, fmt.Sprint(err)
	})
}

// kill ends the daemon without a word.
func (d *daemon) kill() {
	d.t.Helper()
	if err := d.cmd.Process.Kill(); err != nil {
		d.t.Fatal(err)
	}
	_ = d.cmd.Wait() // it was killed
}

func (d *daemon) end() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	all, err := d.List(ctx)
	for _, o := range all {
		err = errors.Join(err, d.Remove(ctx, o.ID))
	}
	s, serr := d.Status(ctx)
	if err = errors.Join(err, serr); err != nil {
		d.t.Errorf("cannot clean up: %v", err)
	}
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		d.t.Errorf("cannot end the daemon: %v", err)
	}
	if err := d.cmd.Wait(); err != nil {
		d.t.Errorf("the daemon ended with: %v", err)
	}
	var pid int
	if _, err := fmt.Sscanf(s.Shim, "pid %d", &pid); err == nil && pid > 1 {
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
			d.t.Errorf("cannot end the shim: %v", err)
		}
	}
	if left := d.qemus(); len(left) > 0 {
		d.t.Errorf("processes of guests are left: %v", left)
	}
	if ents, err := os.ReadDir(filepath.Join(d.dir, "data", "vm", "vm")); err != nil || len(ents) > 0 {
		d.t.Errorf("files of guests are left: %v, %v", ents, err)
	}
	if d.t.Failed() {
		lines := strings.Split(d.logs.String(), "\n")
		d.t.Logf("the daemon said last:\n%s", strings.Join(lines[max(0, len(lines)-40):], "\n"))
	}
}

// qemus are the processes whose command line names this test's folder.
func (d *daemon) qemus() (pids []int) {
	ents, _ := os.ReadDir("/proc")
	for _, e := range ents {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if bytes.Contains(b, []byte("qemu-system")) && bytes.Contains(b, []byte(d.dir+"/")) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (d *daemon) await(what string, cond func() (ok bool, now string)) {
	d.t.Helper()
	for end := time.Now().Add(patience); ; {
		ok, now := cond()
		if ok {
			return
		}
		if time.Now().After(end) {
			d.t.Fatalf("not within %s: %s; %s", patience, what, now)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-d.t.Context().Done():
			d.t.Fatalf("ended while waiting: %s; %s", what, now)
		}
	}
}

// box is one guest.
type box struct {
	*daemon
	name  string
	addrs []string // where clients connect, by port
}

// run makes a guest of image with the given ports and starts it.
func (d *daemon) run(name, image string, ports []int, change func(*instance.Spec), command ...string) *box {
	d.t.Helper()
	b := &box{daemon: d, name: name}
	never := idle.Duration(0)
	s := instance.Spec{Name: name, Runtime: "microvm", Image: image, Command: command, Memory: 128 << 20, Restart: instance.RestartNo,
		PauseAfter: &never, StopAfter: &never, ReadyTimeout: idle.Duration(patience)}
	for _, p := range ports {
		listen := freePort(d.t)
		b.addrs = append(b.addrs, listen)
		s.Expose = append(s.Expose, instance.Endpoint{Listen: listen, Target: "127.0.0.1:" + strconv.Itoa(p)})
	}
	if change != nil {
		change(&s)
	}
	if _, err := d.Create(d.t.Context(), hostctl.Create{Spec: s, Start: true}); err != nil {
		var said bytes.Buffer
		_ = d.Logs(d.t.Context(), name, 30, false, &said)
		d.t.Fatalf("cannot start %s: %v; it said:\n%s", name, err, &said)
	}
	return b
}

// freePort is a loopback address on which nobody listens.
func freePort(t *testing.T) string {
	port, err := freeport.Take()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", port)
}

func (b *box) get() hostctl.Instance {
	b.t.Helper()
	o, err := b.Get(b.t.Context(), b.name)
	if err != nil {
		b.t.Fatal(err)
	}
	return o
}

// is waits for a state. Reading it wakes nothing.
func (b *box) is(state string) hostctl.Instance {
	b.t.Helper()
	var o hostctl.Instance
	b.await(b.name+" is "+state, func() (bool, string) {
		o = b.get()
		return o.State == state, fmt.Sprintf("it is %s: %s; blocks %+v; activity %+v", o.State, o.StatusReason, o.Blocks, o.Activity)
	})
	return o
}

func (b *box) do(verb string, q url.Values) {
	b.t.Helper()
	if _, err := b.Do(b.t.Context(), b.name, verb, q); err != nil {
		b.t.Fatalf("cannot %s %s: %v", verb, b.name, err)
	}
}

// pause freezes it by hand. The end of a connection that is still on its way
// wakes it again, so it is tried until it stays.
func (b *box) pause() {
	b.t.Helper()
	b.await(b.name+" is paused by hand", func() (bool, string) {
		_, err := b.Do(b.t.Context(), b.name, "pause", url.Values{"force": {"true"}})
		return err == nil, fmt.Sprint(err)
	})
}

// sinks pauses it and waits for a rung. What a client leaves behind late, such
// as the end of its connection, wakes it once more.
func (b *box) sinks(rung string) {
	b.t.Helper()
	b.await(b.name+" is "+rung, func() (bool, string) {
		o := b.get()
		if o.State == "running" {
			_, _ = b.Do(b.t.Context(), b.name, "pause", url.Values{"force": {"true"}}) // looked at again
		}
		return o.State == rung, fmt.Sprintf("it is %s: %s; blocks %+v", o.State, o.StatusReason, o.Blocks)
	})
}

// signal is sent to its QEMU.
func (b *box) signal(s syscall.Signal) {
	b.t.Helper()
	pid := b.get().PID
	if pid <= 1 {
		b.t.Fatalf("%s has no process: %+v", b.name, b.get())
	}
	if err := syscall.Kill(pid, s); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) dial(port int) net.Conn {
	b.t.Helper()
	c, err := net.DialTimeout("tcp", b.addrs[port], patience)
	if err != nil {
		b.t.Fatal(err)
	}
	return c
}

// ask sends a line on a connection and returns the answer.
func (b *box) ask(c net.Conn, line string) string {
	b.t.Helper()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		b.t.Fatal(err)
	}
	if _, err := fmt.Fprintf(c, "%s\n", line); err != nil {
		b.t.Fatalf("%s: %q: %v", b.name, line, err)
	}
	got, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		b.t.Fatalf("%s: %q: %v; it is %+v", b.name, line, err, b.get())
	}
	return strings.TrimSpace(got)
}

// tell is ask on a connection of its own.
func (b *box) tell(line string) string {
	b.t.Helper()
	c := b.dial(0)
	defer c.Close()
	return b.ask(c, line)
}
