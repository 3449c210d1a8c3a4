package host

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/httpx"
	"lull/internal/lib/waittest"
	"lull/internal/platform/cgroup"
	"lull/internal/protocol/hostctl"
)

// adoptPause is the idle timeout of the programs that these tests adopt.
const adoptPause = 200 * time.Millisecond

// outsider is a program that was started without lull.
type outsider struct {
	*exec.Cmd
	addr string // its address
	over chan struct{}
}

// outside starts the guest program without lull, as user uid if that is not 0. It
// is killed at the end of the test.
func outside(t *testing.T, uid int, args ...string) *outsider {
	t.Helper()
	daemontest.Build(t)
	return outsideProgram(t, uid, append([]string{daemontest.Program("guest")}, args...)...)
}

func outsideProgram(t *testing.T, uid int, command ...string) *outsider {
	t.Helper()
	o := &outsider{Cmd: exec.Command(command[0], command[1:]...), over: make(chan struct{})}
	o.Dir, o.Env = "/", []string{"PATH=" + os.Getenv("PATH")}
	o.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if uid != 0 {
		o.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}
	}
	errtest.None(t, o.Start())
	go func() { _ = o.Wait(); close(o.over) }() // the test checks how it ended
	t.Cleanup(func() {
		for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGCONT} {
			_ = syscall.Kill(-o.pid(), sig)
		}
		<-o.over
	})
	return o
}

func (o *outsider) pid() int { return o.Process.Pid }

// server starts a server without lull and waits until it answers.
func server(t *testing.T, uid int, args ...string) *outsider {
	t.Helper()
	addr := daemontest.Addr(t)
	o := outside(t, uid, append([]string{"serve", "-listen", addr}, args...)...)
	o.addr = addr
	waittest.Until(t, "it listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return o
}

// manner is one way to adopt a program.
type manner struct {
	name string
	kind cgroup.Kind // empty for a process tree
}

var manners = []manner{{"pid", ""}, {"cgroup2", cgroup.V2}, {"freezer", cgroup.V1}}

// eachManner runs a test for each way of freezing a program in place that works
// on this machine.
func eachManner(t *testing.T, test func(t *testing.T, m manner)) {
	for _, m := range manners {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			test(t, m)
		})
	}
}

// request returns the request to adopt a program in this manner. For a control
// group, the program is first put into a new one.
func (m manner) request(t *testing.T, o *outsider, name string) hostctl.Adopt {
	t.Helper()
	q := hostctl.Adopt{Name: name, PauseAfter: daemontest.Seconds(adoptPause)}
	if m.kind == "" {
		q.PID = o.pid()
		return q
	}
	place, err := cgroup.Find("adopt"+strconv.Itoa(o.pid()), m.kind)
	if err != nil {
		t.Skipf("no control group can be made here: %v", err)
	}
	g, err := place.Create("program")
	if err == nil {
		err = os.WriteFile(g.Dir()+"/cgroup.procs", []byte(strconv.Itoa(o.pid())), 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(g.Kill(waittest.Context(t)), g.Remove()); err != nil {
			t.Error(err)
		}
		place.Release()
	})
	q.Cgroup = g.Dir()
	return q
}

// adopt adopts a program. It must succeed.
func adopt(d *daemontest.Host, q hostctl.Adopt) hostctl.Instance {
	d.T.Helper()
	o, err := d.Adopt(d.T.Context(), q)
	if err != nil {
		d.T.Fatalf("cannot adopt %+v: %v", q, err)
	}
	return o
}

// gone waits until no instance has that name and all its resources are
// released.
func gone(d *daemontest.Host, name string) {
	d.T.Helper()
	daemontest.Wait(d.T, name+" is released", func() (bool, string) {
		o, err := d.Get(d.T.Context(), name)
		var p *httpx.Problem
		return errors.As(err, &p) && p.Status == http.StatusNotFound, daemontest.Describe(o)
	})
	nothingLeft(d)
}

