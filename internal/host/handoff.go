package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/listeners"
	"lull/internal/protocol/shimctl"
)

// Bind handoff: while the program of an instance on the direct path does not run,
// lull keeps its sockets. When the program binds, they replace its own. A client
// that connects meanwhile waits in the backlog, starts the program if lull had
// stopped it, and is accepted by the program itself.
//
// Sockets are kept from the first start until a user stops the instance, so that no
// connection is refused during a crash, a restart or an automatic stop.

// handoffs is implemented by a HeldListeners that can hand a kept socket to a
// program when it binds.
type handoffs interface {
	// Handoff returns an error if handoffs do not work on this machine. noPrivs
	// reports whether programs then run with no_new_privs.
	Handoff(ctx context.Context) (noPrivs bool, err error)
	Shut(id string) // makes new connections to the kept sockets wait until Open
	Open(id string)
}

// handoff caches whether handoffs work on this host.
type handoff struct {
	mu      sync.Mutex
	known   bool
	noPrivs bool
	err     error
}

// errNoHandoff means that nothing on this host keeps sockets.
var errNoHandoff = errors.New("this host cannot keep sockets for programs")

// keepLimit bounds one request to the process that keeps the sockets.
const keepLimit = 10 * time.Second

// canHandOff returns why handoffs do not work here, or nil. It checks that only
// once.
func (h *Host) canHandOff() error {
	k, ok := h.cfg.HeldListeners.(handoffs)
	if !ok {
		return errNoHandoff
	}
	h.handoff.mu.Lock()
	defer h.handoff.mu.Unlock()
	if !h.handoff.known {
		h.handoff.noPrivs, h.handoff.err = k.Handoff(h.ctx)
		h.handoff.known = true
	}
	return h.handoff.err
}

// handoffNow returns the cached result of canHandOff without checking.
func (h *Host) handoffNow() (noPrivs bool, err error) {
	if _, ok := h.cfg.HeldListeners.(handoffs); !ok {
		return false, errNoHandoff
	}
	if !h.handoff.mu.TryLock() {
		return false, nil
	}
	defer h.handoff.mu.Unlock()
	return h.handoff.noPrivs, h.handoff.err
}

// keptAddrs returns the addresses whose sockets are kept for the program, either as
// LISTEN_FDS or for its own binds.
func (i *inst) keptAddrs() (addrs []string) {
	s := i.spec()
	switch {
	case i.h.cfg.HeldListeners == nil, i.rt.Capabilities().Network:
		return nil
	case s.ListenFDs:
		for _, e := range s.Expose {
			addrs = append(addrs, shimctl.Addr(e, s.User))
		}
		return addrs
	case !i.wakes() || i.ports.noHandoff.Load() != nil:
		return nil
	}
	for _, e := range s.Expose {
		if !i.relays(e) {
			addrs = append(addrs, shimctl.Addr(e, s.User))
		}
	}
	if len(addrs) > 0 && i.h.canHandOff() != nil {
		return nil
	}
	return addrs
}

// deaf returns why connections that wake the instance from a pause do not start it
// once lull has stopped it. all reports whether that is so for all connections or
// only for some. deaf returns "" if they do start it, if a setting forbids that, or
// if lull never stops the instance. unheard means that nothing outside could wake
// the instance.
func (i *inst) deaf(unheard bool) (why string, all bool) {
	s := i.spec()
	_, holds := i.rt.(instance.PortHolder) // then lull holds the ports, or else does not stop the instance
	switch {
	case !s.Wakes(), s.ListenFDs, s.Adopted.IsUnit(), holds && i.stopAfter() > 0:
		return "", false
	case holds:
		return "", true
	case i.wakes():
		return i.deafPorts()
	case i.stopAfter() == 0:
		return "", true
	case i.rt.Capabilities().Shared:
		return "lull did not start it, and does not hold its ports", true
	case unheard:
		return "", true
	}
	return "it exposes no port, and the sockets that it opens itself close while it is stopped", true
}

