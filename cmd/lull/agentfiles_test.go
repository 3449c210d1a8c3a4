package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"lull/internal/lib/errtest"
)

// need returns the path of a program. If the program is missing, it skips the test,
// or fails it in CI.
func need(t *testing.T, program string) string {
	t.Helper()
	p, err := exec.LookPath(program)
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("cannot test: %s is not installed", program)
		}
		t.Skipf("%s is not installed", program)
	}
	return p
}

// TestUnits checks the units with systemd-analyze. The table has how exposed each
// unit is, so that a change that opens a unit up must change its row.
func TestUnits(t *testing.T) {
	analyze := need(t, "systemd-analyze")
	for _, c := range []struct {
		unit, with string // with is a drop-in
		most       float64
	}{{"lull-agent.service", "", 8.6}, {"lull-agent.service", "lull-agent-strict.conf", 4.6}, {"lull-host.service", "", 9.0}, {"lull-server.service", "", 2.0}} {
		text := contents(t, filepath.Join("..", "..", "etc", c.unit))
		if c.with != "" {
			_, rest, _ := strings.Cut(contents(t, filepath.Join("..", "..", "etc", c.with)), "[Service]\n")
			text = strings.Replace(text, "[Service]\n", "[Service]\n"+rest, 1)
		}
		// systemd-analyze verify requires that the program exists
		copied := filepath.Join(t.TempDir(), c.unit)
		errtest.None(t, os.WriteFile(copied, []byte(strings.NewReplacer("/usr/bin/lull-agent", "/bin/true", "/usr/bin/lull", "/bin/true").Replace(text)), 0o644))
		out, err := exec.Command(analyze, "verify", copied).CombinedOutput()
		if err != nil || strings.Contains(string(out), c.unit) {
			t.Errorf("systemd-analyze verify %s: %v\n%s", c.unit, err, out)
		}
		out, err = exec.Command(analyze, "security", "--offline=true", "--no-pager", copied).CombinedOutput()
		if err != nil {
			t.Errorf("systemd-analyze security %s: %v\n%s", c.unit, err, out)
			continue
		}
		m := regexp.MustCompile(`exposure level for \S+: ([0-9.]+)`).FindSubmatch(out)
		if m == nil {
			t.Errorf("systemd-analyze security %s names no exposure:\n%s", c.unit, out)
			continue
		}
		level, err := strconv.ParseFloat(string(m[1]), 64)
		t.Logf("%s %s: exposure %.1f of 10", c.unit, c.with, level)
		if err != nil || level > c.most {
			t.Errorf("%s %s is exposed %.1f, at most %.1f is right", c.unit, c.with, level, c.most)
		}
	}
}

// TestHostUnitKeepsInstances checks the settings of the host's unit that let
// instances outlive the daemon.
func TestHostUnitKeepsInstances(t *testing.T) {
	b, err := os.ReadFile("../../etc/lull-host.service")
	errtest.None(t, err)
	for _, want := range []string{"Delegate=yes", "KillMode=process", "LimitNOFILE=1048576"} {
		if !strings.Contains(string(b), "\n"+want+"\n") {
			t.Errorf("lull-host.service lacks %s", want)
		}
	}
}
