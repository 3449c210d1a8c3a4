package archtest

import (
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

var webImport = regexp.MustCompile(`(?m)^(?:import|export) .*from '(\.[^']*)'$`)

// TestDashboardImports keeps the dashboard's modules free of import circles and
// its pages free of each other: what two pages share is in parts.
func TestDashboardImports(t *testing.T) {
	root := os.DirFS(filepath.Join("..", "..", "web", "src"))
	imports := map[string][]string{}
	resolve := func(from, to string) string {
		to = path.Join(path.Dir(from), to)
		for _, end := range []string{".ts", ".tsx", "/index.ts"} {
			if _, err := fs.Stat(root, to+end); err == nil {
				return to + end
			}
		}
		t.Fatalf("%s imports %s, which is no module", from, to)
		return ""
	}
	if err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasPrefix(path.Ext(name), ".ts") {
			return err
		}
		text, err := fs.ReadFile(root, name)
		for _, m := range webImport.FindAllSubmatch(text, -1) {
			to := resolve(name, string(m[1]))
			imports[name] = append(imports[name], to)
			if path.Dir(name) == "pages" && path.Dir(to) == "pages" && path.Base(name) != "index.ts" {
				t.Errorf("%s imports another page, %s", name, to)
			}
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if len(imports) < 20 {
		t.Fatalf("only %d modules import another", len(imports))
	}
	done := map[string]bool{}
	var visit func(name string, above []string)
	visit = func(name string, above []string) {
		if i := slices.Index(above, name); i >= 0 {
			t.Errorf("import circle: %s", strings.Join(append(above[i:], name), " -> "))
			return
		}
		if done[name] {
			return
		}
		for _, to := range imports[name] {
			visit(to, append(slices.Clip(above), name))
		}
		done[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(imports)) {
		visit(name, nil)
	}
}
