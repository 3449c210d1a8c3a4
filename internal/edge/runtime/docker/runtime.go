// Package docker takes over the idling of containers that Docker runs: those
// with the label lull.pause-after, and those that a person names. Docker keeps
// owning them: it starts, pauses, stops and restarts them, and what a person
// does with docker is respected.
//
// A container is frozen with docker pause, so that docker ps says so. Clients
// reach it as before, through its published ports: while it is frozen its own
// listening sockets are watched from here (they are taken by pidfd_getfd,
// whatever network namespace they are in), so the first packet that Docker's
// port forwarding brings wakes it.
//
// Docker is asked once and then followed by its events: nothing is polled. When
// the daemon goes away the driver waits for it, and then looks at every
// container again.
//
// It guarantees that Freeze returns nil only once every task is still, and that
// a container is never stopped that is not the run it was asked about. It
// decides nothing.
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

	"lull/internal/edge/cgroup"
	"lull/internal/edge/runtime/process"
	"lull/internal/instance"
	"lull/internal/power"
)

// Config of a Runtime.
type Config struct {
	Socket  string           // of the Docker Engine API
	Process *process.Runtime // which watches sockets and reads processes
	Log     *slog.Logger

	// OnExit is told when a run is over, perhaps more than once. It must not
	// wait.
	OnExit func(id string, run uint64, e instance.Exit)
}

// Runtime implements instance.Runtime. The image of an instance is the name or
// id of the container that it takes over.
type Runtime struct {
	cfg Config
	api *client
	log *slog.Logger

	mu     sync.Mutex
	works  map[string]*Work // by container
	names  map[string]string
	faults map[string]string // by container: why it is not taken over
	joined map[string]string // by container: whose network it shares; nil before they were listed
	wakes  sync.WaitGroup
}

var (
	_ instance.Runtime     = (*Runtime)(nil)
	_ instance.Execer      = (*Runtime)(nil)
	_ instance.LogReader   = (*Runtime)(nil)
	_ instance.SpecChecker = (*Runtime)(nil)
	_ instance.Workload    = (*Work)(nil)
)

// apiLimit bounds an answer of the daemon to anything that is not a stop.
const apiLimit = 30 * time.Second

// New makes a runtime. It asks Docker nothing: the daemon may come later.
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

// alone says that no container that is there, running or not, shares the network
// of one that has network mode: what connects to it over loopback is then its
// own, its health check above all.
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

// sharesWith is before the id or name of the container in the network mode of
// one that shares another's network.
const sharesWith = "container:"

// join notes whose network a container shares, if another's.
func (r *Runtime) join(container, mode string) {
	whose, ok := strings.CutPrefix(mode, sharesWith)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.joined == nil: // it is listed with all others
	case ok:
		r.joined[container] = whose
	default:
		delete(r.joined, container)
	}
}

// Faults are the containers that ask to be taken over and cannot be, each with
// the reason.
func (r *Runtime) Faults() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Values(r.faults))
}

// setFault keeps what is wrong with a container, empty for nothing, and says
// whether that is news.
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

// Find looks for the Docker daemon's program, also where system tools are.
func Find() (string, error) {
	for _, p := range []string{"dockerd", "/usr/sbin/dockerd", "/usr/bin/dockerd"} {
		if at, err := exec.LookPath(p); err == nil {
			return at, nil
		}
	}
	return "", errors.New("cannot find dockerd (Debian package docker.io)")
}

// Ping says whether a Docker daemon answers on a socket, and its version.
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
			errs = append(errs, fmt.Errorf("cannot use %s: it is Docker's, of the container that is taken over", field))
		}
	}
	if s.Image == "" {
		errs = append(errs, errors.New("cannot use image: want the name or id of a container"))
	}
	return errors.Join(errs...)
}

// Start implements instance.Runtime: a container that runs is taken over as it
// is, another one is started.
func (r *Runtime) Start(ctx context.Context, l instance.Launch) (instance.Workload, error) {
	d, err := r.api.inspect(ctx, l.Image)
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
		return nil, fmt.Errorf("cannot run the container %.100s: the instance %s has taken it over already", l.Image, w.id)
	}
	w, err := r.attach(l.ID, l.Run, d)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// Adopt implements instance.Runtime.
