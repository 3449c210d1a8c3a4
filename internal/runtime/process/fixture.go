package process

import (
	"lull/internal/core/instance"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/proc"
	"lull/internal/platform/sockets"
)

// Fixture is a machine that is not this one: a recorded or simulated one, whose
// instances are sampled as real ones are.
type Fixture struct {
	Proc  string        // directory with the layout of /proc
	Group *cgroup.Group // the control group of the instance
	// Sockets takes the place of the kernel's list of TCP and UDP sockets, with
	// the states and the protocol that q selects. There are no unix sockets.
	Sockets func(q sockets.Query) ([]sockets.Socket, error)
}

// Work returns a run of the fixture. Only Sample, Froze and AtWork work on it.
func (f *Fixture) Work(id string, ident instance.Identity) *Work {
	r := &Runtime{fs: proc.At(f.Proc), works: map[string]*Work{}}
	r.strays.r, r.heart.r = r, r
	return &Work{r: r, id: id, ident: ident, group: f.Group, table: &tableCache{given: f}}
}
