package archtest

import (
	"fmt"
	"go/ast"
	"go/token"
	"regexp"
	"slices"
	"strings"
)

// Comments requires a package comment on every package, except those with tests
// only.
func Comments(t *Tree) []Fault {
	var faults []Fault
	for _, dir := range t.Dirs() {
		p := t.Packages[dir]
		code, doc := 0, 0
		for _, f := range p.Files {
			if f.Test {
				continue
			}
			code++
			if f.AST.Doc != nil {
				doc++
				if want := "Package " + f.AST.Name.Name + " "; f.AST.Name.Name != "main" && !strings.HasPrefix(f.AST.Doc.Text(), want) {
					faults = append(faults, Fault{f.Path, fmt.Sprintf("the package comment does not begin with %q", want)})
				}
			}
		}
		if code > 0 && doc != 1 {
			faults = append(faults, Fault{dir, fmt.Sprintf("%d package comments, want one", doc)})
		}
	}
	return faults
}

// hollow are names that say nothing.
var hollow = []string{"util", "utils", "common", "helper", "helpers", "manager", "service", "handler", "types", "models"}

// Names refuses packages and types with hollow names.
func Names(t *Tree) []Fault {
	var faults []Fault
	check := func(pos token.Pos, kind, name string) {
		if slices.Contains(hollow, strings.ToLower(name)) {
			faults = append(faults, Fault{t.where(pos), fmt.Sprintf("%s %s says nothing: name what it is", kind, name)})
		}
	}
	for _, dir := range t.Dirs() {
		for _, f := range t.Packages[dir].Files {
			check(f.AST.Package, "package", f.AST.Name.Name)
			ast.Inspect(f.AST, func(n ast.Node) bool {
				if ts, ok := n.(*ast.TypeSpec); ok {
					check(ts.Pos(), "type", ts.Name.Name)
				}
				return true
			})
		}
	}
	return faults
}

// unfinished matches markers of unfinished work.
var unfinished = regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`)

// Unfinished refuses comments that promise work.
func Unfinished(t *Tree) []Fault {
	var faults []Fault
	for _, dir := range t.Dirs() {
		for _, f := range t.Packages[dir].Files {
			for _, group := range f.AST.Comments {
				for _, c := range group.List {
					if mark := unfinished.FindString(c.Text); mark != "" {
						faults = append(faults, Fault{t.where(c.Pos()), mark + ": finish it or write it down as an issue"})
					}
				}
			}
		}
	}
	return faults
}

// allowed is the comment that lets a test sleep on the real clock.
var allowed = regexp.MustCompile(`^// outside a bubble: \S`)

// Sleeps refuses time.Sleep in tests on the real clock, other than in a loop
// that polls a condition and checks the time too. It goes by the text: a sleep
// is taken to be in a bubble when it is inside a function passed to
// synctest.Test, or, in a file that imports testing/synctest, in a function
// that is no test itself. Elsewhere the comment "// outside a bubble: reason"
// on its line or the one before allows it.
func Sleeps(t *Tree) []Fault {
	var faults []Fault
	for _, dir := range t.Dirs() {
		for _, f := range t.Packages[dir].Files {
			if f.Test {
				faults = append(faults, t.sleeps(f)...)
			}
		}
	}
	return faults
}

func (t *Tree) sleeps(f *File) []Fault {
	bubbles := false
	f.imports(func(p string, _ token.Pos) { bubbles = bubbles || p == "testing/synctest" })
	reasons := map[int]bool{}
	for _, group := range f.AST.Comments {
		for _, c := range group.List {
			if allowed.MatchString(c.Text) {
				line := t.Fset.Position(c.Pos()).Line
				reasons[line], reasons[line+1] = true, true
			}
		}
	}
	var faults []Fault
	var stack []ast.Node
	ast.Inspect(f.AST, func(n ast.Node) bool {
		if n == nil {
			stack = stack[:len(stack)-1]
			return true
		}
		stack = append(stack, n)
		if call, ok := n.(*ast.CallExpr); ok && selects(call.Fun, "time", "Sleep") &&
			!reasons[t.Fset.Position(call.Pos()).Line] && !waits(stack) && !(bubbles && bubbled(stack)) {
			faults = append(faults, Fault{t.where(call.Pos()), "time.Sleep in a test on the real clock: wait for the condition"})
		}
		return true
	})
	return faults
}

// waits reports whether the innermost node of a path is in a loop with a
// deadline: one that asks for the time.
func waits(path []ast.Node) bool {
	for _, n := range path {
		loop, ok := n.(*ast.ForStmt)
		if !ok {
			continue
		}
		timed := false
		ast.Inspect(loop, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok {
				timed = timed || selects(call.Fun, "time", "Now") || selects(call.Fun, "time", "Since") || selects(call.Fun, "time", "Until")
			}
			return true
		})
		if timed {
			return true
		}
	}
	return false
}

// bubbled reports whether the innermost node of a path from the file down is,
// by the text, run in a bubble.
func bubbled(path []ast.Node) bool {
	test := false
	plain := false // in a function literal that is not a subtest
	for i, n := range path {
		switch n := n.(type) {
		case *ast.FuncDecl:
			test = regexp.MustCompile(`^(Test|Fuzz|Benchmark|Example)`).MatchString(n.Name.Name)
		case *ast.FuncLit:
			call, ok := path[i-1].(*ast.CallExpr)
			switch {
			case ok && selects(call.Fun, "synctest", "Test"):
				return true
			case ok && isMethod(call.Fun, "Run"):
			default:
				plain = true
			}
		}
	}
	return plain || !test
}

func selects(e ast.Expr, pkg, name string) bool {
	sel, ok := e.(*ast.SelectorExpr)
	if !ok || sel.Sel.Name != name {
		return false
	}
	id, ok := sel.X.(*ast.Ident)
	return ok && id.Name == pkg
}

func isMethod(e ast.Expr, name string) bool {
	sel, ok := e.(*ast.SelectorExpr)
	return ok && sel.Sel.Name == name
}

// process are the calls that only cmd makes: what touches the process itself.
var process = map[[2]string]bool{
	{"os", "Exit"}: true, {"os", "Getenv"}: true, {"os", "LookupEnv"}: true, {"os", "Setenv"}: true,
	{"log", "Fatal"}: true, {"log", "Fatalf"}: true, {"slog", "SetDefault"}: true,
	{"flag", "Parse"}: true, {"signal", "NotifyContext"}: true,
}

// Process refuses calls that touch the process outside cmd, bench and demo.
func Process(t *Tree) []Fault {
	var faults []Fault
	for _, dir := range t.Dirs() {
		if !under(dir, "internal") || strings.HasSuffix(dir, "test") {
			continue
		}
		for _, f := range t.Packages[dir].Files {
			if f.Test {
				continue
			}
			ast.Inspect(f.AST, func(n ast.Node) bool {
				if sel, ok := n.(*ast.SelectorExpr); ok {
					if id, ok := sel.X.(*ast.Ident); ok && process[[2]string{id.Name, sel.Sel.Name}] {
						faults = append(faults, Fault{t.where(sel.Pos()), fmt.Sprintf("%s.%s: only cmd touches the process", id.Name, sel.Sel.Name)})
					}
				}
				return true
			})
		}
	}
	return faults
}
