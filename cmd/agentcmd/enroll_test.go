//go:build linux

package agentcmd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/cli/client"
	"lull/internal/cli/reporting"
	"lull/internal/cli/setup"
	"lull/internal/lib/errtest"
)

// TestAgentEnroll checks that an enrolled agent finds its server and its token at the
// default paths, even after a second enrollment, and that a faulty enrollment writes
// nothing.
func TestAgentEnroll(t *testing.T) {
	root := t.TempDir()
	settings := filepath.Join(root, "etc/default/lull-agent")
	for _, bad := range []struct{ server, token, machine string }{
		{"", "secret", ""}, {"http://elsewhere:7070", "secret", ""}, {"lull", "secret", ""},
		{"https://lull:7070", "", ""}, {"https://lull:7070", "two words", ""}, {"https://lull:7070", "secret", "a b"}, {"https://lull:7070", "secret", "x\nLULL_AGENT_POWER_OFF=true"},
	} {
		if _, err := setup.Enroll(root, reporting.Target{Server: bad.server, Machine: bad.machine}, strings.NewReader(bad.token)); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
	if _, err := os.Stat(filepath.Join(root, "etc")); !os.IsNotExist(err) {
		t.Fatalf("a refused enrollment wrote something: %v", err)
	}
	errtest.None(t, os.MkdirAll(filepath.Dir(settings), 0o755))
	errtest.None(t, os.WriteFile(settings, []byte("LULL_AGENT_PREFIX=prism:\nLULL_AGENT_MACHINE=old"), 0o600))
	for _, server := range []string{"https://one:7070", "https://two:7070"} {
		errtest.Get(setup.Enroll(root, reporting.Target{Server: server}, strings.NewReader(" secret-"+server[8:11]+"\n")))(t)
		env := map[string]string{}
		for line := range strings.Lines(contents(t, settings)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			if _, twice := env[name]; twice {
				t.Errorf("%s is there twice", name)
			}
			env[name] = value
		}
		flags := verbs{Session: &client.Session{}}.run().Flags()
		cfg, _, err := resolveAgent(func(k string) string { return env[k] }, flags)
		if err != nil || cfg.Server != server || cfg.Prefix != "prism:" || cfg.Machine != "" {
			t.Errorf("%+v, %v", cfg, err)
		}
		token := filepath.Join(root, cfg.TokenFile)
		st, err := os.Stat(token)
		if err != nil || st.Mode().Perm() != 0o600 || contents(t, token) != "secret-"+server[8:11]+"\n" {
			t.Errorf("token %v, %v", st, err)
		}
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
