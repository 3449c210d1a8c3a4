package archtest

import (
	"cmp"
	"fmt"
	"go/token"
	"slices"
	"strings"
)

// Topology returns the page docs/reference/topology.md, generated from the
// imports: which package uses which protocol and which external system.
func Topology(t *Tree) string {
	var b strings.Builder
	b.WriteString("# Topology\n\nGenerated from the imports by `go test ./internal/archtest -update`; do not edit.\n" +
		"A part speaks the protocols and touches the platforms and runtimes that its own packages import. What `cmd` hands to it is listed with the program.\n\n" +
		"| part | speaks | touches | decides with | keeps |\n|---|---|---|---|---|\n")
	for _, part := range t.parts() {
		dirs := t.importsOf(part)
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", strings.TrimPrefix(part, "internal/"),
			leaves(dirs, "internal/protocol"), leaves(dirs, "internal/platform", "internal/runtime"), leaves(dirs, coreDirs...), leaves(dirs, "internal/store"))
	}
	b.WriteString("\n## Import law\n\n| band | folders | may import |\n|---|---|---|\n")
	for _, row := range bands {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", row.Name, short(row.Root), cmp.Or(short(row.May), "nothing of ours"))
	}
	b.WriteString("\nBeside the table:\n\n")
	var lines []string
	for wire, why := range exceptions {
		lines = append(lines, fmt.Sprintf("- `%s` may import `%s`: %s\n", strings.TrimPrefix(wire[0], "internal/"), strings.TrimPrefix(wire[1], "internal/"), why))
	}
	slices.Sort(lines)
	b.WriteString(strings.Join(lines, ""))
	return b.String()
}

// parts are the rows of the page: programs, daemons, helpers and the router.
func (t *Tree) parts() []string {
	var parts []string
	for _, dir := range t.Dirs() {
		fields := strings.Split(dir, "/")
		depth := 0
		switch {
		case fields[0] == "cmd":
			depth = 2
		case slices.ContainsFunc(bandNamed("daemon").Root, func(root string) bool { return under(dir, root) }),
			under(dir, "internal/guestagent"), under(dir, "internal/shim"), under(dir, "internal/relay"), under(dir, cli), under(dir, "internal/sim"):
			depth = 2
		}
		if depth == 0 || len(fields) < depth {
			continue
		}
		if part := strings.Join(fields[:depth], "/"); !slices.Contains(parts, part) {
			parts = append(parts, part)
		}
	}
	return parts
}

// importsOf lists the folders of this module that a part imports from outside
// itself, tests and packages for tests left out.
func (t *Tree) importsOf(part string) []string {
	var dirs []string
	for _, dir := range t.Dirs() {
		if !under(dir, part) || strings.HasSuffix(dir, "test") {
			continue
		}
		for _, f := range t.Packages[dir].Files {
			if f.Test {
				continue
			}
			f.imports(func(p string, _ token.Pos) {
				if to, ok := own(p); ok && !under(to, part) && !slices.Contains(dirs, to) {
					dirs = append(dirs, to)
				}
			})
		}
	}
	slices.Sort(dirs)
	return dirs
}

// leaves names the folders that lie under one of some roots.
func leaves(dirs []string, roots ...string) string {
	var names []string
	for _, dir := range dirs {
		for _, root := range roots {
			if !under(dir, root) {
				continue
			}
			name := strings.TrimPrefix(dir, root+"/")
			if dir == root {
				name = root[strings.LastIndex(root, "/")+1:]
			}
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

func short(dirs []string) string {
	names := make([]string, len(dirs))
	for i, d := range dirs {
		names[i] = strings.TrimPrefix(d, "internal/")
	}
	return strings.Join(names, ", ")
}
