package hosttest

import (
	"context"

	"lull/internal/core/instance"
)

// kept holds the listening sockets of an instance, which are kept while its program
// does not run. A relay has sockets of its own.
type kept struct {
	backlog []*Client
	shut    chan struct{} // nil while new connections are accepted; closed when they are accepted again
	guard   *keptGuard
}

// Keeper keeps the listening sockets of simulated programs for one daemon, as the
// shim does. It implements host.HeldListeners, and hands the sockets to programs
// when they bind.
type Keeper struct{ *Daemon }

// Handoff reports that handoffs work.
func (*Keeper) Handoff(context.Context) (noPrivs bool, err error) { return false, nil }

// Hold implements host.HeldListeners.
func (k *Keeper) Hold(_ context.Context, id string, _ []string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.dead {
		return errDead
	}
	if k.kept == nil {
		k.kept = map[string]*kept{}
	}
	if k.kept[id] == nil {
		k.kept[id] = &kept{}
	}
	return nil
}

// Unhold implements host.HeldListeners.
func (k *Keeper) Unhold(_ context.Context, id string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	q := k.kept[id]
	if k.dead || q == nil {
		return nil
	}
	delete(k.kept, id)
	for _, c := range q.backlog {
		c.reset = true
	}
	q.open()
	return nil
}

// open makes waiting connections try again. k.mu must be held.
func (q *kept) open() {
	if q.shut != nil {
		close(q.shut)
		q.shut = nil
	}
}

// Shut makes new connections wait until Open.
func (k *Keeper) Shut(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if q := k.kept[id]; !k.dead && q != nil && q.shut == nil {
		q.shut = make(chan struct{})
	}
}

// Open undoes Shut.
func (k *Keeper) Open(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if q := k.kept[id]; !k.dead && q != nil {
		q.open()
	}
}

// Watch implements host.HeldListeners.
func (k *Keeper) Watch(id string, wake func(reason string)) (instance.Guard, error) {
	k.mu.Lock()
	q := k.kept[id]
	if k.dead || q == nil {
		k.mu.Unlock()
		return nil, errDead
	}
	g := &keptGuard{k: k.Kernel, q: q, wake: wake}
	q.guard = g
	waiting := len(q.backlog) > 0
	k.mu.Unlock()
	if waiting { // like a real poll set, it also reports earlier arrivals
		g.fire()
	}
	return g, nil
}

// keptGuard implements instance.Guard.
type keptGuard struct {
	k      *Kernel
	q      *kept
	wake   func(string)
	closed bool
}

func (g *keptGuard) fire() {
	g.k.point("poller")
	g.k.mu.Lock()
	closed := g.closed
	g.k.mu.Unlock()
	if !closed {
		g.wake("a client came")
	}
}

// Pending implements instance.Guard.
func (g *keptGuard) Pending() string {
	g.k.mu.Lock()
	defer g.k.mu.Unlock()
	if !g.closed && len(g.q.backlog) > 0 {
		return "a client waits in the backlog"
	}
	return ""
}

// Close implements instance.Guard.
func (g *keptGuard) Close() {
	g.k.mu.Lock()
	defer g.k.mu.Unlock()
	g.close()
}

// close is Close for callers that hold k.mu.
func (g *keptGuard) close() {
	g.closed = true
	if g.q.guard == g {
		g.q.guard = nil
	}
}
