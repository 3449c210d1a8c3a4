// Package container runs instances as OCI containers with runc, without a daemon:
// the supervisor (lull-shim) starts runc, so a container survives restarts of the
// host daemon, and the instance's control group holds runc and everything inside,
// so one write freezes it.
//
// A container has its own files, processes, users, host name and limits. It uses
// the host's network: the program listens on its ports itself, clients reach it
// on the direct path, and its sockets are watched while it is frozen like those
// of a process (docs/decisions/0007-containers.md). Its changes go to a layer
// over an image that is shared and never written; the layer lasts until the
// instance is removed.
//
// After Kill, and after an Adopt that finds the run over, no process, mount,
// control group or runc state is left. The package decides nothing.
package container

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/oci"
	"lull/internal/runtime/process"
)

// Config configures a Runtime.
type Config struct {
	Dir     string           // private directory, created with mode 0700
	Process *process.Runtime // provides the shim and control groups
	Images  *oci.Store
	Runc    string // path or name of runc; default "runc" from PATH
	Guests  string // host directory that contains the socket guest.sock of LULL_SOCKET; empty for none
}

// Runtime implements instance.Runtime.
type Runtime struct {
	cfg Config

	mu   sync.Mutex
	used engine
}

// engine is a runc binary and its features.
type engine struct {
	path    string
	filters bool // runc and the kernel support system call filters
}

var (
	_ instance.Runtime     = (*Runtime)(nil)
	_ instance.Execer      = (*Runtime)(nil)
	_ instance.Forgetter   = (*Runtime)(nil)
	_ instance.SpecChecker = (*Runtime)(nil)
	_ instance.Sizer       = (*Runtime)(nil)
	_ instance.Workload    = (*Work)(nil)
)

// Find returns the path of runc, which may also be in a system directory outside
// PATH. Its error names the package to install.
func Find(name string) (string, error) {
	if name == "" {
		name = "runc"
	}
	for _, p := range []string{name, "/usr/sbin/" + name, "/sbin/" + name} {
		if at, err := exec.LookPath(p); err == nil {
			return at, nil
		}
	}
	return "", fmt.Errorf("cannot find %s (Debian package runc)", name)
}

// Check returns an error that names the permanently missing prerequisites for
// containers, or nil. Missing reports those that can come and go.
func Check(p *process.Runtime) error {
	switch {
	case os.Geteuid() != 0:
		return errors.New("cannot run containers: the host is not root")
	case p.GroupDir("x") == "":
		return errors.New("cannot run containers: no control groups are available")
	}
	return nil
}

// New returns a runtime, without starting anything. It fails like Check if
// prerequisites are permanently missing.
func New(cfg Config) (*Runtime, error) {
	if err := Check(cfg.Process); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(cfg.Dir, "box"), 0o700); err != nil {
		return nil, fmt.Errorf("cannot make the directory of containers: %w", err)
	}
	return &Runtime{cfg: cfg}, nil
}

// Missing returns an error that names the prerequisites that are missing at
// present, or nil.
func (r *Runtime) Missing() error {
	_, err := Find(r.cfg.Runc)
	return err
}

