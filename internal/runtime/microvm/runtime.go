// Package microvm runs instances as small virtual machines: one QEMU each,
// driven over QMP, with lull-harness as the guest's first process and the guest's
// network inside this process (vnet). Clients reach a guest only through the
// relay, which connects with [Work.Dial].
//
// Freeze returns nil only once the guest's CPU has stopped. Thaw returns nil only
// once the guest runs with its clock set and its random number generator
// reseeded. A value that the guest did not report is an error in the sample,
// never zero. A run that is over leaves no process, socket or memory file. What a
// guest wrote to its own files is there in its next run, as on a disk after a
// power failure, until the instance is forgotten. Guests are hostile: everything
// that comes from them is bounded and validated.
//
// QEMU outlives the daemon; Adopt reconnects to it. Without a daemon a paused
// guest stays paused, because clients reach it only through the daemon.
//
// The package decides nothing and never reads a guest's files: a root image is
// shared read-only, changes to it go to a file system that only the guest mounts
// (layer.go), and a workspace is a directory of the host (package share).
package microvm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/elfcheck"
	"lull/internal/platform/oci"
	"lull/internal/protocol/guest"
	"lull/internal/runtime/microvm/vnet"
)

// Machine configures a guest. A zero field means its default.
type Machine struct {
	Memory int64             // bytes, a multiple of 1 MiB; default 256 MiB, at least 96 MiB
	CPUs   int               // default 1, at most 64
	Kind   string            // q35 (default), or microvm, which boots faster
	Root   string            // directory, ext4 image, OCI image or registry reference; read-only, with a writable layer on top; empty runs in the initramfs, which is in memory
	Files  map[string]string // path in the guest's initramfs -> host file
	Net    vnet.Mode         // what the guest may reach; default outbound
}

// The limits of a Machine.
const (
	minMemory     = 96 << 20
	defaultMemory = 256 << 20
	maxMemory     = 1 << 40
	maxCPUs       = 64
)

// with applies an instance's settings over m, and the defaults below it.
func (m Machine) with(image string, memory int64, cpus float64, net instance.Net) (Machine, error) {
	m.Root = cmp.Or(image, m.Root)
	m.Net = vnet.Mode(cmp.Or(string(net), string(m.Net)))
	if memory != 0 {
		m.Memory = memory
	}
	if cpus != 0 {
		m.CPUs = int(cpus)
		if float64(m.CPUs) != cpus {
			return m, fmt.Errorf("cpus: %v is not a whole number, which a virtual machine needs", cpus)
		}
	}
	return m.withDefaults()
}

// CheckSpec implements instance.SpecChecker.
func (r *Runtime) CheckSpec(s *instance.Spec) error {
	var errs []error
	if len(s.Command) == 0 && !namesCommand(s.Image) {
		errs = append(errs, errors.New("cannot use command: it is empty, and neither a directory nor an ext4 image has a default"))
	}
	if _, err := (Machine{}).with(s.Image, s.Memory, s.CPUs, s.Net); err != nil {
		errs = append(errs, err)
	}
	if err := r.checkRoot(s.Image); err != nil {
		errs = append(errs, fmt.Errorf("cannot use image: %w", err))
	}
	if err := r.checkWorkspace(s.Workspace); err != nil {
		errs = append(errs, fmt.Errorf("cannot use workspace: %w", err))
	}
	return errors.Join(errs...)
}

