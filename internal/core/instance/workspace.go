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

// workspacePath is the default path of a workspace inside.
const workspacePath = "/workspace"

// kernels are the places inside that belong to the kernel.
var kernels = []string{"/", "/proc", "/sys", "/dev", "/run", "/tmp"}

// ParseWorkspace reads DIR[:/PATH/INSIDE][:ro|:rw], as Spec.Workspace has it. DIR
// is absolute. The zero Workspace is none. It takes what CheckWorkspace refuses:
// records have it.
func ParseWorkspace(s string) (Workspace, error) {
	if s == "" {
		return Workspace{}, nil
	}
	w := Workspace{Dir: s, Path: workspacePath}
	if w.Dir, w.ReadOnly = strings.CutSuffix(w.Dir, ":ro"); !w.ReadOnly {
		w.Dir = strings.TrimSuffix(w.Dir, ":rw")
	}
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

// CheckWorkspace says what is wrong with what a user asked for. What follows
// the last colon is ro, rw or a path inside: anything else, as :RO, would be a
// part of a path, and the directory shared with the right to write. A directory
// whose own name ends so is meant with :rw behind it.
func CheckWorkspace(s string) error {
	const want = "want DIR[:/PATH/INSIDE][:ro], or :rw, which it is without"
	if n := strings.LastIndexByte(s, ':'); n >= 0 && !strings.Contains(s[n:], "/") && s[n:] != ":ro" && s[n:] != ":rw" {
		return fmt.Errorf("%q is neither ro nor rw: %s", s[n+1:], want)
	}
	w, err := ParseWorkspace(s)
	if err == nil && strings.Contains(w.Path, ":") {
		err = fmt.Errorf("%q cannot be its place inside, with a colon in it: %s", w.Path, want)
	}
	return err
}
