package programs

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/hostctl"
)

// probedAfter is the idle timeout of instances with probes. A probe takes a
// fraction of it.
const probedAfter = time.Second

// probedBy gives the instance a ready-made probe.
func (w *workload) probedBy(text string) {
	w.T.Helper()
	p, err := instance.ParseProbe(text)
	if err != nil {
		w.T.Fatal(err)
	}
	o := w.get()
	s := instance.Spec{Name: w.name, Runtime: o.Runtime, Command: o.Command, Workdir: w.Dir, PauseAfter: daemontest.Seconds(probedAfter),
		QuietConnectionAfter: idle.Duration(probedAfter), Expose: o.Endpoints, Probes: []instance.Probe{p}}
	if w.name == "postgres" {
		s.User = "postgres"
	}
	if err := w.Remove(w.T.Context(), w.name); err != nil {
		w.T.Fatal(err)
	}
	w.Launch(s)
}

// heldBy waits until a signal of the instance is active, and checks that it keeps
// the instance running for longer than the idle timeout.
func (w *workload) heldBy(signal string) {
	w.T.Helper()
	holds := func(o hostctl.Instance) bool {
		for _, b := range o.Blocks {
			if b.Signal == signal && b.Code == idle.SignalActive {
				return true
			}
		}
		return false
	}
	w.Until(w.name, signal+" is active", holds)
	before, since := w.get().PauseCount, time.Now()
	w.Until(w.name, signal+" outlasts the timeout", func(o hostctl.Instance) bool {
		if o.PauseCount != before || !holds(o) {
			w.T.Fatalf("%s does not hold %s: %s", signal, w.name, daemontest.Describe(o))
		}
		return time.Since(since) > 3*probedAfter
	})
}

// TestPostgresProbe checks that an open transaction keeps PostgreSQL running
// although its connection is quiet, and that afterwards the probe's own sessions
// do not.
func TestPostgresProbe(t *testing.T) {
	t.Parallel()
	p := postgresAt(start(t, nil), instance.PathDirect, 0)
	p.probedBy(fmt.Sprintf("postgres,interval=5s:host=127.0.0.1 port=%s user=postgres dbname=postgres", p.port()))
	daemontest.Wait(t, "PostgreSQL is ready", func() (bool, string) {
		out, err := exec.Command("pg_isready", "-q", "-h", "127.0.0.1", "-p", p.port()).CombinedOutput()
		return err == nil, string(out)
	})
	cmd := exec.Command("psql", append([]string{"-Xq"}, p.args()...)...)
	in, err := cmd.StdinPipe()
	errtest.None(t, err)
	errtest.None(t, cmd.Start())
	t.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	errtest.Get(io.WriteString(in, "begin; select 1;\n"))(t)
	p.heldBy("probe:postgres")
	errtest.Get(io.WriteString(in, "commit;\n"))(t)
	p.awaitState("paused") // although a session is connected
	if got := p.client("psql", append([]string{"-XAtc", "select 42"}, p.args()...)...); got != "42\n" {
		t.Errorf("the answer is %q", got)
	}
	p.awaitState("paused")
}

// TestRedisProbe checks that a blocked client keeps Redis running, and that the
// probe's own connections do not.
func TestRedisProbe(t *testing.T) {
	for _, path := range []instance.Path{instance.PathDirect, instance.PathRelay} {
		t.Run(string(path), func(t *testing.T) {
			t.Parallel()
			w := redisAt(start(t, nil), path, 0)
			w.probedBy("redis,interval=5s:" + w.listen)
			daemontest.Wait(t, "Redis has loaded its data", func() (bool, string) {
				out, _ := exec.Command("redis-cli", "-p", w.port(), "ping").CombinedOutput()
				return string(out) == "PONG\n", string(out)
			})
			c := dialRedis(w)
			c.do("SET k v")
			errtest.Get(fmt.Fprint(c, "BLPOP list 0\r\n"))(t)
			w.heldBy("probe:redis")
			c.Close()
			w.awaitState("paused")
			d := dialRedis(w)
			if got := d.do("GET k"); got != "v" {
				t.Errorf("the answer is %q", got)
			}
			d.Close()
			w.awaitState("paused")
		})
	}
}

// TestProbeInside checks that a probe that runs inside the instance has the
// instance's environment and user, keeps it running, and does not itself count as
// use.
func TestProbeInside(t *testing.T) {
	t.Parallel()
	w := redisAt(start(t, nil), instance.PathDirect, 0)
	errtest.None(t, w.Remove(t.Context(), w.name))
	busy := filepath.Join(w.Dir, "busy")
	errtest.None(t, os.WriteFile(busy, nil, 0o644))
	w.Launch(instance.Spec{Name: w.name, Command: []string{"sleep", "1000"}, Workdir: w.Dir, Env: []string{"MINE=yes"}, PauseAfter: daemontest.Seconds(probedAfter),
		Probes: []instance.Probe{{Name: "busy", Kind: instance.ProbeExec, Inside: true, Interval: idle.Duration(5 * time.Second),
			Command: []string{"/bin/sh", "-c", `[ "$MINE" = yes ] || exit 2; [ -e busy ]`}}}})
	w.heldBy("probe:busy")
	errtest.None(t, os.Remove(busy))
	w.awaitState("paused")
}

// TestProbeWithoutServer checks that a ready-made probe whose server is not
// running is unknown, whatever exit code its client program has.
func TestProbeWithoutServer(t *testing.T) {
	t.Parallel()
	installed(t, "redis-tools", "redis-cli")
	tool(t, "pgbench")
	w := place(start(t, nil), "lonely", instance.PathDirect)
	probes := make([]instance.Probe, 2)
	for n, text := range []string{"redis:127.0.0.1:1", "postgres:host=127.0.0.1 port=1 connect_timeout=2"} {
		p, err := instance.ParseProbe(text)
		errtest.None(t, err)
		probes[n] = p
	}
	w.Launch(instance.Spec{Name: w.name, Command: []string{"sleep", "1000"}, PauseAfter: daemontest.Seconds(probedAfter), Probes: probes})
	w.Until(w.name, "both probes are unknown", func(o hostctl.Instance) bool {
		unknown := 0
		for _, r := range o.Activity {
			if (r.Signal == "probe:redis" || r.Signal == "probe:postgres") && r.State == idle.Unknown && len(r.Detail) > len("not read yet") {
				unknown++
			}
		}
		return unknown == 2
	})
	if n := w.get().PauseCount; n != 0 {
		t.Errorf("it was paused %d times", n)
	}
}
