package host

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

func onBothPaths(t *testing.T, f func(t *testing.T, d *daemontest.Host, relay bool)) {
	d := host(t, "--probe", "100ms", "--pause-after", "200ms")
	for _, relay := range []bool{false, true} {
		t.Run(map[bool]string{false: "direct", true: "relay"}[relay], func(t *testing.T) { f(t, d.In(t), relay) })
	}
}

// TestStandingConnections checks connections that are open while the program is
// frozen: data wakes it, a close wakes it, a half-close arrives as a half-close,
// and the first bytes of a new connection are delivered.
func TestStandingConnections(t *testing.T) {
	t.Parallel()
	onBothPaths(t, func(t *testing.T, d *daemontest.Host, relay bool) {
		s, addr := web(t, fmt.Sprintf("standing-%t", relay), relay)
		s.QuietConnectionAfter = *daemontest.Seconds(150 * time.Millisecond)
		d.Launch(s)
		c := mustDial(t, addr)
		for n := range 5 {
			errtest.None(t, c.echo(fmt.Sprintf("line %d", n)))
			d.Await(s.Name, "paused")
		}
		before := d.Show(s.Name).WakeCount
		c.Close()
		d.Until(s.Name, "a close wakes it", func(o hostctl.Instance) bool { return o.WakeCount > before })
		d.Await(s.Name, "paused")

		h := mustDial(t, addr)
		sent := "first bytes\n" + strings.Repeat("x", 100_000) + "\n"
		errtest.Get(io.WriteString(h, sent))(t)
		errtest.None(t, h.Conn.(*net.TCPConn).CloseWrite())
		b, err := io.ReadAll(h.r)
		if err != nil || !strings.HasPrefix(string(b), "echo first bytes\n") || !strings.HasSuffix(string(b), fmt.Sprintf("end after %d\n", len(sent))) {
			t.Fatalf("after half a close: %d bytes, %q..., %v", len(b), b[:min(len(b), 40)], err)
		}
		t.Logf("REPORT standing %s: 5 wakes by data, 1 by a close, half-close answered with %d bytes", d.Show(s.Name).Endpoints[0].Path, len(b))
	})
}

// TestIdleConnectionHolds checks that an open connection keeps the instance
// running without quiet-connection-after, and that a quiet one does not with it.
func TestIdleConnectionHolds(t *testing.T) {
	t.Parallel()
	onBothPaths(t, func(t *testing.T, d *daemontest.Host, relay bool) {
		s, addr := web(t, fmt.Sprintf("holds-%t", relay), relay)
		d.Launch(s)
		c := mustDial(t, addr)
		errtest.None(t, c.echo("hello"))
		if !waittest.Stays(2*time.Second, func() bool { return d.Show(s.Name).State == "running" }) {
			t.Fatal("it was paused under an open connection")
		}
		_, err := d.Do(t.Context(), s.Name, "pause", nil)
		if why := refused(err); why == "" {
			t.Fatalf("a pause against a connection: %v, want a refusal", err)
		}
		force(d, s.Name)
		if o := d.Show(s.Name); o.State != "paused" {
			t.Fatalf("by force it is %s, want paused", o.State)
		}
		if err := c.echo("and again"); err != nil { // data wakes it, whatever made it sleep
			t.Fatal(err)
		}
		c.Close()
		d.Await(s.Name, "paused")
	})
}

