package power

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"lull/internal/lib/errtest"
)

var update = flag.Bool("update", false, "write docs/reference/states.md")

func TestReferenceIsFresh(t *testing.T) {
	path := filepath.Join("..", "..", "..", "docs", "reference", "states.md")
	if *update {
		errtest.None(t, os.MkdirAll(filepath.Dir(path), 0o755))
		errtest.None(t, os.WriteFile(path, []byte(Reference()), 0o644))
	}
	got, err := os.ReadFile(path)
	errtest.None(t, err)
	if d := cmp.Diff(Reference(), string(got)); d != "" {
		t.Errorf("%s is stale, run go test ./internal/core/power -update:\n%s", path, d)
	}
}

func TestInstanceTable(t *testing.T) { checkTable(t, InstanceTable) }
func TestWorkerTable(t *testing.T)   { checkTable(t, WorkerTable) }

// checkTable checks the properties that every table must have.
func checkTable[S ~string](t *testing.T, tab *Table[S]) {
	seen := map[S]bool{}
	for _, s := range tab.States {
		if seen[s.Name] {
			t.Errorf("%s is there twice", s.Name)
		}
		seen[s.Name] = true
		if s.Doc == "" {
			t.Errorf("%s has no meaning", s.Name)
		}
		d := s.Deadline
		full := d.Name != "" && d.Owner != "" && d.Repair != "" && len(d.To) > 0
		if tab.IsTransitional(s.Name) != full {
			t.Errorf("%s is %s and has the deadline %+v", s.Name, s.Kind, d)
		}
		for _, to := range d.To {
			if err := checkCause(tab, s.Name, to, Timeout); err != nil {
				t.Errorf("the repair of %s: %v", s.Name, err)
			}
		}
		if (s.Kind == Final) != (len(tab.Next(s.Name)) == 0) {
			t.Errorf("%s is %s and has %d transitions", s.Name, s.Kind, len(tab.Next(s.Name)))
		}
	}
	pairs := map[[2]S]bool{}
	for _, tr := range tab.Transitions {
		if !seen[tr.From] || !seen[tr.To] || tr.From == tr.To || len(tr.Causes) == 0 {
			t.Errorf("transition %+v is not one", tr)
		}
		if pairs[[2]S{tr.From, tr.To}] {
			t.Errorf("transition %s to %s is there twice", tr.From, tr.To)
		}
		pairs[[2]S{tr.From, tr.To}] = true
		if slices.Contains(tr.Causes, Timeout) && !tab.IsTransitional(tr.From) {
			t.Errorf("%s times out and may rest", tr.From)
		}
	}
	reached := reach(tab, tab.Initial, nil)
	for s := range seen {
		if !reached[s] {
			t.Errorf("%s cannot be reached", s)
		}
		rests := false
		// The deadlines alone must lead to a resting or final state.
		for to := range reach(tab, []S{s}, []Cause{Timeout}) {
			row, _ := tab.State(to)
			rests = rests || row.Kind != Transitional
		}
		if !rests {
			t.Errorf("%s does not come to rest by its deadlines alone", s)
		}
	}
}

// reach returns the states reachable through the given causes, or through any
// cause if none is given.
func reach[S ~string](tab *Table[S], from []S, causes []Cause) map[S]bool {
	seen := map[S]bool{}
	for _, s := range from {
		seen[s] = true
	}
	for again := true; again; {
		again = false
		for _, tr := range tab.Transitions {
			open := causes == nil || slices.ContainsFunc(tr.Causes, func(c Cause) bool { return slices.Contains(causes, c) })
			if open && seen[tr.From] && !seen[tr.To] {
				seen[tr.To], again = true, true
			}
		}
	}
	return seen
}

