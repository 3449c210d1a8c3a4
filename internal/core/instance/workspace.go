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
	Dir      string // on this machine
	Path     string // inside the instance
	ReadOnly bool
}

// workspacePath is the default of Workspace.Path.
const workspacePath = "/workspace"

// kernels are the paths inside an instance that are reserved for the kernel and
// the runtime.
var kernels = []string{"/", "/proc", "/sys", "/dev", "/run", "/tmp"}

// ParseWorkspace parses the form DIR[:/PATH/INSIDE][:ro|:rw] of Spec.Workspace.
// DIR must be absolute. The empty string yields the zero Workspace, which means
// none. ParseWorkspace also accepts forms that CheckWorkspace refuses, because
// existing records contain them.
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
		return Workspace{}, fmt.Errorf("cannot mount the directory at %q: want a clean absolute path other than %s", w.Path, strings.Join(kernels, ", "))
	}
	return w, nil
}

// CheckWorkspace validates a workspace as entered by a user. After the last colon
// it accepts only ro, rw or a path inside. Anything else, such as :RO, would be
// read as part of a path, and the directory would be shared writable. A user
// whose directory itself ends like that must append :rw.
func CheckWorkspace(s string) error {
	const want = "want DIR[:/PATH/INSIDE][:ro] (:rw is the default)"
	if n := strings.LastIndexByte(s, ':'); n >= 0 && !strings.Contains(s[n:], "/") && s[n:] != ":ro" && s[n:] != ":rw" {
		return fmt.Errorf("%q is neither ro nor rw: %s", s[n+1:], want)
	}
	w, err := ParseWorkspace(s)
	if err == nil && strings.Contains(w.Path, ":") {
		err = fmt.Errorf("%q cannot be the path inside, because it contains a colon: %s", w.Path, want)
	}
	return err
}
