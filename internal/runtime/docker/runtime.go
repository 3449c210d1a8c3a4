// Package docker idles containers that Docker runs: those with the label
// lull.pause-after, and those that a user names. Docker still owns them: it
// starts, pauses, stops and restarts them, and lull respects what a user does
// with docker.
//
// A container is frozen with docker pause, so docker ps shows it. Clients reach
// it as before, through its published ports. While it is frozen, this process
// watches its listening sockets (pidfd_getfd duplicates them from any network
// namespace), so the first packet that Docker's port forwarding delivers wakes
// it.
//
// The containers are listed once and then followed by events; nothing is
// polled. When the Docker daemon goes away the package waits for it, and then
// checks every container again.
//
// Freeze returns nil only once every task is frozen. A container is stopped
// only if it is still the same run. The package decides nothing.
package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/platform/cgroup"
	"lull/internal/runtime/process"
)

// Config configures a Runtime.
type Config struct {
	Socket  string           // path of the Docker Engine API's socket
	Front   string           // path of the front's socket, see Runtime.Front; empty for none
	Process *process.Runtime // watches sockets and reads processes
	Log     *slog.Logger

	// OnExit is called when a run has ended, possibly more than once. It must not
	// block.
	OnExit func(id string, run uint64, e instance.Exit)
}

// Runtime implements instance.Runtime. An instance's Spec.Image is the name or ID
// of the container that it adopts, or a place in a Compose project.
type Runtime struct {
	cfg Config
	api *client
	log *slog.Logger

	mu     sync.Mutex
	works  map[string]*Work // by container
	names  map[string]string
	faults map[string]string // by container: why it cannot be adopted
	joined map[string]string // by container: the container whose network it shares; nil until listed
	wakes  sync.WaitGroup
	beside besides

	ports     ports
	follower  *follower // nil while Docker is not followed
	relations relations
}

var (
	_ instance.Runtime     = (*Runtime)(nil)
	_ instance.Execer      = (*Runtime)(nil)
	_ instance.LogReader   = (*Runtime)(nil)
	_ instance.SpecChecker = (*Runtime)(nil)
	_ instance.PortHolder  = (*Runtime)(nil)
	_ instance.Workload    = (*Work)(nil)
)

// apiLimit bounds the wait for every response of Docker except to a stop.
const apiLimit = 30 * time.Second

// New returns a runtime. It does not contact Docker, which may start later.
func New(cfg Config) (*Runtime, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("cannot watch Docker's containers: the host is not root")
	}
	if !filepath.IsAbs(cfg.Socket) {
		return nil, fmt.Errorf("cannot use docker: %q is not the absolute path of a socket", cfg.Socket)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Runtime{cfg: cfg, api: newClient(cfg.Socket), log: cfg.Log, works: map[string]*Work{}, names: map[string]string{}, faults: map[string]string{}}, nil
}

// alone reports whether a container with this network mode shares its network with
// no other container, running or not. A loopback connection to its program then
// comes from the container itself, usually from its health check.
func (r *Runtime) alone(container, name, mode string) bool {
	if mode == "host" || strings.HasPrefix(mode, sharesWith) {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.joined == nil {
		return false
	}
	for _, whose := range r.joined {
		if whose == name || strings.HasPrefix(container, whose) {
			return false
		}
	}
	return true
}

// sharesWith is the prefix of the network mode of a container that shares another's
// network. That container's ID or name follows.
const sharesWith = "container:"

// join records which container's network a container shares, if any.
func (r *Runtime) join(container, mode string) {
	whose, ok := strings.CutPrefix(mode, sharesWith)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.joined == nil: // the first listing will set it
	case ok:
		r.joined[container] = whose
	default:
		delete(r.joined, container)
	}
}

// Faults returns the containers whose labels request adoption but that cannot be
// adopted, each with the reason.
func (r *Runtime) Faults() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Values(r.faults))
}

// setFault stores why a container cannot be adopted, "" if it can, and reports
// whether that has changed.
func (r *Runtime) setFault(container, what string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	news := r.faults[container] != what
	if what == "" {
		delete(r.faults, container)
	} else {
		r.faults[container] = what
	}
	return news
}

// Find returns the path of Docker's daemon program, which may also be in a system
// directory outside PATH.
func Find() (string, error) {
	for _, p := range []string{"dockerd", "/usr/sbin/dockerd", "/usr/bin/dockerd"} {
		if at, err := exec.LookPath(p); err == nil {
			return at, nil
		}
	}
	return "", errors.New("cannot find dockerd (Debian package docker.io)")
}

