// Package programtest provides tests with programs of this module. They come from
// the folder LULL_BIN_DIR, where make test builds each once. If that variable is
// not set, they are built on the spot.
package programtest

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Version and BuildDate are what the programs report about themselves.
const (
	Version   = "v9"
	BuildDate = "2026-01-02T03:04:05Z"
)

// ldflags are the linker's flags; the Makefile has the same.
const ldflags = "-s -w -X main.version=" + Version + " -X main.buildDate=" + BuildDate

// Name returns the name of a package's program in LULL_BIN_DIR: the import path
// without lull/ and cmd/, with slashes replaced by dashes.
func Name(pkg string) string {
	rest := strings.TrimPrefix(pkg, "lull/")
	return strings.ReplaceAll(strings.TrimPrefix(rest, "cmd/"), "/", "-")
}

// Build returns the path of the program of a package, such as lull/cmd/lull. The
// program is static; the caller must not modify it. Build fails the test if the
// program cannot be built.
func Build(t testing.TB, pkg string) string {
	t.Helper()
	if dir := os.Getenv("LULL_BIN_DIR"); dir != "" {
		file := filepath.Join(dir, Name(pkg))
		if _, err := os.Stat(file); err != nil {
			t.Fatalf("LULL_BIN_DIR: %v", err)
		}
		return file
	}
	dir := t.TempDir()
	if err := Into(dir, pkg); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, path.Base(pkg))
}

// Into puts the programs of packages into dir. Each has the name of the last
// element of its package path, and is readable and executable by everyone.
func Into(dir string, pkgs ...string) error {
	if given := os.Getenv("LULL_BIN_DIR"); given != "" {
		for _, pkg := range pkgs {
			if err := Copy(filepath.Join(given, Name(pkg)), filepath.Join(dir, path.Base(pkg))); err != nil {
				return fmt.Errorf("LULL_BIN_DIR: %w", err)
			}
		}
		return nil
	}
	cmd := exec.Command("go", append([]string{"build", "-trimpath", "-ldflags", ldflags, "-o", dir + "/"}, pkgs...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot build %v: %w\n%s", pkgs, err, out)
	}
	return nil
}

// Copy copies a program and makes it readable and executable by everyone. No
// process that another goroutine starts meanwhile inherits the open copy, which
// could not be executed until that process had closed it.
func Copy(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(to, b, 0o755)
}
