package adopted

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"lull/internal/core/instance"
	"lull/internal/platform/systemd"
)

// startUnit starts a unit, unless l.Found is set, and attaches to it.
func (r *Runtime) startUnit(ctx context.Context, l instance.Launch) (_ instance.Workload, err error) {
	a := *l.Adopted
	f := r.follower(l.ID, a)
	f.starting.Add(1)
	defer f.starting.Add(-1)
	defer func() {
		if err != nil {
			f.drop()
		}
	}()
	m, err := r.manager(a)
	if err != nil {
		return nil, err
	}
	handoff := r.takesSockets(ctx, l.ID, f)
	if !handoff {
		if _, err := r.vacate(ctx, l.ID, f); err != nil {
			return nil, err
		}
	}
	if !l.Found {
		u, err := m.Unit(ctx, a.Unit)
		if err != nil {
			return nil, err
		}
		if !u.Running() {
			if err = r.begin(ctx, m, a); err != nil && handoff {
				err = r.beginPlainly(ctx, m, l.ID, f, err)
			}
			if err != nil {
				return nil, err
			}
		}
	}
	w, err := r.attachUnit(ctx, l.ID, a, l.Run, false)
	if err != nil {
		return nil, err
	}
	if handoff {
		w.awaitTaken(ctx)
	}
	waiting, lobby, addrs := f.take()
	r.wakes.Go(func() { w.relay(waiting, lobby) })
	w.awaitListening(ctx, addrs)
	if lobby != nil {
		lobby.open()
	}
	if err := r.register(ctx, l.ID, a, w.unit.group, true); err != nil {
		return nil, err
	}
	return w, nil
}

// begin starts a unit through systemd.
func (r *Runtime) begin(ctx context.Context, m *systemd.Conn, a instance.Adopted) error {
	j, err := m.Start(ctx, a.Unit)
	if err != nil {
		return err
	}
	result, err := j.Wait(ctx)
	if err == nil && result != systemd.Done {
		err = fmt.Errorf("systemd's job to start it ended with %q; for details run: systemctl %sstatus %s", result, userFlag(a), a.Unit)
	}
	return err
}

// awaitListening waits until the run listens at all of addrs, because a service is
// often active before it listens. After it listens at one of them, the wait for the
// others is limited to restWait: its configuration may have changed.
func (w *Work) awaitListening(ctx context.Context, addrs []string) {
	ctx, cancel := context.WithTimeout(ctx, listenWait)
	defer cancel()
	var first time.Time
	for {
		ls, err := w.Listeners()
		missing := slices.DeleteFunc(slices.Clone(addrs), func(a string) bool {
			return slices.ContainsFunc(ls, func(l instance.Listener) bool { return isAt(l, a) })
		})
		if err == nil && len(missing) == 0 || w.ctx.Err() != nil || !first.IsZero() && time.Since(first) > restWait {
			return
		}
		if first.IsZero() && len(missing) < len(addrs) {
			first = time.Now()
		}
		select {
		case <-time.After(listenPoll):
		case <-ctx.Done():
			return
		}
	}
}

// stopUnit stops the unit through systemd. A frozen unit is thawed for that.
func (w *Work) stopUnit() error {
	ctx, cancel := context.WithTimeout(context.Background(), unitLimit)
	defer cancel()
	w.unit.stopping.Store(true)
	j, err := w.unit.m.Stop(ctx, w.unit.name)
	if err != nil {
		w.unit.stopping.Store(false)
		return err
	}
	w.unit.mu.Lock()
	w.unit.job = j
	w.unit.mu.Unlock()
	return nil
}

// awaitStop waits until the stop that lull requested has completed.
func (n *unit) awaitStop(ctx context.Context) error {
	n.mu.Lock()
	j := n.job
	n.mu.Unlock()
	if j == nil {
		return nil
	}
	for {
		u, err := n.m.Unit(ctx, n.name)
		if err == nil && (u.Over() || u.Invocation != n.invocation) {
			return nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("systemd has not stopped %s yet: %w", n.name, context.Cause(ctx)), err)
		}
	}
}

// Exiting implements instance.Workload.
func (w *Work) Exiting() (bool, error) {
	if w.unit == nil {
		return w.Work.Exiting()
	}
	ctx, cancel := context.WithTimeout(context.Background(), unitLimit)
	defer cancel()
	u, err := w.unit.m.Unit(ctx, w.unit.name)
	if err != nil {
		return false, err
	}
	if u.Active == "deactivating" {
		w.unit.stopping.Store(true)
		return true, nil
	}
	return false, nil
}

// KeepSockets implements instance.SocketKeeper. For a unit with .socket units
// it keeps nothing, because systemd itself listens.
func (w *Work) KeepSockets(ctx context.Context) (kept bool, err error) {
	if w.unit == nil || len(w.unit.sockets) > 0 {
		return false, nil
	}
	handoff, err := w.handedOver(ctx)
	if err != nil {
		return false, err
	}
	networks := []string{"tcp"}
	if handoff {
		networks = w.r.handsOver(w.id)
	}
	addrs, err := w.HoldOwn(ctx, networks...)
	switch {
	case err != nil:
	case len(addrs) == 0 && w.unit.a.DropIn && !handoff:
		err = fmt.Errorf("it listens on no TCP port, and has not been started with its drop-in: run systemctl %srestart %s", userFlag(w.unit.a), w.unit.name)
	case len(addrs) == 0:
		err = errors.New("it listens on no TCP port, so no connection could start it again")
	}
	return err == nil, err
}

// DropSockets implements instance.SocketKeeper.
func (w *Work) DropSockets(ctx context.Context) error { return w.r.cfg.Process.LetGo(ctx, w.id) }
