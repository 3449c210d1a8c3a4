package process

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/proc"
	"lull/internal/platform/sockets"
	"lull/internal/protocol/shimctl"
)

// Work is one run; it implements instance.Workload.
type Work struct {
	r       *Runtime
	id      string
	ident   instance.Identity
	group   *cgroup.Group  // nil if the freezer uses signals
	net     *namespace     // network namespace of the run
	alone   func() bool    // reports whether nothing else uses that namespace; nil if unknown
	kin     map[int]uint64 // for a tree that lull did not start: start times by PID; otherwise nil. Guarded by mu
	logPath string
	logMax  int64
	user    string
	handoff bool // the program's binds are reported

	// waitedFor is set while a client waits on one of the program's own sockets.
	// The daemon then has nothing to do for the client after the thaw.
	waitedFor atomic.Bool

	// reading is held during a sample. It guards the fields down to mu, and must be
	// locked before mu.
	reading sync.Mutex
	known   holdings // the newest search of the tree; empty if that was while it was frozen
	bytes   netCount
	turns   turns
	spare   spare
	exposed exposedPorts

	mu      sync.Mutex
	stopped []int // processes that were sent SIGSTOP
	frozen  bool
	mute    bool // the program's binds are no longer reported
	past    past
	io      proc.Tally // disk traffic
	jvms    counters
	closing map[uint64]bool // inodes of connections that were in CLOSE_WAIT at the last probe of the running tree
	closed  time.Time       // since when the program has not had a kept socket; zero if it has all
}

var _ instance.Workload = (*Work)(nil)

// Identity implements instance.Workload.
func (w *Work) Identity() instance.Identity { return w.ident }

func (w *Work) asRun() shimctl.Run {
	run := shimctl.Run{ID: w.id, Run: w.ident.Run, PID: w.ident.PID, Start: w.ident.Start, BootID: w.ident.BootID,
		LogPath: w.logPath, LogMax: w.logMax, User: w.user, Handoff: w.handoff}
	if w.group != nil {
		run.Cgroups = w.group.Dirs()
	}
	return run
}

// Alive reports whether the main process of the run still exists. An error means
// that this is unknown.
func (w *Work) Alive() (bool, error) {
	s, err := w.r.fs.Stat(w.ident.PID)
	if errors.Is(err, proc.ErrGone) {
		return false, nil
	}
	return err == nil && s.Start == w.ident.Start && !s.Ended(), err
}

// Holds reports whether a process belongs to the instance at present.
func (w *Work) Holds(pid int) (bool, error) {
	pids, err := w.pids(true)
	return slices.Contains(pids, pid), err
}

// tree implements cgroup.Processes.
type tree struct{ w *Work }

func (t tree) Tree() ([]int, error) { return t.w.pids(true) }

func (t tree) Still(pid int) (bool, error) {
	tasks, err := t.w.r.fs.Tasks(pid)
	if errors.Is(err, proc.ErrGone) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	for _, k := range tasks {
		if !k.Still() {
			return false, nil
		}
	}
	return true, nil
}

// Freeze implements instance.Workload.
func (w *Work) Freeze(ctx context.Context) error {
	w.r.heart.hold(w.id)
	if w.group != nil {
		if err := w.group.Freeze(ctx); err != nil {
			return err
		}
		w.setFrozen(true, nil)
		return nil
	}
	if live, err := w.Alive(); err != nil || !live {
		return errors.Join(fmt.Errorf("cannot stop process %d: it does not exist", w.ident.PID), err)
	}
	if w.kin != nil {
		return w.stopTree(ctx)
	}
	pids, err := cgroup.Stop(ctx, w.ident.PID, tree{w})
	if err != nil {
		return err
	}
	w.setFrozen(true, pids)
	return nil
}

// Froze records a freeze or thaw made by other means, such as Docker's, so that
// Sample does not use readings from before a freeze.
func (w *Work) Froze(on bool) { w.setFrozen(on, nil) }

func (w *Work) setFrozen(on bool, pids []int) {
	w.mu.Lock()
	w.past.thawed = w.past.thawed || w.frozen && !on
	w.frozen, w.stopped = on, pids
	w.mu.Unlock()
	if !on {
		w.r.heart.drop(w.id)
	}
}

// Thaw implements instance.Workload.
func (w *Work) Thaw() error {
	if w.group != nil {
		if err := w.group.ThawThen(w.giveWay); err != nil {
			return err
		}
		w.setFrozen(false, nil)
		return nil
	}
	if w.kin != nil {
		return w.continueTree()
	}
	w.mu.Lock()
	pids := w.stopped
	w.mu.Unlock()
	if err := cgroup.Continue(w.ident.PID, pids); err != nil {
		return err
	}
	w.giveWay()
	w.setFrozen(false, nil)
	return nil
}

