package containers

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/hostctl"
)

// TestLimits checks that the kernel enforces the configured limits, and that the
// reason of an exit mentions a process that was killed for lack of memory, even
// if the program survived that and printed something else.
func TestLimits(t *testing.T) {
	t.Parallel()
	d := host(t)
	root := daemontest.Image(t)
	s := box("burns", root, script("while :; do :; done")...)
	s.CPUs, s.Memory = 0.25, 64<<20
	d.Launch(s)
	pid := firstOf(d, "burns")
	daemontest.Wait(t, "it is held back", func() (bool, string) {
		all := strings.Join(inGroups(t, pid, "cpu", "cpu.stat"), "")
		for line := range strings.Lines(all) {
			if n, ok := strings.CutPrefix(strings.TrimSpace(line), "nr_throttled "); ok && n != "0" {
				return true, all
			}
		}
		return false, all
	})
	if v1, v2 := inGroups(t, pid, "cpu", "cpu.cfs_quota_us"), inGroups(t, pid, "cpu", "cpu.max"); !slices.Contains(v1, "25000\n") && !slices.Contains(v2, "25000 100000\n") {
		t.Errorf("it may use %q of 100000 µs, or %q", v1, v2)
	}
	if got := slices.Concat(inGroups(t, pid, "memory", "memory.limit_in_bytes"), inGroups(t, pid, "memory", "memory.max")); !slices.Contains(got, fmt.Sprintln(64<<20)) {
		t.Errorf("it may have %q bytes", got)
	}

	s = box("parent", root, script(`(x=0123456789abcdef; while :; do x=$x$x; done); echo "its child has gone"; exit 3`)...)
	s.Memory = 32 << 20
	said, o := ends(d, s)
	if want := "exited with code 3: out of memory: the kernel ended it; it has 32 MiB: raise --memory"; !strings.HasPrefix(o.StatusReason, want) {
		t.Errorf("it %s, want %q; it said %q", o.StatusReason, want, said)
	}
	s = box("fits", root, script("x=0123456789abcdef; i=0; while [ $i -lt 16 ]; do x=$x$x; i=$((i+1)); done; exit 3")...)
	s.Memory = 64 << 20
	if said, o := ends(d, s); o.StatusReason != "exited with code 3" {
		t.Errorf("it %s, and said %q", o.StatusReason, said)
	}
}

// firstOf returns the PID on this machine of a container's first process.
func firstOf(d *daemontest.Host, name string) int {
	d.T.Helper()
	b, err := os.ReadFile(filepath.Join(d.Dir, "data/containers/box", d.Show(name).ID, "pid"))
	if err != nil {
		d.T.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		d.T.Fatal(err)
	}
	return pid
}

// inGroups reads a file of every control group of a process that belongs to a
// controller. A limit may be set on the instance's group, above the container's.
func inGroups(t *testing.T, pid int, controller, file string) (all []string) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	errtest.None(t, err)
	for line := range strings.Lines(string(b)) {
		p := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if p[1] != "" && !slices.Contains(strings.Split(p[1], ","), controller) {
			continue
		}
		for at := p[2]; at != "/"; at = filepath.Dir(at) {
			if b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", p[1], at, file)); err == nil {
				all = append(all, string(b))
			}
		}
	}
	return all
}

