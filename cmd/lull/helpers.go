//go:build linux && !portable

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"lull/internal/lib/bundle"
	"lull/internal/shim"
)

const harnessName = "lull-harness"

// findHelper returns the path of a helper program: named, if the user set it; the one
// inside this binary, which is unpacked below the data directory; or one beside this
// binary, whether or not it exists. If there is no lull-shim, it returns lull itself.
func findHelper(named, data, name string) (string, error) {
	if named != "" {
		return named, nil
	}
	if bundle.Has(name) {
		return bundle.Unpack(filepath.Join(data, "bin"), name)
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("cannot find this program's own file: %w", err)
	}
	beside := filepath.Join(filepath.Dir(self), name)
	if _, err := os.Stat(beside); name == shim.Name && errors.Is(err, fs.ErrNotExist) {
		return self, nil
	}
	return beside, nil
}

// describeHelper returns where findHelper would find a program, in words. check is
// the path that must exist for that; empty if there is nothing to check. It writes
// nothing.
func describeHelper(named, data, name string) (where string, check string, err error) {
	if named == "" && bundle.Has(name) {
		return "inside lull", "", nil
	}
	path, err := findHelper(named, data, name)
	if err != nil {
		return "", "", err
	}
	if self, serr := os.Executable(); serr == nil && path == self {
		return "lull itself", "", nil
	}
	return path, path, nil
}