func (m Machine) withDefaults() (Machine, error) {
	if m.Memory == 0 {
		m.Memory = defaultMemory
	}
	if m.CPUs == 0 {
		m.CPUs = 1
	}
	if m.Kind == "" {
		m.Kind = "q35"
	}
	var errs []error
	switch {
	case m.Memory < minMemory:
		errs = append(errs, fmt.Errorf("cannot use memory: %d bytes are less than %d MiB, which a guest needs", m.Memory, minMemory>>20))
	case m.Memory > maxMemory:
		errs = append(errs, fmt.Errorf("cannot use memory: %d bytes are more than %d MiB", m.Memory, maxMemory>>20))
	case m.Memory%(1<<20) != 0:
		errs = append(errs, fmt.Errorf("memory: %d bytes is not a multiple of 1 MiB", m.Memory))
	}
	if m.CPUs < 1 || m.CPUs > maxCPUs {
		errs = append(errs, fmt.Errorf("cannot use cpus: %d is not between 1 and %d", m.CPUs, maxCPUs))
	}
	if m.Kind != "q35" && m.Kind != "microvm" {
		errs = append(errs, fmt.Errorf("cannot use machine: %q is neither q35 nor microvm", m.Kind))
	}
	return m, errors.Join(errs...)
}

// Config configures a Runtime.
type Config struct {
	Dir     string // private directory, created with mode 0700; its path must be short, because it contains sockets
	Harness string // the lull-harness program
	Kernel  string // tree or file for FindKernel
	// FindKernel, if set, is called for Kernel's value, repeatedly while it
	// returns none.
	FindKernel func() (string, error)
	QEMU       string     // default qemu-system-x86_64 in PATH
	Accel      Accel      // default: chosen by choose, or TCG if KVM has failed here before
	Channel    Channel    // default: auto
	Images     *oci.Store // store for unpacked images; nil accepts only directories and ext4 images
	Layer      int64      // size in bytes of the writable layer, fixed at the first start; 0 keeps changes in memory until the guest stops
	Log        *slog.Logger
	// WhenGone arranges that a guest is continued through the monitor at socket
	// when this daemon has ended. An empty socket cancels that. If WhenGone is nil,
	// guests stay paused.
	WhenGone func(ctx context.Context, id, socket string) error

	// Machine returns the defaults for an instance's guest; nil means the zero
	// Machine.
	Machine func(id string) (Machine, error)
	// OnExit is called once when a run is over. It must not block.
	OnExit func(id string, run uint64, e instance.Exit)
	// OnMessage handles a message that a program in the guest sends over
	// LULL_SOCKET; its error is the reply. busy means that a program is working,
	// waiting that none is anymore; either may be repeated. OnMessage may block
	// until ctx ends. If it is nil, all messages are rejected.
	OnMessage func(ctx context.Context, id string, m guest.Message) error

	BootLimit time.Duration // until a booting guest answers, default 90 s; three times as long without KVM
	CallLimit time.Duration // until a waking guest has set its clock, default 30 s
	LookLimit time.Duration // for a health call, default 2 s; without an answer the readings are unknown

	StoppedLimit time.Duration // until a QEMU stopped by a signal is continued, default 5 s
	MuteLimit    time.Duration // until a silent QEMU is killed, default 2 min
}

// Runtime implements instance.Runtime.
type Runtime struct {
	reserved reserved
	cfg      Config
	log      *slog.Logger
	files    machineFiles
	rights   rights
	// listens returns why this process cannot listen on vsock; setCID registers a
	// vsock device. Tests replace them.
	listens func() error
	setCID  func(fd int, cid uint32) error
	boot    string
	found   atomic.Pointer[parts]
	sum     kernelSum
	// roots is held for reading while a guest takes a root image and boot files
	// into use, and for writing while they are removed.
	roots sync.RWMutex
	// without is set once guests no longer get a vsock device, and is the reason.
	without atomic.Pointer[string]
	// cloning is held while templates are created, used or removed.
	cloning sync.Mutex
	making  chan struct{} // held while a root image is built

	mu     sync.Mutex
	works  map[string]*Work
	closed bool
}

var (
	_ instance.Runtime     = (*Runtime)(nil)
	_ instance.SpecChecker = (*Runtime)(nil)
	_ instance.Execer      = (*Runtime)(nil)
	_ instance.Forgetter   = (*Runtime)(nil)
	_ instance.Ender       = (*Runtime)(nil)
	_ instance.Sizer       = (*Runtime)(nil)
	_ instance.Cloner      = (*Runtime)(nil)
	_ instance.ImageKeeper = (*Runtime)(nil)

	_ instance.ConsoleKeeper = (*Runtime)(nil)
)