func nothingLeft(d *daemontest.Host) {
	d.T.Helper()
	for _, dir := range []string{"/data/adopted", "/data/shim/outside"} {
		if l, err := os.ReadDir(d.Dir + dir); err != nil && !os.IsNotExist(err) || len(l) > 0 {
			d.T.Errorf("left in %s: %v (%v)", dir, l, err)
		}
	}
}

// state returns the letter of a process's state; 0 if the process has ended.
func state(pid int) byte {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if n := bytes.LastIndexByte(b, ')'); n >= 0 && len(b) > n+2 {
		return b[n+2]
	}
	return 0
}

// TestAdopt checks the life of an adopted program: it falls asleep, is woken,
// accepts the commands that apply to it and refuses the others, survives a
// restart of the daemon, and is released unchanged.
func TestAdopt(t *testing.T) {
	t.Parallel()
	eachManner(t, func(t *testing.T, m manner) {
		d := host(t, "--probe", "50ms", "--pause-after", "200ms")
		p := server(t, 0)
		q := m.request(t, p, "web")
		o := adopt(d, q)
		if o.Runtime != instance.RuntimeAdopted || o.PID != p.pid() || len(o.Endpoints) != 1 || o.Endpoints[0].Listen != p.addr || o.Endpoints[0].Path != instance.PathDirect {
			t.Fatalf("adopted as %+v", o)
		}
		if _, err := d.Adopt(t.Context(), q); refused(err) == "" {
			t.Errorf("adopted twice: %v", err)
		}
		// A woken program may answer before the daemon reports it as running.
		pausedAgain := func(n int) hostctl.Instance {
			return d.Until("web", "it is paused once more", func(o hostctl.Instance) bool { return o.State == "paused" && o.PauseCount > uint64(n) })
		}
		for n := range 5 {
			pausedAgain(n)
			if got, err := once(p.addr, "hello"); err != nil || got != "echo hello" {
				t.Fatalf("visit %d: %q, %v", n, got, err)
			}
		}
		if o := pausedAgain(5); o.WakeCount < 5 || o.LastPausedBy != "idle_timeout" || !o.WakesOnConnection {
			t.Errorf("after five visits: %s, woken %d times, last paused by %s", daemontest.Describe(o), o.WakeCount, o.LastPausedBy)
		}
		for _, verb := range []string{"stop", "restart"} {
			if _, err := d.Do(t.Context(), "web", verb, nil); refused(err) == "" {
				t.Errorf("%s: %v", verb, err)
			}
		}
		if _, err := d.Exec(t.Context(), "web", hostctl.ExecRequest{Command: []string{"true"}}); refused(err) == "" {
			t.Errorf("exec: %v", err)
		}
		if err := d.Logs(t.Context(), "web", hostctl.Logs{}, &bytes.Buffer{}); refused(err) == "" {
			t.Errorf("logs: %v", err)
		}
		if _, err := d.Change(t.Context(), "web", hostctl.Change{StopAfter: daemontest.Seconds(time.Minute)}); err == nil {
			t.Error("stop-after was accepted")
		}
		d.Must("web", "resume")
		hold(d, "web", "test")
		if _, err := d.Do(t.Context(), "web", "pause", nil); refused(err) == "" {
			t.Errorf("paused although a lease holds it: %v", err)
		}
		errtest.Get(d.Snooze(t.Context(), "web", time.Now().Add(time.Hour)))(t)
		errtest.Get(d.Client.Release(t.Context(), "web", "test"))(t)
		if !waittest.Stays(time.Second, func() bool { return d.Show("web").State == "running" }) {
			t.Error("it was paused while snoozed")
		}
		d.Must("web", "pause")
		d.Kill()
		d.Boot()
		d.Await("web", "paused")
		if o := d.Show("web"); o.PID != p.pid() || o.SnoozeUntil == nil {
			t.Errorf("after a restart of the daemon: %+v", o)
		}
		errtest.None(t, d.ReleaseAdopted(t.Context(), "web"))
		gone(d, "web")
		mustAnswer(t, p.addr)
		if s := state(p.pid()); s == 'T' || s == 0 {
			t.Errorf("released in state %q", s)
		}
	})
}

