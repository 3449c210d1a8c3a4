package machines

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/hostctl"
)

func TestMain(m *testing.M) {
	daemontest.Main(m, "lull/cmd/lull-harness", "lull/internal/runtime/microvm/testdata/guest")
}

// host starts a daemon for the test, or skips it if guests cannot run here.
func host(t *testing.T, args ...string) *daemontest.Host {
	t.Helper()
	if testing.Short() {
		t.Skip("a guest boots in seconds")
	}
	kernel := os.Getenv("LULL_GUEST_KERNEL")
	if kernel == "" {
		t.Skip("no guest kernel: make test fetches one")
	}
	daemontest.Need(t, tool("qemu-system-x86_64"), "qemu-system-x86")
	daemontest.Need(t, tool("mke2fs"), "e2fsprogs")
	return daemontest.Start(t, daemontest.Config{Args: append([]string{"--guest-kernel", kernel, "--probe", "500ms", "--stop-after", "0"}, args...)})
}

func tool(name string) error {
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/sbin") {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%s is not installed", name)
}

func rounds(t *testing.T) int { return scaletest.Count(t, "LULL_VM_CYCLES", 2) }

// small returns the root files of a guest that contains only the test program.
func small(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	daemontest.Build(t)
	b, err := os.ReadFile(daemontest.Program("guest"))
	if err == nil {
		err = errors.Join(os.Mkdir(filepath.Join(dir, "bin"), 0o755), os.Mkdir(filepath.Join(dir, "tmp"), 0o755),
			os.WriteFile(filepath.Join(dir, "bin", "guest"), b, 0o755))
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// box is one guest.
type box struct {
	*daemontest.Host
	name  string
	addrs []string // where clients connect, by port
}

// run creates and starts a guest of image with the given ports.
func run(d *daemontest.Host, name, image string, ports []int, change func(*instance.Spec), command ...string) *box {
	d.T.Helper()
	b := &box{Host: d, name: name}
	never := idle.Duration(0)
	s := instance.Spec{Name: name, Runtime: "microvm", Image: image, Command: command, Memory: 128 << 20, Restart: instance.RestartNo,
		PauseAfter: &never, StopAfter: &never, ReadyTimeout: idle.Duration(daemontest.WaitLimit)}
	for _, p := range ports {
		listen := daemontest.Addr(d.T)
		b.addrs = append(b.addrs, listen)
		s.Expose = append(s.Expose, instance.Endpoint{Listen: listen, Target: "127.0.0.1:" + strconv.Itoa(p)})
	}
	if change != nil {
		change(&s)
	}
	d.Launch(s)
	return b
}

func (b *box) get() hostctl.Instance {
	b.T.Helper()
	return b.Show(b.name)
}

// is waits until the guest is in a state. Reading the state does not wake it.
func (b *box) is(state string) hostctl.Instance {
	b.T.Helper()
	return b.Await(b.name, state)
}

// pause pauses the guest manually. The end of a connection that is still in
// flight can wake it again, so pause repeats until it stays paused.
func (b *box) pause() {
	b.T.Helper()
	daemontest.Wait(b.T, b.name+" is paused manually", func() (bool, string) {
		err := b.Force(b.name)
		return err == nil, fmt.Sprint(err)
	})
}

// sinks pauses the guest and waits until it reaches a step of the ladder. If late
// packets of a client wake it, such as the end of its connection, sinks repeats
// the pause.
func (b *box) sinks(rung string) {
	b.T.Helper()
	b.Until(b.name, "it is "+rung, func(o hostctl.Instance) bool {
		if o.State == "running" {
			_ = b.Force(b.name) // the loop checks the result
		}
		return o.State == rung
	})
}

// signal sends a signal to the guest's QEMU.
func (b *box) signal(s syscall.Signal) {
	b.T.Helper()
	pid := b.get().PID
	if pid <= 1 {
		b.T.Fatalf("%s has no process: %+v", b.name, b.get())
	}
	if err := syscall.Kill(pid, s); err != nil {
		b.T.Fatal(err)
	}
}

func (b *box) dial(port int) net.Conn {
	b.T.Helper()
	c, err := net.DialTimeout("tcp", b.addrs[port], daemontest.WaitLimit)
	if err != nil {
		b.T.Fatal(err)
	}
	return c
}

// ask sends a line on a connection and returns the answer. It fails the test if
// there is none.
func (b *box) ask(c net.Conn, line string) string {
	b.T.Helper()
	if err := c.SetDeadline(time.Now().Add(daemontest.WaitLimit)); err != nil {
		b.T.Fatal(err)
	}
	if _, err := fmt.Fprintf(c, "%s\n", line); err != nil {
		b.T.Fatalf("%s: %q: %v", b.name, line, err)
	}
	got, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		b.T.Fatalf("%s: %q: %v; it is %+v", b.name, line, err, b.get())
	}
	return strings.TrimSpace(got)
}

// try sends a line on a new connection and returns the answer, or an error if
// there is none.
func (b *box) try(line string) (string, error) {
	c, err := net.DialTimeout("tcp", b.addrs[0], daemontest.WaitLimit)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(daemontest.WaitLimit)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintf(c, "%s\n", line); err != nil {
		return "", err
	}
	got, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSpace(got), err
}

// send sends a line on a new connection and returns the answer. It fails the test
// if there is none.
func (b *box) send(line string) string {
	b.T.Helper()
	c := b.dial(0)
	defer c.Close()
	return b.ask(c, line)
}
