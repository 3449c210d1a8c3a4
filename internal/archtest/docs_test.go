package archtest

import (
	"go/ast"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
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
		if err != nil {
			t.Fatal(err)
		}
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

// TestLinks: every link of a document leads somewhere, every source file that it
// names exists, and every document is found from the README.
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

// TestProofsName: the tests that documents name exist.
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
