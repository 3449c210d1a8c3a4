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

// checkNew returns the runtime of a requested spec, and what is wrong with the
// request apart from its name being taken.
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

// checkSpec returns the runtime of s, and every reason why that runtime cannot
// run s.
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

// checkOn has a runtime validate a user's request: whether the image exists,
// and everything specific to it.
func checkOn(s *instance.Spec, rt Runtime) error {
	if c, ok := rt.(instance.SpecChecker); ok {
		if err := c.CheckSpec(s); err != nil {
			return &InvalidError{err}
		}
	}
	return nil
}

// checkWith validates s against the capabilities of its runtime, and its timers
// against this host.
func (h *Host) checkWith(s *instance.Spec, rt Runtime) error {
	if err := s.Validate(); err != nil {
		return &InvalidError{err}
	}
	if err := s.CheckFor(rt.Capabilities()); err != nil {
		return &InvalidError{err}
	}
	if s.StopAfter == nil {
		if err := s.CheckLadder(h.cfg.StopAfter); err != nil {
			return &InvalidError{fmt.Errorf("%w (stop_after is the host's)", err)}
		}
	}
	return nil
}

// add puts a new instance into the host's maps, with its lock taken.
func (h *Host) add(i *inst) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.nameIsFreeLocked(i.name(), "create"); err != nil {
		return err
	}
	if len(h.byID) >= MaxInstances {
		return &RefusedError{Name: i.name(), What: "create", Reason: fmt.Sprintf("there are %d instances already", MaxInstances)}
	}
	i.lock <- struct{}{}
	h.byID[i.id], h.byName[i.name()] = i, i
	h.related.add(i)
	return nil
}

// nameIsFree returns an error if another instance has the name. what is the
// operation, for the error.
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

// noRuntime returns why a runtime is missing here.
func (h *Host) noRuntime(name string) error {
	if err := h.missing(name); err != nil {
		return fmt.Errorf("%s is not available here: %w; lull doctor says what to do", name, err)
	}
	return fmt.Errorf("there is no runtime %q on this host", name)
}

// openRelay opens the relay's ports, which stay open as long as the instance
// exists.
func (i *inst) openRelay() error {
	eps := i.relayed()
	if len(eps) == 0 && (!i.h.cfg.SharedHTTP || len(i.spec().Expose) == 0) {
		return nil
	}
	if i.h.cfg.NewGate == nil {
		return errors.New("nothing relays on this host")
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
	i.requests.deleted.Store(true) // for callers that wait for its lock
	h.callOff(i, "it was removed in the meantime")
	h.due.Remove(i.due)
	h.saver.Forget(i.id)
	i.closeRelay()
	i.dropHeld()
}

// closeRelay closes the relay's ports, if there are any. The caller holds the lock,
// or is the only one that knows i.
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

// InvalidError wraps the faults of a request.
type InvalidError struct{ Err error }

func (e *InvalidError) Error() string { return e.Err.Error() }
func (e *InvalidError) Unwrap() error { return e.Err }

type requesterKey struct{}

// For attributes the requests made with the returned context to who, such as
// "ada via server". Their events and status reasons then name who instead of
// "a user".
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

// Stop stops an instance. It always succeeds eventually, and earlier pending
// requests are dropped. With disable the instance is not woken anymore.
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
		unknown = nil // an unknown run can still be ended
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
			if stopped { // a user's stop remains
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
	if unknown != nil { // not found is not stopped
		return i.endUnknown(ctx, by, unknown)
	}
	return i.stop(ctx, by, "stopped by "+requester(ctx))
}

// Pause freezes a running instance now. Without force it is refused while a
// connection or a lease holds the instance.
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
	// A freeze could catch a command that is starting, and Docker then could not
	// end it.
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

// Resume wakes a paused instance, durably.
func (h *Host) Resume(ctx context.Context, ref, by string) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if s := i.state(); s == power.Stopped && i.rationed() { // a running instance needs no admission
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

// Delete stops an instance and removes it. An adopted one is released.
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

// Snooze keeps an instance running until t; the zero time ends that.
func (h *Host) Snooze(ctx context.Context, ref string, t time.Time) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	if d := t.Sub(h.Now()); !t.IsZero() && (d <= 0 || d > instance.MaxDeadline) {
		return &InvalidError{fmt.Errorf("cannot snooze until %s: it is not between now and %s from now", t.Format(time.RFC3339), instance.MaxDeadline)}
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
		i.scheduleAsleep(h.Now()) // the next step may now come sooner
	}
	return err
}

// Hold takes or renews a holder's lease. It is durable when Hold returns. On a
// paused instance the lease is kept and wakes nothing; on a stopped one it is
// refused.
func (h *Host) Hold(ctx context.Context, ref string, l idle.Lease, ttl time.Duration) error {
	if ttl <= 0 || ttl > instance.MaxLease {
		return &InvalidError{fmt.Errorf("cannot hold a lease: ttl %s is not above 0 and at most %s", ttl, instance.MaxLease)}
	}
	l.Holder = cmp.Or(l.Holder, "default")
	if len(l.Holder) > 128 || len(l.Reason) > 1024 {
		return &InvalidError{errors.New("cannot hold a lease: holder has at most 128 bytes and reason 1024")}
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

// ReleaseLease drops one holder's lease and leaves others alone.
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
			i.scheduleAsleep(now) // the lease may have delayed its next step
		}
	}
	return err
}

// StopAll stops every instance that lull started, several at a time.
func (h *Host) StopAll(ctx context.Context) {
	slots := make(chan struct{}, 16)
	var wg sync.WaitGroup
	for _, i := range h.all() {
		if i.spec().Adopted != nil {
			continue // it runs on, as without lull
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

// WakeAll thaws every paused instance. It is called when the guard that watches
// their sockets failed.
func (h *Host) WakeAll(by, why string) {
	for _, i := range h.all() {
		// A pause in progress is canceled, or the instance is woken after it.
		if s := i.state(); s.Asleep() && s != power.Hibernated || s == power.Pausing {
			i.wantWake(why)
		}
	}
	h.log.Warn("woke everything", "by", by, "reason", why)
}
