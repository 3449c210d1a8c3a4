package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Path gives where the group lies below the mount of its hierarchy, beginning
// with a slash: by this name a container runtime puts groups of its own below
// it, in every hierarchy.
func (g *Group) Path() (string, error) {
	p, _, err := g.namesakes()
	return p, err
}

// RemoveNamesakes takes away the empty groups of the same path in the other v1
// hierarchies, which whoever made groups below this one leaves behind, and
// those above them as far as they are empty. What is in use stays.
func (g *Group) RemoveNamesakes() error {
	p, dirs, err := g.namesakes()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if dir == g.dir || dir == g.cpu {
			continue
		}
		if (&Group{kind: V1, dir: dir}).Remove() != nil {
			continue
		}
		for range strings.Count(p, "/") - 1 {
			if dir = filepath.Dir(dir); unix.Rmdir(dir) != nil {
				break
			}
		}
	}
	return nil
}

// namesakes gives the path and the directory of it in every hierarchy.
func (g *Group) namesakes() (path string, dirs []string, err error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", nil, fmt.Errorf("cannot read the mounts: %w", err)
	}
	mounts := parseMounts(b)
	for _, m := range mounts {
		if rest, ok := strings.CutPrefix(g.dir, strings.TrimSuffix(m.dir, "/")+"/"); ok && len("/"+rest) > len(path) {
			path = "/" + rest
		}
	}
	if path == "" {
		return "", nil, g.fail("find the mount of", fmt.Errorf("%s is below none", g.dir))
	}
	for _, m := range mounts {
		dirs = append(dirs, filepath.Join(m.dir, path))
	}
	return path, dirs, nil
}
