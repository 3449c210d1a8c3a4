package archtest_test

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

// lacking matches the message of a test that misses something on the machine.
// If everything can be installed (as root), such a test is a fault and not a
// skip: the Makefile's list of packages, or the machine, is incomplete.
var lacking = regexp.MustCompile(`not installed|not found in \$PATH|[Nn]eeds? root|needs CAP_|needs python|is missing|` +
	`cannot (make|set) namespaces|no guest kernel|no control group|SKIP (sshd|tmux|desktop|logind|journal)`)

// skip is a test that was left out, and why.
type skip struct{ test, reason string }

// slow is a test with its duration.
type slow struct {
	test    string
	seconds float64
}

// record holds the results of one step of make test.
type record struct {
	skipped []skip        // with their last output
	ran     []slow        // without subtests
	failed  []failure     // without tests that fail only because of a subtest, and without packages that contain a failed test
	running []failure     // tests that began and did not end: they hung, or the whole package was ended
	took    time.Duration // from the first event to the last
}

// failure is a test or package that failed, with its output.
type failure struct {
	test   string
	output []string
}

// excerpt is the number of lines of output to show from each end of what a
// failed test wrote.
const excerpt = 8

// brief returns the first and last lines of f's output, from a panic on if there is
// one.
func (f failure) brief() []string {
	if i := slices.IndexFunc(f.output, func(line string) bool {
		return strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ")
	}); i >= 0 {
		f.output = f.output[i:]
	}
	if len(f.output) <= 2*excerpt {
		return f.output
	}
	return slices.Concat(f.output[:excerpt], []string{"..."}, f.output[len(f.output)-excerpt:])
}

// readRecord reads what `go test -json` wrote. A last line that was cut short is
// left out.
func readRecord(r io.Reader) (got record, err error) {
	var first, last time.Time
	said, running := map[string][]string{}, map[string]bool{}
	in := bufio.NewScanner(r)
	in.Buffer(nil, 16<<20)
	for in.Scan() {
		var e struct {
			Action, Package, Test, Output, ImportPath string
			Elapsed                                   float64
			Time                                      time.Time
		}
		if err := json.Unmarshal(in.Bytes(), &e); err != nil {
			if !in.Scan() {
				break
			}
			return record{}, fmt.Errorf("record of tests: %w", err)
		}
		if first.IsZero() {
			first = e.Time
		}
		if e.Time.After(last) {
			last = e.Time
		}
		pkg, _, _ := strings.Cut(cmp.Or(e.Package, e.ImportPath), " ")
		name := strings.TrimSpace(strings.TrimPrefix(pkg, "lull/") + " " + e.Test)
		switch e.Action {
		case "output", "build-output":
			if line := strings.TrimSpace(e.Output); line != "" && !strings.HasPrefix(line, "--- ") && !strings.HasPrefix(line, "=== ") {
				said[name] = append(said[name], line)
			}
		case "run", "cont":
			running[name] = true
		case "pause":
			delete(running, name)
		case "skip", "pass", "fail":
			delete(running, name)
			if e.Action == "skip" && e.Test != "" {
				got.skipped = append(got.skipped, skip{name, slices.Concat([]string{""}, said[name])[len(said[name])]})
			}
			if e.Action != "skip" && e.Test != "" && !strings.Contains(e.Test, "/") {
				got.ran = append(got.ran, slow{name, e.Elapsed})
			}
			// A test fails after its subtests, and a package after its tests.
			within := func(f failure) bool {
				return strings.HasPrefix(f.test, name+"/") || e.Test == "" && strings.HasPrefix(f.test, name+" ")
			}
			if e.Action == "fail" && !slices.ContainsFunc(got.failed, within) {
				got.failed = append(got.failed, failure{name, said[name]})
			}
			delete(said, name)
		}
	}
	for name := range running {
		got.running = append(got.running, failure{name, said[name]})
	}
	slices.SortFunc(got.running, func(a, b failure) int { return cmp.Compare(a.test, b.test) })
	got.took = last.Sub(first)
	return got, in.Err()
}

