package demo

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/lib/delay"
	"lull/internal/protocol/hostctl"
)

// Timers of the demo. They are short, so that there is something to see.
const (
	pauseAfter = 3 * time.Second
	visitEvery = 6 * time.Second // interval between visits of the simulated client, which visits one program after the other
	startLimit = time.Minute
	endLimit   = 30 * time.Second
)

// host is the daemon with its programs.
type host struct {
	*hostctl.Client
	*stage
	daemon *exec.Cmd
	shim   int
	groups string // directory of its control groups; empty for none
	socket string
	guest  *program // the microVM, until it has started; nil if there is none

	programs []program
}

// all returns the programs, including the guest that starts later.
func (h *host) all() []program {
	if h.guest != nil {
		return append(slices.Clone(h.programs), *h.guest)
	}
	return h.programs
}

// start starts the daemon and the programs that this machine can run.
func (h *host) start(ctx context.Context) error {
	st, err := h.startDaemon(ctx)
	if err != nil {
		return err
	}
	if strings.HasPrefix(st.Freezer, "signals") {
		h.leaveOut("cgroups", errors.New("none that this user may use; programs are paused with signals"))
	}
	_, h.groups, _ = strings.Cut(st.Freezer, " at ")
	for _, f := range finders {
		p, err := f.prepare(ctx, h.stage)
		if err == nil {
			err = h.run(ctx, p)
		}
		switch {
		case err == nil:
			h.programs = append(h.programs, p)
		case ctx.Err() == nil:
			h.leaveOut(f.name, err)
		}
	}
	p, err := guest(h.stage, st.Missing["microvm"])
	if err != nil {
		h.leaveOut("guest", err)
		return nil
	}
	h.guest = &p
	return nil
}

// startGuest starts the microVM, whose boot takes longer than the other programs.
func (h *host) startGuest(ctx context.Context) {
	if h.guest == nil {
		return
	}
	if err := h.run(ctx, *h.guest); err != nil && ctx.Err() == nil {
		h.happened(h.guest.name, "left out: %v", err)
	}
}

func (h *host) startDaemon(ctx context.Context) (hostctl.Status, error) {
	h.socket = filepath.Join(h.data, "host.sock")
	args := []string{"host", "--data", filepath.Join(h.data, "host"), "--socket", h.socket, "--probe-interval", "500ms", "--stop-after", "0", "--stop-all"}
	if h.Kernel != "" {
		args = append(args, "--guest-kernel", h.Kernel)
	}
	logs, err := os.Create(filepath.Join(h.data, "host.log"))
	if err != nil {
		return hostctl.Status{}, err
	}
	defer logs.Close()
	cmd := h.lull(args...)
	cmd.Stdout, cmd.Stderr = logs, logs
	if err := cmd.Start(); err != nil {
		return hostctl.Status{}, err
	}
	h.daemon = cmd
	cl, err := hostctl.NewClient("unix://" + h.socket)
	if err != nil {
		return hostctl.Status{}, err
	}
	// Wait for the start even if the demo ends now, because only a host that has
	// started can end its shim.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), startLimit)
	defer cancel()
	for {
		st, err := cl.Status(last)
		if err == nil {
			h.Client = cl
			_, err = fmt.Sscanf(st.Shim, "pid %d", &h.shim)
			return st, err
		}
		if delay.For(last, 20*time.Millisecond) != nil {
			said, _ := os.ReadFile(logs.Name())
			return st, fmt.Errorf("the host does not answer: %w\n%s", err, said)
		}
	}
}

// lull returns a command of lull in a process group of its own, so that Ctrl-C
// reaches only the demo. The command gets SIGTERM when the demo dies.
func (s *stage) lull(args ...string) *exec.Cmd {
	cmd := exec.Command(s.Program, args...)
	cmd.Env = clean()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	return cmd
}