// Ping returns the version of the Docker daemon on a socket, or an error if
// none answers.
func Ping(ctx context.Context, socket string) (version string, err error) {
	var v struct{ Version string }
	if err := newClient(socket).call(ctx, "GET", "/version", nil, nil, &v); err != nil {
		return "", fmt.Errorf("cannot reach Docker at %s: %w", socket, err)
	}
	return v.Version, nil
}

// Capabilities implements instance.Runtime.
func (r *Runtime) Capabilities() power.Capabilities {
	return power.Capabilities{Freeze: true, WatchSockets: true, Reclaim: r.cfg.Process.Capabilities().Reclaim, ExecInside: true, Image: true, Shared: true}
}

// CheckSpec implements instance.SpecChecker.
func (r *Runtime) CheckSpec(s *instance.Spec) error {
	var errs []error
	for field, set := range map[string]bool{"command": len(s.Command) > 0, "env": len(s.Env) > 0, "user": s.User != "",
		"workdir": s.Workdir != "", "expose": len(s.Expose) > 0, "listen_fds": s.ListenFDs, "wake_from_stopped": s.WakeFromStopped != nil && *s.WakeFromStopped} {
		if set {
			errs = append(errs, fmt.Errorf("cannot use %s: it is determined by the container that is adopted", field))
		}
	}
	if s.Image == "" {
		errs = append(errs, errors.New("cannot use image: want the name or id of a container"))
	}
	return errors.Join(errs...)
}

// Start implements instance.Runtime. A running container is adopted as it is;
// any other is started.
func (r *Runtime) Start(ctx context.Context, l instance.Launch) (instance.Workload, error) {
	d, err := r.findPatiently(ctx, l.Image)
	if err == nil && !d.runs() {
		if err = r.api.do(ctx, d.ID, "start", nil); err == nil {
			d, err = r.api.inspect(ctx, d.ID)
		}
	}
	if err == nil && !d.runs() {
		err = fmt.Errorf("it ended with code %d", d.State.ExitCode)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot run the container %.100s: %w", l.Image, err)
	}
	if w := r.workOf(d.ID); w != nil && w.id != l.ID {
		return nil, fmt.Errorf("cannot run the container %.100s: the instance %s has already adopted it", l.Image, w.id)
	}
	w, err := r.attach(l.ID, l.Run, d)
	if err != nil {
		return nil, err
	}
	r.letIn(ctx, w)
	return w, nil
}

// Adopt implements instance.Runtime.
func (r *Runtime) Adopt(ctx context.Context, id string, ident instance.Identity) (instance.Workload, error) {
	c := containerOf(ident.Cgroup)
	if c == "" { // the daemon ended before it recorded a control group
		return nil, &instance.GoneError{ID: id, Exit: instance.Exit{Lost: true, At: time.Now()}}
	}
	d, err := r.api.inspect(ctx, c)
	if isStatus(err, 404) {
		return nil, &instance.GoneError{ID: id, Exit: instance.Exit{Lost: true, At: time.Now()}}
	}
	if err != nil {
		return nil, fmt.Errorf("cannot ask Docker about %s: %w", id, err)
	}
	if !d.runs() {
		return nil, &instance.GoneError{ID: id, Exit: d.exit()}
	}
	w, err := r.attach(id, ident.Run, d)
	if err != nil {
		return nil, err
	}
	if now := w.Identity(); now.BootID != ident.BootID || now.PID != ident.PID || now.Start != ident.Start {
		r.drop(w)
		return nil, &instance.GoneError{ID: id, Exit: instance.Exit{Lost: true, At: time.Now()}}
	}
	w.paused.Store(d.State.Paused)
	return w, nil
}

func (d *details) exit() instance.Exit {
	e := instance.Exit{Code: d.State.ExitCode, At: d.State.FinishedAt}
	if e.Code > 128 && e.Code < 128+65 {
		e.Signal = e.Code - 128
	}
	if d.State.OOMKilled {
		e.Why = instance.Starved("the kernel", 0)
	}
	return e
}

// containerOf returns the container in the name of its control group: docker/ID
// if Docker creates the groups itself, docker-ID.scope if systemd does. Podman's are
// libpod-ID and libpod-ID.scope, with a group container below if the version is 2.
func containerOf(dir string) string {
	if filepath.Base(dir) == "container" {
		dir = filepath.Dir(dir)
	}
	name := strings.TrimSuffix(filepath.Base(dir), ".scope")
	for _, engine := range []string{"docker-", "libpod-"} {
		name = strings.TrimPrefix(name, engine)
	}
	if !validID(name) {
		return ""
	}
	return name
}

