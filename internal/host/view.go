package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/core/why"
	"lull/internal/host/account"
	"lull/internal/protocol/hostctl"
)

// List returns all instances by name, including those whose runtime is missing. It
// reads their memory only if requested, because each reading costs as much as a
// probe.
func (h *Host) List(memory bool) []hostctl.Instance {
	all := h.all()
	out := make([]hostctl.Instance, 0, len(all))
	for _, i := range all {
		out = append(out, i.view(memory))
	}
	for _, r := range h.away {
		out = append(out, h.viewAway(r))
	}
	slices.SortFunc(out, func(a, b hostctl.Instance) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// Handle gives access to one instance without copying it.
type Handle struct{ i *inst }

// ID returns the instance's ID.
func (h Handle) ID() string { return h.i.id }

// State returns the current power state.
func (h Handle) State() power.Instance { return h.i.state() }

// View returns the same as Host.Get. It reads the memory only if requested.
func (h Handle) View(memory bool) hostctl.Instance { return h.i.view(memory) }

// Instances returns handles of all instances whose runtimes are available, by ID.
func (h *Host) Instances() []Handle {
	all := h.all()
	out := make([]Handle, len(all))
	for n, i := range all {
		out[n] = Handle{i}
	}
	return out
}

// viewAway returns the view of an instance of which only the record is known.
func (h *Host) viewAway(r instance.Record) hostctl.Instance {
	return hostctl.Instance{ID: r.ID, Name: r.Spec.Name, State: string(r.State), StateSince: ptr(r.StateSince), Enabled: r.Enabled,
		Runtime: r.Spec.Runtime, Command: r.Spec.Command, Image: r.Spec.Image, CreatedAt: r.CreatedAt, StartedAt: ptr(r.StartedAt),
		LastActivityAt: ptr(r.LastActivityAt), SavedBytes: r.Saved, Endpoints: []instance.Endpoint{}, Activity: []idle.Reading{}, Blocks: []idle.Block{},
		Leases: []idle.Lease{}, StatusReason: h.absent[r.ID].Error(), Unavailable: h.noRuntime(r.Spec.Runtime).Error()}
}

// recordAway returns the record of an instance whose runtime is missing, or nil.
func (h *Host) recordAway(ref string) *instance.Record {
	for n := range h.away {
		if r := &h.away[n]; r.ID == ref || r.Spec.Name == ref {
			return r
		}
	}
	return nil
}

// Get returns the view of one instance.
func (h *Host) Get(ref string) (hostctl.Instance, error) {
	i, err := h.find(ref)
	if r := h.recordAway(ref); r != nil {
		return h.viewAway(*r), nil
	}
	if err != nil {
		return hostctl.Instance{}, err
	}
	return i.view(true), nil
}

func ptr(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.Round(0)
	return &t
}

// view returns the current view of the instance. It recomputes the verdict from the
// last readings, so that changes to leases, snoozes and halts show at once. It does not
// wait for a transition.
func (i *inst) view(memory bool) hostctl.Instance {
	now := i.h.Now()
	i.mu.Lock()
	r := i.rec
	if i.proc.thawing && r.State == power.Paused {
		r.State = power.Resuming // its program may have answered the client already
	}
	r.LastActivityAt = latest(r.LastActivityAt, i.seen.unseen)
	e := i.evidenceLocked(now)
	e.LastActivityAt = r.LastActivityAt
	timer, timerBy := i.nextTimerLocked()
	w, next, trouble, missing, unheard := i.proc.work, i.retry.restart, i.seen.trouble, i.proc.missing, i.seen.unheard
	i.mu.Unlock()
	v := idle.Decide(now, i.policy(), e)
	o := hostctl.Instance{ID: r.ID, Name: r.Spec.Name, State: string(r.State), StateSince: ptr(r.StateSince),
		StatusReason: r.StatusReason, Enabled: r.Enabled, Runtime: r.Spec.Runtime, Command: r.Spec.Command,
		CreatedAt: r.CreatedAt, StartedAt: ptr(r.StartedAt), LastActivityAt: ptr(r.LastActivityAt),
		LastPausedAt: ptr(r.LastPausedAt), LastPausedBy: r.PausedBy, LastResumedAt: ptr(r.LastResumedAt), LastResumedBy: r.ResumedBy,
		Connections: e.Connections, Leases: liveLeases(r.Leases, now), IdlePolicy: cmp.Or(r.Spec.IdlePolicy, instance.PolicyDefault),
		PauseAfter: i.pauseAfter().Seconds(), StopAfter: i.stopAfter().Seconds(), ReclaimAfter: time.Duration(r.Spec.ReclaimAfter).Seconds(),
		HibernateAfter: time.Duration(r.Spec.HibernateAfter).Seconds(), Image: r.Spec.Image, MemoryLimit: r.Spec.Memory, CPUs: r.Spec.CPUs,
		Net: string(r.Spec.Net), Workspace: r.Spec.Workspace, Labels: r.Spec.Labels, DependsOn: r.Spec.DependsOn, Group: r.Spec.Group, Adopted: r.Spec.Adopted, Probes: r.Spec.Probes,
		WakeAt: ptr(timer), WakeAtBy: timerBy, WakeSchedule: r.Spec.WakeSchedule,
		Endpoints: r.Endpoints, Activity: e.Readings, Blocks: v.Blocks, SnoozeUntil: v.SnoozeUntil,
		RestartCount: r.RestartCount, CrashLooping: r.CrashLooping, PauseCount: r.PauseCount, WakeCount: r.WakeCount, ReclaimedBytes: r.Freed,
		SavedBytes: r.Saved, BootedAnew: r.BootedAnew, Trouble: trouble, Misset: i.misset()}
	var deaf bool
	o.Deaf, deaf = i.deaf(unheard)
	if o.Wakes = i.wakes(); o.Wakes {
		o.StartsOnConnection = r.State == power.Stopped && !deaf && i.unwakeable() == ""
		noPrivs, err := i.h.handoffNow()
		o.NoNewPrivs = noPrivs && err == nil && !r.Spec.ListenFDs && i.direct()
	}
	o.WakesOnConnection = (len(r.Spec.Expose) > 0 || !unheard) && !(r.State.Asleep() && r.PausedBy == byOutside)
	if o.Unwritable = i.h.unwritable(); o.Unwritable != "" {
		o.StatusReason = strings.TrimPrefix(o.StatusReason+"; "+o.Unwritable, "; ")
	}
	if r.Unserved != "" {
		o.StatusReason = strings.TrimPrefix(o.StatusReason+"; "+r.Unserved, "; ")
	}
	if o.Endpoints == nil {
		o.Endpoints = []instance.Endpoint{}
	}
	if o.Activity == nil {
		o.Activity = []idle.Reading{}
	}
	if r.Exit != nil && !r.Exit.Lost { // a lost exit code must not show as 0
		code := r.Exit.Code
		o.ExitCode = &code
	}
	if !r.LastActivityAt.IsZero() {
		o.IdleFor = max(now.Sub(r.LastActivityAt).Seconds(), 0)
	}
	for _, l := range o.Leases {
		if !o.LeaseHeld || l.ExpiresAt.After(*o.LeaseExpiresAt) {
			ends := l.ExpiresAt
			o.LeaseHeld, o.LeaseReason, o.LeaseExpiresAt = true, l.Reason, &ends
		}
	}
	if missing != nil {
		o.Unavailable = "it has not been taken over since the daemon started: " + missing.Error()
	}
	switch r.State {
	case power.Running:
		o.PauseAt = v.TargetPauseAt
	case power.Paused, power.Reclaimed, power.Hibernated:
		if i.h.Halted() != nil || missing != nil || o.Unwritable != "" {
			break // nothing happens automatically
		}
		i.mu.Lock()
		held, stop := i.heldLocked(), i.stopDueLocked()
		i.mu.Unlock()
		if !stop.IsZero() && r.PausedBy != byOutside {
			o.StopAt = ptr(latest(stop, held))
		}
		at, to := i.nextStep()
		o.NextStep, o.NextStepAt = string(to), ptr(at)
	case power.Stopped:
		if !next.IsZero() {
			o.RestartAt = &next
			o.StatusReason += fmt.Sprintf("; started again in %s", idle.Human(next.Sub(now)))
		}
	}
	o.Waiting = i.h.room.Waiting(i)
	if w != nil {
		o.PID = w.Identity().PID
		if memory {
			if n, err := w.Memory(); err == nil {
				o.MemoryBytes = n
			}
		}
	}
	return o
}

func liveLeases(in []idle.Lease, now time.Time) []idle.Lease {
	out := make([]idle.Lease, 0, len(in))
	for _, l := range in {
		if l.ExpiresAt.After(now) {
			out = append(out, l)
		}
	}
	return out
}

// misset returns what is wrong with the settings of i combined with those of the
// host, which may have changed since i was created, or "".
func (i *inst) misset() string {
	if i.spec().StopAfter != nil {
		return ""
	}
	if err := i.spec().CheckLadder(i.h.cfg.StopAfter); err != nil {
		return err.Error() + " (stop_after is the host's default)"
	}
	return ""
}

// Misset returns what is wrong with the settings of each instance, by name.
func (h *Host) Misset() (faults []string) {
	for _, i := range h.all() {
		if what := i.misset(); what != "" {
			faults = append(faults, i.name()+": "+what)
		}
	}
	slices.Sort(faults)
	return faults
}

// Why explains why an instance runs, or was paused or stopped, at the time at; zero
// means now.
func (h *Host) Why(ctx context.Context, ref string, at time.Time) (hostctl.Why, error) {
	i, err := h.find(ref)
	if r := h.recordAway(ref); r != nil && at.IsZero() {
		return account.Unavailable(h.viewAway(*r), h.Now()), nil
	}
	if err != nil {
		return hostctl.Why{}, err
	}
	if !at.IsZero() {
		return i.whyThen(ctx, at.UTC())
	}
	// Sample again, unless a transition or a round of probes is in progress.
	if i.state() == power.Running && !i.probing() && i.tryAcquire() {
		if w := i.workload(); w != nil {
			i.decide(w)
			i.noteTrouble(w)
		}
		i.release()
	}
	o := i.view(true)
	i.mu.Lock()
	e := i.evidenceLocked(h.Now())
	e.LastActivityAt = latest(e.LastActivityAt, i.seen.unseen)
	gate := i.gate
	i.mu.Unlock()
	y := hostctl.Why{Instance: o, Account: why.Explain(i.about(o.State), evidence.Decide(h.Now(), i.policy(), e))}
	if s, ok := gate.(interface{ RelayStats() hostctl.RelayStats }); ok {
		st := s.RelayStats()
		y.Relay = &st
	}
	if t := o.LastPausedAt; t != nil {
		y.Paused = &evidence.Turn{At: *t, By: o.LastPausedBy}
	}
	if t := o.LastResumedAt; t != nil {
		y.Resumed = &evidence.Turn{At: *t, By: o.LastResumedBy}
	}
	account.Explain(&y)
	return y, nil
}

func (i *inst) about(state string) why.Account {
	return why.Account{Object: i.id, Name: i.name(), Kind: why.KindInstance, State: state}
}

// skew is how far a caller's clock may be ahead of this machine's. A time less than
// that in the future counts as now.
const skew = 5 * time.Second

// whyThen is Why for a past time, from the journal.
func (i *inst) whyThen(ctx context.Context, at time.Time) (hostctl.Why, error) {
	j := i.h.cfg.Evidence
	switch {
	case j == nil:
		return hostctl.Why{}, &InvalidError{errors.New("cannot explain a past time: this host stores no evidence")}
	case at.After(i.h.Now().Add(skew)):
		return hostctl.Why{}, &InvalidError{errors.New("cannot explain a time in the future")}
	}
	return account.Then(ctx, j, i.about(""), at, hostctl.Why{Instance: i.view(true)})
}

// happened publishes an event, and writes a change of the power state to the
// journal.
func (h *Host) happened(e hostctl.Event) {
	h.events.Add(e)
	h.metrics.Event(e.Type)
	switch e.Type {
	case "paused", "resumed", "started", "stopped", "exited", "reclaimed", "hibernated", "removed":
		if j := h.cfg.Evidence; j != nil {
			j.Take(evidence.Record{At: e.Time.Round(0).UTC(), Object: e.ID, Change: &evidence.Change{To: e.State, By: e.By, Reason: e.Reason}})
		}
	}
}
