package instance

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Workspace is a directory of this machine that an instance shares.
type Workspace struct {
	Dir      string // here
	Path     string // inside
	ReadOnly bool
}

// workspacePath is where a workspace lies inside when nobody says.
const workspacePath = "/workspace"

// kernels are the places inside that belong to the kernel.
var kernels = []string{"/", "/proc", "/sys", "/dev", "/run", "/tmp"}

// ParseWorkspace reads DIR[:/PATH/INSIDE][:ro], as Spec.Workspace has it. DIR is
// absolute. The zero Workspace is none.
func ParseWorkspace(s string) (Workspace, error) {
	if s == "" {
		return Workspace{}, nil
	}
	w := Workspace{Dir: s, Path: workspacePath}
	w.Dir, w.ReadOnly = strings.CutSuffix(w.Dir, ":ro")
	if n := strings.LastIndex(w.Dir, ":/"); n > 0 {
		w.Dir, w.Path = w.Dir[:n], w.Dir[n+1:]
	}
	if !filepath.IsAbs(w.Dir) || strings.ContainsRune(s, 0) {
		return Workspace{}, fmt.Errorf("%q is not an absolute path", w.Dir)
	}
	if path.Clean(w.Path) != w.Path || slices.Contains(kernels, w.Path) || len(s) > MaxImage {
		return Workspace{}, fmt.Errorf("%q cannot be its place inside: want a clean absolute path that is none of %s", w.Path, strings.Join(kernels, ", "))
	}
	return w, nil
}
