package containers

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

// TestReadme runs the README's commands in a shell, section by section. A web
// server that needs no registry takes the place of nginx.
func TestReadme(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../../../README.md")
	errtest.None(t, err)
	if n := strings.Count(string(b), "\n"); n > 120 {
		t.Errorf("the README has %d lines, at most 120 are allowed", n)
	}
	n := 0
	for _, section := range strings.Split(string(b), "\n## ")[1:] {
		_, rest, found := strings.Cut(section, "```sh\n")
		commands, _, _ := strings.Cut(rest, "```")
		if !found {
			continue
		}
		n++
		name, _, _ := strings.Cut(section, "\n")
		t.Run(name, func(t *testing.T) { t.Parallel(); paste(t, commands) })
	}
	if n != 3 {
		t.Errorf("%d sections have commands, want 3", n)
	}
}

// paste runs commands, each of which must succeed, and ends the daemons that they
// started.
func paste(t *testing.T, commands string) {
	if n := strings.Count(commands, "\n"); n != 5 {
		t.Errorf("%d lines, want five", n)
	}
	for _, tool := range []string{"bash", "curl", "python3"} {
		_, err := exec.LookPath(tool)
		daemontest.Need(t, err, tool)
	}
	daemontest.Build(t)
	dir, err := os.MkdirTemp("", "readme")
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) }) // a daemon that is ending may still write
	port := func() string {
		_, p, _ := strings.Cut(daemontest.Addr(t), ":")
		return p
	}
	server, cml := "127.0.0.1:"+port(), port()
	env := []string{"HOME=" + dir, "PATH=" + filepath.Dir(daemontest.Program("lull")) + ":/usr/sbin:/usr/bin:/sbin:/bin",
		"LULL_HOST_DATA=" + filepath.Join(dir, "data"), "LULL_HOST_SOCKET=" + filepath.Join(dir, "host.sock"), "LULL_HOST=unix://" + filepath.Join(dir, "host.sock"),
		"LULL_SERVER_LISTEN=" + server, "LULL_SERVER=http://" + server, "LULL_SERVER_CML_PORT=" + cml}
	for _, fixed := range []string{"7071", "8080"} {
		commands = strings.ReplaceAll(commands, fixed, port())
	}
	if strings.Contains(commands, "docker run") {
		k := daemontest.StartDockerd(t)
		env = append(env, "DOCKER_HOST=unix://"+k.Socket())
		commands = strings.NewReplacer("host --docker ", "host --docker="+k.Socket()+" ", " nginx\n", " box:1 /bin/busybox httpd -f -p 80\n").Replace(commands)
	}
	if m := regexp.MustCompile(`AWS_ENDPOINT_URL=http://(\S+)`).FindStringSubmatch(commands); m != nil {
		commands = strings.Replace(commands, "lull sim ", "lull sim --listen "+m[1]+" --cml-port "+cml+" ", 1)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	out, err := os.Create(filepath.Join(dir, "out")) // a file, because daemons keep standard output open
	errtest.None(t, err)
	defer out.Close()
	cmd := exec.CommandContext(ctx, "bash", "-e", "-o", "pipefail", "-c", commands)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = dir, env, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	err = cmd.Run()
	said, rerr := os.ReadFile(out.Name())
	if err != nil || rerr != nil {
		t.Errorf("%v %v\n%s\nprinted\n%s", err, rerr, commands, said)
	}
	if strings.Contains(commands, "lull why") && !strings.Contains(string(said), "web: ") {
		t.Errorf("why said nothing of web:\n%s", said)
	}
	last := exec.Command(daemontest.Program("lull"), "rm", "web")
	last.Env = env
	_ = last.Run() // only some sections have such a command
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
	waittest.Until(t, "the end of what was started", func() bool {
		if pid := shim(filepath.Join(dir, "data", "shim")); pid > 1 {
			_ = syscall.Kill(pid, syscall.SIGTERM)
			return false
		}
		return syscall.Kill(-cmd.Process.Pid, 0) != nil
	})
}

// shim returns the PID of the shim whose directory is dir; 0 if there is none.
func shim(dir string) int {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range all {
		b, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(b), "--dir\x00"+dir) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			return pid
		}
	}
	return 0
}
