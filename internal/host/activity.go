package host

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/platform/activity"
	"lull/internal/relay"
)

// The probes of an instance (Spec.Probes) are read in rounds, in the background. No
// lock is held meanwhile, so a round delays no client. A round begins in a check
// that has just sampled the workload, and its end causes the next check. The
// workload is not sampled in between, because a probe may talk to it. Whatever the
// workload did for a probe therefore lies between two samples, and is not counted
// (discountLocked).
//
// When only the probes are left to prevent an idle pause, every probe is read once
// more, and the pause begins only if all of these readings are quiet. A sleeping
// instance is never probed.

// probeSettle is how long after a round the workload gets to close the connections
// that the probes opened.
const probeSettle = 50 * time.Millisecond

// probeGrace is how long a round waits for a probe after the probe's timeout.
const probeGrace = 2 * time.Second

// roundShare limits discounting: the activity during a round counts if the round
// took more than 1/roundShare of its interval.
const roundShare = 5

// custom holds the probe readings of the current run. Guarded by mu.
type custom struct {
	probes []probed  // parallel to Spec.Probes; empty before the first round
	round  *round    // the last round, until the sample after it
	final  time.Time // since when only the probes prevent a pause; zero if anything else does
	own    []period  // the most recent discounted rounds
}

// probed is the state of one probe.
type probed struct {
	reading idle.Reading
	began   time.Time // start of the reading in progress; zero if there is none
	next    time.Time
	// outstanding is set until the last reading has returned, which may be long
	// after its timeout. The probe is not read again before.
	outstanding bool
}

// round is a concurrent reading of several probes.
type round struct {
	began  time.Time
	before instance.Sample
	every  time.Duration // the shortest interval of its probes
	visits bool          // some probe may use the instance; only probes of files do not
	cancel context.CancelFunc
	done   chan struct{}
	over   bool // guarded by mu
}

type period struct{ from, to time.Time }

// within reports whether t lies in one of the periods.
func within(all []period, t time.Time) bool {
	return slices.ContainsFunc(all, func(p period) bool { return !t.Before(p.from) && !t.After(p.to) })
}

// resetProbesLocked discards all readings and cancels a round in progress. It is
// called when the instance was woken or another run begins. i.mu must be held.
func (i *inst) resetProbesLocked() {
	if r := i.custom.round; r != nil {
		r.cancel()
	}
	for n := range i.custom.probes {
		p := &i.custom.probes[n]
		*p = probed{outstanding: p.outstanding}
	}
	i.custom.round, i.custom.final, i.custom.own = nil, time.Time{}, nil
}

// probeReadingsLocked returns the readings of the probes. While the instance runs,
// a reading that is too old is unknown. i.mu must be held.
func (i *inst) probeReadingsLocked(now time.Time) (out []idle.Reading) {
	asleep := i.rec.State.Asleep()
	for n := range i.spec().Probes {
		p := &i.spec().Probes[n]
		r := idle.NotKnown(p.Signal(), now, "not read yet")
		if n < len(i.custom.probes) && !i.custom.probes[n].began.IsZero() {
			r = i.custom.probes[n].reading
			r.MaxAge = idle.Duration(2 * p.Every())
		} else if asleep {
			continue
		}
		if asleep { // the readings were taken before the pause
			r.MaxAge = 0
		}
		out = append(out, r)
	}
	return out
}

// probing reports whether a round is in progress.
func (i *inst) probing() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.custom.round != nil && !i.custom.round.over
}

// confirmed reports whether every probe was read again after everything else allowed
// the idle pause. If not, it begins a round of all probes. The end of the round
// causes the next check.
func (i *inst) confirmed(now time.Time) bool {
	probes := i.spec().Probes
	i.mu.Lock()
	c := &i.custom
	if c.final.IsZero() {
		c.final = now
	}
	fresh := len(probes) == 0 || len(c.probes) == len(probes) &&
		!slices.ContainsFunc(c.probes, func(p probed) bool { return p.began.Before(c.final) })
	i.mu.Unlock()
	if !fresh {
		i.beginRound(now, true)
	}
	return fresh
}

