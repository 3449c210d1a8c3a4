package hosttest

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/idle"
	"lull/internal/instance"
	"lull/internal/link/hostctl"
)

// Machine is a whole host daemon over one runtime, as the suite of conformance
// drives it. Its methods fail the test when they cannot do what they are for.
type Machine interface {
	// Run creates and starts an instance of a program; it is ready on return.
	// Durations of the spec that matter to the row are set by change.
	Run(t *testing.T, name string, p Program, change func(*instance.Spec))
	Dial(t *testing.T, name string) Conn
	// Crash kills the daemon as kill -9 does and starts another one.
	Crash(t *testing.T)
	// Until waits, as long as the machine may need, and fails when it is in vain.
	Until(t *testing.T, what string, ok func() bool)
	// Left is what of a removed instance is still on the machine.
	Left(name string) []string
	// Lacks says why a row cannot be tried here, "" when it can.
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
	Logs(name string) (string, error)
}

// Conn is a client's connection to the server of an instance. Ask sends a line
// and wants it back.
type Conn interface {
	Ask(line string) error
	HalfClose(line string) error // sends a line, then the end; wants the line back, then the end
	Close()
}

// Program is what an instance runs: a server that answers lines, or a script for
// sh -c. A script ends at once at SIGTERM, also as the first process of its
// namespace, which only gets what it handles.
type Program struct {
	Serves bool
	Script string
}

const untilTerm = `trap "exit 0" TERM; `

// The programs of the suite.
var (
	Serve  = Program{Serves: true}
	Burn   = Program{Script: untilTerm + "while :; do :; done"}
	Says   = Program{Script: untilTerm + "echo first; echo second >&2; while :; do sleep 0.1; done"}
	Ends   = Program{Script: "exit 7"}
	Fails  = Program{Script: "sleep 1; exit 9"}
	Polite = Program{Script: `trap "echo bye; exit 0" TERM; echo up; while :; do sleep 0.1; done`}
)

// Ability is what a row needs beyond the model that every machine has.
type Ability string

// The abilities.
const (
	Output    Ability = "output"     // programs print, commands can be run beside them
	HalfClose Ability = "half-close" // the two directions of a connection end apart
	Restarts  Ability = "restarts"   // the host starts again what failed
)

// Pauses is the idle time of the rows in which instances shall pause.
const Pauses = 300 * time.Millisecond

func never(s *instance.Spec) { s.PauseAfter = new(idle.Duration) }
func soon(s *instance.Spec)  { d := idle.Duration(Pauses); s.PauseAfter = &d }

// Row is one thing that every runtime does alike.
type Row struct {
	Name  string
	Needs Ability
	Do    func(t *testing.T, m Machine)
}

// Suite is what a runtime has to do to be one. kills is how often the daemon is
// killed in the row about that.
func Suite(kills int, rnd *rand.Rand) []Row {
	return []Row{
		{"start and readiness", "", ready},
		{"logs", Output, logs},
		{"exec", Output, exec},
		{"exit code", "", exitCode},
		{"pause and wake on connection", "", pauseAndWake},
		{"data wakes", "", dataWakes},
		{"pause by hand", "", byHand},
		{"half-close", HalfClose, halfClose},
		{"leases", "", leases},
		{"heartbeat", "", heartbeat},
		{"heartbeat off", "", heartbeatOff},
		{"crash", Restarts, crash},
		{"graceful stop", Output, graceful},
		{"kill -9 of the daemon", "", func(t *testing.T, m Machine) { killed(t, m, kills, rnd) }},
		{"cleanup", "", cleanup},
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// is waits until an instance is in a state.
func is(t *testing.T, m Machine, name, state string) (o hostctl.Instance) {
	t.Helper()
	m.Until(t, name+" is "+state, func() bool {
		var err error
		o, err = m.Get(name)
		return err == nil && o.State == state
	})
	return o
}

// remove takes an instance away, and waits until nothing of it is left.
func remove(t *testing.T, m Machine, name string) {
	t.Helper()
	must(t, m.Remove(name))
	var left []string
	m.Until(t, "nothing is left of "+name, func() bool { left = m.Left(name); return len(left) == 0 })
}

// asks is one client that comes, asks and goes.
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
		out, err = m.Logs("says")
		must(t, err)
		return strings.Contains(out, "first\n") && strings.Contains(out, "second\n")
	})
	remove(t, m, "says")
}

