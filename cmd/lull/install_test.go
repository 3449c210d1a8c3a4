package main

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
)

// files returns the files below dir, by name.
func files(t *testing.T, dir string) map[string]fs.FileMode {
	t.Helper()
	all := map[string]fs.FileMode{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		st, err := d.Info()
		all[strings.TrimPrefix(path, dir)] = st.Mode().Perm()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestMakeInstall checks that make install writes the right files, that they work
// where they are, and that make uninstall removes exactly these files.
func TestMakeInstall(t *testing.T) {
	t.Parallel()
	bin, dest := t.TempDir(), t.TempDir()
	errtest.None(t, programtest.Into(bin, "lull/cmd/lull", "lull/cmd/lull-agent"))
	foreign := map[string]string{"/usr/bin/other": "", "/usr/share/man/man1/lullaby.1": "", "/etc/lull/agent.yaml": "mine"}
	for name, text := range foreign {
		file := filepath.Join(dest, name)
		errtest.None(t, os.MkdirAll(filepath.Dir(file), 0o755))
		errtest.None(t, os.WriteFile(file, []byte(text), 0o644))
	}
	before := files(t, dest)
	again := []string{"-C", filepath.Join("..", ".."), "--no-print-directory", "DESTDIR=" + dest, "PREFIX=/usr", "BIN=" + bin}
	sh(t, "make", append(again, "install")...)
	got := files(t, dest)
	for name, mode := range map[string]fs.FileMode{"bin/lull": 0o755, "bin/lull-agent": 0o755,
		"lib/systemd/system/lull-host.service": 0o644, "lib/systemd/system/lull-server.service": 0o644, "lib/systemd/system/lull-agent.service": 0o644, "lib/sysusers.d/lull.conf": 0o644,
		"share/bash-completion/completions/lull": 0o644, "share/zsh/site-functions/_lull": 0o644, "share/fish/vendor_completions.d/lull.fish": 0o644,
		"share/man/man1/lull.1": 0o644, "share/man/man1/lull-demo.1": 0o644, "share/man/man1/lull-worker-ls.1": 0o644} {
		if got["/usr/"+name] != mode {
			t.Errorf("%s has mode %v, want %v", name, got["/usr/"+name], mode)
		}
	}
	for shell, file := range map[string]string{"bash": "share/bash-completion/completions/lull", "zsh": "share/zsh/site-functions/_lull", "fish": "share/fish/vendor_completions.d/lull.fish"} {
		if path, err := exec.LookPath(shell); err == nil {
			sh(t, path, "-n", filepath.Join(dest, "usr", file))
		}
	}
	sh(t, "make", append(again, "install")...) // as in an upgrade
	sh(t, "make", append(again, "uninstall")...)
	after := files(t, dest)
	for name := range after {
		if _, ok := before[name]; !ok {
			t.Errorf("uninstall left %s", name)
		}
	}
	for name := range before {
		if _, ok := after[name]; !ok {
			t.Errorf("uninstall removed %s, which it had not installed", name)
		}
	}

	// Units installed below a prefix refer to programs that exist.
	prefix := filepath.Join(t.TempDir(), "opt")
	sh(t, "make", "-C", filepath.Join("..", ".."), "--no-print-directory", "DESTDIR=", "PREFIX="+prefix, "BIN="+bin, "install")
	analyze := need(t, "systemd-analyze")
	for _, unit := range []string{"lull-host", "lull-server", "lull-agent"} {
		out, err := exec.Command(analyze, "verify", "--man=no", filepath.Join(prefix, "lib/systemd/system", unit+".service")).CombinedOutput()
		if err != nil || strings.Contains(string(out), unit) {
			t.Errorf("systemd-analyze verify %s: %v\n%s", unit, err, out)
		}
	}
}