// unconfirmed records that something other than the probes prevents the idle pause.
func (i *inst) unconfirmed() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.custom.final = time.Time{}
}

// probeDue begins a round if probes are due. It returns when the next probes are
// due, zero for never, and whether a round is in progress.
func (i *inst) probeDue(now time.Time) (next time.Time, begun bool) {
	if len(i.spec().Probes) == 0 {
		return time.Time{}, false
	}
	if i.beginRound(now, false) {
		return time.Time{}, true
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, p := range i.custom.probes {
		if next.IsZero() || p.next.Before(next) {
			next = p.next
		}
	}
	return next, false
}

// beginRound begins a round of the probes that are due, or of all probes. It
// returns false if there are none. The caller must hold the lock of the instance
// and must just have sampled it.
func (i *inst) beginRound(now time.Time, all bool) bool {
	probes := i.spec().Probes
	ctx, cancel := context.WithCancel(i.h.ctx)
	r := &round{began: now, cancel: cancel, done: make(chan struct{})}
	var which []int
	i.mu.Lock()
	c := &i.custom
	if len(c.probes) != len(probes) {
		c.probes = make([]probed, len(probes))
	}
	for n := range c.probes {
		p := &c.probes[n]
		if !all && p.next.After(now) {
			continue
		}
		every := probes[n].Every()
		if r.every == 0 || every < r.every {
			r.every = every
		}
		p.next = now.Add(every + time.Duration((rand.Float64()-0.5)*0.2*float64(every)))
		if p.outstanding {
			p.began = now
			p.reading = idle.NotKnown(probes[n].Signal(), now, "the previous reading exceeded its timeout and is still in progress")
			continue
		}
		p.outstanding = true
		r.visits = r.visits || probes[n].Kind != instance.ProbeFile
		which = append(which, n)
	}
	if r.every > 0 {
		r.before, c.round = i.seen.windowLocked().last, r
	}
	i.mu.Unlock()
	if r.every == 0 {
		cancel()
		return false
	}
	i.h.spawn(func() { i.runRound(ctx, r, which) })
	return true
}

// runRound reads the given probes concurrently. It waits for each until its timeout
// plus probeGrace.
func (i *inst) runRound(ctx context.Context, r *round, which []int) {
	defer close(r.done)
	defer r.cancel()
	probes := i.spec().Probes
	type result struct {
		n    int
		said activity.Reading
	}
	results := make(chan result, len(which))
	limit := time.Duration(0)
	for _, n := range which {
		limit = max(limit, probes[n].Limit())
		go func() { // a reading may outlive the round
			said := i.readProbe(ctx, &probes[n])
			i.mu.Lock()
			i.custom.probes[n].outstanding = false
			i.mu.Unlock()
			results <- result{n, said}
		}()
	}
	late := time.NewTimer(limit + probeGrace)
	defer late.Stop()
	canceled := ctx.Done()
	for left := slices.Clone(which); len(left) > 0; {
		select {
		case <-canceled:
			canceled = nil
			late.Reset(probeGrace)
		case got := <-results:
			left = slices.DeleteFunc(left, func(n int) bool { return n == got.n })
			i.noteProbe(r, got.n, got.said)
		case <-late.C:
			for _, n := range left {
				i.noteProbe(r, n, activity.Late(&probes[n]))
			}
			left = nil
		}
	}
	select {
	case <-time.After(probeSettle):
	case <-ctx.Done():
	}
	i.mu.Lock()
	r.over = true
	current := i.custom.round == r
	i.mu.Unlock()
	if current {
		i.h.due.Set(i.due, i.h.Now())
	}
}

// noteProbe stores a probe's reading. A reading of activity is dated at its end,
// any other at its beginning.
func (i *inst) noteProbe(r *round, n int, said activity.Reading) {
	now := i.h.Now()
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.custom.round != r { // the round belongs to an earlier run
		return
	}
	p := &i.custom.probes[n]
	p.began = r.began
	p.reading = idle.Reading{Signal: i.spec().Probes[n].Signal(), State: said.State, Value: said.Value, Threshold: said.Threshold, At: r.began, Detail: said.Detail}
	if said.State == idle.Active {
		p.reading.At = now
	}
}

// readProbe reads a probe once.
func (i *inst) readProbe(ctx context.Context, p *instance.Probe) activity.Reading {
	env := []string{"LULL_INSTANCE=" + i.name()}
	if p.Kind == instance.ProbeExec && p.Inside {
		return i.readInside(ctx, p)
	}
	if f := i.h.cfg.ReadProbe; f != nil {
		return f(ctx, p, env)
	}
	return activity.Read(ctx, p, env)
}

// readInside runs a probe's command inside the instance.
func (i *inst) readInside(ctx context.Context, p *instance.Probe) activity.Reading {
	rt, ok := i.rt.(instance.Execer)
	if !ok {
		return activity.Reading{Detail: "the runtime cannot run a command inside"}
	}
	ctx, cancel := context.WithTimeout(ctx, p.Limit())
	defer cancel()
	out, err := instance.Capture(func(s instance.Streams) (int, error) {
		return rt.Exec(ctx, i.id, instance.Command{Command: p.Command}, s)
	})
	switch {
	case ctx.Err() != nil:
		return activity.Late(p)
	case err != nil:
		return activity.Reading{Detail: err.Error()}
	}
	return activity.Exited(out.ExitCode, out.Stderr)
}

// endRound cancels a round in progress before a pause that a user requested.
// Otherwise a probe's connection could prevent the pause, or its command could be
// frozen.
func (i *inst) endRound() {
	i.mu.Lock()
	r := i.custom.round
	i.mu.Unlock()
	if r == nil {
		return
	}
	r.cancel()
	select {
	case <-r.done:
	case <-time.After(probeGrace):
	}
}

// discountLocked removes the effect of the probes themselves after a round. It
// takes the workload's usage between the sample before the round and s out of the
// window. From s and a it removes connections that came or ended in that time or
// during an earlier round.
//
// This also hides a client whose whole visit falls into a round and leaves no other
// trace. The idle time may then begin too early, but an open connection still
// prevents a pause. A round that took too long is not discounted. i.mu must be
// held.
func (i *inst) discountLocked(s *instance.Sample, a *relay.Activity) {
	c := &i.custom
	if r := c.round; r != nil && r.over {
		c.round = nil
		if b := &r.before; r.visits && !b.At.IsZero() && s.At.Sub(b.At) <= r.every/roundShare && !i.seen.windowLocked().base.At.After(b.At) {
			c.own = append(c.own, period{b.At, s.At})
			if len(c.own) > 128 {
				c.own = slices.Delete(c.own, 0, 1)
			}
			base := &i.seen.window.base
			base.CPU += max(s.CPU-b.CPU, 0)
			if s.NetBytes > b.NetBytes {
				base.NetBytes += s.NetBytes - b.NetBytes
			}
			if s.DiskBytes > b.DiskBytes {
				base.DiskBytes += s.DiskBytes - b.DiskBytes
			}
		}
	}
	forget := func(t *time.Time) {
		if within(c.own, *t) {
			*t = time.Time{}
		}
	}
	forget(&s.LastClosed)
	if a != nil {
		forget(&a.LastByte)
		forget(&a.LastArrival)
	}
}

// checkProbes returns an error that lists the probes of a new instance that its
// runtime cannot run.
func (h *Host) checkProbes(s *instance.Spec, rt Runtime) error {
	_, can := rt.(instance.Execer)
	for n, p := range s.Probes {
		if p.Inside && !can {
			return &InvalidError{fmt.Errorf("cannot use probes[%d].inside: the %s runtime cannot run a command inside", n, s.Runtime)}
		}
	}
	return nil
}