func exec(t *testing.T, m Machine) {
	m.Run(t, "beside", Serve, soon)
	is(t, m, "beside", "paused")
	got, err := m.Exec("beside", "sh", "-c", "echo out; echo err >&2; exit 3")
	must(t, err)
	if got.ExitCode != 3 || got.Stdout != "out\n" || got.Stderr != "err\n" {
		t.Errorf("the command ended with %+v", got)
	}
	// More than fits into any one message, on both streams.
	long, err := m.Exec("beside", "sh", "-c", "x=0123456789abcdef; i=0; while [ $i -lt 14 ]; do x=$x$x; i=$((i+1)); done; echo $x; echo $x >&2")
	must(t, err)
	want := strings.Repeat("0123456789abcdef", 1<<14) + "\n"
	if long.ExitCode != 0 || long.Truncated || long.Stdout != want || long.Stderr != want {
		t.Errorf("long output: code %d, %d and %d bytes of %d, truncated %v", long.ExitCode, len(long.Stdout), len(long.Stderr), len(want), long.Truncated)
	}
	// One line more than is kept.
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
	for n := range 3 {
		o := is(t, m, "naps", "paused")
		if o.PauseCount < uint64(n+1) {
			t.Fatalf("paused %d times after %d wakes", o.PauseCount, n)
		}
		asks(t, m, "naps")
	}
	o := is(t, m, "naps", "paused")
	if o.WakeCount < 3 {
		t.Errorf("woken %d times by 3 clients", o.WakeCount)
	}
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
	for range 2 { // awake or asleep
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
	must(t, m.Hold("leased", "late", time.Hour)) // kept, and wakes nothing
	if o := is(t, m, "leased", "paused"); !o.LeaseHeld {
		t.Error("a lease on a paused instance was not kept")
	}
	remove(t, m, "leased")
}

// reading is a signal's verdict at the last look.
func reading(o hostctl.Instance, signal string) string {
	for _, r := range o.Activity {
		if r.Signal == signal {
			return string(r.State)
		}
	}
	return ""
}

// heartbeat looks at the reading that holds: a machine under load may give a
// program nothing for as long as the other rows wait.
func heartbeat(t *testing.T, m Machine) {
	m.Run(t, "burns", Burn, func(s *instance.Spec) { d := idle.Duration(10 * time.Second); s.PauseAfter = &d })
	begun := time.Now()
	m.Until(t, "its use of the processor counts as activity", func() bool {
		o, err := m.Get("burns")
		must(t, err)
		return reading(o, "cpu") == string(idle.Active) && o.LastActivityAt != nil && o.LastActivityAt.After(begun)
	})
	remove(t, m, "burns")
}

func heartbeatOff(t *testing.T, m Machine) {
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
	m.Until(t, "it has set its trap", func() bool { out, err := m.Logs("polite"); return err == nil && strings.Contains(out, "up\n") })
	must(t, m.Stop("polite"))
	o := is(t, m, "polite", "stopped")
	if o.ExitCode == nil || *o.ExitCode != 0 {
		t.Errorf("stopped with code %v: %s", o.ExitCode, o.StatusReason)
	}
	m.Until(t, "its last words are in the log", func() bool { out, err := m.Logs("polite"); return err == nil && strings.Contains(out, "bye\n") })
	remove(t, m, "polite")
}

// killed kills the daemon at random points while an instance pauses and wakes:
// it is found again each time, runs once, answers, and keeps its lease.
func killed(t *testing.T, m Machine, kills int, rnd *rand.Rand) {
	m.Run(t, "kept", Serve, soon)
	m.Run(t, "leased", Serve, func(s *instance.Spec) { never(s) })
	before, err := m.Get("kept")
	must(t, err)
	must(t, m.Hold("leased", "job", time.Hour))
	for n := range kills {
		asks(t, m, "kept")
		time.Sleep(time.Duration(rnd.Int64N(int64(3 * Pauses))))
		m.Crash(t)
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

// cleanup removes instances in every state.
func cleanup(t *testing.T, m Machine) {
	for _, state := range []string{"running", "paused", "stopped"} {
		name := "gone-" + state
		m.Run(t, name, Serve, never)
		switch state {
		case "paused":
			must(t, m.Pause(name, true))
		case "stopped":
			must(t, m.Stop(name))
		}
		is(t, m, name, state)
		remove(t, m, name)
		if _, err := m.Get(name); err == nil {
			t.Errorf("%s is still there", name)
		}
	}
}
