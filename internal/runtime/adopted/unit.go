package adopted

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"lull/internal/core/instance"
	"lull/internal/platform/cgroup"
	"lull/internal/platform/systemd"
)

// A systemd unit is identified by its name, and each of its runs by systemd's
// invocation ID. systemd freezes, thaws, stops and starts the unit.
//
// lull follows what operators do: a run that ends or is replaced in systemd ends
// here too, and a start by others is reported. A frozen unit is thawed as soon as
// systemd has a job for it. If systemd does not answer, the unit is thawed through
// its control group, because clients wait for it.

// Limits of requests to systemd.
const (
	unitLimit  = time.Second     // time limit for reading a unit
	thawLimit  = time.Second     // time after which a unit is thawed through its control group
	unitEvery  = 5 * time.Second // interval between checks of a unit; signals cause further checks
	listenWait = time.Minute     // time limit for a started unit to listen at its former addresses
	listenPoll = 10 * time.Millisecond
	restWait   = 2 * time.Second
)

// unit is one run of a unit.
type unit struct {
	m          *systemd.Conn
	a          instance.Adopted
	name       string
	group      string // as the manager reports it
	invocation string
	sockets    []string // the .socket units that start it
	timers     []string // the .timer units that start it

	wake     atomic.Pointer[func(string)] // set while the unit is guarded
	stopping atomic.Bool                  // lull has asked systemd to stop it

	mu  sync.Mutex
	job *systemd.Job // the stop in progress
	at  time.Time    // when the next of its timers elapses; by names that timer
	by  string
}

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

// manager returns a client of the systemd manager named by a.Manager: the system's,
// or that of a user ID.
func (r *Runtime) manager(a instance.Adopted) (*systemd.Conn, error) {
	socket := systemd.SystemSocket
	if a.Manager != "" {
		if _, err := strconv.ParseUint(a.Manager, 10, 31); err != nil {
			return nil, fmt.Errorf("cannot use manager %q: want a user ID", a.Manager)
		}
		socket = systemd.UserSocket(a.Manager)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.managers == nil {
		return nil, errors.New("the host is shutting down")
	}
	if r.managers[socket] == nil {
		r.managers[socket] = systemd.New(socket)
	}
	return r.managers[socket], nil
}

// vital are units that the machine or systemd itself may need at any time. They
// cannot be adopted.
var vital = []string{"dbus.service", "dbus-broker.service", "init.scope", "polkit.service"}

// resolveUnit returns a unit as a target and a description of its program. It fails
// if lull must not manage the unit.
func (r *Runtime) resolveUnit(a instance.Adopted) (instance.Adopted, instance.Program, error) {
	var p instance.Program
	kind := filepath.Ext(a.Unit)
	switch {
	case kind == "":
		a.Unit += ".service"
	case kind != ".service":
		return a, p, fmt.Errorf("it is a %s unit, and only services can be adopted. Adopt its control group instead: lull adopt cgroup PATH", strings.TrimPrefix(kind, "."))
	}
	if strings.ContainsAny(a.Unit, "/ \t\n*?[") || len(a.Unit) > 255 {
		return a, p, errors.New("not a unit name")
	}
	if base, _, ok := strings.Cut(a.Unit, "@."); ok {
		return a, p, fmt.Errorf("it is a template. Name one of its instances, such as %s@NAME.service", base)
	}
	if a.Manager == "" && os.Getuid() != 0 {
		return a, p, errors.New("only a host that runs as root can freeze units of the machine. For a unit of yours, add --user")
	}
	m, err := r.manager(a)
	if err != nil {
		return a, p, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), unitLimit)
	defer cancel()
	u, err := m.Unit(ctx, a.Unit)
	if err != nil {
		return a, p, err
	}
	a.Unit = u.Name
	switch {
	case u.Load == "not-found":
		return a, p, errors.New("systemd has no such unit")
	case u.Load != "loaded":
		return a, p, fmt.Errorf("systemd reports that it is %s", u.Load)
	case strings.HasPrefix(a.Unit, "systemd-"), slices.Contains(vital, a.Unit), strings.HasPrefix(a.Unit, "user@"):
		return a, p, errors.New("the machine always needs it")
	}
	s, err := m.Service(ctx, a.Unit)
	if err != nil {
		return a, p, err
	}
	switch {
	case s.Type == "oneshot":
		return a, p, errors.New("it has Type=oneshot: it runs to completion, and no process remains to freeze")
	case !u.Running():
		return a, p, fmt.Errorf("it is %s. Start it first: systemctl %sstart %s", u.Active, userFlag(a), a.Unit)
	case s.Watchdog > 0:
		return a, p, fmt.Errorf("systemd's watchdog (WatchdogSec=%s) would kill it while it is frozen", s.Watchdog)
	case u.Freezer != "running":
		return a, p, fmt.Errorf("it is already %s, but not by lull", u.Freezer)
	case !u.CanFreeze:
		return a, p, errors.New("systemd cannot freeze it: that needs systemd 246 and the unified control group hierarchy")
	}
	g, err := cgroup.Lookup(s.Group)
	if err != nil {
		return a, p, err
	}
	if held, err := g.Held(); err != nil || held {
		return a, p, errors.Join(fmt.Errorf("%s is already frozen, but not by lull", g.Dir()), err)
	}
	if p.PIDs, err = g.PIDs(); err != nil {
		return a, p, err
	}
	main := s.PID
	if main == 0 {
		if main, err = r.oldest(g); err != nil || main == 0 {
			return a, p, errors.Join(errors.New("it has no process"), err)
		}
	}
	p.Command, p.Name, p.StopsIn = commandOf(main), strings.TrimSuffix(a.Unit, ".service"), s.StopsIn
	return a, p, nil
}

