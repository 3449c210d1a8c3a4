package cgroup

import (
	"os"
	"path/filepath"
	"testing"

	"lull/internal/lib/errtest"
)

// TestNamesakesLeaveTheParents checks that removing an instance's groups keeps
// parent groups in which another instance is being started.
func TestNamesakesLeaveTheParents(t *testing.T) {
	if testing.Short() {
		t.Skip("-short")
	}
	place, err := Find("namesakes-test")
	if err != nil {
		t.Skip(err)
	}
	g, err := place.Create("it")
	errtest.None(t, err)
	_, dirs, err := g.namesakes()
	errtest.None(t, err)
	others := 0
	for _, dir := range dirs {
		if dir == g.dir || dir == g.cpu {
			continue
		}
		if err := os.MkdirAll(filepath.Join(dir, "c"), 0o755); err != nil {
			t.Logf("no group can be made in %s: %v", dir, err)
			continue
		}
		others++
	}
	errtest.None(t, g.RemoveNamesakes())
	exists := func(dir string) bool { _, err := os.Stat(dir); return err == nil }
	left := 0
	for _, dir := range dirs {
		if dir == g.dir || dir == g.cpu {
			continue
		}
		if exists(dir) {
			t.Errorf("%s was left", dir)
		}
		if exists(filepath.Dir(dir)) {
			left++
		}
	}
	if left != others {
		t.Errorf("%d of %d parents were left", left, others)
	}
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
	place.Release()
	for _, dir := range dirs {
		if exists(filepath.Dir(dir)) {
			t.Errorf("%s was left", filepath.Dir(dir))
		}
	}
}