// TestAdoptRemoves checks that rm releases a sleeping program, and that a daemon
// that ends leaves it running.
func TestAdoptRemoves(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "50ms", "--stop-all")
	p, q := server(t, 0), server(t, 0)
	adopt(d, manners[0].request(t, p, "a"))
	adopt(d, manners[0].request(t, q, "b"))
	d.Await("a", "paused")
	d.Await("b", "paused")
	errtest.None(t, d.Remove(t.Context(), "a"))
	gone2(d, "a")
	mustAnswer(t, p.addr)
	errtest.None(t, syscall.Kill(d.PID(), syscall.SIGTERM))
	waittest.Until(t, "the daemon ends", d.Over)
	mustAnswer(t, q.addr)
	d.Boot()
	d.Await("b", "paused")
}

// gone2 waits until an instance no longer exists. Unlike gone, it lets other adopted
// programs remain.
func gone2(d *daemontest.Host, name string) {
	d.T.Helper()
	daemontest.Wait(d.T, name+" is released", func() (bool, string) {
		_, err := d.Get(d.T.Context(), name)
		return err != nil, "it exists"
	})
}

// TestAdoptFailsOpen checks that no adopted program stays frozen if the daemon is
// killed, if it hangs, or if the shim is killed with it.
func TestAdoptFailsOpen(t *testing.T) {
	t.Parallel()
	eachManner(t, func(t *testing.T, m manner) {
		d := host(t, "--probe", "50ms")
		p := server(t, 0)
		q := m.request(t, p, "web")
		adopt(d, q)
		answers := func(when string) {
			t.Helper()
			began := time.Now()
			if got, err := once(p.addr, "hello"); err != nil || got != "echo hello" {
				t.Fatalf("%s: %q, %v", when, got, err)
			}
			t.Logf("REPORT adopted, %s: a client is answered after %s", when, time.Since(began).Round(time.Millisecond))
		}
		d.Await("web", "paused")
		d.Kill()
		answers("daemon killed")
		d.Boot()

		d.Await("web", "paused")
		began := time.Now()
		errtest.None(t, syscall.Kill(d.PID(), syscall.SIGSTOP))
		answers("daemon hung")
		errtest.None(t, syscall.Kill(d.PID(), syscall.SIGCONT))
		d.Until("web", "is known to have been thawed", func(o hostctl.Instance) bool {
			return o.LastResumedAt != nil && o.LastResumedAt.After(began)
		})

		d.Await("web", "paused")
		shim := d.ShimPID()
		d.Kill()
		errtest.None(t, syscall.Kill(shim, syscall.SIGKILL))
		answers("daemon and shim killed")
		d.Boot()
		d.Await("web", "paused")
		mustAnswer(t, p.addr)
	})
}

// TestAdoptEnds checks that a signal reaches a sleeping program as it would
// without lull, and that a program that has ended is released.
func TestAdoptEnds(t *testing.T) {
	t.Parallel()
	eachManner(t, func(t *testing.T, m manner) {
		d := host(t, "--probe", "50ms")
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			p := server(t, 0)
			adopt(d, m.request(t, p, "web"))
			d.Await("web", "paused")
			errtest.None(t, syscall.Kill(p.pid(), sig))
			waittest.Until(t, fmt.Sprintf("%s ends it", sig), func() bool {
				select {
				case <-p.over:
					return true
				default:
					return false
				}
			})
			gone(d, "web")
		}
	})
}

// family starts a shell with two children, and returns the children's process
// IDs. Each process has its own session, because the kernel ends stopped members
// of a process group that loses its last parent (SIGHUP).
func family(t *testing.T) (shell *outsider, children []int) {
	t.Helper()
	shell = outsideProgram(t, 0, "sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & wait")
	waittest.Until(t, "it has two children", func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", shell.pid()))
		children = nil
		for _, w := range strings.Fields(string(b)) {
			n, _ := strconv.Atoi(w)
			children = append(children, n)
		}
		return len(children) == 2 && !slices.ContainsFunc(children, func(pid int) bool {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			return string(b) != "sleep\n"
		})
	})
	t.Cleanup(func() {
		for _, pid := range children {
			_ = syscall.Kill(pid, syscall.SIGKILL) // not in the shell's process group
		}
	})
	return shell, children
}

