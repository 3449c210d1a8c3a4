package main

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/cli/term"
)

// lullWith runs lull with the given environment and arguments.
func lullWith(env map[string]string, arg ...string) (out, errs string, code int) {
	var o, e bytes.Buffer
	code = run(context.Background(), arg, strings.NewReader(""), &o, &e, func(k string) string { return env[k] })
	return o.String(), e.String(), code
}

// TestAgentSettings checks the precedence and the faults of the agent process's
// settings.
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

// TestAgentAway checks the messages of verbs when no agent is running.
func TestAgentAway(t *testing.T) {
	env := map[string]string{"LULL_AGENT_SOCKET": filepath.Join(t.TempDir(), "none.sock")}
	for _, verb := range []string{"status", "why", "reload", "history", "complete", "halt"} {
		if out, errs, code := lullWith(env, "agent", verb, "--json"); code != term.ExitFailed || out != "" || !strings.HasPrefix(errs, "lull: cannot reach a lull agent") {
			t.Errorf("agent %s ended with %d: %q %q", verb, code, out, errs)
		}
	}
}

// TestAgentIAMFlags checks that names that a shell would interpret are rejected.
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
