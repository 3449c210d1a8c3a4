package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"lull/internal/agent"
	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
)

// installable returns a directory with the programs of a release.
func installable(t *testing.T) string {
	t.Helper()
	bin := t.TempDir()
	errtest.None(t, programtest.Into(bin, "lull/cmd/lull", "lull/cmd/lull-agent", "lull/cmd/lull-shim", "lull/cmd/lull-harness"))
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

// linksHold checks that the links between the documents below dir have targets.
func linksHold(t *testing.T, dir string) {
	t.Helper()
	n := 0
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(name) != ".md" {
			return err
		}
		for _, m := range regexp.MustCompile(`\]\(([^)#:]+)[^):]*\)`).FindAllStringSubmatch(contents(t, name), -1) {
			n++
			if _, err := os.Stat(filepath.Join(filepath.Dir(name), m[1])); err != nil {
				t.Errorf("a link of %s leads nowhere: %v", name, err)
			}
		}
		return nil
	})
	if err != nil || n < 20 {
		t.Errorf("%d links: %v", n, err)
	}
}

// TestDebianPackage builds the package and checks what dpkg does with it in an empty
// system: install, upgrade, remove and purge.
func TestDebianPackage(t *testing.T) {
	t.Parallel()
	need(t, "dpkg-deb")
	if os.Geteuid() != 0 {
		t.Skip("dpkg --root needs root")
	}
	dist := t.TempDir()
	sh(t, "../../etc/deb/build", "v1.2.3-4-gabcdef", dist, installable(t))
	built := func(name string) string {
		found, err := filepath.Glob(filepath.Join(dist, name+"_1.2.3+p4_*.deb"))
		if err != nil || len(found) != 1 {
			t.Fatalf("package %s is not named after its version: %v %v", name, found, err)
		}
		for line := range strings.Lines(sh(t, "dpkg-deb", "--contents", found[0])) {
			if f := strings.Fields(line); f[1] != "root/root" || f[0][0] != 'l' && f[0][8] == 'w' {
				t.Errorf("package %s holds a file that is not root's alone: %s", name, line)
			}
		}
		return found[0]
	}
	deb, slim := built("lull"), built("lull-agent")

	root := t.TempDir()
	for _, d := range []string{"var/lib/dpkg/info", "var/lib/dpkg/updates", "etc", "usr/lib"} {
		errtest.None(t, os.MkdirAll(filepath.Join(root, d), 0o755))
	}
	errtest.None(t, os.WriteFile(filepath.Join(root, "var/lib/dpkg/status"), nil, 0o644))
	dpkg := func(arg ...string) {
		t.Helper()
		sh(t, "dpkg", append([]string{"--root=" + root, "--force-script-chrootless", "--force-confold"}, arg...)...)
	}
	dpkg("--install", deb)
	in := func(p string) string { return filepath.Join(root, p) }
	modeIs(t, in("usr/bin/lull"), 0o755)
	modeIs(t, in("usr/bin/lull-agent"), 0o755)
	modeIs(t, in("usr/bin/lull-shim"), 0o755)
	modeIs(t, in("usr/bin/lull-harness"), 0o755)
	modeIs(t, in("var/lib/lull/agent"), 0o700)
	for _, f := range []string{"lib/systemd/system/lull-agent.service", "lib/systemd/system/lull-host.service", "lib/systemd/system/lull-server.service",
		"etc/lull/agent.yaml", "etc/default/lull-agent", "usr/lib/sysusers.d/lull.conf", "usr/share/doc/lull/README.md",
		"etc/default/lull-host", "etc/default/lull-server", "usr/share/lull/prometheus-rules.yaml", "usr/share/lull/grafana-dashboard.json",
		"usr/share/doc/lull/examples/user-data.sh", "usr/share/doc/lull/examples/cloud-init.yaml", "usr/share/doc/lull/examples/cloudformation.yaml",
		"usr/share/doc/lull/docs/reference/config-agent.md", "usr/share/doc/lull/docs/operations.md", "usr/share/doc/lull/examples/iam-agent.json", "usr/share/bash-completion/completions/lull",
		"usr/share/zsh/vendor-completions/_lull", "usr/share/fish/vendor_completions.d/lull.fish", "usr/share/man/man1/lull.1.gz", "usr/share/man/man1/lull-worker-ls.1.gz"} {
		modeIs(t, in(f), map[bool]fs.FileMode{true: 0o600, false: 0o644}[f == "etc/lull/agent.yaml"])
	}
	linksHold(t, in("usr/share/doc/lull"))
	if g := contents(t, in("etc/group")); !strings.Contains(g, "\nlull:") && !strings.HasPrefix(g, "lull:") {
		t.Errorf("there is no group lull:\n%s", g)
	}
	if p := contents(t, in("etc/passwd")); !strings.Contains(p, "lull-server:") {
		t.Errorf("there is no user lull-server:\n%s", p)
	}
	if v := sh(t, in("usr/bin/lull"), "version"); !strings.Contains(v, programtest.Version) {
		t.Errorf("lull version says %q", v)
	}
	if out := sh(t, "dpkg", "--root="+root, "--verify", "lull"); out != "" {
		t.Errorf("dpkg --verify: %s", out)
	}

	// A policy file written by a user survives an upgrade and a removal.
	mine := "idle-timeout: 3h\n"
	errtest.None(t, os.WriteFile(in("etc/lull/agent.yaml"), []byte(mine), 0o644))
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
	slimPackage(t, root, dpkg, deb, slim)
	firstBoot(t, slim, root)
}

