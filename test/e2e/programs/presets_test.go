package programs

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// probed runs a program with a ready-made probe, at an address that is exposed on
// the direct path.
func probed(t *testing.T, name, probe string, after time.Duration, command func(w *workload) []string) *workload {
	t.Helper()
	w := place(start(t, nil), name, instance.PathDirect)
	p, err := instance.ParseProbe(strings.ReplaceAll(probe, "ADDR", w.target))
	if err != nil {
		t.Fatal(err)
	}
	w.Launch(instance.Spec{Name: name, Workdir: w.Dir, Command: command(w), Probes: []instance.Probe{p},
		PauseAfter: daemontest.Seconds(after), QuietConnectionAfter: idle.Duration(after),
		Expose: []instance.Endpoint{{Listen: w.listen, Target: w.target, Path: instance.PathDirect}}})
	return w
}

// beside runs a program without lull until the test ends.
func beside(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait() // returns an error because it was killed
		if t.Failed() {
			t.Logf("%s: %s", cmd.Path, out.String())
		}
	})
}

// reading returns the reading of a signal; the zero Reading if there is none.
func reading(o hostctl.Instance, signal string) (r idle.Reading) {
	for _, r := range o.Activity {
		if r.Signal == signal {
			return r
		}
	}
	return r
}

// onlySoak skips a test whose program only make soak installs.
func onlySoak(t *testing.T) {
	if os.Getenv("LULL_SOAK") == "" {
		t.Skip("make soak drives it")
	}
}

// TestBeanstalkdProbe checks that a job in any tube keeps beanstalkd running
// although no client is connected, and that a buried job does not.
func TestBeanstalkdProbe(t *testing.T) {
	t.Parallel()
	server := installed(t, "beanstalkd", "beanstalkd", "/usr/bin/beanstalkd")
	w := probed(t, "beanstalkd", "beanstalkd,interval=2s:ADDR", probedAfter, func(w *workload) []string {
		return []string{server, "-l", "127.0.0.1", "-p", w.targetPort()}
	})
	say := func(want, commands string) {
		t.Helper()
		defer w.awaiting("beanstalkd")()
		c, err := net.Dial("tcp", w.listen)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, commands+"quit\r\n"); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(c); err != nil || string(got) != want {
			t.Fatalf("%q: %q, %v", commands, got, err)
		}
	}
	w.awaitState("paused")
	say("USING mail\r\nINSERTED 1\r\n", "use mail\r\nput 0 0 60 1\r\nx\r\n")
	w.heldBy("probe:beanstalkd")
	say("DELETED\r\n", "delete 1\r\n")
	w.awaitState("paused")
	say("INSERTED 2\r\n", "put 0 3600 60 1\r\nx\r\n") // delayed by an hour
	w.heldBy("probe:beanstalkd")
	say("KICKED\r\n", "kick-job 2\r\n")
	say("RESERVED 2 1\r\nx\r\nBURIED\r\n", "reserve-with-timeout 0\r\nbury 2 0\r\n")
	w.awaitState("paused")
}

// TestRedisListProbe checks that an element of the probe's list keeps Redis
// running, and that other data does not.
func TestRedisListProbe(t *testing.T) {
	t.Parallel()
	w := redisAt(start(t, nil), instance.PathDirect, 0)
	w.probedBy("redis,interval=2s:" + w.listen + "#jobs")
	daemontest.Wait(t, "Redis has loaded its data", func() (bool, string) {
		out, _ := exec.Command("redis-cli", "-p", w.port(), "ping").CombinedOutput()
		return string(out) == "PONG\n", string(out)
	})
	say := func(command string) {
		c := dialRedis(w)
		defer c.Close()
		c.do(command)
	}
	say("RPUSH other x")
	w.awaitState("paused")
	say("RPUSH jobs x")
	w.heldBy("probe:redis")
	say("LPOP jobs")
	w.awaitState("paused")
	say("SET jobs 1") // not a list, so its length is unknown
	w.Until(w.name, "the probe is unknown", func(o hostctl.Instance) bool { return reading(o, "probe:redis").State == idle.Unknown })
	say("DEL jobs")
	w.awaitState("paused")
}