func userFlag(a instance.Adopted) string {
	if a.Manager != "" {
		return "--user "
	}
	return ""
}

// ofKind returns the names that end in suffix.
func ofKind(names []string, suffix string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !strings.HasSuffix(n, suffix) })
}

// attachUnit returns a Work for the current run of a unit. again is set if an
// earlier daemon may have frozen the run.
func (r *Runtime) attachUnit(ctx context.Context, id string, a instance.Adopted, run uint64, again bool) (*Work, error) {
	m, err := r.manager(a)
	if err != nil {
		return nil, err
	}
	u, err := m.Unit(ctx, a.Unit)
	if err != nil {
		return nil, err
	}
	s, err := m.Service(ctx, a.Unit)
	if err != nil {
		return nil, err
	}
	if u.Over() || s.Group == "" {
		return nil, gone(id)
	}
	g, err := cgroup.Lookup(s.Group)
	if err != nil {
		return nil, err
	}
	inode, err := inodeOf(g.Dir())
	if err != nil {
		return nil, err
	}
	r.follower(id, a).setInvocation(u.Invocation)
	if err := r.register(ctx, id, a, s.Group, false); err != nil {
		return nil, err
	}
	w := &Work{r: r, id: id, again: again, unit: &unit{m: m, a: a, name: u.Name, group: s.Group, invocation: u.Invocation,
		sockets: ofKind(u.TriggeredBy, ".socket"), timers: ofKind(u.TriggeredBy, ".timer")}}
	return r.findAs(w, instance.Identity{Run: run, Cgroup: g.Dir(), CgroupID: inode, Unit: u.Name, Manager: a.Manager, Invocation: u.Invocation})
}

// adoptUnit finds a run of a unit that an earlier daemon managed.
func (r *Runtime) adoptUnit(ctx context.Context, id string, ident instance.Identity) (instance.Workload, error) {
	a := instance.Adopted{Unit: ident.Unit, Manager: ident.Manager, DropIn: r.hasDropIn(id)}
	r.FollowUnit(id, a)
	w, err := r.attachUnit(ctx, id, a, ident.Run, true)
	if err != nil {
		return nil, err
	}
	if w.unit.invocation != ident.Invocation {
		r.lose(w)
		return nil, gone(id)
	}
	if ending, err := w.Exiting(); err == nil && !ending {
		// An earlier daemon prepared a stop and did not carry it out.
		if addrs, err := r.cfg.Process.HeldAddrs(ctx, id); err == nil && len(addrs) > 0 {
			r.cfg.Process.Open(id)
			if err := r.cfg.Process.LetGo(ctx, id); err != nil {
				r.cfg.Log.Warn("cannot close the sockets of a running unit", "unit", w.unit.name, "err", err)
			}
		}
	}
	if still, err := w.Still(); err == nil && !still {
		// After a thaw by the shim, systemd still considers the unit frozen, so it
		// must be asked to thaw it too.
		ctx, cancel := context.WithTimeout(ctx, unitLimit)
		defer cancel()
		if u, err := w.unit.m.Unit(ctx, w.unit.name); err == nil && u.Freezer == "frozen" {
			if err := w.unit.m.Thaw(ctx, w.unit.name); err != nil {
				r.cfg.Log.Warn("cannot tell systemd that a unit runs", "unit", w.unit.name, "err", err)
			}
		}
	}
	return w, nil
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

// SystemdListens implements instance.UnitFollower.
func (r *Runtime) SystemdListens(ctx context.Context, a instance.Adopted) (bool, error) {
	m, err := r.manager(a)
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, unitLimit)
	defer cancel()
	u, err := m.Unit(ctx, a.Unit)
	return err == nil && len(ofKind(u.TriggeredBy, ".socket")) > 0, err
}

