package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// Limits of changes that are combined in one transaction.
const (
	// togetherMost is the largest number of workers changed in one transaction.
	togetherMost = 16
	// togetherWithin bounds the transaction, which no caller's context ends.
	togetherWithin = 10 * time.Second
)

// poolers serializes the changes of one process that write the pool, because all of
// them write the same record: if a thousand workers were paused at once, each change
// would lose the race to hundreds of others.
//
// Changes based on a known revision of their worker are combined. One transaction
// applies them one after the other, each to the pool that the previous one left, so
// floor, cooldown and budgets hold as if each had its own transaction.
type poolers struct {
	mu      sync.Mutex
	busy    bool
	waiting []*pooledChange
}

// pooledChange is a change that waits in a poolers.
type pooledChange struct {
	f    *Fleet
	ctx  context.Context
	id   string
	c    Changing
	fn   func(w *worker.Worker, tx *worker.Tx) error
	done chan struct{}

	applied applied
	w       worker.Worker
	err     error
}

// joins reports whether x may be combined with other changes. A change for any
// revision may not: if the outcome of the transaction were unknown, a repeated
// attempt would be applied a second time.
func (x *pooledChange) joins() bool { return x.c.At != 0 }

// do queues a change and waits until it is made. If x.ctx ends before the change has
// begun, it is dropped.
func (p *poolers) do(x *pooledChange) (worker.Worker, error) {
	p.mu.Lock()
	behind := len(p.waiting)
	if !x.joins() { // changes by users go before combined changes
		behind = slices.IndexFunc(p.waiting, (*pooledChange).joins)
		if behind < 0 {
			behind = len(p.waiting)
		}
	}
	p.waiting = slices.Insert(p.waiting, behind, x)
	if !p.busy {
		p.busy = true
		go p.run()
	}
	p.mu.Unlock()
	select {
	case <-x.done:
		return x.w, x.err
	case <-x.ctx.Done():
	}
	p.mu.Lock()
	if i := slices.Index(p.waiting, x); i >= 0 {
		p.waiting = slices.Delete(p.waiting, i, i+1)
		p.mu.Unlock()
		return worker.Worker{}, fmt.Errorf("change worker %q: %w", x.id, context.Cause(x.ctx))
	}
	p.mu.Unlock()
	<-x.done
	return x.w, x.err
}

// run makes changes until none are queued.
func (p *poolers) run() {
	for {
		part := p.take()
		if len(part) == 0 {
			return
		}
		if len(part) == 1 {
			part[0].alone(part[0].ctx)
		} else {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(part[0].ctx), togetherWithin)
			together(ctx, part)
			cancel()
		}
		for _, x := range part {
			close(x.done)
		}
	}
}

// take removes and returns the changes to make next: the first one, with others that
// may be combined with it. If none are queued, it marks p as idle.
func (p *poolers) take() []*pooledChange {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	ids := map[string]bool{}
	for _, x := range p.waiting {
		if n == togetherMost || n > 0 && !(x.joins() && p.waiting[0].joins()) || ids[x.id] {
			break
		}
		ids[x.id] = true
		n++
	}
	part := slices.Clone(p.waiting[:n])
	p.waiting = slices.Delete(p.waiting, 0, n)
	p.busy = n > 0
	return part
}

func (x *pooledChange) alone(ctx context.Context) {
	x.w, x.err = x.f.transact(ctx, x.id, x.c, true, x.fn)
}

// together makes changes of different workers in one transaction. It splits the
// changes in two if that is too large, and makes each alone if a guard of one of them
// does not hold.
func together(ctx context.Context, part []*pooledChange) {
	keys := slices.Clone(sharedKeys)
	var guards []store.Cond
	for _, x := range part {
		keys = append(keys, worker.Key(x.id))
		for _, g := range x.f.guards {
			if !slices.Contains(guards, g) {
				guards = append(guards, g)
			}
		}
	}
	done, err := store.Transact(ctx, part[0].f.store, keys, func(view []store.Value) ([]store.Op, error) {
		s, err := decodeShared(view)
		if err != nil {
			return nil, err
		}
		var ops []store.Op
		var pool *store.Op
		for i, x := range part {
			x.applied, x.err = x.f.apply(x.id, x.c, view[len(sharedKeys)+i], &s, x.fn)
			if x.err != nil {
				continue
			}
			ops = append(ops, x.applied.ops...)
			if x.applied.pool != nil {
				pool, s.pool = x.applied.pool, x.applied.next
			}
		}
		if pool != nil {
			ops = append(ops, *pool)
		}
		return ops, nil
	}, guards...)
	switch {
	case errors.Is(err, store.ErrTooLarge) && len(part) > 1:
		together(ctx, part[:len(part)/2])
		together(ctx, part[len(part)/2:])
		return
	case errors.Is(err, store.ErrLeaseLost) && len(part) > 1:
		for _, x := range part {
			x.alone(ctx)
		}
		return
	}
	for _, x := range part {
		switch {
		case err != nil:
			x.err = err
		case x.err == nil:
			x.w = x.applied.at(done.Revision)
		}
	}
}
