package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
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

// Of finds the group that a process is in, to be read and frozen by whoever made
// it: the v1 freezer's where the process has one of its own there, else that of
// the unified hierarchy. The root is nobody's group. fs.ErrNotExist says that
// the process is gone.
func Of(pid int) (*Group, error) {
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("cannot read the mounts: %w", err)
	}
	own, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil, fmt.Errorf("cannot read the groups of process %d: %w", pid, err)
	}
	in := parseOwn(own)
	dir := func(controller string) string {
		for _, m := range parseMounts(mountinfo) {
			if controller == "" && !m.v2 || controller != "" && !slices.Contains(m.controllers, controller) {
				continue
			}
			rel, ok := strings.CutPrefix(in[controller], strings.TrimSuffix(m.root, "/"))
			if ok && strings.Trim(rel, "/") != "" && !strings.Contains(rel, "..") {
				return filepath.Join(m.dir, rel)
			}
		}
		return ""
	}
	if d := dir("freezer"); d != "" {
		return &Group{kind: V1, dir: d, cpu: dir("cpuacct")}, nil
	}
	if d := dir(""); d != "" {
		return &Group{kind: V2, dir: d}, nil
	}
	return nil, fmt.Errorf("cannot use the group of process %d: it is in none of its own", pid)
}