// The kernel often runs a thawed program on the CPU of the thread that thawed it,
// and sched_yield does not make that thread wait. The daemon's remaining work, such
// as recording the wake, then delays the program's answer more than the thaw
// itself. The thread therefore sleeps for headStart, in which the program can
// answer. If many programs are thawed one after the other, there is at most one
// head start per headStarts.
const (
	headStart  = 200 * time.Microsecond
	headStarts = 20 * headStart
)

// lastHeadStart is the time of the last head start, in nanoseconds since began.
var (
	lastHeadStart atomic.Int64
	began         = time.Now()
)

// giveWay leaves this CPU to a program that was thawed for a client.
func (w *Work) giveWay() {
	now := int64(time.Since(began))
	if last := lastHeadStart.Load(); !w.waitedFor.Load() || last != 0 && now-last < int64(headStarts) {
		cgroup.GiveWay()
		return
	}
	lastHeadStart.Store(now)
	// This bypasses Go's runtime, whose monitor would wake up first and compete for
	// the CPU. A signal may end the sleep early.
	_, _, _ = unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&unix.Timespec{Nsec: int64(headStart)})), 0, 0)
}

// Still implements instance.Workload.
func (w *Work) Still() (bool, error) {
	if w.group != nil {
		return w.group.Frozen()
	}
	return tree{w}.Still(w.ident.PID)
}

// Exiting implements instance.Workload.
func (w *Work) Exiting() (bool, error) { return w.SignalPending(w.ident.PID, syscall.SIGTERM) }

// SignalPending reports whether a signal is pending for a process of the instance.
func (w *Work) SignalPending(pid int, sig syscall.Signal) (bool, error) {
	return w.r.fs.Pending(pid, sig)
}

// findStopped takes over processes that an earlier daemon has stopped by signals.
func (w *Work) findStopped() error {
	pids, err := w.pids(true)
	if err != nil {
		return fmt.Errorf("cannot list the processes of %s: %w", w.id, err)
	}
	w.setFrozen(true, pids) // a thaw continues all of them, stopped or not
	return nil
}

// Signal implements instance.Workload.
func (w *Work) Signal(sig syscall.Signal) error {
	switch live, err := w.Alive(); {
	case err != nil:
		return fmt.Errorf("cannot signal process %d: %w", w.ident.PID, err)
	case !live: // the PID may belong to another process now
		return fmt.Errorf("cannot signal process %d: %w", w.ident.PID, syscall.ESRCH)
	}
	if err := unix.Kill(w.ident.PID, sig); err != nil {
		return fmt.Errorf("cannot signal process %d: %w", w.ident.PID, err)
	}
	return nil
}

// Kill implements instance.Workload.
func (w *Work) Kill(ctx context.Context) error {
	if w.group != nil {
		return w.group.Kill(ctx)
	}
	for {
		// A listing can fail temporarily, for example while a process executes
		// another program. That does not mean that the run has ended, so it is
		// tried again.
		pids, lerr := w.pids(true)
		left := 0
		for _, pid := range pids {
			s, err := w.r.fs.Stat(pid)
			if errors.Is(err, proc.ErrGone) || err == nil && s.Ended() {
				continue
			}
			left++
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
				return fmt.Errorf("cannot kill process %d: %w", pid, err)
			}
		}
		if left == 0 && lerr == nil {
			return nil
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("cannot end %s: %d processes remain: %w", w.id, left, context.Cause(ctx)), lerr)
		}
	}
}

// Memory implements instance.Workload.
func (w *Work) Memory() (int64, error) {
	pids, err := w.pids(false)
	if err != nil {
		return 0, fmt.Errorf("cannot list the processes of %s: %w", w.id, err)
	}
	var pages int64
	for _, pid := range pids {
		s, err := w.r.fs.Stat(pid)
		if errors.Is(err, proc.ErrGone) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("cannot read the memory of %s: %w", w.id, err)
		}
		pages += int64(s.RSS)
	}
	return pages * int64(os.Getpagesize()), nil
}

