package main

import (
	"context"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/lib/freeport"
	"lull/internal/lib/programtest"
	"lull/internal/protocol/control"
)

// freePort returns an unused port of this machine.
func freePort(t interface{ Fatal(...any) }) string {
	port, err := freeport.Take()
	if err != nil {
		t.Fatal(err)
	}
	return strconv.Itoa(port)
}

// TestServerScripts runs scripts of the fleet's commands against a real server and
// the simulated cloud, each in a process of its own.
func TestServerScripts(t *testing.T) {
	t.Parallel()
	shim := programtest.Build(t, "lull/cmd/lull-shim")
	cmds := (&receivers{all: map[string]*listening{}, posts: map[string]*post{}}).commands()
	maps.Copy(cmds, map[string]func(*testscript.TestScript, bool, []string){"code": exitCodeIs, "login": login, "until": until, "take": take, "secret": secret, "report": reportAs})
	testscript.Run(t, testscript.Params{
		Dir: "testdata/server",
		Setup: func(e *testscript.Env) error {
			for _, name := range []string{"API_PORT", "SIM_PORT", "CML_PORT", "KV_PORT", "PEER_PORT", "PEER_API_PORT"} {
				e.Setenv(name, freePort(e.T()))
			}
			data := filepath.Join(e.WorkDir, "host")
			e.Setenv("LULL_HOST_SHIM", shim)
			e.Setenv("LULL_HOST_DATA", data)
			e.Setenv("LULL_HOST_SOCKET", filepath.Join(e.WorkDir, "run", "host.sock"))
			e.Defer(func() { endShim(filepath.Join(data, "shim")) })
			e.Setenv("LULL_SERVER", "http://127.0.0.1:"+e.Getenv("API_PORT"))
			e.Setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:"+e.Getenv("SIM_PORT"))
			e.Setenv("AWS_ACCESS_KEY_ID", "test")
			e.Setenv("AWS_SECRET_ACCESS_KEY", "test")
			e.Setenv("CML_PW", "cml")
			e.Setenv("RECONCILE_INTERVAL", "1")
			return nil
		},
		Cmds: cmds,
	})
}

// login waits until a server has written its admin token to a file, and reads it:
// login FILE
func login(ts *testscript.TestScript, _ bool, args []string) {
	for end := time.Now().Add(patience); time.Now().Before(end); pause() {
		b, err := os.ReadFile(ts.MkAbs(args[0]))
		if token := strings.TrimSpace(string(b)); err == nil && token != "" {
			ts.Setenv("LULL_TOKEN", token)
			untilOutput(ts, "ok", "curl", "worker", "ls", "--json")
			return
		}
	}
	ts.Fatalf("no token in %s within %s", args[0], patience)
}

// secret writes a file that other users cannot read: secret FILE TEXT
func secret(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(args[1]+"\n"), 0o600))
}

// take sets a variable to the first group of a pattern that matches the last output:
// take NAME PATTERN
func take(ts *testscript.TestScript, _ bool, args []string) {
	out := ts.ReadFile("stdout")
	m := regexp.MustCompile(args[1]).FindStringSubmatch(out)
	if m == nil {
		ts.Fatalf("nothing matches %s in:\n%s", args[1], out)
	}
	ts.Setenv(args[0], m[1])
}

// until repeats lull ARG... until it succeeds, or with a ! fails, and its
// output contains TEXT: until TEXT ARG...
func until(ts *testscript.TestScript, neg bool, args []string) {
	untilSays(ts, args[0], "", neg, args[1:]...)
}

func untilOutput(ts *testscript.TestScript, text, any string, args ...string) {
	untilSays(ts, text, any, false, args...)
}

func untilSays(ts *testscript.TestScript, text, any string, fails bool, args ...string) {
	path, err := exec.LookPath("lull")
	ts.Check(err)
	out := ""
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); pause() {
		cmd := exec.Command(path, args...)
		cmd.Dir = ts.Getenv("WORK")
		for _, name := range []string{"PATH", "HOME", "LULL_SERVER", "LULL_TOKEN", "LULL_HOST"} {
			cmd.Env = append(cmd.Env, name+"="+ts.Getenv(name))
		}
		b, err := cmd.CombinedOutput()
		if out = string(b); (err != nil) == fails && (any != "" || strings.Contains(out, text)) {
			return
		}
	}
	ts.Fatalf("lull %s does not say %q; it says:\n%s", strings.Join(args, " "), text, out)
}

