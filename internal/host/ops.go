package host

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/listeners"
)

// MaxInstances is the maximum number of instances of one host.
const MaxInstances = 100_000

// Create creates a stopped instance. The spec must be valid, and its name must
// be free.
func (h *Host) Create(ctx context.Context, s instance.Spec) (id string, err error) {
	rt, err := h.checkNew(&s)
	if err != nil {
		return "", err
	}
	rec := instance.Record{ID: newID(), Spec: s, State: power.Stopped, Enabled: true, CreatedAt: h.Now(),
		StateSince: h.Now(), Endpoints: s.Expose, Generation: 1, StatusReason: "created"}
	i := newInst(h, rec, rt)
	if err := h.add(i); err != nil {
		return "", err
	}
	defer i.release()
	if err = i.openRelay(); err == nil {
		err = h.saver.Write(i, &rec)
	}
	if err != nil {
		h.drop(i)
		return "", fmt.Errorf("cannot create %s: %w", s.Name, err)
	}
	i.rest()
	i.emit("created", "", "")
	return i.id, nil
}

// checkNew returns the runtime for a requested spec, or what is wrong with the
// spec. It does not check whether the name is free.
func (h *Host) checkNew(s *instance.Spec) (Runtime, error) {
	if err := s.CheckNew(); err != nil {
		return nil, &InvalidError{err}
	}
	rt, err := h.checkSpec(s)
	if err == nil && !rt.Capabilities().Network {
		if cerr := listeners.CheckAddresses(s.Expose); cerr != nil {
			err = &InvalidError{cerr}
		}
	}
	if err == nil {
		err = errors.Join(h.checkDependencies(s), h.checkProbes(s, rt))
	}
	return rt, err
}

// checkSpec returns the runtime for s, or every reason why that runtime cannot run
// s.
func (h *Host) checkSpec(s *instance.Spec) (Runtime, error) {
	s.Runtime = cmp.Or(s.Runtime, "process")
	rt, ok := h.cfg.Runtimes[s.Runtime]
	if !ok || h.missing(s.Runtime) != nil {
		return nil, &InvalidError{fmt.Errorf("cannot use runtime: %w", h.noRuntime(s.Runtime))}
	}
	if err := h.checkWith(s, rt); err != nil {
		return nil, err
	}
	return rt, checkOn(s, rt)
}

// checkOn makes a runtime check a user's request: whether the image exists, and
// everything that is specific to the runtime.
func checkOn(s *instance.Spec, rt Runtime) error {
	if c, ok := rt.(instance.SpecChecker); ok {
		if err := c.CheckSpec(s); err != nil {
			return &InvalidError{err}
		}
	}
	return nil
}

// checkWith checks s against the capabilities of its runtime, and its timers
// against the settings of this host.
func (h *Host) checkWith(s *instance.Spec, rt Runtime) error {
	if err := s.Validate(); err != nil {
		return &InvalidError{err}
	}
	if err := s.CheckFor(rt.Capabilities()); err != nil {
		return &InvalidError{err}
	}
	if s.StopAfter == nil {
		if err := s.CheckLadder(h.cfg.StopAfter); err != nil {
			return &InvalidError{fmt.Errorf("%w (stop_after is the host's default)", err)}
		}
	}
	return nil
}

// add adds a new instance to the host's maps. The instance's lock must be held.
func (h *Host) add(i *inst) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.nameIsFreeLocked(i.name(), "create"); err != nil {
		return err
	}
	if len(h.byID) >= MaxInstances {
		return &RefusedError{Name: i.name(), What: "create", Reason: fmt.Sprintf("the host already has %d instances, which is the limit", MaxInstances)}
	}
	i.lock <- struct{}{}
	h.byID[i.id], h.byName[i.name()] = i, i
	h.related.add(i)
	return nil
}

// nameIsFree returns an error if another instance has the name. what names the
// operation in the error.
func (h *Host) nameIsFree(name, what string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.nameIsFreeLocked(name, what)
}

