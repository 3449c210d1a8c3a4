// Package modeltest contains the model of the fence for Spin, and checks recorded
// traces against it.
//
// The model, fence.pml, has its own implementation of the fence's steps, but their
// order comes from the code: the tests of package host generate steps.pml, and fail
// if it is out of date. A trace is accepted if it is a behavior of the model, in
// which everything that is not recorded may happen at any time. Spin's verifier
// follows the traces itself, so the model exists in one form only.
package modeltest

import (
	"bytes"
	_ "embed"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var (
	//go:embed fence.pml
	Model string
	//go:embed steps.pml
	Steps string // the order of steps in the standard fence and in each broken one
	//go:embed follow.h
	follow string
)

// Dir returns a directory with the model and steps. It skips the test if the
// programs that explore the model are missing.
func Dir(t *testing.T, steps string) (dir string) {
	t.Helper()
	for _, program := range []string{"spin", "gcc"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is not installed", program)
		}
	}
	dir = t.TempDir()
	for name, text := range map[string]string{"fence.pml": Model, "follow.h": follow, "steps.pml": steps} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// Compile runs a compiler in dir.
func Compile(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// MaxClients is the maximum number of clients in a trace.
const MaxClients = 3

// Scenario describes the world in which a trace was recorded. Numbers are at most
// 255.
type Scenario struct {
	Quiet    bool             // open connections that are quiet do not keep the instance awake
	Deep     bool             // the ladder ends in hibernation, not in a stop
	Relayed  [MaxClients]bool // which clients come through the relay
	Clients  int
	Requests int  // maximum number of requests of each client on its connection
	Users    int  // number of calls by users, at most two of them concurrent
	Verbs    int  // which calls; numbered as in the model
	Checks   int  // number of checks of the idle timer before its first tick; with Real, of the first daemon
	Later    int  // with Real, number of checks of the idle timer after a crash
	Crashes  int  // number of crashes of the daemon
	Ends     int  // how often at most the program ends by itself
	Kept     bool // the program's sockets are kept while it does not run
	Timed    bool // the idle timer may consider any activity as too recent
	Real     bool // the trace is of real programs; it begins while the program runs and no connection is in use
	Late     bool // relayed connections from before the trace may still close during it
}

// Event is a recorded event. Name is its name in the model without the prefix E_. N
// is the number of the client or of the called verb, or 1 for a step that failed.
//
// The event happened at some time from From to To, in a unit that all events of a
// trace share. It came after another event for certain only if that one's To is
// below its From. If To is Open, it may also happen after the end of the trace.
type Event struct {
	Name     string
	N        int
	From, To int64
}

// Open is the To of an event that may not have happened yet.
const Open = math.MaxInt64

// Trace holds the recorded events of an instance, in the order of From.
type Trace struct {
	Scenario
	Events []Event
	Hidden []string // names of events that the recorder cannot see

	// Delayed are names of events that a daemon reports with a delay, so that the last
	// ones before a crash are missing. Those that are also Untraced are not recorded
	// from the crash until the next daemon reports another event.
	Delayed, Untraced []string
}

// Until describes the first n events of the trace.
func (t *Trace) Until(n int) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%+v:", t.Scenario)
	for _, e := range t.Events[:min(n+1, len(t.Events))] {
		fmt.Fprintf(&s, " %s+%d", e.Name, e.N)
		if t.Real {
			fmt.Fprintf(&s, "[%d,%d]", e.From, e.To)
		}
	}
	return s.String()
}

// numbers maps each event of the model to how many different numbers it has.
var numbers = func() map[string]int {
	all := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^#define E_(\w+) (\d+)$`).FindAllStringSubmatch(Model, -1) {
		all[m[1]], _ = strconv.Atoi(m[2])
	}
	return all
}()