// TestMinecraftProbe checks that a player keeps a Minecraft server running
// although the connection is quiet.
func TestMinecraftProbe(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "minecraft")
	build := exec.Command("go", "build", "-o", program, ".")
	build.Dir = filepath.Join("testdata", "minecraft")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("cannot build the server: %v\n%s", err, out)
	}
	w := probed(t, "minecraft", "minecraft,interval=2s:ADDR", probedAfter, func(w *workload) []string {
		return []string{program, "serve", w.target}
	})
	w.awaitState("paused")
	ctx, leave := context.WithCancel(t.Context())
	beside(t, exec.CommandContext(ctx, program, "play", w.listen))
	w.heldBy("probe:minecraft")
	leave()
	w.awaitState("paused")
}

// TestJupyterProbe checks that a working kernel, and a kernel with a client, keep
// Jupyter running, and that an idle kernel does not.
func TestJupyterProbe(t *testing.T) {
	t.Parallel()
	server := installed(t, "jupyter-server", "jupyter-server", "/usr/bin/jupyter-server")
	const secret = "s3cret"
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	w := probed(t, "jupyter", "jupyter,interval=4s,token-file="+token+":http://ADDR", probedAfter, func(w *workload) []string {
		return []string{"/usr/bin/env", "HOME=" + w.Dir, "JUPYTER_RUNTIME_DIR=" + filepath.Join(w.Dir, "runtime"), server, "--allow-root", "--no-browser",
			"--ServerApp.ip=127.0.0.1", "--ServerApp.port=" + w.targetPort(), "--ServerApp.token=" + secret}
	})
	ask := func(method, path string, body any) (out struct{ ID string }) {
		t.Helper()
		defer w.awaiting("Jupyter")()
		sent, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+w.listen+path, bytes.NewReader(sent))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "token "+secret)
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode > 299 {
			t.Fatalf("%s %s: %s, %s, %v", method, path, resp.Status, data, err)
		}
		if len(data) > 0 {
			if err := json.Unmarshal(data, &out); err != nil {
				t.Fatalf("%s: %v", data, err)
			}
		}
		return out
	}
	w.awaitState("paused")
	kernel := ask("POST", "/api/kernels", map[string]string{"name": "python3"}).ID
	// Another client runs a cell that computes for a long time.
	began := filepath.Join(t.TempDir(), "began")
	beside(t, exec.Command("/usr/bin/python3", "-c", `
import sys
from jupyter_client import BlockingKernelClient
c = BlockingKernelClient(connection_file=sys.argv[1])
c.load_connection_file()
c.start_channels()
c.execute("open('''" + sys.argv[2] + "''', 'w').close(); import time; time.sleep(1000)")
c.get_shell_msg(timeout=1000)
`, filepath.Join(w.Dir, "runtime", "kernel-"+kernel+".json"), began))
	w.heldBy("probe:jupyter")
	waittest.Until(t, "the cell computes", func() bool { _, err := os.Stat(began); return err == nil })
	ask("POST", "/api/kernels/"+kernel+"/interrupt", nil)
	w.awaitState("paused")
}