func (r *Runtime) attach(id string, run uint64, d *details) (*Work, error) {
	g, err := cgroup.Of(d.State.Pid)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &instance.GoneError{ID: id, Exit: instance.Exit{Lost: true, At: time.Now()}}
	}
	if err != nil {
		return nil, err
	}
	if containerOf(g.Dir()) != d.ID {
		return nil, fmt.Errorf("cannot take over the container %s: process %d is in the group %s, which does not belong to it", d.name(), d.State.Pid, g.Dir())
	}
	network := d.HostConfig.NetworkMode
	pw, err := r.cfg.Process.Attach(id, run, d.State.Pid, g, func() bool { return r.alone(d.ID, d.name(), network) })
	if err != nil {
		return nil, err
	}
	w := &Work{Work: pw, r: r, id: id, container: d.ID, still: g.Frozen, stopSignal: d.Config.StopSignal,
		health: d.healthCommand(), checks: checks{group: g.CPU, main: pw.MainCPU}}
	r.mu.Lock()
	r.works[d.ID], r.names[id] = w, d.ID
	f := r.follower
	r.mu.Unlock()
	if f != nil { // so that commands already running beside it are found
		f.want(d.ID)
	}
	return w, nil
}

func (r *Runtime) drop(w *Work) {
	r.mu.Lock()
	ours := r.works[w.container] == w
	if ours {
		delete(r.works, w.container)
	}
	r.mu.Unlock()
	if ours {
		r.unheed(w.container)
	}
}

func (r *Runtime) workOf(container string) *Work {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.works[container]
}

// Exec implements instance.Execer.
func (r *Runtime) Exec(ctx context.Context, id string, q instance.Command, s instance.Streams) (int, error) {
	c, err := r.container(id)
	if err != nil {
		return 0, err
	}
	code, err := r.api.exec(ctx, c, q, s)
	if err != nil {
		return 0, fmt.Errorf("cannot run %s: %w", q.Command[0], err)
	}
	return code, nil
}

// Logs implements instance.LogReader. Docker stores them.
func (r *Runtime) Logs(ctx context.Context, id string, w io.Writer, q instance.LogQuery) error {
	c, err := r.container(id)
	if err == nil {
		err = r.api.logs(ctx, c, w, q)
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("cannot read the log: %w", err)
	}
	return nil
}

// container returns the container that an instance adopted last.
func (r *Runtime) container(id string) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.names[id]; c != "" {
		return c, nil
	}
	return "", errors.New("the instance has taken over no container yet")
}

// Close waits until wakes in progress have ended. The shim keeps the clients of
// stopped containers waiting for the next daemon.
func (r *Runtime) Close() { r.wakes.Wait() }

// Work is one run of a container; it implements instance.Workload.
type Work struct {
	*process.Work
	r          *Runtime
	id         string
	container  string
	still      func() (bool, error) // reports whether every task of its group is frozen
	stopSignal string
	health     string // command of its health check, empty for none
	checks     checks

	// paused is set while a pause made by an earlier daemon may still be in
	// effect. Any other pause was made by a user.
	paused atomic.Bool
	asked  atomic.Bool // lull has asked it to exit
}

// Sample implements instance.Workload. The CPU time of health checks does not
// count as use.
func (w *Work) Sample(ports []instance.Endpoint) instance.Sample {
	s := w.Work.Sample(ports)
	w.r.leaveOutGroup(&s, w.container)
	if s.CPUErr == nil {
		s.CPU = max(s.CPU-w.checks.used(), 0)
	}
	return s
}

// Freeze implements instance.Workload. The shim is informed first, so that a
// container stays paused only while a daemon exists that can wake it.
func (w *Work) Freeze(ctx context.Context) error {
	if err := w.r.cfg.Process.WhenGone(ctx, w.container, w.r.cfg.Socket, "/containers/"+w.container+"/unpause"); err != nil {
		return fmt.Errorf("cannot pause the container: %w", err)
	}
	err := w.pause(ctx)
	if err != nil {
		w.r.unheed(w.container)
	}
	return err
}

