package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

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

// TestAssertionsPinNoProse checks that tests assert codes, types and structured
// fields. Wording belongs in golden files.
func TestAssertionsPinNoProse(t *testing.T) {
	root := os.DirFS(filepath.Join("..", ".."))
	if err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "node_modules" || d.Name() == "bin"):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, "_test.go"):
			return nil
		}
		src, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		found, err := proseIn(name, src)
		for _, at := range found {
			t.Errorf("%s: an assertion of wording; assert a code, a type or a field instead", at)
		}
		return err
	}); err != nil {
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