// deafPorts is deaf for an instance that exposes ports.
func (i *inst) deafPorts() (string, bool) {
	s, relayed := i.spec(), false
	var direct []string
	for _, e := range s.Expose {
		if i.relays(e) {
			relayed = true
		} else {
			direct = append(direct, e.Listen)
		}
	}
	why := ""
	_, err := i.h.handoffNow()
	if given := i.ports.noHandoff.Load(); given != nil {
		err = errors.New(*given)
	}
	if len(direct) > 0 && err != nil {
		why = fmt.Sprintf("%s: %v", strings.Join(direct, ", "), err)
	}
	return why, !relayed && (len(direct) == 0 || err != nil)
}

// direct reports whether the program itself listens on an exposed address.
func (i *inst) direct() bool {
	return slices.ContainsFunc(i.spec().Expose, func(e instance.Endpoint) bool { return !i.relays(e) })
}

// keep arranges that the sockets of a launch are kept, if possible.
func (i *inst) keep(ctx context.Context, l *instance.Launch) error {
	addrs := i.keptAddrs()
	i.ports.kept.Store(false)
	if len(addrs) == 0 {
		return nil
	}
	err := i.h.cfg.HeldListeners.Hold(ctx, i.id, addrs)
	i.ports.kept.Store(err == nil)
	i.shut(false)
	switch {
	case i.spec().ListenFDs:
		l.Listen = addrs
		if err != nil {
			return fmt.Errorf("cannot hold the sockets of %s: %w", i.name(), err)
		}
	case err != nil: // another process has the address; the program's own bind will report that
		i.letGo()
		i.h.log.Warn("cannot keep connections while the program does not run", "instance", i.name(), "err", err)
	default:
		l.Handoff = addrs
	}
	return nil
}

// run starts the program under its runtime. It tries again if the supervisor was
// replaced meanwhile, and without a handoff if handoffs do not work.
func (i *inst) run(ctx context.Context, l instance.Launch) (Workload, error) {
	for again := range 3 {
		w, err := i.rt.Start(ctx, l)
		switch {
		case err == nil:
			return w, nil
		case errors.Is(err, instance.ErrNoHandoff) && len(l.Handoff) > 0:
			why := err.Error()
			i.ports.noHandoff.Store(&why)
			i.emit("handoff_failed", "", why)
			i.letGo()
			l.Handoff = nil
		case errors.Is(err, instance.ErrStartAgain) && again < 2:
			l.Run++
			if err := i.save(func(r *instance.Record) { r.Identity = &instance.Identity{Run: l.Run} }); err != nil {
				return nil, err
			}
			i.mu.Lock()
			i.proc.over = make(chan struct{})
			i.requests.ended.Store(nil)
			i.mu.Unlock()
		default:
			return nil, err
		}
	}
	return nil, instance.ErrStartAgain
}

// continueStart waits until a program that an earlier daemon started, and that
// still runs, is ready. The program may already have accepted clients, whose
// connections a second start would close. An error means that the program must be
// started again.
func (i *inst) continueStart(ctx context.Context, w Workload) error {
	if i.rt.Capabilities().Network {
		return errors.New("its relay ended with the daemon") // the relay ended with the daemon, so no client is connected
	}
	if m, ok := w.(interface{ CannotBind() bool }); ok && m.CannotBind() {
		if ls, err := w.Listeners(); err != nil || listeners.Missing(i.spec().Expose, ls) != "" {
			return errors.New("it can no longer bind its address")
		}
	}
	if err := i.ready(ctx, w); err != nil {
		return err
	}
	now := i.h.Now()
	err := i.save(func(r *instance.Record) {
		r.State, r.StoppedBy = power.Running, ""
		r.LastActivityAt, r.LastResumedAt, r.ResumedBy = now, now, byRestart
	})
	if err != nil {
		return err
	}
	i.open()
	i.scheduleAwake(now)
	i.ran(power.Stopped)
	i.emit("started", byRestart, "an earlier daemon started it")
	return nil
}

