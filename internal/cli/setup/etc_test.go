package setup

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/agent"
	"lull/internal/lib/errtest"
)

var updateEtc = flag.Bool("update-etc", false, "write the files of etc that come from code")

// TestEtcIsFresh checks that the files in etc equal those that install and iam write.
func TestEtcIsFresh(t *testing.T) {
	for name, want := range map[string]string{
		"lull-agent.service": agentUnit("/usr/bin/lull-agent"),
		"agent.yaml":         agent.Example(),
		"iam-agent.json":     policyJSON(agentRights("aws", "lull:", false)),
	} {
		path := filepath.Join("..", "..", "..", "etc", name)
		if *updateEtc {
			errtest.None(t, os.WriteFile(path, []byte(want), 0o644))
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("etc/%s is not what the code says (%v): run go test ./internal/cli/setup -run EtcIsFresh -update-etc", name, err)
		}
	}
}

// TestAgentRights checks what the agent's IAM policy allows and denies.
func TestAgentRights(t *testing.T) {
	for _, c := range []struct {
		terminate bool
		prefix    string
		key       string
	}{{false, "lull:", "lull:idle-status"}, {true, "lull:", "lull:idle-status"}, {false, "prism:", "Prism:IdleStatus"}} {
		p := agentRights("aws", c.prefix, c.terminate)
		var whole map[string]any
		errtest.None(t, json.Unmarshal([]byte(policyJSON(p)), &whole))
		for _, s := range p.Statement {
			changes := false
			for _, a := range s.Action {
				changes = changes || !strings.HasPrefix(a, "ec2:Describe")
				if a == "ec2:TerminateInstances" && !c.terminate {
					t.Errorf("terminating is allowed though it was not asked for")
				}
			}
			if changes && s.Condition["ArnLike"]["ec2:SourceInstanceARN"] == nil {
				t.Errorf("%s may be done to other instances", s.Sid)
			}
		}
		if text := policyJSON(p); strings.Contains(text, "ec2:TerminateInstances") != c.terminate || !strings.Contains(text, c.key) {
			t.Errorf("terminate %t, prefix %s: the policy is\n%s", c.terminate, c.prefix, text)
		}
		for _, line := range strings.Split(iamScript("lull-agent", p), "\n") {
			if strings.Count(line, "'")%2 != 0 {
				t.Errorf("a quote is open in %s", line)
			}
		}
	}
}
