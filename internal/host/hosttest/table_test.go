package hosttest_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"lull/internal/host/hosttest"
	"lull/internal/lib/errtest"
)

var update = flag.Bool("update", false, "write the table in docs/reference/proofs.md")

// TestTable checks that the documented table of rows and runtimes is that of the
// suite.
func TestTable(t *testing.T) {
	const file, begin, end = "../../../docs/reference/proofs.md", "<!-- suite -->\n", "<!-- end of suite -->\n"
	b, err := os.ReadFile(file)
	errtest.None(t, err)
	before, rest, found := strings.Cut(string(b), begin)
	was, after, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("no %sand %sin %s", begin, end, file)
	}
	if was == table() {
		return
	}
	if !*update {
		t.Fatal("the table of the suite is stale: make generate")
	}
	errtest.None(t, os.WriteFile(file, []byte(before+begin+table()+end+after), 0o644))
}

// table returns a table with a line for each row of the suite and a column for each
// runtime.
func table() string {
	var b strings.Builder
	b.WriteString("\n| row |")
	for _, s := range hosttest.Subjects() {
		fmt.Fprintf(&b, " %s |", s.Name)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(hosttest.Subjects())) + "\n")
	for _, r := range hosttest.Suite(1, nil) {
		fmt.Fprintf(&b, "| %s |", r.Name)
		for _, s := range hosttest.Subjects() {
			cell := "runs"
			if why := s.Lacks(r.Needs); why != "" {
				cell = "not: " + why
			}
			fmt.Fprintf(&b, " %s |", cell)
		}
		b.WriteString("\n")
	}
	b.WriteString("\n")
	return b.String()
}
