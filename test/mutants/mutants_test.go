// Package mutants proves that the tests of what lull must never do can fail: it
// breaks the code in known ways, and the tests must detect each of them. The tree
// is not changed: go test builds the edited files as an overlay.
package mutants

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
)

const root = "../.."

// asks matches the names of mutants in a text.
var asks = regexp.MustCompile(`mutantOn\("([a-z0-9-]+)"\)`)

// mutated returns the content of each edited file, by its name in the tree.
func mutated(t *testing.T) map[string]string {
	t.Helper()
	tree := map[string]string{}
	err := filepath.WalkDir(filepath.Join(root, "internal"), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		tree[strings.TrimPrefix(path, root+"/")] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, e := range edits {
		var in []string
		for file, text := range tree {
			for range strings.Count(text, e.old) {
				in = append(in, file)
			}
		}
		if len(in) != 1 {
			t.Errorf("not once in the tree, but in %v: %s", in, e.old)
			continue
		}
		tree[in[0]] = strings.Replace(tree[in[0]], e.old, e.new, 1)
		out[in[0]] = tree[in[0]]
	}
	return out
}

// TestEditsApply checks that the mutants match the code: each edit applies and
// the result can be parsed, each mutant has an edit, and each test exists.
func TestEditsApply(t *testing.T) {
	asked := map[string]bool{}
	for file, text := range mutated(t) {
		if _, err := parser.ParseFile(token.NewFileSet(), file, text, 0); err != nil {
			t.Error(err)
		}
		for _, m := range asks.FindAllStringSubmatch(text, -1) {
			asked[m[1]] = true
		}
	}
	for _, m := range mutants {
		if !asked[m.name] {
			t.Errorf("no edit makes the mutant %s", m.name)
		}
		delete(asked, m.name)
		for _, x := range m.tests {
			if !declared(t, x) {
				t.Errorf("%s: %s has no %s", m.name, x.folder, x.name)
			}
		}
	}
	for name := range asked {
		t.Errorf("an edit asks for %s, which is no mutant", name)
	}
}

// declared reports whether a test is declared in its folder.
func declared(t *testing.T, x test) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, x.folder, "*_test.go"))
	errtest.None(t, err)
	return slices.ContainsFunc(files, func(name string) bool {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		errtest.None(t, err)
		return slices.ContainsFunc(f.Decls, func(d ast.Decl) bool {
			fn, ok := d.(*ast.FuncDecl)
			return ok && fn.Recv == nil && fn.Name.Name == x.name
		})
	})
}

// TestMutants runs each test of each mutant LULL_MUTANTS times, each with a new
// seed and at the number of draws of make test. Nine in ten runs must fail, and
// without a mutant all must pass. LULL_MUTANT selects mutants by a regular
// expression.
func TestMutants(t *testing.T) {
	if os.Getenv("LULL_MUTANTS") == "" {
		t.Skip("the number of runs is in LULL_MUTANTS: make soak has it")
	}
	runs := scaletest.Count(t, "LULL_MUTANTS", 10)
	wanted, err := regexp.Compile(os.Getenv("LULL_MUTANT"))
	errtest.None(t, err)
	b := builder{t: t, dir: t.TempDir(), binaries: map[string]string{}}
	b.overlay()
	healthy := map[test]bool{}
	for _, m := range mutants {
		for _, x := range m.tests {
			if !wanted.MatchString(m.name + "/" + x.name) {
				continue
			}
			t.Run(m.name+"/"+x.name, func(t *testing.T) {
				binary := b.build(t, x.folder)
				if !healthy[x] {
					if failed, out := run(t, binary, x, ""); failed {
						t.Fatalf("it fails without a mutant:\n%s", out)
					}
					healthy[x] = true
				}
				convicted := 0
				for range runs {
					failed, _ := run(t, binary, x, m.name)
					if failed {
						convicted++
					}
				}
				t.Logf("convicted in %d of %d runs", convicted, runs)
				if convicted*10 < runs*9 {
					t.Errorf("convicted in %d of %d runs", convicted, runs)
				}
			})
		}
	}
}

// builder builds each test binary once, with all edits.
type builder struct {
	t        *testing.T
	dir      string
	binaries map[string]string
}

func (b *builder) overlay() {
	replace := map[string]string{}
	put := func(file, text string) {
		abs, err := filepath.Abs(filepath.Join(root, file))
		if replace[abs] != "" {
			return // every package gets this file only once
		}
		at := filepath.Join(b.dir, fmt.Sprintf("%d.go", len(replace)))
		if err == nil {
			err = os.WriteFile(at, []byte(text), 0o600)
		}
		if err != nil {
			b.t.Fatal(err)
		}
		replace[abs] = at
	}
	for file, text := range mutated(b.t) {
		put(file, text)
		name := regexp.MustCompile(`(?m)^package (\w+)`).FindStringSubmatch(text)[1]
		put(filepath.Join(filepath.Dir(file), "mutant_on.go"), `package `+name+`

import "os"

var mutantName = os.Getenv("LULL_MUTANT_ON")

func mutantOn(name string) bool { return mutantName == name }
`)
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err == nil {
		err = os.WriteFile(filepath.Join(b.dir, "overlay.json"), text, 0o600)
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *builder) build(t *testing.T, folder string) string {
	t.Helper()
	if name := b.binaries[folder]; name != "" {
		return name
	}
	name := filepath.Join(b.dir, strings.ReplaceAll(folder, "/", "-")+".test")
	c := exec.CommandContext(t.Context(), "go", "test", "-c", "-vet=off", "-overlay", filepath.Join(b.dir, "overlay.json"), "-o", name, "./"+folder)
	c.Dir = root
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("cannot build the mutants of %s: %v\n%s", folder, err, out)
	}
	b.binaries[folder] = name
	return name
}

// run runs a test of a binary and reports whether it failed. A test that hangs
// counts as failed.
func run(t *testing.T, binary string, x test, mutant string) (failed bool, out []byte) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, binary, "-test.run", "^"+x.name+"$", "-test.timeout", "4m")
	c.Dir = filepath.Join(root, x.folder)
	c.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "LULL_") }), "LULL_MUTANT_ON="+mutant)
	out, err := c.CombinedOutput()
	if err != nil && !bytes.Contains(out, []byte("--- FAIL")) && !bytes.Contains(out, []byte("panic:")) {
		t.Fatalf("cannot run %s: %v\n%s", x.name, err, out)
	}
	return err != nil, out
}
