package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/store"
)

// Pool is the record of the fleet-wide limits. It changes in the same
// transaction as every worker that goes up or down, so that floor and cooldown
// apply across servers.
type Pool struct {
	// Up counts the workers that run and that are not intended to stop.
	Up              int        `json:"up"`
	LastScaleDownAt *time.Time `json:"last_scale_down_at,omitempty"`
	// Spent counts against the budgets.
	Spent policy.Ledger `json:"spent,omitempty"`
}

var poolCodec = store.Codec[Pool]{Version: 1}

func decodePool(v store.Value) (Pool, error) {
	if !v.Exists() {
		return Pool{}, nil
	}
	return poolCodec.Decode(v.Key, v.Data)
}

// Pool reads the pool record.
func (f *Fleet) Pool(ctx context.Context) (Pool, error) {
	res, err := f.store.Commit(ctx, store.Txn{Read: []string{poolKey}})
	if err != nil {
		return Pool{}, fmt.Errorf("cannot read the pool: %w", err)
	}
	return decodePool(res.Read[0])
}

// Tx is a change of one worker in progress. It may be repeated on fresh state
// until the store accepts it.
type Tx struct {
	Now      time.Time
	Settings Settings
	// Pool and Halted are read if the change requested them.
	Pool   Pool
	Halted bool

	by      Actor
	entries []Entry
	pooled  bool
	spent   bool // Pool.Spent was changed
}

// Note adds an audit entry to the change. It fills in At, By and the worker.
func (tx *Tx) Note(e Entry) {
	if e.By == (Actor{}) {
		e.By = tx.by
	}
	tx.entries = append(tx.entries, e)
}

// Changing configures how a worker is changed.
type Changing struct {
	By Actor
	// At is the revision that the worker must have; 0 is any.
	At int64
	// Limits reads Pool and Halted for the change.
	Limits bool
	// Rules ensures, with Limits, that the rules are the newest, so that the
	// decision follows users' latest changes.
	Rules bool
}

// errPool requests the same change with the pool in its transaction.
var errPool = errors.New("the pool is needed")

// errContended requests the same change with the pool held by this process.
var errContended = errors.New("the pool was changed meanwhile")

// ErrStale is a change that was decided on a record that is no longer the
// newest. Decide again.
var ErrStale = fmt.Errorf("the record has changed: %w", store.ErrConflict)

// Change is the only way to write a worker's record. It is a compare-and-swap:
// the transition is checked against the table of package power, and the pool,
// the instance index and the audit entries are in the same transaction. A
// change without effect writes nothing. Errors: NotFound, ErrStale,
// power.IllegalError, those of fn and of the store.
func (f *Fleet) Change(ctx context.Context, id string, c Changing, fn func(w *Worker, tx *Tx) error) (Worker, error) {
	if err := failure.CheckName("worker_id", id); err != nil {
		return Worker{}, err
	}
	w, err := f.change(ctx, id, c, c.Limits, fn)
	if errors.Is(err, errPool) {
		w, err = f.change(ctx, id, c, true, fn)
	}
	for try := 0; errors.Is(err, errRules) && try < 5; try++ {
		if err = f.RefreshRules(ctx); err == nil {
			w, err = f.change(ctx, id, c, true, fn)
		}
	}
	return w, err
}

func (f *Fleet) change(ctx context.Context, id string, c Changing, pooled bool, fn func(w *Worker, tx *Tx) error) (Worker, error) {
	if !pooled {
		return f.transact(ctx, id, c, false, false, fn)
	}
	w, err := f.transact(ctx, id, c, true, true, fn)
	if !errors.Is(err, errContended) {
		return w, err
	}
	// A thousand workers that are paused at the same moment all write the pool:
	// in this process they take turns, instead of using up the store by losing
	// to each other.
	select {
	case f.now.pooled <- struct{}{}:
		defer func() { <-f.now.pooled }()
	case <-ctx.Done():
		return Worker{}, fmt.Errorf("change worker %q: %w", id, context.Cause(ctx))
	}
	return f.transact(ctx, id, c, true, false, fn)
}

// transact makes a change. With once it fails with errContended if another writer changed
// one of its records meanwhile.
func (f *Fleet) transact(ctx context.Context, id string, c Changing, pooled, once bool, fn func(w *Worker, tx *Tx) error) (Worker, error) {
	keys := []string{workerKey(id)}
	if pooled {
		keys = append(keys, poolKey, haltKey, rulesMark)
	}
	var made Worker
	var wrote, tried bool
	done, err := store.Transact(ctx, f.store, keys, func(view []store.Value) ([]store.Op, error) {
		if once && tried {
			return nil, errContended
		}
		tried = true
		ops, w, err := f.apply(id, c, view, pooled, fn)
		made = w
		wrote = len(ops) > 0 && ops[0].Key == keys[0]
		return ops, err
	}, f.guards...)
	if err != nil {
		return Worker{}, err
	}
	if wrote {
		made.revision = done.Revision
	}
	return made, nil
}