// slimPackage replaces the package lull by lull-agent with dpkg, and back. It checks
// that the policy file stays, and that each package has only its own programs and
// units.
func slimPackage(t *testing.T, root string, dpkg func(...string), deb, slim string) {
	t.Helper()
	in := func(p string) string { return filepath.Join(root, p) }
	has := func(p string) bool { _, err := os.Lstat(in(p)); return err == nil }
	const full, unit, mine = "usr/bin/lull-shim", "lib/systemd/system/lull-agent.service", "idle-timeout: 3h\n"
	for n, pkg := range []string{slim, deb, slim} {
		dpkg("--install", pkg)
		if has(full) != (pkg == deb) || has("lib/systemd/system/lull-server.service") != (pkg == deb) || !has("usr/bin/lull-agent") || !has(unit) {
			t.Errorf("%s: shim %t, agent %t, unit %t", filepath.Base(pkg), has(full), has("usr/bin/lull-agent"), has(unit))
		}
		for program, arg := range map[string][]string{"lull-agent": {"doctor", "--help"}, "lull": {"agent", "doctor", "--help"}} {
			if out := sh(t, in("usr/bin/"+program), arg...); !strings.Contains(out, "hibernation") {
				t.Errorf("%s: %s %v says %s", filepath.Base(pkg), program, arg, out)
			}
		}
		if unit := contents(t, in(unit)); !slices.Contains(strings.Split(unit, "\n"), "ExecStart=/usr/bin/lull-agent run") {
			t.Errorf("%s: the unit is\n%s", filepath.Base(pkg), unit)
		}
		if n < 2 {
			errtest.None(t, os.WriteFile(in("etc/lull/agent.yaml"), []byte(mine), 0o600))
		}
		if got := contents(t, in("etc/lull/agent.yaml")); got != mine {
			t.Errorf("%s: the policy file is now %q", filepath.Base(pkg), got)
		}
	}
	dpkg("--purge", "lull") // purge what is left of it
	if !has("var/lib/lull/agent") || !has("etc/lull/agent.yaml") {
		t.Error("purging the replaced package takes state or policy away")
	}
	dpkg("--purge", "lull-agent")
	if has("var/lib/lull") || has("etc/lull/agent.yaml") {
		t.Error("state or policy outlives the purge of lull-agent")
	}
}

// firstBoot runs the user data and cloud-init's commands as the first boot of an
// instance would. The package comes from a server, and dpkg installs into the scratch
// system. It checks that a package with a wrong checksum is not installed.
func firstBoot(t *testing.T, deb, root string) {
	content := []byte(contents(t, deb))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write(content) }))
	defer srv.Close()
	stubs := t.TempDir()
	for name, text := range map[string]string{
		"dpkg":       "exec " + need(t, "dpkg") + " --root=" + root + ` --force-script-chrootless "$@"`,
		"systemctl":  `echo systemctl "$@"`,
		"lull-agent": `echo lull-agent "$@"`,
	} {
		errtest.None(t, os.WriteFile(filepath.Join(stubs, name), []byte("#!/bin/sh\n"+text+"\n"), 0o755))
	}
	right, wrong := fmt.Sprintf("%x", sha256.Sum256(content)), strings.Repeat("0", 64)
	installed := filepath.Join(root, "usr/bin/lull-agent")
	try := func(name, sum string, commands func(sum string) [][]string) {
		t.Helper()
		need(t, "curl")
		if out, err := exec.Command("dpkg", "--root="+root, "--force-script-chrootless", "--purge", "lull-agent").CombinedOutput(); err != nil {
			t.Fatalf("cannot purge: %v: %s", err, out)
		}
		var said strings.Builder
		var failed error
		for _, arg := range commands(sum) {
			cmd := exec.Command("env", arg...) // env, because it searches the PATH set below
			cmd.Env = append(os.Environ(), "PATH="+stubs+":"+os.Getenv("PATH"), "LULL_DEB_URL="+srv.URL, "LULL_DEB_SHA256="+sum)
			out, err := cmd.CombinedOutput()
			said.Write(out)
			if failed = err; failed != nil {
				break
			}
		}
		_, err := os.Stat(installed)
		if good := sum == right; (failed == nil) != good || (err == nil) != good ||
			strings.Contains(said.String(), "systemctl enable") != good {
			t.Errorf("%s with the sum %s: %v, installed: %v\n%s", name, sum, failed, err == nil, said.String())
		}
	}
	userData := func(string) [][]string { return [][]string{{"bash", "../../etc/user-data.sh"}} }
	var cloud struct {
		Files []struct{ Path, Owner, Permissions, Content string } `yaml:"write_files"`
		Run   [][]string                                           `yaml:"runcmd"`
	}
	errtest.None(t, yaml.Unmarshal([]byte(contents(t, "../../etc/cloud-init.yaml")), &cloud))
	if len(cloud.Files) != 1 || cloud.Files[0].Path != "/"+"etc/lull/agent.yaml" || cloud.Files[0].Permissions != "0600" {
		t.Errorf("cloud-init writes %+v", cloud.Files)
	} else if _, faults, err := agent.ParseLocal("x", []byte(cloud.Files[0].Content)); err != nil || len(faults) > 0 {
		t.Errorf("the policy that cloud-init writes: %v, %v", err, faults)
	}
	cloudInit := func(sum string) (out [][]string) {
		r := strings.NewReplacer("https://packages.example.com/lull-agent_amd64.deb", srv.URL, "put-the-sum-here", sum, "/root/", stubs+"/")
		for _, c := range cloud.Run {
			var line []string
			for _, w := range c {
				line = append(line, r.Replace(w))
			}
			out = append(out, line)
		}
		return out
	}
	unset := exec.Command("bash", "../../etc/user-data.sh")
	unset.Env = []string{"PATH=" + stubs + ":" + os.Getenv("PATH")}
	if out, err := unset.CombinedOutput(); err == nil || !strings.Contains(string(out), "LULL_DEB_URL") {
		t.Errorf("user data without the package's address: %v\n%s", err, out)
	}
	for _, sum := range []string{right, wrong} {
		try("user data", sum, userData)
		try("cloud-init", sum, cloudInit)
	}
}

