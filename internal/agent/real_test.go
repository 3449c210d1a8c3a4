package agent

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/platform/proc"
)

// nook is a part of this machine with its own terminals, network and mounts, so that
// other activity on the machine does not affect it. CPU and disks are shared, so for
// these the tests check only that use is seen, not that quiet is.
type nook struct {
	t    *testing.T
	pid  int
	root string // root directory for the probes
}

func newNook(t *testing.T) *nook {
	t.Helper()
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIP real machine: needs root for namespaces")
	}
	cmd := exec.Command("unshare", "-m", "-n", "--propagation", "private", "sh", "-c", `
set -e
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts /dev/pts
mount --bind /dev/pts/ptmx /dev/ptmx
mount -t tmpfs tmpfs /run
ip link set lo up
echo ready
cat`)
	in, err := cmd.StdinPipe()
	errtest.None(t, err)
	out, err := cmd.StdoutPipe()
	errtest.None(t, err)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Skipf("SKIP real machine: cannot make namespaces: %v", err)
	}
	t.Cleanup(func() { in.Close(); cmd.Wait() })
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Skipf("SKIP real machine: cannot set namespaces up")
	}
	n := &nook{t: t, pid: cmd.Process.Pid, root: t.TempDir()}
	inside := fmt.Sprintf("/proc/%d/root", n.pid)
	for name, target := range map[string]string{
		"dev": inside + "/dev", "sys": "/sys", "run": inside + "/run",
		"proc/stat": "/proc/stat", "proc/diskstats": "/proc/diskstats", "proc/net": fmt.Sprintf("/proc/%d/net", n.pid),
	} {
		path := filepath.Join(n.root, name)
		errtest.None(t, os.MkdirAll(filepath.Dir(path), 0o755))
		errtest.None(t, os.Symlink(target, path))
	}
	return n
}

// command returns a command that runs inside the nook.
func (n *nook) command(name string, args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"-t", fmt.Sprint(n.pid), "-m", "-n", name}, args...)...)
}

func (n *nook) run(script string) {
	n.t.Helper()
	if out, err := n.command("sh", "-c", script).CombinedOutput(); err != nil {
		n.t.Fatalf("%s: %v: %s", script, err, out)
	}
}

// start runs a program until the test ends or stop is called. in is its standard
// input.
func (n *nook) start(cmd *exec.Cmd) (in io.WriteCloser, stop func()) {
	n.t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	ended := false
	stop = func() {
		if !ended {
			ended = true
			in.Close()
			cmd.Process.Kill()
			cmd.Wait()
		}
	}
	n.t.Cleanup(stop)
	return in, stop
}

var realLimits = proc.Limits{CPU: 5, Network: 10e3, Disk: 100e3}

// look returns a new reading of one signal.
func (n *nook) look(m *proc.Machine, signal string) idle.Reading {
	for _, r := range m.Read(time.Now(), realLimits, nil) {
		if r.Signal == signal {
			return r
		}
	}
	n.t.Fatalf("no reading of %s", signal)
	return idle.Reading{}
}

// TestRealLoads checks that real work of every kind is read as use.
func TestRealLoads(t *testing.T) {
	t.Parallel()
	n := newNook(t)
	m := proc.NewMachine(proc.MachineConfig{Root: n.root, LeastWindow: 100 * time.Millisecond})
	defer m.Close()
	m.Read(time.Now(), realLimits, nil)

	t.Run("silent computation in a child process", func(t *testing.T) {
		_, stop := n.start(n.command("sh", "-c", "timeout -s KILL 10 sh -c 'while :; do :; done'"))
		<-time.After(2 * time.Second)
		if r := n.look(m, proc.SignalCPU); r.State != idle.Active {
			t.Errorf("%+v", r)
		}
		stop()
	})
	t.Run("disk writes", func(t *testing.T) {
		m.Read(time.Now(), realLimits, nil)
		path := filepath.Join(t.TempDir(), "data")
		f, err := os.Create(path)
		errtest.None(t, err)
		f.Write(bytes.Repeat([]byte("lull"), 4<<20))
		f.Sync()
		f.Close()
		if r := n.look(m, proc.SignalDisk); r.State != idle.Active {
			t.Errorf("%+v", r)
		}
	})
	t.Run("traffic over a veth", func(t *testing.T) {
		if r := n.look(m, proc.SignalNetwork); r.State != idle.Absent {
			t.Errorf("a corner with loopback alone: %+v", r)
		}
		n.run(`ip link add lullv0 type veth peer name lullv1 && ip addr add 192.0.2.1/30 dev lullv0 && ip link set lullv0 up && ip link set lullv1 up && sysctl -qw net.ipv6.conf.lullv0.disable_ipv6=1 net.ipv6.conf.lullv1.disable_ipv6=1`)
		waittest.Until(t, "quiet", func() bool { return n.look(m, proc.SignalNetwork).State == idle.Quiet })
		n.run(`ip neigh add 192.0.2.2 lladdr 02:00:00:00:00:01 dev lullv0`)
		// A reading within the minimum window only repeats the previous one.
		waittest.Until(t, "active", func() bool {
			n.run(`bash -c 'dd if=/dev/zero bs=1200 count=2000 >/dev/udp/192.0.2.2/9'`)
			return n.look(m, proc.SignalNetwork).State == idle.Active
		})
		// On a busy machine the kernel counts the last packets late. If loopback
		// traffic counted, no reading would be quiet.
		waittest.Until(t, "quiet in spite of loopback traffic", func() bool {
			m.Read(time.Now(), realLimits, nil)
			n.run(`head -c 500000 /dev/zero | timeout 1 bash -c 'cat > /dev/udp/127.0.0.1/9' || true`)
			return n.look(m, proc.SignalNetwork).State == idle.Quiet
		})
	})
}