// TestServersOfAllKinds pauses and wakes programs with several processes, several
// sockets, and sockets that change.
func TestServersOfAllKinds(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "100ms", "--pause-after", "200ms")
	four, six := port(daemontest.Addr(t)), port(daemontest.Addr(t))
	cases := []struct {
		name, listen, addr string
		args               []string
		ask                string
	}{
		{name: "reuseport", args: []string{"-reuse", "4"}},
		{name: "prefork", args: []string{"-prefork", "3"}},
		{name: "ipv6", listen: "[::1]:" + six, addr: "[::1]:" + six},
		{name: "wildcard", listen: ":" + four, addr: "127.0.0.1:" + four},
		{name: "reopens", ask: "reopen"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			d := d.In(t)
			if tc.listen == "" {
				tc.listen = daemontest.Addr(t)
				tc.addr = tc.listen
			}
			if tc.name == "ipv6" {
				if ln, err := net.Listen("tcp", tc.listen); err != nil {
					t.Skipf("this machine has no IPv6: %v", err)
				} else {
					ln.Close()
				}
			}
			s := spec(tc.name, append([]string{"serve", "-listen", tc.listen}, tc.args...)...)
			s.Expose = []instance.Endpoint{{Listen: tc.addr, Target: tc.addr, Path: instance.PathDirect}}
			d.Launch(s)
			workers := map[string]bool{}
			for range 12 {
				d.Await(tc.name, "paused")
				if tc.ask != "" {
					errtest.Get(once(tc.addr, tc.ask))(t)
				}
				mustAnswer(t, tc.addr)
				pid, err := once(tc.addr, "pid")
				errtest.None(t, err)
				workers[pid] = true
			}
			o := d.Show(tc.name)
			t.Logf("REPORT %s: %d pauses, %d wakes, answered by %d processes", tc.name, o.PauseCount, o.WakeCount, len(workers))
		})
	}
}

// TestWakeFromStopped checks that a connection starts an instance with LISTEN_FDS
// that lull stopped, because its port stays open. The port must be closed if a
// user stopped the instance, or if it must not be woken.
func TestWakeFromStopped(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "100ms", "--pause-after", "200ms")
	make := func(name string, fds, wake bool) string {
		s, addr := web(t, name, false)
		if fds {
			s.Command = []string{daemontest.Program("guest"), "serve", "-fds"}
		}
		s.ListenFDs, s.WakeFromStopped, s.StopAfter = fds, new(wake), daemontest.Seconds(200*time.Millisecond)
		d.Launch(s)
		mustAnswer(t, addr)
		return addr
	}
	woken, plain := make("held", true, true), make("plain", false, false)
	for range 5 {
		d.Await("held", "stopped")
		mustAnswer(t, woken)
	}
	d.Must("held", "stop")
	d.Await("plain", "stopped")
	for _, addr := range []string{woken, plain} {
		if c, err := net.DialTimeout("tcp", addr, time.Second); err == nil {
			c.Close()
			t.Errorf("the port %s of a stopped program is open", addr)
		}
		ln, err := net.Listen("tcp", addr) // the port must be free
		if err != nil {
			t.Fatalf("the port %s of a stopped program cannot be used: %v", addr, err)
		}
		ln.Close()
	}
	// The steps of the ladder also lead to a stop from which a connection wakes
	// it.
	s, addr := web(t, "ladder", true)
	s.StopAfter = daemontest.Seconds(300 * time.Millisecond)
	d.Launch(s)
	mustAnswer(t, addr)
	d.Await("ladder", "stopped")
	mustAnswer(t, addr)
	t.Log("REPORT wake from stopped: 5 starts by a connection to held sockets, 1 through the relay; a plain program's port closes with it")
}