// TestAdoptLeavesNoOrphanFrozen checks that the children of a program that was
// killed while frozen run again, even if no daemon is running to thaw them.
func TestAdoptLeavesNoOrphanFrozen(t *testing.T) {
	t.Parallel()
	for _, down := range []bool{false, true} {
		t.Run(map[bool]string{false: "daemon alive", true: "daemon killed"}[down], func(t *testing.T) {
			t.Parallel()
			d := host(t, "--probe", "50ms")
			p, children := family(t)
			adopt(d, manners[0].request(t, p, "family"))
			d.Await("family", "paused")
			for _, pid := range children {
				if s := state(pid); s != 'T' {
					t.Fatalf("child %d is in state %q while the family sleeps", pid, s)
				}
			}
			if down {
				d.Kill()
			}
			errtest.None(t, syscall.Kill(p.pid(), syscall.SIGKILL))
			for _, pid := range children {
				waittest.Until(t, "a child runs on", func() bool { return state(pid) == 'S' })
			}
			if down {
				d.Boot()
			}
			gone(d, "family")
		})
	}
}

// TestAdoptIsNoPID checks that a program that gets the process ID of an adopted
// one is not touched.
func TestAdoptIsNoPID(t *testing.T) {
	const last = "/proc/sys/kernel/ns_last_pid"
	if f, err := os.OpenFile(last, os.O_WRONLY, 0); os.Geteuid() != 0 || err != nil {
		t.Skipf("the next process ID cannot be chosen here: %v", err)
	} else {
		f.Close()
	}
	t.Parallel()
	d := host(t, "--probe", "50ms")
	p := server(t, 0)
	adopt(d, manners[0].request(t, p, "web"))
	d.Await("web", "paused")
	d.Kill()
	errtest.None(t, syscall.Kill(p.pid(), syscall.SIGKILL))
	<-p.over
	var other *outsider
	for range 2000 { // other processes are started too
		errtest.None(t, os.WriteFile(last, []byte(strconv.Itoa(p.pid()-1)), 0))
		other = outsideProgram(t, 0, "sleep", "1000")
		if other.pid() == p.pid() {
			break
		}
		_ = syscall.Kill(other.pid(), syscall.SIGKILL)
		<-other.over
	}
	if other.pid() != p.pid() {
		t.Skip("the process ID went to someone else each time")
	}
	d.Boot()
	gone(d, "web")
	if s := state(other.pid()); s != 'S' {
		t.Errorf("the program with the same ID is in state %q", s)
	}
}

// TestAdoptRespectsOthers checks that a program that something else froze stays
// frozen despite connections, and runs once that is undone.
func TestAdoptRespectsOthers(t *testing.T) {
	t.Parallel()
	eachManner(t, func(t *testing.T, m manner) {
		d := host(t, "--probe", "50ms")
		p := server(t, 0)
		q := m.request(t, p, "web")
		q.PauseAfter = daemontest.Seconds(time.Hour)
		adopt(d, q)
		freeze, thaw := func() error { return syscall.Kill(p.pid(), syscall.SIGSTOP) }, func() error { return syscall.Kill(p.pid(), syscall.SIGCONT) }
		if m.kind != "" {
			g, err := cgroup.At(q.Cgroup)
			errtest.None(t, err)
			freeze, thaw = func() error { return g.Freeze(t.Context()) }, g.Thaw
		}
		for n := range 2 {
			errtest.None(t, freeze())
			o := d.Await("web", "paused")
			if o.LastPausedBy != "external" || o.WakesOnConnection {
				t.Fatalf("frozen by others: %s, by %s", daemontest.Describe(o), o.LastPausedBy)
			}
			if n == 1 { // a daemon that starts leaves it frozen too
				d.Kill()
				d.Boot()
				d.Await("web", "paused")
			}
			c := mustDial(t, p.addr)
			if !waittest.Stays(500*time.Millisecond, func() bool { return d.Show("web").State == "paused" }) {
				t.Error("a connection woke what others froze")
			}
			errtest.None(t, thaw())
			if o := d.Await("web", "running"); o.LastResumedBy != "external" {
				t.Errorf("thawed by others: resumed by %s", o.LastResumedBy)
			}
			if err := c.echo("hello"); err != nil {
				t.Error(err)
			}
			c.Close()
		}
	})
}