// TestInstall checks that lull and lull-agent install the agent in a scratch system
// and uninstall it completely.
func TestInstall(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("lull agent install needs root")
	}
	bin := installable(t)
	for program, command := range map[string]string{"lull": "/usr/local/bin/lull agent", "lull-agent": "/usr/local/bin/lull-agent"} {
		t.Run(program, func(t *testing.T) {
			root := t.TempDir()
			in := func(p string) string { return filepath.Join(root, p) }
			agent := func(verb string, arg ...string) string {
				return sh(t, filepath.Join(bin, program), append([]string{"agent", verb, "--root", root}, arg...)...)
			}
			agent("install")
			modeIs(t, in("usr/local/bin/"+program), 0o755)
			modeIs(t, in("etc/systemd/system/lull-agent.service"), 0o644)
			modeIs(t, in("etc/lull/agent.yaml"), 0o600)
			modeIs(t, in("var/lib/lull/agent"), 0o700)
			if u := contents(t, in("etc/systemd/system/lull-agent.service")); !slices.Contains(strings.Split(u, "\n"), "ExecStart="+command+" run") {
				t.Errorf("the unit does not run the installed program:\n%s", u)
			}
			if g := contents(t, in("etc/group")); !strings.Contains(g, "lull:") {
				t.Errorf("there is no group lull:\n%s", g)
			}
			if v := sh(t, in("usr/local/bin/lull"), "agent", "--help"); !strings.Contains(v, "doctor") {
				t.Errorf("lull agent says %q", v)
			}
			if v := sh(t, in("usr/local/bin/"+program), "version"); v != program+" "+programtest.Version+"\n" {
				t.Errorf("the installed program says %q", v)
			}

			errtest.None(t, os.WriteFile(in("etc/lull/agent.yaml"), []byte("idle-timeout: 3h\n"), 0o644))
			if out := agent("install"); !strings.Contains(out, "kept") {
				t.Errorf("installing again does not keep the policy file:\n%s", out)
			}
			agent("uninstall")
			if got := contents(t, in("etc/lull/agent.yaml")); got != "idle-timeout: 3h\n" {
				t.Errorf("uninstall touched the policy file: %q", got)
			}
			for _, p := range []string{"etc/systemd/system/lull-agent.service", "usr/local/bin/lull", "usr/local/bin/lull-agent"} {
				if _, err := os.Lstat(in(p)); err == nil {
					t.Errorf("%s outlives uninstall", p)
				}
			}
			agent("uninstall", "--purge")
			if _, err := os.Stat(in("etc/lull")); err == nil {
				t.Error("etc/lull outlives uninstall --purge")
			}
		})
	}
}

// TestSlimLeavesLull checks that lull-agent overwrites neither the command nor
// the file of an installed lull.
func TestSlimLeavesLull(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("lull agent install needs root")
	}
	bin, root := installable(t), t.TempDir()
	lull := filepath.Join(root, "usr/local/bin/lull")
	errtest.None(t, os.MkdirAll(filepath.Dir(lull), 0o755))
	errtest.None(t, os.WriteFile(lull, []byte("mine"), 0o755))
	for _, verb := range []string{"install", "uninstall"} {
		sh(t, filepath.Join(bin, "lull-agent"), verb, "--root", root)
		if got := contents(t, lull); got != "mine" {
			t.Errorf("after %s, lull is %q", verb, got)
		}
	}
}