// TestWorkloadSocket checks the effect of the messages that a program sends over
// LULL_SOCKET.
func TestWorkloadSocket(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "100ms", "--pause-after", "300ms")
	s, addr := web(t, "talks", false)
	d.Launch(s)
	say := func(message string) {
		t.Helper()
		got, err := once(addr, "say "+message)
		if err != nil || !strings.Contains(got, `"result"`) {
			t.Fatalf("%s was answered with %q, %v", message, got, err)
		}
	}
	runs := func(why string) {
		t.Helper()
		d.Await("talks", "running") // the program may answer before the daemon reports it as running
		if !waittest.Stays(1500*time.Millisecond, func() bool { return d.Show("talks").State == "running" }) {
			t.Fatalf("it was paused although %s", why)
		}
	}
	say(`{"jsonrpc":"2.0","id":1,"method":"keepalive","params":{"ttl_ms":60000,"reason":"build"}}`)
	if o := d.Show("talks"); !o.LeaseHeld || o.LeaseReason != "build" {
		t.Fatalf("no lease: %+v", o.Leases)
	}
	runs("it holds a lease")
	say(`{"jsonrpc":"2.0","id":2,"method":"keepalive.release","params":{}}`)
	d.Await("talks", "paused")
	say(`{"jsonrpc":"2.0","id":3,"method":"busy","params":{}}`)
	runs("it is busy")
	say(`{"jsonrpc":"2.0","id":4,"method":"waiting","params":{}}`)
	d.Await("talks", "paused")
	say(`{"jsonrpc":"2.0","id":5,"method":"busy","params":{}}`)
	runs("it is busy")
	if _, err := once(addr, "hangup"); err != nil { // busy ends with the connection that reported it
		t.Fatal(err)
	}
	d.Await("talks", "paused")
	before := d.Show("talks").WakeCount
	earliest := time.Now().Add(5 * time.Second)
	say(`{"jsonrpc":"2.0","id":6,"method":"next_due","params":{"in_ms":5000}}`)
	due := time.Now().Add(5 * time.Second)
	slept := d.Until("talks", "it sleeps again", func(o hostctl.Instance) bool { return o.WakeCount > before && o.State == "paused" }).WakeCount
	o := d.Until("talks", "next_due wakes it", func(o hostctl.Instance) bool { return o.WakeCount > slept })
	early := due.Sub(*o.LastResumedAt)
	if o.LastResumedBy != "timer" || early > 2100*time.Millisecond { // at most host.Lead before it was due, plus the difference of two clocks
		t.Fatalf("woken by %s at %s, due at %s", o.LastResumedBy, o.LastResumedAt, due)
	}
	o = d.Until("talks", "it sleeps once more", func(o hostctl.Instance) bool { return o.WakeCount > slept && o.State == "paused" })
	if o.LastPausedAt.Before(earliest) {
		t.Fatalf("paused at %s, before it was due at %s", o.LastPausedAt, earliest)
	}
	t.Logf("REPORT LULL_SOCKET: keepalive, release, busy, waiting, hang-up and next_due did what they say; woken %s before it was due", early)
}

func TestExecAndLogs(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "100ms", "--pause-after", "200ms")
	s := spec("spam", "spam", "40000") // 4 MB
	s.LogMax, s.Env = 256<<10, []string{"COLOUR=blue"}
	s.PauseAfter = daemontest.Seconds(200 * time.Millisecond) // needed because nothing can wake it
	o := d.Launch(s)
	hold(d, "spam", "prints") // a program that gets no CPU time would look idle
	daemontest.Wait(t, "the last line is in the log", func() (bool, string) {
		said := d.Said("spam")
		return strings.Contains(said, "last line"), said[max(0, len(said)-200):]
	})
	logs, err := filepath.Glob(d.Dir + "/data/logs/" + o.ID + ".log*")
	if err != nil || len(logs) != 4 {
		t.Fatalf("log files %v, %v, want the present and one older, each with its times", logs, err)
	}
	var total int64
	for _, f := range logs {
		st, err := os.Stat(f)
		errtest.None(t, err)
		total += st.Size()
	}
	if total > 2*(256<<10)+64<<10 {
		t.Errorf("%d bytes of logs, want at most two files of 256 KiB", total)
	}
	errtest.Get(d.Release(t.Context(), "spam", "prints"))(t)
	d.Await("spam", "paused")
	x, err := d.Exec(t.Context(), "spam", hostctl.ExecRequest{Command: []string{"sh", "-c", "echo $COLOUR; echo no >&2; exit 5"}})
	if err != nil || x.ExitCode != 5 || x.Stdout != "blue\n" || x.Stderr != "no\n" {
		t.Errorf("exec beside a paused program: %+v, %v", x, err)
	}
	d.LeavesCommand("spam")
	t.Logf("REPORT logs: 4 MB printed, %d bytes kept in 2 files; exec woke a paused instance and gave code %d", total, x.ExitCode)
}

