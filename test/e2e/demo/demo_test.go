package demo

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
	"lull/internal/lib/waittest"
)

// oneFile returns the path of a lull that contains its helpers, or skips the test
// if there is none.
func oneFile(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("LULL_BIN_DIR"); dir != "" {
		return filepath.Join(dir, "one", "lull")
	}
	return programtest.Build(t, "lull/cmd/lull")
}

// run is a running demo.
type run struct {
	t    *testing.T
	tmp  string // its TMPDIR
	cmd  *exec.Cmd
	out  io.ReadCloser
	gone chan struct{} // closed at the end of its output

	mu   sync.Mutex
	said []string
}

// event matches a line of output that reports an event.
var event = regexp.MustCompile(`^\d\d:\d\d:\d\d  (\S+) +(.*)$`)

// start starts a demo whose directory is below tmp.
func start(t *testing.T, tmp string, cmd *exec.Cmd) *run {
	t.Helper()
	r := &run{t: t, tmp: tmp, cmd: cmd, gone: make(chan struct{})}
	out, err := cmd.StdoutPipe()
	errtest.None(t, err)
	r.out, cmd.Stderr = out, os.Stderr
	cmd.WaitDelay = time.Minute
	errtest.None(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // in case a failed test left it running
		if t.Failed() {
			t.Log("it said:\n" + strings.Join(r.lines(), "\n"))
		}
	})
	go func() {
		defer close(r.gone)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			r.mu.Lock()
			r.said = append(r.said, lines.Text())
			r.mu.Unlock()
		}
	}()
	return r
}

func (r *run) lines() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string{}, r.said...)
}

// await waits until the demo prints an event of name that contains text. It fails
// the test if the demo ends first.
func (r *run) await(name, text string) {
	r.t.Helper()
	waittest.Until(r.t, name+" "+text, func() bool {
		select {
		case <-r.gone:
			r.t.Fatalf("the demo ended before: %s %s", name, text)
		default:
		}
		return r.saw(name, text)
	})
}

func (r *run) saw(name, text string) bool {
	for _, line := range r.lines() {
		if m := event.FindStringSubmatch(line); m != nil && m[1] == name && strings.Contains(m[2], text) {
			return true
		}
	}
	return false
}

// end waits until the demo has ended. It must succeed and leave nothing behind.
func (r *run) end() {
	r.t.Helper()
	<-r.gone
	if err := r.cmd.Wait(); err != nil {
		r.t.Errorf("the demo ended with %v", err)
	}
	for what, left := range map[string]func() []string{"files": r.files, "processes": r.processes, "sockets": r.sockets, "control groups": r.groups} {
		if l := left(); len(l) > 0 {
			r.t.Errorf("left %s: %v", what, l)
		}
	}
}

func (r *run) files() (left []string) {
	entries, err := os.ReadDir(r.tmp)
	if err != nil {
		return []string{err.Error()}
	}
	for _, e := range entries {
		left = append(left, e.Name())
	}
	return left
}

// processes returns the processes whose command line contains files of the demo.
// A process that has ended and was not reaped has no command line.
func (r *run) processes() (left []string) {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range all {
		if b, err := os.ReadFile(file); err == nil && bytes.Contains(b, []byte(r.tmp)) {
			left = append(left, strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return left
}

func (r *run) sockets() (left []string) {
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return []string{err.Error()}
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, r.tmp) {
			left = append(left, line)
		}
	}
	return left
}

// groups returns the control groups of the demo's host, whose name is derived
// from its directory.
func (r *run) groups() (left []string) {
	for _, line := range r.lines() {
		if dir, ok := strings.CutPrefix(line, "  . "); ok {
			sum := sha256.Sum256([]byte(filepath.Join(filepath.Dir(dir), "host", "shim")))
			name := "h" + hex.EncodeToString(sum[:4])
			_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, _ error) error { // a group may be removed in the meantime
				if d != nil && d.IsDir() && d.Name() == name {
					left = append(left, path)
				}
				return nil
			})
		}
	}
	return left
}

// knowsAll checks that no worker was unknown before the telemetry of one is
// switched off.
func (r *run) knowsAll() {
	r.t.Helper()
	for _, line := range r.lines() {
		switch m := event.FindStringSubmatch(line); {
		case m != nil && m[1] == "dark":
			return
		case strings.Contains(line, "unknown"):
			r.t.Errorf("in the first minute: %s", line)
		}
	}
}

// folder returns a directory for the demo that PostgreSQL's user can access.
func folder(t *testing.T) string {
	t.Helper()
	tmp, err := os.MkdirTemp("", "demo")
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(tmp) })
	errtest.None(t, os.Chmod(tmp, 0o755))
	return tmp
}