// TestNothingWasLeftOut lists the skipped tests of a whole run, the twenty
// slowest, the duration of each step, and last the tests that did not end and
// those that failed. It fails if there are any, or if a test was skipped
// because something is missing that `make test` installs. It reads the records
// in LULL_RECORDS, and is the last step of make test.
func TestNothingWasLeftOut(t *testing.T) {
	folder := os.Getenv("LULL_RECORDS")
	if folder == "" {
		t.Skip("make test gives it the records of its runs")
	}
	files, err := filepath.Glob(filepath.Join(folder, "tests-*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no records of tests in %s: %v", folder, err)
	}
	slices.Sort(files)
	var slowest []slow
	var steps, bad []string
	for _, name := range files {
		f, err := os.Open(name)
		errtest.None(t, err)
		got, err := readRecord(f)
		f.Close()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, s := range got.skipped {
			fmt.Printf("skipped: %s: %s\n", s.test, s.reason)
			if lacking.MatchString(s.reason) && os.Getuid() == 0 {
				t.Errorf("%s was left out because something is missing: %s", s.test, s.reason)
			}
		}
		slowest = append(slowest, got.ran...)
		step := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(name), "tests-"), ".json")
		steps = append(steps, fmt.Sprintf("step: %6.0f s: %s, %d tests", got.took.Seconds(), step, len(got.ran)))
		list := func(what string, failures []failure) {
			for _, f := range failures {
				bad = append(bad, fmt.Sprintf("%s: %s: %s", what, step, f.test))
				if len(bad) > 60 { // the list fits on the last page of a log
					continue
				}
				for _, line := range f.brief() {
					bad = append(bad, "    "+line)
				}
			}
		}
		list("did not end", got.running)
		list("failed", got.failed)
	}
	slices.SortFunc(slowest, func(a, b slow) int { return cmp.Compare(b.seconds, a.seconds) })
	for _, s := range slowest[:min(20, len(slowest))] {
		fmt.Printf("slowest: %6.1f s: %s\n", s.seconds, s.test)
	}
	for _, line := range slices.Concat(steps, bad) {
		fmt.Println(line)
	}
	if len(bad) > 0 {
		t.Fail()
	}
}

// TestRecord checks what is read of a run: skipped tests with their reasons,
// failures where they happened, and tests that did not end.
func TestRecord(t *testing.T) {
	const lines = `{"Time":"2026-01-02T03:04:05Z","Action":"run","Package":"lull/internal/a","Test":"TestOne"}
{"Action":"output","Package":"lull/internal/a","Test":"TestOne","Output":"=== RUN   TestOne\n"}
{"Action":"output","Package":"lull/internal/a","Test":"TestOne","Output":"    a_test.go:7: redis-server is not installed\n"}
{"Action":"output","Package":"lull/internal/a","Test":"TestOne","Output":"--- SKIP: TestOne (0.00s)\n"}
{"Action":"skip","Package":"lull/internal/a","Test":"TestOne"}
{"Action":"output","Package":"lull/internal/a","Test":"TestTwo","Output":"    a_test.go:9: fine\n"}
{"Action":"pass","Package":"lull/internal/a","Test":"TestTwo/part","Elapsed":2}
{"Action":"pass","Package":"lull/internal/a","Test":"TestTwo","Elapsed":2.5}
{"Action":"run","Package":"lull/internal/c","Test":"TestBad"}
{"Action":"run","Package":"lull/internal/c","Test":"TestBad/part"}
{"Action":"output","Package":"lull/internal/c","Test":"TestBad/part","Output":"    c_test.go:3: got 1\n"}
{"Action":"fail","Package":"lull/internal/c","Test":"TestBad/part","Elapsed":1}
{"Action":"fail","Package":"lull/internal/c","Test":"TestBad","Elapsed":1}
{"Action":"run","Package":"lull/internal/c","Test":"TestStuck"}
{"Action":"pause","Package":"lull/internal/c","Test":"TestStuck"}
{"Action":"cont","Package":"lull/internal/c","Test":"TestStuck"}
{"Action":"output","Package":"lull/internal/c","Test":"TestStuck","Output":"    c_test.go:5: sent\n"}
{"Action":"output","Package":"lull/internal/c","Test":"TestStuck","Output":"panic: test timed out\n"}
{"Action":"run","Package":"lull/internal/c","Test":"TestWaits"}
{"Action":"pause","Package":"lull/internal/c","Test":"TestWaits"}
{"Action":"fail","Package":"lull/internal/c","Elapsed":3}
{"Action":"build-output","ImportPath":"lull/internal/d [lull/internal/d.test]","Output":"d.go:1: undefined: x\n"}
{"Action":"fail","Package":"lull/internal/d"}
{"Time":"2026-01-02T03:04:35Z","Action":"skip","Package":"lull/internal/b"}
{"Action":"out`
	got, err := readRecord(strings.NewReader(lines))
	errtest.None(t, err)
	want := record{
		skipped: []skip{{"internal/a TestOne", "a_test.go:7: redis-server is not installed"}},
		ran:     []slow{{"internal/a TestTwo", 2.5}, {"internal/c TestBad", 1}},
		failed: []failure{
			{"internal/c TestBad/part", []string{"c_test.go:3: got 1"}},
			{"internal/d", []string{"d.go:1: undefined: x"}},
		},
		running: []failure{{"internal/c TestStuck", []string{"c_test.go:5: sent", "panic: test timed out"}}},
		took:    30 * time.Second,
	}
	if !reflect.DeepEqual(got, want) || !lacking.MatchString(got.skipped[0].reason) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if brief := got.running[0].brief(); !slices.Equal(brief, []string{"panic: test timed out"}) {
		t.Errorf("of a panic: %q", brief)
	}
	if _, err := readRecord(strings.NewReader("not a record\n{}\n")); err == nil {
		t.Error("a line that is no record was read")
	}
}
