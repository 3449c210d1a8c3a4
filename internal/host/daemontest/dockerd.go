package daemontest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/waittest"
)

// Dockerd is a private Docker daemon with its own data and socket. It has one
// image, box:1, made from Image.
type Dockerd struct {
	T         testing.TB
	dir       string
	namespace string // network namespace, a file; "" for that of the test
	bridge    string // the daemon's own bridge, if it has no network namespace of its own
	cmd       *exec.Cmd
	gone      chan struct{}
}

// StartDockerd runs a Docker daemon until the test ends. Its containers survive its
// restarts, as in production.
func StartDockerd(t testing.TB) *Dockerd {
	t.Helper()
	return StartDockerdIn(t, "")
}

// StartDockerdIn is StartDockerd in the network namespace given by a file. Only
// there does the daemon set up the firewall.
func StartDockerdIn(t testing.TB, namespace string) *Dockerd {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("dockerd needs root")
	}
	for _, p := range []string{"/usr/sbin/dockerd", "/usr/bin/docker"} {
		_, err := os.Stat(p)
		Need(t, err, "docker.io")
	}
	dir, err := os.MkdirTemp("", "lk")
	if err != nil {
		t.Fatal(err)
	}
	k := &Dockerd{T: t, dir: dir, namespace: namespace}
	if namespace == "" {
		k.bridge = k.newBridge()
	}
	t.Cleanup(k.end)
	k.Start()
	tar := filepath.Join(dir, "root.tar")
	if out, err := exec.Command("tar", "-C", Image(t), "-cf", tar, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	k.Must("import", tar, "box:1")
	return k
}

// bridges is the number of bridges that this process has created.
var bridges atomic.Int32

// newBridge creates a bridge with a network of its own. On docker0 the containers
// of two Docker daemons would share addresses.
func (k *Dockerd) newBridge() string {
	k.T.Helper()
	name := fmt.Sprintf("br-lk%dx%d", os.Getpid(), bridges.Add(1))
	for _, args := range [][]string{{"link", "add", name, "type", "bridge"},
		{"addr", "add", fmt.Sprintf("10.%d.%d.1/24", 128+rand.IntN(128), rand.IntN(256)), "dev", name}, {"link", "set", name, "up"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			k.T.Fatalf("ip %s: %v: %s", args, err, out)
		}
	}
	return name
}

// end stops the daemon and removes everything that it created.
func (k *Dockerd) end() {
	if k.Over() {
		k.Start()
	}
	if ids := strings.Fields(k.Say("ps", "-aq")); len(ids) > 0 {
		k.Say(append([]string{"rm", "-f"}, ids...)...)
	}
	k.Stop()
	if k.bridge != "" {
		if out, err := exec.Command("ip", "link", "del", k.bridge).CombinedOutput(); err != nil {
			k.T.Errorf("%v: %s", err, out)
		}
	}
	// Namespaces of containers that have exited are still mounted below the
	// directory.
	b, _ := os.ReadFile("/proc/self/mountinfo")
	for _, f := range strings.Fields(string(b)) {
		if strings.HasPrefix(f, k.dir+"/") {
			_ = syscall.Unmount(f, syscall.MNT_DETACH)
		}
	}
	if err := os.RemoveAll(k.dir); err != nil {
		k.T.Error(err)
	}
}

// Socket returns the path of the daemon's socket.
func (k *Dockerd) Socket() string { return k.dir + "/s" }

// Start starts the daemon, for the first time or after Stop or Kill, and waits
// until it answers.
func (k *Dockerd) Start() {
	k.T.Helper()
	log, err := os.OpenFile(k.dir+"/log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		k.T.Fatal(err)
	}
	defer log.Close()
	args := []string{"/usr/sbin/dockerd", "--data-root", k.dir + "/d", "--exec-root", k.dir + "/e", "-H", "unix://" + k.Socket(),
		"--pidfile", k.dir + "/pid", "--live-restore"}
	if k.namespace == "" {
		args = append(args, "--iptables=false", "--bridge", k.bridge)
	} else {
		args = append([]string{"nsenter", "--net=" + k.namespace}, args...)
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		k.T.Fatal(err)
	}
	k.cmd, k.gone = cmd, make(chan struct{})
	go func(gone chan struct{}) { _ = cmd.Wait(); close(gone) }(k.gone)
	if !waittest.Within(WaitLimit, func() bool {
		return k.Over() || exec.Command("/usr/bin/docker", "-H", "unix://"+k.Socket(), "version").Run() == nil
	}) || k.Over() {
		b, _ := os.ReadFile(k.dir + "/log")
		k.T.Fatalf("dockerd does not come up:\n%s", b[max(0, len(b)-4000):])
	}
}

// Over reports whether the daemon has exited.
func (k *Dockerd) Over() bool {
	select {
	case <-k.gone:
		return true
	default:
		return false
	}
}

// Stop ends the daemon. Its containers continue to run.
func (k *Dockerd) Stop() {
	_ = k.cmd.Process.Signal(syscall.SIGTERM) // fails if it has already ended
	select {
	case <-k.gone:
	case <-time.After(WaitLimit):
		k.T.Error("dockerd does not end")
		_ = k.cmd.Process.Kill()
		<-k.gone
	}
}

// Kill kills the daemon and its containerd together. Their containers continue to
// run.
func (k *Dockerd) Kill() {
	_ = k.cmd.Process.Kill() // fails if it has already ended
	<-k.gone
	file := k.dir + "/e/containerd/containerd.pid"
	b, err := os.ReadFile(file)
	if err == nil {
		err = os.Remove(file) // without it, a zombie would count as running
	}
	if err != nil {
		k.T.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid <= 1 {
		k.T.Fatalf("the PID of containerd is %q", b)
	}
	_ = syscall.Kill(pid, syscall.SIGKILL) // fails if it has ended with its parent
}

// Hang stops the daemon's process with SIGSTOP, as a stalled disk might. It
// receives requests, but does not answer them until Continue.
func (k *Dockerd) Hang() { _ = k.cmd.Process.Signal(syscall.SIGSTOP) }

// Continue undoes Hang.
func (k *Dockerd) Continue() { _ = k.cmd.Process.Signal(syscall.SIGCONT) }

func (k *Dockerd) command(args []string) *exec.Cmd {
	return exec.Command("/usr/bin/docker", append([]string{"-H", "unix://" + k.Socket()}, args...)...)
}

// Say runs a docker command and returns its output, even if it fails.
func (k *Dockerd) Say(args ...string) string {
	out, _ := k.command(args).Output()
	return strings.TrimSpace(string(out))
}

// Must is Say for a command that must succeed.
func (k *Dockerd) Must(args ...string) string {
	k.T.Helper()
	out, err := k.command(args).CombinedOutput()
	if err != nil {
		k.T.Fatalf("docker %s: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// Fails is Say for a command that must fail.
func (k *Dockerd) Fails(args ...string) string {
	k.T.Helper()
	out, err := k.command(args).CombinedOutput()
	if err == nil {
		k.T.Fatalf("docker %s succeeds: %s", args, out)
	}
	return string(out)
}
