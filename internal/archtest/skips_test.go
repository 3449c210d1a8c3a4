package archtest_test

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// lacking is how a test says that the machine has not got what it needs. Where
// everything may be installed (as root) such a test is not left out but a fault:
// of the list of packages in the Makefile, or of the machine.
var lacking = regexp.MustCompile(`not installed|not found in \$PATH|[Nn]eeds? root|needs CAP_|needs python|is missing|` +
	`cannot (make|set) namespaces|no guest kernel|no control group|SKIP (sshd|tmux|desktop|logind|journal)`)

// skip is a test that was left out, and why.
type skip struct{ test, reason string }

// slow is a test that ran, and for how long.
type slow struct {
	test    string
	seconds float64
}

// records reads what `go test -json` wrote. It returns the tests that were
// skipped, with what they said last, all that ran, without subtests, and the
// time from the first event to the last.
func records(r io.Reader) (all []skip, ran []slow, took time.Duration, err error) {
	var first, last time.Time
	said := map[string]string{}
	in := bufio.NewScanner(r)
	in.Buffer(nil, 16<<20)
	for in.Scan() {
		var e struct {
			Action, Package, Test, Output string
			Elapsed                       float64
			Time                          time.Time
		}
		if err := json.Unmarshal(in.Bytes(), &e); err != nil {
			return nil, nil, 0, fmt.Errorf("record of tests: %w", err)
		}
		if first.IsZero() {
			first = e.Time
		}
		if e.Time.After(last) {
			last = e.Time
		}
		if e.Test == "" {
			continue
		}
		name := strings.TrimPrefix(e.Package, "lull/") + " " + e.Test
		switch e.Action {
		case "output":
			if line := strings.TrimSpace(e.Output); line != "" && !strings.HasPrefix(line, "--- ") && !strings.HasPrefix(line, "=== ") {
				said[name] = line
			}
		case "skip":
			all = append(all, skip{name, said[name]})
		case "pass", "fail":
			delete(said, name)
			if !strings.Contains(e.Test, "/") {
				ran = append(ran, slow{name, e.Elapsed})
			}
		}
	}
	return all, ran, last.Sub(first), in.Err()
}

// TestNothingWasLeftOut lists what the tests of a whole run skipped, how long
// each step took and the twenty slowest tests, and fails when one was skipped because something is missing
// that `make test` installs. It reads the records in LULL_RECORDS, and is the
// last thing that make test runs.
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
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		all, ran, took, err := records(f)
		f.Close()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, s := range all {
			fmt.Printf("skipped: %s: %s\n", s.test, s.reason)
			if lacking.MatchString(s.reason) && os.Getuid() == 0 {
				t.Errorf("%s was left out because something is missing: %s", s.test, s.reason)
			}
		}
		slowest = append(slowest, ran...)
		step := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(name), "tests-"), ".json")
		fmt.Printf("step: %6.0f s: %s, %d tests\n", took.Seconds(), step, len(ran))
	}
	slices.SortFunc(slowest, func(a, b slow) int { return cmp.Compare(b.seconds, a.seconds) })
	for _, s := range slowest[:min(20, len(slowest))] {
		fmt.Printf("slowest: %6.1f s: %s\n", s.seconds, s.test)
	}
}

// TestSkippedIsListed: with its reason, and neither what passed nor what a
// package said.
func TestSkippedIsListed(t *testing.T) {
	const record = `{"Time":"2026-01-02T03:04:05Z","Action":"run","Package":"lull/internal/a","Test":"TestOne"}
{"Action":"output","Package":"lull/internal/a","Test":"TestOne","Output":"=== RUN   TestOne\n"}
{"Action":"output","Package":"lull/internal/a","Test":"TestOne","Output":"    a_test.go:7: redis-server is not installed\n"}
{"Action":"output","Package":"lull/internal/a","Test":"TestOne","Output":"--- SKIP: TestOne (0.00s)\n"}
{"Action":"skip","Package":"lull/internal/a","Test":"TestOne"}
{"Action":"output","Package":"lull/internal/a","Test":"TestTwo","Output":"    a_test.go:9: fine\n"}
{"Action":"pass","Package":"lull/internal/a","Test":"TestTwo/part","Elapsed":2}
{"Action":"pass","Package":"lull/internal/a","Test":"TestTwo","Elapsed":2.5}
{"Time":"2026-01-02T03:04:35Z","Action":"skip","Package":"lull/internal/b"}
`
	got, ran, took, err := records(strings.NewReader(record))
	if err != nil {
		t.Fatal(err)
	}
	want := []skip{{"internal/a TestOne", "a_test.go:7: redis-server is not installed"}}
	if !slices.Equal(got, want) || !lacking.MatchString(got[0].reason) {
		t.Errorf("got %v, want %v", got, want)
	}
	if want := []slow{{"internal/a TestTwo", 2.5}}; !slices.Equal(ran, want) {
		t.Errorf("ran: %v, want %v", ran, want)
	}
	if took != 30*time.Second {
		t.Errorf("took %s, want 30s", took)
	}
	if _, _, _, err := records(strings.NewReader("not a record\n")); err == nil {
		t.Error("a line that is no record was read")
	}
}
