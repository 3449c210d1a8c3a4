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

// reports is the descriptor that reports the binds of one run. The daemon never
// reads it. It keeps it open so that a bind waits, rather than fails, while the
// shim is replaced.
type reports struct {
	run  uint64
	file *fdstore.File
}

// handoffLimit bounds the trial of a handoff, and other short requests.
const handoffLimit = 15 * time.Second

// Handoff returns why a kept socket cannot be given to a program at its bind
// here; nil if it can. noPrivs reports whether programs then run with
// no_new_privs. The shim tries it once.
func (r *Runtime) Handoff(ctx context.Context) (noPrivs bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, handoffLimit)
	defer cancel()
	c, err := r.shim().CheckHandoff(ctx)
	var said *shimctl.Error
	switch {
	case errors.As(err, &said) && said.Code == shimctl.CodeInvalid:
		return false, errors.New("the supervisor that runs is of an earlier version")
	case err != nil:
		return false, fmt.Errorf("cannot ask the supervisor: %w", err)
	case c.Why != "":
		return false, errors.New(c.Why)
	}
	return c.NoNewPrivs, nil
}

// startInShim starts a run. Its binds are reported if l asks for that.
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

// keepReports keeps the descriptor that reports the binds of a run, replacing
// an earlier one. A negative fd keeps nothing.
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

// dropReports closes the descriptor that reports the binds of a finished run.
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

// holdAgain makes this daemon hold the sockets of an instance in addition to
// the shim, and the descriptor that reports the binds of its run. An error
// means that it does not hold the descriptor.
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

// CannotBind reports whether every further bind of the program fails, because
// daemon and supervisor ended together and its binds can no longer be reported.
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

// giveReports passes the descriptors that report binds to a new shim.
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

// untilAnswered repeats an idempotent request while the shim is replaced.
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
		case <-time.After(10 * time.Millisecond): // Run creates a new connection
		case <-ctx.Done():
			return err
		}
	}
}

// heldChanged handles the shim's notice that it now holds another socket.
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

// Shut makes the kept sockets of an instance ignore new connections until Open:
// clients repeat their first packet and wait. It is used while a program that
// is asked to exit could still accept a connection.
//
// A unix socket cannot do that; the shim puts another one in its place.
// Datagrams wait in any case.
func (r *Runtime) Shut(id string) { r.door(id, true) }

// Open ends Shut.
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
		r.cfg.Log.Warn("clients are not made to wait", "id", id, "err", err)
	}
}

// closedFor is how long a program may be without its listening socket, as while
// it replaces itself, before new clients are refused.
const closedFor = 5 * time.Second

// noteClosed has the shim stop listening on kept sockets that the program has
// closed although it runs on. own are the sockets of the program.
func (w *Work) noteClosed(own map[uint64]place) {
	w.r.mu.Lock()
	var missing []string
	k := w.r.held[w.id]
	for n, inode := range k.inodes {
		if _, ok := own[inode]; ok {
			continue
		}
		_ = k.with(n, func(fd int) error { // the next sample tries again
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
	case since.IsZero() || now.Sub(since) >= closedFor: // the next request is due only after another interval
		w.closed = now
	}
	w.mu.Unlock()
	if len(missing) == 0 || since.IsZero() || now.Sub(since) < closedFor {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), dupLimit)
	defer cancel()
	released, err := w.r.shim().Release(ctx, w.id, missing) // a socket that has not been bound yet is kept
	switch {
	case err != nil:
		w.r.cfg.Log.Warn("a port that the program has closed stays open", "id", w.id, "err", err)
	case len(released) > 0:
		w.r.cfg.Log.Info("the program has closed its port and runs on; clients are refused", "id", w.id, "addrs", released)
	}
}