// TestAdoptDoesNotTakeOver checks that lull does not freeze a program that
// something else has just frozen, before lull has noticed it.
func TestAdoptDoesNotTakeOver(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "1h")
	p := server(t, 0)
	q := manners[0].request(t, p, "web")
	q.PauseAfter = daemontest.Seconds(time.Hour)
	adopt(d, q)
	errtest.None(t, syscall.Kill(p.pid(), syscall.SIGSTOP))
	waittest.Until(t, "it is stopped", func() bool { return state(p.pid()) == 'T' })
	if _, err := d.Do(t.Context(), "web", "pause", nil); err == nil {
		t.Error("lull paused what others had stopped")
	}
	if o := d.Await("web", "paused"); o.LastPausedBy != "external" {
		t.Errorf("it was paused by %s", o.LastPausedBy)
	}
	c := mustDial(t, p.addr)
	if !waittest.Stays(500*time.Millisecond, func() bool { return state(p.pid()) == 'T' }) {
		t.Error("a connection continued what others had stopped")
	}
	errtest.None(t, syscall.Kill(p.pid(), syscall.SIGCONT))
	if err := c.echo("hello"); err != nil {
		t.Error(err)
	}
}

// TestAdoptRefuses checks that programs that must not be frozen are not adopted.
func TestAdoptRefuses(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "50ms")
	s, _ := web(t, "own", false)
	own := d.Launch(s)
	stopped := outside(t, 0, "tick", "1h")
	errtest.None(t, syscall.Kill(stopped.pid(), syscall.SIGSTOP))
	waittest.Until(t, "it is stopped", func() bool { return state(stopped.pid()) == 'T' })
	free := outside(t, 0, "tick", "1h")
	ended := outside(t, 0, "exit", "0", "0s")
	<-ended.over
	for _, tc := range []struct {
		q    hostctl.Adopt
		want string
	}{
		{hostctl.Adopt{PID: 1}, "init"},
		{hostctl.Adopt{PID: d.PID()}, "daemon"},
		{hostctl.Adopt{PID: os.Getpid()}, "daemon"}, // the test is the daemon's parent
		{hostctl.Adopt{PID: d.ShimPID()}, "belongs to lull"},
		{hostctl.Adopt{PID: own.PID}, "the instance own"},
		{hostctl.Adopt{PID: ended.pid()}, "no process"},
		{hostctl.Adopt{PID: stopped.pid()}, "stopped by a signal"},
		{hostctl.Adopt{PID: free.pid(), Caller: free.pid()}, "the requesting command"},
		{hostctl.Adopt{Cgroup: "/sys/fs/cgroup"}, "control group"},
		{hostctl.Adopt{Cgroup: "/nothing/of/that/name"}, "control group"},
		{hostctl.Adopt{Cgroup: d.Dir}, "control group"},
	} {
		if _, err := d.Adopt(t.Context(), tc.q); !strings.Contains(refused(err), tc.want) {
			t.Errorf("adopt %+v: %v, want a refusal with %q", tc.q, err, tc.want)
		}
	}
	for _, q := range []hostctl.Adopt{{}, {PID: free.pid(), Cgroup: "/x"}, {PID: free.pid(), Name: "No Name"}} {
		if _, err := d.Adopt(t.Context(), q); err == nil || refused(err) != "" {
			t.Errorf("adopt %+v: %v, want it called invalid", q, err)
		}
	}
	if own, err := os.ReadFile("/proc/self/cgroup"); err == nil {
		for line := range strings.Lines(string(own)) {
			if path := strings.TrimSpace(line[strings.LastIndexByte(line, ':')+1:]); path != "/" && strings.HasPrefix(line, "0::") {
				if _, err := d.Adopt(t.Context(), hostctl.Adopt{Cgroup: path}); refused(err) == "" {
					t.Errorf("adopted the test's own control group: %v", err)
				}
			}
		}
	}
	l, err := d.Adopted(t.Context())
	if err != nil || len(l) != 0 {
		t.Errorf("adopted after refusals: %v, %v", l, err)
	}
	nothingLeft(d)
	if _, err := d.Create(t.Context(), hostctl.Create{Spec: instance.Spec{Name: "x", Runtime: instance.RuntimeAdopted, Command: []string{"true"}}}); err == nil {
		t.Error("created an instance that adopts nothing")
	}
}