// A user's server that runs holds JupyterHub, which has no clients of its own then.
func TestJupyterHubProbe(t *testing.T) {
	onlySoak(t)
	t.Parallel()
	hub := installed(t, "jupyterhub", "/usr/bin/jupyterhub")
	const secret = "s3cret-token" // at least 8 characters
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	w := probed(t, "jupyterhub", "jupyterhub,interval=4s,token-file="+token+":http://ADDR", probedAfter, func(w *workload) []string {
		conf := filepath.Join(w.Dir, "jupyterhub_config.py")
		text := fmt.Sprintf(`
c.JupyterHub.bind_url = "http://%s"
c.JupyterHub.hub_bind_url = "http://%s"
c.ConfigurableHTTPProxy.api_url = "http://%s"
c.JupyterHub.authenticator_class = "jupyterhub.auth.DummyAuthenticator"
c.JupyterHub.spawner_class = "jupyterhub.spawner.SimpleLocalProcessSpawner"
c.Spawner.args = ["--allow-root"]
c.JupyterHub.services = [{"name": "lull", "api_token": "%s"}]
c.JupyterHub.load_roles = [{"name": "lull", "services": ["lull"], "scopes": ["admin:users", "admin:servers", "list:users", "read:servers"]}]
`, w.target, daemontest.Addr(t), daemontest.Addr(t), secret)
		if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		// NODE_PATH is where Debian's modules are, for another node than Debian's.
		return []string{"/usr/bin/env", "HOME=" + w.Dir, "PATH=/usr/bin:/bin", "NODE_PATH=/usr/share/nodejs", "/usr/bin/python3", hub, "-f", conf}
	})
	ask := func(method, path string) {
		t.Helper()
		defer w.awaiting("JupyterHub")()
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+w.listen+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+secret)
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if data, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode > 299 {
			t.Fatalf("%s %s: %s, %s, %v", method, path, resp.Status, data, err)
		}
	}
	w.awaitState("paused")
	ask("POST", "/hub/api/users/ada")
	w.awaitState("paused")
	ask("POST", "/hub/api/users/ada/server")
	w.heldBy("probe:jupyterhub")
	ask("DELETE", "/hub/api/users/ada/server")
	w.awaitState("paused")
}