func (h *Host) nameIsFreeLocked(name, what string) error {
	if h.byName[name] == nil && h.absent[name] == nil {
		return nil
	}
	return &RefusedError{Name: name, What: what, Reason: "there is an instance of that name already"}
}

// noRuntime returns why a runtime is missing on this host.
func (h *Host) noRuntime(name string) error {
	if err := h.missing(name); err != nil {
		return fmt.Errorf("%s is not available here: %w; lull doctor says what to do", name, err)
	}
	return fmt.Errorf("there is no runtime %q on this host", name)
}

// openRelay opens the relay's ports for i. They stay open as long as the instance
// exists.
func (i *inst) openRelay() error {
	eps := i.relayed()
	if len(eps) == 0 && (!i.h.cfg.SharedHTTP || len(i.spec().Expose) == 0) {
		return nil
	}
	if i.h.cfg.NewGate == nil {
		return errors.New("this host has no relay")
	}
	g, err := i.h.cfg.NewGate(RelayTarget{ID: i.id, Name: i.name(), Endpoints: eps, Noise: i.spec().Noise, Waker: i})
	if err != nil {
		return err
	}
	g.Hold()
	g.Sleep()
	i.mu.Lock()
	i.gate = g
	i.mu.Unlock()
	return nil
}

// drop removes i from the host's maps and closes its resources.
func (h *Host) drop(i *inst) {
	h.mu.Lock()
	delete(h.byID, i.id)
	delete(h.byName, i.name())
	h.mu.Unlock()
	h.related.drop(i)
	i.requests.deleted.Store(true) // for callers that are waiting for its lock
	h.callOff(i, "it was removed in the meantime")
	h.due.Remove(i.due)
	h.saver.Forget(i.id)
	i.closeRelay()
	i.dropHeld()
}

// closeRelay closes the relay's ports, if there are any. i.lock must be held,
// unless nothing else has a reference to i.
func (i *inst) closeRelay() {
	i.mu.Lock()
	c, ok := i.gate.(interface{ Close() error })
	i.gate = nil
	i.mu.Unlock()
	if !ok {
		return
	}
	if err := c.Close(); err != nil {
		i.h.log.Warn("cannot close the relay", "instance", i.name(), "err", err)
	}
}

func newID() string {
	var b [8]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// InvalidError holds what is wrong with a request.
type InvalidError struct{ Err error }

func (e *InvalidError) Error() string { return e.Err.Error() }
func (e *InvalidError) Unwrap() error { return e.Err }

type requesterKey struct{}

// For returns a context whose requests are attributed to who, such as "ada via
// server". Their events and status reasons then name who instead of "a user".
func For(ctx context.Context, who string) context.Context {
	return context.WithValue(ctx, requesterKey{}, who)
}

func requester(ctx context.Context) string {
	who, _ := ctx.Value(requesterKey{}).(string)
	return cmp.Or(who, "a user")
}

// Start starts a stopped instance or resumes a paused one, and enables it.
func (h *Host) Start(ctx context.Context, ref, by string) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	return h.startFor(ctx, i, by, "started by "+requester(ctx))
}

// Stop stops an instance. Earlier pending requests are dropped, and the stop always
// succeeds eventually. If disable is set, the instance is not woken anymore.
func (h *Host) Stop(ctx context.Context, ref, by string, disable bool) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if i.foreign() {
		return i.notOurs("stop")
	}
	h.callOff(i, "it was stopped by a user in the meantime")
	if cancel := i.requests.interrupt.Load(); cancel != nil {
		(*cancel)(errors.New("it is being stopped"))
	}
	leave, err := i.enterToStop(ctx)
	if err != nil {
		return err
	}
	defer leave()
	unknown := i.takenOver()
	if i.workload() != nil {
		unknown = nil // a run that was not found can still be ended
	}
	i.mu.Lock()
	i.retry.restart = time.Time{}
	pending := !i.rec.RestartAt.IsZero()
	i.mu.Unlock()
	i.requests.wanted.Store(nil)
	stopped := i.state() == power.Stopped
	if disable || pending || stopped {
		i.note(func(r *instance.Record) {
			r.Enabled, r.RestartAt = r.Enabled && !disable, time.Time{}
			if stopped { // the stop of a user stays recorded
				r.StoppedBy = ByManual
			}
			if pending {
				r.Leases = nil
			}
		})
	}
	if stopped {
		i.letGo()
	}
	if unknown != nil { // a run that was not found may still exist
		return i.endUnknown(ctx, by, unknown)
	}
	return i.stop(ctx, by, "stopped by "+requester(ctx))
}