// TestDemo checks that programs fall asleep and are woken by their clients, that
// a microVM is saved to disk where possible, and that abandoned workers of a
// fleet are stopped. With the environment that the demo prints, lull must reach
// its host and server.
func TestDemo(t *testing.T) {
	lull, tmp := oneFile(t), folder(t)
	cmd := exec.Command(lull, "demo")
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp, "LULL_SERVER=http://127.0.0.1:1", "LULL_HOST_DATA=/nowhere", "AWS_PROFILE=none")
	r := start(t, tmp, cmd)
	r.await("web", "paused")
	r.await("web", "paused, woken")
	r.await("old-1", "stopped")
	_, err := exec.LookPath("qemu-system-x86_64")
	machines := err == nil && os.Getenv("LULL_GUEST_KERNEL") != "" && os.Getenv("LULL_BIN_DIR") != ""
	if machines {
		for _, state := range []string{"running", "hibernated", "hibernated, woken"} { // each may take a while without hardware virtualization
			r.await("guest", state)
		}
	}
	for _, verb := range []string{"ps", "why web", "worker ls", "worker why old-1"} {
		out, err := exec.Command("sh", "-c", ". "+r.environment()+" && lull "+verb).CombinedOutput()
		if err != nil {
			t.Errorf("lull %s: %v\n%s", verb, err, out)
		}
	}
	r.knowsAll()
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	r.end()
	t.Run("MicroVM", func(t *testing.T) {
		if !machines {
			t.Skip("its microVM was not shown: QEMU or the guest kernel is not installed, or LULL_BIN_DIR is not set")
		}
	})
}

// environment returns the path of the file that users are told to source.
func (r *run) environment() string {
	r.t.Helper()
	for _, line := range r.lines() {
		if file, ok := strings.CutPrefix(line, "  . "); ok {
			return file
		}
	}
	r.t.Fatal("it never said where it is")
	return ""
}

// TestEnds checks that nothing is left behind when the demo ends early:
// interrupted while it starts, with its terminal, or with the reader of its
// output.
func TestEnds(t *testing.T) {
	lull := oneFile(t)
	begun := func(r *run) {
		waittest.Until(t, "the host's directory", func() bool {
			all, err := filepath.Glob(filepath.Join(r.tmp, "*", "host"))
			return err == nil && len(all) > 0
		})
	}
	for name, how := range map[string]func(r *run) error{
		"starting":    func(r *run) error { begun(r); return r.cmd.Process.Signal(os.Interrupt) },
		"terminated":  func(r *run) error { r.await("web", "running"); return r.cmd.Process.Signal(syscall.SIGTERM) },
		"terminal":    func(r *run) error { r.await("web", "running"); return r.cmd.Process.Signal(syscall.SIGHUP) },
		"reader gone": func(r *run) error { r.await("web", "running"); return r.out.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			tmp := folder(t)
			cmd := exec.Command(lull, "demo")
			cmd.Env = append(os.Environ(), "TMPDIR="+tmp)
			r := start(t, tmp, cmd)
			if err := how(r); err != nil {
				t.Error(err)
			}
			r.end()
		})
	}
}

// TestFirstRun runs the demo with nothing else installed: in a root directory
// with one file, an empty /tmp, /proc and /dev, and without a network.
func TestFirstRun(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, for chroot")
	}
	for _, tool := range []string{"unshare", "chroot", "ip"} {
		_, err := exec.LookPath(tool)
		daemontest.Need(t, err, "util-linux, coreutils or iproute2")
	}
	lull := oneFile(t)
	for name, user := range map[string]string{"root": "0:0", "ordinary user": "65534:65534"} {
		t.Run(name, func(t *testing.T) {
			root := folder(t)
			for _, dir := range []string{"tmp", "proc", "dev", "bin"} {
				errtest.None(t, os.Mkdir(filepath.Join(root, dir), 0o755))
			}
			errtest.None(t, errors.Join(os.Chmod(filepath.Join(root, "tmp"), 0o777|os.ModeSticky), programtest.Copy(lull, filepath.Join(root, "bin", "lull"))))
			cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "sh", "-ec",
				`mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"; ip link set lo up; chroot --userspec="$2" "$1" /bin/lull demo; exit $?`, "sh", root, user)
			cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
			r := start(t, filepath.Join(root, "tmp"), cmd)
			r.await("web", "paused")
			r.await("web", "paused, woken")
			r.await("old-1", "stopped")
			r.knowsAll()
			for _, line := range r.lines() {
				if len(line) > 80 {
					t.Errorf("wider than a terminal: %s", line)
				}
			}
			errtest.None(t, inside(root))
			r.end()
		})
	}
}

// inside sends an interrupt to the demo whose root directory is root.
func inside(root string) error {
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, file := range all {
		b, err := os.ReadFile(file)
		if err != nil || string(b) != "/bin/lull\x00demo\x00" {
			continue
		}
		if at, err := os.Readlink(filepath.Join(filepath.Dir(file), "root")); err != nil || at != root {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			return err
		}
		return syscall.Kill(pid, syscall.SIGINT)
	}
	return fmt.Errorf("no demo runs in %s", root)
}