// runc returns the installed runc. It queries the features only if the binary has
// changed since the last call.
func (r *Runtime) runc() (engine, error) {
	path, err := Find(r.cfg.Runc)
	if err != nil {
		return engine{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.used.path != path {
		r.used = engine{path, Filters(path) == nil}
	}
	return r.used, nil
}

// Capabilities implements instance.Runtime.
func (r *Runtime) Capabilities() power.Capabilities {
	c := r.cfg.Process.Capabilities()
	c.Image, c.Limits, c.Workspace = true, true, true
	return c
}

// CheckSpec implements instance.SpecChecker.
func (r *Runtime) CheckSpec(s *instance.Spec) error {
	var errs []error
	switch {
	case s.Image == "":
		errs = append(errs, errors.New("cannot use image: a container needs one: a directory, an image file or a registry reference"))
	case filepath.IsAbs(s.Image):
		if _, err := os.Stat(s.Image); err != nil {
			errs = append(errs, fmt.Errorf("cannot use image: %w", err))
		}
	default:
		if err := oci.CheckReference(s.Image); err != nil {
			errs = append(errs, fmt.Errorf("cannot use image: %w", err))
		}
	}
	_, err := findWorkspace(s.Workspace)
	return errors.Join(append(errs, err)...)
}

// findWorkspace parses the workspace setting s. Its directory must exist.
func findWorkspace(s string) (instance.Workspace, error) {
	ws, err := instance.ParseWorkspace(s)
	if err == nil && ws.Dir != "" {
		st, serr := os.Stat(ws.Dir)
		switch {
		case serr != nil:
			err = serr
		case !st.IsDir():
			err = fmt.Errorf("%s is not a directory", ws.Dir)
		}
	}
	if err != nil {
		return ws, fmt.Errorf("cannot use workspace: %w", err)
	}
	return ws, nil
}

// Size implements instance.Sizer. A container without a memory limit counts as 0.
func (r *Runtime) Size(s *instance.Spec) (memory int64, slow bool) { return s.Memory, false }

func (r *Runtime) box(id string) box { return box(filepath.Join(r.cfg.Dir, "box", id)) }

// state returns the directory in which runc keeps its state.
func (r *Runtime) state() string { return filepath.Join(r.cfg.Dir, "runc") }

// runLimit bounds the duration of runc commands other than run and exec.
const runLimit = 30 * time.Second

// Start implements instance.Runtime. It returns once the container's program has
// been started.
func (r *Runtime) Start(ctx context.Context, l instance.Launch) (instance.Workload, error) {
	if err := r.sweep(ctx, l.ID); err != nil {
		return nil, err
	}
	w, err := r.start(ctx, l)
	if err != nil {
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), runLimit)
		defer cancel()
		if w != nil {
			err = errors.Join(err, w.Kill(sctx))
		} else {
			err = errors.Join(err, r.sweep(sctx, l.ID))
		}
		return nil, err
	}
	return w, nil
}

func (r *Runtime) start(ctx context.Context, l instance.Launch) (*Work, error) {
	img, err := r.cfg.Images.Use(ctx, l.Image, l.ID)
	if err != nil {
		return nil, err
	}
	b := r.box(l.ID)
	if err := apart(img.Root, string(b)); err != nil {
		return nil, err
	}
	if err := b.make(); err != nil {
		return nil, fmt.Errorf("cannot make the directory of %s: %w", l.ID, err)
	}
	if err := b.mount(ctx, img.Root); err != nil {
		return nil, err
	}
	if err := b.dropKills(); err != nil { // from an earlier run
		return nil, err
	}
	runc, err := r.runc()
	if err != nil {
		return nil, err
	}
	p := plan{launch: l, config: img.Config, rootfs: b.rootfs(), guests: r.cfg.Guests, limits: true, filter: runc.filters}
	if p.stop, err = img.Config.Signal(); err != nil {
		return nil, err
	}
	if len(p.args()) == 0 {
		return nil, errors.New("cannot run the container: neither the instance nor its image has a command")
	}
	who := l.User
	if who == "" {
		who = img.Config.User
	}
	if p.user, err = oci.LookupUser(b.rootfs(), who); err != nil {
		return nil, err
	}
	if p.workspace, err = findWorkspace(l.Workspace); err != nil {
		return nil, err
	}
	if p.workspace.ReadOnly {
		if p.below, err = mountsBelow(p.workspace.Dir); err != nil {
			return nil, err
		}
	}
	in := instance.Launch{ID: l.ID, Run: l.Run, Env: l.Env, Dir: "/", Listen: l.Listen, Handoff: l.Handoff, LogPath: l.LogPath, LogMax: l.LogMax,
		Command: []string{runc.path, "--root", r.state(), "--log", b.log(), "--log-format", "json",
			// --keep keeps the control groups until Kill, which reads from them why
			// the run ended.
			"run", "--keep", "--bundle", string(b), "--pid-file", b.pid(), l.ID}}
	// The configuration needs the control group of this run, so it is written once
	// the group exists and before runc reads it.
	pw, err := r.cfg.Process.StartIn(ctx, in, func(g *cgroup.Group) error {
		if p.group, err = g.Path(); err != nil {
			return err
		}
		p.group += "/c"
		if p.limits, err = limit(g.Dir(), l); err != nil {
			return fmt.Errorf("cannot limit %s: %w", l.ID, err)
		}
		return b.write(p.bundle())
	})
	if err != nil {
		return nil, err
	}
	w := &Work{Work: pw, r: r, id: l.ID, stop: p.stop}
	if err := w.await(ctx, b); err != nil {
		return w, err
	}
	// The container has its own copy of the mount; the host's must not stay.
	return w, b.unmount()
}

