package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/cli/term"
)

// lullWith runs the command line with an environment of its own.
func lullWith(env map[string]string, arg ...string) (out, errs string, code int) {
	var o, e bytes.Buffer
	code = run(context.Background(), arg, strings.NewReader(""), &o, &e, func(k string) string { return env[k] })
	return o.String(), e.String(), code
}

// TestAgentSettings holds precedence and faults of the process's settings.
func TestAgentSettings(t *testing.T) {
	env := map[string]string{"LULL_AGENT_PREFIX": "prism:", "LULL_AGENT_STATE": "/env/state"}
	out, errs, code := lullWith(env, "config", "agent", "--state", "/flag/state")
	if code != 0 || !strings.Contains(out, "prism:") || !strings.Contains(out, "/flag/state") || !strings.Contains(out, "flag --state") ||
		!strings.Contains(out, "environment LULL_AGENT_PREFIX") {
		t.Errorf("config agent ended with %d: %s%s", code, out, errs)
	}
	for _, c := range []struct{ flag, want string }{
		{"--cloud=moon", "cloud"}, {"--prefix=lull", "prefix"}, {"--prefix=aws:", "prefix"}, {"--state=here", "absolute"},
		{"--shortest-window=1ms", "shortest-window"}, {"--shortest-window=soon", "shortest-window"}, {"--socket=", "socket"},
	} {
		if _, errs, code := lullWith(nil, "agent", "run", c.flag); code != term.ExitUsage || !strings.Contains(errs, c.want) {
			t.Errorf("agent run %s ended with %d: %s", c.flag, code, errs)
		}
	}
}

// TestAgentAway holds what is said when no agent runs.
func TestAgentAway(t *testing.T) {
	env := map[string]string{"LULL_AGENT_SOCKET": filepath.Join(t.TempDir(), "none.sock")}
	for _, verb := range []string{"status", "why", "reload", "history", "complete", "halt"} {
		if out, errs, code := lullWith(env, "agent", verb, "--json"); code != term.ExitFailed || out != "" || !strings.HasPrefix(errs, "lull: cannot reach a lull agent") {
			t.Errorf("agent %s ended with %d: %q %q", verb, code, out, errs)
		}
	}
}

// TestAgentIAMFlags refuses names that would not survive a shell.
func TestAgentIAMFlags(t *testing.T) {
	for _, bad := range [][]string{{"--name", "x; rm -rf /"}, {"--name", ""}, {"--partition", "mars"}, {"--prefix", "lull"}} {
		if _, errs, code := lullWith(nil, append([]string{"agent", "iam"}, bad...)...); code != term.ExitUsage {
			t.Errorf("iam %v ended with %d: %s", bad, code, errs)
		}
	}
	if out, _, code := lullWith(nil, "agent", "iam", "--terminate"); code != 0 || !strings.Contains(out, "ec2:TerminateInstances") {
		t.Errorf("iam --terminate ended with %d: %s", code, out)
	}
}

// TestFirmware reads whose machine this is from the firmware's names.
func TestFirmware(t *testing.T) {
	for _, c := range []struct {
		file, text   string
		isEC2, known bool
	}{
		{"sys/class/dmi/id/sys_vendor", "Amazon EC2\n", true, true},
		{"sys/class/dmi/id/board_vendor", "Amazon EC2\n", true, true},
		{"sys/class/dmi/id/sys_vendor", "QEMU\n", false, true},
		{"sys/hypervisor/uuid", "ec2e1916-9099-7caf-fd21-012345abcdef\n", true, true},
		{"sys/hypervisor/uuid", "4c4c4544-0000-2010-8020-000000000000\n", false, false},
		{"etc/unrelated", "", false, false},
	} {
		root := t.TempDir() + "/"
		if err := os.MkdirAll(filepath.Dir(root+c.file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(root+c.file, []byte(c.text), 0o644); err != nil {
			t.Fatal(err)
		}
		if isEC2, known := firmware(root); isEC2 != c.isEC2 || known != c.known {
			t.Errorf("%s %q: EC2 %t, known %t", c.file, c.text, isEC2, known)
		}
	}
}
