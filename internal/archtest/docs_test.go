package archtest

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"lull/internal/lib/errtest"
)

var (
	sourceFile = regexp.MustCompile("`((?:internal|cmd|test|bench)/[\\w./-]+\\.go)`")
	mdLink     = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	mdHeading  = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	testName   = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z][A-Za-z]*\b`)
)

// documents returns the texts for users, by name.
func documents(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	root := os.DirFS(filepath.Join("..", ".."))
	add := func(name string) {
		b, err := fs.ReadFile(root, name)
		errtest.None(t, err)
		out[name] = string(b)
	}
	for _, name := range []string{"README.md", "HACKING.md", "CHANGELOG.md"} {
		add(name)
	}
	if err := fs.WalkDir(root, "docs", func(name string, d fs.DirEntry, err error) error {
		if err == nil && path.Ext(name) == ".md" {
			add(name)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

// anchor is the name that a heading has in a link.
func anchor(heading string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-', r == '_', r >= '0' && r <= '9', r >= 'a' && r <= 'z':
			return r
		}
		return -1
	}, strings.ToLower(heading))
}

// TestLinks checks that every link and every source file in a document exists,
// and that every document is reachable from the README.
func TestLinks(t *testing.T) {
	docs := documents(t)
	from := map[string][]string{}
	for name, text := range docs {
		for _, m := range sourceFile.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join("..", "..", filepath.FromSlash(m[1]))); err != nil {
				t.Errorf("%s: there is no file %s", name, m[1])
			}
		}
		for _, m := range mdLink.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			file, place, _ := strings.Cut(m[1], "#")
			to := path.Join(path.Dir(name), file)
			if file == "" {
				to = name
			}
			if _, err := os.Stat(filepath.Join("..", "..", filepath.FromSlash(to))); err != nil {
				t.Errorf("%s: the link %s leads nowhere", name, m[1])
			}
			from[name] = append(from[name], to)
			if place == "" || path.Ext(to) != ".md" {
				continue
			}
			var anchors []string
			for _, h := range mdHeading.FindAllStringSubmatch(docs[to], -1) {
				anchors = append(anchors, anchor(h[1]))
			}
			if !slices.Contains(anchors, place) {
				t.Errorf("%s: %s has no heading %s", name, to, place)
			}
		}
	}
	seen := map[string]bool{"README.md": true}
	for queue := []string{"README.md"}; len(queue) > 0; queue = queue[1:] {
		for _, to := range from[queue[0]] {
			if !seen[to] {
				seen[to] = true
				queue = append(queue, to)
			}
		}
	}
	for name := range docs {
		if !seen[name] {
			t.Errorf("%s is not to be found from README.md", name)
		}
	}
}

// TestProofsName checks that the tests that documents name exist.
func TestProofsName(t *testing.T) {
	tests := map[string]bool{}
	for _, p := range module(t).Packages {
		for _, f := range p.Files {
			for _, d := range f.AST.Decls {
				if fn, ok := d.(*ast.FuncDecl); ok && f.Test {
					tests[fn.Name.Name] = true
				}
			}
		}
	}
	for name, text := range documents(t) {
		for _, at := range testName.FindAllStringIndex(text, -1) {
			word := text[at[0]:at[1]]
			named := func(test string) bool { return test == word }
			if before := text[:at[0]]; strings.HasSuffix(before, "-run ") || strings.HasSuffix(before, "'") || strings.HasSuffix(before, "-bench ") {
				named = func(test string) bool { return strings.HasPrefix(test, word) } // a pattern
			}
			if !slices.ContainsFunc(slices.Collect(maps.Keys(tests)), named) {
				t.Errorf("%s names %s, and there is no such test", name, word)
			}
		}
	}
}

// maxHops is the number of steps that a walk of docs/architecture.md may have.
const maxHops = 11

var (
	walkStep = regexp.MustCompile(`(?m)^(\d+)\. (.*)$`)
	codeSpan = regexp.MustCompile("`([^`]+)`")
	goName   = regexp.MustCompile(`^\w+(?:\.\w+)?$`)
	oneFile  = regexp.MustCompile(`^[a-z][\w/-]*/[\w-]+\.go$`)
)

// declared returns the functions, methods and types of a file: "name" and, for
// a method, "Receiver.name" as well.
func declared(f *File) map[string]bool {
	out := map[string]bool{}
	for _, d := range f.AST.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			out[d.Name.Name] = true
			if d.Recv != nil {
				at := d.Recv.List[0].Type
				if star, ok := at.(*ast.StarExpr); ok {
					at = star.X
				}
				if generic, ok := at.(*ast.IndexExpr); ok {
					at = generic.X
				}
				if id, ok := at.(*ast.Ident); ok {
					out[id.Name+"."+d.Name.Name] = true
				}
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				if ts, ok := spec.(*ast.TypeSpec); ok {
					out[ts.Name.Name], out[f.AST.Name.Name+"."+ts.Name.Name] = true, true
				}
			}
		}
	}
	return out
}

