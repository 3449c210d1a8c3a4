// Package process runs instances as processes of this machine: started by the
// supervisor (lull-shim), frozen by the cgroup freezer or by signals, and
// watched through duplicates of their sockets while they are frozen.
//
// Freeze returns nil only once every task is frozen. While a program runs, its
// sockets are duplicated only for the moment in which they are read. A value that
// cannot be read is an error in the sample, never zero. The package decides
// nothing.
package process

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/fdstore"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/proc"
	"lull/internal/platform/sockets"
	"lull/internal/protocol/shimctl"
)

// Config configures a Runtime.
type Config struct {
	Dir     string        // the shim's directory, created with mode 0700
	Shim    string        // path of the lull-shim program; if empty, the one beside this program
	Kinds   []cgroup.Kind // freezers to try, in order; if empty, v2, then v1
	Signals bool          // freeze by signals even if there are control groups
	Log     *slog.Logger

	// OnExit is called when a run has ended, possibly more than once, but never
	// before Run is called. It must not block.
	OnExit func(id string, run uint64, e instance.Exit)
	// OnShimLost is called when another shim has taken over, or when the shim has
	// thawed instances because it received no heartbeat.
	OnShimLost func()
	// OnThawed is called instead of OnShimLost if the same shim thawed
	// instances because this daemon did not run for a while. If nil, OnShimLost
	// is called.
	OnThawed func()
	// OnGivenUp is called, never before Run, when a kept socket could not be handed
	// to the program and was closed.
	OnGivenUp func(id, why string)
}

// Runtime implements instance.Runtime. It is safe for concurrent use.
type Runtime struct {
	cfg    Config
	fs     *proc.FS
	boot   string
	place  cgroup.Place // zero: no control group, signals instead
	poller *sockets.Poller
	net    namespace
	strays strays
	heart  heart

	reclaims bool // the kernel lets this process page out another process's memory

	mu       sync.Mutex
	client   *shimctl.Client
	orphaned bool // a shim has died, so init may have processes whose parents have exited
	child    int  // PID of a shim that this process started; 0 for none
	running  bool
	unsaid   []shimctl.Ended // exits to report once Run is called
	works    map[string]*Work
	launches map[string]launched // those that could not be written
	store    fdstore.Store       // keeps the descriptors of held and reports, which are seldom needed
	held     map[string]kept     // duplicates of what the shim holds, to pass on to a new shim
	reports  map[string]reports
	execs    map[uint64]chan instance.Exit
	early    map[uint64]instance.Exit // exits of commands that ended before Exec knew their PIDs
}

// kept holds duplicates of the sockets that the shim holds for an instance. The
// slices have the same order.
type kept struct {
	addrs  []string
	files  []*fdstore.File
	inodes []uint64
}

func (k kept) close() {
	for _, f := range k.files {
		f.Close()
	}
}

// with calls do with a duplicate of the nth kept socket, and closes it afterwards.
func (k kept) with(n int, do func(fd int) error) error {
	fd, err := k.files[n].Open()
	if err != nil {
		return fmt.Errorf("use the kept socket %s: %w", k.addrs[n], err)
	}
	defer unix.Close(fd)
	return do(fd)
}

var _ instance.Runtime = (*Runtime)(nil)

// connectLimit is the time limit for an answer of a shim.
const connectLimit = 10 * time.Second

// New finds a freezer and connects to the shim, which it starts if none runs.
// Run must be called to watch frozen instances. Close closes the connection and
// leaves the shim and every program running.
func New(ctx context.Context, cfg Config) (*Runtime, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("cannot make the shim's directory: %w", err)
	}
	r := &Runtime{cfg: cfg, fs: proc.Live(), works: map[string]*Work{}, launches: map[string]launched{}, held: map[string]kept{}, reports: map[string]reports{}, execs: map[uint64]chan instance.Exit{}, early: map[uint64]instance.Exit{}}
	r.strays.r = r
	r.heart.r = r
	var err error
	if r.boot, err = r.fs.BootID(); err != nil {
		return nil, err
	}
	if !cfg.Signals {
		sum := sha256.Sum256([]byte(cfg.Dir))
		r.place, err = cgroup.Find("h"+hex.EncodeToString(sum[:4]), cfg.Kinds...)
		if err != nil && !errors.Is(err, cgroup.ErrNone) {
			return nil, err
		}
	}
	if r.poller, err = sockets.NewPoller(); err != nil {
		return nil, err
	}
	r.reclaims = mayPageOut() || r.place.Dir != "" && r.place.Reclaims()
	if _, err := r.connect(ctx); err != nil {
		return nil, errors.Join(err, r.poller.Close())
	}
	return r, nil
}

// Freezer returns how instances are frozen here.
func (r *Runtime) Freezer() string {
	if r.place.Dir == "" {
		return "signals (SIGSTOP to the whole tree)"
	}
	return string(r.place.Kind) + " at " + r.place.Dir
}

