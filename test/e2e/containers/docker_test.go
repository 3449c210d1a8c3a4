package containers

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// dock is a Docker daemon and a lull that manages its containers.
type dock struct {
	*daemontest.Dockerd
	d *daemontest.Host
}

func newDock(t *testing.T) dock {
	t.Helper()
	k := daemontest.StartDockerd(t)
	return dock{k, host(t, "--docker="+k.Socket())}
}

// serve runs a labeled server that lull pauses only on request. It returns the
// server's address once the server answers.
func (k dock) serve(name string, more ...string) string {
	k.d.T.Helper()
	at := daemontest.Addr(k.d.T)
	args := append([]string{"run", "-d", "--name", name, "--label", "lull.pause-after=0", "-p", at + ":8080"}, more...)
	k.Must(append(args, "box:1", "guest", "serve", "-listen", "0.0.0.0:8080")...)
	k.known(name)
	k.answers(at)
	return at
}

// known waits until lull has adopted a container.
func (k dock) known(name string) (o hostctl.Instance) {
	k.d.T.Helper()
	daemontest.Wait(k.d.T, name+" is taken over", func() (bool, string) {
		var err error
		o, err = k.d.Get(k.d.T.Context(), name)
		return err == nil && o.State == "running", daemontest.Describe(o)
	})
	return o
}

// answers waits until a server answers. Docker accepts connections before the
// program listens.
func (k dock) answers(at string) {
	k.d.T.Helper()
	daemontest.Wait(k.d.T, at+" answers", func() (bool, string) {
		if err := say(at, "hello"); err != nil {
			return false, err.Error()
		}
		return true, ""
	})
}

// pause makes lull pause a container. A connection that its client has closed and
// the program has not prevents that for a moment.
func (k dock) pause(name string) {
	k.d.T.Helper()
	waittest.NoError(k.d.T, "pause "+name, func() error { return k.d.Force(name) })
	k.d.Await(name, "paused")
	if got := k.status(name); got != "paused" {
		k.d.T.Fatalf("docker says that %s is %q", name, got)
	}
}

func (k dock) status(name string) string { return k.Say("inspect", "-f", "{{.State.Status}}", name) }

func (k dock) is(name, want string) {
	k.d.T.Helper()
	daemontest.Wait(k.d.T, "docker says that "+name+" is "+want, func() (bool, string) { got := k.status(name); return got == want, got })
}

// forgotten waits until lull has no instance of a name.
func (k dock) forgotten(name string) {
	k.d.T.Helper()
	daemontest.Wait(k.d.T, name+" is forgotten", func() (bool, string) {
		o, err := k.d.Get(k.d.T.Context(), name)
		return err != nil, daemontest.Describe(o)
	})
}

// TestLatePause makes Docker hang while lull pauses containers, so that lull
// gives up and Docker executes the requests later. The containers must run again
// then, and their clients must be answered. A user's pause must remain.
func TestLatePause(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	at := map[string]string{}
	for _, name := range []string{"one", "two", "three"} {
		at[name] = k.serve(name)
	}
	k.Hang()
	defer k.Continue()
	var wg sync.WaitGroup
	for name := range at {
		wg.Go(func() {
			if err := k.d.Force(name); err == nil {
				t.Errorf("%s was paused, it says, while Docker hung", name)
			}
		})
	}
	for name := range at {
		k.d.Until(name, "lull gives up its pause and asks Docker to undo it", func(o hostctl.Instance) bool {
			return o.State == "pausing" && o.StateSince != nil && time.Since(*o.StateSince) > 7*time.Second
		})
	}
	k.Continue()
	wg.Wait()
	for name, addr := range at {
		k.is(name, "running")
		k.d.Await(name, "running")
		done := k.d.Awaiting(name, "a client of "+addr, nil)
		if err := say(addr, "hello"); err != nil {
			t.Errorf("a client of %s: %v", name, err)
		}
		done()
	}
	k.pause("one") // answered, so no late effect is expected
	k.answers(at["one"])
	k.Must("pause", "one")
	k.d.Await("one", "paused")
}

