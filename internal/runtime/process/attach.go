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

// Attach returns a Work for processes that were started outside lull: those of the
// group g or, if g is nil, pid and its descendants. Their sockets are in pid's
// network namespace. alone reports whether nothing else uses that namespace; nil
// means unknown. The shim does not manage these processes. If pid does not exist,
// Attach returns a *instance.GoneError.
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

// kinPIDs lists a tree that lull did not start. Its processes carry no mark, so a
// process whose parents have exited is found only if an earlier listing included
// it.
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

// Kin returns the processes of a tree that lull did not start, according to the
// last listing.
func (w *Work) Kin() (out []shimctl.Process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for pid, start := range w.kin {
		out = append(out, shimctl.Process{PID: pid, Start: start})
	}
	return out
}

// Recall takes over a tree that lull did not start and that an earlier daemon may
// have stopped. known are the processes that the earlier daemon had listed. A thaw
// continues all of them.
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

// PIDs returns the processes of the run. It does not use a cached search.
func (w *Work) PIDs() ([]int, error) { return w.pids(true) }

// Timers implements instance.Scheduled. It returns the timers of the cron daemons
// in the tree. Timers of processes that cannot be listed are unknown.
func (w *Work) Timers() (instance.Timers, error) {
	pids, err := w.pids(true)
	if err != nil && len(pids) == 0 {
		return nil, err
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

// continueTree continues the processes that stopTree stopped, even if the main
// process has ended. PIDs that now belong to other processes are left alone.
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

// WhenGone tells the shim which request to make for id when this daemon has ended:
// a POST to path on a unix socket. An empty socket cancels that.
func (r *Runtime) WhenGone(ctx context.Context, id, socket, path string) error {
	return r.whenGone(ctx, shimctl.Outside{ID: id, Socket: socket, Path: path})
}

// ContinueWhenGone is WhenGone for a guest that QEMU has paused. socket is one of
// QEMU's monitors.
func (r *Runtime) ContinueWhenGone(ctx context.Context, id, socket string) error {
	return r.whenGone(ctx, shimctl.Outside{ID: id, Socket: socket, QMP: socket != ""})
}

// ThawWhenGone tells the shim what to thaw for id when this daemon has ended: a
// control group, or the processes of tree with their descendants. With neither, it
// cancels that.
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

// KeepOpen makes the shim keep a descriptor open under id while a daemon restarts,
// replacing an earlier one. With an fd of -1 it keeps none.
func (r *Runtime) KeepOpen(ctx context.Context, id string, fd int) error {
	if err := r.shim().KeepOpen(ctx, id, fd); err != nil {
		return fmt.Errorf("cannot hand a descriptor to the shim: %w", err)
	}
	return nil
}