// maxSocket is the maximum length of a unix socket path.
const maxSocket = 107

// New checks the configuration; its error names every invalid setting. Without
// QEMU, a kernel or the guest agent no guest can start, but running ones can be
// adopted and stopped. Missing lists these prerequisites. New starts nothing. It
// removes leftovers of a crash, so no other process may be using the directory.
func New(cfg Config) (*Runtime, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.BootLimit == 0 {
		cfg.BootLimit = 90 * time.Second
	}
	if cfg.CallLimit == 0 {
		cfg.CallLimit = callLimit
	}
	if cfg.LookLimit == 0 {
		cfg.LookLimit = 2 * time.Second
	}
	if cfg.StoppedLimit == 0 {
		cfg.StoppedLimit = stoppedLimit
	}
	if cfg.MuteLimit == 0 {
		cfg.MuteLimit = unresponsiveLimit
	}
	if cfg.OnExit == nil {
		cfg.OnExit = func(string, uint64, instance.Exit) {}
	}
	if cfg.Channel == "" {
		cfg.Channel = ChannelAuto
	}
	if cfg.QEMU == "" {
		cfg.QEMU = "qemu-system-x86_64"
	}
	r := &Runtime{cfg: cfg, log: cfg.Log, files: liveFiles, listens: listens, setCID: setCID, works: map[string]*Work{}, making: make(chan struct{}, 1)}
	r.rights = r.files.findRights(os.Geteuid())
	var errs []error
	lacks := r.parts().lacks
	if err := cfg.Channel.check(r.noVsock); err != nil {
		errs = append(errs, err)
	}
	if cfg.Accel != "" && cfg.Accel != KVM && cfg.Accel != TCG {
		errs = append(errs, fmt.Errorf("cannot use accel: %q is neither kvm nor tcg", cfg.Accel))
	}
	if err := instance.CheckLayer(cfg.Layer); err != nil {
		errs = append(errs, fmt.Errorf("cannot use layer: %w", err))
	}
	if n := len(filepath.Join(cfg.Dir, "vm", strings.Repeat("x", 32), "qmp.sock")); n > maxSocket || !filepath.IsAbs(cfg.Dir) {
		errs = append(errs, fmt.Errorf("cannot use %s for virtual machines: want an absolute path of at most %d bytes, because sockets are created below it", cfg.Dir, maxSocket-n+len(cfg.Dir)))
	}
	var err error
	if r.boot, err = bootID(); err != nil {
		errs = append(errs, err)
	}
	if len(errs) > 0 {
		return nil, errors.Join(append(errs, lacks)...)
	}
	if err := os.MkdirAll(filepath.Join(cfg.Dir, "vm"), 0o700); err != nil {
		return nil, fmt.Errorf("cannot make the directory of virtual machines: %w", err)
	}
	if err := r.clearHalfMade(); err != nil {
		return nil, err
	}
	return r, nil
}

// parts are the prerequisites for starting and restoring guests.
type parts struct {
	qemu   string
	kernel Kernel
	lacks  error // lists missing prerequisites
}

// parts returns the prerequisites. It searches for missing ones at each call, so
// that one that is installed later is used without a restart.
func (r *Runtime) parts() *parts {
	p := r.found.Load()
	if p == nil || p.lacks != nil {
		p = r.findParts()
		r.found.Store(p)
	}
	return p
}

func (r *Runtime) findParts() *parts {
	p := &parts{}
	var errs []error
	var err error
	if p.qemu, err = exec.LookPath(r.cfg.QEMU); err != nil {
		errs = append(errs, fmt.Errorf("cannot find QEMU: %w (Debian package qemu-system-x86)", err))
	}
	kernel := r.cfg.Kernel
	if r.cfg.FindKernel != nil {
		kernel, err = r.cfg.FindKernel()
	} else {
		err = nil
	}
	if err == nil {
		p.kernel, err = FindKernel(kernel)
	}
	if err != nil {
		errs = append(errs, err)
	}
	if err := elfcheck.Static(r.cfg.Harness); err != nil {
		errs = append(errs, fmt.Errorf("cannot use lull-harness: %w; build it with: make build", err))
	}
	p.lacks = errors.Join(errs...)
	return p
}

