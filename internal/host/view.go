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
	"lull/internal/protocol/hostctl"
)

// List returns every instance, by name, including those whose runtime is
// missing. Memory is read only if requested, because each reading takes a
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

// Handle reads one instance without copying all of it.
type Handle struct{ i *inst }

// ID returns the instance's ID.
func (h Handle) ID() string { return h.i.id }

// State returns the present state.
func (h Handle) State() power.Instance { return h.i.state() }

// View returns the instance as Get does. Its memory is read only if requested.
func (h Handle) View(memory bool) hostctl.Instance { return h.i.view(memory) }

// Instances returns every instance whose runtime is available, by ID.
func (h *Host) Instances() []Handle {
	all := h.all()
	out := make([]Handle, len(all))
	for n, i := range all {
		out[n] = Handle{i}
	}
	return out
}

// viewAway returns an instance of which only the record is known.
func (h *Host) viewAway(r instance.Record) hostctl.Instance {
	return hostctl.Instance{ID: r.ID, Name: r.Spec.Name, State: string(r.State), StateSince: ptr(r.StateSince), Enabled: r.Enabled,
		Runtime: r.Spec.Runtime, Command: r.Spec.Command, Image: r.Spec.Image, CreatedAt: r.CreatedAt, StartedAt: ptr(r.StartedAt),
		LastActivityAt: ptr(r.LastActivityAt), SavedBytes: r.Saved, Endpoints: []instance.Endpoint{}, Activity: []idle.Reading{}, Blocks: []idle.Block{},
		Leases: []idle.Lease{}, StatusReason: h.absent[r.ID].Error(), Unavailable: h.noRuntime(r.Spec.Runtime).Error()}
}

// recordAway returns the record of an instance whose runtime is missing; nil
// for any other.
func (h *Host) recordAway(ref string) *instance.Record {
	for n := range h.away {
		if r := &h.away[n]; r.ID == ref || r.Spec.Name == ref {
			return r
		}
	}
	return nil
}

// whyAway explains why only the record of an instance is known.
func (h *Host) whyAway(r instance.Record) hostctl.Why {
	o := h.viewAway(r)
	a := evidence.Account{Object: r.ID, Name: r.Spec.Name, Kind: evidence.KindInstance, At: h.Now(), State: o.State,
		Question: "why is it not known how " + r.Spec.Name + " is", Signals: []evidence.Signal{}, Leases: []idle.Lease{},
		Answer: fmt.Sprintf("It was %s, and nothing can be done with it: %s.", o.State, o.Unavailable),
		Change: []string{"the host is started with that runtime again"}}
	return hostctl.Why{Instance: o, Account: a}
}

// Get returns one instance.
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