// TestEnds checks that a crash loop is recognized, that a failed program is
// restarted even if the daemon is killed in between, and that a paused program is
// asked to exit gracefully.
func TestEnds(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "100ms", "--pause-after", "200ms")
	_, err := d.Create(t.Context(), hostctl.Create{Spec: spec("loops", "exit", "3", "10ms"), Start: true})
	if err != nil {
		t.Fatal(err)
	}
	// There is a delay between the restarts, in which the daemon may be killed.
	d.Until("loops", "two crashes", func(o hostctl.Instance) bool { return o.RestartCount >= 2 && o.State == "stopped" })
	d.Kill()
	d.Boot()
	o := d.Until("loops", "a crash loop", func(o hostctl.Instance) bool { return o.CrashLooping })
	if o.State != "stopped" || o.ExitCode == nil || *o.ExitCode != 3 {
		t.Errorf("after the loop it is %s with %v", o.State, o.ExitCode)
	}
	term := filepath.Join(d.Dir, "term")
	s, addr := web(t, "orderly", false, "-term", term)
	s.StopAfter = daemontest.Seconds(300 * time.Millisecond)
	d.Launch(s)
	mustAnswer(t, addr)
	st := d.Await("orderly", "stopped")
	b, err := os.ReadFile(term)
	if err != nil || string(b) != "ended in order\n" {
		t.Errorf("its handler of SIGTERM wrote %q, %v", b, err)
	}
	if st.ExitCode == nil || *st.ExitCode != 0 {
		t.Errorf("its exit code is %v, want 0", st.ExitCode)
	}
	k, addr := web(t, "killed", false)
	d.Launch(k)
	pid := d.Show("killed").PID
	errtest.None(t, exec.Command("kill", "-9", strconv.Itoa(pid)).Run())
	d.Until("killed", "it is started again", func(o hostctl.Instance) bool { return o.PID != 0 && o.PID != pid && o.State != "starting" })
	mustAnswer(t, addr)
	t.Logf("REPORT ends: crash loop after %d restarts over a kill of the daemon; SIGTERM handled after PAUSED; killed program started again", o.RestartCount)
}

// TestReclaim checks that reclaim frees mapped pages of files, and anonymous
// memory if the machine can swap.
func TestReclaim(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "100ms", "--pause-after", "200ms")
	big := filepath.Join(d.Dir, "big")
	errtest.None(t, os.WriteFile(big, make([]byte, 32<<20), 0o644))
	f, err := os.Open(big)
	errtest.None(t, err)
	_ = f.Sync() // only clean pages can be freed
	f.Close()
	for _, s := range []instance.Spec{spec("file", "mapped", big), spec("anonymous", "mem", "32")} {
		s.PauseAfter = daemontest.Seconds(200 * time.Millisecond) // needed because nothing can wake it
		s.ReclaimAfter = *daemontest.Seconds(300 * time.Millisecond)
		d.Launch(s)
		o := d.Await(s.Name, "reclaimed")
		if s.Name == "file" && o.ReclaimedBytes < 8<<20 {
			t.Errorf("only %d bytes of %d mapped were freed: %s", o.ReclaimedBytes, 32<<20, o.StatusReason)
		}
		t.Logf("REPORT reclaim %s: freed %d of about %d bytes (%s)", s.Name, o.ReclaimedBytes, 32<<20, o.StatusReason)
		d.Must(s.Name, "resume")
	}
	if b, err := os.Open("/proc/swaps"); err == nil {
		defer b.Close()
		lines := 0
		for sc := bufio.NewScanner(b); sc.Scan(); lines++ {
		}
		if lines < 2 {
			t.Log("this machine has no swap, so anonymous memory has nowhere to go")
		}
	}
}