// TestInstanceLegality checks every pair of states against a complete list of the
// legal transitions.
func TestInstanceLegality(t *testing.T) {
	want := map[Instance]string{
		Stopped:    "starting",
		Starting:   "running stopped stopping",
		Running:    "pausing stopped stopping",
		Pausing:    "paused running stopped stopping",
		Paused:     "hibernated reclaimed resuming stopped stopping",
		Reclaimed:  "hibernated resuming stopped stopping",
		Hibernated: "resuming stopped stopping",
		Resuming:   "hibernated running stopped stopping",
		Stopping:   "paused resuming running stopped",
	}
	checkMatrix(t, InstanceTable, want)
}

func TestWorkerLegality(t *testing.T) {
	want := map[Worker]string{
		WorkerPending:      "FAILED PROVISIONING TERMINATING",
		WorkerProvisioning: "FAILED STARTING STOPPED STOPPING TERMINATED TERMINATING UNKNOWN",
		WorkerStarting:     "FAILED RUNNING STOPPED STOPPING TERMINATED TERMINATING UNKNOWN",
		WorkerRunning:      "DRAINING STARTING STOPPED STOPPING TERMINATED TERMINATING UNKNOWN",
		WorkerDraining:     "RUNNING STARTING STOPPED STOPPING TERMINATED TERMINATING UNKNOWN",
		WorkerStopping:     "FAILED RUNNING STARTING STOPPED TERMINATED TERMINATING UNKNOWN",
		WorkerStopped:      "STARTING STOPPING TERMINATED TERMINATING UNKNOWN",
		WorkerTerminating:  "FAILED TERMINATED",
		WorkerTerminated:   "",
		WorkerFailed:       "PENDING STARTING STOPPED STOPPING TERMINATED TERMINATING",
		WorkerUnknown:      "FAILED STARTING STOPPED STOPPING TERMINATED TERMINATING",
	}
	checkMatrix(t, WorkerTable, want)
}

func checkMatrix[S ~string](t *testing.T, tab *Table[S], want map[S]string) {
	for _, from := range tab.All() {
		legal := strings.Fields(want[from])
		for _, to := range tab.All() {
			err := tab.Check(from, to)
			if ok := slices.Contains(legal, string(to)); ok != (err == nil) {
				t.Errorf("%s to %s: %v, want legal %v", from, to, err, ok)
			}
		}
	}
	if len(want) != len(tab.States) {
		t.Errorf("%d states, the matrix has %d", len(tab.States), len(want))
	}
}

func TestIdleNeverTerminates(t *testing.T) {
	for _, tr := range WorkerTable.Transitions {
		if slices.Contains(tr.Causes, Idle) {
			t.Errorf("%s to %s by idleness itself: the controller's verbs decide", tr.From, tr.To)
		}
	}
	for _, tr := range InstanceTable.Transitions {
		if slices.Contains(tr.Causes, Idle) && tr.To != Pausing {
			t.Errorf("idleness leads from %s to %s", tr.From, tr.To)
		}
	}
}