// TestWorkspace checks that a shared directory has the same files and owners on
// both sides, that read-only applies to everything mounted in it, and that
// removing the container does not remove its files.
func TestWorkspace(t *testing.T) {
	t.Parallel()
	d := host(t)
	root := daemontest.Image(t)
	dir := filepath.Join(t.TempDir(), "a b") // a name that needs escaping
	deep := filepath.Join(dir, "deep")
	for _, p := range []string{dir, deep} {
		errtest.None(t, os.Mkdir(p, 0o777))
		errtest.None(t, os.Chmod(p, 0o777))
	}
	errtest.None(t, syscall.Mount("tmpfs", deep, "tmpfs", 0, "mode=777"))
	t.Cleanup(func() { _ = syscall.Unmount(deep, syscall.MNT_DETACH) })
	errtest.None(t, os.WriteFile(filepath.Join(dir, "ours"), []byte("from outside"), 0o644))

	s := box("shares", root, script("sleep 1000")...)
	s.Workspace = dir + ":/shared"
	d.Launch(s)
	if got := inside(d, "shares", "cat /shared/ours && echo inside > /shared/theirs && mkdir /shared/d && echo x > /shared/deep/f"); got.ExitCode != 0 || got.Stdout != "from outside" {
		t.Errorf("inside: %+v", got)
	}
	holds(t, filepath.Join(dir, "theirs"), "inside\n", 0)
	holds(t, filepath.Join(deep, "f"), "x\n", 0)
	errtest.None(t, os.WriteFile(filepath.Join(dir, "later"), []byte("later"), 0o644))
	if got := inside(d, "shares", "cat /shared/later"); got.Stdout != "later" {
		t.Errorf("what came later: %+v", got)
	}
	d.LeavesCommand("shares")

	u := box("user", root, script("echo mine > /shared/mine; id -u; id -g; test -w /shared/theirs || echo not theirs")...)
	u.Workspace, u.User = dir+":/shared", "1234:2345"
	if said, _ := ends(d, u); said != "1234\n2345\nnot theirs\n" {
		t.Errorf("another user: %q", said)
	}
	holds(t, filepath.Join(dir, "mine"), "mine\n", 1234)

	ro := box("reads", root, script("exec 2>&1; cat /shared/ours; echo; for f in /shared/no /shared/deep/no /shared/d/no; do echo x > $f && echo written $f; done; cat /shared/deep/f; true")...)
	ro.Workspace = dir + ":/shared:ro"
	said, _ := ends(d, ro)
	if !strings.HasPrefix(said, "from outside\n") || strings.Contains(said, "written") || !strings.Contains(said, "\nx\n") {
		t.Errorf("read only: %q", said)
	}

	// A link in the image that points out of it must be resolved inside it.
	errtest.None(t, os.Symlink("/etc/../../../../../../outside", filepath.Join(root, "way")))
	w := box("ways", root, script("cat /outside/ours")...)
	w.Workspace = dir + ":/way"
	if said, _ := ends(d, w); said != "from outside" {
		t.Errorf("through a link: %q", said)
	}
	if _, err := os.Lstat("/outside"); err == nil {
		t.Error("a directory was made on this machine")
	}

	bad := box("bad", root, "true")
	bad.Workspace = filepath.Join(dir, "none")
	refuses(d, bad, "cannot use workspace", "none")
	for _, name := range []string{"shares", "user", "reads", "ways"} {
		if err := d.Remove(t.Context(), name); err != nil {
			t.Error(err)
		}
	}
	holds(t, filepath.Join(dir, "ours"), "from outside", 0)
	holds(t, filepath.Join(deep, "f"), "x\n", 0)
}

func holds(t *testing.T, path, want string, owner uint32) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil || string(b) != want {
		t.Errorf("%s holds %q, %v; want %q", path, b, err, want)
		return
	}
	st, err := os.Stat(path)
	errtest.None(t, err)
	if got := st.Sys().(*syscall.Stat_t).Uid; got != owner {
		t.Errorf("%s is %d's, want %d's", path, got, owner)
	}
}