// TestServerConfigFaults checks that the error about a setting names the line,
// variable or flag.
func TestServerConfigFaults(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "s.yaml")
	for name, c := range map[string]struct {
		file, env string
		args      []string
		want      []string
	}{
		"unknown key":         {file: "min_workers: 1\nmin_worker: 2\n", want: []string{"s.yaml", "line 2", "min_worker"}},
		"bad value":           {file: "\nworker_idle_timeout_minutes: soon\n", want: []string{"s.yaml", "line 2", "worker_idle_timeout_minutes"}},
		"bad process setting": {file: "shadow: perhaps\n", want: []string{"shadow in", "s.yaml, line 1", `"perhaps" is not a bool`}},
		"list for a value":    {file: "listen: [a, b]\n", want: []string{"listen in", "s.yaml, line 1", "a single value"}},
		"environment":         {env: "MIN_WORKERS=-1", want: []string{"cannot use MIN_WORKERS: "}},
		"flag":                {args: []string{"--drain-timeout-seconds", "never"}, want: []string{"cannot use --drain-timeout-seconds: "}},
		"twice in a file":     {file: "listen: 127.0.0.1:1\nlisten: 127.0.0.1:2\n", want: []string{"listen in", "s.yaml, line 2", "line 1"}},
		"process variable":    {env: "LULL_SERVER_SHADOW=perhaps", want: []string{`cannot use LULL_SERVER_SHADOW: "perhaps" is not a bool`}},
		"off loopback":        {args: []string{"--listen", "0.0.0.0:1"}, want: []string{"TLS", "--insecure"}},
		"roles without etcd":  {args: []string{"--role", "api"}, want: []string{"--etcd"}},
		"rate":                {args: []string{"--aws-write-rate", "many"}, want: []string{"aws-write-rate", "many"}},
		"certificate alone":   {args: []string{"--tls-cert", "x"}, want: []string{"tls-key"}},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"config", "server"}, c.args...)
			if c.file != "" {
				errtest.None(t, os.WriteFile(file, []byte(c.file), 0o600))
				args = append(args, "--config", file)
			}
			k, v, _ := strings.Cut(c.env, "=")
			var out, errs strings.Builder
			code := run(t.Context(), args, nil, &out, &errs, func(name string) string {
				if name == k {
					return v
				}
				return ""
			})
			if code != term.ExitUsage {
				t.Errorf("ended with %d: %s", code, errs.String())
			}
			for _, w := range c.want {
				if !strings.Contains(errs.String(), w) {
					t.Errorf("%q does not say %q", errs.String(), w)
				}
			}
		})
	}
}

// reportAs sends a CPU reading as an agent would: report MACHINE CPU, with the token
// in $LULL_TOKEN.
func reportAs(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: report MACHINE CPU")
	}
	cl, err := control.NewClient(ts.Getenv("LULL_SERVER"), ts.Getenv("LULL_TOKEN"), nil)
	ts.Check(err)
	cpu, err := strconv.ParseFloat(args[1], 64)
	ts.Check(err)
	now := time.Now()
	_, err = cl.Report(context.Background(), args[0], control.AgentReport{At: now, Sequence: uint64(now.UnixNano()), StartedAt: now.Add(-time.Hour), BootID: "b", Version: "v1", Interval: idle.Duration(time.Minute),
		LastUse: now.Add(-10 * time.Minute), Readings: []idle.Reading{idle.Judge("cpu", cpu, 5, "%", time.Minute, now)},
		Judged: &control.AgentJudged{Policy: idle.Policy{Name: "agent", Timeout: idle.Duration(20 * time.Minute), CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true, Action: "stop"},
			Leases: []idle.Lease{{Holder: "training", Reason: "epoch 3", ExpiresAt: now.Add(time.Hour)}}}})
	if neg != (err != nil) {
		ts.Fatalf("the report: %v", err)
	}
}
