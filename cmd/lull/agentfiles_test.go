package main

import (
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"lull/internal/agent"
)

var updateEtc = flag.Bool("update-etc", false, "write the files of etc that come from code")

// TestEtcIsFresh holds the files in etc to the code that install and iam use.
func TestEtcIsFresh(t *testing.T) {
	for name, want := range map[string]string{
		"lull-agent.service": agentUnit("/usr/bin/lull"),
		"agent.yaml":         agent.Example(),
		"iam-agent.json":     policyJSON(agentRights("aws", "lull:", false)),
	} {
		path := filepath.Join("..", "..", "etc", name)
		if *updateEtc {
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("etc/%s is not what the code says (%v): run go test ./cmd/lull -run EtcIsFresh -update-etc", name, err)
		}
	}
}

// need finds a program, or skips where it is not installed and this is not CI.
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

// TestUnits has systemd itself read the units, and holds how exposed they are:
// a change that opens a unit up has to change its row here.
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
		// verify wants the program to be there.
		copied := filepath.Join(t.TempDir(), c.unit)
		if err := os.WriteFile(copied, []byte(strings.ReplaceAll(text, "/usr/bin/lull", "/bin/true")), 0o644); err != nil {
			t.Fatal(err)
		}
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

// TestHostUnitKeepsInstances holds what lets instances outlive the daemon.
func TestHostUnitKeepsInstances(t *testing.T) {
	b, err := os.ReadFile("../../etc/lull-host.service")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Delegate=yes", "KillMode=process", "LimitNOFILE=1048576"} {
		if !strings.Contains(string(b), "\n"+want+"\n") {
			t.Errorf("lull-host.service lacks %s", want)
		}
	}
}

// TestAgentRights holds the policy to its promises.
func TestAgentRights(t *testing.T) {
	for _, c := range []struct {
		terminate bool
		prefix    string
		key       string
	}{{false, "lull:", "lull:idle-status"}, {true, "lull:", "lull:idle-status"}, {false, "prism:", "Prism:IdleStatus"}} {
		p := agentRights("aws", c.prefix, c.terminate)
		var whole map[string]any
		if err := json.Unmarshal([]byte(policyJSON(p)), &whole); err != nil {
			t.Fatal(err)
		}
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
