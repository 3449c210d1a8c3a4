package containers

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
)

// finding is one result of doctor.
type finding struct {
	What     string
	OK       bool
	Found    string
	Do       string
	Optional bool
}

// doctor runs lull doctor in dir, on a machine without the programs in lacks,
// and returns its findings by name. Docker's socket is in dir too.
func doctor(t *testing.T, dir string, lacks ...string) map[string]finding {
	t.Helper()
	hide := ""
	path := append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/usr/bin", "/sbin", "/bin")
	slices.Sort(path)
	for _, d := range slices.Compact(path) {
		for _, name := range lacks {
			p := filepath.Join(d, name)
			if _, err := os.Stat(p); err == nil { // a file mounted over it cannot be executed
				hide += "mount --bind /dev/null '" + p + "' && "
			}
		}
	}
	cmd := exec.Command("unshare", "-m", "sh", "-c", hide+"exec ./lull doctor --json")
	cmd.Dir, cmd.Env = dir, []string{"PATH=" + os.Getenv("PATH"), "HOME=/", "LULL_HOST_DATA=" + dir + "/data", "LULL_HOST_DOCKER=" + dir + "/none"}
	return findings(t, cmd)
}

func findings(t *testing.T, cmd *exec.Cmd) map[string]finding {
	t.Helper()
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !(errors.As(err, &exit) && exit.ExitCode() == 1) { // exit code 1 means that something is missing
		t.Fatalf("%v: %v: %s", cmd.Args, err, said.String())
	}
	var l []finding
	if err := json.Unmarshal(out, &l); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	all := map[string]finding{}
	for _, f := range l {
		all[f.What] = f
	}
	return all
}

