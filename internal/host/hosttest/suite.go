package hosttest

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
	"lull/internal/protocol/hostctl/execstream"
)

// Machine is a complete host daemon with one runtime, on which the conformance
// suite runs. Its methods fail the test on errors.
type Machine interface {
	// Run creates and starts an instance, and returns once its program is ready.
	// change sets the durations in the spec that matter to the row.
	Run(t *testing.T, name string, p Program, change func(*instance.Spec))
	Dial(t *testing.T, name string) Conn
	// Crash kills the daemon with SIGKILL, calls down, and starts another daemon.
	Crash(t *testing.T, down func())
	// Until waits until ok returns true. It fails the test after a time that is
	// enough for this machine.
	Until(t *testing.T, what string, ok func() bool)
	// Left returns what is left of a removed instance on the machine.
	Left(name string) []string
	// Lacks returns why an ability cannot be tested on this machine, or "".
	Lacks(a Ability) string

	Get(name string) (hostctl.Instance, error)
	Pause(name string, force bool) error
	Resume(name string) error
	Start(name string) error
	Stop(name string) error
	Remove(name string) error
	Hold(name, holder string, ttl time.Duration) error
	Release(name, holder string) error
	Exec(name string, command ...string) (instance.Outcome, error)
	Logs(name string, l hostctl.Logs) (string, error)
	// Attach starts a command and returns a connection for execstream.Run.
	Attach(t *testing.T, name string, q execstream.Request) io.ReadWriteCloser
}

// Conn is a client's connection to the server of an instance. Ask sends a line and
// expects the same line back.
type Conn interface {
	Ask(line string) error
	HalfClose(line string) error // sends a line, shuts down its side, and expects the line and then the end
	Close()
}

// Program is the program of an instance: a server that answers lines, or a script for
// sh -c. A script must exit at once on SIGTERM, even as the first process of its
// PID namespace, which receives only signals that it handles.
type Program struct {
	Serves bool
	Script string
}

const untilTerm = `trap "exit 0" TERM; `

// BurnUntil returns a program that uses the CPU until file exists inside the
// instance. Then it sleeps once for long, because many short sleeps count as work
// in emulation.
func BurnUntil(file string) Program {
	return Program{Script: fmt.Sprintf(untilTerm+"while [ ! -e %s ]; do :; done; sleep 86400 & wait", file)}
}

// The programs of the suite.
var (
	Serve  = Program{Serves: true}
	Burn   = Program{Script: untilTerm + "while :; do :; done"}
	Says   = Program{Script: untilTerm + "echo first; echo second >&2; while :; do sleep 0.1; done"}
	Clock  = Program{Script: untilTerm + "while :; do date +%s; sleep 1; done"}
	Ends   = Program{Script: "exit 7"}
	Fails  = Program{Script: "sleep 1; exit 9"}
	Polite = Program{Script: `trap "echo bye; exit 0" TERM; echo up; while :; do sleep 0.1; done`}
)

// Ability is a feature that a row needs and that not every machine has.
type Ability string

// The abilities.
const (
	Output      Ability = "output"       // programs print output, and commands can run inside instances
	HalfClose   Ability = "half-close"   // the directions of a connection can end separately
	OwnCommands Ability = "own commands" // commands end with the daemon that started them
	Restarts    Ability = "restarts"     // failed programs are restarted
	Reclaim     Ability = "reclaim"      // sleeping instances free memory
	Hibernate   Ability = "hibernate"    // sleeping instances can be saved to disk
)

// Subject is a runtime that must pass the suite. Why has the reason for each
// ability that it lacks.
type Subject struct {
	Name string
	Why  map[Ability]string
}

// Lacks implements Machine.
func (s Subject) Lacks(a Ability) string { return s.Why[a] }

// Subjects returns all runtimes: the simulated one, and those tested with real
// programs.
func Subjects() []Subject {
	const unsaved = "only microVMs can hibernate"
	return []Subject{
		{"process", map[Ability]string{Hibernate: unsaved}},
		{"container", map[Ability]string{Hibernate: unsaved}},
		{"docker", map[Ability]string{Hibernate: unsaved, OwnCommands: "Docker keeps the commands of clients that are gone"}},
		{"microvm", nil},
		Simulated(),
	}
}