// TestRabbitMQProbe checks that an unread message keeps RabbitMQ running. The
// idle timeout is longer than the age of the numbers that its management plugin
// reports.
func TestRabbitMQProbe(t *testing.T) {
	onlySoak(t)
	t.Parallel()
	server := installed(t, "rabbitmq-server", "/usr/lib/rabbitmq/bin/rabbitmq-server")
	var amqp string
	w := probed(t, "rabbitmq", "rabbitmq,interval=10s:http://guest:guest@ADDR", 15*time.Second, func(w *workload) []string {
		amqp = daemontest.Addr(t)
		_, port, _ := net.SplitHostPort(amqp)
		dist := daemontest.Addr(t)
		_, distPort, _ := net.SplitHostPort(dist)
		write := func(name, text string) string {
			path := filepath.Join(w.Dir, name)
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			return path
		}
		conf := write("rabbit.conf", "listeners.tcp.1 = "+amqp+"\nmanagement.tcp.ip = 127.0.0.1\nmanagement.tcp.port = "+w.targetPort()+"\ncollect_statistics_interval = 1000\n")
		plugins := write("plugins", "[rabbitmq_management].\n")
		return []string{"/usr/bin/env", "HOME=" + w.Dir, "RABBITMQ_NODENAME=lull" + port + "@localhost", "RABBITMQ_NODE_PORT=" + port, "RABBITMQ_DIST_PORT=" + distPort,
			"RABBITMQ_CONFIG_FILE=" + conf, "RABBITMQ_ENABLED_PLUGINS_FILE=" + plugins, "RABBITMQ_MNESIA_BASE=" + filepath.Join(w.Dir, "mnesia"),
			"RABBITMQ_LOG_BASE=" + filepath.Join(w.Dir, "log"), "RABBITMQ_PID_FILE=" + filepath.Join(w.Dir, "pid"), server}
	})
	ask := func(method, path, body string) int {
		t.Helper()
		defer w.awaiting("RabbitMQ")()
		req, err := http.NewRequestWithContext(t.Context(), method, "http://guest:guest@"+w.listen+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return resp.StatusCode
	}
	daemontest.Wait(t, "RabbitMQ has a queue", func() (bool, string) { // it listens before it is ready
		status := ask("PUT", "/api/queues/%2F/jobs", `{}`)
		return status < 300, strconv.Itoa(status)
	})
	w.awaitState("paused")
	if status := ask("POST", "/api/exchanges/%2F/amq.default/publish", `{"properties":{},"routing_key":"jobs","payload":"x","payload_encoding":"string"}`); status != http.StatusOK {
		t.Fatalf("published with status %d", status)
	}
	w.heldBy("probe:rabbitmq")
	if status := ask("POST", "/api/queues/%2F/jobs/get", `{"count":1,"ackmode":"ack_requeue_false","encoding":"auto"}`); status != http.StatusOK {
		t.Fatalf("read with status %d", status)
	}
	w.awaitState("paused")
}

// TestSlurmProbe checks that a job keeps the node of a SLURM on this machine
// running, and that without SLURM's controller the reading is unknown.
func TestSlurmProbe(t *testing.T) {
	onlySoak(t)
	t.Parallel()
	h := start(t, nil)
	installed(t, "slurmd", "/usr/sbin/slurmd")
	dir := t.TempDir()
	conf, socket, key := filepath.Join(dir, "slurm.conf"), filepath.Join(dir, "munge.sock"), filepath.Join(dir, "key")
	node, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	node, _, _ = strings.Cut(node, ".")
	port := func() string {
		_, p, _ := net.SplitHostPort(daemontest.Addr(t))
		return p
	}
	files := map[string]string{key: strings.Repeat("k", 1024), conf: strings.Join([]string{"ClusterName=test", "SlurmctldHost=" + node + "(127.0.0.1)", "SlurmctldPort=" + port(),
		"SlurmdPort=" + port(), "AuthType=auth/munge", "AuthInfo=socket=" + socket, "SlurmUser=root", "SlurmdUser=root", "StateSaveLocation=" + dir, "SlurmdSpoolDir=" + dir,
		"SlurmctldPidFile=" + dir + "/c.pid", "SlurmdPidFile=" + dir + "/d.pid", "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SelectType=select/linear",
		"ReturnToService=2", "NodeName=" + node + " NodeAddr=127.0.0.1 CPUs=1", "PartitionName=main Nodes=" + node + " Default=YES State=UP", ""}, "\n")}
	for path, text := range files {
		if err := os.WriteFile(path, []byte(text), 0o400); err != nil {
			t.Fatal(err)
		}
	}
	with := func(name string, args ...string) *exec.Cmd {
		cmd := exec.Command(name, args...)
		cmd.Env = append(os.Environ(), "SLURM_CONF="+conf)
		return cmd
	}
	beside(t, with("munged", "--foreground", "--force", "--key-file", key, "--socket", socket, "--pid-file", dir+"/m.pid", "--log-file", dir+"/m.log", "--seed-file", dir+"/m.seed"))
	daemontest.Wait(t, "munged listens", func() (bool, string) { _, err := os.Stat(socket); return err == nil, fmt.Sprint(err) })
	ctld := with("slurmctld", "-D", "-f", conf)
	beside(t, ctld)
	beside(t, with("slurmd", "-D", "-f", conf, "-N", node))
	daemontest.Wait(t, "the node is idle", func() (bool, string) {
		out, _ := with("sinfo", "-h", "-o", "%t").CombinedOutput()
		return string(out) == "idle\n", string(out)
	})
	p, err := instance.ParseProbe("slurm,interval=5s,timeout=3s")
	if err != nil {
		t.Fatal(err)
	}
	p.Command = append([]string{"/usr/bin/env", "SLURM_CONF=" + conf}, p.Command...)
	w := &workload{Host: h, name: "node"}
	w.Launch(instance.Spec{Name: w.name, Command: []string{"sleep", "1000"}, PauseAfter: daemontest.Seconds(probedAfter), Probes: []instance.Probe{p}})
	w.awaitState("paused")
	out, err := with("sbatch", "-o", "/dev/null", "--wrap", "sleep 1000").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	w.Must(w.name, "resume")
	w.heldBy("probe:slurm")
	if out, err := with("scancel", "-n", "wrap").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	w.awaitState("paused")
	if err := ctld.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	w.Must(w.name, "resume")
	w.Until(w.name, "the probe is unknown", func(o hostctl.Instance) bool {
		r := reading(o, "probe:slurm")
		return r.State == idle.Unknown && strings.Contains(r.Detail, "no answer")
	})
}
