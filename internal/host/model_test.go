package host

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"lull/internal/host/modeltest"
	"lull/internal/lib/scaletest"
)

// The model of the fence, modeltest/fence.pml, is a second opinion. It includes
// daemons and shims that die, the handoff of sockets and fairness, and Spin
// explores it. The model has its own implementation of each step, but the order of
// the steps comes from the code.

// modelStep is a step of a sequence, with the function that carries it out.
type modelStep struct{ name, function string }

// sequences returns the sequences of f by field name.
func sequences(f fence) map[string][]modelStep {
	v, out := reflect.ValueOf(f), map[string][]modelStep{}
	for n := range v.NumField() {
		var steps []modelStep
		for _, s := range v.Field(n).Seq2() {
			steps = append(steps, modelStep{s.Field(0).String(), runtime.FuncForPC(s.Field(1).Pointer()).Name()})
		}
		out[v.Type().Field(n).Name] = steps
	}
	return out
}

// modelBodies names the model's bodies for steps of broken fences whose functions
// are not part of the fence.
var modelBodies = map[string]map[string]string{
	"forget a wake that came while the lock was held": {"arm": "armForgetful"},
	"do not let the relay ask for wakes":              {"commit": "commitDeaf"},
}

// modelTables returns steps.pml, which numbers the bodies of steps in the model,
// and lists each fence's sequences as such numbers. The standard fence comes first.
// It returns an error if the model has no body for a step.
func modelTables(model string, fences []brokenFence) (string, error) {
	bodies, steps := map[string]int{}, &strings.Builder{}
	for _, m := range regexp.MustCompile(`\bcode == S_(\w+)`).FindAllStringSubmatch(model, -1) {
		if bodies[m[1]] == 0 {
			bodies[m[1]] = len(bodies) + 1
			fmt.Fprintf(steps, "#define S_%s %d\n", m[1], bodies[m[1]])
		}
	}
	var names []string
	longest := 0
	for name := range sequences(standardFence()) {
		if names = append(names, name); !strings.Contains(model, "Q_"+name) {
			return "", fmt.Errorf("the model does not know the sequence %q", name)
		}
	}
	slices.Sort(names)
	for n, name := range names {
		fmt.Fprintf(steps, "#define Q_%s %d\n", name, n)
	}
	var rows []string
	for _, b := range fences {
		all := sequences(b.whole())
		var row []string
		for _, name := range names {
			var codes []string
			for _, s := range all[name] {
				body := s.function[strings.LastIndex(s.function, ".")+1:]
				if bodies[body] == 0 {
					body = modelBodies[b.name][s.name]
				}
				if bodies[body] == 0 {
					return "", fmt.Errorf("%s: the model has no body for step %q, which is %s", b.name, s.name, s.function)
				}
				codes = append(codes, strconv.Itoa(bodies[body]))
			}
			longest = max(longest, len(codes))
			row = append(row, "{"+strings.Join(append(codes, "0"), ",")+"}")
		}
		rows = append(rows, "{"+strings.Join(row, ", ")+"}")
	}
	fmt.Fprintf(steps, "c_decl { static const unsigned char fences[%d][%d][%d] = { \\\n%s }; }\n",
		len(rows), len(names), longest+1, strings.Join(rows, ", \\\n"))
	return steps.String(), nil
}

// verifiers are the programs that explore the model: safety checks its assertions
// and its end states, and fair checks what must happen eventually.
type verifiers struct{ safety, fair string }

// tablesOfAll returns steps.pml for the standard fence and all broken ones.
func tablesOfAll(t *testing.T) string {
	t.Helper()
	steps, err := modelTables(modeltest.Model, append([]brokenFence{{name: "standard"}}, brokenFences()...))
	if err != nil {
		t.Fatal(err)
	}
	return steps
}