// view returns the present state of the instance. The verdict is computed anew
// from the last readings, so that leases, snoozes and switches show at once. It
// never waits for a transition.
func (i *inst) view(memory bool) hostctl.Instance {
	now := i.h.Now()
	i.mu.Lock()
	r := i.rec
	e := i.evidenceLocked(now)
	e.Connections = i.conns
	w, next, trouble, missing, unheard := i.work, i.restart, i.trouble, i.missing, i.unheard
	i.mu.Unlock()
	v := idle.Decide(now, i.policy(), e)
	o := hostctl.Instance{ID: r.ID, Name: r.Spec.Name, State: string(r.State), StateSince: ptr(r.StateSince),
		StatusReason: r.StatusReason, Enabled: r.Enabled, Runtime: r.Spec.Runtime, Command: r.Spec.Command,
		CreatedAt: r.CreatedAt, StartedAt: ptr(r.StartedAt), LastActivityAt: ptr(r.LastActivityAt),
		LastPausedAt: ptr(r.LastPausedAt), LastPausedBy: r.PausedBy, LastResumedAt: ptr(r.LastResumedAt), LastResumedBy: r.ResumedBy,
		Connections: e.Connections, Leases: liveLeases(r.Leases, now), IdlePolicy: cmp.Or(r.Spec.IdlePolicy, instance.PolicyDefault),
		PauseAfter: i.pauseAfter().Seconds(), StopAfter: i.stopAfter().Seconds(), ReclaimAfter: time.Duration(r.Spec.ReclaimAfter).Seconds(),
		HibernateAfter: time.Duration(r.Spec.HibernateAfter).Seconds(), Image: r.Spec.Image, MemoryLimit: r.Spec.Memory, CPUs: r.Spec.CPUs,
		Net: string(r.Spec.Net), Workspace: r.Spec.Workspace,
		Endpoints: r.Endpoints, Activity: e.Readings, Blocks: v.Blocks, SnoozeUntil: v.SnoozeUntil,
		RestartCount: r.RestartCount, CrashLooping: r.CrashLooping, PauseCount: r.PauseCount, WakeCount: r.WakeCount, ReclaimedBytes: r.Freed,
		SavedBytes: r.Saved, BootedAnew: r.BootedAnew, Trouble: trouble, Misset: i.misset()}
	if o.Wakes = i.wakes(); o.Wakes {
		o.Deaf = i.deaf()
		o.StartsOnConnection = r.State == power.Stopped && i.unwakeable() == ""
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
	if r.Exit != nil && !r.Exit.Lost { // a lost code is not 0
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
			break // nothing happens by itself
		}
		i.mu.Lock()
		held, stop := i.heldLocked(), i.stopDueLocked()
		i.mu.Unlock()
		if !stop.IsZero() && r.PausedBy != byOutside {
			o.StopAt = ptr(later(stop, held))
		}
		at, to := i.nextStep()
		o.NextStep, o.NextStepAt = string(to), ptr(at)
	case power.Stopped:
		if !next.IsZero() {
			o.RestartAt = &next
			o.StatusReason += fmt.Sprintf("; started again in %s", idle.Human(next.Sub(now)))
		}
	}
	o.Waiting = i.h.room.waiting(i)
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

// misset returns what is wrong with the settings of i combined with the host's,
// which may have changed since i was created; "" for nothing.
func (i *inst) misset() string {
	if i.spec().StopAfter != nil {
		return ""
	}
	if err := i.spec().CheckLadder(i.h.cfg.StopAfter); err != nil {
		return err.Error() + " (stop_after is the host's)"
	}
	return ""
}

// Misset lists the faults in the settings of instances, by name.
func (h *Host) Misset() (faults []string) {
	for _, i := range h.all() {
		if what := i.misset(); what != "" {
			faults = append(faults, i.name()+": "+what)
		}
	}
	slices.Sort(faults)
	return faults
}

// Why returns why an instance runs, or why it was paused or stopped, now or at
// a past time; zero is now.
func (h *Host) Why(ctx context.Context, ref string, at time.Time) (hostctl.Why, error) {
	i, err := h.find(ref)
	if r := h.recordAway(ref); r != nil && at.IsZero() {
		return h.whyAway(*r), nil
	}
	if err != nil {
		return hostctl.Why{}, err
	}
	if !at.IsZero() {
		return i.whyThen(ctx, at.UTC())
	}
	if i.state() == power.Running && i.tryAcquire() { // fresh readings, unless a transition is in progress
		if w := i.workload(); w != nil {
			e := i.look(w)
			i.noteTrouble(w)
			i.judge(e)
		}
		i.release()
	}
	o := i.view(true)
	i.mu.Lock()
	e := i.evidenceLocked(h.Now())
	e.Connections = i.conns
	gate := i.gate
	i.mu.Unlock()
	y := hostctl.Why{Instance: o, Account: evidence.Explain(i.about(o.State), evidence.Decide(h.Now(), i.policy(), e))}
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
	i.explain(&y)
	return y, nil
}

func (i *inst) about(state string) evidence.Account {
	return evidence.Account{Object: i.id, Name: i.name(), Kind: evidence.KindInstance, State: state}
}

// skew is how far a caller's clock may be ahead of ours. A time within it
// counts as now.
const skew = 5 * time.Second

// whyThen answers from the journal.
func (i *inst) whyThen(ctx context.Context, at time.Time) (hostctl.Why, error) {
	j := i.h.cfg.Evidence
	switch {
	case j == nil:
		return hostctl.Why{}, &InvalidError{errors.New("cannot say why at a past time: this host keeps no evidence")}
	case at.After(i.h.Now().Add(skew)):
		return hostctl.Why{}, &InvalidError{errors.New("cannot say why at a time that has not come")}
	}
	y := hostctl.Why{Instance: i.view(true)}
	a := i.about("")
	a.At = at
	var c evidence.Recall
	var down *evidence.Record // the change in effect, if it is not to running
	var err error
	c.Missing, err = j.Read(ctx, evidence.Query{Object: i.id, To: at}, func(r evidence.Record) error {
		c.Add(at, &r)
		if r.Change == nil || r.At.After(at) {
			return nil
		}
		a.State, down = r.Change.To, &r
		turn := &evidence.Turn{At: r.At, By: r.Change.By, Reason: r.Change.Reason}
		if r.Change.To == string(power.Running) {
			a.Resumed, down = turn, nil
		} else if r.Change.To == string(power.Paused) {
			a.Paused = turn
		}
		return nil
	})
	if err != nil {
		return y, err
	}
	paused, resumed := a.Paused, a.Resumed
	y.Account = evidence.Past(a, c)
	y.Paused, y.Resumed = paused, resumed
	if down != nil {
		y.Question, y.Change = "why was it "+a.State, []string{}
		y.Answer = fmt.Sprintf("It was %s since %s, by %s: %s.", a.State, down.At.Format(time.RFC3339), cmp.Or(down.Change.By, "nobody known"), cmp.Or(down.Change.Reason, "nothing is recorded"))
	}
	return y, nil
}

// happened publishes an event and journals its power change.
func (h *Host) happened(e hostctl.Event) {
	h.events.Add(e)
	h.measures.events.WithLabelValues(e.Type).Inc()
	switch e.Type {
	case "paused", "resumed", "started", "stopped", "exited", "reclaimed", "hibernated", "removed":
		if j := h.cfg.Evidence; j != nil {
			j.Take(evidence.Record{At: e.Time.Round(0).UTC(), Object: e.ID, Change: &evidence.Change{To: e.State, By: e.By, Reason: e.Reason}})
		}
	}
}

// explain describes why an instance does not run.
func (i *inst) explain(y *hostctl.Why) {
	o := &y.Instance
	by := func(who, at string) string {
		s := "by " + cmp.Or(who, "nobody known")
		if at != "" {
			s += " at " + at
		}
		return s
	}
	when := func(t *time.Time) string {
		if t == nil {
			return ""
		}
		return t.Format(time.RFC3339)
	}
	switch power.Instance(o.State) {
	case power.Running:
		if o.BootedAnew != "" {
			y.Answer += " It was booted anew and not restored: " + o.BootedAnew + "."
		}
		if o.Trouble != "" {
			y.Answer += " Something keeps it from working: " + o.Trouble + "."
		}
		if o.StatusReason == letRunSaying {
			y.Answer += fmt.Sprintf(" It slept, and %s; that was found at %s.", letRunSaying, when(o.LastResumedAt))
		}
		if _, how, ok := strings.Cut(o.StatusReason, restartedSaying); ok {
			y.Answer += " It was restarted: " + how + "."
		}
	case power.Paused, power.Reclaimed, power.Hibernated:
		y.Question = "why is it " + o.State
		y.Answer = fmt.Sprintf("It was paused %s: %s.", by(o.LastPausedBy, when(o.LastPausedAt)), o.StatusReason)
		y.Change = []string{"lull instance resume " + o.Name}
		if o.WakesOnConnection {
			y.Change[0] = "a connection to it, or: " + y.Change[0]
		}
		open := "a connection is open"
		if o.Connections > 1 {
			open = fmt.Sprintf("%d connections are open", o.Connections)
		}
		switch {
		case o.StopAt != nil && o.Connections > 0:
			y.Answer += fmt.Sprintf(" It is stopped at %s without a new connection; until then %s and may not be ignored.", when(o.StopAt), open)
		case o.StopAt != nil:
			y.Answer += fmt.Sprintf(" It is stopped at %s unless it is used before.", when(o.StopAt))
		case o.Connections > 0 && o.StopAfter > 0:
			y.Answer += fmt.Sprintf(" It is not stopped automatically while %s, because a stop would close them.", open)
		}
	default:
		y.Question = "why is it " + o.State
		y.Answer = fmt.Sprintf("It is %s since %s: %s.", o.State, when(o.StateSince), cmp.Or(o.StatusReason, "nothing is recorded"))
		y.Change = []string{}
		if o.State == string(power.Stopped) {
			y.Change = append(y.Change, "lull instance start "+o.Name)
		}
		if !o.Enabled {
			y.Answer += " It is disabled: only a manual start resumes it."
		}
	}
	if o.Misset != "" {
		y.Answer += " Its settings do not fit together with the host's: " + o.Misset + "."
	}
	if o.Unavailable != "" {
		y.Question = "why is it not known how " + o.Name + " is"
		y.Answer = fmt.Sprintf("It was %s, and %s. It is retried automatically.", o.State, o.Unavailable)
		y.Change = []string{"its run answers, or: lull instance stop " + o.Name + ", which ends it as it is"}
	}
	if w := o.Waiting; w != nil {
		y.Answer += fmt.Sprintf(" It has been asked for at %s and waits, at place %d, until %s: %s.", when(&w.Since), w.Place, when(&w.Until), w.Reason)
		y.Change = []string{"others go to sleep, or: lull instance stop one of them, or a higher memory or wakes setting of the host"}
	}
}