func TestErrors(t *testing.T) {
	for want, err := range map[string]error{
		"cannot take instance from stopped to paused: only starting may follow":     InstanceTable.Check(Stopped, Paused),
		"cannot take worker from TERMINATED to RUNNING: TERMINATED is final":        WorkerTable.Check(WorkerTerminated, WorkerRunning),
		`cannot take worker from "RUNNING" to "ASLEEP": no such state`:              WorkerTable.Check(WorkerRunning, "ASLEEP"),
		"cannot drain a worker that is STOPPED: only one that is RUNNING":           second(WorkerStopped.After(VerbDrain)),
		"cannot start a worker that is RUNNING: only one that is STOPPED or FAILED": second(WorkerRunning.After(VerbStart)),
	} {
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	illegal, ok := errors.AsType[*IllegalError](InstanceTable.Check(Stopped, Paused))
	if !ok || !slices.Equal(illegal.Legal, []string{"starting"}) {
		t.Errorf("%+v", illegal)
	}
}

// checkCause is Table.Check, and also requires that the transition is open to
// cause.
func checkCause[S ~string](t *Table[S], from, to S, cause Cause) error {
	if err := t.Check(from, to); err != nil {
		return err
	}
	if tr, _ := t.Find(from, to); !slices.Contains(tr.Causes, cause) {
		return fmt.Errorf("cannot take %s from %s to %s by %s: only by %s", t.Name, from, to, cause, tr.Causes)
	}
	return nil
}

func second[A any](_ A, err error) error { return err }

func TestVerbsAreCommands(t *testing.T) {
	for v, moves := range verbs {
		for from, to := range moves {
			if err := checkCause(WorkerTable, from, to, Command); err != nil {
				t.Errorf("%s: %v", v, err)
			}
		}
	}
	for _, tr := range WorkerTable.Transitions {
		if !slices.Contains(tr.Causes, Command) {
			continue
		}
		found := false
		for _, moves := range verbs {
			found = found || moves[tr.From] == tr.To
		}
		if !found {
			t.Errorf("no verb leads from %s to %s", tr.From, tr.To)
		}
	}
}

// allEC2 includes a state that EC2 does not document and a failed reading.
var allEC2 = []EC2{EC2Pending, EC2Running, EC2Stopping, EC2Stopped, EC2ShuttingDown, EC2Terminated, "rebooting", ""}

// TestObserveIsLegal makes every observation on every status, and checks that
// each change is a legal transition.
func TestObserveIsLegal(t *testing.T) {
	observed := map[[2]Worker]bool{}
	for _, w := range WorkerTable.All() {
		for _, s := range allEC2 {
			for mask := range 4 {
				o := Observation{State: s, Changed: mask&1 != 0, Addressed: mask&2 != 0}
				to := Observe(w, o)
				if to == w {
					continue
				}
				observed[[2]Worker{w, to}] = true
				if err := checkCause(WorkerTable, w, to, Observed); err != nil {
					t.Errorf("%+v: %v", o, err)
				}
			}
		}
	}
	for _, tr := range WorkerTable.Transitions {
		if slices.Contains(tr.Causes, Observed) && !observed[[2]Worker{tr.From, tr.To}] {
			t.Errorf("no observation leads from %s to %s", tr.From, tr.To)
		}
	}
}

func TestObserve(t *testing.T) {
	for _, tc := range []struct {
		name string
		from Worker
		o    Observation
		want Worker
	}{
		{"launch", WorkerProvisioning, Observation{EC2Pending, true, false}, WorkerProvisioning},
		{"launched", WorkerProvisioning, Observation{EC2Running, true, true}, WorkerStarting},
		{"no address yet", WorkerStarting, Observation{EC2Running, false, false}, WorkerStarting},
		{"in service", WorkerStarting, Observation{EC2Running, false, true}, WorkerRunning},
		{"start not taken effect", WorkerStarting, Observation{EC2Stopped, false, false}, WorkerStarting},
		{"start fell back", WorkerStarting, Observation{EC2Stopped, true, false}, WorkerStopped},
		{"stop not taken effect", WorkerStopping, Observation{EC2Running, false, true}, WorkerStopping},
		{"external start", WorkerStopped, Observation{EC2Running, true, true}, WorkerStarting},
		{"external stop", WorkerRunning, Observation{EC2Stopped, true, false}, WorkerStopped},
		{"external stop of a drain", WorkerDraining, Observation{EC2Stopping, true, false}, WorkerStopping},
		{"failed stays", WorkerFailed, Observation{EC2Running, false, true}, WorkerFailed},
		{"failed, started outside", WorkerFailed, Observation{EC2Running, true, true}, WorkerStarting},
		{"failed keeps its cause", WorkerFailed, Observation{"rebooting", true, false}, WorkerFailed},
		{"nothing read", WorkerRunning, Observation{"", true, false}, WorkerRunning},
		{"strange", WorkerRunning, Observation{"rebooting", true, false}, WorkerUnknown},
		{"terminate not taken effect", WorkerTerminating, Observation{EC2Running, true, true}, WorkerTerminating},
		{"gone", WorkerTerminating, Observation{EC2Terminated, true, false}, WorkerTerminated},
		{"no instance of its own", WorkerPending, Observation{EC2Running, true, true}, WorkerPending},
	} {
		if got := Observe(tc.from, tc.o); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}

// TestWorkerSequences checks that no sequence of verbs, observations and expired
// deadlines leaves the table, and that deadlines alone lead to a state that may
// last.
func TestWorkerSequences(t *testing.T) {
	all := []Verb{VerbStart, VerbStop, VerbDrain, VerbCancelDrain, VerbTerminate, VerbRelaunch}
	rapid.Check(t, func(r *rapid.T) {
		w := rapid.SampledFrom(WorkerTable.Initial).Draw(r, "initial")
		move := func(to Worker, cause Cause) {
			if to == w {
				return
			}
			if err := checkCause(WorkerTable, w, to, cause); err != nil {
				r.Fatal(err)
			}
			w = to
		}
		r.Repeat(map[string]func(*rapid.T){
			"verb": func(r *rapid.T) {
				if to, err := w.After(rapid.SampledFrom(all).Draw(r, "verb")); err == nil {
					move(to, Command)
				}
			},
			"observe": func(r *rapid.T) {
				move(Observe(w, Observation{rapid.SampledFrom(allEC2).Draw(r, "EC2"), rapid.Bool().Draw(r, "changed"), rapid.Bool().Draw(r, "addressed")}), Observed)
			},
			"deadline": func(r *rapid.T) {
				if row, _ := WorkerTable.State(w); row.Kind == Transitional {
					move(rapid.SampledFrom(row.Deadline.To).Draw(r, "repair"), Timeout)
				}
			},
			"": func(r *rapid.T) {
				if !WorkerTable.Has(w) {
					r.Fatalf("%s is no status", w)
				}
			},
		})
		for range len(WorkerTable.States) {
			row, _ := WorkerTable.State(w)
			if row.Kind != Transitional {
				return
			}
			move(row.Deadline.To[0], Timeout)
		}
		r.Fatalf("does not come to rest: %s", w)
	})
}

func TestCapabilities(t *testing.T) {
	can := func(c Capabilities) string {
		var names []string
		for _, s := range InstanceTable.All() {
			if c.Reaches(s) {
				names = append(names, string(s))
			}
		}
		return strings.Join(names, " ")
	}
	if got, want := can(Capabilities{}), "stopped starting running stopping"; got != want {
		t.Errorf("without any: %s", got)
	}
	if got, want := can(Capabilities{Freeze: true}), "stopped starting running pausing paused resuming stopping"; got != want {
		t.Errorf("freeze: %s", got)
	}
	if got := can(Capabilities{Freeze: true, Reclaim: true, Hibernate: true}); len(strings.Fields(got)) != len(InstanceTable.States) {
		t.Errorf("all: %s", got)
	}
	for _, s := range InstanceTable.All() {
		if s.Asleep() != slices.Contains([]Instance{Paused, Reclaimed, Hibernated}, s) {
			t.Errorf("%s asleep: %v", s, s.Asleep())
		}
	}
}

// TestMermaid checks that every line of the diagram has one of the forms that
// Mermaid accepts.
func TestMermaid(t *testing.T) {
	line := regexp.MustCompile(`^(stateDiagram-v2|    (\[\*\]|[A-Za-z]+) --> (\[\*\]|[A-Za-z]+)(: [a-z, ]+)?|    classDef .*|    class [A-Za-z]+ passing)$`)
	for _, text := range []string{InstanceTable.Mermaid(), WorkerTable.Mermaid()} {
		for _, l := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
			if !line.MatchString(l) {
				t.Errorf("line %q", l)
			}
		}
	}
}
