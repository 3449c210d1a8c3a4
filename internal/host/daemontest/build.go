// Package daemontest runs the built lull host as a child process, for tests
// that drive it as a user does. It builds the programs, starts, kills and
// restarts a host, calls its API and waits for results.
//
// Programs are built once per test binary, and statically whatever CGO_ENABLED
// says. Each host has its own directory with its data, socket and log. At the end
// of a test, the host, its shim and its instances are ended. If a process or a
// guest's file is left, the test fails. The package observes programs from outside;
// package hosttest has the simulated world for tests of the daemon's code.
//
// Environment: LULL_RACE=1 builds lull with the race detector. Package
// programtest documents where the other programs come from.
package daemontest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"lull/internal/lib/programtest"
)

// programs are the programs that the hosts of this test binary need.
var programs struct {
	dir  string
	pkgs []string
	once sync.Once
	err  error
}

// Main runs the tests of a package. Their hosts need lull, lull-shim, and the
// programs of the packages in more, which are built when a test first needs them.
func Main(m *testing.M, more ...string) {
	dir, err := os.MkdirTemp("", "lullbin")
	if err == nil {
		err = os.Chmod(dir, 0o755) // other users must be able to run them
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

// Program returns the path of a built program. Build or Start must have been
// called.
func Program(name string) string { return filepath.Join(programs.dir, name) }

// Build builds the programs, unless that has been done.
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
