package host

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
)

// An instance that depends on others (Spec.DependsOn) wakes them before itself, and
// keeps them awake: they sleep only after it. A dependency that cannot run, because
// a user stopped it or its start fails, does not delay clients: the dependent wakes
// without it.

// byDependent is the actor of a wake of a dependency by its dependent.
const byDependent = "dependent"

// NeededBy is the code of the block on an instance while a dependent is awake.
const NeededBy idle.Code = "needed_by"

// related maps each instance's name to its dependents, and each group's name to its
// members. No other lock is taken while mu is held.
type related struct {
	mu      sync.Mutex
	needing map[string][]*inst
	members map[string][]*inst
}

func (d *related) add(i *inst) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.needing == nil {
		d.needing, d.members = map[string][]*inst{}, map[string][]*inst{}
	}
	for _, name := range i.spec().DependsOn {
		d.needing[name] = append(d.needing[name], i)
	}
	if g := i.spec().Group; g != "" {
		d.members[g] = append(d.members[g], i)
	}
}

func (d *related) drop(i *inst) {
	d.mu.Lock()
	defer d.mu.Unlock()
	without := func(of map[string][]*inst, key string) {
		if of[key] = slices.DeleteFunc(slices.Clone(of[key]), func(o *inst) bool { return o == i }); len(of[key]) == 0 {
			delete(of, key)
		}
	}
	for _, name := range i.spec().DependsOn {
		without(d.needing, name)
	}
	without(d.members, i.spec().Group)
}

// group returns the members of a group.
func (d *related) group(name string) []*inst {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.members[name])
}

// awake returns the name of a dependent of name that is awake, or "".
func (d *related) awake(name string) string {
	d.mu.Lock()
	all := slices.Clone(d.needing[name])
	d.mu.Unlock()
	for _, i := range all {
		if s := i.state(); !s.Asleep() && s != power.Stopped {
			return i.name()
		}
	}
	return ""
}

// neededBlock returns a block of the idle pause while a dependent is awake, or nil.
func (i *inst) neededBlock() *idle.Block {
	name := i.h.related.awake(i.name())
	if name == "" {
		return nil
	}
	return &idle.Block{Code: NeededBy, Holder: name, Sentence: fmt.Sprintf("%s, which depends on it, is awake.", name)}
}

// checkDependencies returns an error if a new instance cannot have the dependencies
// in s.
func (h *Host) checkDependencies(s *instance.Spec) error {
	bad := func(format string, args ...any) error {
		return &InvalidError{fmt.Errorf("cannot use depends_on: %s", fmt.Sprintf(format, args...))}
	}
	seen := map[string]bool{}
	var circle func(name string) bool
	circle = func(name string) bool {
		if name == s.Name {
			return true
		}
		d, err := h.find(name)
		if err != nil || seen[name] {
			return false
		}
		seen[name] = true
		return slices.ContainsFunc(d.spec().DependsOn, circle)
	}
	for _, name := range s.DependsOn {
		if name == s.Name {
			return bad("%s cannot depend on itself", name)
		}
		h.mu.Lock()
		absent := h.absent[name] != nil
		h.mu.Unlock()
		if _, err := h.find(name); err != nil && !absent {
			return bad("there is no instance %s", name)
		}
		if circle(name) {
			return bad("%s depends on %s, directly or through others", name, s.Name)
		}
	}
	return nil
}

// sleepingDependencies returns the dependencies of i that do not run. It leaves out
// those paused outside lull, which stay paused.
func (i *inst) sleepingDependencies() (out []*inst) {
	for _, name := range i.spec().DependsOn {
		if d, err := i.h.find(name); err == nil && d != i && d.state() != power.Running && !d.pausedByOthers() {
			out = append(out, d)
		}
	}
	return out
}

// rouse requests a wake of every dependency that sleeps in memory, and returns true
// if all of them now run. It does not block and needs no lock. A frozen program is
// thawed before rouse returns, unless another operation on its instance is in
// progress.
func (i *inst) rouse() bool {
	all := true
	for _, d := range i.sleepingDependencies() {
		if s := d.state(); s == power.Paused || s == power.Pausing {
			d.wantWake(i.dependentWakes())
		}
		all = all && d.state() == power.Running
	}
	return all
}

func (i *inst) dependentWakes() string { return i.name() + dependentSaying }

// dependentSaying is the end of the reason of a wake by a dependent.
const dependentSaying = ", which depends on it, wakes"

// waking is the context key for the instances that are already being woken in a
// chain of dependencies. It ends circles.
type waking struct{}

// wakeDependencies wakes or starts the dependencies of i. It returns once each runs
// or has failed to. The caller must not hold i.lock.
func (h *Host) wakeDependencies(ctx context.Context, i *inst) {
	if len(i.spec().DependsOn) == 0 || i.rouse() {
		return
	}
	chain, _ := ctx.Value(waking{}).([]*inst)
	chain = append(slices.Clip(chain), i)
	ctx = context.WithValue(ctx, waking{}, chain)
	var wg sync.WaitGroup
	for _, d := range i.sleepingDependencies() {
		if slices.Contains(chain, d) {
			continue
		}
		wg.Go(func() {
			if err := h.startFor(ctx, d, byDependent, i.dependentWakes()); err != nil && !fromRoom(err) && ctx.Err() == nil {
				h.log.Warn("cannot wake a dependency", "instance", i.name(), "dependency", d.name(), "err", err)
			}
		})
	}
	wg.Wait()
}

// wakeAfterDependencies wakes i for a connection, in the background, once its
// dependencies run. It returns false if none has to be waited for.
func (i *inst) wakeAfterDependencies(why string) bool {
	if len(i.spec().DependsOn) == 0 || i.rouse() {
		return false
	}
	if i.loops.awaiting.CompareAndSwap(false, true) {
		i.h.spawn(func() {
			i.h.wakeDependencies(i.h.ctx, i)
			if i.h.ctx.Err() != nil {
				return
			}
			i.acquire()
			defer i.release()
			i.loops.awaiting.Store(false) // cleared while the lock is held: requests that come later are served at its release
			i.wakeFor(why)
		})
	}
	return true
}
