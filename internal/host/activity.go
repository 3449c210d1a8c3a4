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

// The probes of an instance (Spec.Probes) are read in rounds, in the background:
// no lock is held meanwhile, so a round delays no client. A round begins in a check
// that has just sampled the workload, and its end causes the next check. In between
// the workload is not sampled, because a probe may talk to it. What the workload did
// for a probe then lies between two samples, and is not counted (discountLocked).
//
// When nothing else prevents an idle pause, every probe is read once more, and the
// pause begins only if all of these readings are quiet. An instance that sleeps is
// never probed.

// probeSettle is how long a workload has after a round to close the connections of
// the probes.
const probeSettle = 50 * time.Millisecond

// probeGrace is how long after its timeout a probe is awaited.
const probeGrace = 2 * time.Second

// roundShare bounds what discountLocked leaves out: a round that took more than the
// interval divided by it counts as any other activity.
const roundShare = 5

// custom has the readings of the probes in the present run. Guarded by mu.
type custom struct {
	probes []probed  // one for each of Spec.Probes, once the first round began
	round  *round    // from its beginning until the next sample
	final  time.Time // since when only the probes may still prevent a pause; zero if something else does
	own    []period  // of the last rounds that were discounted
}

// probed is the state of one probe.
type probed struct {
	reading idle.Reading
	began   time.Time // of the reading; zero if there is none
	next    time.Time
	// outstanding is set until the reading of the last round returned, which may
	// be long after its timeout. Until then the probe is not read again.
	outstanding bool
}

// round is a reading of several probes at once.
type round struct {
	began  time.Time
	before instance.Sample
	every  time.Duration // the shortest interval of its probes
	visits bool          // a probe may use the instance: all but those of files
	cancel context.CancelFunc
	done   chan struct{}
	over   bool // guarded by mu
}

type period struct{ from, to time.Time }

// resetProbesLocked forgets all readings: the instance was woken, or another run
// begins. A round in progress ends. i.mu is held.
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
// those that are too old are unknown. i.mu is held.
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
		if asleep { // of the time of the pause
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

// confirmed reports whether every probe was read since nothing else prevents the
// idle pause. If not, it begins to read them: the end of the round causes the next
// check.
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

// unconfirmed records that something else than a probe prevents the idle pause.
func (i *inst) unconfirmed() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.custom.final = time.Time{}
}

// probeDue begins a round if probes are due. It returns when the next ones are, or
// zero for never, and whether a round is in progress.
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

// beginRound begins to read the probes that are due, or all. It reports whether
// there are any. The caller holds the lock of the instance and has just sampled it.
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
			p.reading = idle.NotKnown(probes[n].Signal(), now, "its last reading has not ended although its time was over")
			continue
		}
		p.outstanding = true
		r.visits = r.visits || probes[n].Kind != instance.ProbeFile
		which = append(which, n)
	}
	if r.every > 0 {
		r.before, c.round = i.seen.last, r
	}
	i.mu.Unlock()
	if r.every == 0 {
		cancel()
		return false
	}
	i.h.spawn(func() { i.runRound(ctx, r, which) })
	return true
}

// runRound reads probes at once and waits for all of them, at most a little longer
// than their timeouts.
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
		go func() { // it may outlive the round
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

// noteProbe keeps what a probe said. Use counts from the end of the reading, and
// the age of anything else from its beginning.
func (i *inst) noteProbe(r *round, n int, said activity.Reading) {
	now := i.h.Now()
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.custom.round != r { // of an earlier run
		return
	}
	p := &i.custom.probes[n]
	p.began = r.began
	p.reading = idle.Reading{Signal: i.spec().Probes[n].Signal(), State: said.State, Value: said.Value, Threshold: said.Threshold, At: r.began, Detail: said.Detail}
	if said.State == idle.Active {
		p.reading.At = now
	}
}

// readProbe takes a reading.
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

// endRound ends a round in progress, before a pause that a user asked for: a
// connection of a probe must not prevent it, and its command must not be frozen.
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

// discountLocked accounts for a round that is over: what the workload used between
// the sample before it and s was for the probes, and is taken out of the window.
// Connections that came or ended in that time, or in that of an earlier round, are
// left out of s and a. That hides a client whose whole visit lies in a round, which
// has no other trace; it lets the idle time begin earlier, but every open connection
// still holds. A round that took long is not discounted. i.mu is held.
func (i *inst) discountLocked(s *instance.Sample, a *relay.Activity) {
	c := &i.custom
	if r := c.round; r != nil && r.over {
		c.round = nil
		if b := &r.before; r.visits && !b.At.IsZero() && s.At.Sub(b.At) <= r.every/roundShare && !i.seen.base.At.After(b.At) {
			c.own = append(c.own, period{b.At, s.At})
			if len(c.own) > 128 {
				c.own = slices.Delete(c.own, 0, 1)
			}
			base := &i.seen.base
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
		if slices.ContainsFunc(c.own, func(p period) bool { return !t.Before(p.from) && !t.After(p.to) }) {
			*t = time.Time{}
		}
	}
	forget(&s.LastClosed)
	if a != nil {
		forget(&a.LastByte)
		forget(&a.LastArrival)
	}
}

// checkProbes returns which probes of a new instance its runtime cannot run.
func (h *Host) checkProbes(s *instance.Spec, rt Runtime) error {
	_, can := rt.(instance.Execer)
	for n, p := range s.Probes {
		if p.Inside && !can {
			return &InvalidError{fmt.Errorf("cannot use probes[%d].inside: the %s runtime cannot run a command inside", n, s.Runtime)}
		}
	}
	return nil
}
