// Package adopted manages programs that ran before lull was asked to: a process
// with its descendants, the processes of a control group, or a systemd unit. They
// stay in their control groups. A control group is frozen by its own freezer, a
// process tree by SIGSTOP, and a unit by systemd.
//
// lull did not start these programs, so this package never signals or ends one.
// Only units can be stopped and started again, by systemd; see unit.go. It respects
// the actions of others: a program that others froze stays frozen, and a signal to
// a frozen program, such as a request to exit, thaws it.
//
// Before a program is frozen, the shim is told how to thaw it, so that it runs
// again when the daemon has ended. Freeze returns nil only once every task is
// frozen. The package decides nothing.
package adopted

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/segment"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/proc"
	"lull/internal/platform/systemd"
	"lull/internal/protocol/shimctl"
	"lull/internal/runtime/process"
)

// Config configures a Runtime.
type Config struct {
	Dir     string           // directory of the state that survives a restart; created with mode 0700
	Process *process.Runtime // used to watch sockets and read processes
	Log     *slog.Logger

	// OnExit is called once for each run, when all its processes have ended. It
	// must not block.
	OnExit func(id string, run uint64, e instance.Exit)
	// Observe is called when others may have frozen or thawed an instance. It
	// must not block.
	Observe func(id, why string)
	// Started is called when others have started the unit of a stopped instance. It
	// may block.
	Started func(id, why string)
	// Unwatch is called before the sockets of a stopped unit are closed. It must
	// close the guard that watches them, and must not block.
	Unwatch func(id string)
}

// Runtime implements instance.Runtime.
type Runtime struct {
	cfg Config
	fs  *proc.FS

	mu        sync.Mutex
	works     map[string]*Work
	managers  map[string]*systemd.Conn    // by socket path
	followers map[string]*follower        // followers of units, by instance ID
	wanted    map[string]instance.Adopted // units that have a drop-in, by instance ID
	wakes     sync.WaitGroup              // goroutines of works and followers

	dropIns sync.Mutex // held while drop-ins are written or removed
}

var (
	_ instance.Runtime   = (*Runtime)(nil)
	_ instance.Adopter   = (*Runtime)(nil)
	_ instance.Forgetter = (*Runtime)(nil)
	_ instance.Workload  = (*Work)(nil)

	_ instance.UnitFollower = (*Runtime)(nil)
	_ instance.DropInWriter = (*Runtime)(nil)
	_ instance.SocketKeeper = (*Work)(nil)
	_ instance.Timed        = (*Work)(nil)
)

// New returns a runtime.
func New(cfg Config) (*Runtime, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("cannot adopt anything: %w", err)
	}
	return &Runtime{cfg: cfg, fs: proc.Live(), works: map[string]*Work{}, managers: map[string]*systemd.Conn{}, followers: map[string]*follower{}}, nil
}

// Capabilities implements instance.Runtime.
func (r *Runtime) Capabilities() power.Capabilities {
	return power.Capabilities{Freeze: true, WatchSockets: true, Reclaim: r.cfg.Process.Capabilities().Reclaim, Shared: true}
}

// Start implements instance.Runtime. It starts a unit; any other program must
// already run.
func (r *Runtime) Start(ctx context.Context, l instance.Launch) (instance.Workload, error) {
	if l.Adopted == nil {
		return nil, errors.New("there is nothing to adopt")
	}
	a := *l.Adopted
	if a.IsUnit() {
		return r.startUnit(ctx, l)
	}
	boot, err := r.fs.BootID()
	if err == nil && boot != a.BootID {
		err = errors.New("it ran before the machine was started")
	}
	if err != nil {
		return nil, fmt.Errorf("cannot adopt it: %w", err)
	}
	return r.find(l.ID, instance.Identity{BootID: a.BootID, PID: a.PID, Start: a.Start, Cgroup: a.Cgroup, CgroupID: a.CgroupID, Run: l.Run}, false)
}

// Adopt implements instance.Runtime.
func (r *Runtime) Adopt(ctx context.Context, id string, ident instance.Identity) (instance.Workload, error) {
	if ident.Unit != "" {
		return r.adoptUnit(ctx, id, ident)
	}
	boot, err := r.fs.BootID()
	if err != nil {
		return nil, err
	}
	if ident.BootID != boot || ident.PID == 0 {
		return nil, gone(id)
	}
	return r.find(id, ident, true)
}

func gone(id string) *instance.GoneError {
	return &instance.GoneError{ID: id, Exit: instance.Exit{Lost: true, At: time.Now()}}
}

// find returns a Work for the run with an identity. again is set if an earlier
// daemon may have frozen the run.
func (r *Runtime) find(id string, ident instance.Identity, again bool) (*Work, error) {
	return r.findAs(&Work{r: r, id: id, again: again}, ident)
}