// Shim identifies the connected shim.
func (r *Runtime) Shim() string {
	c := r.shim()
	if c == nil {
		return "not connected"
	}
	return fmt.Sprintf("pid %d since %s", c.Welcome.PID, c.Welcome.StartedAt.Format(time.RFC3339))
}

// Capabilities implements instance.Runtime.
func (r *Runtime) Capabilities() power.Capabilities {
	return power.Capabilities{Freeze: true, WatchSockets: true, Reclaim: r.reclaims, WakeFromStopped: true, ExecInside: true}
}

// GroupDir returns the directory of an instance's control group, or "" if there are
// no control groups. A runtime that builds on this one creates its own groups below
// it, so that they are frozen, counted and killed with it.
func (r *Runtime) GroupDir(id string) string {
	if r.place.Dir == "" {
		return ""
	}
	return filepath.Join(r.place.Dir, id)
}

func (r *Runtime) shim() *shimctl.Client {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.client
}

// Close ends the connection and the poller.
func (r *Runtime) Close() error {
	err := r.poller.Close()
	r.heart.close()
	r.shim().Close()
	r.collectShim()
	r.place.Release()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range r.held {
		k.close()
	}
	for _, k := range r.reports {
		k.file.Close()
	}
	r.held, r.reports = nil, nil
	return err
}

func (r *Runtime) ended(e shimctl.Ended) {
	r.mu.Lock()
	if !r.running { // events may have no receiver yet
		r.unsaid = append(r.unsaid, e)
		r.mu.Unlock()
		return
	}
	w := r.works[e.ID]
	mine := w != nil && w.ident.Run == e.Run
	if mine {
		delete(r.works, e.ID)
	}
	r.mu.Unlock()
	if mine {
		r.heart.drop(e.ID) // the lock of heart comes before that of r
	}
	r.dropReports(e.ID, e.Run)
	r.cfg.OnExit(e.ID, e.Run, e.Exit)
}

// startLimit bounds a start in the shim, which continues even if its caller gives
// up.
const startLimit = 30 * time.Second

// Start implements instance.Runtime. After an error, nothing of the run remains
// unless the error says so.
func (r *Runtime) Start(ctx context.Context, l instance.Launch) (instance.Workload, error) {
	w, err := r.StartIn(ctx, l, nil)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// StartIn is Start for a runtime that builds on this one. prepare, if not nil, is
// called with the control group before any process is in it. It is not called if
// there are no control groups.
func (r *Runtime) StartIn(ctx context.Context, l instance.Launch, prepare func(*cgroup.Group) error) (*Work, error) {
	w := &Work{r: r, net: &r.net, id: l.ID, logPath: l.LogPath, logMax: l.LogMax, user: l.User, handoff: len(l.Handoff) > 0}
	var dirs []string
	if r.place.Dir != "" {
		g, err := r.place.Create(l.ID)
		if err != nil {
			return nil, err
		}
		if prepare != nil {
			if err := prepare(g); err != nil {
				return nil, err
			}
		}
		w.group, dirs = g, g.Dirs()
		w.ident.Cgroup = g.Dir()
	}
	// The run must be registered first, because its exit can be reported before the
	// shim's answer.
	w.ident.BootID, w.ident.Run = r.boot, l.Run
	r.mu.Lock()
	before := r.works[l.ID]
	r.works[l.ID] = w
	r.mu.Unlock()
	// The start is completed even if the caller gives up, because otherwise an
	// unknown program could run. The program is then ended.
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), startLimit)
	defer cancel()
	s, err := r.startInShim(sctx, l, dirs)
	var said *shimctl.Error
	unreported := false
	if err != nil && !errors.As(err, &said) {
		if s, err = r.outcome(sctx, l, err); err == nil {
			unreported = len(l.Handoff) > 0 // the descriptor on which its binds are reported was lost with the shim
		}
	}
	if said != nil && said.Code == shimctl.CodeStage && said.Step == shimctl.StepHandoff {
		err = fmt.Errorf("%w: %w", instance.ErrNoHandoff, err)
	}
	r.mu.Lock()
	if err != nil {
		if r.works[l.ID] == w {
			delete(r.works, l.ID)
			if said != nil && said.Code == shimctl.CodeBusy && before != nil {
				r.works[l.ID] = before
			}
		}
		r.mu.Unlock()
		return nil, err
	}
	w.ident.PID, w.ident.Start = s.PID, s.Start
	r.mu.Unlock()
	if err := r.noteLaunch(l); err != nil {
		r.cfg.Log.Warn("cannot record the environment of an instance", "instance", l.ID, "err", err)
	}
	if unreported {
		if err := w.Kill(sctx); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("cannot start %s: %w", l.ID, instance.ErrStartAgain)
	}
	if ctx.Err() != nil {
		err := fmt.Errorf("cannot start %s: %w", l.ID, context.Cause(ctx))
		if kerr := w.Kill(sctx); kerr != nil {
			err = errors.Join(err, kerr)
		}
		return nil, err
	}
	return w, nil
}

