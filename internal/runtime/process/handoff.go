package process

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/fdstore"
	"lull/internal/platform/sockets"
	"lull/internal/protocol/shimctl"
)

// reports holds the descriptor on which the binds of one run are reported to the
// shim. The daemon never reads it. It keeps the descriptor open so that a bind
// waits, rather than fails, while the shim is replaced.
type reports struct {
	run  uint64
	file *fdstore.File
}

// handoffLimit bounds the trial of a handoff, and other short requests.
const handoffLimit = 15 * time.Second

// Handoff returns why a kept socket cannot be handed to a program at its bind on
// this machine, or nil. noPrivs reports whether programs must run with no_new_privs
// for that. The shim tries a handoff once.
func (r *Runtime) Handoff(ctx context.Context) (noPrivs bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, handoffLimit)
	defer cancel()
	c, err := r.shim().CheckHandoff(ctx)
	var said *shimctl.Error
	switch {
	case errors.As(err, &said) && said.Code == shimctl.CodeInvalid:
		return false, errors.New("the running supervisor is of an earlier version")
	case err != nil:
		return false, fmt.Errorf("cannot ask the supervisor: %w", err)
	case c.Why != "":
		return false, errors.New(c.Why)
	}
	return c.NoNewPrivs, nil
}

// startInShim makes the shim start a run. If l asks for handoffs, the run's binds
// are reported.
func (r *Runtime) startInShim(ctx context.Context, l instance.Launch, dirs []string) (shimctl.Started, error) {
	m := shimctl.StartOf(l, dirs)
	if len(l.Handoff) == 0 {
		return r.shim().Start(ctx, m)
	}
	s, fd, err := r.shim().StartHandoff(ctx, m)
	if err == nil {
		r.keepReports(l.ID, l.Run, fd)
	}
	return s, err
}

// keepReports keeps the descriptor on which the binds of a run are reported,
// replacing an earlier one. With a negative fd it keeps none.
func (r *Runtime) keepReports(id string, run uint64, fd int) {
	r.mu.Lock()
	old, had := r.reports[id]
	delete(r.reports, id)
	if fd >= 0 && r.reports != nil {
		r.reports[id] = reports{run, r.store.Put(fd)}
		fd = -1
	}
	r.mu.Unlock()
	if fd >= 0 {
		unix.Close(fd)
	}
	if had {
		old.file.Close()
	}
}

// dropReports closes the descriptor on which the binds of a finished run were
// reported.
func (r *Runtime) dropReports(id string, run uint64) {
	r.mu.Lock()
	old, had := r.reports[id]
	had = had && old.run == run
	if had {
		delete(r.reports, id)
	}
	r.mu.Unlock()
	if had {
		old.file.Close()
	}
}

// holdAgain duplicates into this daemon the sockets that the shim holds for an
// instance, and the descriptor on which the run's binds are reported. It returns an
// error if it could not get the descriptor.
func (r *Runtime) holdAgain(ctx context.Context, id string, run uint64) error {
	c := r.shim()
	if addrs, fds, err := c.Listeners(ctx, id); err == nil {
		r.setHeld(id, addrs, fds)
	}
	fd, err := c.TakeFilter(ctx, id, run)
	if err == nil {
		r.keepReports(id, run, fd)
	}
	return err
}

// CannotBind reports whether every further bind of the program fails, because the
// daemon and the shim ended together and the program's binds can no longer be
// reported.
func (w *Work) CannotBind() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mute
}

// Trouble implements instance.Troubled.
func (w *Work) Trouble() string {
	if w.CannotBind() {
		return "it cannot open further ports, because the daemon and its supervisor ended together; lull restart fixes that"
	}
	return ""
}

// giveReports passes a new shim the descriptors on which binds are reported.
func (r *Runtime) giveReports(ctx context.Context) {
	r.mu.Lock()
	all, c := maps.Clone(r.reports), r.client
	r.mu.Unlock()
	for id, k := range all {
		fd, err := k.file.Open()
		if errors.Is(err, os.ErrClosed) {
			continue // the run has ended
		}
		if err == nil {
			err = c.GiveFilter(ctx, id, k.run, fd)
			unix.Close(fd)
		}
		if err != nil {
			r.cfg.Log.Error("the new shim cannot answer the binds of an instance", "id", id, "err", err)
		}
	}
}

