package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// proseFile lists the test files that still assert wording, with the number of
// assertions in each. A number may only become smaller, and no file is added.
const proseFile = "testdata/prose.txt"

// proseIn returns the calls of strings.Contains in a test file whose second
// argument is a literal of at least three words.
func proseIn(name string, src []byte) ([]string, error) {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, name, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var found []string
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) != 2 {
			return true
		}
		fun, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || fun.Sel.Name != "Contains" {
			return true
		}
		if pkg, ok := fun.X.(*ast.Ident); !ok || pkg.Name != "strings" {
			return true
		}
		ast.Inspect(call.Args[1], func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				return true
			}
			if text, err := strconv.Unquote(lit.Value); err == nil && len(strings.Fields(text)) > 2 {
				found = append(found, fmt.Sprintf("%s: %q", fset.Position(lit.Pos()), text))
			}
			return true
		})
		return true
	})
	return found, nil
}

// TestAssertionsPinNoProse fails on a new assertion of wording: tests assert
// codes, types and structured fields, and wording lives in golden files. It also
// fails if an entry of proseFile is too high; go test -update lowers it.
func TestAssertionsPinNoProse(t *testing.T) {
	b, err := os.ReadFile(proseFile)
	if err != nil {
		t.Fatal(err)
	}
	allowed := map[string]int{}
	for line := range strings.Lines(string(b)) {
		var n int
		var file string
		if _, err := fmt.Sscan(line, &n, &file); err != nil {
			t.Fatalf("%s: %q: %v", proseFile, line, err)
		}
		allowed[file] = n
	}
	now := map[string]int{}
	root := filepath.Join("..", "..")
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "node_modules" || d.Name() == "bin"):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		found, err := proseIn(name, src)
		if err != nil {
			return err
		}
		if len(found) > allowed[name] {
			t.Errorf("%d assertions of wording, %d allowed; assert a code, a type or a field instead:\n%s", len(found), allowed[name], strings.Join(found, "\n"))
		} else if len(found) > 0 {
			now[name] = len(found)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if t.Failed() || maps.Equal(now, allowed) {
		return
	}
	if !*update {
		t.Fatalf("%s allows more than there is; run go test ./internal/archtest -run AssertionsPinNoProse -update", proseFile)
	}
	var out strings.Builder
	for _, name := range slices.Sorted(maps.Keys(now)) {
		fmt.Fprintln(&out, now[name], name)
	}
	if err := os.WriteFile(proseFile, []byte(out.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestProseBites(t *testing.T) {
	for _, tc := range []struct {
		body string
		want int
	}{
		{`strings.Contains(s, "one two three")`, 1},
		{`strings.Contains(s, "one two " + "three four five")`, 1},
		{`!strings.Contains(f(s), fmt.Sprintf("of %d not %d", 1, 2))`, 1},
		{`strings.Contains(s, "one two")`, 0},
		{`strings.Contains(s, want)`, 0},
		{`strings.HasPrefix(s, "one two three")`, 0},
		{`bytes.Contains(s, "one two three")`, 0},
	} {
		found, err := proseIn("x_test.go", []byte("package x; func f() { _ = "+tc.body+" }"))
		if err != nil || len(found) != tc.want {
			t.Errorf("%s: got %v %v, want %d", tc.body, found, err, tc.want)
		}
	}
}