// Reclaim implements instance.Workload. It uses memory.reclaim if available, and
// MADV_PAGEOUT on every mapping otherwise.
func (w *Work) Reclaim(ctx context.Context) (int64, error) {
	w.mu.Lock()
	frozen := w.frozen
	w.mu.Unlock()
	if !frozen {
		return 0, fmt.Errorf("cannot page out the memory of %s: it runs", w.id)
	}
	before, err := w.Memory()
	if err != nil {
		return 0, err
	}
	pids, err := w.pids(false)
	if err != nil {
		return 0, err
	}
	if w.group == nil || w.group.Reclaim(before) != nil {
		var errs []error
		for _, pid := range pids {
			if ctx.Err() != nil {
				return 0, ctx.Err()
			}
			if err := w.r.pageOut(pid); err != nil && !errors.Is(err, proc.ErrGone) {
				errs = append(errs, err)
			}
		}
		if len(errs) == len(pids) && len(errs) > 0 {
			return 0, errors.Join(errs...)
		}
	}
	after, err := w.Memory()
	return max(before-after, 0), err
}

// moves is how often listeners is tried if sockets are moved meanwhile.
const moves = 20

// Listeners implements instance.Workload.
func (w *Work) Listeners() (l []instance.Listener, err error) {
	for range moves {
		if l, err = w.listeners(); !errors.Is(err, sockets.ErrGone) {
			break
		}
	}
	return l, err
}

// listeners reads the sockets of the tree. It returns an error if a socket was
// moved after it was found; the caller must then search again. A starting program
// moves the sockets that it inherits, so this does not mean that a socket is gone.
func (w *Work) listeners() (out []instance.Listener, err error) {
	own, err := w.sockets()
	if err != nil {
		return nil, err
	}
	return w.listenersAmong(own)
}

func (w *Work) listenersAmong(own map[uint64]place) (out []instance.Listener, err error) {
	kept := w.r.keptPaths(w.id)
	hidden := map[uint64]place{}
	var why error
	err = w.r.duplicates(own, func(inode uint64, at place, fd int, err error) error {
		var in sockets.Info
		if err == nil {
			in, err = sockets.Inspect(fd)
		}
		switch {
		case errors.Is(err, sockets.ErrGone) || errors.Is(err, unix.ENOTSOCK):
			return fmt.Errorf("cannot read the listeners: descriptor %d of process %d was moved meanwhile: %w", at.fd, at.pid, sockets.ErrGone)
		case err != nil:
			hidden[inode], why = at, err
			return nil
		}
		if l, ok := listenerOf(&in, at, kept); ok && !slices.Contains(out, l) {
			out = append(out, l)
		}
		return nil
	})
	if err != nil || len(hidden) == 0 {
		return out, err
	}
	return w.hiddenListeners(out, hidden, why)
}

// listenerOf returns a socket as a listener, if it is one. A kept unix socket is
// returned with its exposed path, whatever path it was bound to.
func listenerOf(in *sockets.Info, at place, kept map[uint64]string) (instance.Listener, bool) {
	l := instance.Listener{PID: at.pid, Watchable: true}
	switch {
	case in.Family == unix.AF_UNIX:
		if l.Network, l.Addr = instance.ProtoUnix, cmp.Or(kept[in.Inode], in.Path); !in.Listening || in.Path == "" || strings.HasPrefix(in.Path, "@") {
			return l, false
		}
		if !filepath.IsAbs(l.Addr) {
			if dir, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", at.pid)); err == nil {
				l.Addr = filepath.Join(dir, l.Addr)
			}
		}
		l.Addr = movedTo(l.Addr)
	case in.Listening && in.Local.IsValid():
		l.Network, l.Addr = "tcp", in.Local.String()
	case in.Type == unix.SOCK_DGRAM && in.Local.IsValid() && in.Local.Port() != 0 && !in.Connected:
		l.Network, l.Addr = "udp", in.Local.String()
	default:
		return l, false
	}
	return l, true
}

// movedTo returns the path of a unix socket that lull-shim made elsewhere and moved
// there; any other path is returned unchanged.
func movedTo(path string) string {
	dir, name := filepath.Split(path)
	if !strings.HasPrefix(name, shimctl.SpareName) {
		return path
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return path
	}
	for _, f := range files {
		if to := filepath.Join(dir, f.Name()); shimctl.SparePath(to) == path {
			return to
		}
	}
	return path
}

// hiddenListeners appends the listeners among sockets that may not be duplicated,
// according to the kernel's list. They cannot be watched.
func (w *Work) hiddenListeners(out []instance.Listener, hidden map[uint64]place, why error) ([]instance.Listener, error) {
	for network, q := range map[string]sockets.Query{"tcp": {States: []sockets.State{sockets.Listen}}, "udp": {UDP: true, States: []sockets.State{sockets.Close}}} {
		all, err := w.net.dump(q)
		if err != nil {
			return nil, err
		}
		for _, s := range all {
			if at, ok := hidden[s.Inode]; ok {
				out = append(out, instance.Listener{Network: network, Addr: s.Local.String(), PID: at.pid, Why: why.Error()})
			}
		}
	}
	return out, nil
}