// untilAnswered makes an idempotent request, and repeats it while the shim is
// replaced.
func (r *Runtime) untilAnswered(ctx context.Context, ask func(*shimctl.Client) error) error {
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	for {
		err := ask(r.shim())
		var said *shimctl.Error
		if err == nil || errors.As(err, &said) {
			return err
		}
		select {
		case <-time.After(10 * time.Millisecond): // Run reconnects meanwhile
		case <-ctx.Done():
			return err
		}
	}
}

// heldChanged handles the shim's notice that the sockets it holds for an instance
// have changed.
func (r *Runtime) heldChanged(m shimctl.HeldChanged) {
	ctx, cancel := context.WithTimeout(context.Background(), dupLimit)
	defer cancel()
	c := r.shim()
	if c == nil {
		return
	}
	if addrs, fds, err := c.Listeners(ctx, m.ID); err == nil {
		r.setHeld(m.ID, addrs, fds)
	} else {
		r.setHeld(m.ID, nil, nil)
	}
	r.mu.Lock()
	tell := r.running && m.Why != "" && r.cfg.OnGivenUp != nil
	r.mu.Unlock()
	if tell {
		r.cfg.OnGivenUp(m.ID, m.Why)
	}
}

// Shut makes the kept sockets of an instance ignore new connections until Open,
// while a program that is asked to exit could still accept one. The clients'
// kernels repeat their first packet, so they wait.
//
// Unix sockets have no such mode, so the shim replaces them. UDP sockets need none,
// because datagrams wait in any case.
func (r *Runtime) Shut(id string) { r.door(id, true) }

// Open undoes Shut.
func (r *Runtime) Open(id string) { r.door(id, false) }

func (r *Runtime) door(id string, shut bool) {
	turn := sockets.Open
	if shut {
		turn = sockets.Shut
	}
	r.mu.Lock()
	local := false
	var err error
	k := r.held[id]
	for n, addr := range k.addrs {
		_, udp := shimctl.UDPAddr(addr)
		switch {
		case strings.Contains(addr, "unix:"):
			local = true
		case !udp:
			err = errors.Join(err, k.with(n, turn))
		}
	}
	r.mu.Unlock()
	if local {
		ctx, cancel := context.WithTimeout(context.Background(), handoffLimit)
		defer cancel()
		err = errors.Join(err, r.untilAnswered(ctx, func(c *shimctl.Client) error { return c.Door(ctx, id, shut) }))
		r.heldChanged(shimctl.HeldChanged{ID: id})
	}
	if err != nil {
		r.cfg.Log.Warn("cannot make clients wait", "id", id, "err", err)
	}
}

// closedFor is how long a program may be without its listening socket, for example
// while it replaces itself, before new clients are refused.
const closedFor = 5 * time.Second

// noteClosed makes the shim stop listening on kept sockets that the program has
// closed for closedFor although it continues to run. own are the sockets of the
// program.
func (w *Work) noteClosed(own map[uint64]place) {
	w.r.mu.Lock()
	var missing []string
	k := w.r.held[w.id]
	for n, inode := range k.inodes {
		if _, ok := own[inode]; ok {
			continue
		}
		_ = k.with(n, func(fd int) error { // an error does not matter, because the next sample tries again
			if on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err == nil && on != 0 {
				missing = append(missing, k.addrs[n])
			}
			return nil
		})
	}
	w.r.mu.Unlock()
	now := time.Now()
	w.mu.Lock()
	since := w.closed
	switch {
	case len(missing) == 0:
		w.closed = time.Time{}
	case since.IsZero() || now.Sub(since) >= closedFor: // after a request to the shim, wait another interval before the next
		w.closed = now
	}
	w.mu.Unlock()
	if len(missing) == 0 || since.IsZero() || now.Sub(since) < closedFor {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), dupLimit)
	defer cancel()
	released, err := w.r.shim().Release(ctx, w.id, missing) // the shim keeps a socket that the program has not bound yet
	switch {
	case err != nil:
		w.r.cfg.Log.Warn("a port that the program has closed stays open", "id", w.id, "err", err)
	case len(released) > 0:
		w.r.cfg.Log.Info("the program has closed its port and runs on; clients are refused", "id", w.id, "addrs", released)
	}
}