func (r *Runtime) Adopt(ctx context.Context, id string, ident instance.Identity) (instance.Workload, error) {
	c := containerOf(ident.Cgroup)
	if c == "" { // the daemon ended before it could record it
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

// containerOf reads the container out of the name of its group: docker/ID where
// Docker makes groups itself, docker-ID.scope where systemd does.
func containerOf(dir string) string {
	name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(dir), "docker-"), ".scope")
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
		return nil, fmt.Errorf("cannot take over the container %s: process %d is in the group %s, which is not its own", d.name(), d.State.Pid, g.Dir())
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
	r.mu.Unlock()
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
func (r *Runtime) Exec(ctx context.Context, id string, q instance.Command) (instance.Outcome, error) {
	c, err := r.container(id)
	if err != nil {
		return instance.Outcome{}, err
	}
	out, err := r.api.exec(ctx, c, q.Command, q.Env, q.Dir)
	if err != nil {
		return instance.Outcome{}, fmt.Errorf("cannot run %s: %w", q.Command[0], err)
	}
	return out, nil
}

// Logs implements instance.LogReader: Docker keeps them.
func (r *Runtime) Logs(ctx context.Context, id string, w io.Writer, tail int, follow bool) error {
	c, err := r.container(id)
	if err == nil {
		err = r.api.logs(ctx, c, w, tail, follow)
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("cannot read the log: %w", err)
	}
	return nil
}

// container is the one that an instance took over last.
func (r *Runtime) container(id string) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.names[id]; c != "" {
		return c, nil
	}
	return "", errors.New("the instance has taken over no container yet")
}

// Close waits for wakes that are under way.
func (r *Runtime) Close() { r.wakes.Wait() }

// Work is one run of a container; it implements instance.Workload.
type Work struct {
	*process.Work
	r          *Runtime
	id         string
	container  string
	still      func() (bool, error) // whether every task of its group is frozen
	stopSignal string
	health     string // command of its health check, empty for none
	checks     checks

	// paused is set while a pause that an earlier daemon made may still be there.
	// Any other pause that is found is a user's.
	paused atomic.Bool
}

// Sample implements instance.Workload. The CPU time of health checks is no use.
func (w *Work) Sample(ports []instance.Endpoint) instance.Sample {
	s := w.Work.Sample(ports)
	if s.CPUErr == nil {
		s.CPU = max(s.CPU-w.checks.used(), 0)
	}
	return s
}

// Freeze implements instance.Workload. The shim knows of it first, so that a
// container stays paused only as long as there is a daemon to wake it.
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
	if isStatus(err, 409) { // restarting, ended, or paused already
		if still, serr := w.still(); serr != nil || !still || !ours {
			return fmt.Errorf("cannot pause the container: %w", err)
		}
		w.Froze(true)
		return nil
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
		// It is not paused any more, or not there any more: that is what was wanted.
		if still, serr := w.still(); (serr != nil || still) && !errors.Is(serr, fs.ErrNotExist) {
			return fmt.Errorf("cannot unpause the container: %w", err)
		}
	}
	w.paused.Store(false)
	w.Froze(false)
	w.r.unheed(w.container)
	return nil
}

// unheed lets the shim forget a container that is not ours to unpause any more.
// One that it does not forget would be unpaused once too often, when this daemon
// has gone.
func (r *Runtime) unheed(container string) {
	ctx, cancel := context.WithTimeout(context.Background(), apiLimit)
	defer cancel()
	if err := r.cfg.Process.WhenGone(ctx, container, "", ""); err != nil {
		r.log.Warn("the shim may unpause a container", "container", container[:12], "error", err)
	}
}

// Still implements instance.Workload.
func (w *Work) Still() (bool, error) { return w.still() }

// Guard implements instance.Workload. A thaw asks Docker, so a wake goes its own
// way and holds no other one up.
func (w *Work) Guard(ports []instance.Endpoint, outbound bool, wake func(string)) (instance.Guard, error) {
	return w.Work.Guard(ports, outbound, func(why string) { w.r.wakes.Go(func() { wake(why) }) })
}

// Signal implements instance.Workload. Asked to end, it gets the signal that its
// image wants for that, so that Docker takes it for a stop and does not start
// it again.
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

// ours says whether the container's present run is this one.
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

// Kill implements instance.Workload. It stops the container for Docker too, so
// that no restart policy brings it back. A later run is left alone.
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

// Forget implements instance.Forgetter. The container stays: it is Docker's.
func (r *Runtime) Forget(_ context.Context, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.names, id)
	return nil
}
