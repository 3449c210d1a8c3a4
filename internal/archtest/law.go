package archtest

import (
	"fmt"
	"slices"
	"strings"
)

// band is one row of the import law: a set of packages, and those they may
// import. "own" stands for the importer's own subtree: see shelves.
type band struct {
	Name string
	Root []string
	May  []string
}

const core = "core"

// cli are the verbs. Only cmd imports them.
const cli = "internal/cli"

// coreDirs are the packages that decide and the nouns they decide about.
var coreDirs = []string{"internal/core", "internal/fleet"}

// bands is the import law for code that is not a test.
var bands = []band{
	{"cmd", []string{"cmd"}, []string{"internal", "cmd"}},
	{"cli", []string{cli}, []string{cli, "internal/protocol", "internal/platform", core, "internal/lib"}},
	{"bench and demo", []string{"bench", "demo"}, []string{"internal", "bench"}},
	{"test", []string{"test"}, []string{"own"}},
	{"daemon", []string{"internal/agent", "internal/controller", "internal/host", "internal/notify", "internal/server"},
		[]string{"own", "internal/protocol", "internal/platform", "internal/runtime", "internal/relay", core, "internal/store", "internal/lib"}},
	{"guestagent and shim", []string{"internal/guestagent", "internal/shim"},
		[]string{"own", "internal/protocol/guest", "internal/protocol/shimctl", "internal/platform/proc", "internal/platform/cgroup", "internal/platform/sockets",
			"internal/core/idle", "internal/core/instance", "internal/lib"}},
	{"relay", []string{"internal/relay"}, []string{"own", "internal/lib"}},
	{"runtime", []string{"internal/runtime"}, []string{"own", "internal/platform", "internal/protocol/shimctl", "internal/protocol/guest", core, "internal/lib"}},
	{"protocol", []string{"internal/protocol"}, []string{"own", core, "internal/protocol/tags", "internal/lib"}},
	{"platform", []string{"internal/platform"}, []string{"own", core, "internal/store", "internal/lib"}},
	{"sim", []string{"internal/sim"}, []string{"internal/sim", "internal/lib"}},
	{"core", coreDirs, []string{core, "internal/store"}},
	{"store", []string{"internal/store"}, []string{"internal/store", "internal/lib"}},
	{"lib", []string{"internal/lib"}, []string{"internal/lib"}},
	{"archtest", []string{"internal/archtest"}, nil},
}

// shelves are roots whose folders are separate parts: for a package below one of
// them "own" is its folder there, elsewhere it is the whole root.
var shelves = []string{"internal/platform", "internal/protocol", "internal/runtime", "cmd", "bench", "test/e2e"}

// exceptions are single imports that the table does not allow, each with its
// reason.
var exceptions = map[[2]string]string{
	{"internal/cli/reporting", "internal/agent"}:               "lull agent enroll reads a token as the agent will read it",
	{"internal/cli/setup", "internal/agent"}:                   "the installed policy file is the agent's own example",
	{"internal/runtime/adopted", "internal/runtime/process"}:   "what already runs is read, frozen and watched as a process is",
	{"internal/runtime/container", "internal/runtime/process"}: "runc is started, frozen and watched as a process is",
	{"internal/runtime/docker", "internal/runtime/process"}:    "a container's processes and sockets are read and watched as a process's are",
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

// bandNamed returns a row of the law by its name.
func bandNamed(name string) *band {
	return &bands[slices.IndexFunc(bands, func(b band) bool { return b.Name == name })]
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
	if under(to, cli) && b.Name != "cmd" && b.Name != "cli" {
		return false
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

// subtree returns what "own" means for a package of the band.
func (b *band) subtree(dir string) string {
	for _, root := range b.Root {
		if !under(dir, root) {
			continue
		}
		if rest, ok := strings.CutPrefix(dir, root+"/"); ok && slices.Contains(shelves, root) {
			first, _, _ := strings.Cut(rest, "/")
			return root + "/" + first
		}
		return root
	}
	return dir
}

// heavy are the dependencies that the small helpers never carry.
var heavy = []string{"go.etcd.io/", "github.com/aws/", "github.com/danielgtaylor/huma", "gvisor.dev/",
	"github.com/containers/gvisor-tap-vsock", "google.golang.org/", "github.com/prometheus/", "go.opentelemetry.io/",
	"github.com/spf13/cobra", "net/http", "crypto/tls"}

// helpers are the programs that stay small, and the packages they run.
var helpers = []string{"cmd/lull-harness", "cmd/lull-shim", "internal/guestagent", "internal/shim"}

// Light keeps the helpers free of heavy dependencies: it follows the imports of
// their packages through this module and checks every import that leaves it.
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
