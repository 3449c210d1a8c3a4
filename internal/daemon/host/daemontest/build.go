// Package daemontest runs the built lull host as a child process, for tests that
// speak to it as a user does: it builds the programs, starts a host, kills it,
// starts it again, asks it and waits for what it says.
//
// It guarantees that programs are built once for each test binary, and static
// whatever CGO_ENABLED says; that each host has a folder of its own with its
// data, its socket and its log; and that at the end of a test its instances, the
// host and its shim are ended, and a process or a guest's file that is left
// fails the test. It looks at programs, not into them: package hosttest has the
// simulated world for tests of the daemon's code.
//
// Environment: LULL_RACE=1 builds lull with the race detector; package
// programtest says where the other programs come from.
package daemontest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"lull/internal/base/programtest"
)

// programs are what the hosts of this test binary need.
var programs struct {
	dir  string
	pkgs []string
	once sync.Once
	err  error
}

// Main runs the tests of a package. Its hosts need lull, lull-shim and the
// programs of the packages more, which are built when the first test asks for
// them.
func Main(m *testing.M, more ...string) {
	dir, err := os.MkdirTemp("", "lullbin")
	if err == nil {
		err = os.Chmod(dir, 0o755) // an ordinary user runs them too
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cannot make a folder for what is tested:", err)
		os.Exit(1)
	}
	programs.dir, programs.pkgs = dir, append([]string{"lull/cmd/lull", "lull/cmd/lull-shim"}, more...)
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// Program is where the program of that name is once Build, or Start, was called.
func Program(name string) string { return filepath.Join(programs.dir, name) }

// Build builds the programs unless they are there.
func Build(t testing.TB) {
	t.Helper()
	programs.once.Do(func() { programs.err = build() })
	if programs.err != nil {
		t.Fatal(programs.err)
	}
}

func build() error {
	if err := programtest.Into(programs.dir, programs.pkgs...); err != nil || os.Getenv("LULL_RACE") != "1" {
		return err
	}
	cmd := exec.Command("go", "build", "-race", "-o", programs.dir+"/", "lull/cmd/lull")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot build lull with the race detector: %w\n%s", err, out)
	}
	return nil
}