// Missing returns an error that lists the missing prerequisites for starting and
// restoring guests, or nil.
func (r *Runtime) Missing() error { return r.parts().lacks }

// Accelerator returns the accelerator used for guests, and why.
func (r *Runtime) Accelerator() (Accel, string) { return r.accel() }

// KernelVersion returns the version, or else the path, of the guest kernel.
func (r *Runtime) KernelVersion() string {
	return cmp.Or(r.parts().kernel.Version, r.parts().kernel.Image)
}

// Capabilities implements instance.Runtime. Clients come through the relay, so
// the program has no sockets on the host to watch.
func (r *Runtime) Capabilities() power.Capabilities {
	return power.Capabilities{Freeze: true, Reclaim: true, Hibernate: true, WakeFromStopped: true, ExecInside: true, Heartbeat: true,
		Image: true, Network: true, Limits: true, Workspace: true}
}

// dir returns an instance's own directory.
func (r *Runtime) dir(id string) string { return filepath.Join(r.cfg.Dir, "vm", id) }

func checkID(id string) error {
	if id == "" || len(id) > 32 || id != filepath.Base(id) || strings.HasPrefix(id, ".") {
		return fmt.Errorf("cannot use %q as an instance's id: want a plain name of at most 32 bytes", id)
	}
	return nil
}

// Start implements instance.Runtime. It returns once the guest has booted and its
// program has been started.
func (r *Runtime) Start(ctx context.Context, l instance.Launch) (instance.Workload, error) {
	if err := errors.Join(checkID(l.ID), r.Missing()); err != nil {
		return nil, err
	}
	if len(l.Listen) > 0 {
		return nil, errors.New("cannot start: a virtual machine cannot inherit sockets (listen_fds)")
	}
	var m Machine
	var err error
	if r.cfg.Machine != nil {
		if m, err = r.cfg.Machine(l.ID); err != nil {
			return nil, err
		}
	}
	if m, err = m.with(l.Image, l.Memory, l.CPUs, l.Net); err != nil {
		return nil, err
	}
	accel, _ := r.accel()
	w, err := r.startOn(ctx, l, m, accel, false)
	if ctx.Err() == nil && r.doWithoutVsock(err) {
		w, err = r.startOn(ctx, l, m, accel, false)
	}
	for n := range timerTries {
		if !errors.Is(err, errTimer) || ctx.Err() != nil {
			break
		}
		r.log.Warn("the host was too busy for a booting guest; booting it again", "instance", l.ID, "err", err)
		w, err = r.startOn(ctx, l, m, accel, n == timerTries-1)
	}
	if accel == KVM && err == nil {
		r.noteKVM()
	}
	if accel == KVM && r.cfg.Accel == "" && errors.Is(err, errNoBoot) && !vsockFailed(err) && ctx.Err() == nil && !r.kvmBoots() {
		return asWorkload(r.startWithoutKVM(ctx, l, m, err))
	}
	return asWorkload(w, err)
}

// startWithoutKVM starts a guest without KVM after it did not boot with KVM. If the
// guest boots now, KVM is recorded as broken.
func (r *Runtime) startWithoutKVM(ctx context.Context, l instance.Launch, m Machine, cause error) (*Work, error) {
	r.log.Warn("a guest does not boot with KVM; trying software emulation", "instance", l.ID, "err", cause)
	w, err := r.startOn(ctx, l, m, TCG, false)
	if err != nil {
		return nil, cause
	}
	r.log.Warn("guests do not boot with KVM on this machine; using software emulation from now on")
	if err := r.remember(cause); err != nil {
		r.log.Error("the next start tries KVM again", "err", err)
	}
	return w, nil
}