// Pause pauses a running instance now. Unless force is set, it fails if a
// connection or a lease keeps the instance awake.
func (h *Host) Pause(ctx context.Context, ref, by string, force bool) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	i.serve()
	if err := i.stabilize(); err != nil {
		return err
	}
	switch s := i.state(); s {
	case power.Paused, power.Reclaimed, power.Hibernated:
		return nil
	case power.Running:
	default:
		return &RefusedError{Name: i.name(), What: "pause", Reason: fmt.Sprintf("it is %s", s)}
	}
	// A freeze could include a command that is just starting. Docker could then not
	// end the command.
	i.mu.Lock()
	beside := i.besideLocked()
	i.mu.Unlock()
	if beside != "" && !force {
		return &RefusedError{Name: i.name(), What: "pause", Reason: beside,
			Blocks: []idle.Block{{Code: idle.RecentActivity, Signal: besideSignal, Sentence: beside}}}
	}
	var stirred *errStirred
	err = i.pause(ctx, by, "paused by "+requester(ctx), force)
	if errors.As(err, &stirred) {
		i.mu.Lock()
		blocks := i.seen.verdict.Blocks
		i.mu.Unlock()
		return &RefusedError{Name: i.name(), What: "pause", Reason: stirred.what, Blocks: blocks}
	}
	return err
}

// Resume wakes a paused instance. When it returns, the change is durable.
func (h *Host) Resume(ctx context.Context, ref, by string) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if s := i.state(); s == power.Stopped && i.rationed() { // if it runs, it needs no admission
		return &RefusedError{Name: i.name(), What: "resume", Reason: "it is stopped"}
	}
	defer i.ask()()
	h.wakeDependencies(ctx, i)
	leave, err := h.enter(ctx, i, call{what: "resume", by: by, client: true, may: i.notStopped("resume")})
	if err != nil {
		return err
	}
	defer leave()
	if err := i.stabilize(); err != nil {
		return err
	}
	switch s := i.state(); s {
	case power.Running:
		return nil
	case power.Paused, power.Reclaimed, power.Hibernated:
		if err := i.wake(by, "resumed by "+requester(ctx)); err != nil {
			return err
		}
		i.note(func(*instance.Record) {})
		return nil
	default:
		return &RefusedError{Name: i.name(), What: "resume", Reason: fmt.Sprintf("it is %s", s)}
	}
}

// Delete stops and removes an instance. An instance that lull did not start is
// released instead.
func (h *Host) Delete(ctx context.Context, ref, by string) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if i.spec().Adopted != nil {
		return h.ReleaseProgram(ctx, ref, by)
	}
	h.callOff(i, "it was removed by a user in the meantime")
	if err := h.Stop(ctx, ref, by, true); err != nil {
		return err
	}
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	if s := i.state(); s != power.Stopped {
		return &RefusedError{Name: i.name(), What: "remove", Reason: fmt.Sprintf("it is %s again", s)}
	}
	return i.remove(ctx, by, "")
}

// Snooze keeps an instance from being paused until t. The zero time ends a snooze.
func (h *Host) Snooze(ctx context.Context, ref string, t time.Time) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if d := t.Sub(h.Now()); !t.IsZero() && (d <= 0 || d > instance.MaxDeadline) {
		return &InvalidError{fmt.Errorf("cannot snooze until %s: want a time in the future, at most %s from now", t.Format(time.RFC3339), instance.MaxDeadline)}
	}
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	err = i.save(func(r *instance.Record) { r.SnoozedUntil = t })
	switch {
	case err != nil:
	case t.IsZero():
		i.emit("snooze_ended", ByManual, "by "+requester(ctx))
	default:
		i.emit("snoozed", ByManual, "until "+t.UTC().Format(time.RFC3339)+" by "+requester(ctx))
	}
	if i.state().Asleep() {
		i.scheduleAsleep(h.Now()) // the next step may now be earlier
	}
	return err
}