func (w *Work) pause(ctx context.Context) error {
	err := w.r.api.do(ctx, w.container, "pause", nil)
	ours := w.paused.Swap(false)
	if isStatus(err, 409) { // the container is restarting, has ended, or is already paused
		if still, serr := w.still(); serr != nil || !still || !ours {
			return fmt.Errorf("cannot pause the container: %w", err)
		}
		w.Froze(true)
		return nil
	}
	if unanswered(err) {
		err = errors.Join(err, instance.ErrUnanswered)
	}
	for err == nil {
		var still bool
		if still, err = w.still(); still && err == nil {
			w.Froze(true)
			return nil
		}
		if err == nil {
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
				err = context.Cause(ctx)
			}
		}
	}
	return errors.Join(fmt.Errorf("cannot pause the container: %w", err), w.Thaw())
}

// Thaw implements instance.Workload.
func (w *Work) Thaw() error {
	ctx, cancel := context.WithTimeout(context.Background(), apiLimit)
	defer cancel()
	err := w.r.api.do(ctx, w.container, "unpause", nil)
	if err != nil && !isStatus(err, 404) {
		// A container that no longer exists, or is no longer paused, needs no thaw.
		if still, serr := w.still(); (serr != nil || still) && !errors.Is(serr, fs.ErrNotExist) {
			return fmt.Errorf("cannot unpause the container: %w", err)
		}
	}
	w.paused.Store(false)
	w.Froze(false)
	w.r.unheed(w.container)
	return nil
}

// unheed makes the shim forget a container. If that fails, the shim unpauses the
// container when this daemon ends, even if a user has paused it.
func (r *Runtime) unheed(container string) {
	ctx, cancel := context.WithTimeout(context.Background(), apiLimit)
	defer cancel()
	if err := r.cfg.Process.WhenGone(ctx, container, "", ""); err != nil {
		r.log.Warn("the shim may unpause a container", "container", container[:12], "err", err)
	}
}

// Still implements instance.Workload.
func (w *Work) Still() (bool, error) { return w.still() }

// Guard implements instance.Workload. A wake asks Docker to unpause, so each runs
// in its own goroutine and delays no other.
func (w *Work) Guard(ports []instance.Endpoint, outbound bool, wake func(string)) (instance.Guard, error) {
	return w.Work.Guard(ports, outbound, func(why string) {
		w.r.wakes.Go(func() {
			if w.goodbye(why) {
				why = instance.WithinGroup + why
			}
			wake(why)
		})
	})
}

// Signal implements instance.Workload. A request to exit is sent as the stop
// signal of the image, so that Docker treats it as a stop and does not restart
// the container.
func (w *Work) Signal(sig syscall.Signal) error {
	ctx, cancel := context.WithTimeout(context.Background(), apiLimit)
	defer cancel()
	name := fmt.Sprint(int(sig))
	if sig == syscall.SIGTERM && w.stopSignal != "" {
		name = w.stopSignal
	}
	ours, err := w.ours(ctx)
	if err == nil && !ours {
		return syscall.ESRCH
	}
	if err == nil {
		if sig == syscall.SIGTERM { // must precede the signal, to which the program reacts at once
			w.asked.Store(true)
		}
		err = w.r.api.do(ctx, w.container, "kill", map[string][]string{"signal": {name}})
	}
	if isStatus(err, 404, 409) {
		return syscall.ESRCH
	}
	if err != nil {
		return fmt.Errorf("cannot signal the container: %w", err)
	}
	return nil
}

// ours reports whether w is still the container's current run.
func (w *Work) ours(ctx context.Context) (bool, error) {
	d, err := w.r.api.inspect(ctx, w.container)
	if isStatus(err, 404) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if !d.runs() || d.State.Pid != w.Identity().PID {
		return false, nil
	}
	return w.Alive()
}

// Kill implements instance.Workload. It stops the container through Docker, so that
// no restart policy restarts it. A later run of the container is left alone.
func (w *Work) Kill(ctx context.Context) error {
	ours, err := w.ours(ctx)
	if err == nil && ours {
		err = w.r.api.do(ctx, w.container, "stop", map[string][]string{"t": {"0"}})
		if isStatus(err, 404) {
			err = nil
		}
	}
	if err != nil {
		return fmt.Errorf("cannot stop the container: %w", err)
	}
	w.r.drop(w)
	return nil
}

// Forget implements instance.Forgetter. The container stays, because it is
// Docker's.
func (r *Runtime) Forget(_ context.Context, id string) error {
	r.mu.Lock()
	w := r.works[r.names[id]]
	delete(r.names, id)
	r.mu.Unlock()
	r.relations.release(id)
	if w != nil && w.id == id { // the container continues to run
		r.drop(w)
		r.beside.removeAll(w.container)
	}
	return nil
}
