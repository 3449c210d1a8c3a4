package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/settings"
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
	Settings settings.Settings
	// Pool and Halted are read if the change requested them.
	Pool   Pool
	Halted bool

	by      audit.Actor
	entries []audit.Entry
	pooled  bool
	spent   bool // Pool.Spent was changed
}

// Note adds an audit entry to the change. It fills in At, By and the worker.
func (tx *Tx) Note(e audit.Entry) {
	if e.By == (audit.Actor{}) {
		e.By = tx.by
	}
	tx.entries = append(tx.entries, e)
}

// Changing configures how a worker is changed.
type Changing struct {
	By audit.Actor
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
		return f.transact(ctx, id, c, false, fn)
	}
	return f.now.poolers.do(&pooledChange{f: f, ctx: ctx, id: id, c: c, fn: fn, done: make(chan struct{})})
}

// sharedKeys are the records that a change with the pool reads beside its
// worker's, in the order of shared.
var sharedKeys = []string{poolKey, halt.Key, rulesMark}

// shared is what the sharedKeys hold.
type shared struct {
	pool  Pool
	halt  halt.Halt
	rules int64 // revision of the newest change of the rules
}

func decodeShared(view []store.Value) (s shared, err error) {
	if s.pool, err = decodePool(view[0]); err != nil {
		return s, err
	}
	s.rules = view[2].ModRevision
	s.halt, err = halt.Decode(view[1])
	return s, err
}

// transact makes one change in a transaction of its own.
func (f *Fleet) transact(ctx context.Context, id string, c Changing, pooled bool, fn func(w *Worker, tx *Tx) error) (Worker, error) {
	keys := []string{workerKey(id)}
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
		return Worker{}, err
	}
	return made.at(done.Revision), nil
}

// applied is a change as it is to be written.
type applied struct {
	w     Worker
	wrote bool // ops write the worker's record
	ops   []store.Op
	pool  *store.Op // writes the pool; nil if the change leaves it alone
	next  Pool      // the pool after the change
}

// at returns the worker as written at a revision.
func (a *applied) at(revision int64) Worker {
	if a.wrote {
		a.w.revision = revision
	}
	return a.w
}

// apply computes the writes of one attempt. s is nil for a change that does not
// read the pool.
func (f *Fleet) apply(id string, c Changing, was store.Value, s *shared, fn func(w *Worker, tx *Tx) error) (applied, error) {
	if !was.Exists() {
		return applied{}, &failure.NotFound{Kind: "worker", Name: id}
	}
	old, err := DecodeWorker(was)
	if err != nil {
		return applied{}, err
	}
	if c.At != 0 && old.revision != c.At {
		return applied{}, ErrStale
	}
	tx := &Tx{Now: time.Now().UTC().Round(0), Settings: f.Settings(), by: c.By, pooled: s != nil}
	if s != nil {
		tx.Pool, tx.Halted = s.pool, s.halt.AsOf(tx.Now).On
		if c.Rules && s.rules > f.now.rules.Load().revision {
			return applied{}, errRules
		}
	}
	a := applied{w: old.clone()}
	if err := fn(&a.w, tx); err != nil {
		return applied{}, err
	}
	if a.ops, err = f.writes(was.Data, &old, &a.w, tx); err != nil {
		return applied{}, err
	}
	a.wrote = len(a.ops) > 0 && a.ops[0].Key == was.Key
	a.pool, err = tx.limits(&old, &a.w)
	a.next = tx.Pool
	return a, err
}

// writes returns the writes that turn old, whose record is was, into w, without
// that of the pool. The worker's own comes first.
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
	for i, e := range tx.entries {
		// A nanosecond apart, so that the log keeps their order.
		at := tx.Now.Add(time.Duration(i))
		e.At, e.WorkerID, e.WorkerName, e.Region = at, w.ID, w.Name, w.AWSRegion
		note, err := audit.Ops(e)
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
		tx.Note(audit.Entry{Action: "status_changed", Detail: why})
	}
	e := &tx.entries[0]
	e.From, e.To = from, to
	e.Events = append(e.Events, audit.EventStatus)
}

// limits writes the pool if the worker went up or down, or if fn changed it.
func (tx *Tx) limits(old, w *Worker) (*store.Op, error) {
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
	op := store.Put(poolKey, data)
	return &op, err
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