// outcome determines the result of a start to which the shim did not answer,
// because it died or the connection broke.
func (r *Runtime) outcome(ctx context.Context, l instance.Launch, cause error) (shimctl.Started, error) {
	for {
		runs, err := r.shim().List(ctx, l.ID)
		if err == nil {
			for _, run := range runs {
				if run.Run == l.Run && run.Exit == nil {
					return shimctl.Started{PID: run.PID, Start: run.Start}, nil
				}
			}
			// The shim records a run before it starts the program, so nothing was
			// started.
			return shimctl.Started{}, fmt.Errorf("%w: %w", instance.ErrStartAgain, cause)
		}
		select {
		case <-time.After(10 * time.Millisecond): // Run reconnects meanwhile
		case <-ctx.Done():
			return shimctl.Started{}, fmt.Errorf("cannot determine whether %s was started: %w", l.ID, errors.Join(cause, err))
		}
	}
}

// howItEnded waits until the shim knows how a run whose process has ended did so,
// and returns that as a *instance.GoneError. Any other error means that this is
// still unknown.
func (r *Runtime) howItEnded(ctx context.Context, id string, run uint64) error {
	for {
		runs, err := r.shim().List(ctx, id)
		if err != nil {
			return fmt.Errorf("cannot ask the shim how %s ended: %w", id, err)
		}
		at := slices.IndexFunc(runs, func(k shimctl.Run) bool { return k.ID == id && k.Run == run })
		switch {
		case at < 0:
			return &instance.GoneError{ID: id, Exit: instance.Exit{Lost: true, At: time.Now()}}
		case runs[at].Exit != nil:
			return &instance.GoneError{ID: id, Exit: *runs[at].Exit}
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("cannot determine how %s ended: the shim does not know yet: %w", id, ctx.Err())
		}
	}
}

// mark returns the environment entry by which a process of an instance is
// recognized even if its parents have exited.
func mark(id string) string { return "LULL_INSTANCE_ID=" + id }

// Adopt implements instance.Runtime.
func (r *Runtime) Adopt(ctx context.Context, id string, ident instance.Identity) (instance.Workload, error) {
	c := r.shim()
	runs, err := c.List(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("cannot ask the shim about %s: %w", id, err)
	}
	w := &Work{r: r, net: &r.net, id: id, ident: ident}
	known := false
	for _, run := range runs {
		if run.ID != id || run.Run != ident.Run {
			continue
		}
		known = true
		if run.Exit != nil {
			return nil, &instance.GoneError{ID: id, Exit: *run.Exit}
		}
		w.ident, w.logPath, w.logMax, w.user, w.handoff = run.Identity(), run.LogPath, run.LogMax, run.User, run.Handoff
		if run.Adopted { // an earlier shim started it
			r.mu.Lock()
			r.orphaned = true
			r.mu.Unlock()
		}
	}
	gone := &instance.GoneError{ID: id, Exit: instance.Exit{Lost: true, At: time.Now()}}
	if w.ident.BootID != r.boot || w.ident.PID == 0 {
		return nil, gone
	}
	live, err := w.Alive()
	if err != nil {
		return nil, fmt.Errorf("cannot inspect process %d of %s: %w", w.ident.PID, id, err)
	}
	if !live && known { // it ended after the request; wait until the shim knows how
		return nil, r.howItEnded(ctx, id, ident.Run)
	}
	if !live {
		return nil, gone
	}
	if w.ident.Cgroup != "" {
		if w.group, err = r.place.Open(w.ident.Cgroup); err != nil {
			return nil, fmt.Errorf("cannot find the control group of %s again: %w", id, err)
		}
		pids, err := w.group.PIDs()
		if err != nil {
			return nil, err
		}
		if !slices.Contains(pids, w.ident.PID) {
			return nil, fmt.Errorf("cannot take over process %d of %s: it has left the control group %s", w.ident.PID, id, w.ident.Cgroup)
		}
	} else if err := w.findStopped(); err != nil {
		return nil, err
	}
	if !known {
		if err := c.Adopt(ctx, w.asRun()); err != nil {
			return nil, fmt.Errorf("cannot tell the shim about %s: %w", id, err)
		}
	}
	r.mu.Lock()
	r.works[id] = w
	r.mu.Unlock()
	r.heart.hold(id) // an earlier daemon may have frozen it
	w.mute = r.holdAgain(ctx, id, w.ident.Run) != nil && w.handoff
	return w, nil
}

// Forget removes everything kept for an instance that has no run.
func (r *Runtime) Forget(ctx context.Context, id string) error {
	r.setHeld(id, nil, nil)
	r.forgetLaunch(id)
	err := r.shim().Forget(ctx, id)
	var unknown *shimctl.Error
	if errors.As(err, &unknown) && unknown.Code == shimctl.CodeNotFound {
		err = nil
	}
	if err == nil && r.place.Dir != "" {
		err = r.place.Remove(id)
	}
	return err
}
