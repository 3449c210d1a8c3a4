package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/platform/sockets"
)

// The members of a group (Spec.Group) sleep together: none is paused while another
// is in use, and a client or timer that wakes one wakes all of them. Spec.DependsOn
// determines the order. A member does not keep the others awake if it never pauses,
// is paused outside lull, or was stopped by a user.

// byGroup is the actor of a wake caused by the wake of another member of the group.
const byGroup = "group"

// GroupInUse is the code of the block on an instance while another member of
// its group is in use.
const GroupInUse idle.Code = "group_in_use"

// groupBlock returns a block of the idle pause while another member of the group is
// in use, or nil.
func (i *inst) groupBlock() *idle.Block {
	g := i.spec().Group
	if g == "" {
		return nil
	}
	for _, m := range i.h.related.group(g) {
		if m != i && m.inUse() {
			return &idle.Block{Code: GroupInUse, Holder: m.name(), Sentence: fmt.Sprintf("%s, of the same group %s, is in use.", m.name(), g)}
		}
	}
	return nil
}

// inUse reports whether the last check of i found a reason against an idle pause,
// other than i's group or dependents. A running instance that has not been checked
// yet counts as in use.
func (i *inst) inUse() bool {
	if i.pauseAfter() == 0 {
		return false
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	switch i.rec.State {
	case power.Starting, power.Resuming:
		return true
	case power.Running:
		v := &i.seen.verdict
		return v.At.Before(i.rec.LastResumedAt) ||
			slices.ContainsFunc(v.Blocks, func(b idle.Block) bool { return b.Code != NeededBy && b.Code != GroupInUse })
	}
	return false
}

// fromOutside reports whether the reason of a wake is that a client needs the instance,
// and with it its group. That is not so if a connection has ended, as those of a member
// do when lull stops it, if such a member announces that first, or if a dependent wakes:
// a dependent wakes its own group.
func fromOutside(reason string) bool {
	return !sockets.Ended(reason) && !strings.HasPrefix(reason, instance.WithinGroup) && !strings.HasSuffix(reason, dependentSaying)
}

// wakeGroup wakes the other members of i's group if a timer, or a client from outside
// the group, has woken i. It does not block.
func (i *inst) wakeGroup(by, reason string) {
	g := i.spec().Group
	if g == "" || by != byTimer && (by != byConnection || !fromOutside(reason)) {
		return
	}
	why := fmt.Sprintf("%s, of the same group %s, was woken", i.name(), g)
	for _, m := range i.h.related.group(g) {
		if m == i || m.state() == power.Running || m.pausedByOthers() {
			continue
		}
		i.h.spawn(func() {
			if err := i.h.startFor(i.h.ctx, m, byGroup, why); err != nil && !fromRoom(err) && i.h.ctx.Err() == nil && m.mayStart(byGroup) == nil {
				i.h.log.Warn("cannot wake a member of a group", "instance", m.name(), "group", g, "err", err)
			}
		})
	}
}

// RelatedOutside sets the group and the dependencies (by ID) of an instance, which
// come from the labels of its container.
func (h *Host) RelatedOutside(ctx context.Context, ref, group string, dependsOn []string) error {
	i, err := h.find(ref)
	if err != nil {
		return err
	}
	var names []string
	for _, id := range dependsOn {
		if d := h.byIDNow(id); d != nil && d != i {
			names = append(names, d.name())
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	if s := i.spec(); s.Group == group && slices.Equal(s.DependsOn, names) {
		return nil
	}
	if err := i.acquireCtx(ctx); err != nil {
		return err
	}
	defer i.release()
	s := *i.spec()
	s.Group, s.DependsOn = group, names
	if err := errors.Join(s.Validate(), h.checkDependencies(&s)); err != nil {
		return &InvalidError{err}
	}
	if err := i.save(func(r *instance.Record) { r.Spec = s }); err != nil {
		return err
	}
	h.related.drop(i)
	i.set.Store(&s)
	h.related.add(i)
	i.emit("changed", byOutside, "group, depends_on")
	return nil
}