// TestLayer checks that a container's changes to its image stay until the
// container is removed, survive the daemon, and are visible to no other
// container.
func TestLayer(t *testing.T) {
	t.Parallel()
	d := host(t)
	root := daemontest.Image(t)
	errtest.None(t, os.WriteFile(filepath.Join(root, "etc/given"), []byte("given"), 0o644))
	s := box("keeps", root, script("sleep 1000")...)
	o := d.Launch(s)
	if got := inside(d, "keeps", "echo kept > /kept && rm /etc/given && echo more >> /bin/echo.txt"); got.ExitCode != 0 {
		t.Fatalf("%+v", got)
	}
	check := func(when string) {
		t.Helper()
		if got := inside(d, "keeps", "cat /kept; test -e /etc/given || echo gone"); got.Stdout != "kept\ngone\n" {
			t.Errorf("%s: %+v", when, got)
		}
	}
	d.Must("keeps", "stop")
	d.Must("keeps", "start")
	check("after a stop")
	d.Kill()
	d.Boot()
	check("after a kill of the daemon")
	d.Must("keeps", "stop")
	d.Kill()
	d.Boot()
	d.Must("keeps", "start")
	check("stopped, and the daemon killed")
	errtest.None(t, syscall.Kill(d.PID(), syscall.SIGTERM))
	daemontest.Wait(t, "the daemon ends", func() (bool, string) { return d.Over(), "" })
	d.Boot()
	check("after a restart of the daemon")
	if pid := d.Show("keeps").PID; pid == 0 || syscall.Kill(pid, syscall.SIGKILL) != nil {
		t.Fatal("it has no process")
	}
	d.Await("keeps", "stopped")
	d.Must("keeps", "start")
	check("after runc was killed")

	if said, _ := ends(d, box("other", root, script("cat /etc/given; test -e /kept && echo theirs")...)); said != "given" {
		t.Errorf("another container of that image sees %q", said)
	}
	holds(t, filepath.Join(root, "etc/given"), "given", 0)
	if _, err := os.Stat(filepath.Join(root, "kept")); err == nil {
		t.Error("it wrote into its image")
	}
	errtest.None(t, d.Remove(t.Context(), "keeps"))
	if left := leftOf(d, o.ID); len(left) > 0 {
		t.Errorf("left of it: %q", left)
	}
	d.Launch(s)
	if got := inside(d, "keeps", "cat /etc/given; test -e /kept && echo old"); got.Stdout != "given" {
		t.Errorf("the next one of its name sees %q", got.Stdout)
	}
}

// TestStops checks that a container, asleep or awake, gets its image's stop
// signal, and is killed if it does not exit.
func TestStops(t *testing.T) {
	t.Parallel()
	d := host(t)
	stop := func(name string) hostctl.Instance {
		t.Helper()
		d.Must(name, "stop")
		return d.Await(name, "stopped")
	}
	polite := `for s in TERM USR1 INT RTMIN+3; do trap "echo got $s; exit 5" $s; done; trap "echo got 37; exit 5" 37; echo up; while :; do sleep 0.1; done`
	for n, c := range []struct{ signal, want string }{{"", "TERM"}, {"SIGUSR1", "USR1"}, {"2", "INT"}, {"int", "INT"}} {
		name := fmt.Sprint("polite", n)
		s := box(name, saved(t, says{stop: c.signal}), script(polite)...)
		s.StopGrace = *daemontest.Seconds(daemontest.WaitLimit)
		d.Launch(s)
		up := func() {
			daemontest.Wait(t, "it has set its traps", func() (bool, string) { said := d.Said(name); return strings.Contains(said, "up\n"), said })
		}
		up()
		if n == 1 { // frozen, and the present daemon did not start it
			errtest.None(t, d.Force(name))
			d.Await(name, "paused")
			d.Kill()
			d.Boot()
		}
		o := stop(name)
		if said := d.Said(name); !strings.HasSuffix(said, "got "+c.want+"\n") || o.ExitCode == nil || *o.ExitCode != 5 {
			t.Errorf("the stop signal %q: it said %q, and %v", c.signal, said, o.StatusReason)
		}
	}
	refuses(d, box("odd", saved(t, says{stop: "SIGNOT"}), "true"), "stop signal", "SIGNOT")

	deaf := box("deaf", daemontest.Image(t), script(`trap "" TERM; echo up; while :; do sleep 0.1; done`)...)
	d.Launch(deaf)
	if o := stop("deaf"); o.ExitCode == nil || *o.ExitCode != 137 {
		t.Errorf("one that does not listen: %+v, %s", o.ExitCode, o.StatusReason)
	}
	for _, code := range []int{0, 1, 42, 255} {
		if _, o := ends(d, box(fmt.Sprint("code", code), daemontest.Image(t), script(fmt.Sprint("exit ", code))...)); o.ExitCode == nil || *o.ExitCode != code {
			t.Errorf("it ended with %d: %s", code, o.StatusReason)
		}
	}
	refuses(d, box("none", daemontest.Image(t), "/bin/no-such-program"), "no-such-program")
}