// limit sets the limits of l on the instance's group if the unified hierarchy has
// the controllers; a group with processes cannot delegate them to groups below.
// Otherwise it returns true, and runc must set the limits.
func limit(dir string, l instance.Launch) (byRunc bool, err error) {
	if unix.Access(filepath.Join(filepath.Dir(dir), "cgroup.subtree_control"), unix.W_OK) != nil {
		return true, nil
	}
	b, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "cgroup.controllers"))
	if err != nil || !strings.Contains(string(b), "memory") && !strings.Contains(string(b), "cpu") {
		return true, err // hybrid hierarchy: the controllers are in v1
	}
	for _, f := range []struct {
		controller, file, value string
		on                      bool
	}{
		{"memory", "memory.max", fmt.Sprint(l.Memory), l.Memory > 0},
		{"cpu", "cpu.max", fmt.Sprintf("%d %d", quota(l.CPUs), period), l.CPUs > 0},
	} {
		if !f.on {
			continue
		}
		err := os.WriteFile(filepath.Join(filepath.Dir(dir), "cgroup.subtree_control"), []byte("+"+f.controller), 0)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, f.file), []byte(f.value), 0)
		}
		if err != nil {
			return false, err
		}
	}
	return false, nil
}

// await waits until the container's program has been started.
func (w *Work) await(ctx context.Context, b box) error {
	for pause := time.Millisecond; ; pause = min(pause*3/2, 20*time.Millisecond) {
		pid, err := b.readPID()
		if err == nil {
			w.init = pid
			return nil
		}
		live, lerr := w.Alive()
		if lerr == nil && !live {
			if pid, err = b.readPID(); err == nil { // the program has started and exited
				w.init = pid
				return nil
			}
			said := b.said()
			if said == "" {
				said = "runc exited without a message"
			}
			return fmt.Errorf("cannot run its program: %s", said)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("cannot wait for its program: %w", context.Cause(ctx))
		}
	}
}

// Adopt implements instance.Runtime.
func (r *Runtime) Adopt(ctx context.Context, id string, ident instance.Identity) (instance.Workload, error) {
	pw, err := r.cfg.Process.Adopt(ctx, id, ident)
	var gone *instance.GoneError
	if errors.As(err, &gone) {
		gone.Exit = r.explain(id, gone.Exit)
		if g := r.cfg.Process.GroupDir(id); g != "" { // runc may have exited without its container
			if grp, gerr := (cgroup.Place{}).Open(g); gerr == nil {
				if kerr := grp.Kill(ctx); kerr != nil {
					return nil, kerr
				}
			}
		}
		if serr := r.sweep(ctx, id); serr != nil {
			return nil, serr
		}
		return nil, err
	}
	if err != nil {
		return nil, err
	}
	b := r.box(id)
	w := &Work{Work: pw.(*process.Work), r: r, id: id, stop: b.stopSignal()}
	if w.init, err = b.readPID(); err != nil && !errors.Is(err, fs.ErrNotExist) { // without the file, the container never started
		return nil, err
	}
	return w, b.unmount()
}

// explain adds to e that a run was killed for lack of memory, if it was.
//
// The kernel's counts disappear with the control groups when the run is swept, and
// a full disk, a deadline or the end of the daemon can then prevent the exit from
// being recorded. The counts are therefore stored in the box first. They are used
// once the groups are gone, until the next start.
func (r *Runtime) explain(id string, e instance.Exit) instance.Exit {
	if e.Code == 0 {
		return e
	}
	b := r.box(id)
	kills, limit, err := r.oomKills(id)
	switch {
	case kills > 0:
		_ = b.noteKills(kills, limit) // this exit is explained even if storing fails
	default:
		var nerr error
		if kills, limit, nerr = b.readKills(); nerr != nil {
			err = errors.Join(err, nerr)
		}
	}
	switch {
	case kills == 0 && err != nil && e.Code == 128+int(unix.SIGKILL):
		e.Why = fmt.Sprintf("cannot determine whether it ran out of memory: %v", err)
	case kills == 0:
	case e.Code == 128+int(unix.SIGKILL):
		e.Why = instance.Starved("the kernel", limit)
	default: // the exit may have another cause, but this one is known
		e.Why = instance.Starved("the kernel", limit) + " (processes of it: " + strconv.FormatUint(kills, 10) + ")"
	}
	return e
}