// apply computes the writes of one attempt.
func (f *Fleet) apply(id string, c Changing, view []store.Value, pooled bool, fn func(w *Worker, tx *Tx) error) ([]store.Op, Worker, error) {
	if !view[0].Exists() {
		return nil, Worker{}, &failure.NotFound{Kind: "worker", Name: id}
	}
	old, err := DecodeWorker(view[0])
	if err != nil {
		return nil, Worker{}, err
	}
	if c.At != 0 && old.revision != c.At {
		return nil, Worker{}, ErrStale
	}
	tx := &Tx{Now: time.Now().UTC().Round(0), Settings: f.Settings(), by: c.By, pooled: pooled}
	if pooled {
		if tx.Pool, err = decodePool(view[1]); err != nil {
			return nil, Worker{}, err
		}
		h, err := decodeHalt(view[2])
		if err != nil {
			return nil, Worker{}, err
		}
		tx.Halted = h.at(tx.Now).On
		if c.Rules && view[3].ModRevision > f.now.rules.Load().revision {
			return nil, Worker{}, errRules
		}
	}
	w := old.clone()
	if err := fn(&w, tx); err != nil {
		return nil, Worker{}, err
	}
	ops, err := f.writes(view[0].Data, &old, &w, tx)
	return ops, w, err
}

// writes returns the writes that turn old, whose record is was, into w. The
// worker's own comes first.
func (f *Fleet) writes(was []byte, old, w *Worker, tx *Tx) ([]store.Op, error) {
	if old.Status != w.Status {
		if err := power.WorkerTable.Check(old.Status, w.Status); err != nil {
			return nil, fmt.Errorf("cannot change worker %q: %w", w.ID, err)
		}
		w.StatusSince = tx.Now
		tx.moved(old.Status, w.Status, w.StatusReason)
	}
	data, err := workerCodec.Encode(workerKey(w.ID), *w)
	if err != nil {
		return nil, err
	}
	var ops []store.Op
	if string(was) != string(data) {
		ops = append(ops, store.Put(workerKey(w.ID), data))
	}
	if w.EC2InstanceID != old.EC2InstanceID && w.EC2InstanceID != "" {
		op, err := indexOp(w)
		if err != nil {
			return nil, err
		}
		ops = append(ops, op)
	}
	more, err := tx.limits(old, w)
	if err != nil {
		return nil, err
	}
	ops = append(ops, more...)
	for i, e := range tx.entries {
		// A nanosecond apart, so that the log keeps their order.
		at := tx.Now.Add(time.Duration(i))
		e.At, e.WorkerID, e.WorkerName, e.Region = at, w.ID, w.Name, w.AWSRegion
		note, err := entryOps(e)
		if err != nil {
			return nil, err
		}
		ops = append(ops, note...)
	}
	return ops, nil
}

// moved adds a change of status to the change's audit entries.
func (tx *Tx) moved(from, to power.Worker, why string) {
	if len(tx.entries) == 0 {
		tx.Note(Entry{Action: "status_changed", Detail: why})
	}
	e := &tx.entries[0]
	e.From, e.To = from, to
	e.Events = append(e.Events, EventStatus)
}

// limits writes the pool if the worker went up or down, or if fn changed it.
func (tx *Tx) limits(old, w *Worker) ([]store.Op, error) {
	delta := 0
	switch before, after := old.Counted(), w.Counted(); {
	case before && !after:
		delta = -1
	case !before && after:
		delta = 1
	}
	if delta == 0 && !tx.scaled() && !tx.spent {
		return nil, nil
	}
	if !tx.pooled {
		return nil, errPool
	}
	tx.Pool.Up = max(0, tx.Pool.Up+delta)
	data, err := poolCodec.Encode(poolKey, tx.Pool)
	return []store.Op{store.Put(poolKey, data)}, err
}

// scaled reports whether the change starts the cooldown.
func (tx *Tx) scaled() bool {
	return tx.Pool.LastScaleDownAt != nil && tx.Pool.LastScaleDownAt.Equal(tx.Now)
}

// instanceRef records the owner of an instance, so that none is imported twice.
type instanceRef struct {
	Worker string `json:"worker"`
}

var instanceCodec = store.Codec[instanceRef]{Version: 1}

func instanceKey(region, instance string) string { return "instances/" + region + "/" + instance }

func indexOp(w *Worker) (store.Op, error) {
	key := instanceKey(w.AWSRegion, w.EC2InstanceID)
	data, err := instanceCodec.Encode(key, instanceRef{Worker: w.ID})
	return store.Put(key, data), err
}
