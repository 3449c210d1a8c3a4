package house

import (
	"fmt"
	"slices"
	"strings"
)

// band is one row of the import law: who, and whom it may import. "own" stands
// for the importer's own subtree, its first folder below Root.
type band struct {
	Name string
	Root []string
	May  []string
}

const core = "core"

// coreDirs are the packages that decide and the nouns they decide about.
var coreDirs = []string{"internal/idle", "internal/power", "internal/policy", "internal/fleet",
	"internal/evidence", "internal/savings", "internal/instance", "internal/admit"}

// bands is the import law for code that is not a test.
var bands = []band{
	{"cmd", []string{"cmd"}, []string{"internal", "cmd"}},
	{"bench and demo", []string{"bench", "demo"}, []string{"internal", "bench"}},
	{"daemon", []string{"internal/daemon"}, []string{"own", "internal/link", "internal/edge", "internal/router", core, "internal/store", "internal/base"}},
	{"harness and shim", []string{"internal/harness", "internal/shim"},
		[]string{"own", "internal/link/guest", "internal/link/shimctl", "internal/edge/proc", "internal/edge/cgroup", "internal/idle", "internal/instance", "internal/base"}},
	{"router", []string{"internal/router"}, []string{"own", "internal/base"}},
	{"link", []string{"internal/link"}, []string{"own", core, "internal/link/tags", "internal/base"}},
	{"edge", []string{"internal/edge"}, []string{"own", core, "internal/store", "internal/base"}},
	{"sim", []string{"internal/sim"}, []string{"internal/sim", "internal/base"}},
	{"core", coreDirs, []string{core, "internal/store"}},
	{"store", []string{"internal/store"}, []string{"internal/store", "internal/base"}},
	{"base", []string{"internal/base"}, []string{"internal/base"}},
	{"house", []string{"internal/house"}, nil},
}

// exceptions are single wires that the design names beside the table.
var exceptions = map[[2]string]string{
	{"internal/edge/runtime/process", "internal/edge/cgroup"}:            "design, section 1",
	{"internal/edge/runtime/process", "internal/edge/sockets"}:           "design, section 1",
	{"internal/edge/runtime/process", "internal/edge/proc"}:              "reads its own tree's processes",
	{"internal/edge/runtime/process", "internal/link/shimctl"}:           "the shim keeps its children",
	{"internal/edge/runtime/container", "internal/edge/runtime/process"}: "runc is started, frozen and watched as a process is",
	{"internal/edge/runtime/container", "internal/edge/cgroup"}:          "runc makes groups below the instance's",
	{"internal/edge/runtime/container", "internal/edge/oci"}:             "its files come from images",
	{"internal/edge/runtime/docker", "internal/edge/runtime/process"}:    "a container's processes and sockets are read and watched as a process's are",
	{"internal/edge/runtime/docker", "internal/edge/cgroup"}:             "whether a container is still is the kernel's word, not Docker's",
	{"internal/edge/runtime/microvm", "internal/edge/oci"}:               "its files come from images",
	{"internal/edge/runtime/microvm", "internal/edge/proc"}:              "the disk traffic of a guest is QEMU's",
	{"internal/edge/runtime/microvm", "internal/link/guest"}:             "the harness in the guest is asked over the control channel",
	{"internal/edge/runtime/microvm", "internal/link/guest/files"}:       "and asks for the files of its workspace",
	{"internal/edge/runtime/microvm", "internal/link/guest/vsock"}:       "over vsock, where there is one",
	{"internal/edge/runtime/microvm/share", "internal/link/guest/files"}: "which this answers",
	{"internal/shim", "internal/edge/sockets"}:                           "only an ancestor may take a socket under Yama",
}

// Imports holds every package to the law. Tests may import what they need, but
// packages for tests (named ...test) are imported by tests and their like only.
func Imports(t *Tree) []Fault {
	var faults []Fault
	for _, dir := range t.Dirs() {
		row := bandOf(dir)
		if row == nil {
			faults = append(faults, Fault{dir, "cannot place the package: no band of the import law has it"})
			continue
		}
		for _, f := range t.Packages[dir].Files {
			if f.Test {
				continue
			}
			for _, spec := range f.AST.Imports {
				to, ok := own(strings.Trim(spec.Path.Value, "\"`"))
				if !ok {
					continue
				}
				if strings.HasSuffix(to, "test") && !strings.HasSuffix(dir, "test") {
					faults = append(faults, Fault{t.where(spec.Pos()), fmt.Sprintf("%s is for tests", to)})
				}
				if !row.allows(dir, to) {
					faults = append(faults, Fault{t.where(spec.Pos()), fmt.Sprintf("%s may not import %s: %s imports only %s",
						dir, to, row.Name, strings.Join(row.May, ", "))})
				}
			}
		}
	}
	return faults
}

func bandOf(dir string) *band {
	for i := range bands {
		if slices.ContainsFunc(bands[i].Root, func(root string) bool { return under(dir, root) }) {
			return &bands[i]
		}
	}
	return nil
}

func (b *band) allows(from, to string) bool {
	if _, ok := exceptions[[2]string{from, to}]; ok {
		return true
	}
	for _, may := range b.May {
		switch may {
		case core:
			if slices.ContainsFunc(coreDirs, func(root string) bool { return under(to, root) }) {
				return true
			}
		case "own":
			if under(to, b.subtree(from)) {
				return true
			}
		default:
			if under(to, may) {
				return true
			}
		}
	}
	return false
}

// subtree is what a package's "own" means: internal/daemon/host/fence belongs
// to internal/daemon/host, internal/edge/runtime/process to its own folder.
func (b *band) subtree(dir string) string {
	for _, root := range b.Root {
		rest, ok := strings.CutPrefix(dir, root+"/")
		if !ok {
			continue
		}
		parts := strings.Split(rest, "/")
		n := 1
		if root == "internal/edge" && parts[0] == "runtime" {
			n = 2
		}
		return root + "/" + strings.Join(parts[:min(n, len(parts))], "/")
	}
	return dir
}

// heavy are the dependencies that the small helpers never carry.
var heavy = []string{"go.etcd.io/", "github.com/aws/", "github.com/danielgtaylor/huma", "gvisor.dev/",
	"github.com/containers/gvisor-tap-vsock", "google.golang.org/", "github.com/prometheus/", "go.opentelemetry.io/",
	"github.com/spf13/cobra", "net/http", "crypto/tls"}

// helpers are the programs that stay small, and the packages they run.
var helpers = []string{"cmd/lull-harness", "cmd/lull-shim", "internal/harness", "internal/shim"}

// Light holds the helpers free of heavy dependencies: it follows the imports
// of their packages through this module and looks at every import that leaves it.
func Light(t *Tree) []Fault {
	var faults []Fault
	for _, root := range helpers {
		if t.Packages[root] == nil {
			continue
		}
		seen := map[string]bool{root: true}
		for queue := []string{root}; len(queue) > 0; queue = queue[1:] {
			p := t.Packages[queue[0]]
			if p == nil {
				continue
			}
			for _, f := range p.Files {
				if f.Test {
					continue
				}
				for _, spec := range f.AST.Imports {
					to := strings.Trim(spec.Path.Value, "\"`")
					if dir, ok := own(to); ok {
						if !seen[dir] {
							seen[dir] = true
							queue = append(queue, dir)
						}
					} else if slices.ContainsFunc(heavy, func(h string) bool { return strings.HasPrefix(to, h) }) {
						faults = append(faults, Fault{t.where(spec.Pos()), fmt.Sprintf("%s must stay small and carries %s", root, to)})
					}
				}
			}
		}
	}
	return faults
}