// Simulated returns the runtime that is used in synctest bubbles.
func Simulated() Subject {
	return Subject{"simulated", map[Ability]string{
		Output:      "the simulated kernel has no output and no commands",
		OwnCommands: "the simulated kernel has no commands",
		HalfClose:   "simulated connections close in both directions at once",
	}}
}

// Pauses is the idle timeout in rows in which instances must pause.
const Pauses = 300 * time.Millisecond

func never(s *instance.Spec) { s.PauseAfter = new(idle.Duration) }
func soon(s *instance.Spec)  { d := idle.Duration(Pauses); s.PauseAfter = &d }

// Scenarios are the names of the rows of the interaction matrix. A test of the
// matrix has a subtest with each name.
var Scenarios = []string{
	"HTTP server with active requests",
	"HTTP server, no requests",
	"Telegram bot polling",
	"npm install",
	"sleep 300",
	"Build with explicit lease",
	"Bot with leases_only policy, polling",
	"Bot with leases_only, lease held",
}

// Row is a behavior that all runtimes have in common.
type Row struct {
	Name  string
	Needs Ability
	Do    func(t *testing.T, m Machine)
}

// Suite returns the rows that a runtime must pass. The row about crashes kills the
// daemon kills times, at moments that rnd determines.
func Suite(kills int, rnd *rand.Rand) []Row {
	rows := []Row{
		{"start and readiness", "", ready},
		{"logs", Output, logs},
		{"times of the log", Output, logTimes},
		{"exec", Output, exec},
		{"exec with input", Output, execInput},
		{"exec on a terminal", Output, execTerminal},
		{"exec ends with the daemon", OwnCommands, execEnds},
		{"exit code", "", exitCode},
		{"pause and wake on connection", "", pauseAndWake},
		{"data wakes", "", dataWakes},
		{"wake from reclaimed", Reclaim, func(t *testing.T, m Machine) { wakeFrom(t, m, "reclaimed") }},
		{"wake from hibernated", Hibernate, func(t *testing.T, m Machine) { wakeFrom(t, m, "hibernated") }},
		{"manual pause", "", byHand},
		{"half-close", HalfClose, halfClose},
		{"leases", "", leases},
		{"heartbeat on", "", heartbeatOn},
		{"heartbeat off", Output, heartbeatOff},
		{"leases_only", "", leasesOnly},
		{"crash", Restarts, crash},
		{"graceful stop", Output, graceful},
		{"kill -9 of the daemon", "", func(t *testing.T, m Machine) { killed(t, m, kills, rnd) }},
	}
	for _, state := range []string{"running", "paused", "reclaimed", "hibernated", "stopped"} {
		needs := map[string]Ability{"reclaimed": Reclaim, "hibernated": Hibernate}[state]
		rows = append(rows, Row{"cleanup from " + state, needs, func(t *testing.T, m Machine) { cleanup(t, m, state) }})
	}
	return rows
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// is waits until an instance is in a state, and returns its view.
func is(t *testing.T, m Machine, name, state string) (o hostctl.Instance) {
	t.Helper()
	m.Until(t, name+" is "+state, func() bool {
		var err error
		o, err = m.Get(name)
		return err == nil && o.State == state
	})
	return o
}

// remove removes an instance and waits until nothing of it is left.
func remove(t *testing.T, m Machine, name string) {
	t.Helper()
	must(t, m.Remove(name))
	var left []string
	defer func() {
		if len(left) > 0 {
			t.Errorf("left of %s: %q", name, left)
		}
	}()
	m.Until(t, "nothing is left of "+name, func() bool { left = m.Left(name); return len(left) == 0 })
}

// asks connects a client that sends a line, expects it back, and disconnects.
func asks(t *testing.T, m Machine, name string) {
	t.Helper()
	c := m.Dial(t, name)
	defer c.Close()
	if err := c.Ask("hello"); err != nil {
		o, gerr := m.Get(name)
		t.Fatalf("%s does not answer: %v; it is %s: %s, %v", name, err, o.State, o.StatusReason, gerr)
	}
}

func ready(t *testing.T, m Machine) {
	m.Run(t, "ready", Serve, never)
	o := is(t, m, "ready", "running")
	if o.PID == 0 || o.StartedAt == nil || !o.Enabled {
		t.Errorf("it runs as %+v", o)
	}
	asks(t, m, "ready")
	must(t, m.Stop("ready"))
	is(t, m, "ready", "stopped")
	must(t, m.Start("ready"))
	is(t, m, "ready", "running")
	asks(t, m, "ready")
	remove(t, m, "ready")
}

func logs(t *testing.T, m Machine) {
	m.Run(t, "says", Says, never)
	var out string
	m.Until(t, "both lines are in the log", func() bool {
		var err error
		out, err = m.Logs("says", hostctl.Logs{Tail: -1})
		must(t, err)
		return strings.Contains(out, "first\n") && strings.Contains(out, "second\n")
	})
	remove(t, m, "says")
}

// logTimes checks the time of each line of a log against the clock of the program
// that printed it, including lines printed while no daemon runs.
func logTimes(t *testing.T, m Machine) {
	m.Run(t, "clock", Clock, never)
	type line struct{ logged, printed time.Time }
	read := func(l hostctl.Logs) (all []line) {
		t.Helper()
		l.Times = true
		text, err := m.Logs("clock", l)
		must(t, err)
		for s := range strings.Lines(text) {
			stamp, second, _ := strings.Cut(strings.TrimSpace(s), " ")
			logged, err := time.Parse(time.RFC3339Nano, stamp)
			must(t, err)
			n, err := strconv.ParseInt(second, 10, 64)
			must(t, err)
			all = append(all, line{logged, time.Unix(n, 0)})
		}
		return all
	}
	var before []line
	m.Until(t, "it has printed", func() bool { before = read(hostctl.Logs{Tail: -1}); return len(before) >= 2 })
	killed := time.Now()
	var up time.Time
	m.Crash(t, func() {
		m.Until(t, "it has printed more", func() bool { up = time.Now(); return up.Sub(killed) > 4*time.Second })
	})
	var all []line
	m.Until(t, "it prints on", func() bool {
		all = read(hostctl.Logs{Tail: -1})
		return len(all) > 0 && all[len(all)-1].printed.After(up.Add(time.Second))
	})
	if len(all) < len(before) || !slices.Equal(all[:len(before)], before) {
		t.Errorf("the log was\n%v and is\n%v", before, all)
	}
	meanwhile := 0
	const early = 200 * time.Millisecond // tolerance, for the precision of times and the offset of a guest's clock
	for _, l := range all {
		if l.logged.Before(l.printed.Add(-early)) {
			t.Errorf("a line that was printed at %s was logged at %s", l.printed, l.logged)
		}
		if l.printed.After(killed) && l.printed.Before(up.Add(-2*time.Second)) {
			if meanwhile++; !l.logged.Before(up) {
				t.Errorf("a line printed at %s has the time of the next daemon, %s, which came at %s", l.printed, l.logged, up)
			}
		}
	}
	if meanwhile == 0 {
		t.Errorf("nothing was printed between %s and %s: %v", killed, up, all)
	}
	first := all[1].logged.Add(-time.Millisecond)
	if l := read(hostctl.Logs{Tail: -1, Since: first}); len(l) < len(all)-1 || l[0] != all[1] {
		t.Errorf("since %s: %v", first, l)
	}
	if l := read(hostctl.Logs{Tail: -1, Since: first, Until: up}); len(l) == 0 || l[0] != all[1] || l[len(l)-1].logged.After(up) {
		t.Errorf("from %s until %s: %v", first, up, l)
	}
	remove(t, m, "clock")
}

func exec(t *testing.T, m Machine) {
	m.Run(t, "beside", Serve, soon)
	is(t, m, "beside", "paused")
	got, err := m.Exec("beside", "sh", "-c", "echo out; echo err >&2; exit 3")
	must(t, err)
	if got.ExitCode != 3 || got.Stdout != "out\n" || got.Stderr != "err\n" {
		t.Errorf("the command ended with %+v", got)
	}
	// More than fits in one message, on both streams.
	long, err := m.Exec("beside", "sh", "-c", "x=0123456789abcdef; i=0; while [ $i -lt 14 ]; do x=$x$x; i=$((i+1)); done; echo $x; echo $x >&2")
	must(t, err)
	want := strings.Repeat("0123456789abcdef", 1<<14) + "\n"
	if long.ExitCode != 0 || long.Truncated || long.Stdout != want || long.Stderr != want {
		t.Errorf("long output: code %d, %d and %d bytes of %d, truncated %v", long.ExitCode, len(long.Stdout), len(long.Stderr), len(want), long.Truncated)
	}
	// One line longer than what is kept.
	huge, err := m.Exec("beside", "sh", "-c", "x=0123456789abcdef; i=0; while [ $i -lt 15 ]; do x=$x$x; i=$((i+1)); done; i=0; while [ $i -lt 17 ]; do echo $x; i=$((i+1)); done")
	must(t, err)
	if huge.ExitCode != 0 || !huge.Truncated || len(huge.Stdout) > instance.MaxOutput || len(huge.Stdout) < instance.MaxOutput-(64<<10) {
		t.Errorf("too long output: code %d, %d bytes, truncated %v", huge.ExitCode, len(huge.Stdout), huge.Truncated)
	}
	if got, err := m.Exec("beside", "no-such-command-anywhere"); err == nil && got.ExitCode == 0 {
		t.Errorf("a command that is not there ended with %+v", got)
	}
	remove(t, m, "beside")
}

func exitCode(t *testing.T, m Machine) {
	m.Run(t, "ends", Ends, func(s *instance.Spec) { never(s); s.Restart = instance.RestartNo })
	m.Until(t, "its code is known", func() bool {
		o, err := m.Get("ends")
		return err == nil && o.State == "stopped" && o.ExitCode != nil && *o.ExitCode == 7
	})
	remove(t, m, "ends")
}

func pauseAndWake(t *testing.T, m Machine) {
	m.Run(t, "naps", Serve, soon)
	for n := range uint64(3) {
		// A program that was woken may answer before the daemon reports it as
		// running.
		m.Until(t, "it is paused once more", func() bool {
			o, err := m.Get("naps")
			return err == nil && o.State == "paused" && o.PauseCount > n
		})
		asks(t, m, "naps")
	}
	m.Until(t, "it was woken by each of 3 clients", func() bool {
		o, err := m.Get("naps")
		return err == nil && o.State == "paused" && o.WakeCount >= 3
	})
	remove(t, m, "naps")
}

func dataWakes(t *testing.T, m Machine) {
	m.Run(t, "data", Serve, never)
	c := m.Dial(t, "data")
	defer c.Close()
	must(t, c.Ask("before"))
	must(t, m.Pause("data", true))
	is(t, m, "data", "paused")
	if err := c.Ask("after"); err != nil {
		t.Errorf("bytes on an open connection: %v", err)
	}
	is(t, m, "data", "running")
	remove(t, m, "data")
}

// down waits until an instance with a spec from deep has reached a state and stays
// there. A client's close that is still in transit may wake it once more.
func down(t *testing.T, m Machine, name, state string) {
	t.Helper()
	m.Until(t, name+" is "+state, func() bool {
		o, err := m.Get(name)
		must(t, err)
		if o.State == "running" {
			_ = m.Pause(name, true) // the state is checked again
		}
		return o.State == state
	})
}

// deep returns a change of a spec after which a manually paused instance goes to
// the given state by itself.
func deep(state string) func(*instance.Spec) {
	return func(s *instance.Spec) {
		never(s)
		switch state {
		case "hibernated":
			s.HibernateAfter = idle.Duration(2 * Pauses)
			fallthrough
		case "reclaimed":
			s.ReclaimAfter = idle.Duration(Pauses)
		}
	}
}

// wakeFrom checks that an instance in a deeper state is woken by a connection that
// has stayed open, and by a new one.
func wakeFrom(t *testing.T, m Machine, state string) {
	m.Run(t, "deep", Serve, deep(state))
	c := m.Dial(t, "deep")
	defer c.Close()
	must(t, c.Ask("before"))
	down(t, m, "deep", state)
	if o, err := m.Get("deep"); err != nil || strings.Contains(o.StatusReason, "cannot") {
		t.Errorf("it is %s: %s, %v", o.State, o.StatusReason, err)
	}
	if err := c.Ask("after"); err != nil {
		t.Errorf("bytes on an open connection: %v", err)
	}
	is(t, m, "deep", "running")
	down(t, m, "deep", state)
	before, err := m.Get("deep")
	must(t, err)
	asks(t, m, "deep")
	o := is(t, m, "deep", "running")
	if o.WakeCount <= before.WakeCount || o.BootedAnew != "" || o.RestartCount != 0 {
		t.Errorf("%d wakes before and %d after, %d restarts, booted anew %q", before.WakeCount, o.WakeCount, o.RestartCount, o.BootedAnew)
	}
	must(t, c.Ask("and again"))
	remove(t, m, "deep")
}

func byHand(t *testing.T, m Machine) {
	m.Run(t, "hand", Serve, never)
	c := m.Dial(t, "hand")
	must(t, c.Ask("hello"))
	if err := m.Pause("hand", false); err == nil || !strings.Contains(err.Error(), "onnection") {
		t.Errorf("paused against a connection: %v", err)
	}
	is(t, m, "hand", "running")
	c.Close()
	m.Until(t, "the pause is not refused any more", func() bool { return m.Pause("hand", false) == nil })
	is(t, m, "hand", "paused")
	must(t, m.Resume("hand"))
	is(t, m, "hand", "running")
	asks(t, m, "hand")
	remove(t, m, "hand")
}

func halfClose(t *testing.T, m Machine) {
	m.Run(t, "half", Serve, soon)
	for range 2 { // once awake, once asleep
		is(t, m, "half", "paused")
		c := m.Dial(t, "half")
		if err := c.HalfClose("the last line"); err != nil {
			t.Errorf("half-close: %v", err)
		}
		c.Close()
	}
	remove(t, m, "half")
}

func leases(t *testing.T, m Machine) {
	m.Run(t, "leased", Serve, func(s *instance.Spec) { never(s) })
	must(t, m.Hold("leased", "one", time.Hour))
	must(t, m.Hold("leased", "two", time.Hour))
	if err := m.Pause("leased", false); err == nil || !strings.Contains(err.Error(), "ease") {
		t.Errorf("paused against a lease: %v", err)
	}
	must(t, m.Release("leased", "two"))
	o, err := m.Get("leased")
	must(t, err)
	if !o.LeaseHeld || len(o.Leases) != 1 || o.Leases[0].Holder != "one" {
		t.Errorf("after one release: %+v", o.Leases)
	}
	must(t, m.Release("leased", "one"))
	m.Until(t, "nothing holds it", func() bool { return m.Pause("leased", false) == nil })
	must(t, m.Hold("leased", "late", time.Hour)) // the lease is kept, but does not wake the instance
	if o := is(t, m, "leased", "paused"); !o.LeaseHeld {
		t.Error("a lease on a paused instance was not kept")
	}
	remove(t, m, "leased")
}

// reading returns the state of a signal's last reading, or "".
func reading(o hostctl.Instance, signal string) string {
	for _, r := range o.Activity {
		if r.Signal == signal {
			return string(r.State)
		}
	}
	return ""
}

// burns runs a program that uses the CPU, and waits until it counts as active. On a
// loaded machine it may get no CPU time while other rows run.
func burns(t *testing.T, m Machine, p Program) {
	m.Run(t, "burns", p, func(s *instance.Spec) { d := idle.Duration(10 * time.Second); s.PauseAfter = &d })
	begun := time.Now()
	m.Until(t, "its use of the processor counts as activity", func() bool {
		o, err := m.Get("burns")
		must(t, err)
		return reading(o, "cpu") == string(idle.Active) && o.LastActivityAt != nil && o.LastActivityAt.After(begun)
	})
}

func heartbeatOn(t *testing.T, m Machine) {
	burns(t, m, Burn)
	remove(t, m, "burns")
}

// heartbeatOff checks that a program becomes idle once it no longer uses the CPU.
func heartbeatOff(t *testing.T, m Machine) {
	// Unique, because an instance that is a process shares this machine's /tmp.
	file := fmt.Sprintf("/tmp/lull-enough-%d-%d", os.Getpid(), time.Now().UnixNano())
	t.Cleanup(func() { os.Remove(file) })
	burns(t, m, BurnUntil(file))
	_, err := m.Exec("burns", "touch", file)
	must(t, err)
	is(t, m, "burns", "paused")
	remove(t, m, "burns")
}

func leasesOnly(t *testing.T, m Machine) {
	m.Run(t, "burns", Burn, func(s *instance.Spec) { soon(s); s.IdlePolicy = instance.PolicyLeasesOnly })
	is(t, m, "burns", "paused")
	remove(t, m, "burns")
	m.Run(t, "burns", Burn, func(s *instance.Spec) { never(s); s.IdlePolicy = instance.PolicyLeasesOnly })
	must(t, m.Hold("burns", "job", time.Hour))
	if err := m.Pause("burns", false); err == nil {
		t.Error("a lease does not hold under leases_only")
	}
	remove(t, m, "burns")
}

func crash(t *testing.T, m Machine) {
	m.Run(t, "fails", Fails, func(s *instance.Spec) { never(s); s.Restart = instance.RestartOnFailure })
	m.Until(t, "it was started again", func() bool {
		o, err := m.Get("fails")
		return err == nil && o.RestartCount > 0 && o.State == "running"
	})
	remove(t, m, "fails")
}

func graceful(t *testing.T, m Machine) {
	m.Run(t, "polite", Polite, never)
	m.Until(t, "it has set its trap", func() bool {
		out, err := m.Logs("polite", hostctl.Logs{Tail: -1})
		return err == nil && strings.Contains(out, "up\n")
	})
	must(t, m.Stop("polite"))
	o := is(t, m, "polite", "stopped")
	if o.ExitCode == nil || *o.ExitCode != 0 {
		t.Errorf("stopped with code %v: %s", o.ExitCode, o.StatusReason)
	}
	m.Until(t, "its last words are in the log", func() bool {
		out, err := m.Logs("polite", hostctl.Logs{Tail: -1})
		return err == nil && strings.Contains(out, "bye\n")
	})
	remove(t, m, "polite")
}

// killed kills the daemon at random points while an instance pauses and wakes. It
// checks that the instance is found again each time, runs once, answers, and keeps
// its lease.
func killed(t *testing.T, m Machine, kills int, rnd *rand.Rand) {
	m.Run(t, "kept", Serve, soon)
	m.Run(t, "leased", Serve, func(s *instance.Spec) { never(s) })
	before, err := m.Get("kept")
	must(t, err)
	must(t, m.Hold("leased", "job", time.Hour))
	for n := range kills {
		asks(t, m, "kept")
		time.Sleep(time.Duration(rnd.Int64N(int64(3 * Pauses))))
		m.Crash(t, func() {})
		o, err := m.Get("kept")
		if err != nil || o.PID != before.PID || !slices.Contains([]string{"running", "pausing", "paused", "resuming"}, o.State) {
			t.Fatalf("after kill %d: %+v, %v; it was process %d", n, o, err, before.PID)
		}
		l, err := m.Get("leased")
		if err != nil || !l.LeaseHeld || l.State != "running" {
			t.Fatalf("after kill %d the lease is %v on %s, %v", n, l.LeaseHeld, l.State, err)
		}
		asks(t, m, "leased")
	}
	asks(t, m, "kept")
	is(t, m, "kept", "paused")
	remove(t, m, "kept")
	remove(t, m, "leased")
}

// cleanup checks that an instance can be removed without trace in the given state,
// also after a crash of the daemon in that state.
func cleanup(t *testing.T, m Machine, state string) {
	for _, crash := range []bool{false, true} {
		name := "gone-" + state
		m.Run(t, name, Serve, deep(state))
		if state == "stopped" {
			must(t, m.Stop(name))
			is(t, m, name, state)
		} else if state != "running" {
			down(t, m, name, state)
		}
		if crash {
			m.Crash(t, func() {})
		}
		remove(t, m, name)
		if _, err := m.Get(name); err == nil {
			t.Errorf("%s is still there", name)
		}
	}
}