// TestApart checks that a container sees no other container and, apart from the
// network, nothing of this machine, and that it lacks the capabilities with which
// containers have escaped.
func TestApart(t *testing.T) {
	t.Parallel()
	d := host(t)
	root := daemontest.Image(t)
	d.Launch(box("one", root, script("sleep 1111")...))
	d.Launch(box("two", root, script("sleep 2222")...))
	if got := inside(d, "one", "cat /proc/[0-9]*/cmdline | head -c 2000; echo; hostname; ls /proc | grep -c '^[0-9]'"); strings.Contains(got.Stdout, "2222") || strings.Contains(got.Stdout, "lull-shim") || !strings.Contains(got.Stdout, "1111") {
		t.Errorf("it sees %q", got.Stdout)
	}
	if a, b := inside(d, "one", "hostname").Stdout, inside(d, "two", "hostname").Stdout; a == b {
		t.Errorf("both are %q", a)
	}
	pid := d.Show("two").PID
	for _, try := range []string{
		fmt.Sprint("kill -9 ", pid),
		"mount -t proc none /tmp",
		"unshare -r true",
		"echo 1 > /proc/sys/kernel/panic",
		"echo x > /sys/kernel/uevent_helper",
		"mkdir /sys/fs/cgroup/x",
		"cat /proc/kcore | head -c 1 | grep .",
		"ls " + d.Dir,
		"test -e /run/lull/host.sock",
	} {
		if got := inside(d, "one", try); got.ExitCode == 0 {
			t.Errorf("%s: %+v", try, got)
		}
	}
	if d.Show("two").State != "running" {
		t.Error("the other one was ended")
	}
	got := inside(d, "one", "grep -E '^(Seccomp|NoNewPrivs|CapEff):' /proc/self/status").Stdout
	caps, _, _ := strings.Cut(got, "\n")
	if eff, err := strconv.ParseUint(strings.TrimSpace(strings.TrimPrefix(caps, "CapEff:")), 16, 64); err != nil || eff&(1<<21|1<<19|1<<16|1<<12) != 0 { // SYS_ADMIN, SYS_PTRACE, SYS_MODULE, NET_ADMIN
		t.Errorf("it may do %s, %v", caps, err)
	}
	if _, err := os.Stat("/proc/sys/kernel/seccomp/actions_avail"); err == nil && !strings.Contains(got, "Seccomp:\t2") {
		t.Errorf("its system calls are not filtered: %s", got)
	}
	if !strings.Contains(got, "NoNewPrivs:\t1") {
		t.Errorf("it may gain privileges: %s", got)
	}
}