func asWorkload(w *Work, err error) (instance.Workload, error) {
	if err != nil {
		return nil, err
	}
	return w, nil
}

// startOn boots a guest and starts its program. Unless anyTimer is set, it returns
// errTimer if the guest's kernel rejected its timer.
func (r *Runtime) startOn(ctx context.Context, l instance.Launch, m Machine, accel Accel, anyTimer bool) (*Work, error) {
	if err := r.clear(ctx, l.ID); err != nil {
		return nil, err
	}
	if err := r.checkWorkspace(l.Workspace); err != nil {
		return nil, fmt.Errorf("cannot use workspace: %w", err)
	}
	free, err := r.reserveToStart(l.ID, m)
	if err != nil {
		return nil, err
	}
	defer free()
	cid, err := r.giveCID(m)
	if err != nil {
		return nil, err
	}
	call := guest.RunCall{Command: l.Command, Env: l.Env, Dir: l.Dir, User: l.User}
	rec := runRecord{Run: l.Run, LogPath: l.LogPath, LogMax: l.LogMax, Machine: m, Accel: accel,
		FilesPort: l.Workspace != "", Workspace: l.Workspace, CID: cid, AnyTimer: anyTimer}
	if err := r.claim(ctx, l.ID, &rec, &call); err != nil {
		return nil, errors.Join(err, r.clear(context.WithoutCancel(ctx), l.ID))
	}
	call.Dir = cmp.Or(call.Dir, "/")
	w := r.newWork(l.ID)
	w.ident = instance.Identity{BootID: r.boot, Run: l.Run}
	if w.log, err = openLog(l.LogPath, l.LogMax); err != nil {
		return nil, err
	}
	if err := r.register(w); err != nil {
		return nil, errors.Join(err, w.log.Close())
	}
	if err := w.bring(ctx, rec, call); err != nil {
		kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
		defer cancel()
		w.silent.Store(true)
		return nil, errors.Join(fmt.Errorf("cannot start a virtual machine: %w", err), w.Kill(kctx))
	}
	return w, nil
}

// claim finds a guest's root image, layer and boot files, and writes the record
// that protects them from removal.
func (r *Runtime) claim(ctx context.Context, id string, rec *runRecord, call *guest.RunCall) (err error) {
	r.roots.RLock()
	defer r.roots.RUnlock()
	if root := rec.Machine.Root; root != "" {
		if rec.Root, err = r.prepareRoot(ctx, root, call); err != nil {
			return err
		}
		if rec.Layer, err = r.haveLayer(ctx, id); err != nil {
			return err
		}
	}
	if rec.Initrd, err = r.initramfs(rec.Machine, rec.FilesPort, rec.CID != 0); err != nil {
		return err
	}
	if err := os.MkdirAll(r.dir(id), 0o700); err != nil {
		return fmt.Errorf("cannot make its directory: %w", err)
	}
	return writeRecord(r.dir(id), *rec)
}

func (r *Runtime) register(w *Work) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errors.New("cannot start a virtual machine: the runtime was closed")
	}
	if r.works[w.id] != nil {
		return fmt.Errorf("cannot start %s: an earlier run has not ended yet", w.id)
	}
	r.works[w.id] = w
	return nil
}

// drop removes a finished run from the table.
func (r *Runtime) drop(w *Work) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.works[w.id] == w {
		delete(r.works, w.id)
	}
}

func (r *Runtime) work(id string) *Work {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.works[id]
}

