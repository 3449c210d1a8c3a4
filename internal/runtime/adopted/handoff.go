package adopted

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"lull/internal/core/instance"
	"lull/internal/platform/systemd"
	"lull/internal/protocol/shimctl"
)

// A unit whose program runs under the filter of bind handoff is stopped with all its
// sockets held. Its next run gets these sockets when it binds, so nothing is relayed.
// Whether a run is under the filter is known from the shim, which the program itself
// has told: what its settings allow is seen only then. Any other run is stopped and
// started by way of the relay.

func (f *follower) setInvocation(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.invocation = id
}

// hasDropIn reports whether a drop-in was written for an instance.
func (r *Runtime) hasDropIn(id string) bool {
	_, err := os.Stat(r.noteFile(id))
	return err == nil
}

// register tells the shim which processes are those of a unit with a drop-in. listens
// is set if the unit listens already.
func (r *Runtime) register(ctx context.Context, id string, a instance.Adopted, group string, listens bool) error {
	if !a.DropIn {
		return nil
	}
	u := shimctl.Unit{ID: id, Group: group}
	if w := r.work(id); listens && w != nil {
		ls, err := w.Listeners()
		if err != nil {
			return err
		}
		for _, l := range ls {
			u.Unlinks = u.Unlinks || l.Network == instance.ProtoUnix
		}
	}
	_, err := r.cfg.Process.Unit(ctx, u)
	return err
}

// handedOver reports whether the run is under the filter.
func (w *Work) handedOver(ctx context.Context) (bool, error) {
	if !w.unit.a.DropIn || w.unit.invocation == "" {
		return false, nil
	}
	if err := w.r.register(ctx, w.id, w.unit.a, w.unit.group, true); err != nil {
		return false, err
	}
	s, err := w.r.cfg.Process.Unit(ctx, shimctl.Unit{ID: w.id})
	return err == nil && s.Invocation == w.unit.invocation, err
}

// takesSockets reports whether the unit of an instance is handed the sockets that are
// held for it: it was stopped with them, and is started with its drop-in; or its
// present run was started so. What is unknown does not count.
func (r *Runtime) takesSockets(ctx context.Context, id string, f *follower) bool {
	if !f.a.DropIn {
		return false
	}
	s, err := r.cfg.Process.Unit(ctx, shimctl.Unit{ID: id})
	if err != nil || s.Invocation == "" {
		return false
	}
	m, err := r.manager(f.a)
	if err != nil {
		return false
	}
	u, err := m.Unit(ctx, f.a.Unit)
	if err != nil {
		return false
	}
	f.mu.Lock()
	last := f.invocation
	f.mu.Unlock()
	return s.Invocation == u.Invocation && !u.Over() || s.Invocation == last && effective(f.a, &u)
}

// handsOver returns the networks whose sockets are handed to the unit of an instance.
func (r *Runtime) handsOver(id string) []string {
	if n, err := r.readNote(id); err != nil || n.NoUnix {
		return []string{"tcp", "udp"}
	}
	return []string{"tcp", "udp", instance.ProtoUnix}
}

// beginPlainly starts a unit that did not start while its sockets were held, without
// them. It returns the first error if that fails too.
func (r *Runtime) beginPlainly(ctx context.Context, m *systemd.Conn, id string, f *follower, cause error) error {
	n, err := r.vacate(ctx, id, f)
	if err != nil || n == 0 {
		return cause
	}
	r.cfg.Log.Warn("a unit did not start with the sockets that were held for it; it is started without", "unit", f.a.Unit, "err", cause)
	if err := r.begin(ctx, m, f.a); err != nil {
		return cause
	}
	if n, err := r.readNote(id); err == nil && !n.NoUnix { // the likely cause
		n.NoUnix = true
		if err := r.writeNote(n); err != nil {
			r.cfg.Log.Warn("cannot store the note of a unit, whose next start may fail once more", "unit", f.a.Unit, "err", err)
		}
	}
	return nil
}

// GivenUp is called when the program of a unit cannot be put under the filter, although
// its sockets are held for it.
func (r *Runtime) GivenUp(id string) {
	r.mu.Lock()
	f := r.followers[id]
	r.mu.Unlock()
	if f == nil {
		return
	}
	r.wakes.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), shimLimit)
		defer cancel()
		if _, err := r.vacate(ctx, id, f); err != nil {
			r.cfg.Log.Error("cannot release the addresses of a unit", "unit", f.a.Unit, "err", err)
		}
	})
}

// awaitTaken waits until the run listens on the sockets that were held for it, and then
// lets go of them. Those that it does not take are closed.
func (w *Work) awaitTaken(ctx context.Context) {
	addrs, err := w.r.cfg.Process.HeldAddrs(ctx, w.id)
	if err == nil {
		w.awaitListening(ctx, addrs)
		err = w.r.cfg.Process.LetGo(ctx, w.id)
	}
	if err != nil {
		w.r.cfg.Log.Warn("sockets of a unit stay open", "unit", w.unit.name, "err", err)
	}
	w.r.follower(w.id, w.unit.a).blamed.Store(0)
}

// isAt reports whether a listener has the address of a held socket.
func isAt(l instance.Listener, held string) bool {
	if _, path, ok := shimctl.UnixAddr(strings.TrimPrefix(held, "spare:")); ok {
		return l.Network == instance.ProtoUnix && filepath.Base(l.Addr) == filepath.Base(path)
	}
	if at, ok := shimctl.UDPAddr(held); ok {
		return l.Network == "udp" && l.Addr == at
	}
	return l.Network == "tcp" && l.Addr == held
}