// walkFaults returns what is wrong with the walks of an architecture page: the
// sections with numbered steps.
func walkFaults(tree *Tree, page string) (walks int, faults []string) {
	names := map[string]map[string]bool{} // by file
	all := map[string]bool{}              // "package.Type" of every package
	for _, p := range tree.Packages {
		for _, f := range p.Files {
			names[f.Path] = declared(f)
			for name := range names[f.Path] {
				if strings.HasPrefix(name, f.AST.Name.Name+".") {
					all[name] = true
				}
			}
		}
	}
	for _, section := range strings.Split(page, "\n## ")[1:] {
		steps := walkStep.FindAllStringSubmatch(section, -1)
		if len(steps) == 0 {
			continue
		}
		walks++
		title, _, _ := strings.Cut(section, "\n")
		fault := func(format string, a ...any) {
			faults = append(faults, title+": "+fmt.Sprintf(format, a...))
		}
		here := map[string]bool{} // declarations in the packages of the walk
		spans := codeSpan.FindAllStringSubmatch(section, -1)
		for _, m := range spans {
			if !oneFile.MatchString(m[1]) {
				continue
			}
			if names[m[1]] == nil {
				fault("there is no file %s", m[1])
				continue
			}
			for _, f := range tree.Packages[path.Dir(m[1])].Files {
				maps.Copy(here, names[f.Path])
			}
		}
		for _, step := range steps {
			if n, err := strconv.Atoi(step[1]); err != nil || n > maxHops {
				fault("step %s, want at most %d", step[1], maxHops)
			}
			for _, m := range codeSpan.FindAllStringSubmatchIndex(step[2], -1) {
				name := step[2][m[2]:m[3]]
				if !goName.MatchString(name) {
					continue
				}
				file := ""
				if before := codeSpan.FindAllStringSubmatch(step[2][:m[0]], -1); len(before) > 0 && strings.HasSuffix(step[2][:m[0]], "`"+before[len(before)-1][1]+"` ") {
					file = before[len(before)-1][1]
				}
				switch {
				case oneFile.MatchString(file):
					if names[file] != nil && !names[file][name] {
						fault("step %s: %s declares no %s", step[1], file, name)
					}
				case !here[name] && !all[name]:
					fault("step %s: no package of the walk declares %s", step[1], name)
				}
			}
		}
	}
	return walks, faults
}

// TestWalks checks that the three walks of docs/architecture.md name existing
// files and functions, in at most maxHops steps.
func TestWalks(t *testing.T) {
	walks, faults := walkFaults(module(t), documents(t)["docs/architecture.md"])
	for _, f := range faults {
		t.Error(f)
	}
	if walks != 3 {
		t.Errorf("%d walks, want 3", walks)
	}
	for page, want := range map[string]int{
		"\n## w\n1. `internal/archtest/house.go` `Load` calls `add`, `Tree.Dirs` and `archtest.Fault`.\n": 0,
		"\n## w\n1. `internal/archtest/house.go` `Imports`.\n":                                            1, // of law.go
		"\n## w\n1. `internal/archtest/gone.go`\n":                                                        1,
		"\n## w\n1. `internal/archtest/house.go` calls `gone`.\n12. too many\n":                           2,
	} {
		if _, faults := walkFaults(module(t), page); len(faults) != want {
			t.Errorf("%q: %v, want %d faults", page, faults, want)
		}
	}
}

