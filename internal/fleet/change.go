package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"lull/internal/core/failure"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/rules"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// Pool reads the pool record.
func (f *Fleet) Pool(ctx context.Context) (worker.Pool, error) {
	res, err := f.store.Commit(ctx, store.Txn{Read: []string{worker.PoolKey}})
	if err != nil {
		return worker.Pool{}, fmt.Errorf("cannot read the pool: %w", err)
	}
	return worker.DecodePool(res.Read[0])
}

// Changing configures how a worker is changed.
type Changing struct {
	By audit.Actor
	// At is the revision that the worker must have; 0 is any.
	At int64
	// Limits reads Pool and Halted for the change.
	Limits bool
	// Rules makes a change with Limits fail unless the cached rules are the newest,
	// so that it follows users' latest changes.
	Rules bool
}

// ErrStale means that a change was decided on a record that is no longer the newest.
// The caller must decide again.
var ErrStale = fmt.Errorf("the record has changed: %w", store.ErrConflict)

// Change is the only way to write a worker's record. It is a compare-and-swap: the
// transition is checked against the table of package power, and the pool, the
// instance index and the audit entries are written in the same transaction. If fn
// changes nothing, nothing is written. fn may be called several times. Errors:
// NotFound, ErrStale, power.IllegalError, those of fn and of the store.
func (f *Fleet) Change(ctx context.Context, id string, c Changing, fn func(w *worker.Worker, tx *worker.Tx) error) (worker.Worker, error) {
	if err := failure.CheckName("worker_id", id); err != nil {
		return worker.Worker{}, err
	}
	w, err := f.change(ctx, id, c, c.Limits, fn)
	if errors.Is(err, worker.ErrPool) {
		w, err = f.change(ctx, id, c, true, fn)
	}
	for try := 0; errors.Is(err, errRules) && try < 5; try++ {
		if err = f.RefreshRules(ctx); err == nil {
			w, err = f.change(ctx, id, c, true, fn)
		}
	}
	return w, err
}

func (f *Fleet) change(ctx context.Context, id string, c Changing, pooled bool, fn func(w *worker.Worker, tx *worker.Tx) error) (worker.Worker, error) {
	if !pooled {
		return f.transact(ctx, id, c, false, fn)
	}
	return f.now.poolers.do(&pooledChange{f: f, ctx: ctx, id: id, c: c, fn: fn, done: make(chan struct{})})
}

// sharedKeys are the records that a change with Limits reads besides the worker's.
// Their order is that of decodeShared.
var sharedKeys = []string{worker.PoolKey, halt.Key, rules.Mark}

// shared is the content of the sharedKeys.
type shared struct {
	pool  worker.Pool
	halt  halt.Halt
	rules int64 // store revision of the newest change of the rules
}

func decodeShared(view []store.Value) (s shared, err error) {
	if s.pool, err = worker.DecodePool(view[0]); err != nil {
		return s, err
	}
	s.rules = view[2].ModRevision
	s.halt, err = halt.Decode(view[1])
	return s, err
}

// transact makes one change in a transaction of its own.
func (f *Fleet) transact(ctx context.Context, id string, c Changing, pooled bool, fn func(w *worker.Worker, tx *worker.Tx) error) (worker.Worker, error) {
	keys := []string{worker.Key(id)}
	if pooled {
		keys = append(keys, sharedKeys...)
	}
	var made applied
	done, err := store.Transact(ctx, f.store, keys, func(view []store.Value) ([]store.Op, error) {
		var s *shared
		if pooled {
			read, err := decodeShared(view[1:])
			if err != nil {
				return nil, err
			}
			s = &read
		}
		var err error
		if made, err = f.apply(id, c, view[0], s, fn); err != nil {
			return nil, err
		}
		if made.pool != nil {
			return append(made.ops, *made.pool), nil
		}
		return made.ops, nil
	}, f.guards...)
	if err != nil {
		return worker.Worker{}, err
	}
	return made.at(done.Revision), nil
}

// applied is a change, ready to be written.
type applied struct {
	w     worker.Worker
	wrote bool // ops write the worker's record
	ops   []store.Op
	pool  *store.Op   // writes the pool; nil if the change leaves it alone
	next  worker.Pool // the pool after the change
}

// at returns the worker as it was written at a store revision.
func (a *applied) at(revision int64) worker.Worker {
	if a.wrote {
		a.w = a.w.At(revision)
	}
	return a.w
}

// apply computes the writes of one attempt to change a worker. s is nil if the change
// does not read the pool.
func (f *Fleet) apply(id string, c Changing, was store.Value, s *shared, fn func(w *worker.Worker, tx *worker.Tx) error) (applied, error) {
	if !was.Exists() {
		return applied{}, &failure.NotFound{Kind: "worker", Name: id}
	}
	old, err := worker.Decode(was)
	if err != nil {
		return applied{}, err
	}
	if c.At != 0 && old.Revision() != c.At {
		return applied{}, ErrStale
	}
	tx := worker.NewTx(time.Now().UTC().Round(0), f.Settings(), c.By)
	if s != nil {
		tx.Limit(s.pool, s.halt.AsOf(tx.Now).On)
		if c.Rules && s.rules > f.RulesAt() {
			return applied{}, errRules
		}
	}
	a := applied{w: old.Clone()}
	if err := fn(&a.w, tx); err != nil {
		return applied{}, err
	}
	if a.ops, err = tx.Writes(was.Data, &old, &a.w); err != nil {
		return applied{}, err
	}
	a.wrote = len(a.ops) > 0 && a.ops[0].Key == was.Key
	a.pool, err = tx.PoolOp(&old, &a.w)
	a.next = tx.Pool
	return a, err
}
