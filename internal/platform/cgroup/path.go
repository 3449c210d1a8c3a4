package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Path returns the group's path below the mount of its hierarchy, beginning with
// a slash. Container runtimes create their own groups below it, in every
// hierarchy.
func (g *Group) Path() (string, error) {
	p, _, err := g.namesakes()
	return p, err
}

// RemoveNamesakes removes the empty groups with the same path in other v1
// hierarchies, which container runtimes leave behind. Groups in use stay, and so
// do the parents: a container that starts at that moment is made in them.
func (g *Group) RemoveNamesakes() error {
	_, dirs, err := g.namesakes()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if dir == g.dir || dir == g.cpu {
			continue
		}
		_ = (&Group{kind: V1, dir: dir}).Remove()
	}
	return nil
}

// namesakes returns the group's path, and the directories with that path in all
// hierarchies.
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
		return "", nil, g.fail("find the mount of", fmt.Errorf("%s is not below a mounted hierarchy", g.dir))
	}
	for _, m := range mounts {
		dirs = append(dirs, filepath.Join(m.dir, path))
	}
	return path, dirs, nil
}

// Of returns the group of a process, for reading and freezing: the v1 freezer's
// if the process is in a group there, otherwise that of the unified hierarchy. It
// never returns a root group. fs.ErrNotExist means that the process is gone.
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
	return nil, fmt.Errorf("cannot use the group of process %d: it has no group of its own", pid)
}

// Lookup returns the group that a user names by its directory, or by its path as
// in /proc/PID/cgroup. The group must belong to the unified hierarchy or the v1
// freezer and must not be a hierarchy's root.
func Lookup(path string) (*Group, error) {
	fail := func(why string) error { return fmt.Errorf("cannot use the control group %.300q: %s", path, why) }
	if !filepath.IsAbs(path) {
		return nil, fail("it is neither an absolute directory nor a path as in /proc/PID/cgroup")
	}
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("cannot read the mounts: %w", err)
	}
	path = filepath.Clean(path)
	var in *mount // the innermost one
	mounts := parseMounts(b)
	for n, m := range mounts {
		if (path == m.dir || strings.HasPrefix(path, m.dir+"/")) && (in == nil || len(m.dir) >= len(in.dir)) {
			in = &mounts[n]
		}
	}
	switch {
	case in == nil:
		return lookupBelow(path, mounts)
	case path == in.dir:
		return nil, fail("it is the root of its hierarchy")
	case !in.v2 && !slices.Contains(in.controllers, "freezer"):
		return nil, fail("it belongs to the hierarchy " + strings.Join(in.controllers, ",") + ", which cannot freeze processes: give a path in the freezer hierarchy")
	}
	return At(path)
}

// lookupBelow finds a group by its path in a hierarchy, the unified one first. A
// group with processes comes before one without.
func lookupBelow(path string, mounts []mount) (*Group, error) {
	var empty *Group
	for _, v2 := range []bool{true, false} {
		for _, m := range mounts {
			rel, ok := strings.CutPrefix(path, strings.TrimSuffix(m.root, "/"))
			if !ok || strings.Trim(rel, "/") == "" || m.v2 != v2 || !v2 && !slices.Contains(m.controllers, "freezer") {
				continue
			}
			g, err := At(filepath.Join(m.dir, rel))
			if err != nil {
				continue
			}
			if populated, err := g.Populated(); err == nil && populated {
				return g, nil
			}
			if empty == nil {
				empty = g
			}
		}
	}
	if empty != nil {
		return empty, nil
	}
	return nil, fmt.Errorf("cannot use the control group %.300q: %w in a hierarchy that can freeze", path, os.ErrNotExist)
}

// MayFreeze returns an error if this process may not freeze the group.
func (g *Group) MayFreeze() error {
	name, _ := g.thawing()
	if err := unix.Access(g.dir+name, unix.W_OK); err != nil {
		return &os.PathError{Op: "write", Path: g.dir + name, Err: err}
	}
	return nil
}