// TestAdoptNeedsRights checks that an ordinary user's host adopts only the user's
// own programs.
func TestAdoptNeedsRights(t *testing.T) {
	t.Parallel()
	uid := asNobody(t)
	d := daemontest.Start(t, daemontest.Config{UID: uid, GID: uid, Args: []string{"--probe", "50ms"}})
	theirs := outside(t, 0, "tick", "1h")
	if _, err := d.Adopt(t.Context(), hostctl.Adopt{PID: theirs.pid()}); !strings.Contains(refused(err), "another user") {
		t.Errorf("another user's process: %v", err)
	}
	p := server(t, uid)
	adopt(d, manners[0].request(t, p, "web"))
	for range 3 {
		d.Await("web", "paused")
		mustAnswer(t, p.addr)
	}
	d.Await("web", "paused")
	d.Kill()
	mustAnswer(t, p.addr)
	d.Boot()
	d.Await("web", "paused")
}

// TestAdoptWithoutPort checks that a program that nothing could wake is not
// paused by default.
func TestAdoptWithoutPort(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "50ms", "--pause-after", "200ms")
	p := outside(t, 0, "tick", "1h")
	adopt(d, hostctl.Adopt{PID: p.pid(), Name: "mute"})
	d.Until("mute", "nothing wakes it", func(o hostctl.Instance) bool {
		return slices.ContainsFunc(o.Blocks, func(b idle.Block) bool { return b.Code == "nothing_wakes" })
	})
	if !waittest.Stays(time.Second, func() bool { return d.Show("mute").State == "running" }) {
		t.Error("it was paused")
	}
	if _, err := d.Do(t.Context(), "mute", "pause", url.Values{}); err != nil {
		t.Errorf("a user may pause it: %v", err)
	}
	if s := state(p.pid()); s != 'T' {
		t.Errorf("paused in state %q", s)
	}
}

// TestRaceAdopted makes connections around the freeze of an adopted program in a
// control group. Each must be answered.
func TestRaceAdopted(t *testing.T) {
	raceWith(t, raceConfig{count: 200, bring: func(d *daemontest.Host, s instance.Spec, addr string) {
		adoptForRace(d, s, addr, 0, manner{"cgroup2", cgroup.V2})
	}})
}

// TestRaceAdoptedAsNobody does the same for a process tree, as an ordinary user.
func TestRaceAdoptedAsNobody(t *testing.T) {
	uid := asNobody(t)
	raceWith(t, raceConfig{uid: uid, count: 120, bring: func(d *daemontest.Host, s instance.Spec, addr string) {
		adoptForRace(d, s, addr, uid, manners[0])
	}})
}

func adoptForRace(d *daemontest.Host, s instance.Spec, addr string, uid int, m manner) {
	p := outsideProgram(d.T, uid, s.Command...)
	waittest.Until(d.T, "it listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	q := m.request(d.T, p, s.Name)
	q.PauseAfter = s.PauseAfter
	adopt(d, q)
	if _, err := d.Change(d.T.Context(), s.Name, hostctl.Change{QuietConnectionAfter: &s.QuietConnectionAfter}); err != nil {
		d.T.Fatal(err)
	}
}
