package worker

import (
	"errors"
	"fmt"
	"time"

	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/settings"
	"lull/internal/store"
)

// Pool is the record of the fleet-wide limits. Every transaction in which a worker
// goes up or down also writes the Pool, so that floor and cooldown apply across
// servers.
type Pool struct {
	// Up is the number of workers that run and are not intended to stop.
	Up              int        `json:"up"`
	LastScaleDownAt *time.Time `json:"last_scale_down_at,omitempty"`
	// Spent is the used part of each budget.
	Spent policy.Ledger `json:"spent,omitempty"`
}

var poolCodec = store.Codec[Pool]{Version: 1}

func DecodePool(v store.Value) (Pool, error) {
	if !v.Exists() {
		return Pool{}, nil
	}
	return poolCodec.Decode(v.Key, v.Data)
}

// Tx is a change of one worker in progress. It is repeated on fresh state until the
// store accepts it.
type Tx struct {
	Now      time.Time
	Settings settings.Settings
	// Pool and Halted are read if the change requested them.
	Pool   Pool
	Halted bool

	By      audit.Actor
	entries []audit.Entry
	pooled  bool
	spent   bool // Pool.Spent was changed
}

// NewTx returns a change of a worker by an actor.
func NewTx(now time.Time, s settings.Settings, by audit.Actor) *Tx {
	return &Tx{Now: now, Settings: s, By: by}
}

// Limit gives the change the pool and whether automatic actions are halted.
func (tx *Tx) Limit(p Pool, halted bool) { tx.Pool, tx.Halted, tx.pooled = p, halted, true }

// Spend replaces the amounts spent of the budgets in the pool.
func (tx *Tx) Spend(l policy.Ledger) { tx.Pool.Spent, tx.spent = l, true }

// Note adds an audit entry to the change. It fills in At, By and the worker.
func (tx *Tx) Note(e audit.Entry) {
	if e.By == (audit.Actor{}) {
		e.By = tx.By
	}
	tx.entries = append(tx.entries, e)
}

// ErrPool requests that the change is repeated with the pool in its transaction.
var ErrPool = errors.New("the pool is needed")

// Writes returns the writes that turn old, whose stored data is was, into w. The
// worker's own write comes first. The write of the pool is not included.
func (tx *Tx) Writes(was []byte, old, w *Worker) ([]store.Op, error) {
	if old.Status != w.Status {
		if err := power.WorkerTable.Check(old.Status, w.Status); err != nil {
			return nil, fmt.Errorf("cannot change worker %q: %w", w.ID, err)
		}
		w.StatusSince = tx.Now
		tx.moved(old.Status, w.Status, w.StatusReason)
	}
	data, err := w.Encode()
	if err != nil {
		return nil, err
	}
	var ops []store.Op
	if string(was) != string(data) {
		ops = append(ops, store.Put(Key(w.ID), data))
	}
	if w.EC2InstanceID != old.EC2InstanceID && w.EC2InstanceID != "" {
		op, err := InstanceOp(w)
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

// moved adds an audit entry for a change of status.
func (tx *Tx) moved(from, to power.Worker, why string) {
	if len(tx.entries) == 0 {
		tx.Note(audit.Entry{Action: "status_changed", Detail: why})
	}
	e := &tx.entries[0]
	e.From, e.To = from, to
	e.Events = append(e.Events, audit.EventStatus)
}

// PoolOp returns the write of the pool, or nil if it is unchanged: the worker neither
// went up nor down, and fn did not change the pool.
func (tx *Tx) PoolOp(old, w *Worker) (*store.Op, error) {
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
		return nil, ErrPool
	}
	tx.Pool.Up = max(0, tx.Pool.Up+delta)
	data, err := poolCodec.Encode(PoolKey, tx.Pool)
	op := store.Put(PoolKey, data)
	return &op, err
}

// scaled reports whether the change starts a cooldown.
func (tx *Tx) scaled() bool {
	return tx.Pool.LastScaleDownAt != nil && tx.Pool.LastScaleDownAt.Equal(tx.Now)
}

// instanceRef records which worker an instance belongs to, so that no instance is
// imported twice.
type instanceRef struct {
	Worker string `json:"worker"`
}

var instanceCodec = store.Codec[instanceRef]{Version: 1}

func InstanceKey(region, instance string) string { return "instances/" + region + "/" + instance }

// InstanceOwner returns the worker's ID from an instanceRef.
func InstanceOwner(v store.Value) (string, error) {
	ref, err := instanceCodec.Decode(v.Key, v.Data)
	return ref.Worker, err
}

func InstanceOp(w *Worker) (store.Op, error) {
	key := InstanceKey(w.AWSRegion, w.EC2InstanceID)
	data, err := instanceCodec.Encode(key, instanceRef{Worker: w.ID})
	return store.Put(key, data), err
}