var (
	// citedDoc is a document, citedCode a source file by its path in the tree.
	citedDoc  = regexp.MustCompile(`[\w./-]*\w\.md\b`)
	citedCode = regexp.MustCompile(`\b(?:internal|cmd|test|bench|demo|web/src)/[\w/.-]*\w\.(?:go|tsx?|sh)\b`)
	// absent are ways to cite a specification, a plan or a ticket that the reader
	// does not have. Published ones (an RFC, a man page) are named with the word
	// before the section.
	absent = regexp.MustCompile(`\bspec(?:ification)?,?(?:\s+(?://\s*)?section)?\s+\d|\bseeds?/\d|\bthe (?:seeds?|contract|brief|spec|requirements)(?:'s|s')|\b(?:both|the) seeds (?:lack|say)|\b(?:issue|ticket) #?\d|\bthe (?:contract|brief) (?:says|defines|fixes)|\bpromise \d`)
)

// absentWords are the words that absent begins with or contains; most texts have
// none of them.
var absentWords = []string{"spec", "seed", "contract", "brief", "requirements", "issue", "ticket", "promise"}

// citations returns the citations in a text of what the tree lacks. has reports
// whether the tree has a file, by path or by name.
func citations(text string, has func(name string) bool) []string {
	var out []string
	if strings.Contains(text, ".md") || strings.Contains(text, "/") {
		for _, re := range []*regexp.Regexp{citedDoc, citedCode} {
			for _, name := range re.FindAllString(text, -1) {
				if !has(name) {
					out = append(out, name)
				}
			}
		}
	}
	if text = strings.ToLower(text); slices.ContainsFunc(absentWords, func(w string) bool { return strings.Contains(text, w) }) {
		out = append(out, absent.FindAllString(text, -1)...)
	}
	return out
}

// TestNoAbsentDocuments checks that no comment, string or document cites a file
// that is not in the tree.
func TestNoAbsentDocuments(t *testing.T) {
	root := os.DirFS(filepath.Join("..", ".."))
	paths, bases := map[string]bool{}, map[string]bool{}
	var texts []string
	if err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "node_modules" || d.Name() == "bin" || d.Name() == "dist" || name == "internal/archtest"):
			return fs.SkipDir
		case d.IsDir():
			return nil
		}
		paths[name], bases[path.Base(name)] = true, true
		if slices.Contains([]string{".md", ".ts", ".tsx", ".sh", ".css", ".yaml", ".service"}, path.Ext(name)) || d.Name() == "Makefile" {
			texts = append(texts, name)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	has := func(name string) bool {
		return paths[strings.TrimPrefix(name, "./")] || bases[path.Base(name)] && (path.Ext(name) == ".md" || !strings.Contains(name, "/"))
	}
	check := func(where, text string) {
		for _, c := range citations(text, has) {
			t.Errorf("%s cites %q, which the tree does not have", where, c)
		}
	}
	for _, name := range texts {
		b, err := fs.ReadFile(root, name)
		errtest.None(t, err)
		if name != "STYLE.md" { // it shows one
			check(name, string(b))
		}
	}
	tree := module(t)
	for _, p := range tree.Packages {
		if p.Dir == "internal/archtest" {
			continue
		}
		for _, f := range p.Files {
			for _, group := range f.AST.Comments {
				check(tree.where(group.Pos()), group.Text())
			}
			if !f.Test {
				ast.Inspect(f.AST, func(n ast.Node) bool {
					if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
						check(tree.where(lit.Pos()), lit.Value)
					}
					return true
				})
			}
		}
	}
	for text, want := range map[string]int{
		"see spec 2.3": 1, "(spec,\nsection 9)": 1, "the seed's prefix": 1, "as docs/none.md says": 1, "internal/none.go does": 1, "seeds/004": 1,
		"RFC 9110, section 5": 0, "the random seed is printed": 0, "docs/glossary.md": 0, "internal/host/fence.go": 0,
	} {
		if got := citations(text, has); len(got) != want {
			t.Errorf("%q: %q, want %d", text, got, want)
		}
	}
}
