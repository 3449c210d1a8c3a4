package container

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
)

// TestCheckSpec checks that missing prerequisites are reported when an instance
// is created, not when it is started.
func TestCheckSpec(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	errtest.None(t, os.WriteFile(file, nil, 0o600))
	for _, c := range []struct{ image, workspace, want string }{
		{dir, dir, ""},
		{file, dir + ":/w:ro", ""},
		{"registry.example.com/a:1", "", ""},
		{"", "", "cannot use image"},
		{filepath.Join(dir, "none"), "", "cannot use image"},
		{"NOT a reference", "", "cannot use image"},
		{dir, filepath.Join(dir, "none"), "cannot use workspace"},
		{dir, file, "is not a directory"},
	} {
		err := new(Runtime).CheckSpec(&instance.Spec{Image: c.image, Workspace: c.workspace})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// TestMissingComesAndGoes checks that installing or removing runc while the
// host runs is noticed.
func TestMissingComesAndGoes(t *testing.T) {
	at := filepath.Join(t.TempDir(), "runc")
	r := &Runtime{cfg: Config{Runc: at}}
	for range 2 {
		if _, err := r.runc(); err == nil || r.Missing() == nil {
			t.Errorf("without a runc: %v, missing %v", err, r.Missing())
		}
		errtest.None(t, os.WriteFile(at, []byte("#!/bin/sh\n"), 0o755))
		if got, err := r.runc(); err != nil || got.path != at || r.Missing() != nil {
			t.Errorf("with a runc: %+v, %v, missing %v", got, err, r.Missing())
		}
		errtest.None(t, os.Remove(at))
	}
}