func (h *host) run(ctx context.Context, p program) error {
	after := idle.Duration(pauseAfter)
	spec := instance.Spec{Name: p.name, Command: p.command, User: p.user,
		PauseAfter: &after, Expose: []instance.Endpoint{{Listen: p.addr, Target: p.addr, Path: instance.PathDirect}}}
	if p.image != "" {
		spec.Runtime, spec.Image, spec.Memory = "microvm", p.image, 256<<20
		spec.Expose = []instance.Endpoint{{Listen: p.addr, Target: "127.0.0.1:80"}}
		spec.HibernateAfter = idle.Duration(pauseAfter)
	}
	_, err := h.Create(ctx, hostctl.Create{Start: true, Spec: spec})
	return err
}

// visit connects to one program after the other, whenever it is asleep.
func (h *host) visit(ctx context.Context) {
	all := h.all()
	for n := 0; len(all) > 0; n++ {
		if delay.For(ctx, visitEvery) != nil {
			return
		}
		p, state := all[n%len(all)], ""
		if o, err := h.Get(ctx, p.name); err == nil {
			state = o.State
		}
		if state != "paused" && state != "hibernated" {
			continue
		}
		began := time.Now()
		said, err := p.visit(ctx, p.addr)
		took := time.Since(began)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			h.happened(p.name, "%s; its client failed: %v", state, err)
		default:
			h.happened(p.name, "%s, woken by a client: %s in %s", state, said, short(took))
		}
	}
}

// short rounds a duration to two or three digits.
func short(d time.Duration) time.Duration {
	for unit := time.Microsecond; ; unit *= 10 {
		if d < 1000*unit {
			return d.Round(unit)
		}
	}
}

// rows returns the programs' states.
func (h *host) rows(ctx context.Context) (rows []row) {
	if h.Client == nil {
		return nil
	}
	all, err := h.List(ctx)
	if err != nil {
		return nil
	}
	for _, p := range h.all() {
		for _, o := range all {
			if o.Name != p.name {
				continue
			}
			r := row{name: o.Name, state: o.State, color: "32"}
			switch {
			case o.State == "paused" || o.State == "hibernated":
				r.color, r.detail = "36", fmt.Sprintf("%s for %.0fs", o.State, time.Since(*o.StateSince).Seconds())
			case o.State == "running" && o.PauseAt != nil:
				r.detail = fmt.Sprintf("running, pauses in %.0fs", max(time.Until(*o.PauseAt).Seconds(), 0))
			}
			rows = append(rows, r)
		}
	}
	return rows
}

// end stops the programs, the host and the shim, waits for them, and removes
// their control groups.
func (h *host) end() error {
	if h.daemon == nil {
		return nil
	}
	return errors.Join(finish(h.daemon), h.endShim(), h.removeGroups()) // --stop-all stops the programs
}

// endShim waits for the end of the shim, which is not a child of the demo.
func (h *host) endShim() error {
	if h.shim <= 1 {
		return nil
	}
	fd, err := unix.PidfdOpen(h.shim, 0)
	if errors.Is(err, syscall.ESRCH) {
		return nil
	}
	if err != nil {
		return errors.Join(err, syscall.Kill(h.shim, syscall.SIGTERM))
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	for limit := time.Now().Add(endLimit); time.Now().Before(limit); {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(time.Until(limit).Milliseconds()))
		if n > 0 || err != nil && !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
	return fmt.Errorf("cannot end lull-shim, process %d", h.shim)
}

// removeGroups removes the host's control groups, which are empty by now, and their
// parent directory if no other host uses it.
func (h *host) removeGroups() error {
	if h.groups == "" {
		return nil
	}
	var dirs []string
	err := filepath.WalkDir(h.groups, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, dir := range slices.Backward(dirs) {
		err = errors.Join(err, os.Remove(dir))
	}
	_ = os.Remove(filepath.Dir(h.groups)) // not empty: another host has its groups there
	return err
}

// finish asks a program to end, and kills it if it takes too long.
func finish(cmd *exec.Cmd) error {
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	kill := time.AfterFunc(endLimit, func() { _ = cmd.Process.Kill() }) // it may have ended just now
	defer kill.Stop()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("cannot end %s: %w", strings.Join(cmd.Args[:2], " "), err)
	}
	return nil
}
