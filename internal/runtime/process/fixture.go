package process

import (
	"context"
	"slices"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/proc"
	"lull/internal/platform/sockets"
)

// Fixture is a recorded or simulated machine. Its instances are sampled like real
// ones.
type Fixture struct {
	Proc  string        // directory with the layout of /proc
	Group *cgroup.Group // the control group of the instance
	// Sockets returns the TCP and UDP sockets that q selects by state and protocol,
	// in place of the kernel. A fixture has no unix sockets.
	Sockets func(q sockets.Query) ([]sockets.Socket, error)
}

// Work returns a run on the fixture. Only its methods Sample, Froze and AtWork may
// be called.
func (f *Fixture) Work(id string, ident instance.Identity) *Work {
	r := &Runtime{fs: proc.At(f.Proc), works: map[string]*Work{}}
	r.strays.r, r.heart.r = r, r
	return &Work{r: r, id: id, ident: ident, group: f.Group, net: &namespace{given: f}}
}

// inspect fills in the sockets of h from the fixture's list.
func (f *Fixture) inspect(h *holdings) error {
	all, err := f.Sockets(sockets.Query{Info: true, States: []sockets.State{sockets.Listen, sockets.Established, sockets.CloseWait}})
	h.sockets = nil
	for n := range all {
		s := &all[n]
		if _, ok := h.own[s.Inode]; !ok {
			continue
		}
		in := sockets.Info{Family: int(s.Family), Type: unix.SOCK_STREAM, Protocol: unix.IPPROTO_TCP, Inode: s.Inode, State: s.State,
			Local: s.Local, Traffic: s.Traffic, InfoSize: s.InfoSize}
		if in.Listening = s.State == sockets.Listen; in.Listening {
			in.Waiting = s.RQueue
		} else {
			in.Connected, in.Peer, in.Unread = true, s.Remote, s.RQueue
		}
		h.sockets = append(h.sockets, in)
	}
	return err
}

// lookup is sockets.Lookup for the fixture.
func (f *Fixture) lookup(_ context.Context, _ int, pairs []sockets.Pair) ([]sockets.Socket, error) {
	all, err := f.Sockets(sockets.Query{Info: true, States: []sockets.State{sockets.Established, sockets.CloseWait, sockets.TimeWait}})
	return slices.DeleteFunc(all, func(s sockets.Socket) bool {
		return !slices.Contains(pairs, sockets.Pair{Local: s.Local, Remote: s.Remote})
	}), err
}