// line appends the trace in the format that the follower reads.
func (t *Trace) line(b []byte) []byte {
	on := func(on bool) int {
		if on {
			return 1
		}
		return 0
	}
	fields := []int{on(t.Quiet), on(t.Deep)}
	for _, r := range t.Relayed {
		fields = append(fields, on(r))
	}
	for _, n := range append(fields, t.Clients, t.Requests, t.Users, t.Verbs, t.Checks, t.Later, t.Crashes, t.Ends, on(t.Kept), on(t.Timed), on(t.Real), on(t.Late)) {
		b = fmt.Append(b, n, " ")
	}
	number := func(name string) int {
		if numbers[name] == 0 {
			panic("the model has no event " + name)
		}
		return numbers[name]
	}
	kinds := map[int]int{}
	for kind, names := range [][]string{1: t.Hidden, t.Delayed, t.Untraced} { // in the order of the follower
		for _, name := range names {
			for n := range MaxClients {
				if n == 0 || clientEvents[name] || n == 1 && CanFail[name] {
					kinds[number(name)+n] = kind
				}
			}
		}
	}
	b = fmt.Append(b, len(kinds), " ")
	for n, kind := range kinds {
		b = fmt.Append(b, n, " ", kind, " ")
	}
	crash := slices.IndexFunc(t.Events, func(e Event) bool { return e.Name == "crash" })
	if crash < 0 {
		crash = len(t.Events)
	}
	b = fmt.Append(b, len(t.Events), " ", crash)
	ranks := map[int64]int{Open: math.MaxInt32}
	var times []int64
	for _, e := range t.Events {
		times = append(times, e.From)
		if e.To != Open {
			times = append(times, e.To)
		}
	}
	slices.Sort(times)
	for n, at := range slices.Compact(times) {
		ranks[at] = n
	}
	for _, e := range t.Events {
		b = fmt.Append(b, " ", number(e.Name)+e.N, " ", ranks[e.From], " ", ranks[e.To])
	}
	return append(b, '\n')
}

// CanFail are the steps whose number is 1 if they failed.
var CanFail = map[string]bool{"look": true, "final": true, "commit": true, "stopintent": true, "stoplook": true}

// clientEvents are the events whose number is that of a client.
var clientEvents = map[string]bool{"queued": true, "refused": true, "accepted": true, "answered": true, "sent": true, "closed": true,
	"gone": true, "gated": true, "passed": true, "turned": true}

// Follower is a verifier of the model that follows traces.
type Follower struct {
	program string
	States  int // number of states explored so far
}

// NewFollower compiles a Follower.
func NewFollower(t *testing.T) *Follower {
	t.Helper()
	dir := Dir(t, Steps)
	Compile(t, dir, "spin", "-DTRACES", "-a", "fence.pml")
	// Compiling with optimization would take longer than it saves.
	Compile(t, dir, "gcc", "-O0", "-w", "-DSAFETY", "-DNOREDUCE", "-DVECTORSZ=2048", "-DMEMLIM=3000", "-o", "follow", "pan.c")
	return &Follower{program: filepath.Join(dir, "follow")}
}

// batch is the maximum number of traces that one process follows.
const batch = 500

var (
	panStates   = regexp.MustCompile(`(?m)^\s*(\d+) states, stored`)
	panRejected = regexp.MustCompile(`(?m)^rejected: (\d+) (\d+)$`)
)

// Follow returns the traces that are not behaviors of the model: by index in all,
// how many of the trace's events the model can follow.
func (f *Follower) Follow(t *testing.T, all []Trace) (rejected map[int]int) {
	t.Helper()
	rejected = map[int]int{}
	for first := 0; first < len(all); first += batch {
		part := all[first:min(first+batch, len(all))]
		b := fmt.Appendln(nil, len(part))
		for _, tr := range part {
			b = tr.line(b)
		}
		file := filepath.Join(t.TempDir(), "traces")
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), f.program, "-m100000", "-n", "-w20")
		cmd.Dir = filepath.Dir(file)
		cmd.Env = append(os.Environ(), "TRACES="+file)
		out, err := cmd.CombinedOutput()
		if m := panStates.FindSubmatch(out); m != nil {
			n, _ := strconv.Atoi(string(m[1]))
			f.States += n
		}
		if err != nil || !strings.Contains(string(out), "errors: 0") || !strings.Contains(string(out), fmt.Sprintf("traces: %d\n", len(part))) || bytes.Contains(out, []byte("max search depth too small")) || bytes.Contains(out, []byte("Search not completed")) {
			t.Fatalf("the search did not complete: %v\n%s", err, out)
		}
		for _, m := range panRejected.FindAllStringSubmatch(string(out), -1) {
			n, _ := strconv.Atoi(m[1])
			rejected[first+n], _ = strconv.Atoi(m[2])
		}
	}
	return rejected
}
