// Package archtest holds the guard-rails of the source tree: the import law, what
// the small helpers may carry, package comments, names, sleeps in tests and
// unfinished work. It also draws docs/reference/topology.md from the imports.
//
// Its tests parse the sources in process, so that go test caches them rightly.
// A rule is a function from a Tree to faults, and is tested on trees that
// break it. It reads; it never changes a source.
package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// Module is the path of the module whose sources are read.
const Module = "lull"

// roots are the folders that hold Go sources.
var roots = []string{"cmd", "internal", "bench", "demo", "test"}

// File is one parsed source file.
type File struct {
	Path string // slash-separated, from the root of the module
	Test bool   // its name ends in _test.go
	AST  *ast.File
}

// Package is a folder with Go files.
type Package struct {
	Dir   string // "internal/core/idle"
	Files []*File
}

// Tree is the module's sources.
type Tree struct {
	Fset     *token.FileSet
	Packages map[string]*Package // by Dir
}

// Fault is a broken rule at a place.
type Fault struct {
	Where string // file:line or folder
	What  string
}

func (f Fault) String() string { return f.Where + ": " + f.What }

// Load parses every Go file under the module's roots, whatever its build tags.
// testdata and folders that begin with a dot or underscore are left out.
func Load(module fs.FS) (*Tree, error) {
	t := &Tree{Fset: token.NewFileSet(), Packages: map[string]*Package{}}
	for _, root := range roots {
		if _, err := fs.Stat(module, root); err != nil {
			continue
		}
		if err := fs.WalkDir(module, root, func(name string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			base := path.Base(name)
			if d.IsDir() && (base == "testdata" || base == "node_modules" || strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_")) {
				return fs.SkipDir
			}
			if d.IsDir() || path.Ext(name) != ".go" {
				return nil
			}
			return t.add(module, name)
		}); err != nil {
			return nil, fmt.Errorf("cannot read the sources: %w", err)
		}
	}
	return t, nil
}

func (t *Tree) add(module fs.FS, name string) error {
	src, err := fs.ReadFile(module, name)
	if err != nil {
		return err
	}
	parsed, err := parser.ParseFile(t.Fset, name, src, parser.ParseComments)
	if err != nil {
		return err
	}
	dir := path.Dir(name)
	p := t.Packages[dir]
	if p == nil {
		p = &Package{Dir: dir}
		t.Packages[dir] = p
	}
	p.Files = append(p.Files, &File{Path: name, Test: strings.HasSuffix(name, "_test.go"), AST: parsed})
	return nil
}

// Dirs lists the packages in order.
func (t *Tree) Dirs() []string {
	dirs := make([]string, 0, len(t.Packages))
	for dir := range t.Packages {
		dirs = append(dirs, dir)
	}
	slices.Sort(dirs)
	return dirs
}

// where names a place in the sources.
func (t *Tree) where(pos token.Pos) string {
	p := t.Fset.Position(pos)
	return fmt.Sprintf("%s:%d", p.Filename, p.Line)
}

// imports yields each import of a file: its path and place.
func (f *File) imports(yield func(string, token.Pos)) {
	for _, spec := range f.AST.Imports {
		yield(strings.Trim(spec.Path.Value, "\"`"), spec.Pos())
	}
}

// own returns the folder of an import of this module.
func own(importPath string) (string, bool) { return strings.CutPrefix(importPath, Module+"/") }

// under reports whether dir is root or below it.
func under(dir, root string) bool { return dir == root || strings.HasPrefix(dir, root+"/") }