// Rebooted implements instance.UnitFollower. If the unit has failed to start
// because its address was taken, it is started again.
func (r *Runtime) Rebooted(ctx context.Context, id string, a instance.Adopted, last instance.Identity) (bool, error) {
	r.follower(id, a).setInvocation(last.Invocation)
	boot, err := r.fs.BootID()
	if err != nil || boot == last.BootID || last.BootID == "" {
		return false, err
	}
	addrs, err := r.cfg.Process.HeldAddrs(ctx, id)
	if err == nil && len(addrs) > 0 {
		r.follower(id, a).blamed.Store(time.Now().UnixNano())
		err = r.cfg.Process.Unhold(ctx, id)
	}
	return true, err
}

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

// freezeUnit freezes the unit through systemd, and checks its control group.
func (w *Work) freezeUnit(ctx context.Context) error {
	if err := w.readUnit(ctx); err != nil {
		return err
	}
	if err := w.unit.m.Freeze(ctx, w.unit.name); err != nil {
		return errors.Join(err, w.thawUnit())
	}
	if still, err := w.Still(); err != nil || !still {
		return errors.Join(fmt.Errorf("systemd reports %s as frozen, but its control group is not", w.unit.name), err, w.thawUnit())
	}
	w.Froze(true)
	return nil
}

// thawUnit thaws the unit through systemd. If systemd takes too long, it thaws the
// control group itself, because a client waits.
func (w *Work) thawUnit() error {
	ctx, cancel := context.WithTimeout(context.Background(), thawLimit)
	defer cancel()
	err := w.unit.m.Thaw(ctx, w.unit.name)
	held, herr := w.Group().Held()
	if herr == nil && !held {
		w.Froze(false)
		return nil
	}
	if err != nil {
		w.r.cfg.Log.Warn("systemd has not thawed a unit in time; thawing its control group", "unit", w.unit.name, "err", err)
	}
	return w.Work.Thaw()
}

// sampleUnit adds systemd's data to a sample. The sample is unknown if the unit
// cannot be read, is changing its state, or has a watchdog.
func (w *Work) sampleUnit(s *instance.Sample) {
	ctx, cancel := context.WithTimeout(context.Background(), unitLimit)
	defer cancel()
	if err := w.readUnit(ctx); err != nil && s.ConnErr == nil {
		s.ConnErr = err
	}
}

func (w *Work) readUnit(ctx context.Context) error {
	u, err := w.unit.m.Unit(ctx, w.unit.name)
	if err != nil {
		return err
	}
	switch {
	case u.Invocation != w.unit.invocation:
		return fmt.Errorf("the unit %s was restarted", u.Name)
	case u.Active != "active":
		return fmt.Errorf("the unit %s is %s", u.Name, u.Active)
	case u.Job != 0:
		return fmt.Errorf("systemd has a job for the unit %s", u.Name)
	}
	watchdog, err := w.unit.m.Watchdog(ctx, w.unit.name)
	if err == nil && watchdog > 0 {
		err = fmt.Errorf("systemd's watchdog (%s) would kill the unit %s while it is frozen", watchdog, u.Name)
	}
	if err != nil {
		return err
	}
	return w.unit.readTimers(ctx, ofKind(u.TriggeredBy, ".timer"))
}

// refreshTimers reads the timers of a frozen unit again, and reports a change.
func (w *Work) refreshTimers() {
	ctx, cancel := context.WithTimeout(context.Background(), unitLimit)
	defer cancel()
	before, _ := w.Due()
	if err := w.unit.readTimers(ctx, w.unit.timers); err != nil {
		w.r.cfg.Log.Warn("cannot read the timers of a frozen unit", "unit", w.unit.name, "err", err)
		return
	}
	if now, _ := w.Due(); !now.Equal(before) {
		w.r.cfg.Observe(w.id, "a timer of the unit changed")
	}
}

// readTimers determines which timer starts the unit next, and when.
func (n *unit) readTimers(ctx context.Context, timers []string) error {
	var first time.Time
	by := ""
	for _, t := range timers {
		at, err := n.m.Next(ctx, t)
		if err != nil {
			return err
		}
		if !at.IsZero() && (first.IsZero() || at.Before(first)) {
			first, by = at, t
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.at, n.by = first, by
	return nil
}

// Due implements instance.Timed.
func (w *Work) Due() (at time.Time, by string) {
	if w.unit == nil {
		return time.Time{}, ""
	}
	w.unit.mu.Lock()
	defer w.unit.mu.Unlock()
	return w.unit.at, w.unit.by
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
