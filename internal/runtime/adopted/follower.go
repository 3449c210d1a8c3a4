package adopted

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/core/instance"
	"lull/internal/platform/systemd"
)

// follower watches the unit of an instance, whether or not it runs.
type follower struct {
	a        instance.Adopted
	stop     func()
	starting atomic.Int32 // number of starts by lull in progress
	telling  atomic.Bool  // Started is being called
	blamed   atomic.Int64 // when others started it while lull held its sockets, in Unix nanoseconds; 0 for never

	mu         sync.Mutex
	invocation string     // its last known run
	conns      []net.Conn // clients accepted from the kept sockets, until the unit listens
	lobby      *lobby     // accepts clients while the unit starts; nil if they are refused meanwhile
	addrs      []string   // TCP addresses at which it listened before it was stopped
}

// lose drops a work that is not its instance's current one.
func (r *Runtime) lose(w *Work) {
	r.mu.Lock()
	if r.works[w.id] == w {
		delete(r.works, w.id)
	}
	r.mu.Unlock()
	w.stop()
}

// FollowUnit implements instance.UnitFollower.
func (r *Runtime) FollowUnit(id string, a instance.Adopted) { r.follower(id, a) }

// follower returns the follower of an instance, creating it if necessary.
func (r *Runtime) follower(id string, a instance.Adopted) *follower {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := r.followers[id]
	if f == nil {
		ctx, cancel := context.WithCancel(context.Background())
		f = &follower{a: a, stop: cancel}
		r.followers[id] = f
		r.wakes.Go(func() { r.follow(ctx, id, f) })
	}
	return f
}

func (r *Runtime) work(id string) *Work {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.works[id]
}

// follow calls compare whenever the state of a unit may have changed, until ctx
// ends.
func (r *Runtime) follow(ctx context.Context, id string, f *follower) {
	m, err := r.manager(f.a)
	if err != nil {
		return // the host is shutting down
	}
	watch := m.Watch(f.a.Unit, func() { r.queued(ctx, id, f) })
	defer watch.Close()
	defer f.drop()
	tick := time.NewTicker(unitEvery)
	defer tick.Stop()
	for {
		actx, cancel := context.WithTimeout(ctx, unitLimit)
		u, err := m.Unit(actx, f.a.Unit)
		cancel()
		if err == nil {
			r.compare(id, f, &u)
			r.renewDropIn(id, f.a)
		}
		select {
		case <-watch.C:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// compare applies the state of a unit in systemd to its instance.
func (r *Runtime) compare(id string, f *follower, u *systemd.Unit) {
	w := r.work(id)
	if w != nil && (u.Over() || u.Invocation != w.unit.invocation) {
		r.lose(w)
		why := "the unit is " + u.Active
		if !u.Over() {
			why = "the unit was restarted"
		}
		r.cfg.OnExit(id, w.ident.Run, instance.Exit{Lost: true, Unit: true, At: time.Now(), Why: why})
		w = nil
	}
	switch {
	case w != nil && u.Job != 0:
		w.heedJob()
	case w != nil && w.mine() && len(w.unit.timers) > 0:
		w.refreshTimers()
	case w == nil && f.starting.Load() == 0 && u.Running():
		if f.telling.CompareAndSwap(false, true) {
			r.wakes.Go(func() {
				defer f.telling.Store(false)
				r.cfg.Started(id, "the unit was started outside lull")
			})
		}
	case w == nil && u.Over() && u.Job == 0 && f.starting.Load() == 0:
		f.drop() // the start by others has failed
		if u.Active == "failed" {
			f.excuse(r, id)
		}
	}
}

// excuseFor limits for how long a failed start by others counts as caused by lull,
// because lull held the unit's sockets when the start began.
const excuseFor = 10 * time.Second

// excuse starts a unit again if a start by others has failed because lull held its
// sockets.
func (f *follower) excuse(r *Runtime, id string) {
	at := f.blamed.Swap(0)
	if at == 0 || time.Since(time.Unix(0, at)) > excuseFor {
		return
	}
	m, err := r.manager(f.a)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), unitLimit)
	defer cancel()
	r.cfg.Log.Warn("a unit failed to start while lull held its sockets; it is started again", "unit", f.a.Unit)
	if _, err := r.vacate(ctx, id, f); err != nil {
		r.cfg.Log.Error("cannot release the addresses of a unit", "unit", f.a.Unit, "err", err)
	}
	if _, err := m.Start(ctx, f.a.Unit); err != nil {
		r.cfg.Log.Error("cannot start a unit again", "unit", f.a.Unit, "err", err)
	}
}

// heedJob wakes a frozen unit that systemd has been asked to start, stop,
// restart or reload.
func (w *Work) heedJob() {
	if wake := w.unit.wake.Load(); wake != nil && w.mine() && !w.unit.stopping.Load() {
		w.r.wakes.Go(func() { (*wake)("systemd has a job for the unit") })
	}
}

// queued is called when systemd has queued a job for the unit. It wakes a frozen
// unit, and closes the kept sockets of a stopped one so that the unit can bind its
// addresses.
func (r *Runtime) queued(ctx context.Context, id string, f *follower) {
	if w := r.work(id); w != nil {
		w.heedJob()
		return
	}
	if f.starting.Load() > 0 || ctx.Err() != nil {
		return
	}
	r.wakes.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, shimLimit)
		defer cancel()
		f.blamed.Store(time.Now().UnixNano())
		if r.takesSockets(ctx, id, f) {
			return // the unit is handed them
		}
		if n, err := r.vacate(ctx, id, f); err != nil {
			r.cfg.Log.Error("cannot release the addresses of a unit that others start", "unit", f.a.Unit, "err", err)
		} else if n == 0 {
			f.blamed.Store(0)
		}
	})
}

// vacate closes the kept sockets of a stopped unit. It accepts the clients that
// waited there, and steers new ones to a lobby, until take. It returns the number
// of sockets.
func (r *Runtime) vacate(ctx context.Context, id string, f *follower) (sockets int, err error) {
	f.mu.Lock() // only one start may do this
	defer f.mu.Unlock()
	addrs, err := r.cfg.Process.HeldAddrs(ctx, id)
	if err != nil || len(addrs) == 0 {
		return 0, err
	}
	tcp := slices.DeleteFunc(slices.Clone(addrs), func(a string) bool { return strings.Contains(a, "unix:") || strings.HasPrefix(a, "udp:") })
	if f.lobby, err = openLobby(tcp); err != nil {
		r.cfg.Log.Info("clients that come while a unit starts are refused", "unit", f.a.Unit, "reason", err)
	}
	r.cfg.Unwatch(id)
	f.addrs = tcp
	conns, err := r.cfg.Process.TakeHeld(ctx, id)
	f.conns = append(f.conns, conns...)
	return len(addrs), err
}

// drop disconnects the clients that wait for the unit, and those that come later.
func (f *follower) drop() {
	conns, l, _ := f.take()
	for _, c := range conns {
		c.Close()
	}
	if l != nil {
		l.close()
	}
}

// take returns what vacate has kept, and clears it.
func (f *follower) take() (conns []net.Conn, l *lobby, addrs []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	conns, l, addrs = f.conns, f.lobby, f.addrs
	f.conns, f.lobby, f.addrs = nil, nil, nil
	return conns, l, addrs
}