// rest prepares a stopped instance for connections: they start it, wait for a
// pending restart, or are refused because the sockets are closed. i.lock must be
// held.
func (i *inst) rest() {
	if p, ok := i.rt.(instance.PortHolder); ok {
		i.holdAtRest(p)
		return
	}
	if i.spec().Adopted.IsUnit() {
		i.restUnit()
		return
	}
	addrs := i.keptAddrs()
	if len(addrs) == 0 || i.turn.again {
		return
	}
	i.mu.Lock()
	due := i.rec.Enabled && !i.rec.RestartAt.IsZero()
	i.mu.Unlock()
	why := i.unwakeable()
	if why != "" && !due {
		i.letGo()
		return
	}
	ctx, cancel := context.WithTimeout(i.h.ctx, keepLimit)
	defer cancel()
	if err := i.h.cfg.HeldListeners.Hold(ctx, i.id, addrs); err != nil {
		i.h.log.Error("connections to a stopped instance are refused", "instance", i.name(), "err", err)
		i.emit("handoff_failed", "", err.Error())
		return
	}
	i.shut(false)
	if why != "" {
		return
	}
	g, err := i.h.cfg.HeldListeners.Watch(i.id, i.wantWake)
	if err != nil {
		i.h.log.Error("cannot watch the kept sockets", "instance", i.name(), "err", err)
		return
	}
	i.mu.Lock()
	i.proc.held = g
	i.mu.Unlock()
}

// letGo closes the kept sockets. Clients in their backlogs are disconnected, unless
// the program has the sockets too.
func (i *inst) letGo() {
	i.dropHeld()
	if p, ok := i.rt.(instance.PortHolder); ok {
		p.ReleasePorts(i.id)
	}
	if i.h.cfg.HeldListeners == nil || i.rt.Capabilities().Network || len(i.spec().Expose) == 0 && !i.spec().Adopted.IsUnit() {
		return
	}
	i.ports.kept.Store(false)
	ctx, cancel := context.WithTimeout(i.h.ctx, keepLimit)
	defer cancel()
	if err := i.h.cfg.HeldListeners.Unhold(ctx, i.id); err != nil {
		i.h.log.Warn("cannot close the kept sockets", "instance", i.name(), "err", err)
	}
}

// shut makes new connections to the kept sockets wait while on is set, so that a
// program that is asked to exit accepts none of them.
func (i *inst) shut(on bool) {
	if p, ok := i.rt.(instance.PortHolder); ok {
		if !on {
			p.ReleasePorts(i.id)
		} else if err := i.holdPorts(p, nil); err != nil && !errors.Is(err, instance.ErrNoPorts) {
			i.h.log.Warn("cannot make clients wait; they are refused meanwhile", "instance", i.name(), "err", err)
		}
		return
	}
	k, ok := i.h.cfg.HeldListeners.(handoffs)
	switch {
	case !ok:
	case on:
		k.Shut(i.id)
	default:
		k.Open(i.id)
	}
}

// GivenUp records that a kept socket could not be handed to the program, which then
// opened its own.
func (h *Host) GivenUp(id, why string) {
	h.mu.RLock()
	i := h.byID[id]
	h.mu.RUnlock()
	if i != nil {
		i.emit("handoff_failed", "", why)
	}
}

// Restart stops the program and starts it again, or starts a stopped instance.
// Connections to its ports wait meanwhile.
func (h *Host) Restart(ctx context.Context, ref, by string) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if i.spec().Adopted != nil {
		return i.notOurs("restart")
	}
	leave, err := i.enterToStop(ctx)
	if err != nil {
		return err
	}
	if err := i.endForRestart(ctx, by); err != nil || i.rationed() {
		leave()
		if err != nil {
			return err
		}
		return h.startFor(ctx, i, by, restartedByUser)
	}
	defer leave()
	i.update(func(r *instance.Record) { r.Enabled, r.CrashLooping, r.Crashes = true, false, nil })
	return i.start(ctx, by, restartedByUser)
}

const restartedByUser = "restarted by a user"

// endForRestart stops i for a restart. If this daemon ends before the restart, the
// next one completes it. i.lock must be held.
func (i *inst) endForRestart(ctx context.Context, by string) error {
	if err := i.stabilize(); err != nil {
		return err
	}
	if i.state() == power.Stopped {
		return nil
	}
	i.turn.again = true
	defer func() { i.turn.again = false }()
	return i.stop(ctx, by, restartedByUser)
}