// TestNobodyIsLeftPaused checks that containers that lull paused run again
// however lull ends, and that containers that a user paused stay paused.
func TestNobodyIsLeftPaused(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	at := k.serve("web")
	k.serve("mine")
	k.pause("web")
	k.Must("pause", "mine")
	k.d.Await("mine", "paused")

	k.d.Kill()
	k.is("web", "running")
	if err := say(at, "no client"); err != nil {
		t.Errorf("without a daemon: %v", err)
	}
	if got := k.status("mine"); got != "paused" {
		t.Errorf("what a user has paused is %s", got)
	}
	k.d.Boot()
	k.known("web")
	if o := k.d.Await("mine", "paused"); o.LastPausedBy != "external" {
		t.Errorf("it was paused by %s", o.LastPausedBy)
	}

	// A daemon that restarts at once keeps the instance paused.
	k.pause("web")
	k.d.Kill()
	k.d.Boot()
	if err := say(at, "back"); err != nil {
		t.Errorf("woken by the next daemon: %v", err)
	}
	k.d.Await("web", "running")

	// Docker is unavailable when lull ends.
	k.pause("web")
	k.Stop()
	k.d.Kill()
	k.Start()
	k.is("web", "running")
	k.d.Boot()
	k.known("web")
	k.answers(at)

	// A regular shutdown.
	k.pause("web")
	errtest.None(t, syscall.Kill(k.d.PID(), syscall.SIGTERM))
	k.is("web", "running")
	daemontest.Wait(t, "the daemon ends", func() (bool, string) { return k.d.Over(), "" })
	k.d.Boot()
	k.known("web")
	k.Must("unpause", "mine")
	k.known("mine")
}

// TestDockerUses checks that every docker command works on a container that lull
// has paused, and that lull follows the change.
func TestDockerUses(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	at := k.serve("web")
	k.d.LeavesCommand("web")

	k.pause("web")
	k.Must("stop", "-t", "5", "web")
	if o := k.d.Await("web", "stopped"); o.ExitCode == nil {
		t.Errorf("after docker stop: %s", o.StatusReason)
	}
	k.Must("start", "web")
	k.known("web")
	k.answers(at)

	k.pause("web")
	pid := k.d.Show("web").PID
	k.Must("restart", "-t", "5", "web")
	k.d.Until("web", "its next run is followed", func(o hostctl.Instance) bool { return o.State == "running" && o.PID != 0 && o.PID != pid })
	k.answers(at)

	k.pause("web")
	k.Must("kill", "web")
	k.d.Await("web", "stopped")
	k.Must("start", "web")
	k.known("web")
	k.answers(at)

	// A renamed container must remain the same instance under its new name, and
	// the next container with the old name must be another instance.
	id := k.d.Show("web").ID
	k.pause("web")
	k.Must("rename", "web", "old")
	if o := k.d.Await("old", "paused"); o.ID != id {
		t.Errorf("renamed, it is %s and not %s", o.ID, id)
	}
	k.forgotten("web")
	if err := say(at, "renamed"); err != nil {
		t.Errorf("after a rename: %v", err)
	}
	k.d.Await("old", "running")
	k.Must("run", "-d", "--name", "web", "--label", "lull.pause-after=1h", "box:1", "sh", "-c", untilTerm)
	if o := k.known("web"); o.ID == id {
		t.Error("two containers are one instance")
	}

	errtest.None(t, k.d.Force("old"))
	k.is("old", "paused")
	k.Must("rm", "-f", "old")
	k.forgotten("old")
	k.Must("rm", "-f", "web")
	k.forgotten("web")
	at = k.serve("web") // recreated
	k.pause("web")
	if err := say(at, "again"); err != nil {
		t.Error(err)
	}
}

