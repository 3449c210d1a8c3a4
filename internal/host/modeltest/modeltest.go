// Package modeltest has the model of the fence for Spin, and checks recorded
// traces against it.
//
// The model, fence.pml, has bodies of its own for the steps of the fence. Their
// order is that of the code: the tests of package host generate steps.pml, and fail
// while it is stale. A trace is accepted if it is a behavior of the model, in which
// all that is not recorded is free. Spin's verifier follows the traces itself, so
// that no second form of the model exists.
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
	Steps string // the order of the steps of the shipped fence and of every broken one
	//go:embed follow.h
	follow string
)

// Dir returns a directory with the model and steps. The test is skipped if the
// programs that explore it are missing.
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

// MaxClients is how many clients a trace has at most.
const MaxClients = 3

// Scenario is the setting of a trace. Numbers are at most 255.
type Scenario struct {
	Quiet    bool             // open connections that are quiet do not hold
	Deep     bool             // the ladder hibernates, and does not stop
	Relayed  [MaxClients]bool // which clients come through the relay
	Clients  int
	Requests int  // of each client on its connection, at most
	Users    int  // calls of users, two at a time
	Verbs    int  // which: see the model
	Checks   int  // by the idle timer before its first tick
	Crashes  int  // of the daemon
	Ends     int  // how often the program ends by itself, at most
	Kept     bool // its sockets are kept while it does not run
	Timed    bool // the idle timer may find any activity too recent
	Real     bool // the trace is of real programs and begins while it runs, with no connection that is in use
	Late     bool // relayed connections of before may still close
}

// Event is something that was seen: its name in the model without E_, and the
// number of its client, 1 for a step that failed, or the number of the verb that is
// called. It happened between From and
// To, both included, in a unit that all events of the trace share. What is before it
// is only what ended before From. If To is Open, it may also happen after the end of
// the trace.
type Event struct {
	Name     string
	N        int
	From, To int64
}

// Open is the time To of an event that may not have happened yet.
const Open = math.MaxInt64

// Trace holds the observations of an instance, in the order of From.
type Trace struct {
	Scenario
	Events []Event
	Hidden []string // events that the recorder does not see
}

// Until describes the trace up to event number n.
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

// numbers are the events of the model, and how many numbers each has.
var numbers = func() map[string]int {
	all := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^#define E_(\w+) (\d+)$`).FindAllStringSubmatch(Model, -1) {
		all[m[1]], _ = strconv.Atoi(m[2])
	}
	return all
}()

// line appends the trace as the follower reads it.
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
	for _, n := range append(fields, t.Clients, t.Requests, t.Users, t.Verbs, t.Checks, t.Crashes, t.Ends, on(t.Kept), on(t.Timed), on(t.Real), on(t.Late)) {
		b = fmt.Append(b, n, " ")
	}
	number := func(name string) int {
		if numbers[name] == 0 {
			panic("the model has no event " + name)
		}
		return numbers[name]
	}
	var hidden []int
	for _, name := range t.Hidden {
		for n := range MaxClients {
			if n == 0 || clientEvents[name] {
				hidden = append(hidden, number(name)+n)
			}
		}
	}
	b = fmt.Append(b, len(hidden), " ")
	for _, n := range hidden {
		b = fmt.Append(b, n, " ")
	}
	b = fmt.Append(b, len(t.Events))
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

// clientEvents are the events with a number for each client.
var clientEvents = map[string]bool{"queued": true, "refused": true, "accepted": true, "answered": true, "sent": true, "closed": true,
	"gone": true, "gated": true, "passed": true, "turned": true}

// Follower is the verifier of the model that follows traces.
type Follower struct {
	program string
	States  int // explored so far
}

// NewFollower compiles a Follower.
func NewFollower(t *testing.T) *Follower {
	t.Helper()
	dir := Dir(t, Steps)
	Compile(t, dir, "spin", "-DTRACES", "-a", "fence.pml")
	// Optimizing takes longer than it saves.
	Compile(t, dir, "gcc", "-O0", "-w", "-DSAFETY", "-DNOREDUCE", "-DVECTORSZ=2048", "-DMEMLIM=3000", "-o", "follow", "pan.c")
	return &Follower{program: filepath.Join(dir, "follow")}
}

// batch is how many traces are followed by one process.
const batch = 500

var (
	panStates   = regexp.MustCompile(`(?m)^\s*(\d+) states, stored`)
	panRejected = regexp.MustCompile(`(?m)^rejected: (\d+) (\d+)$`)
)

// Follow returns the traces that the model cannot do: by index, how many of its
// events it can.
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
