package host

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/pty"
	"lull/internal/lib/waittest"
)

// terminal is a lull command that runs on a terminal.
type terminal struct {
	t      *testing.T
	master *os.File
	cmd    *exec.Cmd
	before unix.Termios
	exit   chan int

	mu  sync.Mutex
	out bytes.Buffer
}

func (x *terminal) Write(p []byte) (int, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.out.Write(p)
}

func (x *terminal) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return strings.ReplaceAll(x.out.String(), "\r", "")
}

func (x *terminal) says(what string) {
	x.t.Helper()
	if !waittest.Within(daemontest.WaitLimit, func() bool { return strings.Contains(x.text(), what) }) {
		x.t.Fatalf("it printed %q, want %q", x.text(), what)
	}
}

// ends waits until the command has ended, and checks its exit code and that it
// restored the terminal.
func (x *terminal) ends(code int) {
	x.t.Helper()
	if got := <-x.exit; got != code {
		x.t.Errorf("exit code %d, want %d; it printed %q", got, code, x.text())
	}
	if now := attributes(x.t, x.master); now != x.before {
		x.t.Errorf("the terminal is left as %+v, and was %+v", now, x.before)
	}
}

func attributes(t *testing.T, f *os.File) unix.Termios {
	t.Helper()
	a, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	errtest.None(t, err)
	return *a
}

// onTerminal runs lull on a terminal of 33 rows and 101 columns.
func onTerminal(t *testing.T, d *daemontest.Host, args ...string) *terminal {
	t.Helper()
	master, slave, err := pty.Open(33, 101)
	errtest.None(t, err)
	t.Cleanup(func() { master.Close() })
	x := &terminal{t: t, master: master, exit: make(chan int, 1)}
	x.before = attributes(t, master)
	x.cmd = exec.Command(daemontest.Program("lull"), args...)
	x.cmd.Env = append(os.Environ(), "LULL_HOST=unix://"+d.Dir+"/host.sock")
	x.cmd.Stdin, x.cmd.Stdout, x.cmd.Stderr = slave, slave, slave
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	errtest.None(t, x.cmd.Start())
	go pty.Copy(x, master)
	go func() {
		err := x.cmd.Wait()
		exit := (*exec.ExitError)(nil)
		if err != nil && !errors.As(err, &exit) {
			t.Error(err)
		}
		x.exit <- x.cmd.ProcessState.ExitCode()
		slave.Close() // kept open until the attributes can no longer change
	}()
	return x
}

// TestExecOnATerminal runs lull exec as a user does, and checks that it restores
// the terminal however it ends.
func TestExecOnATerminal(t *testing.T) {
	d := host(t)
	d.Launch(instance.Spec{Name: "box", Command: []string{"sleep", "86400"}})
	const loop = `tty; stty size; trap "stty size" WINCH; trap "exit 9" INT; echo up; while :; do sleep 0.1; done`
	running := func() {
		t.Helper()
		if o := d.Show("box"); o.State != "running" {
			t.Errorf("the instance is %s", o.State)
		}
	}

	x := onTerminal(t, d, "exec", "-it", "box", "--", "sh", "-c", loop)
	x.says("up\n")
	if s := x.text(); !strings.HasPrefix(s, "/dev/pts/") || !strings.Contains(s, "\n33 101\n") {
		t.Errorf("it printed %q", s)
	}
	errtest.None(t, pty.Resize(x.master, 44, 55))
	x.says("44 55\n")
	errtest.Get(x.master.Write([]byte{3}))(t)
	x.ends(9)
	running()

	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP} {
		x = onTerminal(t, d, "exec", "-it", "box", "--", "sh", "-c", loop)
		x.says("up\n")
		errtest.None(t, x.cmd.Process.Signal(sig))
		x.ends(130)
		running()
	}

	x = onTerminal(t, d, "exec", "-it", "box", "--", "no-such-command-anywhere")
	x.ends(127)

	x = onTerminal(t, d, "exec", "-it", "box", "--", "sh", "-c", loop)
	x.says("up\n")
	d.Kill()
	x.ends(1)
	d.Boot()
	running()
}

// TestExecSignals sends Ctrl-C to lull exec without a terminal inside. The
// command must receive it. The third Ctrl-C must end a command that ignores it.
func TestExecSignals(t *testing.T) {
	d := host(t)
	d.Launch(instance.Spec{Name: "box", Command: []string{"sleep", "86400"}})
	x := onTerminal(t, d, "exec", "box", "--", "sh", "-c", `trap "echo caught; exit 7" INT; echo up; while :; do sleep 0.1; done`)
	x.says("up\n")
	errtest.Get(x.master.Write([]byte{3}))(t)
	x.ends(7)
	x.says("caught\n")

	x = onTerminal(t, d, "exec", "box", "--", "sh", "-c", `trap "echo again" INT; echo up; while :; do sleep 0.1; done`)
	x.says("up\n")
	for n := range 3 {
		errtest.Get(x.master.Write([]byte{3}))(t)
		if n < 2 && !waittest.Within(daemontest.WaitLimit, func() bool { return strings.Count(x.text(), "again\n") > n }) {
			t.Fatalf("signal %d did not arrive: %q", n+1, x.text())
		}
	}
	x.ends(130)
	if o := d.Show("box"); o.State != "running" {
		t.Errorf("the instance is %s", o.State)
	}
}
