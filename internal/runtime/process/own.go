package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/platform/proc"
	"lull/internal/platform/sockets"
	"lull/internal/protocol/shimctl"
)

// holdings lists the sockets and files of the tree at one moment.
type holdings struct {
	cpu     time.Duration // CPU time of the tree, read before the search
	exact   bool          // the search is valid as long as the CPU time is cpu
	own     map[uint64]place
	disk    uint64
	diskErr error

	sockets []sockets.Info // the last reading
	moved   bool           // some sockets were closed or moved while they were read
	again   []group        // where to read the sockets again while the tree does not run; nil if impossible
	names   []names        // addresses of sockets, in the same order; nil until needed
}

// group lists descriptors of one process whose sockets are adjacent in
// holdings.sockets.
type group struct {
	pid int
	fds []int
}

// names are the addresses of a connection as text.
type names struct{ local, remote string }

// searches is how often a tree is searched at most if sockets are moved while they
// are read.
const searches = 3

// read searches the tree and reads its sockets. If exact is set, the last search is
// reused if the tree's CPU time is still cpu, which the caller read before. A
// frozen tree is always searched. w.reading must be held; the result is valid until
// it is released.
func (w *Work) read(cpu time.Duration, exact, frozen bool) (*holdings, error) {
	h := &w.known
	if exact && !frozen && h.exact && h.cpu == cpu && h.again != nil && refresh(h) == nil {
		return h, nil
	}
	for n := 1; ; n++ {
		*h = holdings{}
		if err := w.search(h); err != nil {
			return h, err
		}
		err := w.inspect(h, n == searches && !frozen)
		if err == nil {
			h.cpu, h.exact = cpu, exact
			return h, nil
		}
		if !errors.Is(err, sockets.ErrGone) || n == searches {
			return h, err
		}
	}
}

// refresh reads the sockets of h again, in the places where they were found.
func refresh(h *holdings) error {
	rest := h.sockets
	for _, g := range h.again {
		if err := sockets.Refresh(g.pid, g.fds, rest[:len(g.fds)]); err != nil {
			h.again = nil
			return err
		}
		rest = rest[len(g.fds):]
	}
	return nil
}

// search fills in the sockets and the disk traffic of the tree's processes.
func (w *Work) search(h *holdings) error {
	pids, err := w.pids(false)
	if err != nil && !errors.Is(err, proc.ErrUnsettled) {
		err = fmt.Errorf("cannot list the processes of %s: %w", w.id, err)
		h.diskErr = err
		return err
	}
	h.disk, h.diskErr = w.disk(pids)
	h.own, err = w.socketsOf(pids)
	return err
}

// place is a descriptor of a process.
type place struct{ pid, fd int }

// sockets returns the inode of every socket of the tree, with one place where it is
// open.
func (w *Work) sockets() (map[uint64]place, error) {
	pids, err := w.pids(false)
	if err != nil && !errors.Is(err, proc.ErrUnsettled) {
		return nil, fmt.Errorf("cannot list the processes of %s: %w", w.id, err)
	}
	return w.socketsOf(pids)
}

func (w *Work) socketsOf(pids []int) (map[uint64]place, error) {
	out := map[uint64]place{}
	for _, pid := range pids {
		fds, err := w.r.fs.Sockets(pid)
		if errors.Is(err, proc.ErrGone) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("cannot list the sockets of process %d: %w", pid, err)
		}
		for _, f := range fds {
			if _, ok := out[f.Inode]; !ok {
				out[f.Inode] = place{pid, f.FD}
			}
		}
	}
	return out, nil
}

// inspect reads the sockets of h. If skip is set, sockets that have gone are left
// out and h.moved is set. Otherwise they are an error that wraps sockets.ErrGone.
func (w *Work) inspect(h *holdings, skip bool) error {
	if f := w.net.given; f != nil {
		return f.inspect(h)
	}
	h.sockets, h.moved, h.again, h.names = make([]sockets.Info, 0, len(h.own)), false, []group{}, nil
	seen := map[uint64]bool{}
	err := w.r.duplicates(h.own, func(_ uint64, at place, fd int, err error) error {
		var in sockets.Info
		if err == nil {
			in, err = sockets.Inspect(fd)
		}
		if errors.Is(err, unix.ENOTSOCK) {
			err = fmt.Errorf("a socket was replaced by a file: %w", sockets.ErrGone)
		}
		switch {
		case err == nil && !seen[in.Inode]: // if the descriptor was reused, this is another socket, which may have been read already
			seen[in.Inode] = true
			h.sockets = append(h.sockets, in)
			if n := len(h.again) - 1; n >= 0 && h.again[n].pid == at.pid {
				h.again[n].fds = append(h.again[n].fds, at.fd)
			} else {
				h.again = append(h.again, group{at.pid, []int{at.fd}})
			}
		case skip && errors.Is(err, sockets.ErrGone):
			h.moved = true
			return nil
		}
		return err
	})
	if len(h.sockets) != len(h.own) {
		h.again = nil
	}
	return err
}

// duplicates calls do with a duplicate of each socket, or with the error why there
// is none. It closes each duplicate before it makes the next, because a duplicate
// that outlives the program's own descriptor delays the end of the connection. It
// stops when do returns an error.
func (r *Runtime) duplicates(own map[uint64]place, do func(inode uint64, at place, fd int, err error) error) error {
	type socket struct {
		place
		inode uint64
	}
	all := make([]socket, 0, len(own))
	for inode, at := range own {
		all = append(all, socket{at, inode})
	}
	slices.SortFunc(all, func(a, b socket) int { return cmp.Or(cmp.Compare(a.pid, b.pid), cmp.Compare(a.fd, b.fd)) })
	var p sockets.Process
	var perr error
	opened := 0
	defer func() {
		if opened != 0 && perr == nil {
			p.Close()
		}
	}()
	for _, s := range all {
		if s.pid != opened {
			if opened != 0 && perr == nil {
				p.Close()
			}
			opened = s.pid
			p, perr = sockets.OpenProcess(s.pid)
		}
		fd, err := -1, perr
		if err == nil {
			fd, err = p.Duplicate(s.fd)
		}
		if errors.Is(err, sockets.ErrNotPermitted) {
			fd, err = r.duplicateByShim(s.place, err)
		}
		derr := do(s.inode, s.place, fd, err)
		if err == nil {
			unix.Close(fd)
		}
		if derr != nil {
			return derr
		}
	}
	return nil
}

// duplicateByShim makes the shim duplicate a descriptor. As an ancestor of the
// process, the shim may do so even if Yama forbids it to others. If it fails, the
// error is refused.
func (r *Runtime) duplicateByShim(at place, refused error) (int, error) {
	fds, err := r.dupByShim(at.pid, []int{at.fd})
	if err != nil || len(fds) != 1 {
		shimctl.CloseAll(fds)
		return -1, refused
	}
	return fds[0], nil
}

// waitingFor returns the connections waiting on sockets that the shim holds for an
// instance and that the program does not have.
func (r *Runtime) waitingFor(id string, own map[uint64]place) (out []instance.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := r.held[id]
	for n, inode := range k.inodes {
		if _, ok := own[inode]; ok {
			continue
		}
		var in sockets.Info
		err := k.with(n, func(fd int) (err error) { in, err = sockets.Inspect(fd); return err })
		if err == nil && in.Listening {
			out = append(out, waiting(&in)...)
		}
	}
	return out
}

// dupByShim duplicates descriptors of a process through the shim.
func (r *Runtime) dupByShim(pid int, fds []int) ([]int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dupLimit)
	defer cancel()
	return r.shim().Dup(ctx, pid, fds)
}
