package archtest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"lull/internal/lib/errtest"
)

// TestLanes checks that every package is in one lane of make test.
func TestLanes(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "Makefile"))
	errtest.None(t, err)
	for _, f := range Lanes(module(t), string(b)) {
		t.Error(f)
	}
}

func TestLanesBite(t *testing.T) {
	const lists = "RACE := ./internal/a/...\nMIXED := ./internal/b\nPROGRAMS := ./internal/c \\\n\t./internal/d\nSERVERS :=\nGUESTS :=\nMACHINES :=\n"
	const exec = `package x; import _ "os/exec"`
	whole := map[string]string{"internal/a/a.go": "package a", "internal/b/b.go": "package b", "internal/c/c.go": "package c", "internal/d/d.go": "package d"}
	for _, tc := range []struct {
		name, makefile, path, src string
		want                      string // part of the only fault; empty for none
	}{
		{"whole", lists, "internal/e/e_test.go", "package e", ""},
		{"two lanes", strings.Replace(lists, "GUESTS :=", "GUESTS := ./internal/d", 1), "internal/e/e.go", "package e", "is in PROGRAMS and in GUESTS"},
		{"no package", strings.Replace(lists, "MACHINES :=", "MACHINES := ./internal/f", 1), "internal/e/e.go", "package e", "matches no package"},
		{"no list", strings.Replace(lists, "MACHINES :=", "", 1), "internal/e/e.go", "package e", "no list MACHINES"},
		{"new and pure", lists, "internal/e/e_test.go", exec, "put the package in"},
		{"program", lists, "internal/d/d_test.go", exec, ""},
		{"not short", lists, "internal/b/b_test.go", exec, "testing.Short"},
		{"short", lists, "internal/b/b_test.go", exec + `; import "testing"; func TestX(t *testing.T) { if testing.Short() { t.Skip("-short") } }`, ""},
		{"code may", lists, "internal/e/e.go", exec, ""},
		{"through a package for tests", lists, "internal/a/xtest/x.go", exec, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			files := fstest.MapFS{tc.path: {Data: []byte(tc.src)}}
			for name, src := range whole {
				files[name] = &fstest.MapFile{Data: []byte(src)}
			}
			if tc.path == "internal/a/xtest/x.go" {
				files["internal/e/e_test.go"] = &fstest.MapFile{Data: []byte(`package e; import _ "lull/internal/a/xtest"`)}
				tc.want = "put the package in"
			}
			tree, err := Load(files)
			errtest.None(t, err)
			faults := Lanes(tree, tc.makefile)
			switch {
			case tc.want == "" && len(faults) > 0:
				t.Errorf("got %v", faults)
			case tc.want != "" && (len(faults) != 1 || !strings.Contains(faults[0].String(), tc.want)):
				t.Errorf("got %v, want one with %q", faults, tc.want)
			}
		})
	}
}