// TestNetwork checks that a container uses this machine's network, including
// loopback, and that a request for another one is refused with that reason.
func TestNetwork(t *testing.T) {
	t.Parallel()
	d := host(t)
	root := daemontest.Image(t)
	for _, net := range []instance.Net{instance.NetNone, instance.NetOutbound, instance.NetFull} {
		s := box("net", root, "true")
		s.Net = net
		refuses(d, s, "cannot use net", "this machine's network")
	}
	at := daemontest.Addr(t)
	s := box("serves", root, "guest", "serve", "-listen", at)
	s.Expose = []instance.Endpoint{{Listen: at, Target: at}}
	o := d.Launch(s)
	if len(o.Endpoints) != 1 || o.Endpoints[0].Path != instance.PathDirect {
		t.Errorf("it is reached by %+v", o.Endpoints)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	defer ln.Close()
	if got := inside(d, "serves", fmt.Sprintf("grep -ci ':%04X ' /proc/net/tcp", ln.Addr().(*net.TCPAddr).Port)); got.ExitCode != 0 {
		t.Errorf("it does not see this machine's sockets: %+v", got)
	}
	for range 2 {
		errtest.None(t, d.Force("serves"))
		d.Await("serves", "paused")
		if err := say(at, "wake"); err != nil {
			t.Error(err)
		}
	}
}

// TestRungs checks that a container reaches the states that are documented for
// it, and refuses deeper ones.
func TestRungs(t *testing.T) {
	t.Parallel()
	d := host(t)
	root := daemontest.Image(t)
	deep := box("deep", root, "true")
	deep.HibernateAfter = *daemontest.Seconds(time.Hour)
	refuses(d, deep, "cannot use hibernate_after", "container")
	wrong := box("wrong", root, "true")
	wrong.ReclaimAfter, wrong.StopAfter = *daemontest.Seconds(2 * time.Hour), daemontest.Seconds(time.Hour)
	refuses(d, wrong, "cannot use reclaim_after", "stop_after")

	at := daemontest.Addr(t)
	s := box("sinks", root, "guest", "serve", "-listen", at)
	s.Expose = []instance.Endpoint{{Listen: at, Target: at}}
	s.PauseAfter, s.ReclaimAfter, s.StopAfter = daemontest.Seconds(time.Second), *daemontest.Seconds(100 * time.Millisecond), daemontest.Seconds(time.Hour)
	d.Launch(s)
	for range 2 {
		o := d.Await("sinks", "reclaimed")
		if strings.Contains(o.StatusReason, "nothing was") {
			t.Errorf("reclaimed: %s", o.StatusReason)
		}
		if err := say(at, "wake"); err != nil {
			t.Errorf("a wake from there: %v", err)
		}
	}
	errtest.None(t, d.Remove(t.Context(), "sinks"))
	s.ReclaimAfter, s.StopAfter = 0, daemontest.Seconds(100*time.Millisecond)
	s.Expose, s.Command, s.Name, s.StopGrace = nil, script(untilTerm), "stops", *daemontest.Seconds(daemontest.WaitLimit)
	d.Launch(s)
	o := d.Await("stops", "stopped")
	if o.ExitCode == nil || *o.ExitCode != 0 || !strings.Contains(o.StatusReason, "paused for") {
		t.Errorf("it ended with %v: %s", o.ExitCode, o.StatusReason)
	}
}

// TestSocketInside checks that a program in a container can use LULL_SOCKET as
// any user, and after a restart of the daemon.
func TestSocketInside(t *testing.T) {
	t.Parallel()
	d := host(t)
	at := daemontest.Addr(t)
	published := daemontest.Addr(t)
	s := box("talks", daemontest.Image(t), "guest", "serve", "-listen", at)
	s.Expose, s.User = []instance.Endpoint{{Listen: at, Target: at}, {Listen: published, Target: at}}, "1234:2345"
	d.Launch(s)
	for n := range 2 {
		if n > 0 {
			d.Kill()
			c, err := net.DialTimeout("tcp", published, daemontest.WaitLimit) // waits for the next daemon
			if err != nil {
				t.Fatalf("a client of the published port without a daemon: %v", err)
			}
			defer c.Close()
			d.Boot()
			errtest.Get(fmt.Fprintln(c, "pid"))(t)
			_ = c.SetReadDeadline(time.Now().Add(daemontest.WaitLimit))
			if got, err := bufio.NewReader(c).ReadString('\n'); err != nil {
				t.Errorf("a client of the published port that came without a daemon: %q, %v", got, err)
			}
		}
		reason := fmt.Sprint("build", n)
		got, err := ask(at, `say {"jsonrpc":"2.0","id":1,"method":"keepalive","params":{"ttl_ms":600000,"reason":"`+reason+`"}}`)
		if err != nil || !strings.Contains(got, `"result"`) {
			t.Fatalf("it was answered with %q, %v", got, err)
		}
		if o := d.Show("talks"); !o.LeaseHeld || o.LeaseReason != reason {
			t.Errorf("its lease: %+v", o.Leases)
		}
		errtest.Get(ask(at, "hangup"))(t)
	}
}
