package agent

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/programtest"
	"lull/internal/protocol/control"
	"lull/internal/sim/world"
)

// serve starts lull server over the same simulated cloud and returns its URL
// and its admin token.
func (i *instance) serve() (url, token string) {
	i.t.Helper()
	file := filepath.Join(i.dir, "admin")
	cmd := exec.Command(server, "server", "--listen", "127.0.0.1:0", "--data", filepath.Join(i.dir, "server"), "--admin-token-file", file)
	cmd.Env = append(i.environ(), "AWS_ENDPOINT_URL="+i.url, "AWS_ACCESS_KEY_ID=test", "AWS_SECRET_ACCESS_KEY=test",
		"WORKER_IDLE_TIMEOUT_MINUTES=1", "WORKER_AUTO_PAUSE_SNOOZE_MINUTES=0", "WORKER_WARN_BEFORE_MINUTES=0", "RECONCILE_INTERVAL=5", "IDLE_DETECTION_INTERVAL=10", "DISCOVERY_IMPORT=off")
	said := &log{}
	cmd.Stdout, cmd.Stderr = said, said
	if err := cmd.Start(); err != nil {
		i.t.Fatal(err)
	}
	i.t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
		if i.t.Failed() {
			i.t.Logf("the server said:\n%s", said)
		}
	})
	serving := regexp.MustCompile(`serving on (http://\S+)`)
	i.await("the server", func() bool { return serving.MatchString(said.String()) })
	i.await("its token", func() bool {
		b, err := os.ReadFile(file)
		token = strings.TrimSpace(string(b))
		return err == nil && token != ""
	})
	url = serving.FindStringSubmatch(said.String())[1]
	cl, err := control.NewClient(url, token, nil)
	if err != nil {
		i.t.Fatal(err)
	}
	i.await("the API", func() bool {
		_, err := cl.Workers(context.Background(), nil)
		return err == nil
	})
	return url, token
}

// TestAgentAndServer runs the real agent, which may stop only its own instance,
// and the real server over one simulated cloud. Whichever of the two is the pause
// holder must stop the idle machine, and the record must say which.
func TestAgentAndServer(t *testing.T) {
	t.Parallel()
	for _, holder := range []string{worker.HolderController, worker.HolderAgent} {
		t.Run(holder, func(t *testing.T) {
			t.Parallel()
			i := launch(t, world.WorkerConfig{TagsInMetadata: true}, nil)
			url, token := i.serve()
			ask := func(into any, args ...string) {
				t.Helper()
				out, code := i.exec(server, append(args, "--server", url, "--token", token, "--json")...)
				if code != 0 {
					t.Fatalf("lull %s ended with %d: %s", strings.Join(args, " "), code, out)
				}
				if err := json.Unmarshal([]byte(out), into); err != nil && into != nil {
					t.Fatalf("lull %s: %v: %s", strings.Join(args, " "), err, out)
				}
			}
			var made control.Token
			ask(&made, "token", "create", "m", "--role", "agent", "--machine", i.id)
			secret := filepath.Join(i.dir, "token")
			if err := os.WriteFile(secret, []byte(made.Secret+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			var w worker.Worker
			ask(&w, "worker", "import", i.id, "--region", "us-east-1", "--source", "agent", "--pause-holder", holder,
				"--accept", "no_elastic_ip,instance_store,spot,asg_member")
			ask(nil, "worker", "arm", w.ID)
			i.boot("LULL_AGENT_SERVER="+url, "LULL_AGENT_TOKEN_FILE="+secret)
			i.await("the agent has heard from the server", func() bool { l := i.status().Server; return l != nil && l.WorkerID == w.ID })
			var agents []control.Machine
			ask(&agents, "agent", "ls")
			if len(agents) != 1 || agents[0].WorkerID != w.ID || agents[0].Stale || agents[0].Agent().Version != programtest.Version {
				t.Errorf("the server lists %+v", agents)
			}
			i.gone("stopped")
			i.await("the record", func() bool { ask(&w, "worker", "get", w.ID); return w.Status == "STOPPED" })
			by := audit.ByController.Name
			if holder == worker.HolderAgent {
				by = worker.ByAgent.Name
			}
			if w.PauseReason != power.ReasonIdleTimeout || w.LastPausedBy != by || w.AutoPauseCount != 1 || w.ExternalPauseCount != 0 {
				t.Errorf("the record says %s by %s, %d automatic and %d external", w.PauseReason, w.LastPausedBy, w.AutoPauseCount, w.ExternalPauseCount)
			}
			if _, _, tags := i.state(); tags["lull:idle-action"] != "stopped" && tags["lull:idle-action"] != "stopping" {
				t.Errorf("tags %v", tags)
			}
		})
	}
}