// TestWhileAway checks that lull notices changes made while it was not running: a
// removed container leaves nothing behind, and its name can be used by another
// one.
func TestWhileAway(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	k.serve("web")
	k.serve("ends")
	o := k.d.Show("web")
	k.pause("web")
	k.d.Kill()
	k.Must("rm", "-f", "web")
	k.Must("run", "-d", "--name", "web", "--label", "lull.pause-after=1h", "box:1", "sh", "-c", untilTerm)
	k.Must("stop", "-t", "5", "ends")
	k.d.Boot()
	k.d.Until("ends", "its end is known", func(o hostctl.Instance) bool { return o.State == "stopped" })
	daemontest.Wait(t, "the next one has its name", func() (bool, string) {
		l, err := k.d.List(t.Context())
		errtest.None(t, err)
		saw := ""
		for _, i := range l {
			saw += daemontest.Describe(i) + "\n"
			if i.Name == "web" && i.ID != o.ID && i.State == "running" && len(l) == 2 {
				return true, saw
			}
		}
		return false, saw
	})
	k.Must("start", "ends")
	k.known("ends")
}

const untilTerm = `trap "exit 0" TERM; while :; do sleep 0.1; done`

// TestLabels checks that an invalid label is reported with the container's name,
// in the log and in the status, until the container is removed, and that lull
// does not touch the container.
func TestLabels(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	for _, c := range []struct{ name, label, want string }{
		{"odd", "lull.pause-after=soon", "lull.pause-after"},
		{"steps", "lull.reclaim-after=2h", "lull.reclaim-after"},
		{"lazy", "lull.idle-policy=lazy", "lull.idle-policy"},
		{"typo", "lull.pause-afer=1m", "lull.pause-afer"},
	} {
		args := []string{"run", "-d", "--name", c.name, "--label", "lull.pause-after=1m", "--label", "lull.stop-after=1h", "--label", c.label}
		k.Must(append(args, "box:1", "sh", "-c", untilTerm)...)
		says := func() (string, bool) {
			st, err := k.d.Status(t.Context())
			errtest.None(t, err)
			for _, f := range st.LeftAlone {
				if strings.Contains(f, c.name) && strings.Contains(f, c.want) {
					return f, true
				}
			}
			return strings.Join(st.LeftAlone, "\n"), false
		}
		daemontest.Wait(t, c.name+" is in the status with "+c.want, func() (bool, string) { saw, ok := says(); return ok, saw })
		if log := k.d.Log(); !strings.Contains(log, c.want) {
			t.Errorf("%s: the log has no %s:\n%s", c.name, c.want, log)
		}
		if _, err := k.d.Get(t.Context(), c.name); err == nil {
			t.Errorf("%s was taken over", c.name)
		}
		k.Must("rm", "-f", c.name)
		daemontest.Wait(t, c.name+" leaves the status", func() (bool, string) { saw, ok := says(); return !ok, saw })
	}
}

// named returns the spec of an instance for the container with that name.
func named(name, container string) instance.Spec {
	s := box(name, container)
	s.Runtime = "docker"
	return s
}

// TestOneOwner checks that a container never has two instances, and that a
// container is managed even if its name is already taken by another instance.
func TestOneOwner(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	k.serve("web")
	refuses(k.d, named("second", "web"), "web", "already")
	k.known("web")

	// An instance may name a container that does not exist yet; it is found when
	// it appears.
	errtest.Get(k.d.Create(t.Context(), hostctl.Create{Spec: named("later", "cron")}))(t)
	k.Must("run", "-d", "--name", "cron", "box:1", "sh", "-c", untilTerm)
	k.known("later")
	errtest.None(t, k.d.Force("later"))
	k.is("cron", "paused")
	k.Must("rm", "-f", "cron")
	k.d.Await("later", "stopped")
	k.Must("run", "-d", "--name", "cron", "box:1", "sh", "-c", untilTerm)
	k.known("later")
}

// TestPublished checks that clients of a port that Docker publishes, on one
// address or on all, reach a paused container.
func TestPublished(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	at := k.serve("local")
	all := daemontest.Addr(t)
	k.Must("run", "-d", "--name", "all", "--label", "lull.pause-after=0", "-p", all[strings.LastIndex(all, ":")+1:]+":8080",
		"box:1", "guest", "serve", "-listen", "0.0.0.0:8080")
	k.known("all")
	k.answers(all)
	for range 3 {
		for name, addr := range map[string]string{"local": at, "all": all} {
			k.pause(name)
			if err := say(addr, "wake"); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			k.d.Await(name, "running")
		}
	}
}