// buildModel compiles the verifiers of the model with the fences of the code.
func buildModel(t *testing.T) verifiers {
	t.Helper()
	dir := modeltest.Dir(t, modeltest.Steps)
	modeltest.Compile(t, dir, "spin", "-a", "fence.pml")
	flags := []string{"gcc", "-Og", "-w" /* -O1 takes three times as long to compile as it saves */, "-DCOLLAPSE", "-DVECTORSZ=2048", "-DMEMLIM=6000", "pan.c"}
	modeltest.Compile(t, dir, append(flags, "-DSAFETY", "-DNOCLAIM", "-o", "safety")...)
	modeltest.Compile(t, dir, append(flags, "-DNFAIR=4", "-o", "fair")...)
	return verifiers{filepath.Join(dir, "safety"), filepath.Join(dir, "fair")}
}

// situation lists the variables that select what a run of the model explores.
type situation []string

func (s situation) String() string { return strings.Join(s, " ") }

// finding is the result of a run of a verifier.
type finding struct {
	fault               string // the property that fails, or ""
	states, transitions int
	seconds             float64
}

var (
	panBroken = regexp.MustCompile(`(?m)^property: (.*)$`)
	panFault  = regexp.MustCompile(`(?m)^pan:\d+: (.*) \(at depth`)
	panStates = regexp.MustCompile(`(?m)^\s*(\d+) states, stored`)
	panMoves  = regexp.MustCompile(`(?m)^\s*(\d+) transitions`)
	panTime   = regexp.MustCompile(`(?m)^pan: elapsed time ([0-9.e+]+) seconds`)
)

// explores runs a verifier until its search is complete or finds a fault. variant
// is the index of a fence in steps.pml.
func explores(t *testing.T, program string, variant int, s situation, args ...string) (f finding) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, append([]string{"-m2000000", "-n"}, args...)...)
	cmd.Dir = t.TempDir() // the verifier writes its trail there
	cmd.Env = append(append(os.Environ(), "FENCE="+strconv.Itoa(variant)), s...)
	out, err := cmd.CombinedOutput()
	number := func(re *regexp.Regexp) (n float64) {
		if m := re.FindSubmatch(out); m != nil {
			n, _ = strconv.ParseFloat(string(m[1]), 64)
		}
		return n
	}
	f.states, f.transitions, f.seconds = int(number(panStates)), int(number(panMoves)), number(panTime)
	if m := panFault.FindSubmatch(out); m != nil {
		f.fault = string(m[1])
	}
	if m := panBroken.FindSubmatch(out); m != nil && strings.HasPrefix(f.fault, "assertion") {
		f.fault = string(m[1])
	}
	if f.states == 0 || f.fault == "" && (err != nil || !bytes.Contains(out, []byte("errors: 0")) || bytes.Contains(out, []byte("max search depth too small"))) {
		t.Fatalf("%s: the search did not complete: %v\n%s", s, err, out)
	}
	return f
}

// fair makes a verifier check that each waiting client is served, provided that no
// process is delayed forever.
var fair = []string{"-a", "-f"}

// TestFenceModel explores the model with the order of steps in the code. It checks
// that no assertion fails, that no client waits in an end state, and that each
// client is eventually served.
//
// It also checks that the model catches every broken fence that the walks catch.
func TestFenceModel(t *testing.T) {
	if testing.Short() {
		t.Skip("starts programs")
	}
	v := buildModel(t)
	t.Run("standard", func(t *testing.T) { modelHolds(t, v) })
	t.Run("broken", func(t *testing.T) { modelConvicts(t, v) })
}

