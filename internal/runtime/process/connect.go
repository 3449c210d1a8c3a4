package process

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/elfcheck"
	"lull/internal/protocol/shimctl"
)

// connect connects to the shim, starting one if necessary. thawed reports whether
// the shim has thawed instances since the last acknowledgement.
func (r *Runtime) connect(ctx context.Context) (thawed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	socket := filepath.Join(r.cfg.Dir, "shim.sock")
	ev := shimctl.Events{Ended: r.ended, ExecEnded: r.execEnded, Held: r.heldChanged}
	launched := false
	c, err := shimctl.Dial(ctx, socket, ev)
	for err != nil {
		if other, ok := errors.AsType[*shimctl.VersionError](err); ok {
			return false, fmt.Errorf("%w; end the old shim with kill -TERM %d (instances run on) and try again", err, other.PID)
		}
		// Wait while another shim is ending, because a new one would refuse to
		// start.
		if !launched && !r.shimLives() {
			if err := r.launchShim(); err != nil {
				return false, err
			}
			launched = true
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return false, fmt.Errorf("cannot start the shim: it does not answer: %w; see %s", err, filepath.Join(r.cfg.Dir, "shim.log"))
		}
		c, err = shimctl.Dial(ctx, socket, ev)
	}
	for _, t := range c.Welcome.Thawed {
		r.cfg.Log.Warn("the shim thawed instances while no daemon was connected", "at", t.At, "count", t.Count, "first", t.IDs)
	}
	if len(c.Welcome.Thawed) > 0 {
		if err := c.AckThawed(ctx); err != nil {
			r.cfg.Log.Warn("cannot acknowledge", "err", err)
		}
	}
	r.mu.Lock()
	r.client = c
	r.mu.Unlock()
	r.heart.connected()
	return len(c.Welcome.Thawed) > 0, nil
}

// shimLives reports whether a shim holds the lock of the directory.
func (r *Runtime) shimLives() bool {
	f, err := os.Open(filepath.Join(r.cfg.Dir, "shim.lock"))
	if err != nil {
		return false // starting a shim will report the cause
	}
	defer f.Close()
	return errors.Is(syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB), syscall.EWOULDBLOCK)
}

// launchShim starts a shim that outlives this process.
func (r *Runtime) launchShim() error {
	path := r.cfg.Shim
	if self, err := os.Executable(); err != nil || self != path { // this program itself works here, however it is linked
		if err := elfcheck.Static(path); err != nil {
			return fmt.Errorf("cannot use lull-shim: %w; build it with: make build, or name another with --shim", err)
		}
	}
	log, err := os.OpenFile(filepath.Join(r.cfg.Dir, "shim.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("cannot open the shim's log: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(path, "--dir", r.cfg.Dir)
	cmd.Args[0] = "lull-shim" // selects the shim in a program that contains it
	cmd.Stderr, cmd.Dir = log, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("cannot start %s: %w", path, err)
	}
	// The shim outlives this process, or is reaped when another one is needed.
	r.collectShim()
	r.mu.Lock()
	r.child = cmd.Process.Pid
	r.mu.Unlock()
	return cmd.Process.Release()
}

// collectShim reaps a shim that this process started, if it has ended.
func (r *Runtime) collectShim() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.child > 0 {
		if pid, err := syscall.Wait4(r.child, nil, syscall.WNOHANG, nil); pid == r.child || err == syscall.ECHILD {
			r.child = 0
		}
	}
}

// Run watches frozen instances, and keeps a shim connected, until ctx ends.
func (r *Runtime) Run(ctx context.Context) error {
	r.mu.Lock()
	r.running = true
	unsaid := r.unsaid
	r.unsaid = nil
	r.mu.Unlock()
	for _, e := range unsaid {
		r.ended(e)
	}
	polled := make(chan error, 1)
	go func() { polled <- r.poller.Run(ctx) }()
	for {
		select {
		case err := <-polled:
			return err
		case <-r.shim().Done():
		}
		if ctx.Err() != nil {
			return <-polled
		}
		before := r.shim().Welcome
		r.cfg.Log.Error("the connection to the shim has ended", "shim", before.PID)
		r.collectShim()
		thawed, err := r.connect(ctx)
		if err != nil {
			r.cfg.Log.Error("cannot start another shim", "err", err)
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
			continue
		}
		now := r.shim().Welcome
		another := now.PID != before.PID || !now.StartedAt.Equal(before.StartedAt)
		if another {
			r.cfg.Log.Error("another shim has taken over", "shim", now.PID)
			r.mu.Lock()
			r.orphaned = true
			r.mu.Unlock()
			r.readopt(ctx)
		}
		switch {
		case thawed && !another && r.cfg.OnThawed != nil:
			r.cfg.OnThawed()
		case (another || thawed) && r.cfg.OnShimLost != nil:
			r.cfg.OnShimLost()
		}
	}
}

// readopt registers every running instance with a new shim.
func (r *Runtime) readopt(ctx context.Context) {
	r.mu.Lock()
	works := make([]*Work, 0, len(r.works))
	for _, w := range r.works {
		works = append(works, w)
	}
	c := r.client
	held := maps.Clone(r.held)
	r.mu.Unlock()
	for id, k := range held {
		if err := k.give(ctx, c, id); err != nil {
			r.cfg.Log.Error("the new shim cannot hold the sockets of an instance", "id", id, "err", err)
		}
	}
	r.giveReports(ctx)
	for _, w := range works {
		if w.ident.PID == 0 {
			continue // the start in progress handles the loss of the shim itself
		}
		if err := c.Adopt(ctx, w.asRun()); err != nil {
			r.cfg.Log.Warn("the new shim cannot take over an instance", "id", w.id, "err", err)
			if live, lerr := w.Alive(); lerr == nil && !live {
				r.ended(shimctl.Ended{ID: w.id, Run: w.ident.Run, Exit: instance.Exit{Lost: true, At: time.Now()}})
			}
		}
	}
}

// give passes the sockets to a new shim.
func (k kept) give(ctx context.Context, c *shimctl.Client, id string) error {
	var fds []int
	defer func() { shimctl.CloseAll(fds) }()
	for _, f := range k.files {
		fd, err := f.Open()
		if err != nil {
			return err
		}
		fds = append(fds, fd)
	}
	return c.Keep(ctx, id, k.addrs, fds)
}