// programs copies lull and its companion programs, except one, to a new
// directory.
func programs(t *testing.T, but string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for _, p := range []string{"lull", "lull-shim", "lull-harness"} {
		if p == but {
			continue
		}
		b, err := os.ReadFile(daemontest.Program(p))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, p), b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestDoctor checks that each program that a runtime needs is reported when it is
// missing, with the command that installs it, and that all other findings are
// unchanged.
func TestDoctor(t *testing.T) {
	daemontest.NeedRunc(t)
	daemontest.Build(t)
	dir := programs(t, "")
	whole := doctor(t, dir)
	wants := func(lacks, what, do string, optional bool, got map[string]finding) {
		t.Helper()
		if f := got[what]; f.What != what || f.OK || !strings.Contains(f.Do, do) || f.Optional != optional {
			t.Errorf("without %s: %+v, want %q", lacks, f, do)
		}
		for other, f := range got {
			if was, ok := whole[other]; ok && other != what && f.OK != was.OK {
				t.Errorf("without %s: %s is ok %v, was %v", lacks, other, f.OK, was.OK)
			}
		}
	}
	for program, c := range map[string]struct{ what, do string }{
		"runc":               {"container: runc", "apt-get install runc"},
		"qemu-system-x86_64": {"microvm: QEMU", "apt-get install qemu-system-x86"},
		"mke2fs":             {"microvm: images of directories, own files", "apt-get install e2fsprogs"},
		"dockerd":            {"docker: daemon", "apt-get install docker.io"},
	} {
		wants(program, c.what, c.do, true, doctor(t, dir, program))
	}
	wants("lull-harness", "microvm: lull-harness", "make build", true, doctor(t, programs(t, "lull-harness")))
	if got := doctor(t, programs(t, "lull-shim")); !got["lull-shim"].OK || got["lull-shim"].Found != "lull itself" {
		t.Errorf("without lull-shim: %+v, want lull itself to be it", got["lull-shim"])
	}
	for program, what := range map[string]string{"lull-harness": "microvm: lull-harness", "lull-shim": "lull-shim"} {
		dynamic := programs(t, program)
		errtest.None(t, programtest.Copy("/bin/ls", filepath.Join(dynamic, program)))
		got := doctor(t, dynamic)
		wants("a static "+program, what, "make build", program == "lull-harness", got)
		if !strings.Contains(got[what].Found, "dynamically linked") {
			t.Errorf("a dynamic %s: %+v", program, got[what])
		}
	}
	if f := whole["microvm: guest kernel"]; !f.OK { // this machine may have a kernel
		wants("a guest kernel", f.What, "lull guest-kernel", true, whole)
	}
	if _, err := os.Stat("/usr/sbin/dockerd"); err == nil { // installed, but not running
		wants("a Docker that runs", "docker: daemon", "systemctl start docker", true, whole)
	}

	// As an ordinary user.
	cmd := exec.Command(daemontest.Program("lull"), "doctor", "--json")
	cmd.Env, cmd.Dir = []string{"PATH=" + os.Getenv("PATH"), "HOME=/", "LULL_HOST_DATA=/nonexistent"}, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if f := findings(t, cmd)["container: root and control groups"]; f.OK || !strings.Contains(f.Do, "as root") {
		t.Errorf("for an ordinary user: %+v", f)
	}
}

// TestWithout checks that a runtime whose program is missing says so and names
// the next step, and that the other runtimes work.
func TestWithout(t *testing.T) {
	daemontest.NeedRunc(t)
	d := daemontest.Start(t, daemontest.Config{UID: 65534, GID: 65534})
	refuses(d, box("box", daemontest.Image(t), "true"), "container is not available here", "root", "lull doctor")
	s := box("docker", "web", "true")
	s.Runtime = "docker"
	refuses(d, s, "docker")
	// root now has what the daemon lacked, so a restart of the daemon helps.
	cmd := exec.Command(daemontest.Program("lull"), "doctor", "--json")
	cmd.Env, cmd.Dir = []string{"PATH=" + os.Getenv("PATH"), "HOME=/", "LULL_HOST=unix://" + d.Dir + "/host.sock"}, "/"
	all := findings(t, cmd)
	if f := all["container: running host"]; f.OK || !f.Optional || !strings.Contains(f.Found, "root") || !strings.Contains(f.Do, "restart") {
		t.Errorf("what the daemon lacked is here: %+v", f)
	}
	if f := all["host"]; !f.OK || !strings.Contains(f.Found, d.Dir) {
		t.Errorf("the daemon that runs: %+v", f)
	}
	p := box("process", "", "/bin/sleep", "1000")
	p.Runtime = ""
	if o := d.Launch(p); o.State != "running" {
		t.Errorf("a process: %+v", o)
	}
}

// TestKernelThatComesLater checks that lull guest-kernel stores a kernel where a
// running host finds it, and that the host uses it without a restart.
func TestKernelThatComesLater(t *testing.T) {
	d := daemontest.Start(t, daemontest.Config{})
	lacks := func() string {
		st, err := d.Status(t.Context())
		errtest.None(t, err)
		return st.Missing["microvm"]
	}
	if own, err := filepath.Glob("/boot/vmlinuz-*"); err == nil && len(own) == 0 { // this machine may have a kernel
		if got := lacks(); !strings.Contains(got, "guest kernel") {
			t.Errorf("without a kernel: %q", got)
		}
		s := box("vm", daemontest.Image(t), "true")
		s.Runtime = "microvm"
		refuses(d, s, "guest kernel")
	}
	// The command does not replace an existing kernel, so putting one there saves
	// a download.
	dir := d.Dir + "/data/guest-kernel"
	builtin := "virtio_ring.ko\nvirtio.ko\nvirtio_pci.ko\nfailover.ko\nnet_failover.ko\nvirtio_net.ko\nvirtio_console.ko\nvirtio_blk.ko\noverlay.ko\n"
	for file, text := range map[string]string{"boot/vmlinuz-1.0": "kernel", "lib/modules/1.0/modules.builtin": builtin} {
		file = filepath.Join(dir, file)
		errtest.None(t, errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)))
	}
	cmd := exec.Command(daemontest.Program("lull"), "guest-kernel")
	cmd.Env, cmd.Dir = []string{"PATH=" + os.Getenv("PATH"), "HOME=/", "LULL_HOST=unix://" + d.Dir + "/host.sock"}, "/"
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "1.0 in "+dir) {
		t.Fatalf("lull guest-kernel: %v: %s", err, out)
	}
	if got := lacks(); strings.Contains(got, "guest kernel") {
		t.Errorf("with a kernel: %q", got)
	}
}