func modelHolds(t *testing.T, v verifiers) {
	safety := []situation{
		{"CLIENTS=1", "QUIET=1"},
		{"CLIENTS=1", "QUIET=1", "DEEP=1"},
		{"CLIENTS=1", "CRASHES=1"},
		{"CLIENTS=1", "USERS=1", "REQUESTS=1"},
		{"CLIENTS=2", "REQUESTS=1"},
		{"CLIENTS=1", "ENDS=1"},
	}
	live := []situation{
		{"CLIENTS=1"},
		{"CLIENTS=1", "CRASHES=1", "REQUESTS=1"},
	}
	if scaletest.N(t, 1) > 1 {
		safety = append(safety,
			situation{"CLIENTS=1", "USERS=1"},
			situation{"CLIENTS=1", "USERS=1", "REQUESTS=1", "VERBS=63", "TIMED=1", "BARE=1"},
			situation{"CLIENTS=1", "CRASHES=1", "KILLS=1"},
			situation{"CLIENTS=1", "CRASHES=1", "ENDS=1"},
			situation{"CLIENTS=2", "DEEP=1", "REQUESTS=1"})
	}
	check := func(kind string, s situation, f finding) {
		if f.fault != "" {
			t.Errorf("%s, %s: %s", kind, s, f.fault)
		}
		t.Logf("%s, %s: %d states, %d transitions, %.1f s", kind, s, f.states, f.transitions, f.seconds)
	}
	for _, s := range safety {
		check("safety", s, explores(t, v.safety, 0, s))
	}
	for _, s := range live {
		check("liveness", s, explores(t, v.fair, 0, s, fair...))
	}
}

func modelConvicts(t *testing.T, v verifiers) {
	s := situation{"CLIENTS=1", "CRASHES=1", "REQUESTS=1", "NAIVE=1"}
	f := explores(t, v.safety, 0, s)
	if t.Logf("a pending SIGTERM is ignored, %s: %s", s, f.fault); f.fault == "" {
		t.Error("a daemon that ignores a pending SIGTERM was not caught")
	}
	for n, b := range brokenFences() {
		s := situation{"CLIENTS=1", "REQUESTS=2"}
		if b.f.deeper != nil {
			s = append(s, "DEEP=1")
		}
		f := explores(t, v.safety, n+1, s)
		if f.fault == "" { // some show only with connections that do not keep the instance awake
			s = append(s, "QUIET=1")
			f = explores(t, v.safety, n+1, s)
		}
		if f.fault == "" {
			t.Errorf("%q was not caught", b.name)
			continue
		}
		// Without the assertions and end states, which would be found first.
		l := explores(t, v.fair, n+1, append(s[:1:1], "REQUESTS=1", "DEEP="+strconv.Itoa(yes(b.f.deeper != nil))), append(slices.Clone(fair), "-A", "-E")...)
		t.Logf("%q, %s: %s; liveness: %s", b.name, s, f.fault, cmp.Or(l.fault, "holds"))
	}
}

var update = flag.Bool("update", false, "write modeltest/steps.pml")

// TestFenceModelKnowsTheSteps checks that steps.pml is up to date, that a step
// without a body in the model is an error, and that another order in the code gives
// another steps.pml.
func TestFenceModelKnowsTheSteps(t *testing.T) {
	if all := tablesOfAll(t); *update {
		if err := os.WriteFile(filepath.Join("modeltest", "steps.pml"), []byte(all), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if all != modeltest.Steps {
		t.Error("modeltest/steps.pml is stale: run go test ./internal/host -run TestFenceModelKnowsTheSteps -update")
	}
	tables := func(f fence) (string, error) {
		return modelTables(modeltest.Model, []brokenFence{{name: "changed", f: f}})
	}
	std := standardFence()
	whole, err := tables(std)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []fence{{pause: without(std.pause, "look")}, {wake: before(std.wake, "thaw", "disarm")}, {deeper: instead(std.deeper, "deeper-look", disarm)}} {
		if changed, err := tables(f); err != nil || changed == whole {
			t.Errorf("the model does not follow the order of the code: %v", err)
		}
	}
	if _, err := tables(fence{pause: append(slices.Clone(std.pause), step{"new", func(*attempt) error { return nil }})}); err == nil {
		t.Error("a step was left out of the model")
	}
}
