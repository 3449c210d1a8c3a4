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

// An instance that depends on others (Spec.DependsOn) wakes them before itself,
// and keeps them awake while it is awake: they sleep after it. A dependency that
// may not be started, such as one that a user stopped, or that fails to start,
// keeps no client of the dependent waiting: that wakes without it.

// byDependent is the actor when an instance is woken because one that depends on
// it wakes.
const byDependent = "dependent"

// NeededBy is the code of the block on an instance while one that depends on it
// is awake.
const NeededBy idle.Code = "needed_by"

// related finds instances by what their settings name: those that depend on an
// instance, by its name, and the members of a group, by the group's. No other lock
// is taken under mu.
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

// awake returns the name of one that depends on name and is awake; empty for none.
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

// neededBlock blocks the idle pause of an instance while one that depends on it
// is awake; nil otherwise.
func (i *inst) neededBlock() *idle.Block {
	name := i.h.related.awake(i.name())
	if name == "" {
		return nil
	}
	return &idle.Block{Code: NeededBy, Holder: name, Sentence: fmt.Sprintf("%s, which depends on it, is awake.", name)}
}

// checkDependencies returns what is wrong with the dependencies of a new instance.
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

// sleepingDependencies are the instances that i depends on and that do not run,
// except those that were paused outside lull, which stay paused.
func (i *inst) sleepingDependencies() (out []*inst) {
	for _, name := range i.spec().DependsOn {
		if d, err := i.h.find(name); err == nil && d != i && d.state() != power.Running && !d.pausedByOthers() {
			out = append(out, d)
		}
	}
	return out
}

// rouse asks for the wake of every dependency that sleeps in memory, and returns
// whether all of them run then. It does not block, and needs no lock: the thaw of
// a frozen program is done by the time it returns, unless something else holds
// that instance.
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

func (i *inst) dependentWakes() string {
	return fmt.Sprintf("%s, which depends on it, wakes", i.name())
}

// waking are the instances that are being woken for one another, from the first
// one on: a circle ends at one that is among them.
type waking struct{}

// wakeDependencies wakes or starts what i depends on, and returns once all of it
// runs, or failed to. The caller does not hold the lock of i.
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
				h.log.Warn("a dependency does not run", "instance", i.name(), "dependency", d.name(), "err", err)
			}
		})
	}
	wg.Wait()
}

// wakeAfterDependencies wakes i for a connection once what it depends on runs. It
// returns at once, and false if nothing is to be waited for.
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
			i.loops.awaiting.Store(false) // under the lock: later requests are served when it is released
			i.wakeFor(why)
		})
	}
	return true
}
