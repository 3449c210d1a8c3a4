package adopted

import (
	"context"
	"errors"
	"fmt"
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