// findAs completes w so that it manages the run with an identity, and returns it.
func (r *Runtime) findAs(w *Work, ident instance.Identity) (*Work, error) {
	id, again := w.id, w.again
	var g *cgroup.Group
	pid := ident.PID
	if ident.CgroupID != 0 {
		inode, err := inodeOf(ident.Cgroup)
		if errors.Is(err, fs.ErrNotExist) || err == nil && inode != ident.CgroupID {
			return nil, gone(id)
		}
		if err == nil {
			g, err = cgroup.At(ident.Cgroup)
		}
		if err != nil {
			return nil, fmt.Errorf("cannot find the control group of %s again: %w", id, err)
		}
		w.cgroupID = ident.CgroupID
		if pid, err = r.oldest(g); err != nil {
			return nil, err
		}
		if pid == 0 {
			return nil, gone(id)
		}
	}
	var err error
	if w.Work, err = r.cfg.Process.Attach(id, ident.Run, pid, g, nil); err != nil {
		return nil, err
	}
	if w.ident = w.Work.Identity(); g == nil && w.ident.Start != ident.Start {
		return nil, gone(id)
	}
	w.ident.CgroupID, w.ident.Unit, w.ident.Manager, w.ident.Invocation = w.cgroupID, ident.Unit, ident.Manager, ident.Invocation
	if again && g == nil {
		if err := w.recallKin(); err != nil {
			return nil, err
		}
	}
	w.ctx, w.stop = context.WithCancel(context.Background())
	r.mu.Lock()
	if old := r.works[id]; old != nil {
		old.stop()
	}
	r.works[id] = w
	r.mu.Unlock()
	if w.unit == nil {
		r.wakes.Go(func() { w.awaitEnd(w.ctx) })
	}
	if still, err := w.Still(); err == nil && still {
		w.awaitThaw()
	}
	return w, nil
}

// oldest returns the process of a group that started first; 0 if the group is
// empty or does not exist.
func (r *Runtime) oldest(g *cgroup.Group) (pid int, err error) {
	pids, err := g.PIDs()
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	var first uint64
	for _, p := range pids {
		s, err := r.fs.Stat(p)
		if err == nil && !s.Ended() && (pid == 0 || s.Start < first) {
			pid, first = p, s.Start
		}
	}
	return pid, err
}

func inodeOf(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Ino, nil
}

// Forget implements instance.Forgetter. The program continues to run, or stays
// frozen if others froze it.
func (r *Runtime) Forget(ctx context.Context, id string) error {
	r.mu.Lock()
	w, f := r.works[id], r.followers[id]
	delete(r.works, id)
	delete(r.followers, id)
	r.mu.Unlock()
	if f != nil {
		f.stop()
	}
	if w != nil {
		w.stop()
	}
	err := r.cfg.Process.ThawWhenGone(ctx, id, "", nil)
	if rerr := os.Remove(r.kinFile(id)); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
		err = errors.Join(err, rerr)
	}
	return err
}

// Close waits for the goroutines that watch the programs, which continue to
// run.
func (r *Runtime) Close() {
	r.mu.Lock()
	for _, w := range r.works {
		w.stop()
	}
	for _, f := range r.followers {
		f.stop()
	}
	managers := r.managers
	r.managers = nil
	r.mu.Unlock()
	r.wakes.Wait()
	for _, m := range managers {
		m.Close()
	}
}

// ended reports the end of w's run, unless another Work has replaced w.
func (r *Runtime) ended(w *Work) {
	r.mu.Lock()
	ours := r.works[w.id] == w
	r.mu.Unlock()
	if ours {
		r.cfg.OnExit(w.id, w.ident.Run, instance.Exit{Lost: true, At: time.Now()})
	}
}

// maxKin bounds the size of a file written by noteKin, in bytes.
const maxKin = 1 << 20

func (r *Runtime) kinFile(id string) string {
	return filepath.Join(r.cfg.Dir, "processes-"+id+".json")
}

// noteKin stores the processes of a tree for the next daemon, which cannot find
// those whose parents have exited. It reports whether the list has changed.
func (w *Work) noteKin(kin []shimctl.Process) (changed bool, err error) {
	slices.SortFunc(kin, func(a, b shimctl.Process) int { return a.PID - b.PID })
	if slices.Equal(kin, w.noted) {
		return false, nil
	}
	b, err := json.Marshal(kin)
	if err == nil {
		err = segment.WriteFile(w.r.kinFile(w.id), b, 0o600)
	}
	if err == nil {
		w.noted = kin
	}
	return true, err
}

func (w *Work) recallKin() error {
	b, err := os.ReadFile(w.r.kinFile(w.id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the tree was never frozen
	}
	var kin []shimctl.Process
	if err == nil && len(b) > maxKin {
		err = fmt.Errorf("more than %d bytes", maxKin)
	}
	if err == nil {
		err = json.Unmarshal(b, &kin)
	}
	if err != nil {
		return fmt.Errorf("cannot read the list of adopted processes: %s: %w", w.r.kinFile(w.id), err)
	}
	return w.Recall(kin)
}