// oomKills returns how many processes of an instance were killed for lack of
// memory, and its memory limit. If the groups are gone, both are 0.
func (r *Runtime) oomKills(id string) (kills uint64, limit int64, err error) {
	dir := r.cfg.Process.GroupDir(id)
	if dir == "" {
		return 0, 0, nil
	}
	g, err := (cgroup.Place{}).Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	return g.OOMKills()
}

// sweep removes everything that a run leaves except processes: mounts, control
// groups, files and runc's state.
func (r *Runtime) sweep(ctx context.Context, id string) error {
	b := r.box(id)
	if _, err := os.Stat(filepath.Join(r.state(), id)); err == nil {
		ctx, cancel := context.WithTimeout(ctx, runLimit)
		defer cancel()
		runc, err := r.runc()
		if err != nil {
			return fmt.Errorf("cannot remove the container of %s: %w", id, err)
		}
		out, err := exec.CommandContext(ctx, runc.path, "--root", r.state(), "delete", "--force", id).CombinedOutput()
		if err != nil {
			if _, serr := os.Stat(filepath.Join(r.state(), id)); !errors.Is(serr, fs.ErrNotExist) {
				return fmt.Errorf("cannot remove the container of %s: %w: %.300s", id, err, out)
			}
		}
	}
	err := errors.Join(b.unmount(), b.reset())
	if dir := r.cfg.Process.GroupDir(id); dir != "" {
		if g, gerr := (cgroup.Place{}).Open(dir); gerr == nil {
			err = errors.Join(err, g.RemoveNamesakes())
		}
	}
	return err
}

// Forget implements instance.Forgetter. It also deletes the instance's layer.
func (r *Runtime) Forget(ctx context.Context, id string) error {
	if err := r.sweep(ctx, id); err != nil {
		return err
	}
	if err := os.RemoveAll(string(r.box(id))); err != nil {
		return fmt.Errorf("cannot remove the files of %s: %w", id, err)
	}
	if err := r.cfg.Images.Release(id); err != nil {
		return err
	}
	return r.cfg.Process.Forget(ctx, id)
}

// Exec implements instance.Execer. The command runs inside the container. runc
// connects its own streams or terminal with the command's, and forwards signals. If
// ctx ends first, runc is asked to exit, which it forwards; then the command is
// killed if it still runs.
func (r *Runtime) Exec(ctx context.Context, id string, q instance.Command, s instance.Streams) (int, error) {
	noted, err := os.MkdirTemp("", "lull-exec")
	if err != nil {
		return 0, fmt.Errorf("cannot run a command: %w", err)
	}
	defer os.RemoveAll(noted)
	pid, said := filepath.Join(noted, "pid"), filepath.Join(noted, "log")
	runc, err := r.runc()
	if err != nil {
		return 0, fmt.Errorf("cannot run a command: %w", err)
	}
	argv := []string{runc.path, "--root", r.state(), "--log", said, "--log-format", "json", "exec", "--pid-file", pid}
	for _, e := range q.Env {
		argv = append(argv, "--env", e)
	}
	if q.Dir != "" {
		argv = append(argv, "--cwd", q.Dir)
	}
	if s.TTY {
		argv = append(argv, "--tty")
	}
	code, err := r.cfg.Process.Exec(ctx, id, instance.Command{Command: append(append(argv, id), q.Command...), Dir: "/"}, s)
	if ctx.Err() != nil {
		r.killInside(id, pid)
	}
	if err != nil || code == 0 {
		return code, err
	}
	if _, err := os.Stat(pid); errors.Is(err, fs.ErrNotExist) { // runc failed, not the command
		why := lastError(said)
		e := &instance.CommandError{Code: instance.CannotRun, Err: fmt.Errorf("cannot run %s: %s", q.Command[0], cmp.Or(why, "runc exited without a message"))}
		if strings.Contains(why, "executable file not found") || strings.Contains(why, "no such file or directory") {
			e.Code = instance.NotThere
		}
		return 0, e
	}
	return code, nil
}

// killInside kills the process whose PID is in file, if the process belongs to the
// instance.
func (r *Runtime) killInside(id, file string) {
	b, err := os.ReadFile(file)
	if err != nil {
		return // the command never started
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // the command has exited
	}
	defer unix.Close(fd)
	if of, err := r.cfg.Process.Identify(pid); err == nil && of == id {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) // may have exited
	}
}
