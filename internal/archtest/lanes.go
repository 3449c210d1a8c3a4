package archtest

import (
	"fmt"
	"go/ast"
	"regexp"
	"slices"
	"strings"
)

// lanes are the variables of the Makefile that place packages in a lane of make
// test. Packages in none of them are pure: their tests start no program.
var lanes = []string{"RACE", "MIXED", "PROGRAMS", "SERVERS", "GUESTS", "MACHINES"}

// checked are the lanes of make check beside the pure one. It runs them with
// -short, which leaves tests that start programs out.
var checked = []string{"RACE", "MIXED"}

// Lanes holds the lists of the Makefile to the packages: no package in two lanes,
// no pattern that matches nothing, and nothing in make check that starts a
// program.
func Lanes(t *Tree, makefile string) []Fault {
	var faults []Fault
	lane := map[string]string{}
	for _, name := range lanes {
		m := regexp.MustCompile(`(?m)^` + name + ` :=((?:.*\\\n)*.*)$`).FindStringSubmatch(makefile)
		if m == nil {
			faults = append(faults, Fault{"Makefile", "there is no list " + name})
			continue
		}
		for pattern := range strings.FieldsSeq(strings.ReplaceAll(m[1], "\\\n", " ")) {
			n := 0
			root, subtree := strings.CutSuffix(strings.TrimPrefix(pattern, "./"), "/...")
			for _, dir := range t.Dirs() {
				if dir != root && !(subtree && under(dir, root)) {
					continue
				}
				n++
				if other := lane[dir]; other != "" {
					faults = append(faults, Fault{dir, fmt.Sprintf("the package is in %s and in %s", other, name)})
				}
				lane[dir] = name
			}
			if n == 0 {
				faults = append(faults, Fault{"Makefile", fmt.Sprintf("%s: %s matches no package", name, pattern)})
			}
		}
	}
	for _, dir := range t.Dirs() {
		if lane[dir] != "" && !slices.Contains(checked, lane[dir]) {
			continue
		}
		for _, f := range t.Packages[dir].Files {
			switch {
			case !f.Test || !t.starts(f, map[string]bool{}):
			case lane[dir] == "":
				faults = append(faults, Fault{f.Path, "the tests start programs: put the package in MIXED, PROGRAMS, SERVERS, GUESTS or MACHINES of the Makefile"})
			case !asksShort(f):
				faults = append(faults, Fault{f.Path, "make check starts no program: skip the tests that do if testing.Short()"})
			}
		}
	}
	return faults
}

// starts reports whether a file imports what starts programs, itself or through
// packages for tests.
func (t *Tree) starts(f *File, seen map[string]bool) bool {
	for _, spec := range f.AST.Imports {
		to := strings.Trim(spec.Path.Value, "\"`")
		if to == "os/exec" || strings.HasPrefix(to, "github.com/chromedp/") {
			return true
		}
		dir, ok := own(to)
		if !ok || !strings.HasSuffix(dir, "test") || seen[dir] || t.Packages[dir] == nil {
			continue
		}
		seen[dir] = true
		for _, f := range t.Packages[dir].Files {
			if !f.Test && t.starts(f, seen) {
				return true
			}
		}
	}
	return false
}

// asksShort reports whether a file calls testing.Short.
func asksShort(f *File) bool {
	found := false
	ast.Inspect(f.AST, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		found = found || ok && selects(call.Fun, "testing", "Short")
		return !found
	})
	return found
}
