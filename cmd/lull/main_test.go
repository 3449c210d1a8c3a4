package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"lull/internal/lib/programtest"
)

// TestMain lets test scripts run this package's main as the command lull.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"lull": main})
}

// TestScripts runs scripts of commands as users type them, against real daemons.
func TestScripts(t *testing.T) {
	t.Parallel()
	shim := programtest.Build(t, "lull/cmd/lull-shim")
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(e *testscript.Env) error {
			e.Setenv("LULL_HOST_SHIM", shim)
			e.Setenv("LULL_HOST_SOCKET", filepath.Join(e.WorkDir, "run", "host.sock"))
			e.Setenv("LULL_HOST", "unix://"+filepath.Join(e.WorkDir, "run", "host.sock"))
			e.Setenv("LULL_HOST_DATA", filepath.Join(e.WorkDir, "data"))
			for _, data := range []string{"data", "data2"} {
				e.Defer(func() { endShim(filepath.Join(e.WorkDir, data, "shim")) })
			}
			return nil
		},
		Condition: func(c string) (bool, error) {
			if c == "root" {
				return os.Geteuid() == 0, nil
			}
			return false, fmt.Errorf("unknown condition %s", c)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code":  exitCodeIs,
			"await": await,
		},
	})
}

// exitCodeIs runs lull and checks its exit code: code N ARG...
func exitCodeIs(ts *testscript.TestScript, neg bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec("lull", args[1:]...); err != nil {
		var exit *exec.ExitError
		if !asExit(err, &exit) {
			ts.Fatalf("cannot run lull: %v", err)
		}
		got = exit.ExitCode()
	}
	if (got == want) == neg {
		ts.Fatalf("lull %v ended with %d, want %d", args[1:], got, want)
	}
}

func asExit(err error, into **exec.ExitError) bool {
	e, ok := err.(*exec.ExitError)
	*into = e
	return ok
}

// await repeats lull ARG... until its output contains TEXT: await TEXT ARG...
func await(ts *testscript.TestScript, _ bool, args []string) {
	out := ""
	for range 600 {
		cmd := exec.Command("lull", args[1:]...)
		cmd.Env = []string{"LULL_HOST=" + ts.Getenv("LULL_HOST"), "PATH=" + ts.Getenv("PATH"), "HOME=" + ts.Getenv("HOME")}
		path, err := exec.LookPath("lull")
		ts.Check(err)
		cmd.Path = path
		b, _ := cmd.CombinedOutput()
		if out = string(b); contains(out, args[0]) {
			return
		}
		pause()
	}
	ts.Fatalf("lull %v never said %q; last:\n%s", args[1:], args[0], out)
}

// endShim ends a shim that the host of a script has left behind.
func endShim(dir string) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return
	}
	for _, e := range entries {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%s/cmdline", e.Name()))
		if err != nil || !contains(string(b), "--dir\x00"+dir+"\x00") {
			continue
		}
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if p, err := os.FindProcess(pid); err == nil {
				p.Signal(os.Interrupt)
			}
		}
	}
}