// TestRealLogin checks a session of sshd with a real pty: an open session is quiet,
// and a key press is use.
func TestRealLogin(t *testing.T) {
	t.Parallel()
	for _, tool := range []string{"/usr/sbin/sshd", "/usr/bin/ssh"} {
		if _, err := os.Stat(tool); err != nil {
			t.Skipf("SKIP sshd: %v", err)
		}
	}
	n := newNook(t)
	m := proc.NewMachine(proc.MachineConfig{Root: n.root})
	defer m.Close()
	logins := &proc.LoginReader{Root: n.root}
	if r := n.look(m, proc.SignalTerminals); r.State != idle.Quiet || r.Value != 0 {
		t.Fatalf("before: %+v", r)
	}
	in := n.login(t)
	waittest.Until(t, "the session", func() bool { return len(m.Terminals(nil)) > 0 || n.look(m, proc.SignalTerminals).Value > 0 })
	n.quiet(t, m, "an open shell without input")
	if r := logins.Users(t.Context(), time.Now(), true); r.State != idle.Active {
		t.Errorf("with presence: %+v", r)
	}
	fmt.Fprintln(in, "echo hello")
	waittest.Until(t, "typing seen", func() bool { return n.look(m, proc.SignalTerminals).State == idle.Active })
	r := logins.Users(t.Context(), time.Now(), false)
	if time.Since(r.LastEvent) > 30*time.Second {
		t.Errorf("users do not see the key: %+v", r)
	}
	fmt.Fprintln(in, "exit")
	waittest.Until(t, "the session's end", func() bool {
		n.look(m, proc.SignalTerminals)
		return len(m.Terminals(nil)) == 0
	})
}

// TestRealTmux checks a detached tmux: an open session is quiet, and output is use.
func TestRealTmux(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Skipf("SKIP tmux: %v", err)
	}
	n := newNook(t)
	m := proc.NewMachine(proc.MachineConfig{Root: n.root})
	defer m.Close()
	sock := filepath.Join(t.TempDir(), "tmux")
	n.run("TERM=xterm tmux -S " + sock + " -f /dev/null new-session -d 'cat'")
	t.Cleanup(func() { n.command("tmux", "-S", sock, "kill-server").Run() })
	waittest.Until(t, "the terminal", func() bool { n.look(m, proc.SignalTerminals); return len(m.Terminals(nil)) == 1 })
	n.quiet(t, m, "a detached tmux without output")
	n.run("TERM=xterm tmux -S " + sock + " send-keys x Enter")
	waittest.Until(t, "its output seen", func() bool { return n.look(m, proc.SignalTerminals).State == idle.Active })
}

// quiet waits until the terminals have been quiet for longer than the granularity of
// the kernel's terminal times.
func (n *nook) quiet(t *testing.T, m *proc.Machine, what string) {
	t.Helper()
	since := time.Now()
	waittest.Until(t, what+" is quiet", func() bool {
		if n.look(m, proc.SignalTerminals).State != idle.Quiet {
			since = time.Now()
		}
		return time.Since(since) > 10*time.Second
	})
}

// login starts sshd in the nook, opens a session with a terminal, and returns the
// terminal's input.
func (n *nook) login(t *testing.T) io.Writer {
	t.Helper()
	dir := t.TempDir()
	n.run("mkdir -p /run/sshd")
	n.run(fmt.Sprintf(`cd %s && ssh-keygen -q -t ed25519 -N '' -f host && ssh-keygen -q -t ed25519 -N '' -f key && cp key.pub allowed && chmod 600 allowed`, dir))
	conf := fmt.Sprintf("Port 2222\nListenAddress 127.0.0.1\nHostKey %[1]s/host\nAuthorizedKeysFile %[1]s/allowed\nPermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n", dir)
	errtest.None(t, os.WriteFile(filepath.Join(dir, "conf"), []byte(conf), 0o600))
	n.start(n.command("/usr/sbin/sshd", "-D", "-e", "-f", filepath.Join(dir, "conf")))
	var in io.Writer
	waittest.Until(t, "sshd", func() bool {
		return n.command("bash", "-c", "true < /dev/tcp/127.0.0.1/2222").Run() == nil
	})
	in, _ = n.start(n.command("ssh", "-tt", "-p", "2222", "-i", filepath.Join(dir, "key"), "-o", "StrictHostKeyChecking=no",
		"-o", "UserKnownHostsFile=/dev/null", "root@127.0.0.1", "sh"))
	return in
}