// TestHealthCheck checks that Docker's own health check does not count as
// activity, unless another container shares the network and may have sent the
// request.
func TestHealthCheck(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	checked := func(name, pause string, more ...string) {
		t.Helper()
		args := []string{"run", "-d", "--name", name, "--label", "lull.pause-after=" + pause,
			"--label", "lull.idle-policy=leases_only", // ignore its CPU usage here
			"--health-cmd", "echo hello | nc 127.0.0.1 8080", "--health-interval", "500ms"}
		k.Must(append(append(args, more...), "box:1", "guest", "serve", "-listen", "0.0.0.0:8080")...)
	}
	checked("alone", "2s")
	daemontest.Wait(t, "it is paused", func() (bool, string) {
		o, err := k.d.Get(t.Context(), "alone") // lull may not have adopted it yet
		return err == nil && o.LastPausedBy == "idle_timeout", daemontest.Describe(o)
	})
	k.Must("rm", "-f", "alone")

	k.Must("run", "-d", "--name", "beside", "box:1", "sh", "-c", untilTerm)
	checked("shared", "1h", "--network", "container:beside")
	began := *k.known("shared").LastActivityAt
	k.d.Until("shared", "its check counts", func(o hostctl.Instance) bool { return o.LastActivityAt.After(began) })
}

// TestHealthCheckCPU checks that the CPU time of Docker's health checks does not
// keep a container running, and does not hide the CPU time that its program uses
// meanwhile. It does not run beside other tests of this package: a program that gets
// less than 20 ms of CPU per check counts as quiet.
func TestHealthCheckCPU(t *testing.T) {
	k := newDock(t)
	checked := func(name, program string) {
		t.Helper()
		k.Must("run", "-d", "--name", name, "--label", "lull.pause-after=5s", "--health-interval", "100ms", "--health-timeout", "2s",
			"--health-cmd", "while :; do :; done", "box:1", "sh", "-c", program)
	}
	checked("idle", "sleep 1000")
	checked("works", `while :; do i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done; sleep 0.1; done`)
	began := *k.known("works").LastActivityAt
	daemontest.Wait(t, "the idle one is paused", func() (bool, string) {
		o, err := k.d.Get(t.Context(), "idle")
		return err == nil && o.LastPausedBy == "idle_timeout", daemontest.Describe(o)
	})
	o := k.d.Until("works", "its work counts", func(o hostctl.Instance) bool { return o.LastActivityAt.After(began) })
	if o.LastPausedAt != nil {
		t.Errorf("it was paused at work: %s", daemontest.Describe(o))
	}
}

// established matches a connection to port 8080 in /proc/PID/net/tcp6.
var established = regexp.MustCompile(`:1F90 [0-9A-F]+:[0-9A-F]{4} 01 `)

// TestDockerPause checks that a container that a user paused with docker stays
// paused, whatever clients connect, until the user resumes it.
func TestDockerPause(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	at := k.serve("web")
	k.Must("pause", "web")
	o := k.d.Await("web", "paused")
	if o.LastPausedBy != "external" || o.WakesOnConnection || !strings.Contains(o.StatusReason, "docker pause") {
		t.Errorf("%s: by %s, wakes on connection %v, %q", daemontest.Describe(o), o.LastPausedBy, o.WakesOnConnection, o.StatusReason)
	}
	answer := make(chan error, 1)
	go func() { answer <- say(at, "are you there") }()
	daemontest.Wait(t, "the client has connected", func() (bool, string) {
		b, err := os.ReadFile("/proc/" + k.Say("inspect", "-f", "{{.State.Pid}}", "web") + "/net/tcp6")
		return err == nil && established.Match(b), string(b)
	})
	k.serve("other")
	k.pause("other")
	k.d.Kill() // the next daemon does not wake it either
	k.d.Boot()
	k.d.Show("other")
	if o = k.d.Show("web"); o.State != "paused" || o.LastPausedBy != "external" || k.status("web") != "paused" {
		t.Errorf("%s: paused by %s, docker says %s", daemontest.Describe(o), o.LastPausedBy, k.status("web"))
	}
	k.Must("unpause", "web")
	if err := <-answer; err != nil {
		t.Errorf("the client was not answered: %v", err)
	}
	k.known("web")

	// A user can resume a container that lull has paused.
	k.pause("web")
	k.Must("unpause", "web")
	if o := k.known("web"); o.LastResumedBy != "external" {
		t.Errorf("it was resumed by %s", o.LastResumedBy)
	}
	k.pause("web")
	k.Must("stop", "-t", "5", "web")
	k.d.Await("web", "stopped")
}

