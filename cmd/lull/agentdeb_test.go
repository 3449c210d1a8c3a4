package main

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// buildTree builds the programs as make build does.
func buildTree(t *testing.T, stamp string) string {
	t.Helper()
	bin := t.TempDir()
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w -X main.version="+stamp+" -X main.buildDate=2026-01-02T03:04:05Z", "-o", bin+"/", "lull/cmd/...")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cannot build: %v\n%s", err, out)
	}
	return bin
}

// sh runs a program that must succeed and returns its output.
func sh(t *testing.T, name string, arg ...string) string {
	t.Helper()
	cmd := exec.Command(name, arg...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Fatalf("cannot run %s %s: %v\n%s", name, strings.Join(arg, " "), err, out.String())
	}
	return out.String()
}

func modeIs(t *testing.T, path string, want fs.FileMode) {
	t.Helper()
	st, err := os.Stat(path)
	if err != nil {
		t.Error(err)
		return
	}
	if st.Mode().Perm() != want {
		t.Errorf("%s has mode %04o, want %04o", path, st.Mode().Perm(), want)
	}
}

func contents(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	}
	return string(b)
}

// TestDebianPackage builds the package, has dpkg install it into an empty
// system, upgrade it, remove it and purge it.
func TestDebianPackage(t *testing.T) {
	need(t, "dpkg-deb")
	if os.Geteuid() != 0 {
		t.Skip("dpkg --root needs root")
	}
	dist := t.TempDir()
	sh(t, "../../etc/deb/build", "v1.2.3-4-gabcdef", dist, buildTree(t, "v1.2.3-4-gabcdef"))
	found, err := filepath.Glob(filepath.Join(dist, "lull_1.2.3+4+gabcdef_*.deb"))
	if err != nil || len(found) != 1 {
		t.Fatalf("the package is not named after its version: %v %v", found, err)
	}
	deb := found[0]
	for line := range strings.Lines(sh(t, "dpkg-deb", "--contents", deb)) {
		if f := strings.Fields(line); f[1] != "root/root" || f[0][8] == 'w' {
			t.Errorf("the package holds a file that is not root's alone: %s", line)
		}
	}

	root := t.TempDir()
	for _, d := range []string{"var/lib/dpkg/info", "var/lib/dpkg/updates", "etc", "usr/lib"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "var/lib/dpkg/status"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	dpkg := func(arg ...string) {
		t.Helper()
		sh(t, "dpkg", append([]string{"--root=" + root, "--force-script-chrootless", "--force-confold"}, arg...)...)
	}
	dpkg("--install", deb)
	in := func(p string) string { return filepath.Join(root, p) }
	modeIs(t, in("usr/bin/lull"), 0o755)
	modeIs(t, in("usr/bin/lull-shim"), 0o755)
	modeIs(t, in("var/lib/lull/agent"), 0o700)
	for _, f := range []string{"lib/systemd/system/lull-agent.service", "lib/systemd/system/lull-host.service", "lib/systemd/system/lull-server.service",
		"etc/lull/agent.yaml", "etc/default/lull-agent", "usr/lib/sysusers.d/lull.conf", "usr/share/doc/lull/README.md",
		"usr/share/doc/lull/reference/config-agent.md", "usr/share/doc/lull/examples/iam-agent.json", "usr/share/bash-completion/completions/lull"} {
		modeIs(t, in(f), 0o644)
	}
	if g := contents(t, in("etc/group")); !strings.Contains(g, "\nlull:") && !strings.HasPrefix(g, "lull:") {
		t.Errorf("there is no group lull:\n%s", g)
	}
	if p := contents(t, in("etc/passwd")); !strings.Contains(p, "lull-server:") {
		t.Errorf("there is no user lull-server:\n%s", p)
	}
	if v := sh(t, in("usr/bin/lull"), "version"); !strings.Contains(v, "v1.2.3-4-gabcdef") {
		t.Errorf("lull version says %q", v)
	}
	if out := sh(t, "dpkg", "--root="+root, "--verify", "lull"); out != "" {
		t.Errorf("dpkg --verify: %s", out)
	}

	// A policy that somebody wrote outlives an upgrade and a removal.
	mine := "idle-timeout: 3h\n"
	if err := os.WriteFile(in("etc/lull/agent.yaml"), []byte(mine), 0o644); err != nil {
		t.Fatal(err)
	}
	dpkg("--install", deb)
	dpkg("--remove", "lull")
	if got := contents(t, in("etc/lull/agent.yaml")); got != mine {
		t.Errorf("the policy file is now %q", got)
	}
	if _, err := os.Stat(in("usr/bin/lull")); err == nil {
		t.Error("the program outlives its removal")
	}
	dpkg("--purge", "lull")
	for _, p := range []string{"etc/lull/agent.yaml", "var/lib/lull"} {
		if _, err := os.Stat(in(p)); err == nil {
			t.Errorf("%s outlives the purge", p)
		}
	}
}

// TestInstall has lull agent install set a scratch system up and take it down.
func TestInstall(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("lull agent install needs root")
	}
	bin := buildTree(t, "v9")
	root := t.TempDir()
	lull := filepath.Join(bin, "lull")
	sh(t, lull, "agent", "install", "--root", root)
	in := func(p string) string { return filepath.Join(root, p) }
	modeIs(t, in(binPath), 0o755)
	modeIs(t, in(unitPath), 0o644)
	modeIs(t, in(policyPath), 0o644)
	modeIs(t, in("var/lib/lull/agent"), 0o700)
	if u := contents(t, in(unitPath)); !strings.Contains(u, "ExecStart=/usr/local/bin/lull agent run\n") {
		t.Errorf("the unit does not run the installed program:\n%s", u)
	}
	if g := contents(t, in("etc/group")); !strings.Contains(g, "lull:") {
		t.Errorf("there is no group lull:\n%s", g)
	}
	if v := sh(t, in(binPath), "version"); !strings.Contains(v, "v9") {
		t.Errorf("the installed program says %q", v)
	}

	if err := os.WriteFile(in(policyPath), []byte("idle-timeout: 3h\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out := sh(t, lull, "agent", "install", "--root", root); !strings.Contains(out, "kept") {
		t.Errorf("installing again does not keep the policy file:\n%s", out)
	}
	sh(t, lull, "agent", "uninstall", "--root", root)
	if got := contents(t, in(policyPath)); got != "idle-timeout: 3h\n" {
		t.Errorf("uninstall touched the policy file: %q", got)
	}
	if _, err := os.Stat(in(unitPath)); err == nil {
		t.Error("the unit outlives uninstall")
	}
	sh(t, lull, "agent", "uninstall", "--root", root, "--purge")
	if _, err := os.Stat(in("etc/lull")); err == nil {
		t.Error("etc/lull outlives uninstall --purge")
	}
}