// clear ends what remains of an earlier run of an instance and removes its
// files, except the layer, which outlasts runs.
func (r *Runtime) clear(ctx context.Context, id string) error {
	dir := r.dir(id)
	pids, err := findQEMU(dir)
	if err != nil {
		return err
	}
	for _, p := range pids {
		if err := p.kill(ctx); err != nil {
			return fmt.Errorf("cannot end the remaining processes of %s: %w", id, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("cannot remove the remaining files of %s: %w", id, err)
	}
	return nil
}

// End implements instance.Ender. It finds QEMU by its command line, so it also ends
// one that does not answer.
func (r *Runtime) End(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	if w := r.work(id); w != nil {
		return w.Kill(ctx)
	}
	return r.clear(ctx, id)
}

// Forget removes everything kept for an instance that has no run.
func (r *Runtime) Forget(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	if r.work(id) != nil {
		return fmt.Errorf("cannot remove %s: it is running", id)
	}
	return r.forget(ctx, id)
}

// forget is clear, and also removes the files that outlast runs.
func (r *Runtime) forget(ctx context.Context, id string) error {
	if err := r.clear(ctx, id); err != nil {
		return err
	}
	return errors.Join(r.dropLayer(id), r.dropConsole(id))
}

// Adopt implements instance.Runtime.
func (r *Runtime) Adopt(ctx context.Context, id string, ident instance.Identity) (instance.Workload, error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	gone := &instance.GoneError{ID: id, Exit: instance.Exit{Lost: true}}
	rec, err := readRecord(r.dir(id))
	if errors.Is(err, os.ErrNotExist) || err == nil && rec.Run != ident.Run {
		return nil, errors.Join(gone, r.clear(ctx, id))
	}
	if err != nil {
		return nil, err
	}
	pids, err := findQEMU(r.dir(id))
	if err != nil {
		return nil, err
	}
	man, err := readManifest(r.dir(id))
	var unusable *instance.SnapshotError
	if errors.As(err, &unusable) {
		return nil, errors.Join(gone, err, r.clear(ctx, id))
	}
	if err != nil {
		return nil, err
	}
	if man != nil {
		return asWorkload(r.adoptSaved(ctx, id, rec, pids))
	}
	// The PID is not compared, because a wake from hibernation changes it. A QEMU
	// belongs to the directory that has the run's record.
	if len(pids) == 0 {
		return nil, errors.Join(gone, r.clear(ctx, id))
	}
	w := r.newWork(id)
	w.ident = instance.Identity{BootID: r.boot, Run: rec.Run, PID: pids[0].pid, Start: pids[0].start}
	if w.log, err = openLog(rec.LogPath, rec.LogMax); err != nil {
		return nil, err
	}
	if err := r.register(w); err != nil {
		return nil, errors.Join(err, w.log.Close())
	}
	over, err := w.takeOver(ctx, rec, pids[0])
	if err != nil {
		w.letGo()
		return nil, fmt.Errorf("cannot take over the virtual machine of %s: %w", id, err)
	}
	if over != nil {
		w.silent.Store(true)
		return nil, errors.Join(&instance.GoneError{ID: id, Exit: *over}, w.Kill(ctx))
	}
	return w, nil
}

// adoptSaved adopts a hibernated guest. A QEMU that exists was saving or restoring
// the guest and is killed, because only the files count.
func (r *Runtime) adoptSaved(ctx context.Context, id string, rec runRecord, pids []process) (*Work, error) {
	for _, p := range pids {
		if err := p.kill(ctx); err != nil {
			return nil, fmt.Errorf("cannot end the QEMU that saved or restored %s: %w", id, err)
		}
	}
	w := r.newWork(id)
	w.ident = instance.Identity{BootID: r.boot, Run: rec.Run}
	w.rec, w.frozen, w.saved = rec, true, true
	var err error
	if w.net, err = vnet.New(vnet.Config{Mode: rec.Machine.Net}); err != nil {
		return nil, err
	}
	if w.log, err = openLog(rec.LogPath, rec.LogMax); err != nil {
		return nil, errors.Join(err, w.net.Close())
	}
	if err := r.register(w); err != nil {
		return nil, errors.Join(err, w.log.Close(), w.net.Close())
	}
	return w, nil
}

// Close releases every guest and frees all resources. The guests continue to run.
func (r *Runtime) Close() error {
	r.mu.Lock()
	r.closed = true
	var all []*Work
	for _, w := range r.works {
		all = append(all, w)
	}
	r.mu.Unlock()
	for _, w := range all {
		w.letGo()
	}
	return nil
}