// Hold takes or renews a holder's lease for ttl. When it returns, the lease is
// durable. A lease on a paused instance does not wake it. On a stopped instance,
// Hold fails.
func (h *Host) Hold(ctx context.Context, ref string, l idle.Lease, ttl time.Duration) error {
	if ttl <= 0 || ttl > instance.MaxLease {
		return &InvalidError{fmt.Errorf("cannot hold a lease: ttl %s is out of range: want more than 0 and at most %s", ttl, instance.MaxLease)}
	}
	l.Holder = cmp.Or(l.Holder, "default")
	if len(l.Holder) > 128 || len(l.Reason) > 1024 {
		return &InvalidError{errors.New("cannot hold a lease: holder may have at most 128 bytes, reason at most 1024")}
	}
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	i.serve()
	switch s := i.state(); s {
	case power.Stopped, power.Stopping:
		return &RefusedError{Name: i.name(), What: "hold", Reason: fmt.Sprintf("it is %s", s)}
	}
	now := h.Now()
	l.ExpiresAt = now.Add(ttl).Round(0)
	full := false
	err = i.save(func(r *instance.Record) {
		kept := make([]idle.Lease, 0, len(r.Leases)+1)
		for _, o := range r.Leases {
			if o.Holder != l.Holder && o.ExpiresAt.After(now) {
				kept = append(kept, o)
			}
		}
		if full = len(kept) >= instance.MaxHolders; !full {
			kept = append(kept, l)
		}
		r.Leases = kept
	})
	if err == nil && full {
		return &RefusedError{Name: i.name(), What: "hold", Reason: fmt.Sprintf("the limit of %d leases is reached", instance.MaxHolders)}
	}
	if err == nil {
		i.emit("lease_held", l.Holder, l.Reason)
		if s := i.state(); s != power.Running {
			i.scheduleAsleep(now)
		}
	}
	return err
}

// ReleaseLease ends one holder's lease.
func (h *Host) ReleaseLease(ctx context.Context, ref, holder string) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	holder = cmp.Or(holder, "default")
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	found := false
	now := h.Now()
	err = i.save(func(r *instance.Record) {
		kept := make([]idle.Lease, 0, len(r.Leases))
		for _, o := range r.Leases {
			if o.Holder == holder {
				found = found || o.ExpiresAt.After(now)
			} else {
				kept = append(kept, o)
			}
		}
		r.Leases = kept
	})
	if err == nil && !found {
		return &NotFoundError{Name: i.name(), Holder: holder}
	}
	if err == nil {
		i.emit("lease_released", holder, "")
		if i.state().Asleep() {
			i.scheduleAsleep(now) // the lease may have delayed the next step
		}
	}
	return err
}

// StopAll stops every instance that lull started, several concurrently.
func (h *Host) StopAll(ctx context.Context) {
	slots := make(chan struct{}, 16)
	var wg sync.WaitGroup
	for _, i := range h.all() {
		if i.spec().Adopted != nil {
			continue // the program continues to run, as without lull
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := h.Stop(ctx, i.id, ByManual, false); err != nil {
				h.log.Error("cannot stop", "instance", i.name(), "err", err)
			}
		})
	}
	wg.Wait()
}

// WakeAll thaws every paused instance. It is called when the watch on their sockets
// has failed.
func (h *Host) WakeAll(by, why string) {
	for _, i := range h.all() {
		// If a pause is in progress, it is canceled, or the instance is woken
		// afterwards.
		if s := i.state(); s.Asleep() && s != power.Hibernated || s == power.Pausing {
			i.wantWake(why)
		}
	}
	h.log.Warn("woke everything", "by", by, "reason", why)
}
