package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"lull/internal/core/instance"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/proc"
	"lull/internal/platform/proc/crontab"
	"lull/internal/protocol/shimctl"
)

// Attach returns a Work for processes that were started outside lull. They are
// the processes of the group or, without one, pid and its descendants. Their
// sockets are those of pid's network namespace; alone reports whether nothing
// else uses that namespace, nil if unknown. The shim does not manage them.
// Attach returns a *instance.GoneError if pid does not exist.
func (r *Runtime) Attach(id string, run uint64, pid int, g *cgroup.Group, alone func() bool) (*Work, error) {
	s, err := r.fs.Stat(pid)
	if errors.Is(err, proc.ErrGone) || err == nil && s.Ended() {
		return nil, &instance.GoneError{ID: id, Exit: instance.Exit{Lost: true, At: time.Now()}}
	}
	if err != nil {
		return nil, fmt.Errorf("cannot inspect process %d of %s: %w", pid, id, err)
	}
	w := &Work{r: r, net: r.namespaceOf(pid), alone: alone, id: id, group: g,
		ident: instance.Identity{BootID: r.boot, PID: pid, Start: s.Start, Run: run}}
	if g != nil {
		w.ident.Cgroup = g.Dir()
	} else {
		w.kin = map[int]uint64{pid: s.Start}
	}
	return w, nil
}

// namespaceOf returns the network namespace of pid.
func (r *Runtime) namespaceOf(pid int) *namespace {
	own, err := os.Stat("/proc/self/ns/net")
	if err == nil {
		var its os.FileInfo
		if its, err = os.Stat(fmt.Sprintf("/proc/%d/ns/net", pid)); err == nil && os.SameFile(own, its) {
			return &r.net
		}
	}
	return &namespace{pid: pid}
}

// kinPIDs lists a tree that lull did not start. Nothing marks its processes, so
// one that left its parents is found only if an earlier listing had it.
func (w *Work) kinPIDs() ([]int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []int
	var errs []error
	for pid, start := range w.kin {
		s, err := w.r.fs.Stat(pid)
		if errors.Is(err, proc.ErrGone) || err == nil && s.Start != start {
			delete(w.kin, pid)
			continue
		}
		if slices.Contains(all, pid) {
			continue
		}
		pids, err := w.r.fs.Tree(pid, "", nil)
		all, errs = append(all, pids...), append(errs, err)
	}
	slices.Sort(all)
	all = slices.Compact(all)
	for _, pid := range all {
		if _, known := w.kin[pid]; !known {
			if s, err := w.r.fs.Stat(pid); err == nil {
				w.kin[pid] = s.Start
			}
		}
	}
	return all, errors.Join(errs...)
}

// Kin returns the processes of a tree that lull did not start, as of the last
// listing.
func (w *Work) Kin() (out []shimctl.Process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for pid, start := range w.kin {
		out = append(out, shimctl.Process{PID: pid, Start: start})
	}
	return out
}

// Recall takes over a tree that lull did not start and that an earlier daemon may
// have stopped. known are its processes as of then. A thaw continues all of them.
func (w *Work) Recall(known []shimctl.Process) error {
	w.mu.Lock()
	for _, p := range known {
		if _, ok := w.kin[p.PID]; !ok {
			w.kin[p.PID] = p.Start
		}
	}
	w.mu.Unlock()
	return w.findStopped()
}

// Group returns its control group, nil if it has none.
func (w *Work) Group() *cgroup.Group { return w.group }

// PIDs lists the processes of the run now.
func (w *Work) PIDs() ([]int, error) { return w.pids(true) }

// Timers implements instance.Scheduled: those of the crons in the tree.
func (w *Work) Timers() (instance.Timers, error) {
	pids, err := w.pids(true)
	if err != nil && len(pids) == 0 {
		return nil, nil // the sample says so
	}
	t, err := crontab.Read(pids)
	if t == nil {
		return nil, err
	}
	return t, err
}

// stopTree stops a tree that lull did not start.
func (w *Work) stopTree(ctx context.Context) error {
	pids, err := cgroup.StopTree(ctx, tree{w})
	if err != nil {
		return err
	}
	w.setFrozen(true, pids)
	return nil
}

// continueTree continues what stopTree stopped, even if its main process has
// ended since. PIDs that belong to other processes by now are left alone.
func (w *Work) continueTree() error {
	w.mu.Lock()
	pids := slices.DeleteFunc(slices.Clone(w.stopped), func(pid int) bool {
		s, err := w.r.fs.Stat(pid)
		return errors.Is(err, proc.ErrGone) || err == nil && s.Start != w.kin[pid]
	})
	w.mu.Unlock()
	if err := cgroup.ContinueEach(pids); err != nil {
		return err
	}
	w.setFrozen(false, nil)
	return nil
}

// WhenGone tells the shim what to do for id when this daemon has ended: a POST
// to path on a unix socket. An empty socket cancels that.
func (r *Runtime) WhenGone(ctx context.Context, id, socket, path string) error {
	return r.whenGone(ctx, shimctl.Outside{ID: id, Socket: socket, Path: path})
}

// ContinueWhenGone is WhenGone for a guest that QEMU has paused; socket is one of
// its monitors.
func (r *Runtime) ContinueWhenGone(ctx context.Context, id, socket string) error {
	return r.whenGone(ctx, shimctl.Outside{ID: id, Socket: socket, QMP: socket != ""})
}

// ThawWhenGone is WhenGone for things that this daemon freezes in place: a
// control group, or processes with their descendants. Neither of them cancels
// it.
func (r *Runtime) ThawWhenGone(ctx context.Context, id, group string, tree []shimctl.Process) error {
	return r.whenGone(ctx, shimctl.Outside{ID: id, Group: group, Tree: tree})
}

func (r *Runtime) whenGone(ctx context.Context, o shimctl.Outside) error {
	if o.Socket == "" && o.Group == "" && len(o.Tree) == 0 {
		defer r.heart.drop("outside " + o.ID)
	} else {
		r.heart.hold("outside " + o.ID)
	}
	if err := r.shim().Outside(ctx, o); err != nil {
		return fmt.Errorf("cannot hand %.20s to the shim: %w", o.ID, err)
	}
	return nil
}

// KeepOpen has the shim keep a descriptor open while a daemon restarts, in place of
// the one that it keeps under id; with -1 it keeps none.
func (r *Runtime) KeepOpen(ctx context.Context, id string, fd int) error {
	if err := r.shim().KeepOpen(ctx, id, fd); err != nil {
		return fmt.Errorf("cannot hand a descriptor to the shim: %w", err)
	}
	return nil
}