// TestDockerExec checks that a command that a user runs with docker exec keeps
// its container running. Docker refuses an exec in a paused container without an
// event by which lull could wake it; lull's own exec wakes it.
func TestDockerExec(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	at := daemontest.Addr(t)
	k.Must("run", "-d", "--name", "web", "--label", "lull.pause-after=1s", "-p", at+":8080", "box:1", "guest", "serve", "-listen", "0.0.0.0:8080")
	k.d.Await("web", "paused")
	if out := k.Fails("exec", "web", "true"); !strings.Contains(out, "paused") {
		t.Errorf("docker exec of a paused container: %s", out)
	}
	if got, err := k.d.Exec(t.Context(), "web", hostctl.ExecRequest{Command: []string{"echo", "here"}}); err != nil || got.Stdout != "here\n" {
		t.Errorf("lull exec of a paused container: %+v, %v", got, err)
	}
	k.d.Await("web", "paused")
	k.answers(at)
	k.Must("exec", "-d", "web", "sh", "-c", "sleep 77777")
	held := func(o hostctl.Instance) bool {
		return o.State == "running" && slices.ContainsFunc(o.Blocks, func(b idle.Block) bool { return b.Signal == "exec" && strings.Contains(b.Sentence, "77777") })
	}
	k.d.Until("web", "the command holds it", held)
	k.d.Kill()
	k.d.Boot()
	o := k.d.Until("web", "it holds it with the next daemon", held)
	paused := o.LastPausedAt
	k.Must("exec", "web", "/bin/busybox", "killall", "sleep")
	if o = k.d.Await("web", "paused"); o.LastPausedAt == nil || paused != nil && !o.LastPausedAt.After(*paused) || o.LastPausedBy != "idle_timeout" {
		t.Errorf("once it is over: %s", daemontest.Describe(o))
	}
}

// TestDockerFailsOpen checks that clients of a container that lull has paused are
// answered even if the daemon hangs, or was killed together with the shim.
func TestDockerFailsOpen(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	at := k.serve("web")
	for _, c := range []struct {
		name string
		do   func() (undo func())
	}{
		{"the daemon hangs", func() func() {
			errtest.None(t, syscall.Kill(k.d.PID(), syscall.SIGSTOP))
			return func() {
				errtest.None(t, syscall.Kill(k.d.PID(), syscall.SIGCONT))
			}
		}},
		{"daemon and shim are killed", func() func() {
			shim := k.d.ShimPID()
			k.d.Kill()
			errtest.None(t, syscall.Kill(shim, syscall.SIGKILL))
			return k.d.Boot
		}},
	} {
		k.pause("web")
		began := time.Now()
		undo := c.do()
		if err := say(at, "hello"); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		t.Logf("REPORT docker, %s: a client is answered after %s", c.name, time.Since(began).Round(time.Millisecond))
		k.is("web", "running") // Docker reports it shortly after the program runs
		undo()
		k.d.Until("web", "its resume is known", func(o hostctl.Instance) bool {
			return o.State == "running" && o.LastResumedAt != nil && o.LastResumedAt.After(began)
		})
	}
}
